"""Promises: dead buffers that the runtime holds for a later tensor of the same size, and how to break them.

With buffer reuse (the default), the allocation planner gives a tensor the most recently freed buffer of its size; in
between, that buffer is dead and still held. It never lowers the peak below what the schedule itself needs, and it can
raise it much: in a net of many shapes, each shape keeps buffers of its own. A tensor whose dims the runtime does not
know gets none: so what it is made from is read through a view (`barriers`, releases).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_sublinear.runtime_model import RuntimeGraph, Simulation, executed_orders, simulate

__all__ = ["breakable_promises"]

_ROUNDS = 8
_MARGIN = 0.98  # each round aims a little below the limit, since a broken promise makes others


@dataclass(frozen=True)
class _Promise:
    """A value that takes over a dead buffer, which is held in the steps [start, end) in between."""

    value: int
    size_bytes: int
    start: int
    end: int


def _promises(graph: RuntimeGraph, order: Sequence[int], run: Simulation) -> list[_Promise]:
    """The promises of one simulation, from the last read of one tenant of a buffer to the birth of the next."""
    last_read: dict[int, int] = {}  # buffer -> last step that touched it
    found: list[_Promise] = []
    for step, k in enumerate(order):
        kernel = graph.kernels[k]
        touched = {run.buffer_of[v] for v in kernel.reads}
        for v in kernel.writes:
            owner = run.buffer_of[v]
            if owner >= 0 and owner != v and owner not in touched and owner in last_read:
                found.append(_Promise(v, graph.sizes[owner], last_read[owner] + 1, step))
        for owner in (*touched, *(run.buffer_of[v] for v in kernel.writes)):
            if owner >= 0:
                last_read[owner] = step
    return [p for p in found if p.end > p.start and p.size_bytes]


def _to_break(promises: Sequence[_Promise], profile: Sequence[int], limit_bytes: int) -> set[int]:
    """Values of promises without which the profile stays within the limit, the largest at the highest peak first."""
    live = np.asarray(profile, dtype=np.int64)
    chosen: set[int] = set()
    remaining = sorted(promises, key=lambda p: (-p.size_bytes, p.start - p.end))
    while live.size:
        peak = int(live.argmax())
        if live[peak] <= limit_bytes:
            break
        best = next((p for p in remaining if p.start <= peak < p.end), None)
        if best is None:
            break
        remaining.remove(best)
        chosen.add(best.value)
        live[best.start : best.end] -= best.size_bytes
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
    for _ in range(_ROUNDS):
        chosen: set[int] = set()
        for order in orders.values():
            run = simulate(graph, order)
            if run.peak_bytes > limit_bytes:
                promises = [
                    p
                    for p in _promises(graph, order, run)
                    if p.size_bytes >= least_bytes and graph.names[p.value] not in hopeless and p.value not in broken
                ]
                chosen |= _to_break(promises, run.profile, int(limit_bytes * _MARGIN))
        if not chosen:
            break
        broken |= chosen
        following = _break(graph, chosen, following)
    return broken
