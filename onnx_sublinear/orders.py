"""The two orders in which ONNX Runtime runs a file, with what does not change between trials worked out once.

`DepthFirst` gives the default order for any choice of leaves that are searched first, `ByPriority` the order by
priority for any choice of further dependencies.

Source: onnxruntime/core/graph/graph.cc (reverse depth-first and priority-based topological sort).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_sublinear.runtime_model import RuntimeGraph

__all__ = ["ByPriority", "DepthFirst"]


class DepthFirst:
    """Default orders of one file: post-orders of a depth-first search from the leaves, the last leaf first.

    Args:
        graph: the file.
    """

    def __init__(self, graph: RuntimeGraph) -> None:
        count = len(graph.kernels)
        rank = _ranks(graph)
        self.by_rank = sorted(range(count), key=rank.__getitem__)
        self.edges = [sorted(set(e), key=rank.__getitem__) for e in graph.edges()]
        is_leaf = bytearray(b"\1" * count)
        for producers in self.edges:
            for p in producers:
                is_leaf[p] = 0
        leaves = [k for k in self.by_rank if is_leaf[k]]
        self.leaves = [k for k in leaves if not graph.kernels[k].late]
        self.late_leaves = [k for k in leaves if graph.kernels[k].late]

    def order(self, first: Sequence[int] = ()) -> list[int]:
        """The order if a leaf that reads it were put at the end of the file for each kernel in `first`, the first last.

        Args:
            first: kernels in the order in which they are to run.
        """
        edges = self.edges
        read = frozenset(first)
        stack = [*self.leaves, *reversed(first), *(k for k in self.late_leaves if k not in read)]
        entered = bytearray(len(edges))
        order: list[int] = []
        pop, push = stack.pop, stack.append
        while stack:
            k = pop()
            if k < 0:
                order.append(~k)
            elif not entered[k]:
                entered[k] = 1
                push(~k)
                for p in edges[k]:
                    if not entered[p]:
                        push(p)
        return order


class ByPriority:
    """Orders by priority of one file: Kahn's algorithm, Shape and Size first, then by place in the file.

    Args:
        graph: the file.
    """

    def __init__(self, graph: RuntimeGraph) -> None:
        count = len(graph.kernels)
        self.waiting = [0] * count
        self.consumers: list[list[int]] = [[] for _ in range(count)]
        for k, producers in enumerate(graph.edges()):
            for p in set(producers):
                self.consumers[p].append(k)
                self.waiting[k] += 1
        rank = _ranks(graph)
        before_all = max(rank, default=0) + 1
        self.key = [r - before_all * kernel.first for r, kernel in zip(rank, graph.kernels, strict=True)]
        self.kernel_at = {key: k for k, key in enumerate(self.key)}

    def order(self, awaited: Mapping[int, int] | None = None) -> list[int]:
        """The order if each kernel in `awaited` also read what the other one makes."""
        key, kernel_at, consumers = self.key, self.kernel_at, self.consumers
        waiting = list(self.waiting)
        held: dict[int, list[int]] = {}
        for k, p in (awaited or {}).items():
            held.setdefault(p, []).append(k)
            waiting[k] += 1
        ready = [key[k] for k, n in enumerate(waiting) if n == 0]
        heapq.heapify(ready)
        pop, push = heapq.heappop, heapq.heappush
        order: list[int] = []
        while ready:
            k = kernel_at[pop(ready)]
            order.append(k)
            for c in consumers[k]:
                waiting[c] -= 1
                if not waiting[c]:
                    push(ready, key[c])
            for c in held.get(k, ()):
                waiting[c] -= 1
                if not waiting[c]:
                    push(ready, key[c])
        return order


def _ranks(graph: RuntimeGraph) -> list[int]:
    """Per kernel its place in the file, those that the runtime makes anew behind all, round by round."""
    count = len(graph.kernels)
    return [place + count * kernel.late for place, kernel in enumerate(graph.kernels)]
