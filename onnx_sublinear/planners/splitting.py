"""Brings a plan below a budget: at the worst event, the lifetime is split whose bytes cost least to make again.

A storage that is live at the worst event but not used there lies in a gap between two uses. To split the gap, its node
runs again just before the use after it, or earlier, while its own inputs are still there. Inputs that are gone are
kept longer where there is room, and made again too where there is none.
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.storages import Rerun
from onnx_sublinear.planners.timeline import Timeline

__all__ = ["Gaps", "Splitter", "prune"]

_DEEPEST = 40  # reruns that one split may need
_Split = tuple[float, list[Rerun]]


class Gaps:
    """The gaps of all storages that may be made again: from a use to the next read, in events.

    Rows are rebuilt for the storages that changed since the last query.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        storages = timeline.storages
        self.free = [p >= 0 and storages.free[p] and bool(storages.size[s]) for s, p in enumerate(storages.producer)]
        self.rows: dict[int, list[int]] = {}
        self.unused: list[int] = []
        self.first: NDArray[np.int64] = np.zeros(0, np.int64)
        self.after: NDArray[np.int64] = np.zeros(0, np.int64)
        self.storage: NDArray[np.int64] = np.zeros(0, np.int64)
        timeline.changed.update(s for s, ok in enumerate(self.free) if ok)

    def _update(self) -> None:
        changed = self.timeline.changed
        for s in changed:
            if not self.free[s]:
                continue
            gaps = self._gaps_of(s)
            rows = self.rows.setdefault(s, [])
            while len(rows) > len(gaps):
                row = rows.pop()
                self.after[row] = -1
                self.unused.append(row)
            while len(rows) < len(gaps):
                if not self.unused:
                    self._grow()
                rows.append(self.unused.pop())
            for row, (a, b) in zip(rows, gaps, strict=True):
                self.first[row], self.after[row], self.storage[row] = a, b, s
        changed.clear()

    def _gaps_of(self, s: int) -> list[tuple[int, int]]:
        timeline = self.timeline
        count, v = timeline.count, timeline.storages.producer[s]
        starts = timeline.times[v]
        previous, k, found = starts[0] * count + v, 1, []
        for read in timeline.reads[s]:
            while k < len(starts) and starts[k] * count < read:
                previous = starts[k] * count + v
                k += 1
            found.append((previous, read))
            previous = read
        return found

    def _grow(self) -> None:
        old = len(self.first)
        new = max(64, old)
        self.first = np.concatenate([self.first, np.zeros(new, np.int64)])
        self.after = np.concatenate([self.after, np.full(new, -1, np.int64)])
        self.storage = np.concatenate([self.storage, np.zeros(new, np.int64)])
        self.unused.extend(range(old + new - 1, old - 1, -1))

    def over(self, key: int) -> NDArray[np.int64]:
        """Rows of the gaps that the event `key` lies in."""
        self._update()
        return ((self.after > key) & (self.first < key)).nonzero()[0]


