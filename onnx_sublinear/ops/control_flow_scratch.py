"""Scratch of If, Loop and Scan: what their bodies hold, and the copies of states and of outputs a step.

A body's tensors are counted by lifetime in its own file order, each in a buffer of its own; tensors whose type cannot
be inferred count as nothing. Source of the copies:
core/providers/cpu/controlflow (loop.cc, scan_utils.cc), checked against a malloc tracer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, shape_inference

from onnx_sublinear.graph import attribute, captured_names
from onnx_sublinear.ops.kernel_call import KernelCall
from onnx_sublinear.ops.tensor_types import TensorType, from_proto, tensor_bytes, to_proto

__all__ = ["NodeScratch", "control_flow", "scan_states", "typed_bodies"]

NodeScratch = Callable[[NodeProto, Mapping[str, TensorType]], int]
"""Scratch bytes of a node of the body, given the types of all tensors that it sees."""

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def _bytes(known: TensorType | None) -> int:
    return (tensor_bytes(known) or 0) if known is not None else 0


def _body_types(
    body: GraphProto, given: Sequence[TensorType | None], outer: Mapping[str, TensorType], opset: int
) -> dict[str, TensorType]:
    """Types of the body's tensors and of those it captures.

    From its declarations and, where ONNX's inference can, from the types of the node's inputs and of what is captured.
    """
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)])
    for declared, known in zip(model.graph.input, given, strict=False):
        if known is not None and known.elem_type:
            declared.type.CopyFrom(to_proto(known))
    own = {value.name for value in (*body.input, *body.initializer)} | {o for node in body.node for o in node.output}
    captured = {name: known for name, known in outer.items() if name not in own}
    for name, known in captured.items():
        if known.elem_type:
            model.graph.input.append(ValueInfoProto(name=name, type=to_proto(known)))
    try:
        inferred: ModelProto = shape_inference.infer_shapes(model)
    except shape_inference.InferenceError:
        inferred = model
    graph = inferred.graph
    types: dict[str, TensorType] = dict(captured)
    for value in (*graph.input, *graph.value_info, *graph.output):
        known = from_proto(value.type)
        if known is not None:
            types[value.name] = known
    return types


def _roots(body: GraphProto) -> dict[str, str]:
    """Per view the tensor whose buffer it shows."""
    root: dict[str, str] = {}
    for node in body.node:
        if node.op_type in _VIEWS and node.input:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
    return root


def _body_peak(
    body: GraphProto, types: Mapping[str, TensorType], scratch: NodeScratch, placed: Container[str] = ()
) -> int:
    """The largest live bytes of the body's own tensors, its outputs included, but for those in `placed`."""
    root = {name: source for name, source in _roots(body).items() if name not in placed}
    last = {root.get(name, name): step for step, node in enumerate(body.node) for name in node.input}
    last.update({root.get(value.name, value.name): len(body.node) for value in body.output})
    live = peak = 0
    released: dict[int, int] = {}
    for step, node in enumerate(body.node):
        for name in node.output:
            if name and name not in root and name not in placed:
                size = _bytes(types.get(name))
                live += size
                end = last.get(name, step)
                released[end] = released.get(end, 0) + size
        peak = max(peak, live + scratch(node, types))
        live -= released.pop(step, 0)
    return peak


def _carried(body: GraphProto, types: Mapping[str, TensorType], states: slice) -> int:
    """Bytes of the states that a step makes; those that it only hands on are not copied."""
    root, given = _roots(body), {value.name for value in body.input}
    names = (value.name for value in body.output[states])
    return sum(_bytes(types.get(name)) for name in names if root.get(name, name) not in given)


def typed_bodies(call: KernelCall) -> list[tuple[GraphProto, dict[str, TensorType]]]:
    """The bodies of an If, Loop or Scan node, each with the types of its tensors."""
    names = ("then_branch", "else_branch") if call.node.op_type == "If" else ("body",)
    given = _BODY_INPUTS[call.node.op_type](call)
    captured = {name: call.outer[name] for name in captured_names(call.node) if name in call.outer}
    found = (attribute(call.node, name) for name in names)
    return [(a.g, _body_types(a.g, given, captured, call.opset)) for a in found if a is not None]


def _loop_inputs(call: KernelCall) -> list[TensorType | None]:
    return [None, None, *call.inputs[2:]]


def scan_states(call: KernelCall) -> int:
    """Number of states that a Scan node carries (its first inputs and outputs)."""
    return len(call.node.input) - call.integer("num_scan_inputs", len(call.node.input))


def _scan_inputs(call: KernelCall) -> list[TensorType | None]:
    states = scan_states(call)
    axes = call.integers("scan_input_axes") or (0,) * (len(call.node.input) - states)
    given: list[TensorType | None] = list(call.inputs[:states])
    for known, axis in zip(call.inputs[states:], axes, strict=False):
        if known is None or not known.shape:
            given.append(None)
            continue
        at = axis % len(known.shape)
        given.append(TensorType(known.elem_type, known.shape[:at] + known.shape[at + 1 :]))
    return given


_BODY_INPUTS: Mapping[str, Callable[[KernelCall], Sequence[TensorType | None]]] = {
    "If": lambda _: (),
    "Loop": _loop_inputs,
    "Scan": _scan_inputs,
}


def _if(call: KernelCall, scratch: NodeScratch) -> int:
    peaks = [_body_peak(body, types, scratch) for body, types in typed_bodies(call)]
    return max(peaks, default=0) - sum(map(_bytes, call.outputs))


def _loop(call: KernelCall, scratch: NodeScratch) -> int:
    """Either the last step's body over the states before it, or both states beside the outputs they are copied to.

    Outputs that are stacked are kept as one tensor a step, and joined at the end.
    """
    states = len(call.node.input) - 2
    stacked = sum(map(_bytes, call.outputs[states:]))
    final = sum(map(_bytes, call.outputs[:states]))
    for body, types in typed_bodies(call):
        carried = _carried(body, types, slice(1, 1 + states))
        return max(2 * carried + stacked, carried + _body_peak(body, types, scratch) - final)
    return 0


def _scan(call: KernelCall, scratch: NodeScratch) -> int:
    """The body, and the states before and behind a step; what it makes is written where it belongs.

    The first step reads the node's input and the last writes its output (LoopStateVariable in scan_utils.cc).
    """
    states = scan_states(call)
    axes = call.integers("scan_input_axes") or (0,)
    steps = call.shape(states)[axes[0]] if states < len(call.node.input) else 1
    for body, types in typed_bodies(call):
        placed = {value.name for value in body.output}
        held = sum(_bytes(types.get(value.name)) for value in body.output[:states])
        return min(2, max(0, steps - 1)) * held + _body_peak(body, types, scratch, placed)
    return 0


_KINDS: Mapping[str, Callable[[KernelCall, NodeScratch], int]] = {"If": _if, "Loop": _loop, "Scan": _scan}


def control_flow(call: KernelCall, scratch: NodeScratch) -> int:
    """Bytes beyond inputs and outputs that an If, Loop or Scan node holds at most."""
    return max(0, _KINDS[call.node.op_type](call, scratch))
