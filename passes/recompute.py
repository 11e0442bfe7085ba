"""Pass `recompute`: forward nodes run again in the gradient section instead of keeping what they made.

    forward:  h = f(x)   y = g(h)           forward:  h = f(x)   y = g(h)
    gradient: d = g'(h, e)            ->    gradient: h' = f(x)  d = g'(h', e)

A planner decides which, the pass clones. The file order of the result is the plan's schedule; the `order` pass makes
it hold at run time (a duplicate alone is merged again by the runtime).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from onnx import NodeProto, helper

from onnx_sublinear.errors import PostconditionError
from onnx_sublinear.graph import subgraphs_of
from onnx_sublinear.ops.traits import traits_of
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.rewriting import ROLE_CLONE, ROLE_SCRATCH, mark, replace_nodes
from onnx_sublinear.planners import Limit, RematPlan, strategy_named
from onnx_sublinear.planners.problem import remat_problem
from onnx_sublinear.runtime_model import lower_bound
from onnx_sublinear.scheduling import base_orders
from onnx_sublinear.training_graph import TrainingGraph
from onnx_sublinear.units import parse_bytes, parse_share

__all__ = ["RecomputePass"]


@dataclass(frozen=True)
class RecomputePass(Pass):
    """Duplicates forward subgraphs into the gradient section at chosen checkpoints.

    Attributes:
        budget: bytes that the peak must not pass ("2GiB"), or a share of the peak before in the runtime's DEFAULT order
            ("60%"); "": the smallest peak.
        max_overhead: cost of the clones / cost of the step, at most ("20%"); "": one extra forward pass.
        strategy: who plans.
    """

    name: ClassVar[str] = "recompute"

    budget: str = ""
    max_overhead: str = ""
    strategy: str = "auto"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Plans and clones."""
        notes = list(graph.sections.notes)
        if not graph.sections.has_gradients:
            return PassResult(graph, notes=tuple(notes))
        plan = self.plan(graph)
        facts = {"plan": plan, "planned_bytes": plan.peak_bytes}
        if not plan.clones:
            notes.append("no recomputation lowers the peak")
        rewritten, recomputed = apply_schedule(graph, plan.labels)
        return PassResult(rewritten, True, tuple(notes), {**facts, "recomputed": recomputed})

    def plan(self, graph: TrainingGraph) -> RematPlan:
        """The best plan: base orders are compared with little effort, the best one is planned with all.

        Raises:
            BudgetError: no strategy meets the budget.
        """
        limit = self.limit(graph)
        floor, _ = lower_bound(graph.runtime)
        strategy = strategy_named(self.strategy)
        problems = [remat_problem(graph, order) for order in base_orders(graph)]
        smallest = Limit() if limit.max_overhead is None else replace(limit, budget_bytes=None)
        previews = [strategy.quick().plan(p, smallest, lower_bound_bytes=floor) for p in problems]
        best = min(range(len(problems)), key=lambda i: (previews[i].peak_bytes, previews[i].overhead))
        return strategy.plan(problems[best], limit, lower_bound_bytes=floor)

    def limit(self, graph: TrainingGraph) -> Limit:
        """The limit in bytes and shares."""
        budget = None
        if self.budget.endswith("%"):
            budget = int(parse_share(self.budget) * graph.simulations["default"].peak_bytes)
        elif self.budget:
            budget = parse_bytes(self.budget)
        overhead = parse_share(self.max_overhead) if self.max_overhead else None
        if budget is None and overhead is None:
            return Limit()
        return Limit(budget, max_overhead=overhead, max_forward_share=None)

    def ensures(self, before: TrainingGraph, result: PassResult) -> None:
        """Every original node is still there, and the graph is sorted."""
        if not result.modified:
            return
        kept = {o for n in result.graph.index.nodes for o in n.output}
        missing = next((o for n in before.index.nodes for o in n.output if o not in kept), None)
        if missing is not None:
            raise PostconditionError(f"pass '{self.name}' lost tensor '{missing}'")
        if result.graph.index.order != list(range(len(result.graph.index.nodes))):
            raise PostconditionError(f"pass '{self.name}' left the nodes unsorted")


