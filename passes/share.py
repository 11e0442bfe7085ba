"""Pass `share`: packs the buffers into one arena and writes the plan into the model.

Lifetimes are those of the runtime's DEFAULT order, with views and in-place results in one buffer. The plan stands in
the model's metadata_props under the key `onnx_sublinear.memory_plan`, as JSON::

    {"version": 1, "order": "default", "alignment": 64, "arena_bytes": ..., "live_bytes": ...,
     "buffers": [[tensor, offset, size, start, end], ...],
     "aliases": {tensor: tensor whose buffer it lives in, ...}}

Offsets and sizes are bytes; [start, end) are positions in the executed order. Graph inputs and initializers are not in
it; graph outputs are, to the end. `live_bytes` is the largest sum of sizes live at one position: no packing is smaller.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx import ModelProto

from onnx_sublinear.errors import PostconditionError
from onnx_sublinear.liveness import Lifetime, live_profile, peak_of
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.rewriting import set_model_metadata
from onnx_sublinear.runtime_model import ALLOCATION_GRANULE_BYTES, default_order, simulate
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["PLAN_KEY", "SharePass", "pack"]

PLAN_KEY = "onnx_sublinear.memory_plan"
_PLAN_VERSION = 1
_PACKED_WITH_CARE = 1500  # buffers; the library's time grows with the square


def pack(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets for buffers that may share space when their lifetimes do not overlap, and the arena's bytes.

    The largest buffers go through omnimalloc; the many small ones are stacked above, by a free list per size.
    """
    from omnimalloc import Allocation, Pool, allocate

    by_size = sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].size_bytes)
    large, small = sorted(by_size[:_PACKED_WITH_CARE]), sorted(by_size[_PACKED_WITH_CARE:])
    offsets = [0] * len(lifetimes)
    arena = 0
    if large:
        buffers = [
            Allocation(id=i, size=lifetimes[i].size_bytes, start=lifetimes[i].start, end=lifetimes[i].end)
            for i in large
        ]
        pool = allocate(Pool.from_allocations(buffers), "greedy_by_all")
        arena = pool.size
        for placed in pool.allocations:
            offsets[int(placed.id)] = placed.offset or 0
    busy: list[tuple[int, int, int]] = []  # (end, size, offset)
    free: dict[int, list[int]] = {}
    for i in sorted(small, key=lambda i: lifetimes[i].start):
        life = lifetimes[i]
        while busy and busy[0][0] <= life.start:
            _, size, offset = heapq.heappop(busy)
            free.setdefault(size, []).append(offset)
        if free.get(life.size_bytes):
            offsets[i] = free[life.size_bytes].pop()
        else:
            offsets[i] = arena
            arena += life.size_bytes
        heapq.heappush(busy, (life.end, life.size_bytes, offsets[i]))
    return offsets, arena


@dataclass(frozen=True)
class SharePass(Pass):
    """Packs all buffers into one arena and writes the offsets into the model's metadata."""

    name: ClassVar[str] = "share"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Plans and writes."""
        runtime = graph.runtime
        order = default_order(runtime, training_build=graph.on_training_build)
        run = simulate(runtime, order, reuse=False)
        lifetimes = run.lifetimes(runtime)
        offsets, arena_bytes = pack(lifetimes)
        live_bytes = peak_of(live_profile(lifetimes, len(order)))
        plan = {
            "version": _PLAN_VERSION,
            "order": "default",
            "alignment": ALLOCATION_GRANULE_BYTES,
            "arena_bytes": arena_bytes,
            "live_bytes": live_bytes,
            "buffers": [
                [life.name, offset, life.size_bytes, life.start, life.end]
                for life, offset in zip(lifetimes, offsets, strict=True)
            ],
            "aliases": {
                runtime.names[value]: runtime.names[owner]
                for value, owner in enumerate(run.buffer_of)
                if owner >= 0 and owner != value
            },
        }
        model = ModelProto()
        model.CopyFrom(graph.model)
        set_model_metadata(model, PLAN_KEY, json.dumps(plan, separators=(",", ":")))
        notes = (
            (f"arena {arena_bytes} bytes, {arena_bytes / live_bytes - 1:.1%} above the live bytes",)
            if live_bytes
            else ()
        )
        facts = {"arena_bytes": arena_bytes, "live_bytes": live_bytes}
        return PassResult(graph.with_model(model, same_nodes=True), True, notes, facts)

    def ensures(self, before: TrainingGraph, result: PassResult) -> None:
        """No two buffers that live at the same time overlap."""
        del before
        plan = json.loads(next(p.value for p in result.model.metadata_props if p.key == PLAN_KEY))
        clash = _first_overlap(plan["buffers"])
        if clash is not None:
            raise PostconditionError(f"pass '{self.name}' gave '{clash[0]}' and '{clash[1]}' overlapping space")


def _first_overlap(buffers: Sequence[tuple[str, int, int, int, int]]) -> tuple[str, str] | None:
    """Two buffers that share space and time, found by a sweep over time with the live ones sorted by offset."""
    from bisect import bisect_left, insort

    events = sorted(
        [(start, 1, i) for i, (_, _, size, start, end) in enumerate(buffers) if size and end > start]
        + [(end, 0, i) for i, (_, _, size, start, end) in enumerate(buffers) if size and end > start]
    )
    live: list[tuple[int, int]] = []
    for _, is_start, i in events:
        name, offset, size, _, _ = buffers[i]
        if not is_start:
            live.pop(bisect_left(live, (offset, i)))
            continue
        at = bisect_left(live, (offset, i))
        for neighbour in live[max(at - 1, 0) : at + 1]:
            other, other_offset, other_size, _, _ = buffers[neighbour[1]]
            if other_offset < offset + size and offset < other_offset + other_size:
                return other, name
        insort(live, (offset, i))
    return None
