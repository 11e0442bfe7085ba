"""GraphIndex: the def-use index over a ModelProto.

The model stays the one source of truth; the index answers who makes a tensor and who reads it. It is built in one
walk: main graph first, then every subgraph (at any depth, without recursion) for the outer tensors that it captures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnx_sublinear.errors import GraphError, printable

__all__ = ["GraphIndex", "attribute", "captured_names", "domain_of", "node_label", "nodes_at_any_depth", "subgraphs_of"]


def domain_of(node: NodeProto) -> str:
    """The node's domain, with the two spellings of the default domain made one ("")."""
    return "" if node.domain == "ai.onnx" else node.domain


def attribute(node: NodeProto, name: str) -> AttributeProto | None:
    """The attribute `name` of `node`, or None."""
    return next((a for a in node.attribute if a.name == name), None)


def node_label(node: NodeProto) -> str:
    """How a message names a node: by its name, else by its first output."""
    first = next((o for o in node.output if o), "")
    return f"node '{printable(node.name)}'" if node.name else f"the {node.op_type} node that makes '{printable(first)}'"


def subgraphs_of(node: NodeProto) -> list[GraphProto]:
    """The graphs in the attributes of `node`, in order."""
    found: list[GraphProto] = []
    for a in node.attribute:
        if a.HasField("g"):
            found.append(a.g)
        found.extend(a.graphs)
    return found


