"""Arithmetic on small known values: numbers by numpy in the type of the operands, symbols by identities.

The identities hold for every dim: x * 1, x * 0, x + 0, x - x, x == x, and a dim is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto

from onnx_sublinear.ops.values import INTEGERS, MAX_ELEMENTS, NUMPY_TYPES, Array, Item, Value

__all__ = ["BINARY", "REDUCE", "UNARY", "UnknownValue", "limit", "objects", "pairwise"]


class UnknownValue(Exception):  # noqa: N818 - control flow, no error
    """The value of a node is not known."""


def limit(count: int) -> None:
    """Give up above `MAX_ELEMENTS` elements."""
    if not 0 <= count <= MAX_ELEMENTS:
        raise UnknownValue


def objects(value: Value) -> Array:
    """The elements as an array of objects."""
    array = np.empty(len(value.items), dtype=object)
    array[:] = value.items
    return array.reshape(value.shape)


def _add(a: Item, b: Item) -> Item:
    return b if a == 0 else a if b == 0 else None


def _sub(a: Item, b: Item) -> Item:
    return a if b == 0 else 0 if a is not None and a == b else None


def _mul(a: Item, b: Item) -> Item:
    if a == 0 or b == 0:
        return 0
    return b if a == 1 else a if b == 1 else None


def _div(a: Item, b: Item) -> Item:
    return a if b == 1 else None


def _same(a: Item, b: Item) -> Item:
    return a if a is not None and a == b else None


def _max(a: Item, b: Item) -> Item:
    if _negative(a) or a == 0:
        return b
    return a if _negative(b) or b == 0 else _same(a, b)


def _equal(a: Item, b: Item) -> Item:
    if a is not None and a == b:
        return True
    one_negative = (_negative(a) and isinstance(b, str)) or (_negative(b) and isinstance(a, str))
    return False if one_negative else None


def _less(a: Item, b: Item) -> Item:
    if a is not None and a == b:
        return False
    if isinstance(a, str) and (_negative(b) or b == 0):
        return False
    return True if isinstance(b, str) and _negative(a) else None


def _negative(a: Item) -> bool:
    return a is not None and not isinstance(a, str) and a < 0


def _unknown(*_: Item) -> Item:
    return None


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        if not b.all():
            raise UnknownValue
        quotient = np.abs(a) // np.abs(b)  # ONNX truncates towards zero
        return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype))
    return np.asarray(a / b)


def _modulo(a: Array, b: Array) -> Array:
    if not b.all():
        raise UnknownValue
    return np.asarray(np.mod(a, b))


_Binary = tuple[Callable[[Any, Any], Any], Callable[[Item, Item], Item]]

BINARY: dict[str, _Binary] = {
    "Add": (np.add, _add),
    "Sub": (np.subtract, _sub),
    "Mul": (np.multiply, _mul),
    "Div": (_divide, _div),
    "Mod": (_modulo, _unknown),
    "Pow": (np.power, _unknown),
    "Min": (np.minimum, _same),
    "Max": (np.maximum, _max),
    "Sum": (np.add, _add),
    "Equal": (np.equal, _equal),
    "Less": (np.less, _less),
    "LessOrEqual": (np.less_equal, _unknown),
    "Greater": (np.greater, lambda a, b: _less(b, a)),
    "GreaterOrEqual": (np.greater_equal, _unknown),
    "And": (np.logical_and, _unknown),
    "Or": (np.logical_or, _unknown),
    "Xor": (np.logical_xor, _unknown),
}

_TRUTH = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"}

UNARY: dict[str, Callable[[Any], Any]] = {
    "Neg": np.negative,
    "Abs": np.abs,
    "Not": np.logical_not,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sqrt": np.sqrt,
    "Round": np.round,
    "Reciprocal": np.reciprocal,
    "Sign": np.sign,
}

REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
}


def pairwise(op_type: str, a: Value, b: Value) -> Value:
    """One of `BINARY` applied to two values, with broadcast."""
    number, symbol = BINARY[op_type]
    shape = np.broadcast_shapes(a.shape, b.shape)
    limit(math.prod(shape))
    result_type = int(TensorProto.BOOL) if op_type in _TRUTH else a.elem_type
    if a.is_known and b.is_known:
        x, y = (np.array(v.items, dtype=NUMPY_TYPES[v.elem_type]).reshape(v.shape) for v in (a, b))
        with np.errstate(all="ignore"):
            result = np.asarray(number(x, y)).astype(NUMPY_TYPES[result_type])
        return Value(result_type, shape, tuple(result.ravel().tolist()))
    items: list[Item] = []
    for i, j in zip(*(np.broadcast_to(objects(v), shape).ravel().tolist() for v in (a, b)), strict=True):
        if i is None or j is None or isinstance(i, str) or isinstance(j, str):
            items.append(symbol(i, j) if a.elem_type in INTEGERS else None)
        else:
            one = pairwise(op_type, Value(a.elem_type, (), (i,)), Value(b.elem_type, (), (j,)))
            items.append(one.items[0])
    return Value(result_type, shape, tuple(items))
