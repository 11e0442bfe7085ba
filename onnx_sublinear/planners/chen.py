"""Strategy `chen`: the paper's memory planning with a budget (Chen et al. 2016, Alg. 3) and its search (appendix A).

Alg. 3 walks the forward section and sums up what it makes; at a candidate cut where the sum passes B, what crosses the
cut is kept, and the sum starts again. Everything else is recomputed once (mirror count 1). Appendix A: with B = 0, x
bytes lie between the stages and y is the largest stage; then B takes six values around sqrt(x y). The exact simulator
scores each plan. Candidates are the narrow cuts of the forward section.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from onnx_sublinear.planners.pool import Pool
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem, expand
from onnx_sublinear.planners.stages import cut_places
from onnx_sublinear.planners.storages import Storages, reruns_of

__all__ = ["ChenStrategy"]

_VALUES = 6
_MOST_CANDIDATES = 100_000


@dataclass(frozen=True)
class ChenStrategy:
    """The paper's planner, as the paper has it."""

    name: ClassVar[str] = "chen"

    def quick(self) -> ChenStrategy:
        """The same: it is quick."""
        return self

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: none of the paper's plans meets the budget.
        """
        storages = Storages(problem)
        pool = Pool(storages)
        candidates = set(cut_places(storages, _MOST_CANDIDATES))
        cuts, between, largest = _stages(storages, candidates, 0)
        middle = sqrt(between * largest)
        values = [0.0, *(middle / sqrt(2) * 2 ** (k / (_VALUES - 1)) for k in range(_VALUES))]
        for value in values:
            cuts, _, _ = _stages(storages, candidates, value)
            pool.add_reruns(reruns_of(storages, expand(problem, _dropped(storages, cuts))), self.name)
        return pool.plan(limit, lower_bound_bytes)


def _stages(storages: Storages, candidates: set[int], budget: float) -> tuple[list[int], int, int]:
    """Alg. 3: the cuts taken (places in the forward section), bytes kept between stages (x), the largest stage (y)."""
    forward = [n for n, f in enumerate(storages.problem.forward) if f]
    cuts: list[int] = []
    kept = largest = held = 0
    for place, node in enumerate(forward):
        made = sum(storages.size[s] for s in storages.made[node])
        held += made
        if place in candidates and held > budget:
            kept, largest, held = kept + made, max(largest, held), 0
            cuts.append(place)
    return cuts, kept, max(largest, held)


def _dropped(storages: Storages, cuts: list[int]) -> list[bool]:
    """Per node whether it is recomputed: forward nodes that make nothing that crosses a cut."""
    problem = storages.problem
    forward = [n for n, f in enumerate(problem.forward) if f]
    place = {n: i for i, n in enumerate(forward)}
    dropped = [False] * storages.count
    for i, node in enumerate(forward):
        last = max((place[r] for s in storages.made[node] for r in storages.readers[s] if r in place), default=i)
        cut = bisect_left(cuts, i)
        crosses = cut < len(cuts) and cuts[cut] < last
        dropped[node] = problem.recomputable[node] and not crosses
    return dropped
