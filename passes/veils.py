"""Veils: views behind which the runtime does not know the dims, so that it holds no dead buffers for later tensors.

With buffer reuse (the default), a buffer that is free is held for the next tensor that is known to have its size
(`promises`). Where a dim is no number for the runtime, tensors can be declared with symbols of their own, which equal
no other: that costs nothing. Where dims are numbers, these come from somewhere: from a graph input, from the constant
shape of a Reshape. A veil of that, one node, makes everything behind it symbolic.

Stock builds only: with the memory pattern, which the training build plans from static shapes, symbols cost more than
they save there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnx_sublinear.passes.barriers import Layout, Placement, Rules, lay_out
from onnx_sublinear.passes.emission import Draft, Emitted, emit
from onnx_sublinear.passes.enforcement import Enforcement
from onnx_sublinear.passes.file_rules import SMALL_SHARE
from onnx_sublinear.passes.promises import breakable_promises
from onnx_sublinear.passes.take_away import take_away
from onnx_sublinear.runtime_model import RuntimeGraph, executed_orders, simulate
from onnx_sublinear.sizes import TensorType
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Veiling", "guards"]

_ROUNDS = 12
_SHORTEST_EPOCH = 4  # nodes
_MOST_EPOCHS = 400  # with more, sessions of large graphs are slow to create
_DRAFT_WORK = 10_000  # nodes of the drafts that look for needless veils
_SHAPED = frozenset(("Reshape", "Expand"))  # the shape of the result is an input
_NORMALIZATIONS = frozenset(("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"))


def guards(graph: TrainingGraph, rules: Rules) -> set[int]:
    """Values whose veil keeps a fusion away that would lose outputs: Add + LayerNormalization with its statistics used.

    skip_layer_norm_fusion.cc fuses the two where nothing else reads the sum, as after recomputation, and drops the
    mean and the inverse deviation, although a gradient node reads them ("Missing Input" at run time, seen in 1.19).
    """
    index, runtime = graph.index, graph.runtime
    found: set[int] = set()
    for k, node in enumerate(index.nodes):
        if node.op_type not in _NORMALIZATIONS or not any(o in index.readers for o in node.output[1:] if o):
            continue
        made_at = index.producer.get(node.input[0])
        if made_at is not None and index.nodes[made_at].op_type == "Add":
            value = runtime.kernels[k].reads[0]
            if rules.ranks[value] >= 0:
                found.add(value)
    return found


@dataclass(frozen=True)
class Veiling:
    """The search for veils.

    Attributes:
        graph: the model without additions.
        search: what placed the other additions.
    """

    graph: TrainingGraph
    search: Enforcement

    def best(self, layout: Layout, apart: Collection[str] = ()) -> Emitted:
        """The written layout, with as few promises as it takes to keep to the limit, and none for tensors `apart`."""
        best = self._best(layout, apart)
        # As a fresh look at the written model sees it: what stands for a body here is all but exact.
        graph = best.graph
        settled = graph.with_model(graph.model, index=graph.index, sizes=graph.sizes, visible=graph.visible)
        return Emitted(settled, best.rows) if self.search.rules.bodies else best

    def _best(self, layout: Layout, apart: Collection[str]) -> Emitted:
        private = not self.search.training
        # If the runtime knew all dims that we know:
        if private and (apart or self._worst_bytes(layout.graph) > self.search.limit_bytes):
            return self._veiled(layout, apart)
        plain = emit(self.graph, layout, private=private)
        if not private or plain.worst_bytes <= self.search.limit_bytes:
            return plain
        return min(plain, self._veiled(layout, ()), key=lambda emitted: emitted.worst_bytes)

    def _worst_bytes(self, graph: RuntimeGraph) -> int:
        orders = executed_orders(graph, training=self.search.training)
        counted = orders if self.search.all_orders else ("default",)
        return max(simulate(graph, orders[name]).peak_bytes for name in counted)

    def _veiled(self, layout: Layout, given_apart: Collection[str]) -> Emitted:
        """Breaks promises: sets tensors apart where the runtime infers no number, and makes it so by veils."""
        limit = self.search.limit_bytes
        least, given = int(limit * SMALL_SHARE), layout.placement.veils
        draft = Draft(self.graph, layout, least)
        apart = set(given_apart)
        tried: set[str] = set()
        hopeless: set[str] = set()
        best: tuple[int, Draft, int, frozenset[str]] | None = None
        epoch = len(draft.rows)
        shortest = max(_SHORTEST_EPOCH, epoch // _MOST_EPOCHS)
        for _ in range(_ROUNDS):
            epoch = max(epoch // 2, shortest)
            runtime = draft.executed(epoch, apart)
            reached = self._worst_bytes(runtime)
            if best is None or reached < best[0]:
                best = reached, draft, epoch, frozenset(apart)
            if reached <= limit:
                break
            broken = breakable_promises(runtime, limit, hopeless, least_bytes=least)
            names = [runtime.names[v] for v in sorted(broken)]
            is_known = [_is_known(draft.visible.get(name)) for name in self.graph.runtime.names]
            known = [name for name in names if _is_known(draft.visible.get(name))]
            hopeless.update(n for n in known if n in tried and not self._origins([n], is_known, layout))
            tried.update(known)
            veils = self._origins(known, is_known, layout)
            added = set(names).difference(known, apart)
            if not veils and not added and epoch == shortest:
                break
            apart |= added
            if veils:
                layout = self._lay_out(replace(layout.placement, veils=layout.placement.veils | veils))
                draft = Draft(self.graph, layout, least)
        assert best is not None
        reached, draft, epoch, chosen = best
        draft = self._fewer(draft, epoch, chosen, max(reached, limit), draft.layout.placement.veils - given)
        return draft.written(epoch, chosen)

    def _fewer(
        self, draft: Draft, epoch: int, apart: Collection[str], allowed_bytes: int, veils: Collection[int]
    ) -> Draft:
        """The draft without those of `veils` that it can do without."""
        best = draft

        def without(group: Sequence[int]) -> bool:
            nonlocal best
            placement = best.layout.placement
            fewer = replace(placement, veils=placement.veils.difference(group))
            tried = Draft(self.graph, self._lay_out(fewer), draft.least_bytes)
            if self._worst_bytes(tried.executed(epoch, apart)) > allowed_bytes:
                return False
            best = tried
            return True

        take_away(sorted(veils), without, _DRAFT_WORK // max(len(draft.rows), 1))
        return best

    def _lay_out(self, placement: Placement) -> Layout:
        return lay_out(self.search.graph, self.search.schedule, placement, self.search.rules)

    def _origins(self, names: Sequence[str], is_known: Sequence[bool], layout: Layout) -> set[int]:
        """Values whose known dims make those of `names` known: behind veils of them all, these are not.

        The way back goes over known dims: to all equally shaped inputs of an elementwise operator, to the shape that a
        Reshape reads, to the largest input of another.
        """
        runtime, ranks, slots = self.graph.runtime, self.search.rules.ranks, self.search.rules.slots
        veiled, made_by = layout.placement.veils, self._made_by
        targets = {self._ids[name] for name in names if name in self._ids}
        found: set[int] = set()
        seen: set[int] = set()
        pending = list(targets)
        while pending:
            v = pending.pop()
            if v in seen or not is_known[v]:
                continue
            seen.add(v)
            k = made_by[v]
            swaps = layout.swaps.get(k, {})
            reads = [r for r in dict.fromkeys(slots[k] if k >= 0 else ()) if is_known[r] and r not in swaps]
            if k >= 0 and self.graph.index.nodes[k].op_type in _SHAPED and slots[k][1] in reads:
                reads = [slots[k][1]]
            elif k >= 0 and runtime.kernels[k].broadcast:
                reads = [r for r in reads if runtime.shapes[r] == runtime.shapes[v]]
            elif len(reads) > 1:
                reads = [max(reads, key=self._size_of)]
            if reads:
                pending += reads
            elif v not in targets and ranks[v] > 0 and v not in veiled:
                found.add(v)
        return found

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Values by name."""
        return {name: v for v, name in enumerate(self.graph.runtime.names)}

    def _size_of(self, v: int) -> int:
        """Bytes of a value, external or not."""
        return self.graph.sizes.bytes_of(self.graph.runtime.names[v]) or 0

    @cached_property
    def _made_by(self) -> list[int]:
        """Per value its kernel."""
        return self.graph.runtime.producers()


def _is_known(t: TensorType | None) -> bool:
    """Whether the runtime knows every dim as a number."""
    return t is not None and t.shape is not None and all(isinstance(d, int) for d in t.shape)
