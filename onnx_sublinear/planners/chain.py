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
from onnx_sublinear.planners.stages import cut_places, stages_between
from onnx_sublinear.planners.storages import Storages

__all__ = ["ChainStrategy"]

_CAPS = (1.0, 0.3, 0.1)
_FINER_CAP, _FINER_GROUPS = 1.05, 2  # the last table for a limit of the overhead: its cap over the best peak so far
_MOST_STAGES = 4000
_MOST_RUNS = 8  # forward passes beyond which no plan is made
_LARGE, _HUGE = 6000, 20_000  # nodes from which on fewer plans are scored, and only those near the limit
_PLANS, _PLANS_LARGE = 14, 5  # per cap


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
        stages = stages_between(storages, cut_places(storages, _MOST_STAGES))
        if len(stages) < 2:
            return
        most = min(_MOST_RUNS, most_cost(storages, limit) / (sum(s.cost for s in stages) or 1))
        plans = _PLANS if storages.count <= _LARGE else _PLANS_LARGE
        for cap in self.caps:
            table = ChainTable(stages, int(peak * cap), self.slots, self.groups)
            costs = table.least_cost()
            reach = [m for m in range(len(costs)) if costs[m] <= _MOST_RUNS and (not m or costs[m] < costs[m - 1])]
            if storages.count > _HUGE:
                _bisect(pool, table, reach, limit.budget_bytes, most_cost(storages, limit))
                continue
            fitting = [m for m in reach if costs[m] <= most]
            for m in dict.fromkeys((*reach[:: max(1, -(-len(reach) // plans))], *fitting[:1])):
                pool.add_reruns(table.reruns(m), self.name)
        if limit.budget_bytes is None and storages.count <= _HUGE:
            cap = int(pool.smallest(most_cost(storages, limit)).peak_bytes * _FINER_CAP)
            table = ChainTable(stages, cap, self.slots, self.groups * _FINER_GROUPS)
            costs = table.least_cost()
            for m in [m for m in range(len(costs)) if costs[m] <= most][:2]:
                pool.add_reruns(table.reruns(m), self.name)


def _bisect(pool: Pool, table: ChainTable, reach: list[int], budget: int | None, most: float) -> None:
    """Adds the plans that a bisection of the slots for the limit meets."""
    low, high = 0, len(reach)
    while low < high:
        middle = (low + high) // 2
        point = pool.add_reruns(table.reruns(reach[middle]), ChainStrategy.name)
        more = point.cost > most if budget is None else point.peak_bytes <= budget
        low, high = (middle + 1, high) if more else (low, middle)
