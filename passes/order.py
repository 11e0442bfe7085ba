"""Pass `order`: makes the file order hold at run time, in every order that a session can have.

The runtime ignores the order of nodes in a file: by default it runs them depth-first from the last leaf, so weight
gradients and recompute clones run at the wrong time and everything stays alive.

Stages:
1. Choose the schedule: the file order (a plan's schedule), or one derived from it that needs less.
2. Split it into stages with barriers between them, at first only in front of recomputation; simulate the runtime's
   orders; where one needs more than the schedule, split the stage in which it does; repeat.
3. Write nodes, barriers, and the type of every tensor that inference knows (the runtime reuses no buffer of
   unknown shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from onnx import TensorProto

from onnx_sublinear.passes.barriers import Added, Layout, Placement, StageRules, lay_out
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.emission import emit
from onnx_sublinear.passes.promises import breakable_promises
from onnx_sublinear.passes.rewriting import ROLE_CLONE, role_of
from onnx_sublinear.runtime_model import executed_orders, simulate
from onnx_sublinear.scheduling import base_orders, fixed_nodes, hoist
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["OrderPass"]

# Element types that the kernels of both Size and Reshape take in every build and opset (no 8-bit or 4-bit floats,
# bfloat16, complex numbers).
_VIEWED_TYPES = frozenset(
    (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.STRING),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
)
_NORMALIZATIONS = frozenset(("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"))
_SMALL_SHARE = 1 / 2000  # of the schedule's peak: a node that moves less may run at any time
_TOLERANCE = 1.02
_SHAPE_HAS_RANGE = 15  # opset from which on Shape takes start and end
_ROUNDS = 40
_LARGE = 6000  # nodes
_LARGE_ROUNDS = 6
_RELEASE_ROUNDS = 3
_LEAST_GAIN = 0.01
_MOST_ENTRIES = 8
_ENTRY_SHARE = 0.02  # of all bytes: what may lie in front of every entry view


@dataclass(frozen=True)
class _Trial:
    """A layout and what the runtime makes of it.

    Attributes:
        placement: where its barriers and releases stand.
        layout: the layout.
        peaks: peak bytes by order.
        crowded: stages in which an order needs more than the schedule, or runs nodes whose order matters otherwise.
        disorder: how many such nodes are out of place.
    """

    placement: Placement
    layout: Layout
    peaks: dict[str, int]
    crowded: set[int]
    disorder: int = 0

    @property
    def worst_bytes(self) -> int:
        return max(self.peaks.values())

    @property
    def key(self) -> tuple[int, int, int]:
        return self.disorder, self.worst_bytes, self.layout.added


@dataclass(frozen=True)
class _Emitted:
    """A written layout: the graph, what each of its nodes stands for, and its exact worst peak."""

    graph: TrainingGraph
    rows: list[int | Added]

    @cached_property
    def worst_bytes(self) -> int:
        runtime = self.graph.runtime
        orders = executed_orders(runtime, training=self.graph.needs_training_build)
        return max(simulate(runtime, order).peak_bytes for order in orders.values())

    @property
    def added(self) -> int:
        return sum(isinstance(row, Added) for row in self.rows)


@dataclass(frozen=True)
class OrderPass(Pass):
    """Orders nodes and adds the dependencies that keep every runtime order to the schedule."""

    name: ClassVar[str] = "order"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Schedules, adds barriers, writes types."""
        if not graph.index.nodes:
            return PassResult(graph)
        schedule, planned = _best_schedule(graph)
        best = _Search(graph, schedule, planned).run()
        if best is None:
            return PassResult(graph, notes=("the order of nodes with side effects cannot be kept: nothing was moved",))
        return PassResult(best.graph, True, facts={"scheduled_bytes": planned, "barriers": best.added})


def _has_clones(graph: TrainingGraph) -> bool:
    return any(role_of(n) == ROLE_CLONE for n in graph.index.nodes)


def _best_schedule(graph: TrainingGraph) -> tuple[list[int], int]:
    """The candidate schedule of smallest peak, and the peak in bytes."""
    in_file, fixed = graph.index.order, fixed_nodes(graph)
    candidates = [in_file, hoist(graph.runtime, in_file, fixed)]
    if not _has_clones(graph):
        candidates += base_orders(graph)
    peaks = [simulate(graph.runtime, order, reuse=False).peak_bytes for order in candidates]
    best = min(range(len(candidates)), key=peaks.__getitem__)
    return candidates[best], peaks[best]


