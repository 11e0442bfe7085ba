"""One node with its bound types, as the workspace and cost formulas read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnx import NodeProto, TensorProto

from onnx_sublinear.graph import attribute
from onnx_sublinear.ops.tensor_types import TensorType, element_bits

__all__ = ["KernelCall", "Shape", "UnknownTypeError", "broadcast", "float32_of"]

Shape = tuple[int, ...]


class UnknownTypeError(Exception):
    """A formula needs a type that is not known."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One node with its bound types.

    Attributes:
        node: the node.
        inputs: the type of each input slot; None: absent or unknown.
        outputs: the type of each output slot.
        opset: version of the default domain.
        training: onnxruntime-training 1.19.2 instead of current stock builds.
        outer: types of the tensors that the node's subgraphs may capture, by name.
    """

    node: NodeProto
    inputs: Sequence[TensorType | None]
    outputs: Sequence[TensorType | None]
    opset: int
    training: bool = False
    outer: Mapping[str, TensorType] = field(default_factory=dict)

    def shape(self, slot: int) -> Shape:
        """Static dims of an input; UnknownTypeError where they are not known."""
        return _static_shape(self.inputs, slot)

    def out_shape(self, slot: int = 0) -> Shape:
        """Static dims of an output; UnknownTypeError where they are not known."""
        return _static_shape(self.outputs, slot)

    def count(self, slot: int) -> int:
        """Elements of an input."""
        return math.prod(self.shape(slot))

    def out_count(self, slot: int = 0) -> int:
        """Elements of an output."""
        return math.prod(self.out_shape(slot))

    def element_bytes(self, slot: int = 0) -> int:
        """Bytes of one element of an input, at least 1."""
        known = self.inputs[slot] if slot < len(self.inputs) else None
        bits = element_bits(known.elem_type) if known else None
        if bits is None:
            raise UnknownTypeError
        return max(1, bits // 8)

    def input_bytes(self, slot: int = 0) -> int:
        """Bytes of an input."""
        return self.count(slot) * self.element_bytes(slot)

    def has_input(self, slot: int) -> bool:
        """Whether the slot has a name."""
        return slot < len(self.node.input) and bool(self.node.input[slot])

    def has_output(self, slot: int) -> bool:
        """Whether the slot has a name."""
        return slot < len(self.node.output) and bool(self.node.output[slot])

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = attribute(self.node, name)
        return default if found is None else found.i

    def integers(self, name: str) -> Shape:
        """An integer list attribute; () where absent."""
        found = attribute(self.node, name)
        return () if found is None else tuple(found.ints)

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        found = attribute(self.node, name)
        return default if found is None else found.s.decode()

    def in_float32(self) -> KernelCall:
        """The same call with float in place of float16."""
        return replace(self, inputs=[float32_of(t) for t in self.inputs], outputs=[float32_of(t) for t in self.outputs])


def float32_of(known: TensorType | None) -> TensorType | None:
    """`known` with float in place of float16."""
    if known is None or known.elem_type != TensorProto.FLOAT16:
        return known
    return TensorType(TensorProto.FLOAT, known.shape)


def _static_shape(types: Sequence[TensorType | None], slot: int) -> Shape:
    known = types[slot] if slot < len(types) else None
    if known is None or known.shape is None:
        raise UnknownTypeError
    dims = tuple(d for d in known.shape if isinstance(d, int))
    if len(dims) != len(known.shape):
        raise UnknownTypeError
    return dims


def broadcast(*shapes: Shape) -> Shape:
    """The shape that numpy's rules make of `shapes`."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(0 if 0 in dims else max(dims) for dims in zip(*padded, strict=True))
