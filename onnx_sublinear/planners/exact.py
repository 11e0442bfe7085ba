"""Strategy `exact`: constraint programming over retention intervals (MOCCASIN, Bartan et al. 2023), by CP-SAT.

Node v runs at most C times. Run i starts at event t * count + v of a stage t and holds each storage it makes for one
interval; a run needs an interval of each storage that it reads to reach it. The intervals together stay within the
budget; the cost of the reruns is minimized. Optimal for the given order of the first runs and at most C runs a node.
An in-place kernel's input ends before the event, since the output has its bytes. The solver starts from the plan of
`auto`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, ClassVar

from onnx_sublinear.errors import MissingExtraError
from onnx_sublinear.planners.auto import AutoStrategy
from onnx_sublinear.planners.pool import Pool
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.storages import Rerun, Storages

__all__ = ["ExactStrategy", "Proof", "solve"]

_COST_STEPS = 1 << 34  # the objective is rounded to this share of a step


@dataclass(frozen=True)
class ExactStrategy:
    """The cheapest plan within a budget, with a proof where the time suffices; for small problems.

    Attributes:
        seconds: time limit, a third of it for the plan to start from.
        runs: how often a node may run (more where the start's plan runs it more often).
    """

    name: ClassVar[str] = "exact"

    seconds: float = 10.0
    runs: int = 2

    def quick(self) -> AutoStrategy:
        """Seeds without a proof."""
        return AutoStrategy().quick()

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The cheapest plan within the budget; without one, within the smallest peak that `auto` finds.

        Raises:
            BudgetError: there is no plan within the budget, or none was found in time.
            MissingExtraError: OR-Tools is not installed.
        """
        _solver()
        started = time.monotonic()
        pool = Pool(Storages(problem))
        auto = AutoStrategy(seconds=self.seconds / 3, focus=True)
        auto.fill(pool, limit)
        budget = limit.budget_bytes
        if budget is None:
            budget = pool.plan(limit, lower_bound_bytes).peak_bytes
        hint = pool.cheapest(budget)
        left = max(1.0, self.seconds - (time.monotonic() - started))
        proof = solve(pool.storages, budget, hint.reruns if hint else (), runs=self.runs, seconds=left)
        if proof.reruns is not None:
            pool.add_reruns(proof.reruns, self.name)
        plan = pool.plan(replace(limit, budget_bytes=budget), lower_bound_bytes, named=self.name)
        return replace(plan, overhead_bound=min(plan.overhead, proof.bound / problem.step_cost))


@dataclass(frozen=True)
class Proof:
    """What the solver found.

    Attributes:
        reruns: the plan, or None where the solver found none.
        bound: no plan with as many runs a node costs less (in the problem's cost).
        optimal: whether the plan is proved to cost the least.
        infeasible: whether it is proved that there is no plan.
    """

    reruns: list[Rerun] | None
    bound: float
    optimal: bool
    infeasible: bool


def solve(
    storages: Storages, budget_bytes: int, hint: Sequence[Rerun], *, runs: int = 2, seconds: float = 10.0
) -> Proof:
    """The cheapest plan within the budget.

    Args:
        storages: the problem.
        budget_bytes: bytes that the peak must not pass.
        hint: a plan to start from; a node that runs more often in it may run as often here.
        runs: how often a node may run.
        seconds: time limit.

    Raises:
        MissingExtraError: OR-Tools is not installed.
    """
    cp_model = _solver()
    model = _Model(cp_model, storages, budget_bytes, hint, runs)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = max(1, min(8, os.cpu_count() or 1))
    solver.parameters.random_seed = 1
    status = solver.solve(model.model)
    infeasible = status == cp_model.INFEASIBLE
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Proof(
        model.reruns(solver) if found else None,
        0.0 if infeasible else max(0.0, solver.best_objective_bound) * model.cost_unit,
        status == cp_model.OPTIMAL,
        infeasible,
    )


def _solver() -> Any:
    """The solver's module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as e:
        raise MissingExtraError("strategy 'exact'", ["exact"]) from e
    return cp_model


class _Model:
    def __init__(self, cp: Any, storages: Storages, budget: int, hint: Sequence[Rerun], runs: int) -> None:
        self.storages = storages
        self.model = model = cp.CpModel()
        n = self.count = storages.count
        self.end = n * n
        total = sum(storages.costs) or 1
        self.cost_unit = max(1, -(-total // _COST_STEPS))
        hinted: list[list[int]] = [[] for _ in range(n)]
        for t, v in sorted(hint):
            hinted[v].append(t)
        latest = self._latest()
        # Per node its runs: (active literal or None, start event: an int or a variable)
        self.runs: list[list[tuple[Any, Any]]] = [[(None, v * n + v)] for v in range(n)]
        self.stages: list[list[Any]] = [[] for _ in range(n)]
        for v in range(n):
            if not storages.free[v] or latest[v] <= v + 1:
                continue
            for i in range(max(runs - 1, len(hinted[v]))):
                active = model.new_bool_var("")
                stage = model.new_int_var(v + 1, latest[v], "")
                self.runs[v].append((active, stage * n + v))
                self.stages[v].append(stage)
                on = i < len(hinted[v])
                model.add_hint(active, on)
                model.add_hint(stage, hinted[v][i] if on else latest[v])
                if i:
                    before = self.runs[v][i][0]
                    model.add_implication(active, before)
                    model.add(self.stages[v][i - 1] < stage).only_enforce_if(active)
        intervals, demands = self._retention()
        divisor = gcd(budget, *demands) if demands and budget else 1
        model.add_cumulative(intervals, [d // divisor for d in demands], budget // divisor)
        model.minimize(
            sum(active * (storages.costs[v] // self.cost_unit) for v in range(n) for active, _ in self.runs[v][1:])
        )

    def _latest(self) -> list[int]:
        """Per node the last stage in which it can be of use."""
        storages = self.storages
        latest = list(range(self.count))
        for v in range(self.count - 1, -1, -1):
            for s in storages.made[v]:
                for reader in storages.readers[s]:
                    latest[v] = max(latest[v], latest[reader] if storages.free[reader] else reader)
        return latest

    def _retention(self) -> tuple[list[Any], list[int]]:
        """The intervals in which storages are held, and their bytes; adds what the readers need of them."""
        storages, model, n = self.storages, self.model, self.count
        intervals: list[Any] = []
        demands: list[int] = []
        stops: list[list[Any]] = [[] for _ in storages.size]
        for v in range(n):
            for s in storages.made[v]:
                for i, (active, start) in enumerate(self.runs[v]):
                    if i == 0 and storages.kept[s]:
                        intervals.append(model.new_fixed_size_interval_var(start, self.end - start, ""))
                        stops[s].append(None)
                    else:
                        low = v * n + v + 1
                        stop = model.new_int_var(low, self.end, "")
                        size = model.new_int_var(1, self.end - low + 1, "")
                        stops[s].append(stop)
                        if active is None:
                            intervals.append(model.new_interval_var(start, size, stop, ""))
                        else:
                            intervals.append(model.new_optional_interval_var(start, size, stop, active, ""))
                    demands.append(storages.size[s])
            if storages.workspaces[v]:
                for active, start in self.runs[v]:
                    if active is None:
                        intervals.append(model.new_fixed_size_interval_var(start, 1, ""))
                    else:
                        intervals.append(model.new_optional_fixed_size_interval_var(start, 1, active, ""))
                    demands.append(storages.workspaces[v])
        for w in range(n):
            taken = {a for a, _ in storages.inplace[w]}
            for u in storages.read[w]:
                maker = storages.producer[u]
                after = 0 if u in taken else 1
                for j, (active, event) in enumerate(self.runs[w]):
                    sources = self.runs[maker]
                    reached = [model.new_bool_var("") for _ in sources]
                    if active is None:
                        model.add_exactly_one(reached)
                    else:
                        model.add(sum(reached) == 1).only_enforce_if(active)
                        model.add(sum(reached) == 0).only_enforce_if(~active)
                    for i, literal in enumerate(reached):
                        present, start = sources[i]
                        if present is not None:
                            model.add_implication(literal, present)
                            model.add(start < event).only_enforce_if(literal)
                        if stops[u][i] is not None:
                            model.add(stops[u][i] >= event + after).only_enforce_if(literal)
                    del j
        return intervals, demands

    def reruns(self, solver: Any) -> list[Rerun]:
        """The plan of the solution."""
        return [
            (solver.value(stage), v)
            for v in range(self.count)
            for (active, _), stage in zip(self.runs[v][1:], self.stages[v], strict=True)
            if solver.value(active)
        ]
