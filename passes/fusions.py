"""What the installed ONNX Runtime makes of a written graph, and which additions that calls for.

Fusions put new nodes in place of old ones; in the order by priority these count as the last of the file. And where
nodes are gone, other buffers are free when a tensor is made, so other dead buffers are held for it. The runtime is
asked for the graph that it would run (`executed_graph`); nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx_sublinear.errors import SublinearError
from onnx_sublinear.executed_graph import ExecutedGraph, executed_graph
from onnx_sublinear.ops.tensor_types import tensor_bytes
from onnx_sublinear.passes.emission import Emitted
from onnx_sublinear.passes.enforcement import Enforcement
from onnx_sublinear.passes.file_rules import SMALL_SHARE
from onnx_sublinear.passes.holds import RunFile, holds_for
from onnx_sublinear.passes.promises import breakable_promises
from onnx_sublinear.runtime import Level
from onnx_sublinear.runtime_dump import installed_build
from onnx_sublinear.training_graph import TrainingGraph

__all__ = [
    "CHECKED_LEVELS",
    "TOLERANCE",
    "can_be_checked",
    "executed_files",
    "fused_holds",
    "fused_leaves",
    "fused_peak_bytes",
    "fused_promises",
]

CHECKED_LEVELS: tuple[Level, ...] = ("basic", "all")
TOLERANCE = 1.02
_MOST_NODES = 6000  # creating a session takes long beyond


def can_be_checked(graph: TrainingGraph) -> bool:
    """Whether the build that the graph is for is installed, on a CPU plan of a size for which that takes seconds."""
    wanted = "training" if graph.on_training_build else "stock"
    return graph.target == "cpu" and len(graph.index.nodes) <= _MOST_NODES and installed_build() == wanted


def executed_files(graph: TrainingGraph, levels: Sequence[Level] = CHECKED_LEVELS) -> list[ExecutedGraph]:
    """What a session runs at each of the levels; nothing where the runtime refuses the model."""
    try:
        return [executed_graph(graph, level) for level in levels]
    except SublinearError:
        return []


def fused_peak_bytes(files: Sequence[ExecutedGraph]) -> int:
    """The worst peak of any order at any level that is checked (0 where nothing is known)."""
    return max((run.peak_bytes for file in files for run in file.simulations.values()), default=0)


def fused_leaves(search: Enforcement, emitted: Emitted, files: Sequence[ExecutedGraph]) -> frozenset[int]:
    """Leaves that the runtime makes anew: as the last of the file they would come first in the default order.

    Where a level then needs more than the limit. A marker makes them run in their turn: they are no leaves then.
    """
    found: set[int] = set()
    for file in files:
        if file.simulations["default"].peak_bytes > search.limit_bytes * TOLERANCE:
            kernels, run = file.runtime.kernels, _run_file(emitted, file)
            read = {v for kernel in kernels for v in kernel.reads}
            found.update(
                run.rows[k]
                for k, kernel in enumerate(kernels)
                if run.late[k] and run.rows[k] >= 0 and read.isdisjoint(kernel.writes)
            )
    return frozenset(found)


def fused_holds(
    search: Enforcement, emitted: Emitted, files: Sequence[ExecutedGraph], held: Mapping[int, int]
) -> dict[int, int]:
    """Holds for what runs ahead of fused nodes where a level then needs more than the limit.

    Args:
        search: what placed the additions so far.
        emitted: the written graph.
        files: what a session runs of it.
        held: kernels that are held already -> the value that each waits for.
    """
    found: dict[int, int] = {}
    for file in files:
        if file.simulations["priority"].peak_bytes > search.limit_bytes * TOLERANCE:
            found |= holds_for(
                search.graph, _run_file(emitted, file), search.rules, search.limit_bytes, {**held, **found}
            )
    return found


def fused_promises(search: Enforcement, files: Sequence[ExecutedGraph]) -> frozenset[str]:
    """Tensors to be set apart, since a level holds dead buffers for them and then needs more than the limit.

    Only tensors of which the runtime does not know every dim: no declaration hides a number. None on training builds
    (see `veils`).
    """
    found: set[str] = set()
    if search.training:
        return frozenset()
    for file in files:
        if fused_peak_bytes([file]) > search.limit_bytes * TOLERANCE:
            names, types = file.runtime.names, file.dump.types
            known = frozenset(name for name in names if name in types and tensor_bytes(types[name]) is not None)
            runtime = file.runtime.with_kernels(file.runtime.kernels)
            broken = breakable_promises(
                runtime, search.limit_bytes, known, least_bytes=int(search.limit_bytes * SMALL_SHARE)
            )
            found.update(names[v] for v in broken)
    return frozenset(found)


def _run_file(emitted: Emitted, file: ExecutedGraph) -> RunFile:
    """The runtime's graph with what its nodes stand for; a new one stands where what it reads is made."""
    count = len(emitted.rows)
    rows = [emitted.rows[origin] if origin >= 0 else -1 for origin in file.origins]
    places = list(file.origins)
    made_at = {v: k for k, kernel in enumerate(file.runtime.kernels) for v in kernel.writes}
    for k in file.orders["default"]:
        if places[k] < 0:
            before = (places[made_at[v]] for v in file.runtime.kernels[k].reads if v in made_at)
            places[k] = max(before, default=0)
    return RunFile(file.runtime, rows, places, [index >= count for index in file.dump.indices])
