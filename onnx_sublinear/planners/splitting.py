"""Brings a plan below a budget: at the worst event, the lifetime is split whose bytes cost least to make again.

1. A storage that is live at the worst event but not used there lies in a gap between two uses. Splitting the gap frees
   its bytes wherever they are over the budget; this per cost of the rerun ranks the gaps.
2. The best of them are looked at closely. The node runs again just before the use after the gap, or earlier, while its
   own inputs are still there. An input that is gone is kept longer where there is room or where making it again costs
   more than the room is worth, else it is made again too.
3. Where every split makes matters worse elsewhere, the cheapest one that helps at the worst event is taken.

The idea of rerunning at the peak what frees most per cost is that of XLA's rematerialization and of DTR (Kirisame et
al. 2021); step 2 and the exact profile make it work on any graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.gaps import Gaps
from onnx_sublinear.planners.storages import Rerun
from onnx_sublinear.planners.timeline import Timeline

__all__ = ["Splitter", "drop", "prune"]

_DEEPEST = 40  # reruns that one split may need
_MOST_STAGES = 4  # places for a rerun that are compared
_MOST_STUCK = 40  # splits in one search that only help at the worst event
_FREE_SHARE = 1e-7  # of a step's cost: the price of a rerun that costs nothing
_EVENTS_PER_EFFORT = 4000
_STOP_EVERY = 8  # reruns after whose addition `stop` is asked

_sum, _maximum, _minimum = np.add.reduce, np.maximum, np.minimum
_Split = tuple[float, list[Rerun]]


class Splitter:
    """Splits lifetimes of one timeline.

    Args:
        timeline: the plan; changed in place.
        tries: how many splits are looked at closely in each step.

    Attributes:
        noise: 0 takes the best split; more ranks the splits less clearly.
        rng: where the noise comes from.
        stop: asked now and then whether to give up.
    """

    def __init__(self, timeline: Timeline, tries: int = 10, seed: int = 0) -> None:
        self.timeline = timeline
        self.storages = timeline.storages
        self.count = timeline.count
        self.gaps = Gaps(timeline)
        self.tries = tries
        self.noise = 0.0
        self.rng = Random(seed)
        self.stop: Callable[[], bool] = lambda: False
        self.costs = np.array(self.storages.costs, np.float64)
        self.unit = max(1e-12, float(self.costs.sum()) * _FREE_SHARE)
        self.producer = np.array(self.storages.producer, np.int64)
        self.sizes = np.array(self.storages.size, np.int64)

    def run(self, budget_bytes: int, most_cost: float = float("inf")) -> list[Rerun] | None:
        """Splits until the peak is within the budget.

        Returns:
            The reruns added; None, and nothing is added, where the budget is out of reach, `most_cost` is reached or
            `stop` says so.
        """
        timeline = self.timeline
        added: list[Rerun] = []
        stuck = 0
        while True:
            live = timeline.live
            worst = int(live.argmax())
            if live[worst] <= budget_bytes:
                return added
            split = self.best(worst, budget_bytes)
            if split is None:
                stuck += 1
                split = self.best(worst, budget_bytes, forced=True) if stuck <= _MOST_STUCK else None
            if split is not None:
                for t, v in split[1]:
                    timeline.add(t, v)
                added += split[1]
            late = len(added) % _STOP_EVERY == 0 and self.stop()
            if split is None or timeline.cost >= most_cost or late:
                for t, v in reversed(added):
                    timeline.remove(t, v)
                return None

    def best(self, worst: int, budget: int, forced: bool = False) -> _Split | None:
        """The best split at the event of index `worst`; `forced`: what it does elsewhere only counts as a price."""
        timeline, gaps = self.timeline, self.gaps
        keys = timeline.keys
        here = int(keys[worst])
        rows = gaps.over(here)
        rows = rows[gaps.after[rows] // self.count * self.count + self.producer[gaps.storage[rows]] > here]
        if not len(rows):
            return None
        first, after, storage = gaps.first[rows], gaps.after[rows], gaps.storage[rows]
        starts, stops = keys.searchsorted(first) + 1, keys.searchsorted(after)
        scores = self._scores(storage, starts, stops, budget)
        if len(scores) > self.tries and not forced:
            chosen = scores.argpartition(-self.tries)[-self.tries :]
            chosen = chosen[(-scores[chosen]).argsort(kind="stable")]
        else:
            chosen = (-scores).argsort(kind="stable")
        best: _Split | None = None
        for i in chosen.tolist():
            if best is not None and scores[i] <= best[0]:
                break
            rate = float(scores[i])
            for t in self._stages(int(storage[i]), int(after[i]), here):
                least = 0.0 if best is None else best[0]
                split = self._split_at(int(storage[i]), t, int(starts[i]), worst, budget, rate, forced, least)
                if split is not None and split[0] > least:
                    best = split
        return best

    def _scores(
        self, storage: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64], budget: int
    ) -> NDArray[np.float64]:
        """Per gap the bytes over the budget, summed over events, that freeing it takes away, per cost."""
        over = np.maximum(self.timeline.live - budget, 0)
        sums = np.concatenate(([0], over.cumsum()))
        counts = np.concatenate(([0], (over > 0).cumsum()))
        gains = np.minimum(sums[stops] - sums[starts], self.sizes[storage] * (counts[stops] - counts[starts]))
        scores: NDArray[np.float64] = gains / (self.costs[self.producer[storage]] + self.unit)
        if self.noise:
            scores = scores * np.exp([self.rng.gauss(0, self.noise) for _ in range(len(scores))])
        return scores

    def _stages(self, s: int, after: int, here: int) -> list[int]:
        """Stages behind the event `here` in which `s` may be made again for the read `after`, the latest first.

        Beside the read's own stage: those in which an input of the node is used for the last time.
        """
        timeline, storages, count = self.timeline, self.storages, self.count
        v = storages.producer[s]
        latest = after // count
        stages = {latest}
        for u in storages.read[v]:
            k = bisect_right(timeline.times[storages.producer[u]], latest) - 1
            end, _ = timeline.end(u, k)
            if here < end < latest * count + v:
                t = (end - v) // count  # the last stage with t * count + v <= end
                if t > v and t * count + v > here:
                    stages.add(t)
        return [t for t in sorted(stages, reverse=True)[:_MOST_STAGES] if t not in timeline.times[v]]

    def _split_at(
        self, s: int, t: int, start: int, worst: int, budget: int, rate: float, forced: bool, least: float
    ) -> _Split | None:
        """The split of the gap of `s` from the event of index `start` on by a rerun in stage `t`.

        Args:
            rate: bytes over the budget that one unit of cost takes away, at most.
            least: the score that it must pass.
        """
        timeline, storages, count = self.timeline, self.storages, self.count
        live, size = timeline.live, storages.size
        v = storages.producer[s]
        stop = timeline.place(t * count + v)
        if stop <= start:
            return None
        timeline.effort += 1 + len(live) / _EVENTS_PER_EFFORT
        reruns = {v}
        longer: list[tuple[int, int, int]] = []  # (first index, stop index, bytes) of inputs that are kept longer
        pending, cost, freed = [v], float(storages.costs[v]) + self.unit, size[s]
        most_cost = 1 / least if forced and least else (rate * cost / least if least else float("inf"))
        while pending:
            node = pending.pop()
            at = timeline.place(t * count + node)
            for u in storages.read[node]:
                maker = storages.producer[u]
                if maker in reruns:
                    continue
                k = bisect_right(timeline.times[maker], t) - 1
                end = timeline.end(u, k)
                if end[0] >= t * count + node:
                    continue
                first = timeline.stop(end)
                across = first <= worst < at
                if storages.free[maker] and t > timeline.times[maker][k] and len(reruns) < _DEEPEST:
                    again = across and size[u] >= freed
                    if not again:
                        part = live[first:at] - (budget - size[u])
                        part[max(start - first, 0) : max(stop - first, 0)] -= size[s]
                        price = int(_sum(_minimum(_maximum(part, 0), size[u])))
                        again = price > (storages.costs[maker] + self.unit) * rate
                    if again:
                        reruns.add(maker)
                        cost += storages.costs[maker]
                        if cost >= most_cost:
                            return None
                        pending.append(maker)
                        continue
                if across:
                    freed -= size[u]
                    if freed <= 0:
                        return None
                longer.append((first, at, size[u]))
        low = min([start, *(first for first, _, _ in longer)])
        window = live[low:stop] - budget
        before = int(_sum(_maximum(window, 0)))
        window[start - low :] -= size[s]
        for first, at, extra in longer:
            window[first - low : at - low] += extra
        gain = before - int(_sum(_maximum(window, 0)))
        if gain > 0:
            return gain / cost, [(t, node) for node in sorted(reruns)]
        if not forced:
            return None
        return 1 / (cost * (1 - gain)), [(t, node) for node in sorted(reruns)]


def prune(timeline: Timeline, budget_bytes: int, reruns: list[Rerun]) -> None:
    """Takes back, in the order given, each of `reruns` without which the peak stays within the budget."""
    for t, v in reruns:
        if t in timeline.times[v][1:]:
            drop(timeline, t, v, budget_bytes)


def drop(timeline: Timeline, t: int, v: int, budget_bytes: int) -> bool:
    """Takes the rerun of `v` in stage `t` back, and what only it read; undone where the peak passes the budget."""
    storages = timeline.storages
    removed: list[Rerun] = []
    pending = [(t, v)]
    while pending:
        t, v = pending.pop()
        timeline.remove(t, v)
        removed.append((t, v))
        for s in storages.read[v]:
            maker = storages.producer[s]
            times = timeline.times[maker]
            k = bisect_right(times, t) - 1
            if k > 0 and (times[k], maker) not in pending and not timeline.is_read(times[k], maker):
                pending.append((times[k], maker))
    if timeline.peak_bytes <= budget_bytes:
        return True
    for t, v in reversed(removed):
        timeline.add(t, v)
    return False