def apply_schedule(graph: TrainingGraph, labels: Sequence[int]) -> tuple[TrainingGraph, dict[str, int]]:
    """The graph whose file order is the schedule `labels` (graph positions; one that comes again becomes a clone).

    Each reader, subgraphs included, reads the latest run of what it read before; graph outputs stay the first run's.

    Returns:
        The graph, and the number of clones per operator.
    """
    index = graph.index
    latest: dict[str, str] = {}  # tensor -> the name its latest run gave it, where that is a clone
    seen = bytearray(len(index.nodes))
    nodes: list[NodeProto] = []
    copies: dict[str, str] = {}  # every new tensor -> one of the same type
    recomputed: dict[str, int] = {}
    for position in index.constants_first(labels):
        original = index.nodes[position]
        node = NodeProto()
        node.CopyFrom(original)
        if latest:
            rename_reads(node, latest)
        if seen[position]:
            recomputed[node.op_type] = recomputed.get(node.op_type, 0) + 1
            scratch = _make_clone(node, original, index.fresh_name)
            copies.update((copy.output[0], copy.input[0]) for copy in scratch)
            copies.update((c, o) for o, c in zip(original.output, node.output, strict=True) if c)
            latest.update((o, c) for o, c in zip(original.output, node.output, strict=True) if c)
            nodes.extend(scratch)
        seen[position] = 1
        nodes.append(node)
    visible = {**graph.visible, **{c: graph.visible[o] for c, o in copies.items() if o in graph.visible}}
    rewritten = graph.with_model(
        replace_nodes(graph.model, nodes), sizes=graph.sizes.with_copies(copies), visible=visible
    )
    return rewritten, recomputed


def _make_clone(node: NodeProto, original: NodeProto, fresh_name: Callable[[str], str]) -> list[NodeProto]:
    """Makes `node`, a copy of `original`, a clone; returns the nodes that it needs in front.

    Where the kernel writes into an input (running statistics), the clone gets a value of the same shape to write into
    instead, so that a state is not advanced twice. What it computes otherwise does not depend on that input.
    """
    for slot, output in enumerate(original.output):
        node.output[slot] = fresh_name(f"{output}/recompute") if output else ""
    if node.name:
        node.name = fresh_name(f"{node.name}/recompute")
    first = next(o for o in original.output if o)
    mark(node, ROLE_CLONE, of=first)
    scratch: list[NodeProto] = []
    for slot, output in traits_of(original).state:
        if slot < len(node.input) and node.input[slot] and output < len(node.output) and node.output[output]:
            name = fresh_name(f"{node.input[slot]}/scratch")
            copy = helper.make_node("Neg", [node.input[slot]], [name], name=fresh_name(f"{name}/node"))
            mark(copy, ROLE_SCRATCH, of=first)
            scratch.append(copy)
            node.input[slot] = name
    return scratch


def rename_reads(node: NodeProto, names: dict[str, str]) -> None:
    """Replaces what `node` reads by `names`, in its subgraphs too as far as the name is not defined there."""
    for slot, name in enumerate(node.input):
        if name in names:
            node.input[slot] = names[name]
    pending = [(graph, names) for graph in subgraphs_of(node)]
    while pending:
        graph, outer = pending.pop()
        local = {v.name for v in graph.input} | {t.name for t in graph.initializer}
        local |= {s.values.name for s in graph.sparse_initializer} | {o for n in graph.node for o in n.output}
        visible = {a: b for a, b in outer.items() if a not in local}
        for inner in graph.node:
            for slot, name in enumerate(inner.input):
                if name in visible:
                    inner.input[slot] = visible[name]
            pending.extend((g, visible) for g in subgraphs_of(inner))
