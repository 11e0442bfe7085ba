"""What a shape rule sees of a node, and arithmetic on dims that may be symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import NodeProto

from onnx_sublinear.ops.tensor_types import Dim, TensorType
from onnx_sublinear.ops.values import Value, attributes_of

__all__ = ["Call", "Rule", "Types", "broadcast", "positive_axis", "quotient", "sum_of"]

Types = list[TensorType | None]


@dataclass
class Call:
    """What a rule sees of one node.

    Attributes:
        node: the node.
        types: types of its inputs; None where unknown or omitted.
        values: known values of its inputs; None elsewhere.
        opset: version of the default domain.
        maker_input: (tensor, op types, slot) -> type of input `slot` of the node that makes the tensor, or None.
    """

    node: NodeProto
    types: Sequence[TensorType | None]
    values: Sequence[Value | None]
    opset: int
    maker_input: Callable[[str, tuple[str, ...], int], TensorType | None]

    def attributes(self) -> dict[str, Any]:
        """The node's plain attributes."""
        return attributes_of(self.node)

    def has(self, slot: int) -> bool:
        """Whether input `slot` is given."""
        return slot < len(self.node.input) and bool(self.node.input[slot])

    def type(self, slot: int) -> TensorType | None:
        """Type of input `slot`."""
        return self.types[slot] if slot < len(self.types) else None

    def elem(self, slot: int) -> int:
        """Element type of input `slot`; 0 where unknown."""
        t = self.type(slot)
        return t.elem_type if t else 0

    def shape(self, slot: int) -> tuple[Dim, ...] | None:
        """Shape of input `slot`; None where the rank is unknown."""
        t = self.type(slot)
        return t.shape if t else None

    def dims(self, slot: int) -> list[Dim] | None:
        """The elements of an integer input as dims; unknown ones where only their number is known; else None."""
        value = self.values[slot] if slot < len(self.values) else None
        if value is not None:
            return value.ints()
        shape = self.shape(slot)
        if shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] <= 64:
            return [None] * shape[0]
        return None

    def numbers(self, slot: int) -> list[int] | None:
        """The elements of an integer input whose elements are all known numbers; else None."""
        value = self.values[slot] if slot < len(self.values) else None
        ints = value.ints() if value is not None else None
        if ints is None or any(not isinstance(i, int) for i in ints):
            return None
        return [i for i in ints if isinstance(i, int)]


Rule = Callable[[Call], Types]
"""Types of the outputs, as far as they are known; a shorter list leaves the rest unknown."""


def broadcast(*shapes: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
    """Multidirectional broadcast. Two different symbols give an unknown dim; a value other than 1 decides."""
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    rank = max((len(s) for s in known), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        column = {s[axis] for s in known if -axis <= len(s)} - {1}
        values = [d for d in column if isinstance(d, int)]
        if values:
            result.append(values[0] if len(values) == 1 else None)
        elif column:
            result.append(column.pop() if len(column) == 1 else None)
        else:
            result.append(1)
    return tuple(result)


def quotient(total: Sequence[Dim], known: Sequence[Dim]) -> Dim:
    """product(total) / product(known), where that is a whole number, a symbol or 1; else unknown."""
    above, below = list(total), list(known)
    for dim in list(below):
        if isinstance(dim, str) and dim in above:
            above.remove(dim)
            below.remove(dim)
    if not all(isinstance(d, int) for d in below) or None in above:
        return None
    divisor = math.prod(d for d in below if isinstance(d, int))
    number = math.prod(d for d in above if isinstance(d, int))
    symbols = [d for d in above if isinstance(d, str)]
    if divisor <= 0 or number % divisor or len(symbols) > 1:
        return None
    if symbols:
        return symbols[0] if number == divisor else None
    return number // divisor


def sum_of(dims: Sequence[Dim]) -> Dim:
    """The sum, where it is a number or one symbol; else unknown."""
    rest = [d for d in dims if d != 0]
    if all(isinstance(d, int) for d in rest):
        return sum(d for d in rest if isinstance(d, int))
    return rest[0] if len(rest) == 1 else None


def positive_axis(axis: int, rank: int) -> int:
    """`axis`, counted from the front; `rank` itself is allowed, as in Flatten.

    Raises:
        IndexError: there is no such axis.
    """
    if not -rank <= axis <= rank:
        raise IndexError(axis)
    return axis + rank if axis < 0 else axis
