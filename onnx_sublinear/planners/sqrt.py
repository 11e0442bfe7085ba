"""Strategy `sqrt`: the paper's O(sqrt n) stages (section 4.3, Alg. 1-3) on general graphs.

Stages:
1. Cut the forward section into runs. Walk it with a target for the peak: while what is kept so far plus what the
   current run must hold at once stays below the target, go on; else cut, within the last part of the run, where the
   fewest bytes cross. What crosses a cut is a checkpoint, the rest of the run is dropped. Since the kept bytes grow
   from run to run, the runs get shorter, which is the optimal shape on an equal chain (Griewank & Walther 2000:
   about sqrt(2n) instead of 2 sqrt(n)).
2. Search over targets, as the paper's appendix A over budgets; the simulator scores each plan.
3. Keep what need not be dropped: the last run, which is alive when the gradient section starts, and every run whose
   recomputation does not lower the peak; small tensors are not worth a clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.planners.problem import (
    Evaluation,
    Limit,
    RematPlan,
    RematProblem,
    evaluate,
    expand,
    over_budget,
    plan_of,
)

__all__ = ["SqrtStrategy"]

_LARGE = 6000  # nodes from which on the search is coarser
_MOST_RELAXED = 6  # plans that are made cheaper where there is a limit
_MOST_STEPS = 16  # how many cheaper plans are made from each
_MOST_FAILURES = 6  # runs in vain that are tried to be kept: the earlier ones weigh more
_SMALL_SHARE = 0.01  # of the target: the smallest tensors are kept as long as they sum up to no more than this


@dataclass(frozen=True)
class _Candidate:
    """A plan in the making: the run (1, 2, ...) in which each node is dropped, 0 for kept, and its score."""

    runs: tuple[int, ...]
    schedule: list[int]
    score: Evaluation

    @property
    def key(self) -> tuple[int, int]:
        return self.score.peak_bytes, self.score.clone_cost


class _Forward:
    """The forward section in schedule order with what a cut needs to know."""

    def __init__(self, problem: RematProblem) -> None:
        self.nodes = [n for n, f in enumerate(problem.forward) if f]
        place = {n: i for i, n in enumerate(self.nodes)}
        count, root = len(self.nodes), _storage_roots(problem)
        last_forward = [-1] * len(root)
        read_by_gradient = bytearray(len(root))
        for value, readers in enumerate(problem.readers):
            for reader in readers:
                if problem.forward[reader]:
                    last_forward[root[value]] = max(last_forward[root[value]], place[reader])
                else:
                    read_by_gradient[root[value]] = 1
        self.root = root
        self.last_forward = last_forward
        self.saved = [0] * count  # bytes that recomputing the node holds for the gradient section
        self.pinned = [0] * count  # bytes that stay because the node may not run again
        delta = [0] * (count + 1)
        for i, node in enumerate(self.nodes):
            for v in problem.writes[node]:
                if root[v] != v or not problem.sizes[v]:
                    continue
                if not problem.recomputable[node] or problem.kept[v]:
                    if problem.kept[v] or read_by_gradient[v] or last_forward[v] > i:
                        self.pinned[i] += problem.sizes[v]
                    continue
                if read_by_gradient[v]:
                    self.saved[i] += problem.sizes[v]
                if last_forward[v] > i:
                    delta[i] += problem.sizes[v]
                    delta[last_forward[v]] -= problem.sizes[v]
        self.crossing: list[int] = []  # bytes made up to here and read later in the forward section
        running = 0
        for d in delta[:count]:
            running += d
            self.crossing.append(running)


def _storage_roots(problem: RematProblem) -> list[int]:
    """Per value the one whose storage it shares as a view."""
    root = list(range(len(problem.sizes)))
    for views in problem.views:
        for a, b in views:
            if not problem.kept[b]:
                root[b] = root[a]
    return root


def _cuts(forward: _Forward, target_bytes: int) -> list[int]:
    """Places in the forward section after which to cut, ascending."""
    cuts: list[int] = []
    start = kept = held = 0
    place = 0
    while place < len(forward.nodes):
        held += forward.saved[place]
        kept += forward.pinned[place]
        if kept + held > target_bytes and place > start:
            earliest = start + (place - start) // 2
            cut = min(range(earliest, place), key=lambda i: (forward.crossing[i], -i))
            cuts.append(cut)
            kept += forward.crossing[cut]
            kept -= sum(forward.pinned[cut + 1 : place + 1])
            start = place = cut + 1
            held = 0
            continue
        place += 1
    return cuts


def _runs(problem: RematProblem, forward: _Forward, cuts: Sequence[int], target_bytes: int) -> list[int]:
    """Per node the run in which it is dropped (1, 2, ...), 0 where it is kept."""
    runs = [0] * len(problem.forward)
    if not cuts:
        return runs
    bounds = [*cuts, len(forward.nodes)]
    run = 0
    small = _small_values(problem, target_bytes)
    root = forward.root
    for place, node in enumerate(forward.nodes):
        if place > bounds[run]:
            run += 1
        end = bounds[run]
        crosses = any(forward.last_forward[root[v]] > end and not problem.kept[v] for v in problem.writes[node])
        sizes = [problem.sizes[v] for v in problem.writes[node]]
        tiny = any(sizes) and all(v in small for v in problem.writes[node] if problem.sizes[v])
        if problem.recomputable[node] and not crosses and not tiny:
            runs[node] = run + 1
    producer = problem.producer
    for node in forward.nodes:  # a view is kept with its base
        for a, b in problem.views[node]:
            if root[b] != b and not runs[producer[root[a]]]:
                runs[node] = 0
    return runs


def _small_values(problem: RematProblem, target_bytes: int) -> set[int]:
    """The smallest values that the gradient section reads, as many as add up to a small share of the target."""
    allowed = int(target_bytes * _SMALL_SHARE)
    small: set[int] = set()
    for value in sorted(range(len(problem.sizes)), key=problem.sizes.__getitem__):
        size = problem.sizes[value]
        if not size or problem.producer[value] < 0 or not problem.forward[problem.producer[value]]:
            continue
        if all(problem.forward[r] for r in problem.readers[value]):
            continue
        allowed -= size
        if allowed < 0:
            break
        small.add(value)
    return small


def _candidate(problem: RematProblem, runs: Sequence[int]) -> _Candidate:
    schedule = expand(problem, [r > 0 for r in runs])
    return _Candidate(tuple(runs), schedule, evaluate(problem, schedule))


def _search(problem: RematProblem, keep_all: _Candidate, targets: int, refinements: int) -> list[_Candidate]:
    """Plans for a range of targets: geometric up to the keep-all peak, then closer around the best.

    A target does not count what the gradient nodes need, so the first is below any reachable peak: the largest tensor.
    """
    forward = _Forward(problem)
    found: dict[tuple[int, ...], _Candidate] = {}

    def attempt(target: int) -> int:
        cuts = tuple(_cuts(forward, target))
        if cuts not in found:
            found[cuts] = _candidate(problem, _runs(problem, forward, cuts, target))
        return found[cuts].score.peak_bytes

    low, high = max(problem.sizes, default=0) or 1, max(keep_all.score.peak_bytes, 2)
    ratio = (high / low) ** (1 / targets)
    scores = {int(low * ratio**i): attempt(int(low * ratio**i)) for i in range(targets)}
    best = min(scores, key=scores.__getitem__)
    step = ratio
    for _ in range(refinements):
        step = step**0.5
        for target in (int(best / step), int(best * step)):
            scores[target] = attempt(target)
        best = min(scores, key=scores.__getitem__)
    return list(found.values())


def _relax(problem: RematProblem, candidate: _Candidate, allowed_bytes: int) -> _Candidate:
    """Keeps whole runs, from the last to the first, as long as the peak stays within `allowed_bytes`."""
    failures = 0
    for run in sorted(set(candidate.runs) - {0}, reverse=True):
        relaxed = _candidate(problem, [0 if r == run else r for r in candidate.runs])
        if relaxed.score.peak_bytes <= allowed_bytes:
            candidate = relaxed
        else:
            failures += 1
            if failures == _MOST_FAILURES:
                break
    return candidate


def _within(problem: RematProblem, candidate: _Candidate, limit: Limit) -> bool:
    cost = candidate.score.clone_cost
    return (limit.max_overhead is None or cost <= limit.max_overhead * problem.step_cost) and (
        limit.max_forward_share is None or cost <= limit.max_forward_share * problem.forward_cost
    )


def _pool(problem: RematProblem, found: Sequence[_Candidate]) -> list[_Candidate]:
    """Plans of many peaks and overheads: those found, and for the best of them, those that keep their last runs.

    It does not depend on a limit, so the choice from it is monotone: a larger budget never costs more.
    """
    front: list[_Candidate] = []  # no other has both a smaller peak and a smaller cost
    for candidate in sorted(found, key=lambda c: c.key):
        if not front or candidate.score.clone_cost < front[-1].score.clone_cost:
            front.append(candidate)
    pool = list(found)
    for candidate in front[:: -(-len(front) // _MOST_RELAXED)]:
        runs = sorted(set(candidate.runs) - {0}, reverse=True)
        for kept in range(1, len(runs), max(1, -(-len(runs) // _MOST_STEPS))):
            dropped = set(runs[kept:])
            pool.append(_candidate(problem, [r if r in dropped else 0 for r in candidate.runs]))
    return pool


@dataclass(frozen=True)
class SqrtStrategy:
    """The paper's stages of about sqrt n, at most one extra forward pass.

    Attributes:
        targets: how many targets for the peak are tried.
        refinements: how often the search closes in on the best one.
    """

    name: ClassVar[str] = "sqrt"

    targets: int = 14
    refinements: int = 6

    def quick(self) -> SqrtStrategy:
        """The same with a coarse search, to compare problems."""
        return SqrtStrategy(targets=4, refinements=0)

    def schedules(self, problem: RematProblem, relaxed: bool = False) -> list[list[int]]:
        """The schedules that the search over targets looks at; `relaxed`: and those that keep more of each."""
        found = self._found(problem, _candidate(problem, [0] * len(problem.forward)))
        return [c.schedule for c in (_pool(problem, found) if relaxed else found)]

    def _found(self, problem: RematProblem, keep_all: _Candidate) -> list[_Candidate]:
        large = len(problem.reads) > _LARGE
        refinements = min(self.refinements, 2) if large else self.refinements
        return _search(problem, keep_all, min(self.targets, 10) if large else self.targets, refinements)

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget.

        Raises:
            BudgetError: no plan of this strategy meets the budget.
        """
        keep_all = _candidate(problem, [0] * len(problem.forward))
        found = [keep_all, *self._found(problem, keep_all)]
        unlimited = limit.budget_bytes is None and limit.max_overhead is None
        fits = [c for c in (found if unlimited else _pool(problem, found)) if _within(problem, c, limit)]
        if limit.budget_bytes is None:
            best = min(fits, key=lambda c: c.key)
            best = _relax(problem, best, best.score.peak_bytes) if self.refinements else best
        else:
            met = [c for c in fits if c.score.peak_bytes <= (limit.budget_bytes or 0)]
            if not met:
                smallest = min(fits, key=lambda c: c.key)
                raise over_budget(limit.budget_bytes, smallest.score.peak_bytes, lower_bound_bytes)
            best = min(met, key=lambda c: (c.score.clone_cost, c.score.peak_bytes))
        return plan_of(problem, self.name, best.schedule, best.score)
