"""Plans of many peaks and costs, of which a limit takes the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnx_sublinear.planners.problem import (
    Evaluation,
    Limit,
    RematPlan,
    evaluate,
    over_budget,
    plan_of,
)
from onnx_sublinear.planners.storages import Rerun, Storages, needed, schedule_of
from onnx_sublinear.planners.timeline import Timeline

__all__ = ["Point", "Pool", "most_cost"]


@dataclass(frozen=True)
class Point:
    """A plan as a strategy sees it.

    Attributes:
        peak_bytes: by the timeline.
        cost: of the reruns.
        reruns: the plan.
        strategy: who made it.
    """

    peak_bytes: int
    cost: int
    reruns: tuple[Rerun, ...]
    strategy: str


def most_cost(storages: Storages, limit: Limit) -> float:
    """What the reruns may cost under `limit`, in the problem's cost."""
    problem = storages.problem
    most = float("inf")
    if limit.max_overhead is not None:
        most = limit.max_overhead * problem.step_cost
    if limit.max_forward_share is not None:
        most = min(most, limit.max_forward_share * problem.forward_cost)
    return most


class Pool:
    """Plans none of which is beaten in both peak and cost by another.

    A choice from a pool is monotone: what fits a budget fits every larger one.
    """

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.points: list[Point] = []  # peaks ascend, costs descend
        self._scores: dict[tuple[Rerun, ...], tuple[list[int], Evaluation]] = {}
        self.add_reruns((), "keep")

    def add_reruns(self, reruns: Iterable[Rerun], strategy: str) -> Point:
        """Adds a plan, less the reruns that nothing reads."""
        timeline = Timeline(self.storages, needed(self.storages, reruns))
        return self.add(timeline.peak_bytes, timeline.cost, tuple(sorted(timeline.reruns())), strategy)

    def add_timeline(self, timeline: Timeline, strategy: str) -> Point:
        """Adds the plan of a timeline."""
        return self.add(timeline.peak_bytes, timeline.cost, tuple(sorted(timeline.reruns())), strategy)

    def add(self, peak_bytes: int, cost: int, reruns: Sequence[Rerun], strategy: str) -> Point:
        """Adds a plan; where another is as good, nothing changes."""
        point = Point(peak_bytes, cost, tuple(reruns), strategy)
        if not any(p.peak_bytes <= peak_bytes and p.cost <= cost for p in self.points):
            self.points = [p for p in self.points if p.peak_bytes < peak_bytes or p.cost < cost]
            self.points.append(point)
            self.points.sort(key=lambda p: p.peak_bytes)
        return point

    def cheapest(self, budget_bytes: int) -> Point | None:
        """The cheapest plan within a budget."""
        return next((p for p in reversed(self.points) if p.peak_bytes <= budget_bytes), None)

    def smallest(self, most_cost: float) -> Point:
        """The plan of smallest peak that costs no more than `most_cost`."""
        return next(p for p in self.points if p.cost <= most_cost)

    def plan(self, limit: Limit, lower_bound_bytes: int, named: str = "") -> RematPlan:
        """The best plan under `limit` by the simulator's score.

        Args:
            limit: what the plan must keep to.
            lower_bound_bytes: for the message where the budget cannot be met.
            named: the plan's strategy; default: who made the plan.

        Raises:
            BudgetError: no plan is within the budget.
        """
        most = most_cost(self.storages, limit)
        fits = [p for p in self.points if p.cost <= most]
        if limit.budget_bytes is None:
            scored = [(p, *self._score(p)) for p in fits[:3] or fits]
            scored = [entry for entry in scored if entry[2].clone_cost <= most] or [
                (p, *self._score(p)) for p in fits[-1:]
            ]
            point, schedule, score = min(scored, key=lambda e: (e[2].peak_bytes, e[2].clone_cost))
            return plan_of(self.storages.problem, named or point.strategy, schedule, score)
        for point in reversed(fits):
            if point.peak_bytes > limit.budget_bytes:
                continue
            schedule, score = self._score(point)
            if score.peak_bytes <= limit.budget_bytes and score.clone_cost <= most:
                return plan_of(self.storages.problem, named or point.strategy, schedule, score)
        smallest = min(self._score(p)[1].peak_bytes for p in fits[:3])
        raise over_budget(limit.budget_bytes, smallest, lower_bound_bytes)

    def _score(self, point: Point) -> tuple[list[int], Evaluation]:
        if point.reruns not in self._scores:
            schedule = schedule_of(self.storages, point.reruns)
            self._scores[point.reruns] = schedule, evaluate(self.storages.problem, schedule)
        return self._scores[point.reruns]
