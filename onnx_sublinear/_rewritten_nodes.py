"""The node-by-node half of `check_rewrite`: every node of the rewritten model against the original's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, shape_inference

from onnx_sublinear._repeatable import Repeatability, subgraphs_of
from onnx_sublinear.barrier_values import BarrierValues, Ranks
from onnx_sublinear.errors import printable
from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.sizes import infer_sizes

__all__ = ["OF_KEY", "ROLE_KEY", "NodeCheck", "serialized"]

ROLE_KEY = "onnx_sublinear.role"
OF_KEY = "onnx_sublinear.of"
_RUNNING_STATISTICS = {"BatchNormalization": {1: 3, 2: 4}, "BatchNormInternal": {1: 3, 2: 4}}
"""Operator -> {output: input whose buffer the kernel updates}. In training mode no other output depends on them."""
_COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Xor", "Equal"})


def serialized(messages: Sequence[object]) -> list[bytes]:
    """The messages as bytes that are equal for equal messages."""
    return [m.SerializeToString(deterministic=True) for m in messages]  # type: ignore[attr-defined]


def _role(node: NodeProto) -> tuple[str, str]:
    entries = {e.key: e.value for e in node.metadata_props}
    return entries.get(ROLE_KEY, ""), entries.get(OF_KEY, "")


def _label(node: NodeProto) -> str:
    first = next((o for o in node.output if o), "")
    return f"{node.op_type} '{printable(node.name or first)}'"


class NodeCheck:
    """The nodes of two models, matched."""

    def __init__(self, original: ModelProto, optimized: ModelProto) -> None:
        self.original, self.optimized = original, optimized
        self.maker = {o: n for n in original.graph.node for o in n.output if o}
        self.external = {v.name for v in original.graph.input} | {t.name for t in original.graph.initializer}
        self.external |= {s.values.name for s in original.graph.sparse_initializer}
        overridable = {v.name for v in optimized.graph.input}
        self.constants = {t.name: t for t in optimized.graph.initializer if t.name not in overridable}
        self.repeatable = Repeatability(original, self.constants)
        self.scratch: dict[str, str] = {}  # scratch tensor -> the value that it stands for
        read = [*(n for node in optimized.graph.node for n in (*node.input, *_captured(node)))]
        self.read_count = Counter([*read, *(v.name for v in optimized.graph.output)])
        self.value: dict[str, str] = {}  # tensor of the optimized model -> the tensor of the original that it equals
        self.barriers = BarrierValues(self.constants, self._ranks())

    def _ranks(self) -> Ranks:
        """Ranks of tensors: as shape inference knows them from the inputs on (declared ones may be stale).

        Where ONNX's inference knows none, ours does, and what is declared counts last.
        """
        bare = ModelProto()
        bare.CopyFrom(self.original)
        del bare.graph.value_info[:]
        try:
            inferred = shape_inference.infer_shapes(bare).graph
        except Exception:  # an operator or a size that inference cannot take
            inferred = bare.graph
        ranks = {t.name: len(t.dims) for t in inferred.initializer}
        ranks.update((s.values.name, len(s.dims)) for s in inferred.sparse_initializer)
        _add_ranks(ranks, (*inferred.input, *inferred.value_info))
        if any(o not in ranks for n in self.original.graph.node for o in n.output if o):
            types = infer_sizes(GraphIndex(self.original)).types
            for name, known in types.items():
                if known.shape is not None:
                    ranks.setdefault(name, len(known.shape))
        _add_ranks(ranks, (*inferred.output, *self.original.graph.value_info, *self.optimized.graph.value_info))
        return ranks

    def findings(self) -> Iterator[str]:
        """Findings about nodes, in file order of the optimized model."""
        unseen: dict[_Identity, list[NodeProto]] = {}
        for node in self.original.graph.node:
            unseen.setdefault(_identity(node), []).append(node)
        for name in self.external:
            self.value[name] = name
        for node in self._sorted():
            role, of = _role(node)
            if twins := unseen.get(_identity(node)):
                yield from self._content_findings(node, twins.pop())
                self.value.update((o, o) for o in node.output if o)
            elif role == "clone":
                yield from self._clone_findings(node, of)
            elif role == "scratch":
                yield from self._scratch_findings(node)
            elif role == "barrier":
                yield from self._barrier_findings(node)
            else:
                yield f"{_label(node)} is neither a node of the original nor a clone or barrier"
        for gone in (n for nodes in unseen.values() for n in nodes):
            yield f"{_label(gone)} is gone"

    def _sorted(self) -> list[NodeProto]:
        """The optimized nodes, makers first; nodes on a cycle or with a dangling input stay at the end."""
        nodes = list(self.optimized.graph.node)
        made_by = {o: i for i, n in enumerate(nodes) for o in n.output if o}
        needs = [{made_by[r] for r in (*n.input, *_captured(n)) if r in made_by} for n in nodes]
        readers: dict[int, list[int]] = {}
        for i, makers in enumerate(needs):
            for maker in makers:
                readers.setdefault(maker, []).append(i)
        waiting = [len(makers) for makers in needs]
        order = [i for i, count in enumerate(waiting) if not count]
        for i in order:
            for reader in readers.get(i, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    order.append(reader)
        placed = set(order)
        return [nodes[i] for i in (*order, *(i for i in range(len(nodes)) if i not in placed))]

    def _clone_findings(self, node: NodeProto, of: str) -> Iterator[str]:
        twin = self.maker.get(of)
        if twin is None:
            yield f"clone {_label(node)} names '{printable(of)}', which no node of the original makes"
            return
        if reason := self.repeatable.reason_against(twin):
            yield f"clone {_label(node)}: {reason} must never be cloned"
        if len(node.output) > len(twin.output):
            yield f"clone {_label(node)} has {len(node.output)} outputs instead of {len(twin.output)}"
            return
        if node.op_type != twin.op_type:
            yield f"clone {_label(node)} is a {node.op_type}, its original a {twin.op_type}"
            return
        yield from self._content_findings(node, twin)
        state = _RUNNING_STATISTICS.get(node.op_type, {}) if self.repeatable.trains(twin) else {}
        for slot, (mine, theirs) in enumerate(zip(node.output, twin.output, strict=False)):
            if mine and not theirs:
                yield f"clone {_label(node)} makes output {slot}, which its original leaves out"
            elif mine and slot in state:
                # From scratch it is a number of no meaning; without an entry in `value`, nothing may read it.
                if node.input[state[slot]] not in self.scratch:
                    yield f"clone {_label(node)} advances the running statistics again (output '{printable(mine)}')"
            elif mine:
                self.value[mine] = theirs
                self.barriers.ranks.setdefault(mine, self.barriers.ranks.get(theirs, -1))

    def _scratch_findings(self, node: NodeProto) -> Iterator[str]:
        """A copy of a running statistic (its value does not matter) that one clone's kernel may write into."""
        if (node.op_type, node.domain, len(node.input), len(node.output)) != ("Neg", "", 1, 1):
            yield f"scratch {_label(node)} is not a Neg"
        elif self.read_count.get(node.output[0], 0) != 1:
            yield f"scratch '{printable(node.output[0])}' is read {self.read_count.get(node.output[0], 0)} times"
        else:
            self.scratch[node.output[0]] = self.value.get(node.input[0], f"?{node.input[0]}")

    def _barrier_findings(self, node: NodeProto) -> Iterator[str]:
        finding, view_of = self.barriers.add(node)
        if finding:
            yield f"barrier {_label(node)}: {finding}"
        elif view_of:
            self.value[node.output[0]] = self.value.get(view_of, view_of)
            self.barriers.ranks.setdefault(node.output[0], self.barriers.ranks.get(view_of, -1))

    def _content_findings(self, node: NodeProto, twin: NodeProto) -> Iterator[str]:
        """`node` against the original node that it is or repeats: operator, attributes, metadata, values read."""
        if (node.domain, node.overload) != (twin.domain, twin.overload):
            yield f"{_label(node)} is of another domain or overload than in the original"
        if [a.name for a in node.attribute] != [a.name for a in twin.attribute]:
            yield f"{_label(node)} has other attributes than in the original"
        else:
            for mine, theirs in zip(node.attribute, twin.attribute, strict=True):
                if _attribute_bytes(mine, self.value) != _attribute_bytes(theirs, {}):
                    yield f"attribute '{printable(mine.name)}' of {_label(node)} changed"
        mine_entries = {(e.key, e.value) for e in node.metadata_props}
        if not {(e.key, e.value) for e in twin.metadata_props} <= mine_entries or node.doc_string != twin.doc_string:
            yield f"{_label(node)} lost metadata or its doc string"
        reads = [self.value.get(name, f"?{name}") if name else "" for name in node.input]
        if _role(node)[0] == "clone" and self.repeatable.trains(twin):
            for slot in _RUNNING_STATISTICS.get(node.op_type, {}).values():
                if slot < len(reads):
                    reads[slot] = self.scratch.get(node.input[slot], reads[slot])
        wanted = list(twin.input)
        if node.op_type in _COMMUTATIVE and not node.domain and sorted(reads) == sorted(wanted):
            return
        if len(reads) != len(wanted):
            yield f"{_label(node)} has {len(reads)} inputs instead of {len(wanted)}"
            return
        for slot, (got, want) in enumerate(zip(reads, wanted, strict=True)):
            if got != want:
                yield f"input {slot} of {_label(node)} is '{printable(got)}' instead of '{printable(want)}'"


