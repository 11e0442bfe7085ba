"""The live-bytes profile of a plan, kept up to date while reruns come and go.

Events are numbered t * count + v: the run of node v in stage t (see `storages`). The profile holds one entry an event.
A change touches the lifetimes of what the rerun makes and reads: a few range additions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.storages import Rerun, Storages

__all__ = ["Timeline"]

_END = 1 << 62
_EVENTS_PER_EFFORT = 40  # of building a profile


class Timeline:
    """A plan's reruns and its live bytes.

    Attributes:
        times: per node the stages it runs in, ascending; the first is its own.
        reads: per storage the events that read it, ascending.
        cost: cost of the reruns.
        changed: storages whose events changed; whoever reads it clears it.
        journal: the changes since the caller cleared it, as (added, t, v).
        effort: a measure of the work done so far that is the same on every machine.
    """

    def __init__(self, storages: Storages, reruns: Iterable[Rerun] = ()) -> None:
        self.storages = storages
        count = self.count = storages.count
        self.times: list[list[int]] = [[v] for v in range(count)]
        self.cost = 0
        self.changed: set[int] = set()
        self.journal: list[tuple[bool, int, int]] = []
        again = sorted(set(reruns))
        for t, v in again:
            self.times[v].append(t)
            self.cost += storages.costs[v]
        events = sorted([t * count + v for t, v in again] + [v * count + v for v in range(count)])
        self.reads: list[list[int]] = [[] for _ in storages.size]
        self._length = len(events)
        self.effort = self._length / _EVENTS_PER_EFFORT
        room = self._length + 64
        self._keys: NDArray[np.int64] = np.zeros(room, np.int64)
        self._live: NDArray[np.int64] = np.zeros(room, np.int64)
        self._keys[: self._length] = events
        nodes = self._keys[: self._length] % count
        self._live[: self._length] = self._first_profile(events, nodes.tolist())
        self._live[: self._length] += np.array(storages.workspaces, np.int64)[nodes]

    def _first_profile(self, events: list[int], nodes: list[int]) -> NDArray[np.int64]:
        """Live bytes without workspaces; fills `reads`."""
        storages, reads = self.storages, self.reads
        read, made, sizes, inplace = storages.read, storages.made, storages.size, storages.inplace
        latest = [0] * len(sizes)  # storage -> its latest run
        owner: list[int] = []
        stops: list[int] = []  # per run, the index after the last event that counts it
        delta = np.zeros(len(events) + 1, np.int64)
        for i, v in enumerate(nodes):
            for s in read[v]:
                reads[s].append(events[i])
                stops[latest[s]] = i + 1
            for a, b in inplace[v]:
                if not storages.kept[b] or events[i] != v * self.count + v:
                    stops[latest[a]] = i
            for s in made[v]:
                latest[s] = len(owner)
                owner.append(s)
                stops.append(i + 1)
                delta[i] += sizes[s]
        first = {s: k for k, s in reversed(list(enumerate(owner)))}
        for s, k in first.items():
            if storages.kept[s]:
                stops[k] = len(events)
        bytes_of = np.array(sizes, np.int64)[owner] if owner else np.zeros(0, np.int64)
        np.subtract.at(delta, np.array(stops, np.int64), bytes_of)
        return np.cumsum(delta[:-1])

    @property
    def keys(self) -> NDArray[np.int64]:
        """The events, ascending; valid until the next change."""
        return self._keys[: self._length]

    @property
    def live(self) -> NDArray[np.int64]:
        """Live bytes at each event, workspaces included; valid until the next change."""
        return self._live[: self._length]

    @property
    def peak_bytes(self) -> int:
        """The largest live bytes."""
        return int(self.live.max()) if self._length else 0

    def reruns(self) -> Iterator[Rerun]:
        """All reruns, by node."""
        for v, times in enumerate(self.times):
            for t in times[1:]:
                yield t, v

    def end(self, s: int, k: int) -> tuple[int, bool]:
        """The last event of run `k` of storage `s`, and whether that event's kernel takes the bytes over in place."""
        count, storages = self.count, self.storages
        if k == 0 and storages.kept[s]:
            return _END, False
        v = storages.producer[s]
        times = self.times[v]
        reads = self.reads[s]
        i = (bisect_left(reads, times[k + 1] * count) if k + 1 < len(times) else len(reads)) - 1
        if i < 0 or reads[i] < times[k] * count:
            return times[k] * count + v, False
        last = reads[i]
        stage, reader = divmod(last, count)
        pairs = storages.inplace[reader]
        return last, any(a == s and (stage != reader or not storages.kept[b]) for a, b in pairs)

    def place(self, key: int) -> int:
        """Index of the first event at or after `key`."""
        return int(self._keys[: self._length].searchsorted(key))

    def stop(self, end: tuple[int, bool]) -> int:
        """Index after the last event that counts the bytes of a run that ends with `end`."""
        if end[0] == _END:
            return self._length
        return self.place(end[0]) + (not end[1])

    def _move_end(self, s: int, old: tuple[int, bool], new: tuple[int, bool]) -> None:
        if old == new:
            return
        i, j = self.stop(old), self.stop(new)
        if i < j:
            self._live[i:j] += self.storages.size[s]
        elif j < i:
            self._live[j:i] -= self.storages.size[s]

    def add(self, t: int, v: int) -> None:
        """Runs node `v` again in stage `t`."""
        self.journal.append((True, t, v))
        self.effort += 0.5 + self._length / 16000
        storages, count = self.storages, self.count
        key = t * count + v
        self._insert(key, v)
        times = self.times[v]
        k = bisect_left(times, t) - 1
        for s in storages.made[v]:
            old = self.end(s, k)
            times.insert(k + 1, t)
            first, second = self.end(s, k), self.end(s, k + 1)
            del times[k + 1]
            self.changed.add(s)
            self._move_end(s, old, first)
            self._live[self.place(key) : self.stop(second)] += storages.size[s]
        times.insert(k + 1, t)
        for s in storages.read[v]:
            k = bisect_right(self.times[storages.producer[s]], t) - 1
            old = self.end(s, k)
            insort(self.reads[s], key)
            self.changed.add(s)
            self._move_end(s, old, self.end(s, k))
        self.cost += storages.costs[v]

    def remove(self, t: int, v: int) -> None:
        """Takes the rerun of `v` in stage `t` back; its readers take the run before."""
        self.journal.append((False, t, v))
        self.effort += 0.5 + self._length / 16000
        storages, count = self.storages, self.count
        key = t * count + v
        for s in storages.read[v]:
            k = bisect_right(self.times[storages.producer[s]], t) - 1
            old = self.end(s, k)
            self.changed.add(s)
            reads = self.reads[s]
            del reads[bisect_left(reads, key)]
            self._move_end(s, old, self.end(s, k))
        times = self.times[v]
        k = bisect_left(times, t) - 1
        for s in storages.made[v]:
            first, second = self.end(s, k), self.end(s, k + 1)
            del times[k + 1]
            merged = self.end(s, k)
            self.changed.add(s)
            times.insert(k + 1, t)
            self._live[self.place(key) : self.stop(second)] -= storages.size[s]
            self._move_end(s, first, merged)
        del times[k + 1]
        self._delete(key)
        self.cost -= storages.costs[v]

    def undo(self) -> None:
        """Takes back all that is in the journal, and clears it."""
        for added, t, v in reversed(list(self.journal)):
            (self.remove if added else self.add)(t, v)
        self.journal.clear()

    def is_read(self, t: int, v: int) -> bool:
        """Whether something reads what the rerun of `v` in stage `t` makes."""
        count, times = self.count, self.times[v]
        k = bisect_left(times, t)
        after = times[k + 1] * count if k + 1 < len(times) else _END
        for s in self.storages.made[v]:
            reads = self.reads[s]
            i = bisect_left(reads, t * count)
            if i < len(reads) and reads[i] < after:
                return True
        return False

    def _insert(self, key: int, v: int) -> None:
        if self._length + 1 > len(self._keys):
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
            self._live = np.concatenate([self._live, np.zeros_like(self._live)])
        i, n = self.place(key), self._length
        following = int(self._keys[i])
        through = int(self._live[i]) - self._made_at(following)
        self._keys[i + 1 : n + 1] = self._keys[i:n]
        self._live[i + 1 : n + 1] = self._live[i:n]
        self._keys[i] = key
        self._live[i] = through + self.storages.workspaces[v]
        self._length += 1

    def _made_at(self, key: int) -> int:
        """Bytes that the event `key` adds to what is live through it."""
        storages = self.storages
        t, v = divmod(key, self.count)
        made = storages.workspaces[v]
        for s in storages.made[v]:
            made += storages.size[s]
        for a, _ in storages.inplace[v]:
            k = bisect_right(self.times[storages.producer[a]], t) - 1
            if self.end(a, k) == (key, True):
                made -= storages.size[a]
        return made

    def _delete(self, key: int) -> None:
        i, n = self.place(key), self._length
        self._keys[i : n - 1] = self._keys[i + 1 : n]
        self._live[i : n - 1] = self._live[i + 1 : n]
        self._length -= 1
