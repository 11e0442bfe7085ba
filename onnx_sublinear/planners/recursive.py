"""Strategy `recursive`: the paper's recursion (Chen et al. 2016, section 4.4) down to k log n memory.

A span of stages is cut into k + 1 parts. Running it keeps the entries of the parts, then each part, from the last to
the first, is treated the same way: g(n) = k + g(n / (k + 1)) = k log n to the base k + 1, for about log n forward
passes. Several k are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.planners.pool import Pool
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.stages import Stage, cut_places, stages_between
from onnx_sublinear.planners.storages import Rerun, Storages

__all__ = ["RecursiveStrategy"]

_MOST_STAGES = 4000
_CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class RecursiveStrategy:
    """Recursion with k cuts of each span.

    Attributes:
        cuts: the values of k that are tried.
    """

    name: ClassVar[str] = "recursive"

    cuts: tuple[int, ...] = _CUTS

    def quick(self) -> RecursiveStrategy:
        """The same with few values of k."""
        return RecursiveStrategy(cuts=(1, 4, 16))

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: no plan of this strategy meets the budget.
        """
        storages = Storages(problem)
        pool = Pool(storages)
        stages = stages_between(storages, cut_places(storages, _MOST_STAGES))
        for k in self.cuts:
            if k < len(stages):
                pool.add_reruns(_recursion(stages, k), self.name)
        return pool.plan(limit, lower_bound_bytes)


def _recursion(stages: Sequence[Stage], cuts: int) -> set[Rerun]:
    """The reruns of the recursion with `cuts` cuts of each span."""
    found: set[Rerun] = set()
    pending = [(0, len(stages), -1)]  # (first stage, stop, gradient node before which it runs; -1: the first pass)
    while pending:
        start, stop, at = pending.pop()
        parts = min(cuts + 1, stop - start)
        bounds = [start + (stop - start) * p // parts for p in range(parts + 1)]
        if at >= 0:  # the last part runs when its turn comes
            until = bounds[-2] if parts > 1 else stop
            for stage in stages[start:until]:
                found.update((at, v) for v in stage.nodes if v < at)
        if parts == 1:
            continue
        for p in range(parts):
            last = p == parts - 1
            pending.append((bounds[p], bounds[p + 1], at if last else stages[bounds[p + 1] - 1].gradient))
    return found
