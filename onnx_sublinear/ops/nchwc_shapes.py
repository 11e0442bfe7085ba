"""Output shapes of the operators that the runtime puts in at level all: blocked channels (domain com.microsoft.nchwc).

A blocked tensor has the dims of its NCHW form with the channels rounded up to the block. The runtime's own inference
gives these shapes wherever it knows the input's.

Source (github.com/microsoft/onnxruntime): onnxruntime/core/graph/contrib_ops/nchwc_schema_defs.cc,
onnxruntime/core/optimizer/nchwc_transformer.cc.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx_sublinear.ops.contrib_shapes import fused_conv, window_dims
from onnx_sublinear.ops.shape_arithmetic import Call, Rule, Types
from onnx_sublinear.ops.tensor_types import Dim, TensorType

__all__ = ["NCHWC_DOMAIN", "NCHWC_RULES"]

NCHWC_DOMAIN = "com.microsoft.nchwc"
_BLOCK = 8  # with AVX-512 it is 16; pools are blocked only where no rounding is needed


def _reorder_input(call: Call) -> Types:
    shape = call.shape(0)
    if shape is None or len(shape) < 2:
        return [TensorType(call.elem(0), None)]
    last = bool(call.attributes().get("channels_last", 0))
    channels, spatial = (shape[-1], shape[1:-1]) if last else (shape[1], shape[2:])
    blocked = -(-channels // _BLOCK) * _BLOCK if isinstance(channels, int) else None
    return [TensorType(call.elem(0), (shape[0], blocked, *spatial))]


def _reorder_output(call: Call) -> Types:
    shape, a = call.shape(0), call.attributes()
    if shape is None or len(shape) < 2:
        return [TensorType(call.elem(0), None)]
    channels: Dim = a.get("channels")
    dims = (*shape[2:], channels) if a.get("channels_last", 0) else (channels, *shape[2:])
    return [TensorType(call.elem(0), (shape[0], *dims))]


def _pool(call: Call) -> Types:
    shape, a = call.shape(0), call.attributes()
    if shape is None or len(shape) < 3 or "kernel_shape" not in a:
        return [TensorType(call.elem(0), None)]
    return [TensorType(call.elem(0), (*shape[:2], *window_dims(shape[2:], a["kernel_shape"], a)))]


def _global_pool(call: Call) -> Types:
    shape = call.shape(0)
    return [TensorType(call.elem(0), None if shape is None else (*shape[:2], *[1] * (len(shape) - 2)))]


def _upsample(call: Call) -> Types:
    shape, scales = call.shape(0), call.attributes().get("scales")
    if shape is None or scales is None or len(scales) != len(shape):
        return [TensorType(call.elem(0), None)]
    return [
        TensorType(
            call.elem(0), tuple(d * s if isinstance(d, int) else None for d, s in zip(shape, scales, strict=True))
        )
    ]


NCHWC_RULES: Mapping[str, Rule] = {
    "ReorderInput": _reorder_input,
    "ReorderOutput": _reorder_output,
    "Conv": fused_conv,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalMaxPool": _global_pool,
    "GlobalAveragePool": _global_pool,
    "Upsample": _upsample,
}
