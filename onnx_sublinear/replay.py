"""Live bytes of one file under many orders: what does not depend on the order is worked out once.

`Replay` gives for any order what `runtime_model.simulate(..., reuse=False)` does, in numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, RuntimeGraph

__all__ = ["IntArray", "Replay"]

IntArray = NDArray[np.int64]


class Replay:
    """Live bytes of a file under many orders, with no buffer held for a later tensor.

    Views share their source's buffer. An in-place kernel takes over its input's buffer if it is the last to read it:
    then that ends one step earlier, since both are of one size.

    Args:
        graph: the file.
        drained: values that nothing reads and that are released all the same, right behind what makes them.
    """

    def __init__(self, graph: RuntimeGraph, drained: Collection[int] = ()) -> None:
        count = len(graph.names)
        root = list(range(count))
        for kernel in graph.kernels:
            for a, b in kernel.alias:
                if not graph.is_output[b]:
                    root[b] = root[a]
        made_by = [-1] * count
        readers: list[int] = []
        read: list[int] = []
        pairs: list[tuple[int, int, int]] = []  # (kernel, buffer that it may take over, for which value)
        for k, kernel in enumerate(graph.kernels):
            for v in kernel.writes:
                made_by[v] = k
            for v in {root[v] for v in (*kernel.reads, *(w for w in kernel.writes if w in drained))}:
                readers.append(k)
                read.append(v)
            taken: set[int] = set()
            for a, b in kernel.inplace:
                fits = graph.layouts[a] == graph.layouts[b] != UNKNOWN_LAYOUT and not graph.is_output[b]
                once = sum(root[v] == root[a] for v in kernel.reads) == 1
                if fits and once and root[a] not in taken and not (graph.external[root[a]] or graph.is_output[root[a]]):
                    pairs.append((k, root[a], b))
                    taken.add(root[a])
        owners = [v for v in range(count) if root[v] == v and made_by[v] >= 0]
        place = {v: n for n, v in enumerate(owners)}
        known = [n for n, v in enumerate(read) if v in place]
        self._steps = len(graph.kernels)
        self._made_by: IntArray = np.array([made_by[v] for v in owners], dtype=np.int64)
        self._sizes: IntArray = np.array([graph.sizes[v] for v in owners], dtype=np.int64)
        self._kept = np.array([graph.is_output[v] for v in owners], dtype=bool)
        self._readers: IntArray = np.array([readers[n] for n in known], dtype=np.int64)
        self._read: IntArray = np.array([place[read[n]] for n in known], dtype=np.int64)
        pairs = [(k, place[a], place[b]) for k, a, b in pairs if a in place]
        self._takers: IntArray = np.array([k for k, _, _ in pairs], dtype=np.int64)
        self._taken: IntArray = np.array([a for _, a, _ in pairs], dtype=np.int64)
        self._into: IntArray = np.array([b for _, _, b in pairs], dtype=np.int64)
        self._workspaces: IntArray = np.array([k.workspace_bytes for k in graph.kernels], dtype=np.int64)
        self._frame_bytes = graph.frame_counting(0, 0)
        self._release_bytes = graph.release_frame_bytes

    def profile(self, order: Sequence[int]) -> IntArray:
        """Live bytes at each step of `order` (all kernels of the file)."""
        steps = self._steps
        step_of = np.empty(steps, dtype=np.int64)
        sequence = np.asarray(order, dtype=np.int64)
        step_of[sequence] = np.arange(steps)
        last = np.full(len(self._sizes), -1, dtype=np.int64)
        np.maximum.at(last, self._read, step_of[self._readers])
        end = np.where(self._kept | (last < 0), steps, last + 1)
        released = int(((last >= 0) & ~self._kept).sum())
        if len(self._takers):
            takes = last[self._taken] == step_of[self._takers]
            end[self._taken[takes]] -= 1
            released -= int((last[self._into[takes]] >= 0).sum())  # they live in a buffer that is counted
            unread = self._into[takes & (last[self._into] < 0)]  # released with the buffer that it lives in
            end[unread] = step_of[self._made_by[unread]] + 1
        delta = np.zeros(steps + 1, dtype=np.int64)
        np.add.at(delta, step_of[self._made_by], self._sizes)
        np.subtract.at(delta, end, self._sizes)
        delta[0] += self._frame_bytes + self._release_bytes * released
        profile: IntArray = np.cumsum(delta[:steps]) + self._workspaces[sequence]
        return profile

    def peak_bytes(self, order: Sequence[int]) -> int:
        """The largest live bytes of `order` (0 for an empty file)."""
        return int(self.profile(order).max(initial=0))
