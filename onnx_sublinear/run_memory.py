"""What the runs of one session take from the system, with ONNX Runtime's arena and memory pattern as they are set.

Without both, a run takes what `runtime_model.simulate` says. With the arena, freed memory stays in it: the first run
makes it grow, later ones only where chunks do not fit. With the pattern, a run takes one block for all planned tensors;
on the stock build from the second run on, while the arena still holds the chunks of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx_sublinear.arena_model import Arena, Extension
from onnx_sublinear.memory_pattern import pattern_block
from onnx_sublinear.runtime_dump import Build
from onnx_sublinear.runtime_model import RuntimeGraph, Simulation

__all__ = ["Allocation", "run_growth"]


@dataclass(frozen=True)
class Allocation:
    """The options of a session that decide where its tensors live.

    Attributes:
        arena: whether freed memory stays in the arena.
        pattern: whether planned tensors share one block.
        extension: how the arena grows.
    """

    arena: bool = False
    pattern: bool = False
    extension: Extension = "next_power_of_two"


class _System:
    """Memory without an arena: every block is taken from the system and returned to it."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.most_bytes = 0
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        self.taken_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)
        self._sizes[len(self._sizes)] = size_bytes
        return len(self._sizes) - 1

    def release(self, block: int) -> None:
        self.taken_bytes -= self._sizes[block]


def run_growth(
    graph: RuntimeGraph,
    order: Sequence[int],
    simulation: Simulation,
    allocation: Allocation,
    *,
    build: Build = "stock",
    runs: int = 2,
    least_bytes: int = 0,
    is_planned: Callable[[int], bool] = lambda _: True,
) -> list[int]:
    """Per run the most bytes taken from the system above what was taken before that run.

    Args:
        graph: the graph that the session runs.
        order: its executed order.
        simulation: the allocation plan for it.
        allocation: the session's options.
        build: of ONNX Runtime; it decides when the pattern is known.
        runs: number of runs; the caller releases the outputs after each.
        least_bytes: without an arena, blocks below are left out.
        is_planned: whether a value's shape is known before the run (training build).
    """
    frame = graph.frame_counting(least_bytes, simulation.released)
    block_bytes, in_block = 0, frozenset[int]()
    if allocation.pattern:
        block_bytes, in_block = pattern_block(
            graph, order, simulation, is_planned if build == "training" else lambda _: True
        )
    arena = Arena(allocation.extension) if allocation.arena else None
    first_with_block = 0 if build == "training" else 1
    grown: list[int] = []
    for run in range(runs):
        has_block = allocation.pattern and run >= first_with_block
        memory: Arena | _System = arena or _System()
        before = memory.taken_bytes
        _replay(
            graph,
            order,
            simulation,
            memory,
            block_bytes if has_block else 0,
            in_block if has_block else frozenset(),
            0 if arena else least_bytes,
        )
        most = memory.most_bytes if isinstance(memory, _System) else memory.taken_bytes
        grown.append(most - before + frame)
    return grown


def _replay(
    graph: RuntimeGraph,
    order: Sequence[int],
    simulation: Simulation,
    memory: Arena | _System,
    block_bytes: int,
    in_block: frozenset[int],
    least_bytes: int,
) -> None:
    """One run's blocks, in order; at its end everything is released."""
    common = memory.allocate(block_bytes) if block_bytes else -1
    ends: dict[int, list[int]] = {}
    last = len(order) - 1
    for step, k in enumerate(order):
        kernel = graph.kernels[k]
        for v in kernel.writes:
            span = simulation.spans.get(v)
            if span is not None and graph.sizes[v] > max(0, least_bytes - 1) and v not in in_block:
                ends.setdefault(min(span[1] - 1, last), []).append(memory.allocate(graph.sizes[v]))
        if kernel.workspace_bytes > max(0, least_bytes - 1):
            memory.release(memory.allocate(kernel.workspace_bytes))
        if step < last:
            for start in ends.pop(step, ()):
                memory.release(start)
    for start in ends.pop(last, ()):
        memory.release(start)
    if block_bytes:
        memory.release(common)
