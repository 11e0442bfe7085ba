"""What barrier nodes compute, as far as a proof needs it.

A barrier hides a data dependency in a value that is always zero: `Min(Size(t), zeros)` and `Mul(Size(t), zeros)` are
zeros whatever t is, and `Reshape(X, zeros)` is X, since a 0 in the target shape copies the dimension. This module
follows such nodes in an abstract domain of three kinds of values: zeros, integers that are not negative, and views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, numpy_helper

__all__ = ["BarrierValues", "Ranks"]

Ranks = dict[str, int]
"""Tensor -> its rank; a tensor of unknown rank is missing or -1."""

_LARGEST_CONSTANT = 64


@dataclass(frozen=True)
class _Counts:
    """An int64 scalar or vector without negative elements.

    Attributes:
        zeros: whether every element is 0.
        length: elements of a vector; None for a scalar.
    """

    zeros: bool
    length: int | None


class BarrierValues:
    """The values of barrier nodes, taken in an order in which makers come first.

    Args:
        initializers: the model's initializers.
        ranks: ranks of tensors; views are added by the caller.
    """

    def __init__(self, initializers: Mapping[str, TensorProto], ranks: Ranks) -> None:
        self.initializers = initializers
        self.ranks = ranks
        self._counts: dict[str, _Counts] = {}

    def add(self, node: NodeProto) -> tuple[str, str]:
        """Take in one barrier node.

        Returns:
            (what is wrong with it or "", the tensor that its output is a view of or "").
        """
        if node.domain not in ("", "ai.onnx") or len(node.output) != 1:
            return "it is no barrier operator of ai.onnx with one output", ""
        if node.op_type == "Reshape":
            return self._reshape(node)
        if node.op_type == "Identity":
            known = self._operand(node.input[0])
            if known is None:
                return "", node.input[0]
            self._counts[node.output[0]] = known
            return "", ""
        result = self._token(node)
        if result is None:
            return f"{node.op_type} is not provably a token (integers that are not negative)", ""
        self._counts[node.output[0]] = result
        return "", ""

    def _token(self, node: NodeProto) -> _Counts | None:
        if node.op_type == "Size":
            return _Counts(False, None)
        if node.op_type == "Shape":
            return self._shape(node)
        if node.op_type == "Constant":
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
            return _constant(tensor) if tensor is not None else None
        if node.op_type in ("Min", "Mul"):
            operands = [self._operand(name) for name in node.input]
            known = [o for o in operands if o is not None]
            if not known or len(known) < len(operands):
                return None
            length = _broadcast([o.length for o in known])
            return _Counts(any(o.zeros for o in known), length) if length != -1 else None
        return None

    def _shape(self, node: NodeProto) -> _Counts | None:
        rank = self.ranks.get(node.input[0], -1)
        slots = {a.name: a.i for a in node.attribute}
        start, end = slots.get("start", 0), slots.get("end", rank)
        if rank < 0:
            return _Counts(False, 1) if (start, end) == (0, 1) else None
        clip = [min(max(i + rank if i < 0 else i, 0), rank) for i in (start, end)]
        return _Counts(False, max(0, clip[1] - clip[0]))

    def _operand(self, name: str) -> _Counts | None:
        if name in self._counts:
            return self._counts[name]
        return _constant(self.initializers[name]) if name in self.initializers else None

    def _reshape(self, node: NodeProto) -> tuple[str, str]:
        data, shape = node.input[0], self._operand(node.input[1])
        if any(a.name == "allowzero" and a.i for a in node.attribute):
            return "with allowzero its zeros do not copy dimensions", ""
        if shape is None or not shape.zeros or shape.length is None:
            return f"its target shape '{node.input[1]}' is not provably a vector of zeros", ""
        rank = self.ranks.get(data, -1)
        if rank != shape.length:
            known = f"rank {rank}" if rank >= 0 else "unknown rank"
            return f"its target shape has {shape.length} zeros, '{data}' has {known}", ""
        return "", data


def _constant(tensor: TensorProto) -> _Counts | None:
    size = 1
    for dim in tensor.dims:
        size *= dim
    small = tensor.data_type == TensorProto.INT64 and len(tensor.dims) <= 1 and 0 <= size <= _LARGEST_CONSTANT
    if not small or tensor.data_location == TensorProto.EXTERNAL:
        return None
    values = numpy_helper.to_array(tensor).reshape(-1).tolist()
    if any(v < 0 for v in values):
        return None
    return _Counts(not any(values), len(values) if tensor.dims else None)


def _broadcast(lengths: list[int | None]) -> int | None:
    """Length of the elementwise result of vectors (a number) and scalars (None); -1 when they do not broadcast."""
    vectors = {n for n in lengths if n is not None}
    if not vectors:
        return None
    longer = vectors - {1}
    if len(longer) > 1:
        return -1
    return longer.pop() if longer else 1
