"""Writes a layout into a model: nodes in schedule order, barrier nodes, and the types of all known tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import NodeProto, ValueInfoProto, helper

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.passes.barriers import Barrier, Layout
from onnx_sublinear.passes.rewriting import ROLE_BARRIER, mark, replace_nodes
from onnx_sublinear.sizes import TensorType, runtime_types
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["emit"]

_MIN_TAKES_INT64 = 12  # opset; before it, products of sizes with zeros serve as well


class _Emitter:
    """Makes barrier nodes of one model; shape constants are shared per rank."""

    def __init__(self, graph: TrainingGraph, layout: Layout, private: bool) -> None:
        self.graph, self.layout, self.private = graph, layout, private
        self.types: dict[str, TensorType] = {}  # of the views, as declared
        self.copies: dict[str, str] = {}  # view -> viewed tensor
        self.zeros: dict[int, str] = {}
        self.constants: list[NodeProto] = []
        self.opset = graph.index.opset.get("", 1)
        self.count = 0

    def node(self, op_type: str, inputs: list[str], output: str) -> NodeProto:
        """A barrier node with a fresh name."""
        made = helper.make_node(op_type, inputs, [output], name=self.graph.index.fresh_name(f"barrier/{output}"))
        mark(made, ROLE_BARRIER)
        return made

    def zeros_of(self, rank: int) -> str:
        """The constant int64 zeros[rank]."""
        if rank not in self.zeros:
            name = self.zeros[rank] = self.graph.index.fresh_name(f"barrier/zeros{rank}")
            constant = helper.make_node("Constant", [], [name], name=self.graph.index.fresh_name(f"{name}/node"))
            tensor = helper.make_tensor("value", helper.TensorProto.INT64, [rank], [0] * rank)
            constant.attribute.append(helper.make_attribute("value", tensor))
            mark(constant, ROLE_BARRIER)
            self.constants.append(constant)
        return self.zeros[rank]

    def barrier(self, barrier: Barrier) -> Iterator[tuple[NodeProto, str]]:
        """The nodes of one barrier, with the viewed tensor's name for views ("" for the others)."""
        names, index = self.layout.graph.names, self.graph.index
        tokens = []
        for value in barrier.tokens:
            tokens.append(index.fresh_name(f"{names[value]}/token"))
            yield self.node("Size", [names[value]], tokens[-1]), ""
        for value in barrier.views:
            name = names[value]
            shape_type = self.graph.sizes.types[name]
            zeros = self.zeros_of(len(shape_type.shape or ()))
            shape = index.fresh_name(f"{name}/view_shape")
            if self.opset >= _MIN_TAKES_INT64:
                yield self.node("Min", [*tokens, zeros], shape), ""
            else:
                yield from ((n, "") for n in self.products(tokens, zeros, shape))
            view = index.fresh_name(f"{name}/view")
            self.types[view] = _with_own_dims(view, shape_type) if self.private else shape_type
            self.copies[view] = name
            yield self.node("Reshape", [name, shape], view), name

    def products(self, tokens: list[str], zeros: str, shape: str) -> Iterator[NodeProto]:
        """shape = zeros * token * ..., for opsets whose Min takes no integers."""
        current = zeros
        for i, token in enumerate(tokens):
            following = shape if i + 1 == len(tokens) else self.graph.index.fresh_name(f"{shape}/product")
            yield self.node("Mul", [current, token], following)
            current = following


def _with_own_dims(name: str, t: TensorType) -> TensorType:
    return TensorType(t.elem_type, tuple(f"{name}:{i}" for i in range(len(t.shape or ()))))


def emit(graph: TrainingGraph, layout: Layout, *, private: bool) -> tuple[TrainingGraph, int]:
    """The model of `layout`, and the number of nodes that the barriers added.

    Every tensor whose type is known is declared, since the runtime takes no buffer over for a tensor of unknown
    shape. With `private`, views are declared with symbols of their own for dims, and what is behind them with what
    the runtime infers from these: then no dead buffer is held for a later tensor of the same shape
    (allocation_planner.cc, SameShape compares symbols), while in-place kernels still match.
    """
    emitter = _Emitter(graph, layout, private)
    runtime = graph.runtime
    nodes: list[NodeProto] = []
    open_stage = -1
    views: dict[str, str] = {}
    for k in layout.schedule:
        if layout.stages[k] != open_stage:
            open_stage = layout.stages[k]
            views = {}
            if open_stage in layout.barriers:
                for made, viewed in emitter.barrier(layout.barriers[open_stage]):
                    nodes.append(made)
                    if viewed:
                        views[viewed] = made.output[0]
        node = graph.index.nodes[k]
        barrier = layout.barriers.get(open_stage)
        if barrier is not None and k in barrier.readers:
            name = runtime.names[barrier.readers[k]]
            copy = NodeProto()
            copy.CopyFrom(node)
            for slot, read in enumerate(copy.input):
                if read == name:
                    copy.input[slot] = views[name]
            node = copy
        nodes.append(node)
    nodes = emitter.constants + nodes
    added = len(nodes) - len(layout.schedule)
    types: Mapping[str, TensorType] = {n: t for n, t in graph.sizes.types.items() if n in graph.index.producer}
    types = {**types, **emitter.types}
    if private and emitter.types:
        draft = replace_nodes(graph.model, nodes, _value_info(graph, emitter.types))
        visible = runtime_types(GraphIndex(draft), private_dims=True)
        types = {name: visible.get(name, t) for name, t in types.items()}
    else:
        visible = {**graph.visible, **types}
    model = replace_nodes(graph.model, nodes, _value_info(graph, types))
    sizes = graph.sizes.with_copies(emitter.copies)
    return graph.with_model(model, sizes=sizes, visible=visible), added


def _value_info(graph: TrainingGraph, types: Mapping[str, TensorType]) -> list[ValueInfoProto]:
    """What was declared, with types brought up to `types`, then the rest of these."""
    known = {n: t for n, t in types.items() if t.elem_type and t.shape is not None and n not in graph.index.output_set}
    infos: list[ValueInfoProto] = []
    for declared in graph.model.graph.value_info:
        info = ValueInfoProto()
        info.CopyFrom(declared)
        t = known.pop(declared.name, None)
        if t is not None:
            info.type.CopyFrom(helper.make_tensor_type_proto(t.elem_type, list(t.shape or ())))
        infos.append(info)
    infos += [helper.make_tensor_value_info(name, t.elem_type, list(t.shape or ())) for name, t in known.items()]
    return infos
