"""How two statements about the type of one tensor become one."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TypeProto

from onnx_sublinear.ops.tensor_types import NOT_A_TENSOR, Dim, TensorType, from_proto

__all__ = ["Known", "as_tensor", "fill", "fill_as_ort", "join", "known_type", "stacked"]

Known = TensorType | bytes | None
"""A tensor's type; the serialized TypeProto of a sequence, map or optional; None where nothing is known."""


def known_type(proto: TypeProto) -> Known:
    """What a TypeProto says."""
    if proto.HasField("tensor_type"):
        t = from_proto(proto)
        return t if t is not None and (t.elem_type or t.shape is not None) else None
    return proto.SerializeToString() if proto.WhichOneof("value") else None


def as_tensor(known: Known) -> TensorType | None:
    """`known` for those to whom every non-tensor is alike."""
    return NOT_A_TENSOR if isinstance(known, bytes) else known


def fill(first: Known, second: Known) -> Known:
    """`first`, with what it does not know taken from `second` where the ranks agree."""
    if not isinstance(first, TensorType) or not isinstance(second, TensorType):
        return second if first is None else first
    elem_type = first.elem_type or second.elem_type
    if first.shape is None:
        return TensorType(elem_type, second.shape)
    if second.shape is None or len(first.shape) != len(second.shape):
        return TensorType(elem_type, first.shape)
    dims = tuple(b if a is None else a for a, b in zip(first.shape, second.shape, strict=True))
    return TensorType(elem_type, dims)


def fill_as_ort(inferred: Known, declared: Known) -> Known:
    """The merge of onnxruntime/core/graph/graph.cc, MergeShapeInfo: a number wins, a contradiction is forgotten."""
    if not isinstance(inferred, TensorType) or not isinstance(declared, TensorType):
        return declared if inferred is None else inferred
    elem_type = inferred.elem_type or declared.elem_type
    if inferred.shape is None or declared.shape is None:
        return TensorType(elem_type, declared.shape if inferred.shape is None else inferred.shape)
    if len(inferred.shape) != len(declared.shape):
        return TensorType(elem_type, None)
    pairs = list(zip(inferred.shape, declared.shape, strict=True))
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        return TensorType(elem_type, tuple(a if a == b else None for a, b in pairs))
    return TensorType(elem_type, tuple(a if isinstance(a, int) or b is None else b for a, b in pairs))


def join(types: Sequence[Known]) -> Known:
    """What holds whichever of `types` it is."""
    first = types[0]
    for other in types[1:]:
        if not isinstance(first, TensorType) or not isinstance(other, TensorType):
            if first != other:
                return None
            continue
        if first.elem_type != other.elem_type:
            return None
        shape: tuple[Dim, ...] | None = None
        if first.shape is not None and other.shape is not None and len(first.shape) == len(other.shape):
            shape = tuple(a if a == b else None for a, b in zip(first.shape, other.shape, strict=True))
        first = TensorType(first.elem_type, shape)
    return first


def stacked(t: Known, count: Dim, axis: int) -> Known:
    """The type of `count` slices of type `t`, stacked along the new axis `axis`."""
    if not isinstance(t, TensorType):
        return None
    if t.shape is None:
        return t
    at = axis + len(t.shape) + 1 if axis < 0 else axis
    return TensorType(t.elem_type, (*t.shape[:at], count, *t.shape[at:]))
