"""Operators without a CPU kernel, as the runtime runs them: the nodes of their ONNX function body.

The runtime puts these nodes in place of the operator when it loads the file; they count as the last nodes of it. It
works in rounds: operators in the bodies are expanded after all those of the file, so their nodes come behind
(core/framework/graph_partitioner.cc, InlineNodes; core/graph/graph.cc, InlineFunctionProto). Model-local functions are
not expanded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import FunctionProto, ModelProto, NodeProto, defs, helper

from onnx_sublinear.graph import GraphIndex, attribute, domain_of, subgraphs_of
from onnx_sublinear.ops.tensor_types import to_proto
from onnx_sublinear.ops.traits import is_expanded
from onnx_sublinear.sizes import TensorSizes, TensorType, infer_sizes, runtime_types

__all__ = ["expanded"]

_Body = list[tuple[int, NodeProto]]
"""Nodes of an operator's body, each with the round in which the runtime makes it."""


def expanded(
    index: GraphIndex, sizes: TensorSizes, visible: Mapping[str, TensorType], *, training: bool
) -> tuple[ModelProto, dict[str, TensorType], dict[str, TensorType]]:
    """The model with function bodies in place of operators without a kernel.

    Args:
        index: the graph.
        sizes: its sizes (the bodies depend on types).
        visible: what the runtime knows of its tensors.
        training: the training build's kernels.

    Returns:
        The model, the types of the new tensors, and what the runtime knows of them; the given model and no types where
        nothing is to expand.
    """
    wanted = [n for n in index.nodes if index.function_of(n) is None and is_expanded(n, index, training=training)]
    rounds: dict[int, list[NodeProto]] = {}
    replaced: set[str] = set()
    known: dict[tuple[object, ...], tuple[NodeProto, _Body]] = {}
    for node in wanted:
        key = _signature(node, sizes.bound)
        if key in known:
            body = _like(node, *known[key], index)
        else:
            body = _body(node, index, sizes.bound)
            if body and len(set(node.input)) == len(node.input):
                known[key] = node, body
        for number, inner in body:
            rounds.setdefault(number, []).append(inner)
        if body:
            replaced.add(next(o for o in node.output if o))
    if not rounds:
        return index.model, {}, {}
    bodies = [node for number in sorted(rounds) for node in rounds[number]]
    model = ModelProto()
    model.CopyFrom(index.model)
    kept = [n for n in index.nodes if next(iter(o for o in n.output if o), "") not in replaced]
    del model.graph.node[:]
    model.graph.node.extend(kept + bodies)
    known_to_runtime = runtime_types(_bodies_alone(bodies, index, visible), propagates=not training)
    made = {o for n in bodies for o in n.output if o}
    return model, _types(bodies, index, sizes.bound), {n: t for n, t in known_to_runtime.items() if n in made}


def _signature(node: NodeProto, types: Mapping[str, TensorType]) -> tuple[object, ...]:
    """What two nodes must share to have the same body."""
    attributes = tuple(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.op_type, attributes, tuple(types.get(i) for i in node.input), tuple(map(bool, node.output))


def _like(node: NodeProto, first: NodeProto, body: _Body, index: GraphIndex) -> _Body:
    """The body of `first` under the names of `node`."""
    names = {
        "": "",
        **dict(zip(first.input, node.input, strict=True)),
        **dict(zip(first.output, node.output, strict=True)),
    }
    nodes: _Body = []
    for number, inner in body:
        copy = NodeProto()
        copy.CopyFrom(inner)
        for output in inner.output:
            if output not in names:
                names[output] = index.fresh_name(output)
        copy.input[:] = [names.get(i, i) for i in inner.input]
        copy.output[:] = [names[o] for o in inner.output]
        copy.name = index.fresh_name(inner.name)
        nodes.append((number, copy))
    return nodes


def _body(node: NodeProto, index: GraphIndex, types: Mapping[str, TensorType]) -> _Body:
    """The nodes of the operator's function body under the names of the graph; nested operators expanded as well."""
    done: _Body = []
    pending: _Body = [(0, node)]
    known = dict(types)
    while pending:
        number, current = pending.pop(0)
        expand = current is node or is_expanded(current, index, training=False)
        function = _function(current, index, known) if expand else None
        if function is None:
            done.append((number, current))
            continue
        nodes = _instance(function, current, index)
        known.update(_types(nodes, index, known))
        pending[:0] = [(number + 1, inner) for inner in nodes]
    return done if [inner for _, inner in done] != [node] else []


def _function(node: NodeProto, index: GraphIndex, types: Mapping[str, TensorType]) -> FunctionProto | None:
    domain, opset = domain_of(node), index.opset.get(domain_of(node), 1)
    try:
        schema: Any = defs.get_schema(node.op_type, opset, domain)  # the stubs do not know its functions
        if schema.has_context_dependent_function:
            protos = [to_proto(types[i]).SerializeToString() if i else b"" for i in node.input]
            version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
            body: bytes = schema.get_context_dependent_function_with_opset_version(
                version, node.SerializeToString(), protos
            )
        elif schema.has_function:
            version = max(v for v in schema.function_opset_versions if v <= opset)
            body = schema.get_function_with_opset_version(version)
        else:
            return None
    except (defs.SchemaError, KeyError, ValueError):
        return None
    function = FunctionProto()
    function.ParseFromString(body)
    return function


def _instance(function: FunctionProto, node: NodeProto, index: GraphIndex) -> list[NodeProto]:
    names = dict(zip(function.input, node.input, strict=False))
    names.update(zip(function.output, node.output, strict=False))
    defaults = {a.name: a for a in function.attribute_proto}
    nodes: list[NodeProto] = []
    for inner in function.node:
        copy = NodeProto()
        copy.CopyFrom(inner)
        if subgraphs_of(copy):
            return []
        for output in inner.output:
            if output and not names.get(output):
                names[output] = index.fresh_name(f"{node.output[0]}/{output}")
        copy.input[:] = [names.get(i, "") for i in inner.input]
        copy.output[:] = [names[o] if o else "" for o in inner.output]
        copy.name = index.fresh_name(f"{node.name}/{inner.name or inner.op_type}")
        for a in list(copy.attribute):
            if a.ref_attr_name:
                given = attribute(node, a.ref_attr_name) or defaults.get(a.ref_attr_name)
                name = a.name
                copy.attribute.remove(a)
                if given is not None:
                    copy.attribute.add().CopyFrom(given)
                    copy.attribute[-1].name = name
        nodes.append(copy)
    return nodes


def _types(nodes: list[NodeProto], index: GraphIndex, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Types of what `nodes` make."""
    found = infer_sizes(_bodies_alone(nodes, index, types)).types
    made = dict.fromkeys(o for n in nodes for o in n.output if o)
    return {name: found[name] for name in made if name in found}


def _bodies_alone(nodes: list[NodeProto], index: GraphIndex, types: Mapping[str, TensorType]) -> GraphIndex:
    """A graph of `nodes` whose inputs have the given types."""
    made = {o for n in nodes for o in n.output if o}
    read = dict.fromkeys(i for n in nodes for i in n.input if i and i not in made)
    inputs = [helper.make_value_info(i, to_proto(types[i])) for i in read if i in types]
    model = helper.make_model(helper.make_graph(nodes, "bodies", inputs, []), opset_imports=index.model.opset_import)
    model.ir_version = index.model.ir_version
    return GraphIndex(model)
