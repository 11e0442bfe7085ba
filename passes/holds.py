"""Holds: what keeps the order by priority to a schedule.

That order keeps to the file but for the nodes that the runtime makes anew (bodies of functions, fusions): these count
as the last of the file, and whatever else can run runs ahead of them. Where it then needs more than the schedule, what
ran ahead of such a node waits for it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onnx_sublinear.orders import ByPriority
from onnx_sublinear.passes.barriers import Layout, Rules
from onnx_sublinear.passes.take_away import TRIALS, WORK, take_away
from onnx_sublinear.replay import Replay
from onnx_sublinear.runtime_model import RuntimeGraph

__all__ = ["RunFile", "clone_holds", "holds_for", "run_file"]

_ROUNDS = 30
_NO_PEAK = 2**62  # bytes
_FAR = 200  # nodes that are looked at behind one that nothing can wait for


@dataclass(frozen=True)
class RunFile:
    """A file as a session runs it, and what its kernels stand for.

    Attributes:
        graph: the kernels in the order of their indices.
        rows: per kernel the kernel (of the file without additions) that it stands for; -1 for added ones.
        places: per kernel its place in the schedule.
        late: per kernel whether the runtime made it anew.
    """

    graph: RuntimeGraph
    rows: Sequence[int]
    places: Sequence[int]
    late: Sequence[bool]


def run_file(layout: Layout) -> RunFile:
    """A layout, as far as our own model of the runtime knows."""
    rows = [row if isinstance(row, int) else -1 for row in layout.rows]
    return RunFile(layout.graph, rows, range(len(rows)), [kernel.late > 0 for kernel in layout.graph.kernels])


def holds_for(
    base: RuntimeGraph,
    file: RunFile,
    rules: Rules,
    limit_bytes: int,
    held: Mapping[int, int],
    drains: Collection[int] = (),
) -> dict[int, int]:
    """Few holds with which the order by priority keeps to the limit, as far as any do.

    Args:
        base: the file without additions.
        file: the file as it is run, with the holds in `held` in it.
        rules: what additions may touch.
        limit_bytes: the peak to keep to.
        held: kernels of `base` that are held already -> the value that each waits for.
        drains: values of `file` that a marker releases.

    Returns:
        Kernel of `base` -> the value that it is to wait for.
    """
    search = _Search(base, file, rules, limit_bytes, held, drains)
    return search.as_values(search.found())


class _Search:
    """Holds as pairs of kernels of the file: who waits -> for whom."""

    def __init__(
        self,
        base: RuntimeGraph,
        file: RunFile,
        rules: Rules,
        limit_bytes: int,
        held: Mapping[int, int],
        drains: Collection[int],
    ) -> None:
        self.base, self.file, self.rules, self.limit = base, file, rules, limit_bytes
        graph = file.graph
        self.replay, self.by_priority = Replay(graph, drains), ByPriority(graph)
        self.made_by = graph.producers()
        place_of = {graph.names[v]: file.places[k] for k, kernel in enumerate(graph.kernels) for v in kernel.writes}
        self.held = {row: place_of.get(base.names[v], -1) for row, v in held.items()}
        late = {self.stand_in(k) for k, is_late in enumerate(file.late) if is_late} - {-1}
        self.late = sorted(late, key=file.places.__getitem__)
        self.late_places = [file.places[k] for k in self.late]

    def awaitable(self, k: int) -> int:
        """A value that exists once kernel `k` of the file has run; -1 where no token can be taken of any."""
        row = self.file.rows[k]
        made = self.base.kernels[row].writes if row >= 0 else ()
        names = {self.file.graph.names[v] for v in self.file.graph.kernels[k].writes}
        return next((v for v in made if self.rules.countable[v] and self.base.names[v] in names), -1)

    def stand_in(self, k: int) -> int:
        """Kernel `k`, or where nothing can wait for it, the first in the schedule of those that need it; -1: none."""
        places, consumers = self.file.places, self.by_priority.consumers
        pending = [(places[k], k)]
        seen = {k}
        while pending and len(seen) < _FAR:
            _, found = heapq.heappop(pending)
            if self.awaitable(found) >= 0:
                return found
            for c in consumers[found]:
                if c not in seen:
                    seen.add(c)
                    heapq.heappush(pending, (places[c], c))
        return -1

    def as_values(self, holds: Mapping[int, int]) -> dict[int, int]:
        """The same by kernels and values of the file without additions."""
        return {self.file.rows[k]: self.awaitable(late) for k, late in holds.items()}

    def peak_and_order(self, holds: Mapping[int, int]) -> tuple[int, list[int], int]:
        """The peak, the order, and the last step over the limit (no peak where nodes wait for each other)."""
        order = self.by_priority.order(holds)
        if len(order) < len(self.file.rows):
            return _NO_PEAK, order, -1
        profile = self.replay.profile(order)
        over = (profile > self.limit).nonzero()[0]
        return int(profile.max(initial=0)), order, int(over[-1]) if len(over) else -1

    def found(self) -> dict[int, int]:
        """The holds."""
        holds: dict[int, int] = {}
        best: tuple[int, dict[int, int]] | None = None
        for _ in range(_ROUNDS):
            peak, order, until = self.peak_and_order(holds)
            if best is None or peak < best[0]:
                best = peak, holds
            if until < 0:
                break
            ahead = self.ran_ahead(order, until)
            if all(holds.get(k) == late for k, late in ahead.items()):
                break
            holds = {**holds, **ahead}
        return self.fewer(best[1], max(best[0], self.limit)) if best else {}

    def ran_ahead(self, order: Sequence[int], until: int) -> dict[int, int]:
        """Kernels that ran although a late one before them in the schedule had not, and the last such one.

        Up to the step `until`. Those that only follow such a kernel are left out.
        """
        kernels, rules, rows, places = self.file.graph.kernels, self.rules, self.file.rows, self.file.places
        ran = bytearray(len(kernels))
        behind = [-1] * len(kernels)  # place of the last late kernel that it runs behind, by what is found so far
        found: dict[int, int] = {}
        for k in order[: until + 1]:
            ran[k] = 1
            behind[k] = max((behind[self.made_by[v]] for v in kernels[k].reads if self.made_by[v] >= 0), default=-1)
            row = rows[k]
            behind[k] = max(behind[k], self.held.get(row, -1))
            if row < 0 or self.file.late[k] or rules.small_output[row]:
                continue
            before = bisect_left(self.late_places, places[k]) - 1
            while before >= 0 and ran[self.late[before]]:
                before -= 1
            if before < 0 or self.late_places[before] <= behind[k]:
                continue
            if rules.options(row):
                found[k] = self.late[before]
                behind[k] = self.late_places[before]
        return found

    def fewer(self, holds: dict[int, int], allowed_bytes: int) -> dict[int, int]:
        """Those without which the peak would pass `allowed_bytes`."""
        best = holds

        def without(group: Sequence[int]) -> bool:
            nonlocal best
            gone = set(group)
            fewer = {k: late for k, late in best.items() if k not in gone}
            if self.peak_and_order(fewer)[0] > allowed_bytes:
                return False
            best = fewer
            return True

        take_away(sorted(holds), without, min(TRIALS, WORK // max(len(self.file.rows), 1)))
        return best


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
