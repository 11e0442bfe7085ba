"""Where storages are held without being used: the gaps between a use and the next read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.timeline import Timeline

__all__ = ["Gaps"]

_NEVER = -1


class Gaps:
    """The gaps of all storages that can be made again, one row each; rows of unused numbers match no event.

    Rows are rebuilt for the storages that changed since the last query.

    Attributes:
        first: event of the use before the gap.
        after: event of the read behind it.
        storage: what is held.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        storages = timeline.storages
        self.free = [
            p >= 0 and storages.free[p] and size > 0 for p, size in zip(storages.producer, storages.size, strict=True)
        ]
        self.rows: dict[int, list[int]] = {}
        self.unused: list[int] = []
        self.first: NDArray[np.int64] = np.zeros(0, np.int64)
        self.after: NDArray[np.int64] = np.zeros(0, np.int64)
        self.storage: NDArray[np.int64] = np.zeros(0, np.int64)
        timeline.changed.update(s for s, ok in enumerate(self.free) if ok)

    def over(self, key: int) -> NDArray[np.int64]:
        """Rows of the gaps that the event `key` lies in."""
        self._update()
        return np.asarray(((self.after > key) & (self.first < key)).nonzero()[0])

    def _update(self) -> None:
        changed = sorted(self.timeline.changed)
        self.timeline.changed.clear()
        for s in changed:
            if not self.free[s]:
                continue
            gaps = self._gaps_of(s)
            rows = self.rows.setdefault(s, [])
            while len(rows) > len(gaps):
                row = rows.pop()
                self.after[row] = _NEVER
                self.unused.append(row)
            while len(rows) < len(gaps):
                if not self.unused:
                    self._grow()
                rows.append(self.unused.pop())
            for row, (first, after) in zip(rows, gaps, strict=True):
                self.first[row], self.after[row], self.storage[row] = first, after, s

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
        old, new = len(self.first), max(64, len(self.first))
        self.first = np.concatenate([self.first, np.zeros(new, np.int64)])
        self.after = np.concatenate([self.after, np.full(new, _NEVER, np.int64)])
        self.storage = np.concatenate([self.storage, np.zeros(new, np.int64)])
        self.unused.extend(range(old + new - 1, old - 1, -1))
