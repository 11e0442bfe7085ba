"""Writes a layout into a model: nodes in schedule order, added nodes, and the types of all known tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.passes.barriers import Added, Layout
from onnx_sublinear.passes.rewriting import ROLE_BARRIER, mark, replace_nodes
from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, Kernel, LayoutNumbers, RuntimeGraph
from onnx_sublinear.sizes import TensorType, runtime_types
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Draft", "Emitted", "emit"]

_MIN_TAKES_INT64 = 12  # opset; before it, products of sizes with zeros serve as well


class _Emitter:
    """Makes the added nodes of one model; shape constants are shared per rank."""

    def __init__(self, graph: TrainingGraph, layout: Layout, private: bool) -> None:
        self.graph, self.private = graph, private
        self.names = list(layout.graph.names)
        self.declared: dict[str, TensorType] = {}  # of the views
        self.viewed: dict[str, str] = {}  # view -> tensor
        self.counts: dict[str, TensorType] = {}  # tokens and shapes
        self.zeros: dict[int, str] = {}
        self.constants: list[NodeProto] = []
        self.opset = graph.index.opset.get("", 1)

    def fresh(self, base: str) -> str:
        """A name that nothing in the model has."""
        return self.graph.index.fresh_name(base)

    def tensor_of(self, name: str) -> str:
        """What `name` is a view of, or itself."""
        while name in self.viewed:
            name = self.viewed[name]
        return name

    def node(self, op_type: str, inputs: list[str], output: str) -> NodeProto:
        """An added node."""
        made = helper.make_node(op_type, inputs, [output], name=self.fresh(f"barrier/{output}"))
        mark(made, ROLE_BARRIER)
        return made

    def zeros_of(self, rank: int) -> str:
        """The constant int64 zeros[rank]."""
        if rank not in self.zeros:
            name = self.zeros[rank] = self.fresh(f"barrier/zeros{rank}")
            constant = helper.make_node("Constant", [], [name], name=self.fresh(f"{name}/node"))
            tensor = helper.make_tensor("value", TensorProto.INT64, [rank], [0] * rank)
            constant.attribute.append(helper.make_attribute("value", tensor))
            mark(constant, ROLE_BARRIER)
            self.constants.append(constant)
            self.counts[name] = TensorType(TensorProto.INT64, (rank,))
        return self.zeros[rank]

    def nodes_of(self, added: Added) -> Iterator[NodeProto]:
        """The node (before opset 12, nodes) of one addition."""
        source = self.names[added.source]
        name = self.names[added.value] = self.fresh(f"{source}/{added.kind}")
        operands = [self.names[v] for v in added.operands]
        if added.kind in ("token", "marker"):
            self.counts[name] = TensorType(TensorProto.INT64, ())
            yield self.node("Size", [source], name)
        elif added.kind == "dim":
            self.counts[name] = TensorType(TensorProto.INT64, (1,))
            made = self.node("Shape", [source], name)
            made.attribute.extend([helper.make_attribute("start", 0), helper.make_attribute("end", 1)])
            yield made
        elif added.kind == "probe":
            self.viewed[name] = source
            yield self.node("Reshape", [source, *operands], name)
        elif added.kind == "shape":
            rank = len(self.graph.sizes.types[self.tensor_of(source)].shape or ())
            zeros = self.zeros_of(rank)
            self.counts[name] = TensorType(TensorProto.INT64, (rank,))
            if self.opset >= _MIN_TAKES_INT64:
                yield self.node("Min", [*operands, zeros], name)
            else:
                yield from self.products(operands, zeros, name)
        else:
            tensor = self.tensor_of(source)
            t = self.graph.sizes.types[tensor]
            self.declared[name] = _with_own_dims(name, t) if self.private else t
            self.viewed[name] = source
            yield self.node("Reshape", [source, *operands], name)

    def products(self, tokens: list[str], zeros: str, shape: str) -> Iterator[NodeProto]:
        """shape = zeros * token * ..., for opsets whose Min takes no integers."""
        current = zeros
        for i, token in enumerate(tokens):
            following = shape if i + 1 == len(tokens) else self.fresh(f"{shape}/product")
            self.counts[following] = self.counts[shape]
            yield self.node("Mul", [current, token], following)
            current = following

    def original(self, k: int, swaps: Mapping[int, int]) -> NodeProto:
        """Node `k`, reading its views."""
        node = self.graph.index.nodes[k]
        if not swaps:
            return node
        views = {self.names[value]: self.names[view] for value, view in swaps.items()}
        copy = NodeProto()
        copy.CopyFrom(node)
        for slot, read in enumerate(copy.input):
            if read in views:
                copy.input[slot] = views[read]
        return copy


def _with_own_dims(name: str, t: TensorType) -> TensorType:
    return TensorType(t.elem_type, tuple(f"{name}:{i}" for i in range(len(t.shape or ()))))


@dataclass(frozen=True)
class Emitted:
    """A written layout.

    Attributes:
        graph: the graph.
        rows: per node the node (of the graph without additions) that it stands for; -1 for added ones.
    """

    graph: TrainingGraph
    rows: tuple[int, ...]

    @property
    def added(self) -> int:
        """Number of nodes that were added."""
        return self.rows.count(-1)

    @cached_property
    def worst_bytes(self) -> int:
        """The peak in the worst order."""
        return max(run.peak_bytes for run in self.graph.simulations.values())


def emit(graph: TrainingGraph, layout: Layout, *, private: bool) -> Emitted:
    """The model of `layout`.

    Every tensor whose type is known is declared, since the runtime takes no buffer over for a tensor of unknown
    shape.

    Args:
        graph: the model without the layout's additions.
        layout: what to write.
        private: declare views with symbols of their own for dims, and what is behind them with what the runtime infers
            from these.
    """
    emitter, nodes, rows = _nodes(graph, layout, private)
    types = _known_types(graph, emitter)
    model = replace_nodes(graph.model, nodes, _value_info(graph, emitter.declared if private else types))
    index = GraphIndex(model)
    visible = {**graph.visible, **types, **emitter.counts}
    if private and emitter.declared:
        visible = runtime_types(index, propagates=True, private_dims=True)
    if private:
        _declare(graph, model, {name: visible.get(name, t) for name, t in types.items()})
    runtime = None
    if graph.executed is graph.runtime and len(rows) == len(layout.rows) + len(emitter.constants):
        runtime = _runtime(layout, emitter, visible)
    return _written(graph, emitter, model, rows, index=index, visible=visible, runtime=runtime)


class Draft:
    """A layout whose tensors are to be declared with other dims than the runtime would infer.

    Where inference finds a symbol and another one is declared, the declared one stays (onnx/defs/shape_inference.h,
    mergeInDimensionInfo), and the allocation planner matches tensors by symbols (allocation_planner.cc, SameShape). So
    wherever the runtime infers no number, it is ours to say which tensors may take over each other's buffers: those of
    one size that are made in one epoch of the schedule, but for those that are set apart, and the pairs of in-place
    kernels.

    As few as possible are set apart: the planner looks through all free buffers at each tensor, so that with many that
    nothing takes over a session is slow to create.

    Args:
        graph: the model without the layout's additions.
        layout: what to write.
        least_bytes: smaller tensors stay as they are.
    """

    def __init__(self, graph: TrainingGraph, layout: Layout, least_bytes: int) -> None:
        self.graph, self.layout, self.least_bytes = graph, layout, least_bytes
        self.emitter, nodes, self.rows = _nodes(graph, layout, True)
        self.model = replace_nodes(graph.model, nodes, [])
        self.index, self.visible = _undeclared(graph, self.emitter, self.model)

    def executed(self, epoch: int, apart: Collection[str]) -> RuntimeGraph:
        """The file as the runtime runs it, with epochs of that many nodes and these tensors set apart."""
        return _runtime(self.layout, self.emitter, {**self.visible, **self._dims(epoch, apart)})

    def written(self, epoch: int, apart: Collection[str]) -> Emitted:
        """The model, with epochs of that many nodes and these tensors set apart."""
        graph, emitter = self.graph, self.emitter
        visible = {**self.visible, **self._dims(epoch, apart)}
        types = _known_types(graph, emitter)
        _declare(graph, self.model, {name: visible.get(name, t) for name, t in types.items()})
        runtime = executed = None
        if not self.graph.float16_in_float and len(self.rows) <= len(self.layout.rows) + len(emitter.constants):
            executed = _runtime(self.layout, emitter, visible)
            runtime = executed if graph.executed is graph.runtime else None
        return _written(
            graph, emitter, self.model, self.rows, index=self.index, visible=visible, runtime=runtime, executed=executed
        )

    def _dims(self, epoch: int, apart: Collection[str]) -> dict[str, TensorType]:
        """Types with other symbols in place of those that the runtime would carry on."""
        laid, names, known = self.layout.graph, self.emitter.names, self.graph.sizes.types
        own: dict[int, TensorType] = {}
        for place, kernel in enumerate(laid.kernels):
            for v in kernel.writes:
                t = self.visible.get(names[v])
                if laid.is_output[v] or laid.sizes[v] < self.least_bytes or t is None or t.shape is None:
                    continue
                pairs = () if names[v] in apart else kernel.inplace
                source = next((a for a, b in pairs if b == v and laid.layouts[a] == laid.layouts[v]), -1)
                taken = own.get(source, self.visible.get(names[source]) if source >= 0 else None)
                if taken is not None and taken.elem_type == t.elem_type and _numbers(taken) == _numbers(t):
                    own[v] = taken
                    continue
                exact = known.get(self.emitter.tensor_of(names[v]))
                dims = exact.shape if exact is not None and exact.shape is not None else t.shape
                shape: list[int | str | None] = []
                for i, (seen, dim) in enumerate(zip(t.shape, dims, strict=True)):
                    alone = dim is None or names[v] in apart
                    symbol = f"{names[v]}:{i}" if alone else f"{dim}@{place // epoch}"
                    shape.append(seen if isinstance(seen, int) else symbol)
                own[v] = TensorType(t.elem_type, tuple(shape))
        return {names[v]: t for v, t in own.items()}


def _nodes(graph: TrainingGraph, layout: Layout, private: bool) -> tuple[_Emitter, list[NodeProto], list[int]]:
    """The nodes of a layout in file order, and per node the row that it stands for (-1: added)."""
    emitter = _Emitter(graph, layout, private)
    nodes: list[NodeProto] = []
    rows: list[int] = []
    for n, row in enumerate(layout.rows):
        if isinstance(row, Added):
            made = list(emitter.nodes_of(row))
            nodes += made
            rows += [-1] * len(made)
        elif n == 0 or layout.rows[n - 1] != row:  # else: the next kernel of a body
            nodes.append(emitter.original(row, layout.swaps.get(row, {})))
            rows.append(row)
    return emitter, emitter.constants + nodes, [-1] * len(emitter.constants) + rows


def _known_types(graph: TrainingGraph, emitter: _Emitter) -> dict[str, TensorType]:
    """What nodes make and views; probes stay undeclared, so that their Shape is not folded."""
    return {n: t for n, t in graph.sizes.types.items() if n in graph.index.producer} | emitter.declared


def _declare(graph: TrainingGraph, model: ModelProto, types: Mapping[str, TensorType]) -> None:
    del model.graph.value_info[:]
    model.graph.value_info.extend(_value_info(graph, types))


def _written(
    graph: TrainingGraph,
    emitter: _Emitter,
    model: ModelProto,
    rows: Sequence[int],
    *,
    index: GraphIndex,
    visible: Mapping[str, TensorType],
    runtime: RuntimeGraph | None = None,
    executed: RuntimeGraph | None = None,
) -> Emitted:
    sizes = graph.sizes.with_copies({view: emitter.tensor_of(view) for view in emitter.viewed}, emitter.counts)
    written = graph.with_model(model, index=index, sizes=sizes, visible=visible, runtime=runtime, executed=executed)
    return Emitted(written, tuple(rows))


def _undeclared(graph: TrainingGraph, emitter: _Emitter, model: ModelProto) -> tuple[GraphIndex, dict[str, TensorType]]:
    """What the runtime would know of the written model if nothing but its views were declared.

    Outputs of operators without shape inference, of which it would know nothing, count as declared with symbols.
    """
    model.graph.value_info.extend(_declarations(emitter.declared))
    index = GraphIndex(model)
    visible = runtime_types(index, propagates=True, private_dims=True)
    lost: dict[str, TensorType] = {}
    for name, t in graph.sizes.types.items():
        inferred = visible.get(name)
        if name in index.producer and t.shape is not None and (inferred is None or inferred.shape is None):
            lost[name] = _with_own_dims(name, t)
    if lost:
        model.graph.value_info.extend(_declarations(lost))
        index = GraphIndex(model)
        visible = runtime_types(index, propagates=True, private_dims=True)
    return index, visible


def _numbers(t: TensorType) -> list[int | None]:
    """The dims of `t` that are numbers, None for the others."""
    return [d if isinstance(d, int) else None for d in t.shape or ()]


def _runtime(layout: Layout, emitter: _Emitter, visible: Mapping[str, TensorType]) -> RuntimeGraph:
    """The layout's graph with the names and types of the written model: what `runtime_graph` would find again."""
    runtime = layout.graph.with_kernels([*(Kernel((), ()) for _ in emitter.constants), *layout.graph.kernels])
    runtime.names = list(emitter.names)
    numbers = LayoutNumbers()
    for v, name in enumerate(runtime.names):
        runtime.shapes[v], runtime.layouts[v] = numbers.of(visible.get(name))
    for constant in emitter.constants:
        runtime.add_value(constant.output[0], 0, UNKNOWN_LAYOUT, external=True)
    return runtime


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
    return infos + _declarations(known)


def _declarations(types: Mapping[str, TensorType]) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(name, t.elem_type, list(t.shape or ())) for name, t in types.items()]
