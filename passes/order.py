"""Pass `order`: makes the file order hold at run time, in every order that a session can have.

The runtime ignores the order of nodes in a file: by default it runs them depth-first from the last leaf, so weight
gradients and recompute clones run at the wrong time and everything stays alive.

Stages:
1. Choose the schedule: the file order (a plan's schedule), or one derived from it that needs less.
2. Find the few additions (`barriers`) that keep every order to it (`enforcement`).
3. Write nodes, additions, and the type of every tensor that inference knows (the runtime reuses no buffer of unknown
   shape); where dead buffers are held for later tensors, hide their dims (`veils`).
4. Where ONNX Runtime is installed, ask it for the graph that it would run (`fusions`), hold what would run ahead of
   fused nodes, and set tensors apart for which it would hold dead buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.executed_graph import ExecutedGraph
from onnx_sublinear.passes.barriers import Layout
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.emission import Emitted
from onnx_sublinear.passes.enforcement import Enforcement
from onnx_sublinear.passes.file_rules import file_rules, with_bodies
from onnx_sublinear.passes.fusions import (
    TOLERANCE,
    can_be_checked,
    executed_files,
    fused_holds,
    fused_leaves,
    fused_peak_bytes,
    fused_promises,
)
from onnx_sublinear.passes.rewriting import ROLE_CLONE, role_of
from onnx_sublinear.passes.veils import Veiling, guards
from onnx_sublinear.replay import Replay
from onnx_sublinear.runtime_model import executed_orders
from onnx_sublinear.schedule_search import improved
from onnx_sublinear.scheduling import base_orders, fixed_nodes, hoist, keeps_order
from onnx_sublinear.training_graph import TrainingGraph
from onnx_sublinear.units import parse_bytes

__all__ = ["OrderPass"]

_TOLERANCE, _LEAST_TOLERANCE = 1.02, 1.001
_CHECKS = 3


@dataclass(frozen=True)
class OrderPass(Pass):
    """Orders nodes and adds the dependencies that keep every runtime order to the schedule.

    Attributes:
        within: bytes ("2GiB") that no order is to pass where the schedule allows that; "": a little more than the
            schedule needs.
    """

    name: ClassVar[str] = "order"

    within: str = ""

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Schedules, adds what keeps to the schedule, writes types."""
        if not graph.index.nodes:
            return PassResult(graph)
        schedule, planned = _best_schedule(graph)
        limit_bytes = _limit_bytes(graph, planned, parse_bytes(self.within) if self.within else None)
        best, files = _enforced(graph, schedule, limit_bytes)
        if best is None:
            return PassResult(graph, notes=("the order of nodes with side effects cannot be kept: nothing was moved",))
        facts = {"scheduled_bytes": planned, "barriers": best.added, "executed_files": files}
        return PassResult(best.graph, True, facts=facts)


def _has_clones(graph: TrainingGraph) -> bool:
    return any(role_of(n) == ROLE_CLONE for n in graph.index.nodes)


def _best_schedule(graph: TrainingGraph) -> tuple[list[int], int]:
    """The schedule of smallest peak, and the peak in bytes.

    A plan's schedule is taken as it is, with what frees memory moved up; without a plan, the schedules that the runtime
    would choose and those that planners start from are candidates. The best one is improved by local search.
    """
    runtime, in_file, fixed = graph.runtime, graph.index.order, fixed_nodes(graph)
    drained = runtime.unread()  # by markers, where they are in the way
    replay = Replay(runtime, drained)
    candidates = [list(in_file), hoist(runtime, in_file, fixed)]
    if not _has_clones(graph):
        executed = executed_orders(runtime, training=graph.on_training_build).values()
        candidates += [order for order in executed if keeps_order(order, in_file, fixed)]
        candidates += base_orders(graph)
    best = min(candidates, key=replay.peak_bytes)
    best = improved(runtime, best, fixed, drained)
    return best, replay.peak_bytes(best)


def _limit_bytes(graph: TrainingGraph, planned_bytes: int, within_bytes: int | None) -> int:
    """What no order may pass: the plan and a little, but not the budget, nor what the better order needs already."""
    before = min(run.peak_bytes for run in graph.simulations.values())
    if within_bytes is not None:
        before = min(before, within_bytes)
    return max(int(planned_bytes * _LEAST_TOLERANCE), min(int(planned_bytes * _TOLERANCE), before))


def _enforced(
    graph: TrainingGraph, schedule: list[int], limit_bytes: int
) -> tuple[Emitted | None, list[ExecutedGraph]]:
    """The graph that keeps to `schedule`, within the limit as far as possible, and what sessions run of it.

    None where side effects forbid it; no files where the runtime is not asked.
    """
    base, bodies = with_bodies(graph)
    rules = file_rules(graph, base, bodies, limit_bytes)
    forward, fixed = graph.sections.forward, fixed_nodes(graph)
    all_orders = graph.robust == "all"
    search = Enforcement(base, schedule, forward, fixed, rules, limit_bytes, graph.on_training_build, all_orders)
    veils = guards(graph, rules)
    layout = search.run(veils)
    if layout is None:
        return None, []
    best = Veiling(graph, search).best(layout)
    if not all_orders or not can_be_checked(best.graph):
        return best, []
    return _checked(graph, search, layout, best, veils)


def _checked(
    graph: TrainingGraph, search: Enforcement, layout: Layout, best: Emitted, veils: Collection[int]
) -> tuple[Emitted, list[ExecutedGraph]]:
    """The graph with the additions that the runtime's fusions call for, where these help; what sessions run of it."""
    files = executed_files(best.graph)
    worst = max(fused_peak_bytes(files), best.worst_bytes)
    further: dict[int, int] = {}
    marked: frozenset[int] = frozenset()
    apart: frozenset[str] = frozenset()
    for _ in range(_CHECKS):
        if fused_peak_bytes(files) <= search.limit_bytes * TOLERANCE:
            break
        holds = fused_holds(search, best, files, layout.placement.holds)
        leaves = fused_leaves(search, best, files) - marked
        promised = fused_promises(search, files) - apart
        if not holds and not leaves and not promised:
            break
        further, marked, apart = {**further, **holds}, marked | leaves, apart | promised
        following = search.run(veils, further, marked) if holds or leaves else layout
        if following is None:
            break
        emitted = Veiling(graph, search).best(following, apart)
        tried = executed_files(emitted.graph)
        reached = max(fused_peak_bytes(tried), emitted.worst_bytes)
        if not tried or reached >= worst:
            break
        best, layout, files, worst = emitted, following, tried, reached
    return best, files