def nodes_at_any_depth(nodes: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """Every node of `nodes` and of the subgraphs below them, without recursion."""
    stack: list[Iterator[NodeProto]] = [iter(nodes)]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            continue
        yield node
        stack.extend(iter(graph.node) for graph in subgraphs_of(node))


def captured_names(node: NodeProto) -> dict[str, None]:
    """Names that the subgraphs of `node` read from outside, in the order of their first use.

    Lexical scope: a name that is defined in the subgraph, or in one that encloses it below `node`, is not captured.
    """
    captured: dict[str, None] = {}
    defined: dict[str, int] = {}  # name -> how many of the open scopes define it

    def enter(graph: GraphProto) -> list[str]:
        names = [v.name for v in graph.input]
        names += [t.name for t in graph.initializer]
        names += [s.values.name for s in graph.sparse_initializer]
        names += [o for n in graph.node for o in n.output if o]
        for name in names:
            defined[name] = defined.get(name, 0) + 1
        return names

    # A scope is (nodes still to visit, names to close, graph).
    scopes: list[tuple[Iterator[NodeProto], list[str], GraphProto]] = []
    for root in subgraphs_of(node):
        scopes.append((iter(root.node), enter(root), root))
        while scopes:
            nodes, names, graph = scopes[-1]
            inner = next(nodes, None)
            if inner is None:
                for output in graph.output:
                    if output.name and not defined.get(output.name):
                        captured[output.name] = None
                for name in names:
                    defined[name] -= 1
                scopes.pop()
                continue
            for name in inner.input:
                if name and not defined.get(name):
                    captured[name] = None
            scopes.extend((iter(g.node), enter(g), g) for g in subgraphs_of(inner))
    return captured


class GraphIndex:
    """Who makes and who reads each tensor of the main graph.

    Positions are positions in `model.graph.node`. The index does not follow later edits of the model: build a new one.

    Attributes:
        nodes: the nodes in file order.
        inputs: graph inputs by name (also those that have an initializer as default).
        initializers: dense initializers by name.
        sparse_initializers: names of the sparse initializers.
        outputs: names of the graph outputs in order, repetitions kept.
        producer: tensor -> position of the node that makes it.
        readers: tensor -> positions of the nodes that read it, ascending, each once (captures included).
        reads: per node the tensors it reads, each once: its inputs in slot order, then what its subgraphs capture.
        captures: position -> tensors captured by the node's subgraphs (only nodes that have any).
        order: a topological order of the positions; file order where that is one, else the smallest position first.
        functions: model-local functions by (domain, name, overload).
        opset: domain -> imported version.

    Raises:
        GraphError: a tensor is defined twice, read without a definition, or depends on itself.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph = model.graph
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.inputs: dict[str, ValueInfoProto] = {v.name: v for v in self.graph.input}
        self.initializers: dict[str, TensorProto] = {t.name: t for t in self.graph.initializer}
        self.sparse_initializers: set[str] = {s.values.name for s in self.graph.sparse_initializer}
        self.outputs: list[str] = [v.name for v in self.graph.output]
        self.output_set: set[str] = set(self.outputs)
        self.opset: dict[str, int] = {}
        for entry in model.opset_import:
            domain = "" if entry.domain == "ai.onnx" else entry.domain
            self.opset[domain] = max(entry.version, self.opset.get(domain, 0))
        self.functions: dict[tuple[str, str, str], FunctionProto] = {
            ("" if f.domain == "ai.onnx" else f.domain, f.name, f.overload): f for f in model.functions
        }
        self.producer: dict[str, int] = {}
        self.reads: list[tuple[str, ...]] = []
        self.captures: dict[int, tuple[str, ...]] = {}
        self._index_definitions()
        self._index_reads()
        self.readers: dict[str, list[int]] = {}
        for position, names in enumerate(self.reads):
            for name in names:
                self.readers.setdefault(name, []).append(position)
        self.order: list[int] = self._topological_order()
        self._taken: set[str] | None = None
        self._next_suffix: dict[str, int] = {}

    def is_external(self, name: str) -> bool:
        """Whether the tensor comes from outside the nodes: a graph input or an initializer."""
        return name in self.inputs or name in self.initializers or name in self.sparse_initializers

    def function_of(self, node: NodeProto) -> FunctionProto | None:
        """The model-local function that `node` calls, or None."""
        return self.functions.get((domain_of(node), node.op_type, node.overload)) if self.functions else None

    def constants_first(self, order: Iterable[int]) -> list[int]:
        """`order` with the Constant nodes in front.

        The runtime turns them into initializers before it orders nodes, so its orders do not say where they stand.
        """
        positions = list(order)
        constants = {p for p in positions if self.nodes[p].op_type == "Constant" and not self.reads[p]}
        if not constants:
            return positions
        return [p for p in positions if p in constants] + [p for p in positions if p not in constants]

    def fresh_name(self, base: str) -> str:
        """A name that no scope of the model uses for a tensor or a node: `base`, else `base` with a number."""
        if self._taken is None:
            self._taken = _all_names(self.model)
        name = base
        while name in self._taken:
            self._next_suffix[base] = self._next_suffix.get(base, 0) + 1
            name = f"{base}_{self._next_suffix[base]}"
        self._taken.add(name)
        return name

    def _index_definitions(self) -> None:
        for position, node in enumerate(self.nodes):
            for name in node.output:
                if not name:
                    continue
                if name in self.producer or self.is_external(name):
                    raise GraphError(
                        f"tensor '{printable(name)}' is defined twice ({node_label(node)} makes it again)",
                        "every tensor of a graph must have one definition",
                    )
                self.producer[name] = position

    def _index_reads(self) -> None:
        known = self.producer.keys() | self.inputs.keys() | self.initializers.keys() | self.sparse_initializers
        for position, node in enumerate(self.nodes):
            names = dict.fromkeys(node.input)
            names.pop("", None)
            if any(a.HasField("g") or a.graphs for a in node.attribute):
                captured = captured_names(node)
                self.captures[position] = tuple(captured)
                names.update(captured)
            for name in names:
                if name not in known:
                    raise GraphError(
                        f"{node_label(node)} reads '{printable(name)}', which nothing defines",
                        "it is no graph input, initializer or node output; was the file cut by an earlier tool?",
                    )
            self.reads.append(tuple(names))
        for name in self.outputs:
            if name not in known:
                raise GraphError(f"graph output '{printable(name)}' is not made by any node")

    def _topological_order(self) -> list[int]:
        producer = self.producer
        waiting = [0] * len(self.nodes)
        in_order = True
        for position, names in enumerate(self.reads):
            for name in names:
                made_at = producer.get(name)
                if made_at is not None:
                    waiting[position] += 1
                    in_order = in_order and made_at < position
        if in_order:
            return list(range(len(self.nodes)))
        ready = [p for p, n in enumerate(waiting) if n == 0]
        order: list[int] = []
        while ready:
            position = heapq.heappop(ready)
            order.append(position)
            for name in self.nodes[position].output:
                for reader in self.readers.get(name, ()) if name else ():
                    waiting[reader] -= 1
                    if waiting[reader] == 0:
                        heapq.heappush(ready, reader)
        if len(order) < len(self.nodes):
            raise GraphError(
                f"the graph has a cycle through tensor '{printable(self._tensor_on_cycle(waiting))}'",
                "a training graph must be acyclic; loops belong into Loop or Scan nodes",
            )
        return order

    def _tensor_on_cycle(self, waiting: Sequence[int]) -> str:
        """A tensor on a cycle: walk back from a blocked node along blocked producers until a node comes again."""
        position = next(p for p, n in enumerate(waiting) if n)
        seen: set[int] = set()
        name = ""
        while position not in seen:
            seen.add(position)
            name, position = next(
                (r, self.producer[r]) for r in self.reads[position] if r in self.producer and waiting[self.producer[r]]
            )
        return name


def _all_names(model: ModelProto) -> set[str]:
    """Every tensor and node name of every scope: main graph, subgraphs, functions, training info."""
    names: set[str] = set()
    graphs = [model.graph]
    for info in model.training_info:
        graphs += [info.initialization, info.algorithm]
    node_lists: list[Sequence[NodeProto]] = []
    for function in model.functions:
        names.update(function.input)
        names.update(function.output)
        names.update(v.name for v in function.value_info)
        node_lists.append(function.node)
    while graphs or node_lists:
        if graphs:
            graph = graphs.pop()
            for values in (graph.input, graph.output, graph.value_info):
                names.update(v.name for v in values)
            names.update(t.name for t in graph.initializer)
            names.update(s.values.name for s in graph.sparse_initializer)
            node_lists.append(graph.node)
        for node in node_lists.pop():
            names.add(node.name)
            names.update(node.input)
            names.update(node.output)
            graphs.extend(subgraphs_of(node))
    return names
