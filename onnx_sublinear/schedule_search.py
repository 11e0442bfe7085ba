"""Local search over schedules: moves nodes within their slack so that less is live at the peak.

At the peak, whatever was made before and is only read later lies idle. Either it is made later, just before its first
reader, together with what only it needs; or its readers, with what they still need, run before the peak. A move is kept
if the peak falls, or if less lies close below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from onnx_sublinear.replay import IntArray, Replay
from onnx_sublinear.runtime_model import RuntimeGraph

__all__ = ["improved"]

_WORK = 1_500_000  # nodes to replay in all
_MOST_TRIALS = 400
_MOST_AT_A_PEAK = 24
_LARGEST_GROUP = 24  # nodes that move together
_CLOSE = 0.98  # of the peak: what lies higher counts


def improved(
    graph: RuntimeGraph, order: Sequence[int], fixed: Collection[int] = (), drained: Collection[int] = ()
) -> list[int]:
    """`order` (kernels of `graph`), with nodes moved as long as that lowers the peak.

    Args:
        graph: the file.
        order: a topological order.
        fixed: kernels that stay in their order.
        drained: values that nothing reads and that are released all the same.
    """
    search = _Search(graph, fixed, drained)
    current = list(order)
    score, profile = search.score(current)
    trials = min(_MOST_TRIALS, _WORK // max(len(current), 1))
    while trials > 0:
        found = False
        for moved in search.moves(current, profile):
            trials -= 1
            new_score, new_profile = search.score(moved)
            if new_score < score:
                current, score, profile, found = moved, new_score, new_profile, True
                break
            if trials <= 0:
                break
        if not found:
            break
    return current


class _Search:
    """What does not depend on the order."""

    def __init__(self, graph: RuntimeGraph, fixed: Collection[int], drained: Collection[int]) -> None:
        self.graph, self.fixed = graph, frozenset(fixed)
        self.replay = Replay(graph, drained)
        self.made_by = graph.producers()
        self.readers: list[list[int]] = [[] for _ in graph.names]
        for k, kernel in enumerate(graph.kernels):
            for v in dict.fromkeys(kernel.reads):
                self.readers[v].append(k)
        self.needs = [
            list(dict.fromkeys(self.made_by[v] for v in kernel.reads if self.made_by[v] >= 0))
            for kernel in graph.kernels
        ]
        self.users: list[list[int]] = [[] for _ in graph.kernels]
        for k, producers in enumerate(self.needs):
            for p in producers:
                self.users[p].append(k)

    def score(self, order: Sequence[int]) -> tuple[tuple[int, int], IntArray]:
        """(peak, bytes by steps above what is close to it), and the profile."""
        profile = self.replay.profile(order)
        peak = int(profile.max(initial=0))
        return (peak, int(np.maximum(profile - int(peak * _CLOSE), 0).sum())), profile

    def moves(self, order: Sequence[int], profile: IntArray) -> Iterator[list[int]]:
        """Orders with one group of nodes moved out of the way of the peak, the most promising first."""
        step_of = [0] * len(order)
        for step, k in enumerate(order):
            step_of[k] = step
        peak = int(profile.argmax())
        graph = self.graph
        idle: list[tuple[int, int]] = []
        for k in order[:peak]:
            for v in graph.kernels[k].writes:
                if graph.sizes[v] and not graph.is_output[v] and not graph.external[v]:
                    steps = [step_of[r] for r in self.readers[v]]
                    if steps and max(steps) > peak and peak not in steps:
                        idle.append((graph.sizes[v], v))
        idle.sort(reverse=True)
        for _, v in idle[:_MOST_AT_A_PEAK]:
            k = self.made_by[v]
            if all(step_of[r] > peak for r in self.readers[v]):
                yield from self._later(order, step_of, k, peak)
            yield from self._earlier(order, step_of, v, peak)

    def _later(self, order: Sequence[int], step_of: Sequence[int], k: int, peak: int) -> Iterator[list[int]]:
        """`k` and what only it needs, just before the first reader of anything that it makes."""
        first = min((step_of[u] for u in self.users[k]), default=-1)
        if first <= peak or k in self.fixed:
            return
        group = {k}
        yield _moved(order, group, order[first])
        pending = list(self.needs[k])
        while pending and len(group) < _LARGEST_GROUP:
            p = pending.pop()
            if p not in group and p not in self.fixed and all(u in group for u in self.users[p]):
                group.add(p)
                pending += self.needs[p]
        if len(group) > 1:
            yield _moved(order, group, order[first])

    def _earlier(self, order: Sequence[int], step_of: Sequence[int], v: int, peak: int) -> Iterator[list[int]]:
        """The readers of `v` that run after the peak, and what they need, just before it."""
        group: set[int] = set()
        pending = [r for r in self.readers[v] if step_of[r] > peak]
        while pending:
            k = pending.pop()
            if k in group:
                continue
            if k in self.fixed or step_of[k] == peak or len(group) >= _LARGEST_GROUP:
                return
            group.add(k)
            pending += [p for p in self.needs[k] if step_of[p] >= peak]
        if group:
            yield _moved(order, group, order[peak])


def _moved(order: Sequence[int], group: Collection[int], target: int) -> list[int]:
    """`order` with the nodes of `group`, in their order, just before `target`."""
    moved: list[int] = []
    members = [k for k in order if k in group]
    for k in order:
        if k == target:
            moved += members
        if k not in group:
            moved.append(k)
    return moved
