"""Reads a model in ORT's own format, which keeps what ONNX files do not: the index of each node and all known types.

The format is a flatbuffer: tables of optional fields, each found through a table of offsets (vtable). The field
numbers below are those of onnxruntime/core/flatbuffers/schema/ort.fbs, which only ever grows. Large initializers keep
their dims and types and lose their data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnx_sublinear.ops.tensor_types import NOT_A_TENSOR, Dim, TensorType, to_proto

__all__ = ["OrtFormatModel", "read_ort_format"]

_IDENTIFIER = b"ORTM"
_MOST_DATA_BYTES = 4096  # constants up to here may be shapes, which inference needs
_INT32, _UINT32, _INT64, _FLOAT = (struct.Struct(f"<{code}") for code in "iIqf")
_TENSOR_TYPE = 1  # TypeInfoValue.tensor_type
_DIM_VALUE, _DIM_PARAM = 1, 2  # DimensionValueType


@dataclass(frozen=True)
class OrtFormatModel:
    """The model of an ORT format file.

    Attributes:
        model: the model; nodes by ascending index.
        indices: per node of the main graph the runtime's index of it.
        types: types of the main graph's tensors, as the runtime knows them.
    """

    model: ModelProto
    indices: tuple[int, ...]
    types: dict[str, TensorType]


class _Buffer:
    """Typed access to the tables of one flatbuffer; a table is its position."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._vtables: dict[int, tuple[int, ...]] = {}

    def root(self) -> int:
        return _UINT32.unpack_from(self._data, 0)[0] or 0

    def field(self, table: int, number: int) -> int:
        """Position of a field; 0 where it is absent."""
        vtable = table - _INT32.unpack_from(self._data, table)[0]
        offsets = self._vtables.get(vtable)
        if offsets is None:
            size = int.from_bytes(self._data[vtable : vtable + 2], "little")
            offsets = self._vtables[vtable] = struct.unpack_from(f"<{size // 2 - 2}H", self._data, vtable + 4)
        return table + offsets[number] if number < len(offsets) and offsets[number] else 0

    def _target(self, position: int) -> int:
        target: int = position + _UINT32.unpack_from(self._data, position)[0]
        return target

    def table(self, table: int, number: int) -> int:
        """Position of a nested table; 0 where it is absent."""
        position = self.field(table, number)
        return self._target(position) if position else 0

    def number(self, table: int, number: int, kind: struct.Struct = _INT32, default: int = 0) -> int:
        position = self.field(table, number)
        return kind.unpack_from(self._data, position)[0] if position else default

    def real(self, table: int, number: int) -> float:
        position = self.field(table, number)
        return float(_FLOAT.unpack_from(self._data, position)[0]) if position else 0.0

    def byte(self, table: int, number: int) -> int:
        position = self.field(table, number)
        return self._data[position] if position else 0

    def _text_at(self, position: int) -> bytes:
        size = _UINT32.unpack_from(self._data, position)[0]
        return self._data[position + 4 : position + 4 + size]

    def text(self, table: int, number: int) -> str:
        position = self.field(table, number)
        return self._text_at(self._target(position)).decode() if position else ""

    def raw(self, table: int, number: int) -> bytes:
        """A string or a vector of bytes as bytes."""
        position = self.field(table, number)
        return self._text_at(self._target(position)) if position else b""

    def vector_size(self, table: int, number: int) -> int:
        position = self.field(table, number)
        return int(_UINT32.unpack_from(self._data, self._target(position))[0]) if position else 0

    def scalars(self, table: int, number: int, code: str) -> tuple[int, ...]:
        """A vector of numbers of the struct `code`."""
        position = self.field(table, number)
        if not position:
            return ()
        start = self._target(position)
        return struct.unpack_from(f"<{_UINT32.unpack_from(self._data, start)[0]}{code}", self._data, start + 4)

    def tables(self, table: int, number: int) -> Iterator[int]:
        """Positions of a vector of tables."""
        position = self.field(table, number)
        if position:
            start = self._target(position)
            for i in range(start + 4, start + 4 + 4 * _UINT32.unpack_from(self._data, start)[0], 4):
                yield self._target(i)

    def texts(self, table: int, number: int) -> list[str]:
        """A vector of strings."""
        return [self._text_at(position).decode() for position in self.tables(table, number)]


def read_ort_format(data: bytes) -> OrtFormatModel:
    """The model in `data`.

    Raises:
        ValueError: `data` is no ORT format model.
    """
    if data[4:8] != _IDENTIFIER:
        raise ValueError("not a model in ORT format")
    buffer = _Buffer(data)
    source = buffer.table(buffer.root(), 1)
    model = ModelProto(ir_version=buffer.number(source, 0, _INT64))
    for entry in buffer.tables(source, 1):
        model.opset_import.add(domain=buffer.text(entry, 0), version=buffer.number(entry, 1, _INT64))
    graph = buffer.table(source, 7)
    types = _read_graph(buffer, graph, model.graph)
    indices = sorted(buffer.number(node, 4, _UINT32) for node in buffer.tables(graph, 2))
    return OrtFormatModel(model, tuple(indices), types)


