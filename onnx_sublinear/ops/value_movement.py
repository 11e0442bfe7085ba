"""Structural operators on small known values: elements of any kind (numbers, symbols, unknown) are moved.

The count of the output is checked against `MAX_ELEMENTS` before any array is made. Semantics: the operator
specifications of ONNX, opsets 1 to 25 (parameters are attributes in old opsets and inputs in new ones).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_sublinear.ops.value_arithmetic import UnknownValue, limit, objects
from onnx_sublinear.ops.values import NUMPY_TYPES, Array, Item, Value, attributes_of, of_tensor

__all__ = ["STRUCTURAL", "ValueCall", "concat", "split"]

_INT64 = int(TensorProto.INT64)


class ValueCall:
    """One evaluation: the operands as object arrays, and the attributes."""

    def __init__(self, node: NodeProto, operands: Sequence[Value | None]) -> None:
        self.node = node
        self.operands = operands
        self.attributes = attributes_of(node)

    def array(self, slot: int) -> Array:
        """The elements of input `slot` as objects."""
        return objects(self.value(slot))

    def value(self, slot: int) -> Value:
        """The value of input `slot`; gives up where it is not known."""
        value = self.operands[slot] if slot < len(self.operands) else None
        if value is None:
            raise UnknownValue
        return value

    def has(self, slot: int) -> bool:
        """Whether input `slot` is given."""
        return slot < len(self.node.input) and bool(self.node.input[slot])

    def numbers(self, slot: int, name: str) -> list[int] | None:
        """Integers given by input `slot` (new opsets) or attribute `name` (old ones); None where neither is there."""
        if self.has(slot):
            value = self.value(slot)
            if not value.is_known:
                raise UnknownValue
            return [int(i) for i in value.items if not isinstance(i, str) and i is not None]
        return list(self.attributes[name]) if name in self.attributes else None


def _gather(call: ValueCall) -> Array:
    data, indices = call.array(0), call.value(1)
    axis = call.attributes.get("axis", 0)
    if not indices.is_known:
        raise UnknownValue
    picked = np.array(indices.items, dtype=np.int64).reshape(indices.shape)
    limit(data.size // max(data.shape[axis], 1) * picked.size)
    return np.asarray(np.take(data, picked, axis=axis), dtype=object)  # 0-d indices give a bare element


def concat(call: ValueCall) -> Array:
    """Concat, also that of ConcatTraining."""
    arrays = [call.array(i) for i in range(len(call.node.input))]
    limit(sum(a.size for a in arrays))
    return np.concatenate(arrays, axis=call.attributes.get("axis", 1))


def _slice(call: ValueCall) -> Array:
    data = call.array(0)
    starts, ends = call.numbers(1, "starts"), call.numbers(2, "ends")
    if starts is None or ends is None:
        raise UnknownValue
    axes = call.numbers(3, "axes") or range(len(starts))
    steps = call.numbers(4, "steps") or [1] * len(starts)
    cuts = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        dim = data.shape[axis]
        if step < 0 and end < -dim:  # beyond the first element, which Python spells None
            cuts[axis] = slice(start, None, step)
        else:
            cuts[axis] = slice(start, end, step)
    return data[tuple(cuts)]


def _squeeze(call: ValueCall) -> Array:
    data, axes = call.array(0), call.numbers(1, "axes")
    return np.squeeze(data, axis=tuple(axes) if axes is not None else None)


def _unsqueeze(call: ValueCall) -> Array:
    data, axes = call.array(0), call.numbers(1, "axes")
    if axes is None:
        raise UnknownValue
    return np.expand_dims(data, tuple(axes))


def _reshape(call: ValueCall) -> Array:
    data, target = call.array(0), call.numbers(1, "shape")
    if target is None:
        raise UnknownValue
    if not call.attributes.get("allowzero", 0):
        target = [data.shape[i] if d == 0 else d for i, d in enumerate(target)]
    return data.reshape(target)


def _expand(call: ValueCall) -> Array:
    data, target = call.array(0), call.numbers(1, "shape")
    shape = np.broadcast_shapes(data.shape, tuple(target or ()))
    limit(math.prod(shape))
    return np.broadcast_to(data, shape)


def _tile(call: ValueCall) -> Array:
    data, repeats = call.array(0), call.numbers(1, "repeats")
    if repeats is None or len(repeats) != data.ndim:
        raise UnknownValue
    limit(data.size * math.prod(repeats))
    return np.tile(data, repeats)


def _transpose(call: ValueCall) -> Array:
    return np.transpose(call.array(0), call.attributes.get("perm"))


def _flatten(call: ValueCall) -> Array:
    data = call.array(0)
    axis = call.attributes.get("axis", 1)
    axis += data.ndim if axis < 0 else 0
    return data.reshape(math.prod(data.shape[:axis]), -1) if data.size else data


def _where(call: ValueCall) -> Array:
    condition, one, other = (call.array(i) for i in range(3))
    shape = np.broadcast_shapes(condition.shape, one.shape, other.shape)
    limit(math.prod(shape))
    rows = zip(*(np.broadcast_to(a, shape).ravel().tolist() for a in (condition, one, other)), strict=True)
    return _filled([(a if c else b) if c is not None else (a if a == b else None) for c, a, b in rows], shape)


def _constant_of_shape(call: ValueCall) -> Array:
    shape = call.numbers(0, "")
    if shape is None or any(d < 0 for d in shape):
        raise UnknownValue
    limit(math.prod(shape))
    fill = next((a.t for a in call.node.attribute if a.name == "value"), None)
    item: Item = 0.0
    if fill is not None:
        value = of_tensor(fill)
        if value is None:
            raise UnknownValue
        item = value.items[0]
    return _filled([item] * math.prod(shape), tuple(shape))


def _range(call: ValueCall) -> Array:
    start, end, delta = (call.value(i).scalar() for i in range(3))
    if start is None or end is None or not delta:
        raise UnknownValue
    count = max(math.ceil((end - start) / delta), 0)
    limit(count)
    return _filled([start + i * delta for i in range(count)], (count,))


def _nonzero(call: ValueCall) -> Array:
    if not call.value(0).is_known:
        raise UnknownValue
    found = np.array(np.nonzero(call.array(0)), dtype=object)
    limit(found.size)
    return found


def _filled(items: Sequence[Item], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape)


def _cast(call: ValueCall) -> Array:
    value = call.value(0)
    to = call.attributes.get("to")
    source, target = NUMPY_TYPES[value.elem_type], NUMPY_TYPES.get(to) if isinstance(to, int) else None
    if target is None:
        raise UnknownValue
    if value.is_known:
        with np.errstate(all="ignore"):
            return np.array(value.items, dtype=source).astype(target).astype(object).reshape(value.shape)
    # A symbol survives where every dim does; narrower integers and floats may not hold it.
    wide = to == _INT64 and value.elem_type == _INT64
    return _filled([i if wide or not isinstance(i, str) else None for i in value.items], value.shape)


def split(call: ValueCall) -> list[Array]:
    """Split: one array an output."""
    data = call.array(0)
    axis = call.attributes.get("axis", 0)
    sizes = call.numbers(1, "split")
    count = len(call.node.output)
    if sizes is None:
        chunk = -(-data.shape[axis] // count)
        sizes = [min(chunk, data.shape[axis] - i * chunk) for i in range(count)]
    if sum(sizes) != data.shape[axis] or len(sizes) != count:
        raise UnknownValue
    return np.split(data, np.cumsum(sizes)[:-1].tolist(), axis=axis)


STRUCTURAL: dict[str, Callable[[ValueCall], Array]] = {
    "Cast": _cast,
    "Concat": concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Identity": lambda call: call.array(0),
    "NonZero": _nonzero,
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
