"""What the search strategies work on: the storages of a problem, with views folded into what they show.

A plan is the set of its reruns: the rerun (t, v) runs node v again just before the first run of node t > v; reruns with
the same t run in node order. Any such set is a valid schedule, since a reader takes the latest run of what it reads.
The form is that of Checkmate (Jain et al. 2020) and MOCCASIN (Bartan et al. 2023): stage t ends with node t.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from onnx_sublinear.planners.problem import RematProblem

__all__ = ["Rerun", "Storages", "lazy", "needed", "reruns_of", "schedule_of"]

Rerun = tuple[int, int]

_NOTHING = 10_000  # a value that is so many times smaller than the largest one does not count


class Storages:
    """Storages of a problem. Node and value numbers are the problem's; a storage has the number of its first value.

    Attributes:
        count: number of nodes.
        size: bytes of each storage; 0 for a value that is a view.
        producer: node that makes each value.
        made: per node the storages of more than 0 bytes that it makes.
        read: per node the storages of more than 0 bytes that it reads.
        readers: per storage its reader nodes, ascending.
        inplace: per node (storage read, storage made) that share bytes if nothing reads the first one later; where the
            second is kept, in reruns only.
        kept: per storage whether its first run is live to the end.
        costs: per node; of views that must follow a rerun nothing is counted here.
        workspaces: per node, bytes.
        free: per node whether it may run again and makes a storage that is worth it.
        is_view: per node whether all that it does is to show another storage, and needs next to nothing beside it.
        root: per value its storage.
    """

    def __init__(self, problem: RematProblem) -> None:
        self.problem = problem
        self.count = len(problem.reads)
        self.producer = problem.producer
        self.root = list(range(len(problem.sizes)))
        self.is_view = [False] * self.count
        rigid: set[int] = set()  # nodes that a view which cannot follow ties down
        nothing = max(problem.sizes, default=0) // _NOTHING  # a shape may be kept for a view that follows
        for node, views in enumerate(problem.views):
            for a, b in views:
                if problem.kept[b]:
                    continue
                self.root[b] = self.root[a]
                alone = len(problem.writes[node]) == 1 and problem.recomputable[node]
                light = problem.workspaces[node] <= nothing
                others = [self.root[v] for v in problem.reads[node] if self.root[v] != self.root[a]]
                pure = alone and light and all(problem.sizes[v] <= nothing for v in others)
                self.is_view[node] = pure
                if not pure:
                    rigid.add(self.producer[self.root[a]])
        root = self.root
        self.size = [s if root[v] == v else 0 for v, s in enumerate(problem.sizes)]
        self.kept = list(problem.kept)
        for v, r in enumerate(root):
            if problem.kept[v] and r != v:
                self.kept[r] = True
        self.made = [[v for v in values if self.size[v]] for values in problem.writes]
        self.read = [list(dict.fromkeys(root[v] for v in values if self.size[root[v]])) for values in problem.reads]
        self.readers: list[list[int]] = [[] for _ in problem.sizes]
        for node, values in enumerate(self.read):
            for v in values:
                self.readers[v].append(node)
        self.inplace: list[list[tuple[int, int]]] = []
        for pairs in problem.inplace:
            firsts = {b: root[a] for a, b in reversed(pairs)}
            self.inplace.append([(a, b) for b, a in firsts.items() if self.size[b] and self.size[a] == self.size[b]])
        self.costs = list(problem.costs)
        self.workspaces = list(problem.workspaces)
        self.free = [
            problem.recomputable[n] and n not in rigid and not self.is_view[n] and not all(self.kept[v] for v in made)
            for n, made in enumerate(self.made)
        ]


def schedule_of(storages: Storages, reruns: Iterable[Rerun]) -> list[int]:
    """The schedule with `reruns`. Views that show a storage that ran again follow just before they are read."""
    problem, root, producer, is_view = storages.problem, storages.root, storages.producer, storages.is_view
    by_stage: dict[int, list[int]] = {}
    for t, v in sorted(reruns):
        by_stage.setdefault(t, []).append(v)
    schedule: list[int] = []
    if not any(is_view):
        for node in range(storages.count):
            schedule.extend(by_stage.get(node, ()))
            schedule.append(node)
        return schedule
    stale: set[int] = set()  # view nodes whose storage ran again since they ran
    views_of: dict[int, list[int]] = {}
    for node in range(storages.count):
        if is_view[node]:
            views_of.setdefault(root[problem.writes[node][0]], []).append(node)

    def run(node: int) -> None:
        needed: list[int] = []
        pending = list(problem.reads[node])
        while pending and stale:
            maker = producer[pending.pop()]
            if maker in stale:
                stale.discard(maker)
                insort(needed, maker)
                pending.extend(problem.reads[maker])
        schedule.extend(needed)
        schedule.append(node)

    for node in range(storages.count):
        for v in by_stage.get(node, ()):
            run(v)
            for made in problem.writes[v]:
                stale.update(w for w in views_of.get(made, ()) if w < node)
        run(node)
        stale.discard(node)
    return schedule


def reruns_of(storages: Storages, schedule: Sequence[int]) -> list[Rerun]:
    """The reruns of a schedule whose first runs are in node order; views are left out."""
    ahead = 0
    pending: list[int] = []
    found: list[Rerun] = []
    for node in schedule:
        if node == ahead:
            found.extend((node, v) for v in pending)
            pending.clear()
            ahead += 1
        elif not storages.is_view[node]:
            pending.append(node)
    return sorted(set(found))


def needed(storages: Storages, reruns: Iterable[Rerun]) -> list[Rerun]:
    """Those of `reruns` that something reads, itself needed."""
    return _backward(storages, reruns, move=False)


def lazy(storages: Storages, reruns: Iterable[Rerun]) -> list[Rerun]:
    """The same with each rerun just before its first reader, and without those that nothing reads."""
    return needed(storages, _backward(storages, reruns, move=True))


def _backward(storages: Storages, reruns: Iterable[Rerun], move: bool) -> list[Rerun]:
    """Walks the events from the last to the first, knowing per storage the first stage behind that reads it."""
    never = storages.count
    first = [never] * len(storages.size)
    made, read = storages.made, storages.read
    found: list[Rerun] = []

    def event(t: int, v: int) -> None:
        for s in read[v]:
            first[s] = min(first[s], t)

    done = storages.count
    for t, v in sorted(set(reruns), reverse=True):
        while done > t:
            done -= 1
            event(done, done)
        wanted = min((first[s] for s in made[v]), default=never)
        if wanted == never:
            continue
        for s in made[v]:
            first[s] = never
        t = wanted if move else t
        found.append((t, v))
        event(t, v)
    return sorted(set(found))