def _stage_rules(graph: TrainingGraph, planned_bytes: int) -> StageRules:
    runtime, index, types = graph.runtime, graph.index, graph.sizes.types
    probes = graph.target == "cuda" and index.opset.get("", 1) >= _SHAPE_HAS_RANGE
    viewed = _VIEWED_TYPES | {TensorProto.BFLOAT16} if probes else _VIEWED_TYPES  # Shape takes it, Size does not
    left_alone = graph.untouchable
    tensor = [name in types and types[name].elem_type in viewed and name not in left_alone for name in runtime.names]
    shapes = [types[name].shape if t else None for t, name in zip(tensor, runtime.names, strict=True)]
    rows = zip(tensor, [bool(shape) for shape in shapes], runtime.names, strict=True)
    captured = [len(index.captures.get(k, ())) for k in range(len(runtime.kernels))]
    small = int(planned_bytes * _SMALL_SHARE)
    moved = runtime.sizes
    unknown = set(graph.sizes.unknown)
    sized = [name not in unknown for name in runtime.names]

    def is_small(kernel_values: Sequence[int]) -> bool:
        return sum(moved[v] for v in kernel_values) <= small and all(sized[v] for v in kernel_values)

    kernels = runtime.kernels
    return StageRules(
        private=not graph.needs_training_build,
        free_source=_free_source(graph, tensor),
        probes=probes,
        ranks=[-1 if shape is None else len(shape) for shape in shapes],
        countable=[t and (shape or types[name].elem_type in _VIEWED_TYPES) for t, shape, name in rows],
        slots=[k.reads[: len(k.reads) - c] for k, c in zip(kernels, captured, strict=True)],
        small_output=[is_small(k.writes) and k.workspace_bytes <= small for k in kernels],
        small_all=[is_small((*k.writes, *k.reads)) for k in kernels],
    )


def _free_source(graph: TrainingGraph, countable: Sequence[bool]) -> int:
    """A graph input that some node reads and that is no constant for the runtime (which would fold its Size)."""
    index = graph.index
    free = {name for name in index.inputs if name not in index.initializers or index.model.ir_version >= 4}
    return next((v for v, name in enumerate(graph.runtime.names) if name in free and countable[v]), -1)


def _clone_starts(graph: TrainingGraph, schedule: Sequence[int], rules: StageRules) -> set[int]:
    """Places at which a run of recompute clones starts that move more than next to nothing."""
    is_clone = [role_of(n) == ROLE_CLONE for n in graph.index.nodes]
    starts: set[int] = set()
    start, heavy = -1, False
    for place, k in enumerate(schedule):
        if is_clone[k]:
            start = place if start < 0 else start
            heavy = heavy or not rules.small_output[k]
        else:
            if heavy:
                starts.add(start)
            start, heavy = -1, False
    return starts


def _guards(graph: TrainingGraph, rules: StageRules) -> dict[int, tuple[int, ...]]:
    """Views that keep a fusion away which would lose outputs: Add + LayerNormalization with its statistics in use.

    skip_layer_norm_fusion.cc fuses the two where nothing else reads the sum, as after recomputation, and drops the
    mean and the inverse deviation, although a gradient node reads them ("Missing Input" at run time, seen in 1.19).
    """
    index, runtime = graph.index, graph.runtime
    guards: dict[int, tuple[int, ...]] = {}
    for k, node in enumerate(index.nodes):
        if node.op_type not in _NORMALIZATIONS or not any(o in index.readers for o in node.output[1:] if o):
            continue
        made_at = index.producer.get(node.input[0])
        if made_at is not None and index.nodes[made_at].op_type == "Add":
            value = runtime.kernels[k].reads[0]
            if rules.ranks[value] >= 0:
                guards[k] = (value,)
    return guards


