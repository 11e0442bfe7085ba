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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from onnx_sublinear.passes.barriers import Layout, Placement, Rules, lay_out
from onnx_sublinear.replay import ByPriority, DepthFirst, Replay
from onnx_sublinear.runtime_model import RuntimeGraph, executed_orders

__all__ = ["Enforcement"]

_T = TypeVar("_T")

_ROUNDS = 30
_SHARES = 1 / 50, 1 / 200, 0  # of the limit: what moves less is looked at later
_ROUNDS_A_SHARE = 4
_MOST_MARKS = 4  # at a time and place
_TRIALS, _WORK = 2000, 3_000_000  # how often additions are taken away at most, and nodes to replay for that


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
    """

    graph: RuntimeGraph
    schedule: Sequence[int]
    forward: Sequence[bool]
    fixed: Collection[int]
    rules: Rules
    limit_bytes: int
    training: bool

    def run(self, veils: Collection[int] = ()) -> Layout | None:
        """The layout of the additions found; None where nodes whose order matters cannot be kept to it."""
        clones = clone_holds(self.graph, self.schedule, self.forward, self.rules)
        placement = Placement(clones, drains=self.unread, veils=frozenset(veils))
        bare = self._lay_out(replace(placement, drains=frozenset()))
        layout = self._lay_out(replace(placement, holds={**clones, **_Holds(self, bare).found()}))
        layout = self._marked(layout)
        return self._sorted(layout) if self.fixed else layout

    @cached_property
    def made_by(self) -> list[int]:
        """Per value its kernel."""
        return self.graph.producers()

    @cached_property
    def unread(self) -> frozenset[int]:
        """Values that nothing reads, more than next to nothing: without a marker they are kept to the end."""
        graph, rules = self.graph, self.rules
        read = {v for kernel in graph.kernels for v in kernel.reads}
        return frozenset(
            v
            for k, kernel in enumerate(graph.kernels)
            if not rules.small_output[k]
            for v in kernel.writes
            if v not in read and not graph.is_output[v] and rules.countable[v] and graph.sizes[v] > rules.small_bytes
        )

    def _lay_out(self, placement: Placement) -> Layout:
        return lay_out(self.graph, self.schedule, placement, self.rules)

    def _marked(self, layout: Layout) -> Layout:
        """The layout with the markers that its default order needs."""
        bare = self._lay_out(replace(layout.placement, markers=frozenset(), drains=frozenset()))
        drains = self.unread
        markers = _Markers(self, bare, drains).found()
        if drains:  # what nothing reads may well stay where it does not stand in the way
            kept = _Markers(self, bare, frozenset())
            if max(kept.peak_bytes(markers), self._peak_by_priority(bare)) <= self.limit_bytes:
                drains = frozenset()
        return self._lay_out(replace(layout.placement, markers=markers, drains=drains))

    def _peak_by_priority(self, layout: Layout) -> int:
        return int(Replay(layout.graph).profile(ByPriority(layout.graph).order()).max(initial=0))

    def _sorted(self, layout: Layout) -> Layout | None:
        """The layout with holds that keep the fixed kernels in order; None where there are none that do."""
        for _ in range(_ROUNDS):
            swapped = self._swapped(layout)
            if not swapped:
                return layout
            placement = layout.placement
            added = {k: v for k, v in swapped.items() if v >= 0 and placement.holds.get(k) != v}
            if not added:
                return None
            layout = self._marked(self._lay_out(replace(placement, holds={**placement.holds, **added})))
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


class _Holds:
    """The holds for one layout that keep its order by priority to the limit."""

    def __init__(self, search: Enforcement, layout: Layout) -> None:
        self.limit, self.rules, self.layout = search.limit_bytes, search.rules, layout
        graph = layout.graph
        self.replay, self.by_priority = Replay(graph, search.unread), ByPriority(graph)
        self.made_by = graph.producers()
        self.late = [
            k for k, kernel in enumerate(graph.kernels) if kernel.late and any(map(self.countable, kernel.writes))
        ]
        self.kernel_of: dict[int, int] = {}
        for k, row in enumerate(layout.rows):
            if isinstance(row, int):
                self.kernel_of.setdefault(row, k)
        self.trials = min(_TRIALS, _WORK // max(len(layout.rows), 1))

    def order(self, holds: Mapping[int, int]) -> list[int]:
        """The order by priority with these holds besides those of the layout."""
        return self.by_priority.order({self.kernel_of[k]: self.made_by[v] for k, v in holds.items()})

    def found(self) -> dict[int, int]:
        """Few holds with which the order by priority keeps to the limit, as far as any do."""
        holds: dict[int, int] = {}
        best: tuple[int, dict[int, int]] | None = None
        for _ in range(_ROUNDS):
            order = self.order(holds)
            profile = self.replay.profile(order)
            peak = int(profile.max(initial=0))
            if best is None or peak < best[0]:
                best = peak, holds
            if peak <= self.limit:
                break
            ahead = self.ran_ahead(order, int((profile > self.limit).nonzero()[0][-1]))
            added = {k: v for k, v in ahead.items() if holds.get(k) != v}
            if not added:
                break
            holds = {**holds, **added}
        return self.fewer(best[1], max(best[0], self.limit)) if best else {}

    def ran_ahead(self, order: Sequence[int], until: int) -> dict[int, int]:
        """Kernels that ran although a late node before them in the schedule had not, and what that node makes.

        Up to the step `until`. Those that only follow such a kernel are left out.
        """
        kernels, rules, rows, late = self.layout.graph.kernels, self.rules, self.layout.rows, self.late
        held = self.layout.placement.holds
        ran = bytearray(len(kernels))
        behind = [-1] * len(kernels)  # the last late kernel that it runs behind, by what is found so far
        found: dict[int, int] = {}
        for k in order[: until + 1]:
            ran[k] = 1
            behind[k] = max((behind[self.made_by[v]] for v in kernels[k].reads if self.made_by[v] >= 0), default=-1)
            row = rows[k]
            if not isinstance(row, int) or rules.small_output[row] or kernels[k].late or row in held:
                continue
            before = bisect_left(late, k) - 1
            while before >= 0 and ran[late[before]]:
                before -= 1
            if before < 0 or late[before] <= behind[k]:
                continue
            if any(rules.ranks[v] >= 0 for v in rules.slots[row]):
                found[row] = next(v for v in kernels[late[before]].writes if self.countable(v))
                behind[k] = late[before]
        return found

    def countable(self, v: int) -> bool:
        """Whether a token can be taken of a value."""
        return v < len(self.rules.countable) and self.rules.countable[v]

    def fewer(self, holds: dict[int, int], allowed_bytes: int) -> dict[int, int]:
        """Those without which the peak would pass `allowed_bytes`."""
        best = holds

        def without(group: Sequence[int]) -> bool:
            nonlocal best
            fewer = {k: v for k, v in best.items() if k not in set(group)}
            if int(self.replay.profile(self.order(fewer)).max(initial=0)) > allowed_bytes:
                return False
            best = fewer
            return True

        take_away(sorted(holds, key=self.kernel_of.__getitem__), without, self.trials)
        return best


class _Markers:
    """The markers for one layout: those that are there are replaced."""

    def __init__(self, search: Enforcement, layout: Layout, drains: Collection[int]) -> None:
        self.limit, self.rules, self.schedule = search.limit_bytes, search.rules, search.schedule
        self.search, self.layout = search, layout
        graph = layout.graph
        self.replay, self.depth_first = Replay(graph, drains), DepthFirst(graph)
        self.drained = frozenset(search.made_by[v] for v in drains)
        self.kernel_of: dict[int, int] = {}
        for k, row in enumerate(layout.rows):
            if isinstance(row, int):
                self.kernel_of[row] = k  # of a body, the last
        base = search.graph
        can = [any(self.rules.countable[v] for v in kernel.writes) for kernel in base.kernels]
        self.weighty = [k for k in search.schedule if not self.rules.small_all[k] and can[k]]
        self.moved = [sum(base.sizes[v] for v in {*kernel.reads, *kernel.writes}) for kernel in base.kernels]

    def order(self, markers: Collection[int]) -> list[int]:
        """The default order with these markers."""
        return self.depth_first.order(sorted(self.kernel_of[k] for k in self.drained.union(markers)))

    def peak_bytes(self, markers: Collection[int]) -> int:
        """The peak of the default order with these markers."""
        return int(self.replay.profile(self.order(markers)).max(initial=0))

    def found(self) -> frozenset[int]:
        """Few markers with which the default order keeps to the limit, as far as any do."""
        markers = self.leaves()
        best, best_peak = markers, -1
        for everywhere in (False, True):
            for share in _SHARES:
                heavy = [k for k in self.weighty if self.moved[k] >= self.limit * share]
                for _ in range(_ROUNDS_A_SHARE):
                    order = self.order(markers)
                    profile = self.replay.profile(order)
                    peak = int(profile.max(initial=0))
                    if best_peak < 0 or peak < best_peak:
                        best, best_peak = markers, peak
                    if peak <= self.limit:
                        return self.fewer(best, self.limit)
                    over = (profile > self.limit).nonzero()[0].tolist()
                    added = self.left_behind(heavy, order, over, everywhere=everywhere) - markers
                    if not added:
                        break
                    markers |= added
        return self.fewer(best, max(best_peak, self.limit))

    def leaves(self) -> frozenset[int]:
        """Kernels of the gradient section that nothing reads from: the weight gradients."""
        read = {v for kernel in self.layout.graph.kernels for v in kernel.reads}
        writes = self.search.graph.kernels
        return frozenset(k for k in self.weighty if not self.search.forward[k] and read.isdisjoint(writes[k].writes))

    def left_behind(
        self, heavy: Sequence[int], order: Sequence[int], over: Sequence[int], *, everywhere: bool
    ) -> frozenset[int]:
        """Of the `heavy` kernels, those that the schedule runs just before what ran too early.

        At the first of each row of steps over the limit: the earliest kernels (in the schedule) that ran although one
        before them has not run yet; and of those that have not, the last one before each. With `everywhere`, whatever
        runs after what the schedule has next.
        """
        step_of = [0] * len(order)
        for step, k in enumerate(order):
            step_of[k] = step
        steps = [step_of[self.kernel_of[k]] for k in heavy]
        found: set[int] = set()
        if everywhere:
            last = over[-1]
            for n in range(len(steps) - 1):
                if steps[n] > steps[n + 1] <= last:
                    found.add(heavy[n])
            return frozenset(found)
        for n, step in enumerate(over):
            if n and over[n - 1] == step - 1:
                continue
            marks = 0
            for at in range(len(steps) - 1):
                if steps[at] > step >= steps[at + 1]:
                    found.add(heavy[at])
                    marks += 1
                    if marks == _MOST_MARKS:
                        break
        return frozenset(found)

    def fewer(self, markers: frozenset[int], allowed_bytes: int) -> frozenset[int]:
        """Those without which the peak would pass `allowed_bytes`."""
        best = markers

        def without(group: Sequence[int]) -> bool:
            nonlocal best
            fewer = best.difference(group)
            if self.peak_bytes(fewer) > allowed_bytes:
                return False
            best = fewer
            return True

        trials = min(_TRIALS, _WORK // max(len(self.schedule), 1))
        take_away(sorted(markers, key=self.kernel_of.__getitem__), without, trials)
        return best


def take_away(items: Sequence[_T], without: Callable[[Sequence[_T]], bool], trials: int) -> None:
    """Takes away items as far as `without` allows: all at once, else each half, down to single ones.

    Args:
        items: what could go.
        without: takes the items given away and says True, or says False and leaves them.
        trials: how often it is asked at most.
    """
    pending = [list(items)]
    while pending and trials > 0:
        group = pending.pop(0)
        if not group:
            continue
        trials -= 1
        if not without(group) and len(group) > 1:
            half = len(group) // 2
            pending += [group[:half], group[half:]]


def clone_holds(graph: RuntimeGraph, schedule: Sequence[int], forward: Sequence[bool], rules: Rules) -> dict[int, int]:
    """Clones that read nothing that a held clone makes -> what the schedule runs before the row of clones.

    That is what the last weight gradient (a leaf) before makes, or, without one since the clones before, the last
    result that is more than next to nothing.
    """
    made_by = graph.producers()
    read = {v for kernel in graph.kernels for v in kernel.reads}
    holds: dict[int, int] = {}
    distinct = bytearray(len(graph.kernels))
    leaf = last = awaited = -1
    for k in schedule:
        if rules.clone[k]:
            if max(leaf, last) >= 0:
                awaited, leaf, last = leaf if leaf >= 0 else last, -1, -1
            distinct[k] = any(made_by[v] >= 0 and distinct[made_by[v]] for v in graph.kernels[k].reads)
            if awaited >= 0 and not distinct[k] and not rules.small_output[k]:
                holds[k] = awaited
                distinct[k] = 1
        elif not rules.small_all[k] and not forward[k]:
            value = next((v for v in graph.kernels[k].writes if rules.countable[v]), -1)
            last = value if value >= 0 else last
            leaf = value if value >= 0 and value not in read else leaf
    return holds
