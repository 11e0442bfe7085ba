"""Markers: what keeps the default order to a schedule.

That order is a depth-first search from the last leaf of the file to the first, so weight gradients run after the whole
chain of gradients, and where a node reads two results, the later one in the file is made first. A marker (a leaf at the
end of the file) puts what it reads in its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onnx_sublinear.orders import DepthFirst
from onnx_sublinear.passes.barriers import TOKEN_BYTES, Layout, Rules, marked_values
from onnx_sublinear.passes.take_away import TRIALS, WORK, take_away
from onnx_sublinear.replay import IntArray, Replay
from onnx_sublinear.runtime_model import RuntimeGraph

__all__ = ["Markers"]

_SHARES = 1 / 50, 1 / 200, 0  # of the limit: what moves less is looked at later
_ROUNDS_A_SHARE = 12
_MOST_MARKS = 4  # at a time and place


class Markers:
    """The search for the markers of one layout.

    Args:
        base: the file without additions.
        bare: the layout without markers.
        schedule: kernels of `base` in the order to keep.
        forward: per kernel whether it is in the forward section.
        rules: what additions may touch.
        limit_bytes: the peak to keep to.
        drains: values that a marker releases in any case.
        needed: kernels that are marked in any case.
    """

    def __init__(
        self,
        base: RuntimeGraph,
        bare: Layout,
        schedule: Sequence[int],
        forward: Sequence[bool],
        rules: Rules,
        limit_bytes: int,
        drains: Collection[int],
        needed: Collection[int] = (),
    ) -> None:
        self.base, self.layout, self.schedule, self.forward = base, bare, schedule, forward
        self.rules, self.limit = rules, limit_bytes
        self.replay, self.depth_first = Replay(bare.graph, drains), DepthFirst(bare.graph)
        made_by = base.producers()
        self.drained = frozenset(made_by[v] for v in drains)
        laid_by = bare.graph.producers()  # of a body's results, the kernels in the body
        self.marked = [
            [[laid_by[v] for v in marked_values(base, k, drains, rules, marked=m)] for k in range(len(base.kernels))]
            for m in (False, True)
        ]
        self.needed = frozenset(needed)
        self.kernel_of: dict[int, int] = {}
        for k, row in enumerate(bare.rows):
            if isinstance(row, int):
                self.kernel_of[row] = k  # of a body, the last
        can = [any(rules.countable[v] for v in kernel.writes) for kernel in base.kernels]
        self.weighty = [k for k in schedule if not rules.small_all[k] and can[k]]
        self.marker_bytes = TOKEN_BYTES + base.value_frame_bytes  # to the end of the run
        self.moved = [sum(base.sizes[v] for v in {*kernel.reads, *kernel.writes}) for kernel in base.kernels]

    def run(self, markers: Collection[int]) -> tuple[list[int], IntArray]:
        """The default order with these markers, and live bytes at each of its steps."""
        chosen = self.needed.union(markers)
        places = sorted(self.drained | chosen, key=self.kernel_of.__getitem__)
        marked = [laid for k in places for laid in self.marked[k in chosen][k]]
        order = self.depth_first.order(marked)
        return order, self.replay.profile(order) + self.marker_bytes * len(marked)

    def peak_bytes(self, markers: Collection[int]) -> int:
        """The peak of the default order with these markers."""
        return int(self.run(markers)[1].max(initial=0))

    def found(self) -> frozenset[int]:
        """Few markers with which the default order keeps to the limit, as far as any do."""
        markers = self.leaves()
        best, best_peak = markers, -1
        for everywhere in (False, True):
            for share in _SHARES:
                heavy = [k for k in self.weighty if self.moved[k] >= self.limit * share]
                for _ in range(_ROUNDS_A_SHARE):
                    order, profile = self.run(markers)
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
        writes = self.base.kernels
        return frozenset(k for k in self.weighty if not self.forward[k] and read.isdisjoint(writes[k].writes))

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

        trials = min(TRIALS, WORK // max(len(self.schedule), 1))
        take_away(sorted(markers, key=self.kernel_of.__getitem__), without, trials)
        return best
