"""Every tensor that a model stores, and whether its data fits its dims and type.

Nothing here recurses: subgraphs are walked with a queue, whatever their depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, SparseTensorProto, TensorProto

from onnx_sublinear.errors import ModelFileError, printable

# No file or address space holds more; also keeps the digits of a number in a message bounded.
_LARGEST_SIZE_BYTES = 2**63 - 1


class _ElementType(NamedTuple):
    """How TensorProto stores one element type (rules: the comments on its fields in onnx.proto)."""

    bits: int  # per element in raw_data and in external data
    field: str  # where the elements are when not in raw_data
    entry_bits: int  # how many of these bits one entry of that field carries


# Keyed by number, since older onnx versions lack the names of the later types.
_ELEMENT_TYPES = {
    1: _ElementType(32, "float_data", 32),  # FLOAT
    2: _ElementType(8, "int32_data", 8),  # UINT8
    3: _ElementType(8, "int32_data", 8),  # INT8
    4: _ElementType(16, "int32_data", 16),  # UINT16
    5: _ElementType(16, "int32_data", 16),  # INT16
    6: _ElementType(32, "int32_data", 32),  # INT32
    7: _ElementType(64, "int64_data", 64),  # INT64
    9: _ElementType(8, "int32_data", 8),  # BOOL
    10: _ElementType(16, "int32_data", 16),  # FLOAT16
    11: _ElementType(64, "double_data", 64),  # DOUBLE
    12: _ElementType(32, "uint64_data", 32),  # UINT32
    13: _ElementType(64, "uint64_data", 64),  # UINT64
    14: _ElementType(64, "float_data", 32),  # COMPLEX64
    15: _ElementType(128, "double_data", 64),  # COMPLEX128
    16: _ElementType(16, "int32_data", 16),  # BFLOAT16
    17: _ElementType(8, "int32_data", 8),  # FLOAT8E4M3FN
    18: _ElementType(8, "int32_data", 8),  # FLOAT8E4M3FNUZ
    19: _ElementType(8, "int32_data", 8),  # FLOAT8E5M2
    20: _ElementType(8, "int32_data", 8),  # FLOAT8E5M2FNUZ
    21: _ElementType(4, "int32_data", 8),  # UINT4, two in an entry
    22: _ElementType(4, "int32_data", 8),  # INT4
    23: _ElementType(4, "int32_data", 8),  # FLOAT4E2M1
    24: _ElementType(8, "int32_data", 8),  # FLOAT8E8M0
    25: _ElementType(2, "int32_data", 8),  # UINT2, four in an entry
    26: _ElementType(2, "int32_data", 8),  # INT2
    27: _ElementType(6, "int32_data", 6),  # FLOAT6E2M3, one in an entry
    28: _ElementType(6, "int32_data", 6),  # FLOAT6E3M2
}


# Readers go by the type, and so do we: asking each attribute for each field takes five times as long.
_PLAIN_ATTRIBUTES = frozenset(
    (
        AttributeProto.FLOAT,
        AttributeProto.INT,
        AttributeProto.STRING,
        AttributeProto.FLOATS,
        AttributeProto.INTS,
        AttributeProto.STRINGS,
    )
)


class StoredTensor(NamedTuple):
    """One TensorProto of a model.

    Attributes:
        label: the tensor's name, or a name made from the node that holds it.
        tensor: the message itself, not a copy.
        is_initializer: whether it is a dense initializer of a graph.
    """

    label: str
    tensor: TensorProto
    is_initializer: bool = False


class Contents(NamedTuple):
    """What `walk` finds, in a stable order.

    Attributes:
        scopes: the main graph, the functions, the training graphs, then all subgraphs.
        tensors: initializers, sparse ones as values and indices, and tensors in attributes.
    """

    scopes: list[GraphProto | FunctionProto]
    tensors: list[StoredTensor]


def walk(model: ModelProto) -> Contents:
    """Finds all graphs and all stored tensors of a model, in one pass over its attributes."""
    pending: deque[GraphProto | FunctionProto] = deque([model.graph, *model.functions])
    for info in model.training_info:
        pending.extend((info.initialization, info.algorithm))
    contents = Contents([], [])
    tensors = contents.tensors
    while pending:
        scope = pending.popleft()
        contents.scopes.append(scope)
        if isinstance(scope, GraphProto):
            tensors.extend(StoredTensor(tensor.name, tensor, is_initializer=True) for tensor in scope.initializer)
            tensors.extend(_sparse_parts("sparse initializer", scope.sparse_initializer))
        for label, attribute in _attributes(scope):
            if attribute.HasField("t"):
                tensors.append(StoredTensor(attribute.t.name or label, attribute.t))
            tensors.extend(StoredTensor(tensor.name or label, tensor) for tensor in attribute.tensors)
            if attribute.HasField("sparse_tensor"):
                tensors.extend(_sparse_parts(label, [attribute.sparse_tensor]))
            tensors.extend(_sparse_parts(label, attribute.sparse_tensors))
            if attribute.HasField("g"):
                pending.append(attribute.g)
            pending.extend(attribute.graphs)
    return contents


def tensor_size_bytes(stored: StoredTensor) -> int | None:
    """Bytes that the dims and the type ask for; sub-byte types round up. None for strings and unknown types.

    Raises:
        ModelFileError: a dim is negative, or the bytes do not fit 63 bits.
    """
    count = _element_count(stored)
    element = _ELEMENT_TYPES.get(stored.tensor.data_type)
    if element is None:
        return None
    size_bytes = -(-count * element.bits // 8)
    if size_bytes > _LARGEST_SIZE_BYTES:
        raise _too_large(stored)
    return size_bytes


def check_tensor(stored: StoredTensor) -> None:
    """Checks that inline data has exactly the bytes that dims and type ask for.

    Raises:
        ModelFileError: it has not; the message names the tensor and both counts.
    """
    tensor = stored.tensor
    wanted_bytes = tensor_size_bytes(stored)
    if tensor.data_location == TensorProto.EXTERNAL or tensor.HasField("segment"):
        return
    if tensor.data_type == TensorProto.STRING:
        _expect_entries(stored, "string_data", _element_count(stored))
        return
    if wanted_bytes is None:
        return
    element = _ELEMENT_TYPES[tensor.data_type]
    raw_bytes = len(tensor.raw_data)
    if raw_bytes and len(getattr(tensor, element.field)):
        raise ModelFileError(f"tensor {printable(stored.label)} has its data twice, in raw_data and in {element.field}")
    if raw_bytes or not len(getattr(tensor, element.field)):
        if raw_bytes != wanted_bytes:
            raise ModelFileError(
                f"tensor {printable(stored.label)} holds {raw_bytes} bytes of data, "
                f"but its dims {dims_text(tensor)} and type need {wanted_bytes} bytes"
            )
        return
    _expect_entries(stored, element.field, -(-_element_count(stored) * element.bits // element.entry_bits))


def check_scopes(scopes: Iterable[GraphProto | FunctionProto]) -> None:
    """Checks that the names which graphs refer by are text, and that sparse initializers have no negative dim.

    Protobuf hands out a name that is not UTF-8 as bytes, which nothing behind this point expects.

    Raises:
        ModelFileError: names the offending name or tensor.
    """
    for scope in scopes:
        for node in scope.node:
            _expect_text((node.name, node.op_type, node.domain, *node.input, *node.output))
        if isinstance(scope, FunctionProto):
            _expect_text((scope.name, scope.domain, *scope.input, *scope.output))
            continue
        for values in (scope.input, scope.output, scope.value_info, scope.initializer):
            _expect_text(value.name for value in values)
        for sparse in scope.sparse_initializer:
            if min(sparse.dims, default=0) < 0:
                raise ModelFileError(f"sparse initializer {printable(sparse.values.name)} has a negative dim")


def dims_text(tensor: TensorProto) -> str:
    """The dims, shortened so that they fit a message."""
    return printable(str(list(tensor.dims[:16])), 100) if len(tensor.dims) <= 16 else f"of rank {len(tensor.dims)}"


def _attributes(scope: GraphProto | FunctionProto) -> Iterator[tuple[str, AttributeProto]]:
    """The attributes that can hold tensors or graphs, each with a name for what has it."""
    for node in scope.node:
        for attribute in node.attribute:
            if attribute.type not in _PLAIN_ATTRIBUTES:
                yield node.output[0] if node.output else node.op_type, attribute
    if isinstance(scope, FunctionProto):
        for attribute in scope.attribute_proto:
            yield attribute.name, attribute


def _sparse_parts(label: str, sparse_tensors: Iterable[SparseTensorProto]) -> Iterator[StoredTensor]:
    for sparse in sparse_tensors:
        name = sparse.values.name or label
        yield StoredTensor(name, sparse.values)
        yield StoredTensor(sparse.indices.name or f"{name} (indices)", sparse.indices)


def _element_count(stored: StoredTensor) -> int:
    dims = stored.tensor.dims
    if min(dims, default=0) < 0:
        raise ModelFileError(f"tensor {printable(stored.label)} has a negative dim: {dims_text(stored.tensor)}")
    if 0 in dims:
        return 0
    count = 1
    for dim in dims:
        count *= dim
        if count > _LARGEST_SIZE_BYTES:
            raise _too_large(stored)
    return count


def _too_large(stored: StoredTensor) -> ModelFileError:
    return ModelFileError(
        f"tensor {printable(stored.label)} has dims {dims_text(stored.tensor)}, "
        "which need more bytes than any machine can address"
    )


def _expect_entries(stored: StoredTensor, field: str, wanted: int) -> None:
    tensor = stored.tensor
    found = len(getattr(tensor, field))
    if found != wanted:
        raise ModelFileError(
            f"tensor {printable(stored.label)} holds {found} values in {field}, "
            f"but its dims {dims_text(tensor)} and type need {wanted}"
        )


def _expect_text(names: Iterable[object]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ModelFileError(f"a name in the model is not UTF-8 text: {printable(repr(name))}")
