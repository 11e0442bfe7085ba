"""Strategy `greedy`: lifetimes are split at the peak, from the keep-all plan down, on any graph.

The plan of each level (1 % of the keep-all peak) starts from that of the level above. See `splitting` for the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.planners.pool import Pool
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.splitting import Splitter, prune
from onnx_sublinear.planners.storages import Storages
from onnx_sublinear.planners.timeline import Timeline

__all__ = ["LEVELS", "GreedyStrategy", "fill_greedy"]

LEVELS = 100


@dataclass(frozen=True)
class GreedyStrategy:
    """Splits the lifetime that frees most at the peak per cost, again and again."""

    name: ClassVar[str] = "greedy"

    def quick(self) -> GreedyStrategy:
        """The same: it has no knob."""
        return self

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: no plan of this strategy meets the budget.
        """
        pool = Pool(Storages(problem))
        fill_greedy(pool)
        return pool.plan(limit, lower_bound_bytes)


def fill_greedy(pool: Pool, effort: float = float("inf"), stop: Callable[[], bool] = lambda: False) -> None:
    """Adds a plan for each level that is reached within `effort`; `stop` is asked now and then whether to end."""
    storages, peak = pool.storages, pool.points[-1].peak_bytes
    timeline = Timeline(storages)
    splitter = Splitter(timeline)
    splitter.stop = stop
    for k in range(LEVELS - 1, 0, -1):
        level = peak * k // LEVELS
        if level >= timeline.peak_bytes:
            continue
        added = splitter.run(level) if timeline.effort <= effort else None
        if added is None:
            return
        prune(timeline, level, sorted(added, key=lambda r: (-storages.costs[r[1]], r)))
        pool.add_timeline(timeline, GreedyStrategy.name)
