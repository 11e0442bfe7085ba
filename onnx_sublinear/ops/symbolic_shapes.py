"""Output shapes of shape-driven operators of the default domain, with symbols.

ONNX's own inference handles numbers; these rules also carry symbols ([batch, 4, 4] reshaped to [-1, 16] is
[batch, 16]) and multiply dims beyond 2**63 exactly. Specification: the operators of ONNX, opsets 1 to 25.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from onnx_sublinear.ops.shape_arithmetic import Call, Rule, Types, broadcast, positive_axis, quotient
from onnx_sublinear.ops.tensor_types import Dim, TensorType

__all__ = ["SYMBOLIC_RULES"]

_FLOAT = int(TensorProto.FLOAT)


def _reshape(call: Call) -> Types:
    source = call.shape(0)
    if call.opset < 5 and "shape" in call.attributes():
        target: list[Dim] | None = list(call.attributes()["shape"])
    else:
        target = call.dims(1)
    if target is None:
        return [TensorType(call.elem(0), None)]
    above: list[Dim] = list(source) if source is not None else [None]
    shape: list[Dim] = list(target)
    if 0 in target and not call.attributes().get("allowzero", 0):
        for axis, dim in enumerate(target):
            if dim == 0:
                shape[axis] = source[axis] if source is not None and axis < len(source) else None
    missing = [axis for axis, d in enumerate(target) if d is None or d == -1]
    if len(missing) == 1 and source is not None:
        copied = [axis for axis, d in enumerate(target) if d == 0 and shape[axis] is None]
        above = [d for axis, d in enumerate(source) if axis not in copied]
        below = [d for axis, d in enumerate(shape) if axis not in copied and axis != missing[0]]
        shape[missing[0]] = quotient(above, below)
    shape = [None if isinstance(d, int) and d < 0 else d for d in shape]
    return [TensorType(call.elem(0), tuple(shape))]


def _expand(call: Call) -> Types:
    target = call.dims(1)
    return [TensorType(call.elem(0), broadcast(call.shape(0), None if target is None else tuple(target)))]


def _constant_of_shape(call: Call) -> Types:
    fill = next((a.t.data_type for a in call.node.attribute if a.name == "value"), _FLOAT)
    dims = call.dims(0)
    return [TensorType(fill, None if dims is None else tuple(dims))]


def _flatten(call: Call) -> Types:
    shape = call.shape(0)
    if shape is None:
        return [TensorType(call.elem(0), (None, None))]
    at = positive_axis(call.attributes().get("axis", 1), len(shape))
    return [TensorType(call.elem(0), (quotient(shape[:at], ()), quotient(shape[at:], ())))]


def _tile(call: Call) -> Types:
    shape, repeats = call.shape(0), call.dims(1)
    if shape is None or repeats is None or len(repeats) != len(shape):
        return [TensorType(call.elem(0), None if shape is None else (None,) * len(shape))]
    return [TensorType(call.elem(0), tuple(quotient((d, r), ()) for d, r in zip(shape, repeats, strict=True)))]


_TO_THE_END = 2**31 - 1  # what exporters write for "to the end"; no axis is that long


def _sliced(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    if not isinstance(step, int) or step == 0:
        return None
    if isinstance(dim, int) and isinstance(start, int) and isinstance(end, int):
        if step < 0:
            first = min(max(start + dim if start < 0 else start, 0), dim - 1) if dim else -1
            last = min(max(end + dim if end < 0 else end, -1), dim - 1)
            return max(-((first - last) // step), 0) if first > last else 0
        return len(range(*slice(start, end, step).indices(dim)))
    if step == 1 and start == 0 and dim is not None:
        return dim if end == dim or (isinstance(end, int) and end >= _TO_THE_END) else None
    if step == -1 and start == -1 and isinstance(end, int) and end <= -_TO_THE_END:
        return dim
    return None


def _slice(call: Call) -> Types:
    shape = call.shape(0)
    if shape is None:
        return [TensorType(call.elem(0), None)]
    starts: Sequence[Dim] | None
    ends: Sequence[Dim] | None
    steps: Sequence[Dim] | None = None
    axes: Sequence[int] | None
    if call.opset < 10:
        attributes = call.attributes()
        starts, ends = attributes.get("starts", ()), attributes.get("ends", ())
        axes = attributes.get("axes", range(len(starts or ())))
    else:
        starts, ends = call.dims(1), call.dims(2)
        axes = call.numbers(3) if call.has(3) else range(len(starts or ()))
        steps = call.dims(4) if call.has(4) else [1] * len(starts or ())
    if axes is None or any(not -len(shape) <= a < len(shape) for a in axes):
        return [TensorType(call.elem(0), (None,) * len(shape))]
    if call.opset < 10:
        steps = [1] * len(axes)
    result = list(shape)
    for i, axis in enumerate(axes):
        known = [part[i] if part is not None and i < len(part) else None for part in (starts, ends, steps)]
        result[axis] = _sliced(shape[axis], *known)
    return [TensorType(call.elem(0), tuple(result))]


def _range(call: Call) -> Types:
    ends = [call.dims(slot) for slot in range(3)]
    start, limit, delta = (e[0] if e and len(e) == 1 else None for e in ends)
    count = limit if start == 0 and delta == 1 and isinstance(limit, str) else None
    return [TensorType(call.elem(0), (count,))]


def _resize(call: Call) -> Types:
    shape = call.shape(0)
    if shape is None:
        return [TensorType(call.elem(0), None)]
    sizes = call.dims(3) if call.opset >= 11 else None
    axes = call.attributes().get("axes", range(len(shape)))
    if (
        sizes is not None
        and len(sizes) == len(list(axes))
        and call.attributes().get("keep_aspect_ratio_policy") is None
    ):
        result = list(shape)
        for axis, size in zip(axes, sizes, strict=True):
            result[axis] = size
        return [TensorType(call.elem(0), tuple(result))]
    slot = 2 if call.opset >= 11 else 1
    scales = call.values[slot] if slot < len(call.values) else None
    factors = list(scales.items) if scales is not None else list(call.attributes().get("scales", ()))
    if len(factors) != len(shape):
        return [TensorType(call.elem(0), (None,) * len(shape))]
    return [TensorType(call.elem(0), tuple(d if f == 1 else None for d, f in zip(shape, factors, strict=True)))]


def _one_hot(call: Call) -> Types:
    shape, depth = call.shape(0), call.dims(1)
    if shape is None:
        return [TensorType(call.elem(2), None)]
    at = call.attributes().get("axis", -1)
    at += len(shape) + 1 if at < 0 else 0
    size = depth[0] if depth and len(depth) == 1 else None
    return [TensorType(call.elem(2), (*shape[:at], size, *shape[at:]))]


def _batch_norm(call: Call) -> Types:
    """Before opset 14 ONNX infers only Y; the running and saved statistics have the type of scale."""
    return [call.type(0), *[call.type(1)] * 4] if call.opset < 14 else []


SYMBOLIC_RULES: dict[str, Rule] = {
    "BatchNormalization": _batch_norm,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "OneHot": _one_hot,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Tile": _tile,
    "Upsample": _resize,
}
