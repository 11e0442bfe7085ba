"""What must hold before any pass: refuses what cannot be planned, and gives duplicate node names new ones."""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto, NodeProto

from onnx_sublinear.errors import GraphError, printable
from onnx_sublinear.graph import GraphIndex, domain_of
from onnx_sublinear.passes.rewriting import replace_nodes

__all__ = ["prepare"]


def prepare(model: ModelProto) -> ModelProto:
    """The model as the passes take it: itself, unless nodes share a name (the runtime refuses such files).

    Raises:
        GraphError: the graph asks the runtime for its gradients (a Gradient node) instead of holding them.
    """
    names: Counter[str] = Counter()
    for node in model.graph.node:
        names[node.name] += 1
        if domain_of(node) == "ai.onnx.preview.training" and node.op_type == "Gradient":
            raise GraphError(
                f"the graph holds a Gradient node ('{printable(node.name or node.output[0])}') instead of gradients",
                "expand it first: the file must hold forward, loss and gradients as ordinary nodes",
            )
    if not any(count > 1 for name, count in names.items() if name):
        return model
    index = GraphIndex(model)
    seen: set[str] = set()
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.name and node.name in seen:
            renamed = NodeProto()
            renamed.CopyFrom(node)
            renamed.name = index.fresh_name(node.name)
            node = renamed
        seen.add(node.name)
        nodes.append(node)
    return replace_nodes(model, nodes)
