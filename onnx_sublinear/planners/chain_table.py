"""The dynamic program of strategy `chain`, for all budgets up to a cap at once.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova ("Optimal checkpointing for heterogeneous chains", rotor).
Opt(m, i, k) is the least cost of running stages i..k and their gradients with m bytes beside the entry of stage i: the
smaller of

(a) run i..j-1 keeping only the entry of j, then Opt(m - entry_j, j, k), then Opt(m, i, j-1);
(b) run i keeping a part of what its gradient needs, then Opt(m - part, i+1, k), then the rest of i, then its gradient.

It is optimal among plans that keep a checkpoint until it is used. Memory comes in slots. A long chain has two levels:
groups of stages, and the same program inside each group, which gives Opt(m, i, i) of the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.planners.stages import Cheap, Stage
from onnx_sublinear.planners.storages import Rerun

__all__ = ["ChainTable"]

_Row = NDArray[np.float32]
_INFINITE = np.float32(np.inf)


@dataclass(frozen=True)
class _Unit:
    """A stage or a group of stages; bytes in slots, costs as shares of the chain's.

    Attributes:
        stage: which.
        cost: of one run.
        entry: what a rerun starts from.
        work: what it needs while it runs, beside entry and what is kept.
        gradient: what its gradient needs with all that it saves.
        kept: per variant of (b) what is kept.
        again: per variant the cost of running the rest again.
        own: per number of slots the cost of running it alone with its gradient.
    """

    stage: Stage
    cost: float
    entry: int
    work: int
    gradient: int
    kept: tuple[int, ...]
    again: tuple[float, ...]
    own: _Row


class ChainTable:
    """The table Opt(m, i, k) for all m up to `cap_bytes`.

    Args:
        groups: the chain as (stage, the finer stages that it consists of).
        cap_bytes: the most memory looked at.
        slots: into how many parts it is divided.
    """

    def __init__(self, groups: Sequence[tuple[Stage, Sequence[Stage]]], cap_bytes: int, slots: int) -> None:
        self.slots = slots
        self.slot_bytes = max(1, -(-cap_bytes // slots))
        self.scale = float(sum(group.cost for group, _ in groups)) or 1.0
        self.inner = [_Table([self._unit(s) for s in parts], slots) if len(parts) > 1 else None for _, parts in groups]
        self.outer = _Table([self._unit(g, inner) for (g, _), inner in zip(groups, self.inner, strict=True)], slots)

    def least_cost(self) -> _Row:
        """Per number of slots the cost of all reruns, as a share of the chain's cost; infinite: out of reach."""
        row: _Row = self.outer.best[0][-1] - np.float32(1)
        return row

    def reruns(self, slots: int) -> list[Rerun]:
        """The plan for so many slots."""
        found: set[Rerun] = set()
        # Spans of units in the order of execution; `at` is the gradient node before which they run, -1: the first pass
        pending: list[tuple[_Table, int, int, int, int]] = [(self.outer, 0, len(self.outer.units) - 1, slots, -1)]
        while pending:
            table, i, k, m, at = pending.pop()
            unit = table.units[i]
            if i == k:
                inner = self.inner[i] if table is self.outer else None
                if inner is not None:
                    pending.append((inner, 0, len(inner.units) - 1, m, at))
                else:
                    _run([unit.stage.nodes], at, found)
                continue
            j, variant = table.choice(i, k, m)
            if j == i:
                _run([unit.stage.nodes], at, found)
                if variant:
                    _run([unit.stage.cheap[variant - 1].nodes], unit.stage.gradient, found)
                pending.append((table, i + 1, k, m - unit.kept[variant], at))
                continue
            _run([u.stage.nodes for u in table.units[i:j]], at, found)
            pending.append((table, i, j - 1, m, table.units[j - 1].stage.gradient))
            pending.append((table, j, k, m - table.units[j].entry, at))
        return sorted(found)

    def _unit(self, stage: Stage, inner: _Table | None = None) -> _Unit:
        cost, gradient = stage.cost / self.scale, stage.saved_bytes + stage.gradient_bytes
        if inner is not None:
            own = inner.best[0][-1]
        else:
            own = np.full(self.slots + 1, _INFINITE, np.float32)
            own[self._up(max(gradient, stage.work_bytes)) :] = cost
        variants = [Cheap((), 0, stage.saved_bytes), *stage.cheap]
        return _Unit(
            stage=stage,
            cost=cost,
            entry=self._up(stage.entry_bytes),
            work=self._up(stage.work_bytes),
            gradient=self._up(gradient),
            kept=tuple(self._up(v.kept_bytes) for v in variants),
            again=tuple(v.cost / self.scale for v in variants),
            own=own,
        )

    def _up(self, size_bytes: int) -> int:
        """Slots that `size_bytes` take."""
        return min(-(-size_bytes // self.slot_bytes), self.slots + 1)


def _run(stages: Sequence[Sequence[int]], at: int, found: set[Rerun]) -> None:
    """Adds reruns of the nodes before gradient node `at`; in the first pass (-1) there are none."""
    for nodes in stages if at >= 0 else ():
        found.update((at, v) for v in nodes if v < at)


class _Table:
    def __init__(self, units: Sequence[_Unit], slots: int) -> None:
        self.units = units
        count, width = len(units), slots + 1
        self.before = np.concatenate(([0.0], np.cumsum([u.cost for u in units]))).astype(np.float32)
        # best[i][k], and moved[k][j]: best[j][k] shifted by the entry of j, plus the cost of all units before j
        self.best = np.full((count, count, width), _INFINITE, np.float32)
        self.moved = np.full((count, count, width), _INFINITE, np.float32)
        buffer = np.empty((count, width), np.float32)
        for length in range(count):
            for i in range(count - length):
                k, row = i + length, units[i].own
                if length:
                    np.add(self.moved[k, i + 1 : k + 1], self.best[i, i:k], out=buffer[:length])
                    row = np.minimum(self._keeping(i, k), buffer[:length].min(axis=0) - self.before[i])
                self.best[i, k] = row
                if i and units[i].entry < width:
                    moved = self.moved[k, i]
                    moved[units[i].entry :] = row[: width - units[i].entry] + self.before[i]
                    moved[: units[i - 1].work] = _INFINITE  # running up to i takes at least this

    def choice(self, i: int, k: int, m: int) -> tuple[int, int]:
        """The best j at (m, i, k), i < k, for option (a); i itself and the variant for option (b)."""
        split = self.moved[k, i + 1 : k + 1, m] + self.best[i, i:k, m] - self.before[i]
        j = int(split.argmin())
        if self._keeping(i, k)[m] > split[j]:
            return i + 1 + j, 0
        variants = [self._variant(i, k, v)[m] for v in range(len(self.units[i].kept))]
        return i, int(np.argmin(variants))

    def _keeping(self, i: int, k: int) -> _Row:
        """Option (b) with the best variant."""
        row = self._variant(i, k, 0)
        again = self.units[i].again
        for v in range(1, len(again)):
            if again[v] > again[v - 1] or self.units[i].kept[v] < self.units[i].kept[v - 1]:
                row = np.minimum(row, self._variant(i, k, v))
        return row

    def _variant(self, i: int, k: int, v: int) -> _Row:
        unit, width = self.units[i], self.best.shape[2]
        row: _Row = np.full(width, _INFINITE, np.float32)
        if unit.kept[v] < width:
            row[unit.kept[v] :] = self.best[i + 1, k, : width - unit.kept[v]] + np.float32(unit.cost + unit.again[v])
        row[: unit.gradient] = _INFINITE
        return row
