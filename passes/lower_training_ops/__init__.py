"""The pass `lower-training-ops`: training operators of ONNX Runtime as standard ONNX nodes.

Training builds of ONNX Runtime ended with 1.19.2; stock builds have no gradient kernels. After this pass the graph
needs none. Stages: find the training operators, let the rule of each write standard nodes in its place (`table` names
the rules), put the nodes together, drop value_info that no longer holds.

The nodes are written for the opset that the model imports (>= 13; rules that scatter need 16), so nothing else in the
model has to be converted: onnx's version converter stops at operators that it does not know, and a higher opset changes
what other nodes mean (Softmax and ReduceMean have changed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from onnx import ModelProto, NodeProto, ValueInfoProto

from onnx_sublinear.errors import ModelError
from onnx_sublinear.graph import GraphIndex, domain_of, node_label, nodes_at_any_depth, subgraphs_of
from onnx_sublinear.ops.tensor_types import TensorType, to_proto
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.lower_training_ops.emitter import Constants, Emitter
from onnx_sublinear.passes.lower_training_ops.table import RULES, TRAINING_ONLY
from onnx_sublinear.passes.rewriting import replace_nodes
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["LowerTrainingOpsPass"]

_OLDEST_OPSET = 13


def _is_training_op(node: NodeProto, index: GraphIndex) -> bool:
    """Whether only training builds run the node."""
    domain = domain_of(node)
    if index.function_of(node) is not None:
        return False
    if (domain, node.op_type) in RULES:
        return True
    return domain == "com.microsoft" and (node.op_type in TRAINING_ONLY or node.op_type.endswith("Grad"))


@dataclass(frozen=True)
class LowerTrainingOpsPass(Pass):
    """Replaces ONNX Runtime's training operators by standard nodes.

    For instance `dX = ReluGrad(dY, X)` becomes::

        p = Greater(X, 0)
        dX = Where(p, dY, 0)

    Inputs and outputs of the graph keep their names. A gradient accumulator's buffer after the step becomes a further
    output, `<buffer>.updated`. Contrib operators that stock builds have (FusedMatMul, Gelu, ...) stay.
    """

    name: ClassVar[str] = "lower-training-ops"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Runs the pass.

        Raises:
            ModelError: an operator has no rule, is nested in a subgraph, or its rule lacks a fact or an opset.
        """
        index = graph.index
        found = [p for p, node in enumerate(index.nodes) if _is_training_op(node, index)]
        _refuse_nested(index)
        if not found:
            return PassResult(graph, notes=("no operator of training builds to lower",))
        if index.opset.get("", 1) < _OLDEST_OPSET:
            first = index.nodes[found[0]]
            raise ModelError(
                f"{first.op_type} cannot be lowered: {node_label(first)} needs opset {_OLDEST_OPSET},"
                f" the model imports {index.opset.get('', 1)}",
                "export the forward model with a newer opset and make the training graph again",
            )
        lowered = _lowered(graph, set(found))
        counts = Counter(index.nodes[p].op_type for p in found)
        added = len(lowered.graph.node) - len(index.nodes)
        note = f"{len(found)} training operators of {len(counts)} kinds lowered, {added} more nodes"
        return PassResult(graph.with_model(lowered), True, (note,), {"lowered": dict(counts)})


def _refuse_nested(index: GraphIndex) -> None:
    """Raises for a training operator inside a subgraph or function, where tensors' types are not known."""
    bodies = [f.node for f in index.functions.values()]
    bodies += [body.node for node in index.nodes for body in subgraphs_of(node)]
    for nodes in bodies:
        for inner in nodes_at_any_depth(nodes):
            if _is_training_op(inner, index):
                raise ModelError(
                    f"{inner.op_type} cannot be lowered: {node_label(inner)} lies in a subgraph or function",
                    "only the main graph is lowered",
                )


def _lowered(graph: TrainingGraph, positions: set[int]) -> ModelProto:
    """The model with the nodes at `positions` replaced, in file order."""
    index, types = graph.index, graph.sizes.types
    constants = Constants(index)
    outputs: dict[str, TensorType] = {}
    nodes: list[NodeProto] = []
    for position, node in enumerate(index.nodes):
        if position not in positions:
            nodes.append(node)
            continue
        rule = RULES.get((domain_of(node), node.op_type))
        if rule is None:
            raise ModelError(
                f"there is no rule that lowers {node.op_type} ({node_label(node)})",
                "only a training build of ONNX Runtime runs it",
            )
        emitter = Emitter(node, index, types, constants)
        nodes.extend(emitter.finished(rule(emitter)))
        outputs.update(emitter.extra_outputs)
    model = replace_nodes(model=graph.model, nodes=nodes, value_info=_still_true(graph.model, nodes))
    read = {name for node in nodes_at_any_depth(nodes) for name in node.input}
    model.graph.initializer.extend(t for t in constants.tensors if t.name in read)
    for name, found in outputs.items():
        model.graph.output.append(ValueInfoProto(name=name, type=to_proto(found)))
    return model


def _still_true(model: ModelProto, nodes: list[NodeProto]) -> Iterator[ValueInfoProto]:
    """The value_info of tensors that are still there."""
    there = {name for node in nodes for name in node.output} | {t.name for t in model.graph.initializer}
    return (v for v in model.graph.value_info if v.name in there)
