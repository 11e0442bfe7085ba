"""Strategy `auto`: the other strategies in order of cost, each plan polished by local search.

1. Seeds: keep all, `chain` for several caps of memory, `sqrt`.
2. Down: lifetimes are split from the keep-all plan down, a level (1 % of its peak) at a time.
3. Up: from the tightest level in reach to the budget, the cheapest plan so far is improved by local search. A level
   starts with the plans of all tighter ones. Levels at multiples of 5 % get most of the effort.
4. With a budget and `focus`: local search from several plans at the budget itself.
5. Without a budget: from the smallest peak within the overhead, lower peaks are tried until none is found.

Steps 1 to 3 depend on the budget only in where they end, and end by effort, not by the clock. So without `focus` a
larger budget never costs more, as its plan is chosen from a superset, and equal problems get equal plans. The time
limit sets the effort to what takes about half of it; the clock itself only stops a search that takes many times as
long. With `focus` it keeps the limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from onnx_sublinear.planners.chain import ChainStrategy
from onnx_sublinear.planners.greedy import LEVELS, fill_greedy
from onnx_sublinear.planners.local_search import improve
from onnx_sublinear.planners.pool import Pool, most_cost
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.splitting import Splitter
from onnx_sublinear.planners.sqrt import SqrtStrategy
from onnx_sublinear.planners.storages import Rerun, Storages, reruns_of
from onnx_sublinear.planners.timeline import Timeline

__all__ = ["AutoStrategy"]

_EFFORT_PER_SECOND = 3500  # a third of what an idle machine does
_PATIENCE = 6  # times the time limit, before the clock ends a search whose plan must not depend on the clock
_PUNCTUAL = 0.9  # of the time limit, after which the clock ends a search with `focus`
_FOCUSED_EFFORT_PER_SECOND = 4000
_ROUND_LEVEL, _ROUND_WEIGHT = 5, 8  # every fifth level gets eight times the effort
_SMALL = 300  # nodes up to which every level is searched
_MEDIUM = 2000  # nodes up to which seeds may take their time
_LARGE = 20_000  # nodes from which on only the chain program runs
_STARTS, _START_NOISE = 8, 0.5
_SEED = 20160421


@dataclass(frozen=True)
class AutoStrategy:
    """The default.

    Attributes:
        seconds: time limit.
        thorough: whether to search; else only the seeds.
        focus: whether to search at the budget itself, too: cheaper plans for large problems, but then a larger budget
            may happen to cost a little more.
    """

    name: ClassVar[str] = "auto"

    seconds: float = 10.0
    thorough: bool = True
    focus: bool = False

    def quick(self) -> AutoStrategy:
        """The seeds alone, and of large problems only those of `sqrt`, to compare problems."""
        return replace(self, thorough=False)

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: no plan was found within the budget.
        """
        pool = Pool(Storages(problem))
        self.fill(pool, limit)
        return pool.plan(limit, lower_bound_bytes)

    def fill(self, pool: Pool, limit: Limit) -> None:
        """Adds plans for the limit to a new pool."""
        search = _Search(pool, self)
        if limit.budget_bytes is not None and limit.budget_bytes >= search.keep_all.peak_bytes:
            return
        search.seeds(limit)
        if not self.thorough or pool.storages.count > _LARGE:
            return
        search.down()
        if limit.budget_bytes is None:
            search.lower(most_cost(pool.storages, limit))
            return
        search.up(limit.budget_bytes)
        if self.focus:
            search.at(limit.budget_bytes)


