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
from onnx_sublinear.runtime_model import RuntimeGraph, Simulation

__all__ = ["Allocation", "RunMemory", "run_memory"]


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


@dataclass(frozen=True)
class RunMemory:
    """Bytes that the runs of a session take.

    Attributes:
        grown_bytes: per run the most bytes taken from the system above what was taken just before that run.
        held_bytes: per run the same above what was taken before the first.
        resident_bytes: per run as `held_bytes`, what was never written to left out.
    """

    grown_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]


class _System:
    """Memory without an arena: every block is taken from the system and returned to it."""

    def __init__(self, least_bytes: int) -> None:
        self.taken_bytes = 0
        self.most_bytes = 0
        self._least_bytes = least_bytes
        self._sizes: list[int] = []

    def allocate(self, size_bytes: int) -> int:
        self._sizes.append(size_bytes if size_bytes >= self._least_bytes else 0)
        self.taken_bytes += self._sizes[-1]
        self.most_bytes = max(self.most_bytes, self.taken_bytes)
        return len(self._sizes) - 1

    def release(self, block: int) -> None:
        self.taken_bytes -= self._sizes[block]


def run_memory(
    graph: RuntimeGraph,
    order: Sequence[int],
    simulation: Simulation,
    allocation: Allocation,
    *,
    training: bool = False,
    runs: int = 2,
    least_bytes: int = 0,
    is_planned: Callable[[int], bool] = lambda _: True,
) -> RunMemory:
    """What the first runs of a session take; the caller releases the outputs after each.

    Args:
        graph: the graph that the session runs.
        order: its executed order.
        simulation: the allocation plan for it.
        allocation: the session's options.
        training: the training build, which knows the pattern before the first run.
        runs: number of runs.
        least_bytes: smaller blocks from the system are left out.
        is_planned: whether a value's shape is known before the run (training build).
    """
    frame = graph.frame_counting(least_bytes, simulation.released)
    block_bytes, in_block = 0, frozenset[int]()
    if allocation.pattern:
        planned = is_planned if training else lambda _: True
        block_bytes, in_block = pattern_block(graph, order, simulation, planned)
    arena = _arena(graph, allocation, training)
    weights = (arena.taken_bytes, arena.resident_bytes) if arena is not None else (0, 0)
    grown: list[int] = []
    held: list[int] = []
    resident: list[int] = []
    for run in range(runs):
        has_block = allocation.pattern and (training or run > 0)
        block = (block_bytes, in_block) if has_block else (0, frozenset[int]())
        if arena is None:
            system = _System(least_bytes)
            _replay(graph, order, simulation, system, *block)
            grown.append(system.most_bytes + frame)
            held.append(grown[-1])
            resident.append(grown[-1])
        else:
            before = arena.taken_bytes
            most = _replay(graph, order, simulation, arena, *block, least_bytes) + frame
            grown.append(most - before)
            held.append(most - weights[0])
            resident.append(most - arena.taken_bytes + arena.resident_bytes - weights[1])
    return RunMemory(tuple(grown), tuple(held), tuple(resident))


def _arena(graph: RuntimeGraph, allocation: Allocation, training: bool) -> Arena | None:
    """The arena as the session leaves it before the first run: current stock builds keep weights elsewhere."""
    if not allocation.arena:
        return None
    arena = Arena(allocation.extension)
    for size in graph.weights if training else ():
        arena.allocate(size)
    return arena


def _replay(
    graph: RuntimeGraph,
    order: Sequence[int],
    simulation: Simulation,
    memory: Arena | _System,
    block_bytes: int,
    in_block: frozenset[int],
    least_bytes: int = 0,
) -> int:
    """One run's blocks, in order; at its end everything is released.

    Returns:
        The most bytes taken at any time, scratch on the heap (of at least `least_bytes`) included.
    """
    common = memory.allocate(block_bytes) if block_bytes else None
    ends: dict[int, list[int]] = {}
    sizes, spans = graph.sizes, simulation.spans
    most = memory.taken_bytes
    for step, k in enumerate(order):
        kernel = graph.kernels[k]
        for v in kernel.writes:
            if v in spans and sizes[v] and v not in in_block:
                ends.setdefault(spans[v][1] - 1, []).append(memory.allocate(sizes[v]))
        heap = 0
        if kernel.workspace_bytes and kernel.on_heap and isinstance(memory, Arena):
            heap = kernel.workspace_bytes if kernel.workspace_bytes >= least_bytes else 0
        elif kernel.workspace_bytes:
            memory.release(memory.allocate(kernel.workspace_bytes))
        most = max(most, memory.taken_bytes + heap)
        for start in ends.pop(step, ()):
            memory.release(start)
    if common is not None:
        memory.release(common)
    return most
