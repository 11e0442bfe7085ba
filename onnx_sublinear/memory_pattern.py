"""ONNX Runtime's memory pattern: the one block that holds all planned tensors of a run, by best fit.

Tensors are placed in the order in which they are made, each into the smallest gap between the blocks that are live
then. Graph outputs are not part of it, nor is scratch. The training build plans before its first run and leaves out
tensors whose shape its own types do not give; the stock build traces the first run.
Sources, in onnxruntime/core/framework: mem_pattern_planner.h, execution_frame.cc (TraceAllocate), session_state.cc
(GeneratePatternGroupCache).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from onnx_sublinear.arena_model import rounded_block
from onnx_sublinear.runtime_model import RuntimeGraph, Simulation

__all__ = ["pattern_block"]


class _Planner:
    """MemPatternPlanner: live blocks by offset, and the size of the whole."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._live: list[tuple[int, int, int]] = []  # (offset, size, value), ascending

    def place(self, value: int, size_bytes: int) -> tuple[int, int, int]:
        end = 0
        best, least_waste = -1, -1
        for offset, size, _ in self._live:
            gap = offset - end
            if gap >= size_bytes and (best < 0 or gap - size_bytes < least_waste):
                best, least_waste = end, gap - size_bytes
            end = max(end, offset + size)
        gap = self.size_bytes - end
        if gap >= size_bytes and gap > 0 and (best < 0 or gap - size_bytes < least_waste):
            best = end
        block = (best if best >= 0 else end, size_bytes, value)
        self.size_bytes = max(self.size_bytes, block[0] + size_bytes)
        self._live.insert(bisect_left(self._live, block), block)
        return block

    def remove(self, block: tuple[int, int, int]) -> None:
        del self._live[bisect_left(self._live, block)]


def pattern_block(
    graph: RuntimeGraph,
    order: Sequence[int],
    simulation: Simulation,
    is_planned: Callable[[int], bool] = lambda _: True,
) -> tuple[int, frozenset[int]]:
    """Bytes of the block, and the values in it.

    Args:
        graph: the file.
        order: the executed order.
        simulation: the allocation plan for it.
        is_planned: whether a value can be part of the block at all.
    """
    ends: dict[int, list[tuple[int, int, int]]] = {}
    planner = _Planner()
    planned: set[int] = set()
    for step, k in enumerate(order):
        for v in graph.kernels[k].writes:
            span = simulation.spans.get(v)
            if span is None or not graph.sizes[v] or graph.is_output[v] or not is_planned(v):
                continue
            ends.setdefault(span[1] - 1, []).append(planner.place(v, rounded_block(graph.sizes[v])))
            planned.add(v)
        for block in ends.pop(step, ()):
            planner.remove(block)
    return planner.size_bytes, frozenset(planned)
