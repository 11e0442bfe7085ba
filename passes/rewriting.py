"""How passes write into a model: copies with other nodes, and the marks on the nodes that they add.

Every added node says in its metadata_props what it is: `onnx_sublinear.role` = "clone" (then `onnx_sublinear.of` names
the first output of the node that it duplicates), "scratch" (a copy that a clone's kernel may write into) or "barrier".
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

__all__ = [
    "ROLE_BARRIER",
    "ROLE_CLONE",
    "ROLE_SCRATCH",
    "clone_of",
    "mark",
    "replace_nodes",
    "role_of",
    "set_model_metadata",
]

ROLE_KEY = "onnx_sublinear.role"
OF_KEY = "onnx_sublinear.of"
ROLE_CLONE = "clone"
ROLE_SCRATCH = "scratch"
ROLE_BARRIER = "barrier"


def mark(node: NodeProto, role: str, of: str = "") -> None:
    """Writes the role into the node's metadata; a clone of a marked node carries its own marks."""
    kept = [p for p in node.metadata_props if p.key not in (ROLE_KEY, OF_KEY)]
    if len(kept) != len(node.metadata_props):
        copies = [(p.key, p.value) for p in kept]
        del node.metadata_props[:]
        for key, value in copies:
            node.metadata_props.add(key=key, value=value)
    node.metadata_props.add(key=ROLE_KEY, value=role)
    if of:
        node.metadata_props.add(key=OF_KEY, value=of)


def role_of(node: NodeProto) -> str:
    """The role that a pass marked on the node, or ""."""
    return next((p.value for p in node.metadata_props if p.key == ROLE_KEY), "") if node.metadata_props else ""


def clone_of(node: NodeProto) -> str:
    """For a recompute clone the first output of the node that it duplicates, else ""."""
    if role_of(node) != ROLE_CLONE:
        return ""
    return next((p.value for p in node.metadata_props if p.key == OF_KEY), "")


def replace_nodes(
    model: ModelProto, nodes: Iterable[NodeProto], value_info: Iterable[ValueInfoProto] | None = None
) -> ModelProto:
    """A copy of `model` with other nodes in the main graph (and other value_info); unknown fields stay too."""
    graph = GraphProto()
    graph.CopyFrom(model.graph)
    del graph.node[:]
    graph.node.extend(nodes)
    if value_info is not None:
        del graph.value_info[:]
        graph.value_info.extend(value_info)
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.graph.CopyFrom(graph)
    return copy


def set_model_metadata(model: ModelProto, key: str, value: str) -> None:
    """Sets one entry of the model's metadata_props in place."""
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    model.metadata_props.add(key=key, value=value)
