"""Strategy `chain`: the optimal persistent plan for a chain of stages, by dynamic programming.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova ("Optimal checkpointing for heterogeneous chains", rotor).
Opt(m, i, l) is the least cost of running stages i..l and their gradients with m bytes beside the entry of stage i:
the smaller of

(a) run i..j-1 keeping only the entry of j, then Opt(m - entry_j, j, l), then Opt(m, i, j-1);
(b) run i keeping what its gradient needs, then Opt(m - saved_i, i+1, l), then its gradient.

Memory comes in slots. Long chains have two levels: groups of stages, and the same program inside each group, which gives
Opt(m, i, i) for the groups. All budgets up to the cap come out of one table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.stages import Stage
from onnx_sublinear.planners.storages import Rerun

__all__ = ["ChainTable"]

_Row = NDArray[np.float32]
_INFINITE = np.float32(np.inf)


class ChainTable:
    """The table Opt(m, i, l) for all m up to `cap_bytes`.

    Args:
        stages: the chain.
        cap_bytes: the most memory looked at.
        slots: into how many parts it is divided.
        groups: chains longer than this have two levels.
    """

    def __init__(self, stages: Sequence[Stage], cap_bytes: int, slots: int, groups: int) -> None:
        self.slots = slots
        self.slot_bytes = max(1, -(-cap_bytes // slots))
        self.scale = float(sum(s.cost for s in stages)) or 1.0
        self.stages = list(stages)
        size = -(-len(stages) // groups)
        self.parts = [range(k, min(k + size, len(stages))) for k in range(0, len(stages), size)]
        self.inner = [
            _Table(self, [self._atom(k) for k in part]) if len(part) > 1 else None for part in self.parts
        ]
        self.outer = _Table(self, [self._group(part, inner) for part, inner in zip(self.parts, self.inner, strict=True)])

    def up(self, size_bytes: int) -> int:
        """Slots that `size_bytes` take."""
        return min(-(-size_bytes // self.slot_bytes), self.slots + 1)

    def _atom(self, k: int) -> _Unit:
        stage = self.stages[k]
        cost = stage.cost / self.scale
        own = np.full(self.slots + 1, _INFINITE, np.float32)
        own[self.up(max(stage.saved_bytes + stage.gradient_bytes, stage.work_bytes)) :] = cost
        return _Unit(
            cost, self.up(stage.entry_bytes), self.up(stage.saved_bytes), self.up(stage.work_bytes),
            self.up(stage.saved_bytes + stage.gradient_bytes), own,
        )

    def _group(self, part: range, inner: _Table | None) -> _Unit:
        if inner is None:
            return self._atom(part.start)
        stages = [self.stages[k] for k in part]
        saved = sum(s.saved_bytes for s in stages)
        gradient, work = max(s.gradient_bytes for s in stages), max(s.work_bytes + s.entry_bytes for s in stages)
        return _Unit(
            sum(s.cost for s in stages) / self.scale, self.up(stages[0].entry_bytes), self.up(saved), self.up(work),
            self.up(saved + gradient), inner.best[0][len(stages) - 1],
        )

    def least_cost(self) -> _Row:
        """Per number of slots the cost of the whole step's reruns, as a share of the chain's; infinite: out of reach."""
        row: _Row = self.outer.best[0][len(self.parts) - 1] - np.float32(1)
        return row

    def reruns(self, slots: int) -> list[Rerun]:
        """The plan for so many slots."""
        found: set[Rerun] = set()
        self._emit_outer(0, len(self.parts) - 1, slots, -1, found)
        return sorted(found)

    def _run(self, stages: range, at: int, found: set[Rerun]) -> None:
        if at >= 0:
            for k in stages:
                found.update((at, v) for v in self.stages[k].nodes if v < at)

    def _emit_outer(self, i: int, l: int, m: int, at: int, found: set[Rerun]) -> None:
        """Emits the reruns of groups i..l; `at` is the gradient node before which they run, -1 in the first pass."""
        pending = [(i, l, m, at)]
        while pending:
            i, l, m, at = pending.pop()
            first, last = self.parts[i].start, self.parts[l].stop - 1
            if i == l:
                inner = self.inner[i]
                if inner is None:
                    self._run(self.parts[i], at, found)
                else:
                    self._emit_inner(i, m, at, found)
                continue
            j = self.outer.choice(i, l, m)
            if j == i:
                self._run(self.parts[i], at, found)
                pending.append((i + 1, l, m - self.outer.units[i].saved, at))
                continue
            middle = self.parts[j].start
            self._run(range(first, middle), at, found)
            pending.append((j, l, m - self.outer.units[j].entry, at))
            pending.append((i, j - 1, m, self.stages[middle - 1].gradient))
            del last

    def _emit_inner(self, group: int, m: int, at: int, found: set[Rerun]) -> None:
        inner, base = self.inner[group], self.parts[group].start
        assert inner is not None
        pending = [(0, len(self.parts[group]) - 1, m, at)]
        while pending:
            i, l, m, at = pending.pop()
            if i == l:
                self._run(range(base + i, base + i + 1), at, found)
                continue
            j = inner.choice(i, l, m)
            if j == i:
                self._run(range(base + i, base + i + 1), at, found)
                pending.append((i + 1, l, m - inner.units[i].saved, at))
                continue
            self._run(range(base + i, base + j), at, found)
            pending.append((j, l, m - inner.units[j].entry, at))
            pending.append((i, j - 1, m, self.stages[base + j - 1].gradient))


class _Unit:
    """A stage or group of the table, bytes in slots.

    Attributes:
        own: per number of slots the cost of running it alone with its gradient.
    """

    def __init__(self, cost: float, entry: int, saved: int, work: int, gradient: int, own: _Row) -> None:
        self.cost, self.entry, self.saved, self.work, self.gradient, self.own = cost, entry, saved, work, gradient, own


class _Table:
    def __init__(self, chain: ChainTable, units: list[_Unit]) -> None:
        self.units = units
        count, width = len(units), chain.slots + 1
        self.prefix = np.concatenate(([0.0], np.cumsum([u.cost for u in units]))).astype(np.float32)
        # best[i][l], and behind[l][j]: best[j][l] moved by the entry of j, plus the cost of all stages before j
        self.best = np.full((count, count, width), _INFINITE, np.float32)
        self.behind = np.full((count, count, width), _INFINITE, np.float32)
        buffer = np.empty((count, width), np.float32)
        self.works = np.array([u.work + (u.entry if k else 0) for k, u in enumerate(units)])
        for length in range(count):
            for i in range(count - length):
                l = i + length
                unit = units[i]
                if not length:
                    row = unit.own
                else:
                    row = self._keeping(i, l)
                    options = np.add(self.behind[l, i + 1 : l + 1], self.best[i, i:l], out=buffer[:length])
                    split = options.min(axis=0)
                    split -= self.prefix[i]
                    row = np.minimum(row, split)
                self.best[i, l] = row
                if i:
                    moved = self.behind[l, i]
                    if unit.entry < width:
                        moved[unit.entry :] = row[: width - unit.entry] + self.prefix[i]
                    moved[: self._sweep(i)] = _INFINITE

    def _sweep(self, j: int) -> int:
        """Slots that running up to stage j takes, at least (stages far before it are not looked at)."""
        return int(self.units[j - 1].work)

    def _keeping(self, i: int, l: int) -> _Row:
        """Option (b)."""
        unit, width = self.units[i], self.best.shape[2]
        row = np.full(width, _INFINITE, np.float32)
        if unit.saved < width:
            row[unit.saved :] = self.best[i + 1, l, : width - unit.saved] + np.float32(unit.cost)
        row[: unit.gradient] = _INFINITE
        return row

    def choice(self, i: int, l: int, m: int) -> int:
        """The best j at (m, i, l), l > i; i itself for option (b)."""
        split = self.behind[l, i + 1 : l + 1, m] + self.best[i, i:l, m] - self.prefix[i]
        j = int(split.argmin())
        return i if self._keeping(i, l)[m] <= split[j] else i + 1 + j
