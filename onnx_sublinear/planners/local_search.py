"""Large-neighbourhood search: takes some reruns of a plan back and lets `splitting` repair it another way.

Which reruns: neighbours in time, neighbours in the graph, or any. A repair that costs a little more is taken early in
the search, so that it leaves local optima (simulated annealing). All choices come from a seeded generator, and the
search ends by effort, not by the clock, so that equal problems get equal plans.
"""

from __future__ import annotations

from random import Random

from onnx_sublinear.planners.splitting import Splitter, prune
from onnx_sublinear.planners.storages import Rerun

__all__ = ["improve"]

_VICTIMS = (1, 2, 4, 8, 16, 32)
_NOISES = (0.1, 0.3, 0.6, 1.0)
_WARMTH = 0.03  # share of the cost by which a repair may be worse, at the start
_PRUNE_ALL = 0.2  # how often all reruns are tried to be taken back, not only the new ones


def improve(
    splitter: Splitter,
    budget_bytes: int,
    effort: float,
    rng: Random,
    *,
    enough: float = 0.0,
) -> tuple[float, list[Rerun]]:
    """Searches for a cheaper plan within the budget, from the plan of `splitter`, which is within it.

    Args:
        splitter: its timeline is changed, and ends with some plan within the budget; its `stop` ends the search.
        budget_bytes: bytes that the peak must not pass.
        effort: how long to search (see `Timeline.effort`).
        rng: where choices come from.
        enough: a cost at which the search ends.

    Returns:
        The cost and reruns of the best plan.
    """
    timeline, costs = splitter.timeline, splitter.storages.costs
    started = timeline.effort
    current = sorted(timeline.reruns())
    prune(timeline, budget_bytes, sorted(current, key=lambda r: (-costs[r[1]], r)))
    current = sorted(timeline.reruns())
    best, cost = (timeline.cost, current), timeline.cost
    while current and best[0] > enough and timeline.effort - started < effort and not splitter.stop():
        warmth = _WARMTH * (1 - (timeline.effort - started) / effort)
        timeline.journal.clear()
        for t, v in _victims(current, rng):
            timeline.remove(t, v)
        splitter.noise, splitter.rng = rng.choice(_NOISES), rng
        added = splitter.run(budget_bytes, most_cost=cost * (1 + 2 * warmth) + 1)
        splitter.noise = 0.0
        if added is not None:
            prune(timeline, budget_bytes, sorted(added, key=lambda r: (-costs[r[1]], r)))
            if rng.random() < _PRUNE_ALL:
                rest = sorted(timeline.reruns())
                rng.shuffle(rest)
                prune(timeline, budget_bytes, rest[:64])
        if added is None or timeline.cost > cost * (1 + warmth * rng.random()):
            timeline.undo()
            continue
        cost, current = timeline.cost, sorted(timeline.reruns())
        if cost < best[0]:
            best = (cost, current)
    return best


def _victims(current: list[Rerun], rng: Random) -> list[Rerun]:
    count = min(rng.choice(_VICTIMS), max(1, len(current) // 2))
    mode = rng.random()
    if mode < 0.5:  # neighbours in time
        at = rng.randrange(len(current))
        start = min(max(0, at - count // 2), len(current) - count)
        return current[start : start + count]
    if mode < 0.8:  # neighbours in the graph
        center = rng.choice(current)[1]
        return sorted(current, key=lambda r: (abs(r[1] - center), r))[:count]
    return rng.sample(current, count)