def _read_graph(buffer: _Buffer, graph: int, target: GraphProto) -> dict[str, TensorType]:
    """Fills `target`; the types of its tensors."""
    types = dict(_typed(buffer, argument) for argument in buffer.tables(graph, 1))
    nodes = sorted((buffer.number(node, 4, _UINT32), node) for node in buffer.tables(graph, 2))
    target.node.extend([_node(buffer, node) for _, node in nodes])
    target.initializer.extend([_tensor(buffer, tensor) for tensor in buffer.tables(graph, 0)])
    target.name = "graph"
    target.input.extend([_value(name, types) for name in buffer.texts(graph, 5)])
    target.output.extend([_value(name, types) for name in buffer.texts(graph, 6)])
    given = {info.name for info in (*target.input, *target.output)}
    made = [name for node in target.node for name in node.output if name and name not in given]
    target.value_info.extend([_value(name, types) for name in made if name in types])
    for sparse in buffer.tables(graph, 7):
        entry = target.sparse_initializer.add(dims=buffer.scalars(sparse, 2, "q"))
        entry.values.CopyFrom(_tensor(buffer, buffer.table(sparse, 0)))
        entry.indices.CopyFrom(_tensor(buffer, buffer.table(sparse, 1)))
    return {name: known for name, known in types.items() if known.elem_type or known.shape is not None}


def _typed(buffer: _Buffer, argument: int) -> tuple[str, TensorType]:
    """Name and type of a ValueInfo table."""
    info = buffer.table(argument, 2)
    name = buffer.text(argument, 0)
    if not info or buffer.byte(info, 1) != _TENSOR_TYPE:
        return name, NOT_A_TENSOR
    tensor = buffer.table(info, 2)
    shape = buffer.table(tensor, 1)
    if not shape:
        return name, TensorType(buffer.number(tensor, 0), None)
    return name, TensorType(buffer.number(tensor, 0), tuple(_dim(buffer, dim) for dim in buffer.tables(shape, 0)))


def _dim(buffer: _Buffer, dimension: int) -> Dim:
    value = buffer.table(dimension, 0)
    kind = buffer.byte(value, 0) if value else 0
    if kind == _DIM_VALUE:
        number = buffer.number(value, 1, _INT64)
        return number if number >= 0 else None
    return (buffer.text(value, 2) or None) if kind == _DIM_PARAM else None


def _value(name: str, types: dict[str, TensorType]) -> ValueInfoProto:
    return ValueInfoProto(name=name, type=to_proto(types.get(name, NOT_A_TENSOR)))


def _node(buffer: _Buffer, node: int) -> NodeProto:
    return NodeProto(
        name=buffer.text(node, 0),
        domain=buffer.text(node, 2),
        op_type=buffer.text(node, 5),
        input=buffer.texts(node, 8),
        output=buffer.texts(node, 9),
        attribute=[_attribute(buffer, attribute) for attribute in buffer.tables(node, 10)],
    )


def _tensor(buffer: _Buffer, tensor: int) -> TensorProto:
    proto = TensorProto(
        name=buffer.text(tensor, 0), dims=buffer.scalars(tensor, 2, "q"), data_type=buffer.number(tensor, 3)
    )
    if proto.data_type == TensorProto.STRING:
        proto.string_data.extend(text.encode() for text in buffer.texts(tensor, 5))
    elif buffer.vector_size(tensor, 4) <= _MOST_DATA_BYTES:
        proto.raw_data = buffer.raw(tensor, 4)
    return proto


def _fill_graph(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    _read_graph(buffer, buffer.table(attribute, 7), proto.g)


def _attribute(buffer: _Buffer, attribute: int) -> AttributeProto:
    kind = buffer.number(attribute, 2)
    proto = AttributeProto(name=buffer.text(attribute, 0), type=kind)  # type: ignore[arg-type,unused-ignore]
    fill = _FILLERS.get(kind)
    if fill is not None:
        fill(buffer, attribute, proto)
    return proto


def _fill_float(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.f = buffer.real(attribute, 3)


def _fill_int(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.i = buffer.number(attribute, 4, _INT64)


def _fill_string(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.s = buffer.raw(attribute, 5)


def _fill_tensor(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.t.CopyFrom(_tensor(buffer, buffer.table(attribute, 6)))


def _fill_floats(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.floats.extend(buffer.scalars(attribute, 8, "f"))


def _fill_ints(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.ints.extend(buffer.scalars(attribute, 9, "q"))


def _fill_strings(buffer: _Buffer, attribute: int, proto: AttributeProto) -> None:
    proto.strings.extend(text.encode() for text in buffer.texts(attribute, 10))


_FILLERS: dict[int, Callable[[_Buffer, int, AttributeProto], None]] = {
    AttributeProto.FLOAT: _fill_float,
    AttributeProto.INT: _fill_int,
    AttributeProto.STRING: _fill_string,
    AttributeProto.TENSOR: _fill_tensor,
    AttributeProto.GRAPH: _fill_graph,
    AttributeProto.FLOATS: _fill_floats,
    AttributeProto.INTS: _fill_ints,
    AttributeProto.STRINGS: _fill_strings,
}
