"""Schedules: orders of the nodes that need little memory before any node is duplicated.

- `sink`: what is made of graph inputs alone (a transposed weight) is made just before its first reader.
- `forward_first`: the forward section in a row, then the gradient section.
- `lazy`: the forward section in a row, then each gradient node just before the first node that needs it.
- `mirrored`: the forward section in a row, then the gradient section against the order of what it reads of it.
- `hoist`: a node that frees at least as much as it allocates (a weight gradient) runs as soon as its inputs exist.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from onnx_sublinear.ops.traits import overwritten_by, traits_of
from onnx_sublinear.runtime_model import RuntimeGraph, default_order, simulate
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["base_orders", "fixed_nodes", "forward_first", "hoist", "keeps_order", "lazy", "mirrored", "sink"]

_STATISTIC_SHARE = 16  # a side result this many times smaller than what it is made from is made at once


def fixed_nodes(graph: TrainingGraph) -> frozenset[int]:
    """Nodes whose order among each other matters.

    Side effects, unknown operators, and whoever touches a tensor that one of them overwrites (a kernel that alone
    touches the tensor it updates may run at any time).
    """
    index = graph.index
    overwritten = {name for node in index.nodes for name in overwritten_by(node) if len(index.readers[name]) > 1}
    return frozenset(
        position
        for position, node in enumerate(index.nodes)
        if (traits_of(node).side_effect and not traits_of(node).state)
        or not overwritten.isdisjoint(index.reads[position])
    )


def keeps_order(order: Sequence[int], reference: Sequence[int], fixed: Collection[int]) -> bool:
    """Whether `order` runs the fixed nodes in the order in which `reference` does."""
    return not fixed or [k for k in order if k in fixed] == [k for k in reference if k in fixed]


def sink(
    graph: RuntimeGraph, order: Sequence[int], fixed: Collection[int] = (), forward: Sequence[bool] = ()
) -> list[int]:
    """Makes what depends on external values alone just before its first reader.

    In the forward section that would be all of it: there, only what is made of external values directly, and views.
    """
    made_by = graph.producers()
    sinkable: set[int] = set()
    for k in order:
        kernel = graph.kernels[k]
        if k in fixed or not kernel.writes or any(graph.is_output[v] for v in kernel.writes):
            continue
        through = bool(kernel.alias) or not (forward and forward[k])
        if all(graph.external[v] or (through and made_by[v] in sinkable) for v in kernel.reads):
            sinkable.add(k)
    place = _places(order)
    placed: set[int] = set()
    sunk: list[int] = []
    for k in order:
        if k in sinkable:
            continue
        pending = [made_by[v] for v in graph.kernels[k].reads]
        needed: list[int] = []
        while pending:
            p = pending.pop()
            if p in sinkable and p not in placed:
                placed.add(p)
                needed.append(p)
                pending.extend(made_by[v] for v in graph.kernels[p].reads)
        sunk.extend(sorted(needed, key=place.__getitem__))
        sunk.append(k)
    sunk.extend(k for k in order if k in sinkable and k not in placed)
    return sunk


def _places(order: Sequence[int]) -> dict[int, int]:
    return {k: i for i, k in enumerate(order)}


def forward_first(graph: RuntimeGraph, order: Sequence[int], forward: Sequence[bool]) -> list[int]:
    """The forward section, then the rest; small results that only need forward values (statistics) stay early."""
    made_by = graph.producers()
    early: list[int] = []
    late: list[int] = []
    is_late = bytearray(len(graph.kernels))
    remaining = sum(forward)
    for k in order:
        kernel = graph.kernels[k]
        if forward[k]:
            remaining -= 1
            early.append(k)
            continue
        made = sum(graph.sizes[v] for v in kernel.writes)
        read = max((graph.sizes[v] for v in kernel.reads), default=0)
        statistic = made * _STATISTIC_SHARE <= read
        if remaining and statistic and not any(made_by[v] >= 0 and is_late[made_by[v]] for v in kernel.reads):
            early.append(k)
        else:
            is_late[k] = 1
            late.append(k)
    return early + late


def _needs(graph: RuntimeGraph, order: Sequence[int], fixed: Collection[int]) -> list[list[int]]:
    """Per kernel those that must run before it: producers, and for a fixed one the fixed one before it in `order`."""
    made_by = graph.producers()
    needs = [list(dict.fromkeys(made_by[v] for v in kernel.reads if made_by[v] >= 0)) for kernel in graph.kernels]
    previous = -1
    for k in order:
        if k in fixed:
            if previous >= 0:
                needs[k].append(previous)
            previous = k
    return needs


def lazy(graph: RuntimeGraph, order: Sequence[int], forward: Sequence[bool], fixed: Collection[int] = ()) -> list[int]:
    """The forward section, then the results (leaves) of the gradient section by depth, each right after what it needs.

    The weight gradients of the last layer come first, since the path to them is the shortest. Where a node needs a deep
    value (the gradient that comes in) and a shallow one (a factor made from forward values), the deep one comes first.
    Nodes whose order matters keep it: each counts as needing the one before.
    """
    needs = _needs(graph, order, fixed)
    depth = [0] * len(graph.kernels)
    is_leaf = [True] * len(graph.kernels)
    for k in order:
        for p in needs[k]:
            depth[k] = max(depth[k], depth[p] + 1)
            is_leaf[p] = False
    result = [k for k in order if forward[k]]
    done = bytearray(len(graph.kernels))
    for k in result:
        done[k] = 1
    leaves = [k for k in order if is_leaf[k] and not forward[k]]
    stack: list[int] = []
    for leaf in sorted(leaves, key=depth.__getitem__):
        stack.append(leaf)
        while stack:
            k = stack.pop()
            if k < 0:
                result.append(~k)
            elif not done[k]:
                done[k] = 1
                stack.append(~k)
                stack.extend(sorted((p for p in needs[k] if not done[p]), key=depth.__getitem__))
    return result


def mirrored(
    graph: RuntimeGraph, order: Sequence[int], forward: Sequence[bool], fixed: Collection[int] = ()
) -> list[int]:
    """The forward section, then the gradient section in reverse: what reads the latest forward values comes first.

    So the weight gradients and the loss terms of one step of an unrolled net run beside the gradients of that step. A
    node that reads no forward value follows what it waits for. Nodes whose order matters keep it.
    """
    place = _places(order)
    needs = _needs(graph, order, fixed)
    late = [k for k in order if not forward[k]]
    readers: dict[int, list[int]] = {}
    for k in late:
        for p in needs[k]:
            readers.setdefault(p, []).append(k)
    reads_until = [-1] * len(graph.kernels)
    for k in late:
        ahead = [place[p] for p in needs[k] if forward[p]]
        reads_until[k] = max(ahead) if ahead else max((reads_until[p] for p in needs[k]), default=-1)
    for k in reversed(late):  # what needs no forward value is made for its first reader
        if reads_until[k] < 0:
            reads_until[k] = max((reads_until[c] for c in readers.get(k, ())), default=-1)
    waiting = {k: sum(not forward[p] for p in needs[k]) for k in late}
    ready = [(-reads_until[k], place[k], k) for k in late if not waiting[k]]
    heapq.heapify(ready)
    result = [k for k in order if forward[k]]
    while ready:
        k = heapq.heappop(ready)[2]
        result.append(k)
        for c in readers.get(k, ()):
            waiting[c] -= 1
            if not waiting[c]:
                heapq.heappush(ready, (-reads_until[c], place[c], c))
    return result


def hoist(graph: RuntimeGraph, order: Sequence[int], fixed: Collection[int] = ()) -> list[int]:
    """Runs a node as soon as its inputs exist if it frees at least as much as it allocates."""
    kernels, sizes = graph.kernels, graph.sizes
    root = list(range(len(sizes)))
    for k in order:
        for a, b in kernels[k].alias:
            if not graph.is_output[b]:
                root[b] = root[a]
    reads = [tuple({root[v] for v in kernel.reads}) for kernel in kernels]
    readers: dict[int, list[int]] = {}
    for k, roots in enumerate(reads):
        for r in roots:
            readers.setdefault(r, []).append(k)
    remaining = {r: len(ks) for r, ks in readers.items()}
    made_by = graph.producers()
    waiting = [len({made_by[v] for v in kernel.reads if made_by[v] >= 0}) for kernel in kernels]
    place = _places(order)
    done = bytearray(len(kernels))
    result: list[int] = []

    def net_bytes(k: int) -> int:
        made = sum(sizes[v] for v in kernels[k].writes if root[v] == v)
        freed = sum(sizes[r] for r in reads[k] if remaining[r] == 1 and not (graph.is_output[r] or graph.external[r]))
        return made - freed

    def run(k: int) -> list[int]:
        """Runs kernel k; returns kernels worth another look."""
        done[k] = 1
        result.append(k)
        touched: set[int] = set()
        for c in {c for v in kernels[k].writes for c in consumers[v]}:
            waiting[c] -= 1
            if waiting[c] == 0:
                touched.add(c)
        for r in reads[k]:
            remaining[r] -= 1
            if remaining[r] == 1:
                touched.update(c for c in readers[r] if not done[c])
        return list(touched)

    consumers: list[list[int]] = [[] for _ in sizes]
    for k, kernel in enumerate(kernels):
        for v in set(kernel.reads):
            consumers[v].append(k)
    for k in order:
        if done[k]:
            continue
        queue = [(place[c], c) for c in run(k)]
        heapq.heapify(queue)
        while queue:
            _, c = heapq.heappop(queue)
            if not done[c] and waiting[c] == 0 and c not in fixed and reads[c] and net_bytes(c) <= 0:
                for touched in run(c):
                    heapq.heappush(queue, (place[touched], touched))
    return result


def base_orders(graph: TrainingGraph) -> list[list[int]]:
    """Schedules for planners to start from, distinct, the most promising first."""
    runtime, fixed = graph.runtime, fixed_nodes(graph)
    forward = graph.sections.forward
    in_file = graph.index.order
    split = sink(runtime, forward_first(runtime, in_file, forward), fixed, forward)
    late = sink(runtime, lazy(runtime, in_file, forward, fixed), fixed, forward)
    reverse = sink(runtime, mirrored(runtime, in_file, forward, fixed), fixed, forward)
    candidates = [split, late, reverse, hoist(runtime, split, fixed), hoist(runtime, reverse, fixed)]
    plain = [in_file, default_order(runtime, training_build=graph.needs_training_build)]
    plain += [hoist(runtime, sink(runtime, order, fixed, forward), fixed) for order in plain]
    plain = [order for order in plain if keeps_order(order, in_file, fixed)]
    candidates.append(min(plain, key=lambda order: simulate(runtime, order).peak_bytes))
    distinct = {tuple(order): order for order in candidates if keeps_order(order, in_file, fixed)}
    return list(distinct.values()) or [list(in_file)]