class _Search:
    def __init__(self, pool: Pool, options: AutoStrategy) -> None:
        self.options = options
        self.pool = pool
        self.storages = pool.storages
        self.keep_all = self.pool.points[0]
        self.effort = options.seconds * (_FOCUSED_EFFORT_PER_SECOND if options.focus else _EFFORT_PER_SECOND)
        self.deadline = time.monotonic() + options.seconds * (_PUNCTUAL if options.focus else _PATIENCE)

    def late(self) -> bool:
        """Whether the time limit is over."""
        return time.monotonic() > self.deadline

    def _splitter(self, reruns: Iterable[Rerun]) -> Splitter:
        splitter = Splitter(Timeline(self.storages, reruns))
        splitter.stop = self.late
        return splitter

    def level(self, k: int) -> int:
        """Bytes of level `k`."""
        return self.keep_all.peak_bytes * k // LEVELS

    def seeds(self, limit: Limit) -> None:
        """Step 1."""
        thorough, count = self.options.thorough, self.storages.count
        if thorough or count <= _MEDIUM:
            (ChainStrategy() if thorough else ChainStrategy().quick()).fill(self.pool, limit)
        if count <= _LARGE:
            sqrt = SqrtStrategy() if thorough else SqrtStrategy(targets=4 if count <= _MEDIUM else 2, refinements=0)
            relaxed = thorough and limit.budget_bytes is not None and count <= _MEDIUM
            for schedule in sqrt.schedules(self.storages.problem, relaxed):
                self.pool.add_reruns(reruns_of(self.storages, schedule), "sqrt")

    def down(self) -> None:
        """Step 2."""
        fill_greedy(self.pool, self.effort / 4, self.late)

    def up(self, budget_bytes: int) -> None:
        """Step 3."""
        lowest = next((k for k in range(1, LEVELS) if self.level(k) >= self.pool.points[0].peak_bytes), LEVELS)
        small = self.storages.count <= _SMALL
        weights = {
            k: (1 if k % _ROUND_LEVEL else _ROUND_WEIGHT) * LEVELS / k
            for k in range(lowest, LEVELS)
            if small or not k % _ROUND_LEVEL
        }
        per_weight = self.effort * (0.3 if self.options.focus else 0.4) / (sum(weights.values()) or 1)
        splitter: Splitter | None = None
        for k, weight in weights.items():
            level = self.level(k)
            if level > budget_bytes or self.late():
                break
            start = self.pool.cheapest(level)
            if start is None or not start.reruns:
                continue
            if splitter is None or set(start.reruns) != set(splitter.timeline.reruns()):
                splitter = self._splitter(start.reruns)
            cost, reruns = improve(splitter, level, weight * per_weight, Random(_SEED + k))
            if cost < start.cost:
                self.pool.add_reruns(reruns, start.strategy)

    def at(self, budget_bytes: int) -> None:
        """Step 4."""
        effort, rng = 0.5 * self.effort, Random(_SEED)
        starts: list[tuple[float, int, list[Rerun], str]] = []
        used = 0.0
        start = self.pool.cheapest(budget_bytes)
        for k in range(_STARTS):
            if used > effort / 2 or self.late():
                break
            splitter = self._splitter(start.reruns if start and not k else ())
            splitter.rng, splitter.noise = rng, _START_NOISE if k > 1 else 0.0
            added = splitter.run(budget_bytes)
            splitter.noise = 0.0
            if added is not None:
                share = effort / 2 / _STARTS
                cost, reruns = improve(splitter, budget_bytes, share, rng)
                starts.append((cost, k, reruns, start.strategy if start and not k else "greedy"))
            used += splitter.timeline.effort
        if starts:
            cost, _, reruns, strategy = min(starts)
            splitter = self._splitter(reruns)
            cost, reruns = improve(splitter, budget_bytes, effort / 2, rng)
            self.pool.add_reruns(reruns, strategy)

    def lower(self, most: float) -> None:
        """Step 5."""
        effort, rng, step = 0.0, Random(_SEED), 0.04
        while effort < self.effort * 0.75 and step > 0.002 and not self.late():
            start = self.pool.smallest(most)
            target = int(start.peak_bytes * (1 - step))
            tighter = self.pool.cheapest(target)
            found = False
            for point in (start, tighter):
                if point is None:
                    continue
                splitter = self._splitter(point.reruns)
                if splitter.run(target) is not None:
                    cost, reruns = improve(splitter, target, self.effort / 16, rng, enough=most)
                    self.pool.add_reruns(reruns, point.strategy)
                    found = cost <= most
                effort += splitter.timeline.effort
                if found:
                    break
            step = min(step * 1.5, 0.1) if found else step / 2
        smallest = self.pool.smallest(most)
        _, reruns = improve(self._splitter(smallest.reruns), smallest.peak_bytes, self.effort / 8, rng)
        self.pool.add_reruns(reruns, smallest.strategy)
