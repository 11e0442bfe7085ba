"""Gradients of Gather, GatherElements, GatherND and Slice; Concat and Split in their training forms.

Sources: orttraining/orttraining/core/graph/gradient_builder.cc and training_ops/cpu/tensor of ONNX Runtime 1.19
(slots); the gradient of picking is adding into zeros at the picked places.
"""

from __future__ import annotations

from onnx_sublinear.ops.tensor_types import Dim
from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value


def _shape_of_result(e: Emitter, given: Value) -> Value:
    """The shape of the result: a constant where it is known, else what the node was given."""
    known = e.known_shape(e.node.output[0])
    return given if known is None else e.array(list(known))


def gather_grad(e: Emitter) -> list[Value]:
    """dX = zeros with dY added at the picked slices of `axis`, of (shape of X, indices, dY)."""
    shape, indices, dy = e.inputs(3)
    picked = len(e.shape(indices))
    rank = len(e.shape(dy)) - picked + 1
    axis = e.attribute("axis", 0) % rank
    target = _shape_of_result(e, shape)
    if axis:  # the axis in front: the picked axes of dY go there, and X is made with its axes moved
        front = list(range(axis, axis + picked))
        dy = e.op("Transpose", dy, perm=[*front, *(i for i in range(rank - 1 + picked) if i not in front)])
        order = [axis, *(i for i in range(rank) if i != axis)]
        target = e.op("Gather", target, e.array(order))
    zeros = e.zeros(target, e.elem(e.inputs(3)[2]))
    made = e.scatter_add("ScatterND", zeros, e.unsqueeze(indices, [picked]), dy)
    if axis:
        made = e.op("Transpose", made, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)])
    return [made]


def gather_elements_grad(e: Emitter) -> list[Value]:
    """dX = zeros with dY added at the indices, of (dY, shape of X, indices)."""
    dy, shape, indices = e.inputs(3)
    zeros = e.zeros(_shape_of_result(e, shape), e.elem(dy))
    return [e.scatter_add("ScatterElements", zeros, indices, dy, axis=e.attribute("axis", 0))]


def gather_nd_grad(e: Emitter) -> list[Value]:
    """dX = zeros with dY added at the indices, of (shape of X, indices, dY).

    With batch dims, the position in the batch is put in front of each index.
    """
    shape, indices, dy = e.inputs(3)
    batch, rank = e.attribute("batch_dims", 0), len(e.shape(indices))
    target = _shape_of_result(e, shape)
    for axis in reversed(range(batch)):
        dims = e.op("Shape", indices)
        count = e.op("Gather", dims, e.array(axis))
        numbers = e.op("Range", e.array(0), count, e.array(1))
        column = e.op("Reshape", numbers, e.array([-1 if i == axis else 1 for i in range(rank)]))
        places = e.op("Concat", e.op("Slice", dims, e.array([0]), e.array([rank - 1])), e.array([1]), axis=0)
        indices = e.op("Concat", e.op("Expand", column, places), indices, axis=-1)
    return [e.scatter_add("ScatterND", e.zeros(target, e.elem(dy)), indices, dy)]


def slice_grad(e: Emitter) -> list[Value]:
    """dX = dY with zeros around it, of (dY, shape of X, starts, ends, axes, steps).

    Where starts, axes and sizes are in the file and all steps are 1, that is a Pad; else dY is scattered to the places
    that the same Slice picks from the numbers of the elements of X.
    """
    dy, shape, starts, ends = e.inputs(4)
    pads = _constant_pads(e, dy)
    if pads is not None:
        return [e.op("Pad", dy, e.array(pads))] if any(pads) else [dy]
    target = _shape_of_result(e, shape)
    count = e.op("ReduceProd", target, keepdims=0)
    numbers = e.op("Reshape", e.op("Range", e.array(0), count, e.array(1)), target)
    places = e.op("Slice", numbers, starts, ends, e.input(4), e.input(5))
    flat = e.array([-1])
    zeros = e.zeros(e.op("Reshape", count, e.array([1])), e.elem(dy))
    filled = e.op("ScatterElements", zeros, e.op("Reshape", places, flat), e.op("Reshape", dy, flat), axis=0)
    return [e.op("Reshape", filled, target)]


def _constant_pads(e: Emitter, dy: Value) -> list[int] | None:
    """Zeros in front of and behind each axis; None where the file does not say."""
    whole, starts = e.output_shape(0), e.constant(e.input(2))
    steps, axes = e.constant(e.input(5)), e.constant(e.input(4))
    part = e.type_of(dy).shape
    unknown = (e.input(4) and axes is None) or (e.input(5) and (steps is None or any(s != 1 for s in steps.flat)))
    if whole is None or part is None or starts is None or unknown:
        return None
    places = list(range(len(starts.flat))) if axes is None else [int(a) % len(whole) for a in axes.flat]
    pads = [0] * (2 * len(whole))
    for axis, start in zip(places, starts.flat, strict=True):
        size, length = whole[axis], part[axis]
        if not isinstance(size, int) or not isinstance(length, int):
            return None
        first = min(max(int(start) + size if start < 0 else int(start), 0), size)
        pads[axis], pads[axis + len(whole)] = first, size - first - length
    return pads


def concat_training(e: Emitter) -> list[Value]:
    """Concat; and the length of each input along the axis."""
    parts = list(e.node.input)
    axis = e.attribute("axis", 0)
    joined = e.op("Concat", *parts, axis=axis)
    if not e.wants(1):
        return [joined]
    lengths: list[Dim] = [e.shape(p)[axis] for p in parts]
    if all(isinstance(n, int) for n in lengths):
        return [joined, e.array(lengths)]
    return [joined, e.op("Concat", *(e.dim_of(p, axis % len(e.shape(p))) for p in parts), axis=0)]


def split_training(e: Emitter) -> list[Value]:
    """Split with the lengths as an input."""
    x, lengths = e.inputs(2)
    e.needs_opset(13, "Split with the lengths as an input")
    held = e.constant(lengths)
    given = lengths if held is None else e.array(held)
    return e.ops("Split", x, given, outputs=len(e.node.output), axis=e.attribute("axis", 0))
