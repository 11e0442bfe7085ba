"""Which additions keep every order of the runtime to a schedule, and as few of them as possible.

Stages:
1. Recompute clones are held until the gradient that comes before them is there: they must read a view anyway.
2. Holds for the order by priority, which keeps to the file but for the nodes that the runtime makes anew: what it ran
   ahead of such a node, where it then needs more than the schedule, waits for that node. Nodes whose order matters wait
   for each other where an order would swap them.
3. Markers for the default order: on every weight gradient; where it needs more than the schedule, on what it left
   behind.
4. Holds and markers without which the peak stays where it is are taken away, many at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnx_sublinear.passes.barriers import Layout, Placement, Rules, lay_out
from onnx_sublinear.passes.holds import clone_holds, holds_for, run_file
from onnx_sublinear.passes.markers import Markers
from onnx_sublinear.replay import Replay
from onnx_sublinear.runtime_model import RuntimeGraph, executed_orders, priority_order

__all__ = ["Enforcement"]

_ROUNDS = 30


@dataclass(frozen=True)
class Enforcement:
    """The search for one schedule.

    Attributes:
        graph: the file without additions, as the runtime sees it.
        schedule: its kernels in the order to keep.
        forward: per kernel whether it is in the forward section.
        fixed: kernels whose order among each other matters.
        rules: what additions may touch.
        limit_bytes: the peak to keep to.
        training: the training build's orders.
        all_orders: whether the order by priority is to be kept too, not only the default one.
    """

    graph: RuntimeGraph
    schedule: Sequence[int]
    forward: Sequence[bool]
    fixed: Collection[int]
    rules: Rules
    limit_bytes: int
    training: bool
    all_orders: bool = True

    def run(
        self,
        veils: Collection[int] = (),
        further: Mapping[int, int] | None = None,
        marked: Collection[int] = (),
    ) -> Layout | None:
        """The layout of the additions found; None where nodes whose order matters cannot be kept to it.

        Args:
            veils: values to be veiled.
            further: holds that are needed in any case.
            marked: kernels that are to be marked in any case.
        """
        holds = {**clone_holds(self.graph, self.schedule, self.forward, self.rules), **(further or {})}
        bare = self._lay_out(Placement(holds, veils=frozenset(veils)))
        if self.all_orders:
            holds |= holds_for(self.graph, run_file(bare), self.rules, self.limit_bytes, holds, self.unread)
        layout = self._marked(replace(bare.placement, holds=holds), marked)
        return self._sorted(layout, marked) if self.fixed else layout

    @cached_property
    def unread(self) -> frozenset[int]:
        """Values that nothing reads and that stand in the way without a marker.

        Those of more than next to nothing are kept to the end. What the runtime makes anew stands behind all markers:
        the default order makes it first of all.
        """
        graph, rules, made_by = self.graph, self.rules, self.graph.producers()

        def stands_in_the_way(v: int) -> bool:
            k = made_by[v]
            return k in rules.bodies or (not rules.small_output[k] and graph.sizes[v] > rules.small_bytes)

        return frozenset(v for v in graph.unread() if rules.countable[v] and stands_in_the_way(v))

    def _lay_out(self, placement: Placement) -> Layout:
        return lay_out(self.graph, self.schedule, placement, self.rules)

    def _marked(self, placement: Placement, needed: Collection[int]) -> Layout:
        """The layout of a placement without markers, with those that its default order needs."""
        bare = self._lay_out(placement)
        drains = self.unread
        markers = self._markers(bare, drains, needed).found() | frozenset(needed)
        if drains:  # what nothing reads may well stay where it does not stand in the way
            in_default_order = self._markers(bare, frozenset(), needed).peak_bytes(markers)
            if max(in_default_order, self._peak_by_priority(bare)) <= self.limit_bytes:
                drains = frozenset()
        return self._lay_out(replace(placement, markers=markers, drains=drains))

    def _markers(self, bare: Layout, drains: Collection[int], needed: Collection[int]) -> Markers:
        return Markers(self.graph, bare, self.schedule, self.forward, self.rules, self.limit_bytes, drains, needed)

    def _peak_by_priority(self, layout: Layout) -> int:
        if not self.all_orders:
            return 0
        return Replay(layout.graph).peak_bytes(priority_order(layout.graph))

    def _sorted(self, layout: Layout, needed: Collection[int]) -> Layout | None:
        """The layout with holds that keep the fixed kernels in order; None where there are none that do."""
        for _ in range(_ROUNDS):
            swapped = self._swapped(layout)
            if not swapped:
                return layout
            placement = layout.placement
            added = {k: v for k, v in swapped.items() if v >= 0 and placement.holds.get(k) != v}
            if not added:
                return None
            layout = self._marked(Placement({**placement.holds, **added}, veils=placement.veils), needed)
        return None

    def _swapped(self, layout: Layout) -> dict[int, int]:
        """Kernels whose order matters and that do not run in the schedule's order, and what the one before makes."""
        found: dict[int, int] = {}
        for order in executed_orders(layout.graph, training=self.training).values():
            executed = [k for k in order if layout.rows[k] in self.fixed]
            wanted = sorted(executed)
            for k, expected in zip(executed, wanted, strict=True):
                row = layout.rows[k]
                if k != expected and isinstance(row, int):
                    place = bisect_left(wanted, k)
                    before = layout.graph.kernels[wanted[place - 1]].writes if place else ()
                    found[row] = next((v for v in before if self.rules.countable[v]), -1)
        return found
