"""Strategy `chain`: the optimal persistent plan for the step as a chain of stages, by dynamic programming.

Stages are the runs between narrow cuts of the forward section; see `stages` and `chain_table`. On an equal chain its
plans reach the bound of Revolve (Griewank and Walther 2000) up to the slots that memory is counted in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.planners.chain_table import ChainTable
from onnx_sublinear.planners.pool import Pool, most_cost
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.stages import Stage, cut_places, stages_between
from onnx_sublinear.planners.storages import Storages

__all__ = ["ChainStrategy"]

_CAPS = (1.0, 0.3, 0.1)
_FINER_CAP, _FINER_GROUPS = 1.05, 2  # the last table for a limit of the overhead: its cap over the best peak so far
_MOST_STAGES = 4000
_MOST_RUNS = 8  # forward passes beyond which no plan is made
_LARGE = 6000  # nodes from which on only plans near the limit are scored
_PLANS = 14  # per cap


@dataclass(frozen=True)
class ChainStrategy:
    """The best plans for the step as a chain of stages.

    Attributes:
        groups: chains of more stages have two levels.
        slots: into how many parts memory is divided, for each cap.
        caps: shares of the keep-all peak that the program looks up to.
    """

    name: ClassVar[str] = "chain"

    groups: int = 100
    slots: int = 100
    caps: tuple[float, ...] = _CAPS

    def quick(self) -> ChainStrategy:
        """The same on a coarser chain."""
        return ChainStrategy(groups=40, slots=60, caps=(0.3, 0.1))

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: no plan of this strategy meets the budget.
        """
        pool = Pool(Storages(problem))
        self.fill(pool, limit)
        return pool.plan(limit, lower_bound_bytes)

    def fill(self, pool: Pool, limit: Limit) -> None:
        """Adds plans of many peaks to a new pool; for a limit of the overhead, also the one that just fits."""
        storages, peak = pool.storages, pool.points[-1].peak_bytes
        groups = _groups(storages, self.groups)
        if len(groups) < 2:
            return
        allowed = most_cost(storages, limit)
        most = min(_MOST_RUNS, allowed / (sum(group.cost for group, _ in groups) or 1))
        if storages.count > _LARGE:
            self._fill_large(pool, groups, limit, most)
            return
        for cap in self.caps:
            table = ChainTable(groups, int(peak * cap), self.slots)
            reach = _steps(table, _MOST_RUNS)
            fitting = _steps(table, most)
            for m in dict.fromkeys((*reach[:: max(1, -(-len(reach) // _PLANS))], *fitting[:1])):
                pool.add_reruns(table.reruns(m), self.name)
        if limit.budget_bytes is None:
            cap = int(pool.smallest(allowed).peak_bytes * _FINER_CAP)
            table = ChainTable(_groups(storages, self.groups * _FINER_GROUPS), cap, self.slots)
            for m in _steps(table, most)[:2]:
                pool.add_reruns(table.reruns(m), self.name)

    def _fill_large(self, pool: Pool, groups: list[tuple[Stage, list[Stage]]], limit: Limit, most: float) -> None:
        """Adds few plans, near the limit."""
        peak, budget = pool.points[-1].peak_bytes, limit.budget_bytes
        for cap in self.caps if budget is None else (min(1.0, 1.2 * budget / peak),):
            table = ChainTable(groups, int(peak * cap), self.slots)
            reach = _steps(table, most)
            if budget is None:
                for m in reach[:1]:
                    pool.add_reruns(table.reruns(m), self.name)
                continue
            low, high = 0, len(reach)
            while low < high:
                middle = (low + high) // 2
                point = pool.add_reruns(table.reruns(reach[middle]), self.name)
                low, high = (middle + 1, high) if point.peak_bytes <= budget else (low, middle)


def _groups(storages: Storages, most: int) -> list[tuple[Stage, list[Stage]]]:
    """At most `most` stages, each with the finer ones that it consists of."""
    cuts = cut_places(storages, _MOST_STAGES)
    size = -(-(len(cuts) + 1) // most)
    fine = stages_between(storages, cuts)
    coarse = stages_between(storages, cuts[size - 1 :: size]) if size > 1 else fine
    return [(stage, fine[k * size : (k + 1) * size]) for k, stage in enumerate(coarse)]


def _steps(table: ChainTable, most: float) -> list[int]:
    """The numbers of slots at which the cost falls, and is at most `most`."""
    costs = table.least_cost()
    return [m for m in range(len(costs)) if costs[m] <= most and (not m or costs[m] < costs[m - 1])]
