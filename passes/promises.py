"""Promises: dead buffers that the runtime holds for a later tensor of the same size, and how to break them.

With buffer reuse (the default), the allocation planner gives a tensor the most recently freed buffer of its size; in
between, that buffer is dead and still held. It never lowers the peak below what the schedule itself needs, and it can
raise it much: in a net of many shapes, each shape keeps buffers of its own. A tensor whose dims the runtime does not
know gets none: so what it is made from is read through a view (`barriers`, releases).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from onnx_sublinear.runtime_model import RuntimeGraph, executed_orders, simulate

__all__ = ["breakable_promises"]

_ROUNDS = 8
_MARGIN = 0.98  # each round aims a little below the limit, since a broken promise makes others


_Promise = tuple[int, int, int]  # as in `Simulation.promises`


def _to_break(sizes: Sequence[int], promises: Sequence[_Promise], profile: Sequence[int], limit_bytes: int) -> set[int]:
    """Values of promises without which the profile stays within the limit, the largest at the highest peak first."""
    live = np.asarray(profile, dtype=np.int64)
    chosen: set[int] = set()
    remaining = sorted(promises, key=lambda p: (-sizes[p[0]], p[1] - p[2]))
    while live.size:
        peak = int(live.argmax())
        if live[peak] <= limit_bytes:
            break
        best = next((p for p in remaining if p[1] <= peak < p[2]), None)
        if best is None:
            break
        remaining.remove(best)
        value, start, end = best
        chosen.add(value)
        live[start:end] -= sizes[value]
    return chosen


def _break(graph: RuntimeGraph, values: set[int], following: int) -> int:
    """Gives `values`, and what in-place kernels carry on from them, layouts of their own."""
    changed: dict[int, int] = {}
    for value in values:
        changed[value] = graph.layouts[value] = following
        following += 1
    for kernel in graph.kernels:
        for a, b in kernel.inplace:
            if a in changed and b not in changed:
                changed[b] = graph.layouts[b] = changed[a]
    return following


def breakable_promises(
    graph: RuntimeGraph, limit_bytes: int, hopeless: Collection[str], *, least_bytes: int = 1
) -> set[int]:
    """Values (by id) to make unmatchable so that every executed order stays within `limit_bytes`, as far as possible.

    Args:
        graph: the file; its layouts are changed.
        limit_bytes: the peak to reach.
        hopeless: names of values whose dims the runtime knows in any case.
        least_bytes: promises of smaller buffers stay.
    """
    orders = executed_orders(graph)
    following = max(graph.layouts, default=0) + 1
    broken: set[int] = set()

    def can_break(v: int) -> bool:
        return graph.sizes[v] >= max(least_bytes, 1) and graph.names[v] not in hopeless

    for _ in range(_ROUNDS):
        chosen: set[int] = set()
        for order in orders.values():
            run = simulate(graph, order)
            if run.peak_bytes > limit_bytes:
                promises = [p for p in run.promises if can_break(p[0]) and p[0] not in broken]
                chosen |= _to_break(graph.sizes, promises, run.profile, int(limit_bytes * _MARGIN))
        if not chosen:
            break
        broken |= chosen
        following = _break(graph, chosen, following)
    return broken
