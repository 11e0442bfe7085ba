"""Gradients of pooling.

Sources: orttraining/orttraining/training_ops/cpu/nn/pool_gradient_op.cc of ONNX Runtime 1.19; the ONNX operators
MaxPool and AveragePool.
"""

from __future__ import annotations

import math

from onnx_sublinear.passes.lower_training_ops.convolution import spread, window
from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value


def max_pool_grad(e: Emitter) -> list[Value]:
    """dX[i] = sum of dY where Indices is i; the indices count the elements of X in row-major order."""
    dy, indices = e.inputs(2)
    maker = e.maker_of(indices)
    if maker is not None and any(a.name == "storage_order" and a.i for a in maker.attribute):
        raise e.error("has indices in column-major order (storage_order = 1)")
    shape = _pooled_shape(e, None if maker is None or maker.op_type != "MaxPool" else maker.input[0])
    flat = e.array([-1])
    zeros = e.zeros(e.op("ReduceProd", shape, keepdims=1), e.elem(dy))
    filled = e.scatter_add("ScatterElements", zeros, e.op("Reshape", indices, flat), e.op("Reshape", dy, flat), axis=0)
    return [e.op("Reshape", filled, shape)]


def _pooled_shape(e: Emitter, x: Value | None) -> Value:
    """The shape of what was pooled, as a tensor."""
    known = e.known_shape(e.node.output[0])
    if known is not None:
        return e.array(list(known))
    if x is None:
        raise e.error("has a result whose shape is not known, and indices that no MaxPool makes")
    return e.dims_of(x)


def average_pool_grad(e: Emitter) -> list[Value]:
    """dX[i] = sum, over the windows that cover i, of dY / n; n is the number of elements that the window averages.

    n is the kernel's size with count_include_pad, else what of the window lies inside. It comes from an AveragePool of
    ones that counts the padding: that gives n / size. The spreading is a ConvTranspose with ones, channel by channel.
    """
    dy = e.inputs(1)[0]
    out = e.node.output[0]
    size = e.shape(out)[2:]
    kernel = tuple(e.attribute("kernel_shape"))
    rank, w = len(kernel), window(e, kernel, size)
    if not all(isinstance(d, int) for d in size):
        raise e.error("has a result whose spatial dims are not known")
    shares = e.op("Div", dy, e.like(math.prod(kernel), dy))
    if not e.attribute("count_include_pad", 0) and any(w.pads):
        ones = e.op("Expand", e.like(1, dy), e.array([1, 1, *size]))
        rounding = e.attribute("ceil_mode", 0)
        inside = e.op(
            "AveragePool", ones, kernel_shape=kernel, strides=w.strides, pads=w.pads, count_include_pad=1,
            ceil_mode=rounding,
        )  # fmt: skip
        shares = e.op("Div", shares, inside)
    dims = e.dims_of(dy)
    tail = e.op("Slice", dims, e.array([2]), e.array([2 + rank]))
    columns = e.op("Reshape", shares, e.op("Concat", e.array([-1, 1]), tail, axis=0))
    weight = e.op("Expand", e.like(1, dy), e.array([1, 1, *kernel]))
    made = spread(e, columns, weight, out, w, e.shape(dy)[2:])
    head = e.op("Slice", dims, e.array([0]), e.array([2]))
    return [e.op("Reshape", made, e.op("Concat", head, e.array(list(size)), axis=0))]