def _add_ranks(ranks: Ranks, values: Iterable[ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.HasField("shape"):
            ranks.setdefault(value.name, len(value.type.tensor_type.shape.dim))


_Identity = tuple[str, str, tuple[str, ...]]


def _identity(node: NodeProto) -> _Identity:
    """What finds a node again: its outputs, else (a node without any) its name."""
    return (node.domain, node.op_type, tuple(node.output) if any(node.output) else (f"\0{node.name}",))


def _captured(node: NodeProto) -> set[str]:
    """Names that subgraphs of `node` may read from outside (names defined inside included, which does no harm)."""
    names: set[str] = set()
    graphs = list(subgraphs_of(node))
    while graphs:
        graph = graphs.pop()
        names.update(v.name for v in graph.output)
        for inner in graph.node:
            names.update(inner.input)
            graphs.extend(subgraphs_of(inner))
    return names - {""}


def _attribute_bytes(attribute: AttributeProto, value: Mapping[str, str]) -> bytes:
    """The attribute, with captured tensors replaced by the values that they carry."""
    if not attribute.HasField("g") and not attribute.graphs:
        return serialized([attribute])[0]
    copy = AttributeProto()
    copy.CopyFrom(attribute)
    for graph in (copy.g, *copy.graphs) if copy.HasField("g") else copy.graphs:
        _follow_captures(graph, value, frozenset())
    return serialized([copy])[0]


def _follow_captures(graph: GraphProto, value: Mapping[str, str], hidden: frozenset[str]) -> None:
    # Recursion is bounded: the protobuf parser itself refuses graphs nested deeper than about 30 levels.
    inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    inside |= {s.values.name for s in graph.sparse_initializer} | {o for n in graph.node for o in n.output}
    hidden = hidden | inside
    for node in graph.node:
        node.input[:] = [n if n in hidden else value.get(n, n) for n in node.input]
        for inner in subgraphs_of(node):
            _follow_captures(inner, value, hidden)
    for output in graph.output:
        if output.name not in hidden:
            output.name = value.get(output.name, output.name)