class _Search:
    """Adds barriers until both orders keep to the schedule's peak, then breaks what promises hold."""

    def __init__(self, graph: TrainingGraph, schedule: Sequence[int], planned_bytes: int) -> None:
        self.graph, self.schedule, self.fixed = graph, schedule, fixed_nodes(graph)
        self.limit = int(planned_bytes * _TOLERANCE)
        self.rules = _stage_rules(graph, planned_bytes)

    def run(self) -> _Emitted | None:
        """The best graph found; None where nodes whose order matters cannot be kept to it."""
        guards = _guards(self.graph, self.rules)
        trial = self.refine(Placement(_clone_starts(self.graph, self.schedule, self.rules), releases=guards))
        if self.rules.private and trial.worst_bytes > self.limit:
            entered = self.refine(replace(trial.placement, entries=tuple(self.entries())))
            trial = min(trial, entered, key=lambda t: t.key)
        if trial.disorder:
            return None
        best = self.emit(trial.layout)
        if self.rules.private and best.worst_bytes > self.limit:
            best = self.release(trial.placement, best)
        return best

    def emit(self, layout: Layout) -> _Emitted:
        """Writes a layout."""
        return _Emitted(*emit(self.graph, layout, private=self.rules.private))

    def attempt(self, placement: Placement) -> _Trial:
        """Lays out and simulates."""
        layout = lay_out(self.graph.runtime, self.schedule, placement, self.rules)
        orders = executed_orders(layout.graph, training=self.graph.needs_training_build)
        runs = {name: simulate(layout.graph, order) for name, order in orders.items()}
        crowded: set[int] = set()
        if any(run.peak_bytes > self.limit for run in runs.values()):
            held = simulate(layout.graph, range(len(layout.graph.kernels))).peak_bytes
            limit = max(self.limit, int(held * _TOLERANCE))  # no order releases what is held for later tensors
            for name, run in runs.items():
                over = (k for k, live in zip(orders[name], run.profile, strict=True) if live > limit)
                crowded.update(layout.stage_at(k) for k in over)
        misplaced = {k for order in orders.values() for k in self.misplaced(layout, order)}
        crowded.update(layout.stage_at(k) for k in misplaced)
        peaks = {name: run.peak_bytes for name, run in runs.items()}
        return _Trial(placement, layout, peaks, crowded - {-1}, len(misplaced))

    def misplaced(self, layout: Layout, order: Sequence[int]) -> list[int]:
        """Kernels of the layout whose order matters and that do not run in the schedule's order."""
        if not self.fixed:
            return []
        executed = [k for k in order if layout.rows[k] in self.fixed]
        return [k for k, wanted in zip(executed, sorted(executed), strict=True) if k != wanted]

    def refine(self, placement: Placement) -> _Trial:
        """Splits crowded stages until there are none, or they cannot be split.

        In a large graph, where a round takes long, for fewer rounds.
        """
        best = trial = self.attempt(placement)
        large = _LARGE_ROUNDS // 2 if placement.entries else _LARGE_ROUNDS
        for _ in range(large if len(self.schedule) > _LARGE else _ROUNDS):
            splits = _split_points(self.schedule, trial.layout.stages, trial.crowded)
            if not splits:
                break
            trial = self.attempt(replace(trial.placement, starts={*trial.placement.starts, *splits}))
            if trial.key[:2] <= best.key[:2]:
                best = trial
        return best

    def release(self, placement: Placement, best: _Emitted) -> _Emitted:
        """Breaks the promises that the runtime's view of the written graph shows, as long as that helps."""
        hopeless: set[str] = set()
        current = best
        for _ in range(_RELEASE_ROUNDS):
            runtime = current.graph.runtime
            draft = replace(runtime, layouts=list(runtime.layouts))
            broken = breakable_promises(draft, self.limit, hopeless, training=self.graph.needs_training_build)
            releases = dict(placement.releases)
            made_by = runtime.producers()
            for value in broken:
                hopeless.add(runtime.names[value])  # one try each
                row = current.rows[made_by[value]]
                if isinstance(row, int):
                    sources = self.sources(row, runtime.names[value])
                    releases[row] = tuple(dict.fromkeys((*releases.get(row, ()), *sources)))
            if releases == placement.releases:
                break
            placement = replace(placement, releases=releases)
            current = self.emit(lay_out(self.graph.runtime, self.schedule, placement, self.rules))
            gain = best.worst_bytes - current.worst_bytes
            if gain > 0:
                best = current
            if best.worst_bytes <= self.limit or gain < best.worst_bytes * _LEAST_GAIN:
                break
        return best

    def sources(self, kernel: int, made: str) -> list[int]:
        """What `kernel` must read through views so that the runtime does not know the dims of `made`."""
        runtime = self.graph.runtime
        options = [v for v in dict.fromkeys(self.rules.slots[kernel]) if self.rules.ranks[v] >= 0]
        value = next(v for v in runtime.kernels[kernel].writes if runtime.names[v] == made)
        if runtime.kernels[kernel].broadcast:
            return [v for v in options if runtime.shapes[v] == runtime.shapes[value]]
        size = self.graph.sizes.bytes_of
        return sorted(options, key=lambda v: -(size(runtime.names[v]) or 0))[:1]

    def entries(self) -> list[int]:
        """The external values behind which the most bytes lie, one after the other until little is left."""
        runtime = self.graph.runtime
        origins: list[frozenset[int]] = [frozenset()] * len(runtime.names)
        weight: dict[frozenset[int], int] = {}
        for k in self.schedule:
            kernel = runtime.kernels[k]
            carried = next((origins[v] for v in kernel.reads if origins[v]), None)
            if carried is None:
                carried = frozenset(v for v in self.rules.slots[k] if runtime.external[v] and self.rules.ranks[v] >= 0)
            for v in kernel.writes:
                origins[v] = carried
            if carried and not self.rules.small_output[k]:
                weight[carried] = weight.get(carried, 0) + sum(runtime.sizes[v] for v in kernel.writes)
        enough = sum(weight.values()) * _ENTRY_SHARE
        chosen: list[int] = []
        while sum(weight.values()) > enough and len(chosen) < _MOST_ENTRIES:
            counts: dict[int, int] = {}
            for values, size in weight.items():
                for v in values:
                    counts[v] = counts.get(v, 0) + size
            chosen.append(max(counts, key=lambda v: (counts[v], -v)))
            weight = {values: size for values, size in weight.items() if chosen[-1] not in values}
        return chosen


def _split_points(schedule: Sequence[int], stages: Sequence[int], crowded: set[int]) -> set[int]:
    """The middle of each crowded stage that has more than one node."""
    bounds: dict[int, list[int]] = {}
    for place, k in enumerate(schedule):
        if stages[k] in crowded:
            bounds.setdefault(stages[k], []).append(place)
    return {places[len(places) // 2] for places in bounds.values() if len(places) > 1}
