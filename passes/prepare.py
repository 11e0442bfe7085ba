"""What must hold before any pass: refuses what cannot be planned, and gives duplicate node names new ones."""

from __future__ import annotations

from collections import Counter

from onnx import GraphProto, ModelProto, NodeProto

from onnx_sublinear.errors import GraphError, printable
from onnx_sublinear.graph import GraphIndex, domain_of, node_label, subgraphs_of
from onnx_sublinear.passes.rewriting import replace_nodes

__all__ = ["prepare"]


def prepare(model: ModelProto) -> ModelProto:
    """The model as the passes take it: itself, unless nodes share a name (the runtime refuses such files).

    Raises:
        GraphError: the graph asks the runtime for its gradients (a Gradient node) instead of holding them, or a
            subgraph returns a tensor that it does not make (the runtime refuses such files).
    """
    names: Counter[str] = Counter()
    for node in model.graph.node:
        names[node.name] += 1
        if domain_of(node) == "ai.onnx.preview.training" and node.op_type == "Gradient":
            raise GraphError(
                f"the graph asks for its gradients with a Gradient node ({node_label(node)})",
                "expand it first: the file must hold forward, loss and gradients as ordinary nodes",
            )
        for subgraph in subgraphs_of(node):
            _check_outputs(subgraph, node)
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


def _check_outputs(subgraph: GraphProto, node: NodeProto) -> None:
    """Checks that `subgraph` of `node`, and what is nested in it, returns only tensors of its own scope."""
    pending = [subgraph]
    while pending:
        graph = pending.pop()
        known = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        known |= {s.values.name for s in graph.sparse_initializer} | {o for n in graph.node for o in n.output}
        for output in graph.output:
            if output.name not in known:
                raise GraphError(
                    f"a subgraph of {node_label(node)} returns '{printable(output.name)}', which it does not make",
                    "ONNX Runtime refuses this; let the subgraph return an Identity of the outer tensor",
                )
        pending.extend(g for n in graph.node for g in subgraphs_of(n))
