"""Element type and shape of a tensor, its bytes, and the way to and from ONNX's TypeProto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onnx import TensorProto, TypeProto

__all__ = [
    "NOT_A_TENSOR",
    "Dim",
    "TensorType",
    "bind",
    "element_bits",
    "from_proto",
    "tensor_bytes",
    "to_proto",
    "type_name",
]

Dim = int | str | None
"""A value, a symbol (dim_param), or unknown."""

_NO_DIMS: Mapping[str, int] = MappingProxyType({})

# Bits of one element, by the name of the type: older onnx packages lack the newer types. Source: onnx.proto3.
_BITS_BY_NAME = {
    1: (),
    2: ("INT2", "UINT2"),
    4: ("INT4", "UINT4", "FLOAT4E2M1"),
    8: (
        *("BOOL", "INT8", "UINT8"),
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"),
    ),
    16: ("INT16", "UINT16", "FLOAT16", "BFLOAT16"),
    32: ("INT32", "UINT32", "FLOAT"),
    64: ("INT64", "UINT64", "DOUBLE", "COMPLEX64"),
    128: ("COMPLEX128",),
}
_DATA_TYPES = dict(TensorProto.DataType.items())
_BITS = {_DATA_TYPES[name]: bits for bits, names in _BITS_BY_NAME.items() for name in names if name in _DATA_TYPES}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape.

    Attributes:
        elem_type: a TensorProto.DataType; 0 = not a tensor (sequence, map, optional, sparse) or unknown.
        shape: one Dim an axis; None: unknown rank.
    """

    elem_type: int
    shape: tuple[Dim, ...] | None


NOT_A_TENSOR = TensorType(0, None)


def element_bits(elem_type: int) -> int | None:
    """Bits of one element of the TensorProto.DataType; None for strings and unknown types."""
    return _BITS.get(elem_type)


def type_name(elem_type: int) -> str:
    """How a message names an element type, e.g. "float"."""
    names = TensorProto.DataType
    return names.Name(elem_type).lower() if elem_type and elem_type in names.values() else "no tensor"


def tensor_bytes(t: TensorType, dims: Mapping[str, int] = _NO_DIMS) -> int | None:
    """Exact size in bytes; sub-byte types round up per tensor.

    Args:
        t: the type.
        dims: values of symbols.

    Returns:
        The bytes, or None where a dim, the rank or the width of an element is unknown.
    """
    bits = element_bits(t.elem_type)
    if bits is None or t.shape is None:
        return None
    for dim in t.shape:
        value = dims.get(dim) if isinstance(dim, str) else dim
        if value is None:
            return None
        bits *= value
    return (bits + 7) // 8


def bind(t: TensorType, dims: Mapping[str, int]) -> TensorType:
    """`t` with the symbols of `dims` replaced by their values."""
    if t.shape is None or not any(isinstance(d, str) for d in t.shape):
        return t
    return TensorType(t.elem_type, tuple(dims.get(d, d) if isinstance(d, str) else d for d in t.shape))


def from_proto(proto: TypeProto) -> TensorType | None:
    """The TensorType of a TypeProto; None where it says nothing. A negative dim_value is an unknown dim."""
    if not proto.HasField("tensor_type"):
        return NOT_A_TENSOR if proto.WhichOneof("value") else None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    shape: list[Dim] = []
    for dim in tensor.shape.dim:
        kind = dim.WhichOneof("value")
        if kind == "dim_value":
            shape.append(dim.dim_value if dim.dim_value >= 0 else None)
        else:
            shape.append((dim.dim_param or None) if kind else None)
    return TensorType(tensor.elem_type, tuple(shape))


def to_proto(t: TensorType) -> TypeProto:
    """The TypeProto of a tensor's type; an empty one where the element type is 0."""
    proto = TypeProto()
    if not t.elem_type:
        return proto
    proto.tensor_type.elem_type = t.elem_type
    if t.shape is not None:
        proto.tensor_type.shape.SetInParent()
        for dim in t.shape:
            entry = proto.tensor_type.shape.dim.add()
            if isinstance(dim, str):
                entry.dim_param = dim
            elif dim is not None and dim < 1 << 63:  # ONNX has no larger ones
                entry.dim_value = dim
    return proto
