"""Training operators that are one or two arithmetic nodes: sums, scales, quotients, identities.

Sources: orttraining/orttraining/core/graph/training_op_defs.cc, training_ops/cpu/math/scale.cc,
training_ops/cpu/nn/broadcast_grad_args.cc and training_ops/cpu/op_gradients.cc of ONNX Runtime 1.19.
"""

from __future__ import annotations

from onnx import TensorProto

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value


def reduce_sum_training(e: Emitter) -> list[Value]:
    """ReduceSum with the axes as an input."""
    x, axes = e.inputs(2)
    e.needs_opset(13, "ReduceSum with the axes as an input")
    keep, empty = e.attribute("keepdims", 1), e.attribute("noop_with_empty_axes", 0)
    return [e.op("ReduceSum", x, axes, keepdims=keep, noop_with_empty_axes=empty)]


def scale(e: Emitter) -> list[Value]:
    """X * s, or X / s with scale_down; s is a scalar of a type of its own."""
    x, by = e.inputs(2)
    factor = e.cast(by, e.elem(x))
    return [e.op("Div" if e.attribute("scale_down", 0) else "Mul", x, factor)]


def pass_through(e: Emitter) -> list[Value]:
    """The inputs as they are."""
    return list(e.node.input)


def group(e: Emitter) -> list[Value]:
    """True, whatever the inputs."""
    return [e.array(True, int(TensorProto.BOOL))]


def zero_gradient(e: Emitter) -> list[Value]:
    """Zeros in the shape of input 0 (the other input only orders)."""
    x = e.inputs(1)[0]
    return [e.zeros(e.dims_of(x), e.elem(x))]


def broadcast_gradient_args(e: Emitter) -> list[Value]:
    """For two shapes, the axes over which the gradient of each is summed after broadcasting.

    Shapes are filled up on the left with -1. An axis is summed for a where a is filled up, or where a is 1 and b is
    there and is not 1; for b likewise.
    """
    shapes = e.inputs(2)
    ranks = [e.op("Size", s) for s in shapes]
    rank = e.op("Max", *ranks)
    full = []
    for shape, own in zip(shapes, ranks, strict=True):
        missing = e.op("Reshape", e.op("Sub", rank, own), e.array([1]))
        filler = e.op("Expand", e.array([-1]), missing)
        full.append(e.op("Concat", filler, shape, axis=0))
    return [_summed_axes(e, full[0], full[1]), _summed_axes(e, full[1], full[0])]


def _summed_axes(e: Emitter, own: Value, other: Value) -> Value:
    missing = e.op("Equal", own, e.array(-1))
    other_wider = e.op("Not", e.op("Equal", e.op("Abs", other), e.array(1)))
    stretched = e.op("And", e.op("Equal", own, e.array(1)), other_wider)
    return e.op("Reshape", e.op("NonZero", e.op("Or", missing, stretched)), e.array([-1]))


def div_grad(e: Emitter) -> list[Value]:
    """dA = dY / B and dB = -dY * A / B^2, each summed over the axes along which it was broadcast."""
    dy, a, b = e.inputs(3)
    da = e.op("Div", dy, b)
    db = e.op("Neg", e.op("Div", e.op("Mul", da, a), b))
    return [_unbroadcast(e, da, a, dy), _unbroadcast(e, db, b, dy)]


def _unbroadcast(e: Emitter, gradient: Value, target: Value, dy: Value) -> Value:
    """`gradient`, of the shape of `dy`, summed to the shape of `target`; an unnamed dim must be equal in both."""
    shape, wide = e.shape(target), e.shape(dy)
    ahead = len(wide) - len(shape)
    for dim, full in zip(shape, wide[ahead:], strict=True):
        if dim != 1 and dim != full and not (isinstance(dim, int) and isinstance(full, int)):
            raise e.error(f"broadcasts '{target}' along a dim that is not known")
    axes = [i for i in range(len(wide)) if i < ahead or (shape[i - ahead] == 1 and wide[i] != 1)]
    summed = e.total(gradient, axes, True)
    return e.reshape_like(summed, target) if ahead else summed
