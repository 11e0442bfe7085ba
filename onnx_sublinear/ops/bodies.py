"""Types of the outputs of If, Loop, Scan and model-local functions: their bodies are walked with what goes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto

from onnx_sublinear.graph import attribute, subgraphs_of
from onnx_sublinear.ops.tensor_types import Dim, TensorType
from onnx_sublinear.ops.type_merging import Known, fill, fill_as_ort, join, stacked
from onnx_sublinear.ops.values import Value

if TYPE_CHECKING:
    from onnx_sublinear.ops.inference import Scope

__all__ = ["CONTROL_FLOW", "MAX_DEPTH", "function_outputs"]

MAX_DEPTH = 64  # of calls and bodies; protobuf itself refuses files nested deeper than about 30 graphs


def _if_outputs(scope: Scope, node: NodeProto, known: Sequence[Known], values: Sequence[Value | None]) -> list[Known]:
    """What holds in both branches; in one, where the condition is known."""
    del known
    branches = [a.g for name in ("then_branch", "else_branch") if (a := attribute(node, name))]
    if len(branches) != 2:
        return []
    condition = values[0].scalar() if values and values[0] else None
    if condition is not None and not scope.world.runtime:
        branches = branches[:1] if condition else branches[1:]
    outputs: list[list[Known]] = []
    for graph in branches:
        body = scope.body(graph)
        body.run(graph.node)
        outputs.append([body.type_of(o.name) for o in graph.output])
    return [join(column) for column in zip(*outputs, strict=False)]


def _loop_outputs(scope: Scope, node: NodeProto, known: Sequence[Known], values: Sequence[Value | None]) -> list[Known]:
    found = attribute(node, "body")
    if found is None:
        return []
    graph, counter, flag = found.g, TensorType(TensorProto.INT64, ()), TensorType(TensorProto.BOOL, ())
    body, states = _fixpoint(scope, graph, [counter, flag], list(known[2:]), [], first_state_output=1)
    count = None if scope.world.runtime else _trip_count(body, graph, node, values)
    scans = [body.type_of(o.name) for o in graph.output[1 + len(states) :]]
    return [*states, *(stacked(t, count, 0) for t in scans)]


def _trip_count(body: Scope, graph: GraphProto, node: NodeProto, values: Sequence[Value | None]) -> Dim:
    """The number of iterations, where the maximum is known and the condition is true throughout."""
    limit = values[0] if values else None
    if limit is None or len(limit.items) != 1 or len(graph.input) < 2 or not graph.output:
        return None
    start = values[1] if len(values) > 1 else None
    given = len(node.input) > 1 and bool(node.input[1])
    if (given and (start is None or start.scalar() is not True)) or not _stays_true(body, graph):
        return None
    item = limit.items[0]
    return item if item is None or isinstance(item, str) else max(int(item), 0)


def _stays_true(body: Scope, graph: GraphProto) -> bool:
    """Whether a Loop body hands its condition on unchanged, or sets it to a constant true."""
    name, given = graph.output[0].name, graph.input[1].name
    while name != given:
        value = body.value_of(name)
        if value is not None:
            return value.scalar() is True
        maker = body.makers.get(name)
        if maker is None or maker.op_type not in ("Identity", "Cast"):
            return False
        name = maker.input[0]
    return True


def _scan_outputs(scope: Scope, node: NodeProto, known: Sequence[Known], values: Sequence[Value | None]) -> list[Known]:
    """Scan of opset 9 on; the one of opset 8 had a batch axis and was withdrawn."""
    del values
    found, scanned = attribute(node, "body"), attribute(node, "num_scan_inputs")
    if found is None or scanned is None or not 0 < scanned.i <= len(known) or scope.opset.get("", 9) < 9:
        return []
    graph, first = found.g, len(known) - scanned.i
    in_axes = list(a.ints) if (a := attribute(node, "scan_input_axes")) else [0] * scanned.i
    out_axes = list(a.ints) if (a := attribute(node, "scan_output_axes")) else [0] * len(graph.output)
    length: Dim = None
    slices: list[Known] = []
    for t, axis in zip(known[first:], in_axes, strict=False):
        if not isinstance(t, TensorType) or t.shape is None or not -len(t.shape) <= axis < len(t.shape):
            slices.append(TensorType(t.elem_type, None) if isinstance(t, TensorType) else None)
            continue
        at = axis % len(t.shape)
        length = t.shape[at] if length is None or isinstance(t.shape[at], int) else length
        slices.append(TensorType(t.elem_type, t.shape[:at] + t.shape[at + 1 :]))
    body, states = _fixpoint(scope, graph, [], list(known[:first]), slices, first_state_output=0)
    scans = [body.type_of(o.name) for o in graph.output[len(states) :]]
    return [*states, *(stacked(t, length, axis) for t, axis in zip(scans, out_axes, strict=False))]


def _fixpoint(
    scope: Scope,
    graph: GraphProto,
    before: list[Known],
    states: list[Known],
    after: list[Known],
    first_state_output: int,
) -> tuple[Scope, list[Known]]:
    """Walk a loop body until the types of its states hold for every iteration.

    A dim that an iteration changes becomes unknown; each round only loses dims, so it ends. ONNX's inference, and so
    the runtime, forgets the shapes of a Loop's states from the start, inside and outside.
    """
    runtime, is_loop = scope.world.runtime, bool(before)
    if runtime and is_loop:
        states = [_without_shape(s) for s in states]
    while True:
        body = scope.body(graph)
        declared = scope.declare(graph.input)
        for info, known in zip(graph.input, [*before, *states, *after], strict=False):
            merge = fill_as_ort if runtime else fill
            body.define(info.name, merge(known, declared.get(info.name)))
        body.run(graph.node)
        names = [o.name for o in graph.output[first_state_output : first_state_output + len(states)]]
        if runtime:
            results = [body.type_of(n) for n in names]
            return body, [_without_shape(t) for t in results] if is_loop else results
        joined = [join((s, body.type_of(n))) for s, n in zip(states, names, strict=False)]
        if joined == states:
            return body, states
        states = joined


def _without_shape(known: Known) -> Known:
    return TensorType(known.elem_type, None) if isinstance(known, TensorType) else known


CONTROL_FLOW = {"If": _if_outputs, "Loop": _loop_outputs, "Scan": _scan_outputs}


def function_outputs(
    scope: Scope, node: NodeProto, function: FunctionProto, known: Sequence[Known], values: Sequence[Value | None]
) -> tuple[list[Known], list[Value | None]]:
    """Types and small values of the outputs of a call of a model-local function."""
    attributes = {a.name: a for a in [*function.attribute_proto, *node.attribute]}
    signature = (
        *(function.domain, function.name, function.overload),
        tuple(attributes[n].SerializeToString(deterministic=True) for n in sorted(attributes)),
        *(tuple(known), tuple(values)),
    )
    cached = scope.world.calls.get(signature)
    if cached is None:
        body = scope.function_body(function)
        for slot, name in enumerate(function.input):
            given = slot < len(known)
            body.define(name, known[slot] if given else None, values[slot] if given else None)
        body.run(_with_attributes(n, attributes) for n in function.node)
        outputs = list(function.output)
        cached = [body.type_of(n) for n in outputs], [body.value_of(n) for n in outputs]
        scope.world.calls[signature] = cached
    return cached


def _with_attributes(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> NodeProto:
    """A node of a function body with its references to the function's attributes replaced, at any depth."""
    copy = NodeProto()
    copy.CopyFrom(node)
    stack = [copy]
    while stack:
        current = stack.pop()
        if any(a.ref_attr_name for a in current.attribute):
            kept: list[AttributeProto] = []
            for a in current.attribute:
                source = attributes.get(a.ref_attr_name) if a.ref_attr_name else a
                if source is not None:  # an optional attribute that the call leaves out is left out here, too
                    kept.append(AttributeProto.FromString(source.SerializeToString()))
                    kept[-1].name = a.name
            del current.attribute[:]
            current.attribute.extend(kept)
        for graph in subgraphs_of(current):
            stack.extend(graph.node)
    return copy
