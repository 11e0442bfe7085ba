"""Gradient accumulators as plain outputs.

onnxruntime-training adds a gradient into a buffer that is an input of the graph, in place. A standard graph cannot
write an input: the buffer after the step becomes a graph output `<buffer>.updated`, which the caller feeds as the
buffer of the next step. Source: orttraining/orttraining/training_ops/cpu/optimizer/gradient_control.cc of ONNX Runtime
1.19.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value

_BOOL = int(TensorProto.BOOL)


def in_place_accumulator_v2(e: Emitter) -> list[Value]:
    """(True, sum) of (buffer, gradient, overwrite flag): sum = gradient where the flag is set, else buffer + gradient.

    The sum is output 1. Where the node leaves that out, it becomes the graph output `<buffer>.updated`; what the buffer
    holds does not matter where the flag is set, NaN included, as in the kernel.
    """
    buffer, gradient = e.inputs(2)
    overwrite = e.input(2)
    total = e.op("Add", buffer, gradient)
    if overwrite is not None:
        flag = e.op("Reshape", overwrite, e.array([], int(TensorProto.INT64)))
        total = e.op("Where", flag, gradient, total)
    if not e.wants(1):
        e.extra_output(f"{buffer}.updated", total, buffer)
    return [_true(e), total]


def in_place_accumulator(e: Emitter) -> list[Value]:
    """buffer + gradient; the buffer as it is where input 2 is there and false."""
    buffer, gradient = e.inputs(2)
    update = e.input(2)
    total = e.op("Add", buffer, gradient)
    if update is None:
        return [total]
    return [e.op("Where", e.op("Reshape", update, e.array([])), total, buffer)]


def _true(e: Emitter) -> Value:
    """True in the shape that the schema says for output 0, [1]; the kernel itself makes a scalar."""
    declared = e.known_shape(e.node.output[0]) or ()
    return e.array(np.ones(declared, dtype=bool), _BOOL)
