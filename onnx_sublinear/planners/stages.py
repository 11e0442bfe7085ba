"""A training step as a chain of stages: runs of the forward section between narrow cuts, each with its gradient nodes.

Bytes are estimates for choosing; plans are scored by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx_sublinear.planners.storages import Storages

__all__ = ["Cheap", "Stage", "cut_places", "stages_between"]


_CHEAP_SHARES = (0.005, 0.03, 0.15)  # of the forward cost: what the cheapest nodes per byte may cost together


@dataclass(frozen=True)
class Cheap:
    """A variant of a stage: what frees most per cost is dropped and made again for the gradient.

    Attributes:
        nodes: what runs again.
        cost: of running it again.
        kept_bytes: what is kept of the stage's saved bytes.
    """

    nodes: tuple[int, ...]
    cost: int
    kept_bytes: int


@dataclass(frozen=True)
class Stage:
    """A run of the forward section.

    Attributes:
        nodes: its nodes that may run again, in order.
        entry_bytes: what must be held to run it again: made before it, read in it or behind it.
        saved_bytes: what it makes that the gradient section or a later stage reads.
        work_bytes: the most that it needs while it runs, beside its entry and what is saved.
        gradient_bytes: the most that its gradient nodes hold beside forward storages.
        cost: of running it again.
        gradient: its first gradient node (of the schedule), or the number of nodes where it has none.
        cheap: its variants between keeping all and running all again.
    """

    nodes: tuple[int, ...]
    entry_bytes: int
    saved_bytes: int
    work_bytes: int
    gradient_bytes: int
    cost: int
    gradient: int
    cheap: tuple[Cheap, ...]


class _Forward:
    """Where the storages of the forward section are read, by place in that section."""

    def __init__(self, storages: Storages) -> None:
        forward = storages.problem.forward
        self.nodes = [n for n, f in enumerate(forward) if f]
        self.place = {n: i for i, n in enumerate(self.nodes)}
        count = len(self.nodes)
        self.last = [-1] * len(storages.size)  # last place that reads the storage
        self.saved = bytearray(len(storages.size))
        for s, readers in enumerate(storages.readers):
            for r in readers:
                if forward[r]:
                    self.last[s] = max(self.last[s], self.place[r])
                else:
                    self.saved[s] = 1
        delta = [0] * (count + 1)
        for i, node in enumerate(self.nodes):
            if not storages.free[node]:
                continue
            for s in storages.made[node]:
                if self.last[s] > i and not storages.kept[s]:
                    delta[i] += storages.size[s]
                    delta[self.last[s]] -= storages.size[s]
        self.crossing: list[int] = []
        running = 0
        for d in delta[:count]:
            running += d
            self.crossing.append(running)


def cut_places(storages: Storages, most: int) -> list[int]:
    """Places of the forward section after which few bytes cross, ascending: at most `most`, spread by work.

    A place is the number of a node within the forward section.
    """
    forward = _Forward(storages)
    crossing = forward.crossing
    last = len(crossing) - 1
    narrow = [
        i
        for i in range(last)
        if (i == 0 or crossing[i] <= crossing[i - 1])
        and crossing[i] <= crossing[i + 1]
        and storages.free[forward.nodes[i]]
    ]
    if len(narrow) <= most:
        return narrow
    weight = [1 + sum(storages.size[s] for s in storages.made[n] if forward.saved[s]) for n in forward.nodes]
    total, done = sum(weight), 0
    chosen: list[int] = []
    window: list[int] = []
    ahead = iter([*narrow, last + 1])
    following = next(ahead)
    for i, w in enumerate(weight):
        done += w
        if i == following:
            window.append(i)
            following = next(ahead)
        if window and done * most >= total * (len(chosen) + 1):
            chosen.append(min(window, key=lambda k: (crossing[k], -k)))
            window = []
    return chosen


def stages_between(storages: Storages, cuts: Sequence[int]) -> list[Stage]:
    """The stages between `cuts`. Empty where there is no gradient section."""
    problem = storages.problem
    forward = _Forward(storages)
    if not forward.nodes or len(forward.nodes) == storages.count:
        return []
    bounds = [0, *(c + 1 for c in cuts), len(forward.nodes)]
    stage_of = [-1] * storages.count
    for k in range(len(bounds) - 1):
        for i in range(bounds[k], bounds[k + 1]):
            stage_of[forward.nodes[i]] = k
    count = len(bounds) - 1
    first_reader = [storages.count] * count
    for s, readers in enumerate(storages.readers):
        if storages.producer[s] < 0 or not storages.free[storages.producer[s]]:
            continue
        k = stage_of[storages.producer[s]]
        if k >= 0:
            first_reader[k] = min([first_reader[k], *(r for r in readers if not problem.forward[r])])
    for k in range(1, count):  # the gradient nodes of a stage start when it or one before it is read
        first_reader[k] = min(first_reader[k], first_reader[k - 1])
    gradient_live = _gradient_profile(storages)
    cheap = _cheap_sets(storages, forward)
    found: list[Stage] = []
    for k in range(count):
        nodes = forward.nodes[bounds[k] : bounds[k + 1]]
        end = bounds[k + 1] - 1
        saved = work = 0
        for n in nodes:
            if not storages.free[n]:
                continue
            own = 0
            for s in storages.made[n]:
                own += storages.size[s]
                if forward.saved[s] or forward.last[s] > end:
                    saved += storages.size[s]
            work = max(work, own + storages.workspaces[n])
        inner = forward.crossing[bounds[k] : bounds[k + 1]]
        entry = forward.crossing[bounds[k] - 1] if k else 0
        start, stop = first_reader[k], first_reader[k - 1] if k else storages.count
        found.append(
            Stage(
                nodes=tuple(n for n in nodes if storages.free[n]),
                entry_bytes=entry,
                saved_bytes=saved,
                work_bytes=max(work, max(inner, default=0) - entry),
                gradient_bytes=max(gradient_live[start:stop], default=0),
                cost=sum(storages.costs[n] for n in nodes if storages.free[n]),
                gradient=start,
                cheap=_cheap(storages, forward, nodes, end, saved, cheap),
            )
        )
    return found


def _cheap_sets(storages: Storages, forward: _Forward) -> list[set[int]]:
    """The forward nodes that cost least per byte, as many as together cost a small share of the section."""
    size = {n: sum(storages.size[s] for s in storages.made[n]) for n in forward.nodes if storages.free[n]}
    ranked = sorted(size, key=lambda n: (storages.costs[n] / max(1, size[n]), n))
    total = sum(storages.costs[n] for n in ranked)
    found: list[set[int]] = []
    for share in _CHEAP_SHARES:
        cost = 0
        chosen: set[int] = set()
        for n in ranked:
            cost += storages.costs[n]
            if cost > share * total:
                break
            chosen.add(n)
        found.append(chosen)
    return found


def _cheap(
    storages: Storages, forward: _Forward, nodes: Sequence[int], end: int, saved: int, sets: Sequence[set[int]]
) -> tuple[Cheap, ...]:
    """The variants in which cheap nodes are dropped; what a later stage reads is kept."""
    found: list[Cheap] = []
    for cheap in sets:
        chosen = [n for n in nodes if n in cheap and not any(forward.last[s] > end for s in storages.made[n])]
        freed = sum(storages.size[s] for n in chosen for s in storages.made[n] if forward.saved[s])
        found.append(Cheap(tuple(chosen), sum(storages.costs[n] for n in chosen), saved - freed))
    return tuple(found)


def _gradient_profile(storages: Storages) -> list[int]:
    """Bytes live at each node that are not made by the forward section, or cannot be made again."""
    count = storages.count
    delta = [0] * (count + 1)
    for s, producer in enumerate(storages.producer):
        if producer < 0 or not storages.size[s] or (storages.problem.forward[producer] and storages.free[producer]):
            continue
        delta[producer] += storages.size[s]
        last = count - 1 if storages.kept[s] else max(storages.readers[s], default=producer)
        delta[last + 1] -= storages.size[s]
    live, running = [], 0
    for n, d in enumerate(delta[:count]):
        running += d
        live.append(running + storages.workspaces[n])
    return live
