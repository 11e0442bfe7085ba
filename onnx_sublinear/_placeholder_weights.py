"""A model file that a session can load without the weights: their data is a hole in a sparse file.

The runtime's graph depends on dims and types of weights, not on their values; small constants may be shapes and stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnx_sublinear.graph import subgraphs_of
from onnx_sublinear.ops.tensor_types import TensorType, tensor_bytes

__all__ = ["PlaceholderFile", "write_placeholder"]

_LEAST_HOLE_BYTES = 64 * 1024
_ALIGNMENT_BYTES = 64 * 1024  # what the runtime can map
_WEIGHTS = "weights"


class PlaceholderFile:
    """A model file with a sparse data file beside it.

    Attributes:
        path: the model file.
        hole_bytes: bytes of the weights that were left out.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx"
        self.hole_bytes = 0

    def without_data(self, tensor: TensorProto) -> TensorProto:
        """`tensor`, or one that refers to the hole in its place, where it is large or external."""
        size = tensor_bytes(TensorType(tensor.data_type, tuple(tensor.dims)))
        is_external = tensor.data_location == TensorProto.EXTERNAL
        if size is None or (size < _LEAST_HOLE_BYTES and not is_external):
            return tensor
        offset = -(-self.hole_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.hole_bytes = offset + size
        hole = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        hole.data_location = TensorProto.EXTERNAL
        for key, value in (("location", _WEIGHTS), ("offset", str(offset)), ("length", str(size))):
            hole.external_data.add(key=key, value=value)
        return hole

    def replace(self, tensors: Sequence[TensorProto]) -> None:
        """`without_data` in place."""
        for tensor in tensors:
            hole = self.without_data(tensor)
            if hole is not tensor:
                tensor.CopyFrom(hole)

    def replace_in(self, nodes: Sequence[NodeProto]) -> None:
        """`without_data` for the tensors in attributes and in subgraphs."""
        pending = [nodes]
        while pending:
            for node in pending.pop():
                if node.op_type == "Constant":
                    self.replace([a.t for a in node.attribute if a.type == AttributeProto.TENSOR])
                for graph in subgraphs_of(node):
                    self.replace(graph.initializer)
                    pending.append(graph.node)


def write_placeholder(model: ModelProto, folder: Path) -> PlaceholderFile:
    """Writes the model with holes for its large and its external tensors; the given model is not changed.

    Args:
        model: the model; its external data is not looked for.
        folder: an empty folder that receives both files.
    """
    file = PlaceholderFile(folder)
    copy = ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            _set(copy, field.name, value)
    _copy_graph(model.graph, copy.graph, file)
    for function in copy.functions:
        file.replace_in(function.node)
    file.path.write_bytes(copy.SerializeToString())
    with (folder / _WEIGHTS).open("wb") as weights:
        weights.truncate(file.hole_bytes)
    return file


def _copy_graph(source: GraphProto, target: GraphProto, file: PlaceholderFile) -> None:
    for field, value in source.ListFields():
        if field.name != "initializer":
            _set(target, field.name, value)
    target.initializer.extend([file.without_data(tensor) for tensor in source.initializer])  # no copy of large data
    file.replace_in(target.node)


def _set(message: ModelProto | GraphProto, name: str, value: object) -> None:
    """Sets a field to what `ListFields` gave for it."""
    current = getattr(message, name)
    if hasattr(current, "MergeFrom"):  # a list, or a message
        current.MergeFrom(value)
    else:
        setattr(message, name, value)