class Splitter:
    """Splits lifetimes of one timeline.

    Args:
        timeline: the plan; changed in place.
        tries: how many splits are looked at closely in each step.
        noise: 0 takes the best split; more prefers it less clearly.
        rng: where the noise comes from.
    """

    def __init__(self, timeline: Timeline, tries: int = 10, noise: float = 0.0, rng: Random | None = None) -> None:
        self.timeline = timeline
        self.storages = timeline.storages
        self.gaps = Gaps(timeline)
        self.tries = tries
        self.noise = noise
        self.rng = rng or Random(0)
        self.costs = np.array(self.storages.costs, np.float64)
        self.unit = max(1e-12, float(self.costs.sum()) * 1e-7)  # so that free reruns have a price
        self.producer = np.array(self.storages.producer, np.int64)
        self.sizes = np.array(self.storages.size, np.int64)

    def run(self, budget_bytes: int, most_cost: float = float("inf")) -> list[Rerun] | None:
        """Splits until the peak is within the budget.

        Returns:
            The reruns added; None where the budget is out of reach or the cost would pass `most_cost`.
        """
        timeline = self.timeline
        added: list[Rerun] = []
        for _ in range(50 * timeline.count + 100):
            live = timeline.live
            worst = int(live.argmax())
            if live[worst] <= budget_bytes:
                return added
            split = self.best(worst, budget_bytes)
            if split is None:
                break
            for t, v in split[1]:
                timeline.add(t, v)
            added += split[1]
            if timeline.cost >= most_cost:
                break
        for t, v in reversed(added):
            timeline.remove(t, v)
        return None

    def best(self, worst: int, budget: int) -> _Split | None:
        """The best split at the event of index `worst`."""
        timeline, gaps, count = self.timeline, self.gaps, self.timeline.count
        keys, live = timeline.keys, timeline.live
        here = int(keys[worst])
        rows = gaps.over(here)
        if not len(rows):
            return None
        first, after, storage = gaps.first[rows], gaps.after[rows], gaps.storage[rows]
        nodes = self.producer[storage]
        again = after // count * count + nodes  # just before the read
        fits = again > here
        if not fits.all():
            first, after, storage, nodes = first[fits], after[fits], storage[fits], nodes[fits]
            if not len(first):
                return None
        over = np.maximum(live - budget, 0)
        sums = np.concatenate(([0], over.cumsum()))
        counts = np.concatenate(([0], (over > 0).cumsum()))
        starts, stops = keys.searchsorted(first) + 1, keys.searchsorted(after)
        gains = np.minimum(sums[stops] - sums[starts], self.sizes[storage] * (counts[stops] - counts[starts]))
        scores = gains / (self.costs[nodes] + self.unit)
        if self.noise:
            scores = scores * np.exp([self.rng.gauss(0, self.noise) for _ in range(len(scores))])
        if len(scores) > self.tries:
            chosen = scores.argpartition(-self.tries)[-self.tries :]
            chosen = chosen[(-scores[chosen]).argsort(kind="stable")]
        else:
            chosen = (-scores).argsort(kind="stable")
        best: _Split | None = None
        for i in chosen.tolist():
            if best is not None and scores[i] <= best[0]:
                break
            split = self._closer(int(storage[i]), int(starts[i]), int(stops[i]), int(after[i]), here, budget)
            if split is not None and (best is None or split[0] > best[0]):
                best = split
        return best

    def _closer(self, s: int, start: int, stop: int, after: int, here: int, budget: int) -> _Split | None:
        """The best way to split the gap of `s` between the events of index `start - 1` and `stop`."""
        timeline, storages, count = self.timeline, self.storages, self.count
        v = storages.producer[s]
        latest = after // count
        stages = {latest}
        for u in storages.read[v]:
            k = bisect_right(timeline.times[storages.producer[u]], latest) - 1
            end, _ = timeline.end(u, k)
            if here < end < latest * count + v:
                t = end // count
                if t * count + v > end:
                    t -= 0 if t * count + v <= end else 1
                if t * count + v > here and t > v:
                    stages.add(t)
        best: _Split | None = None
        for t in sorted(stages, reverse=True)[:4]:
            if t in timeline.times[v]:
                continue
            split = self._split_at(s, v, t, start, here, budget)
            if split is not None and (best is None or split[0] > best[0]):
                best = split
        return best

    def _split_at(self, s: int, v: int, t: int, start: int, here: int, budget: int) -> _Split | None:
        timeline, storages, count = self.timeline, self.storages, self.count
        live, size = timeline.live, storages.size
        stop = timeline.place(t * count + v)
        if stop <= start:
            return None
        freed = size[s]
        for other in storages.made[v]:
            if other != s:
                pass
        reruns: dict[int, None] = {v: None}
        extensions: list[tuple[int, int, int]] = []  # (start, stop, bytes)
        pending = [v]
        cost = float(storages.costs[v])
        while pending:
            node = pending.pop()
            key = t * count + node
            at = timeline.place(key)
            for u in storages.read[node]:
                maker = storages.producer[u]
                if maker in reruns:
                    continue
                k = bisect_right(timeline.times[maker], t) - 1
                end = timeline.end(u, k)
                if end[0] >= key:
                    continue
                first = timeline._stop(end)
                if first >= at:
                    continue
                room = budget - size[u]
                fits = True
                if first < start:
                    fits = int(live[first : min(start, at)].max()) <= room
                if fits and at > start:
                    low = max(first, start)
                    fits = int(live[low : min(at, stop)].max()) - freed <= room if low < min(at, stop) else True
                if fits or not storages.free[maker] or t in timeline.times[maker] or len(reruns) >= _DEEPEST:
                    extensions.append((first, at, size[u]))
                    continue
                reruns[maker] = None
                cost += storages.costs[maker]
                pending.append(maker)
        low = min([start, *(e[0] for e in extensions)])
        window = live[low:stop] - budget
        before = int(window[window > 0].sum())
        window[start - low :] -= freed
        for first, at, extra in extensions:
            window[first - low : at - low] += extra
        gain = before - int(window[window > 0].sum())
        if gain <= 0:
            return None
        return gain / (cost + self.unit), [(t, node) for node in sorted(reruns)]

    @property
    def count(self) -> int:
        return self.timeline.count


def prune(timeline: Timeline, budget_bytes: int, reruns: list[Rerun]) -> None:
    """Takes back, in the order given, each of `reruns` without which the peak stays within the budget."""
    for t, v in reruns:
        if t in timeline.times[v][1:]:
            drop(timeline, t, v, budget_bytes)


def drop(timeline: Timeline, t: int, v: int, budget_bytes: int) -> bool:
    """Takes the rerun of `v` in stage `t` back, and what only it read; undone where the peak passes the budget."""
    removed: list[Rerun] = []
    pending = [(t, v)]
    storages = timeline.storages
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
