"""The main path: a training graph in, an equivalent one with a smaller peak out."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import ModelProto

from onnx_sublinear.errors import BudgetError, UsageError
from onnx_sublinear.graph import domain_of, nodes_at_any_depth
from onnx_sublinear.model_io import check_external_data, check_model, load_model, missing_warnings
from onnx_sublinear.ops.traits import Target, is_opaque
from onnx_sublinear.passes import Pass, PassResult, Pipeline
from onnx_sublinear.passes.fusions import can_be_checked, executed_files
from onnx_sublinear.passes.lower_training_ops import LowerTrainingOpsPass
from onnx_sublinear.passes.prepare import prepare
from onnx_sublinear.passes.recompute import RecomputePass
from onnx_sublinear.passes.registry import default_passes
from onnx_sublinear.planners import RematPlan
from onnx_sublinear.planners.problem import over_budget
from onnx_sublinear.runtime_model import lower_bound
from onnx_sublinear.sizes import free_symbols
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Inspection", "Report", "Result", "inspect", "lowered", "optimize"]

_BUDGET_ATTEMPTS = 4
_SHORT = 1.03
_SIMPLE = "sqrt"  # the strategy whose plans the orders hold most easily
_SIMPLE_NODES = 5000
_LEAST_GAIN = 0.01
_LEAST_GAIN_BYTES = 4096
_PAGE_BYTES = 4096
_CLEAR_GAIN_SHARE = 0.75
_SMALL_GRAPH_BYTES = 1 << 20
_MOST_OPERATORS = 5
_TARGETS: tuple[Target, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Report:
    """What `optimize` did. Bytes are simulated: arena and memory pattern off, feeds and initializers not counted.

    Attributes:
        peak_before_bytes: of the input in the runtime's DEFAULT order.
        peak_after_bytes: of the result, in the worse of the DEFAULT and PRIORITY orders.
        peaks_before: of the input by order.
        peaks_after: of the result by order.
        lower_bound_bytes: the largest bytes that any single node needs at once.
        overhead: cost of the clones / cost of the step.
        forward_share: cost of the clones / cost of the forward section.
        clones: number of recompute clones.
        barriers: number of nodes that only order others.
        strategy: the planner that made the plan, "" where nothing is recomputed.
        unknown_size_names: tensors whose size is unknown; they are neither shared nor recomputed.
        arena_bytes: size of the one block that the plan in the model's metadata packs all buffers into.
        inplace_bytes: bytes of outputs that live in their input's buffer.
        recomputed: clones by operator.
        nodes_before: nodes of the main graph before.
        nodes_after: nodes of the main graph after.
        seconds: wall time.
        notes: what a user should know, one line each.
        warnings: what may keep the result from running or from being smaller, one line each.
    """

    peak_before_bytes: int
    peak_after_bytes: int
    peaks_before: Mapping[str, int]
    peaks_after: Mapping[str, int]
    lower_bound_bytes: int
    overhead: float
    forward_share: float
    clones: int
    barriers: int
    strategy: str
    unknown_size_names: tuple[str, ...]
    arena_bytes: int
    inplace_bytes: int
    recomputed: Mapping[str, int]
    nodes_before: int
    nodes_after: int
    seconds: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def unknown_size_tensors(self) -> int:
        """How many tensors have an unknown size."""
        return len(self.unknown_size_names)


@dataclass(frozen=True)
class Result:
    """What `optimize` returns.

    Attributes:
        model: the optimized model; the model given where nothing could be gained.
        plan: the recomputation plan, or None where nothing is recomputed.
        report: the figures.
    """

    model: ModelProto
    plan: RematPlan | None
    report: Report


@dataclass(frozen=True)
class Inspection:
    """Where the memory of a training graph goes (simulated, bytes).

    Attributes:
        peak_default_bytes: in the runtime's DEFAULT order.
        peak_priority_bytes: in its PRIORITY_BASED order.
        lower_bound_bytes: the largest bytes that any single node needs at once.
        lower_bound_node: that node.
        largest: (tensor, bytes, operator that makes it), the largest first.
        timeline: live bytes at each step of the DEFAULT order.
        forward_nodes: nodes of the forward section.
        gradient_nodes: nodes of the gradient section.
        losses: the tensors taken as loss.
        symbols: symbolic dims of the graph inputs.
        unknown_size_names: tensors whose size is unknown.
        notes: what a user should know, one line each.
    """

    peak_default_bytes: int
    peak_priority_bytes: int
    lower_bound_bytes: int
    lower_bound_node: str
    largest: tuple[tuple[str, int, str], ...]
    timeline: tuple[int, ...]
    forward_nodes: int
    gradient_nodes: int
    losses: tuple[str, ...]
    symbols: tuple[str, ...]
    unknown_size_names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def optimize(
    model: ModelProto | str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    max_overhead: float | str | None = None,
    strategy: str = "auto",
    dims: Mapping[str, int] | None = None,
    loss: Sequence[str] = (),
    target: str = "cpu",
    robust: str = "all",
    lower: bool = False,
    passes: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Returns an equivalent training graph that needs less memory.

    Args:
        model: a training graph (forward, loss and gradients in one model), or the path of one. It is not changed.
        budget: bytes that the peak must not pass, a size such as "2GiB", or a share of the peak before ("60%").
        max_overhead: cost of the recomputation / cost of the step, at most, as a fraction or "20%".
            Without `budget` and `max_overhead`: the smallest peak for at most one extra forward pass.
        strategy: who plans; "auto" chooses.
        dims: values of symbolic dims, for planning; the result is right at every other value too.
        loss: names of the loss tensors, where they cannot be found by name and shape.
        target: "cpu" or "cuda": whose in-place kernels hold.
        robust: "all": the plan holds in every execution order, and with the fusions of the installed ONNX Runtime;
            "default": in the default order only, with fewer added nodes.
        lower: write the operators of ONNX Runtime's training builds as standard ones first (pass `lower-training-ops`),
            so that a stock build runs the result; what the report says of "before" is then about the lowered graph.
        passes: a pipeline's text form to run instead of the default one.
        progress: called with the name of each stage when it starts.

    Raises:
        ModelError: the model is not usable.
        BudgetError: the budget cannot be met.
        UsageError: an argument does not fit.
    """
    started = time.perf_counter()
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | str)):
        raise UsageError(f"budget {budget!r} is neither a number of bytes nor a text", 'write 2 << 30, "2GiB" or "60%"')
    if robust not in ("all", "default"):
        raise UsageError(f"robust is 'all' or 'default', not '{robust}'")
    graph, missing = _graph(model, dims, loss, target)
    graph = graph.counting(robust == "all")
    lowering: tuple[str, ...] = ()
    if lower:
        _announce(progress, LowerTrainingOpsPass.name)
        lowered = LowerTrainingOpsPass()(graph)
        graph, lowering = lowered.graph, lowered.notes
    _announce(progress, "sizes")
    before = {name: run.peak_bytes for name, run in graph.simulations.items()}
    if passes is not None and (budget is not None or max_overhead is not None or strategy != "auto"):
        raise UsageError(
            "budget, max_overhead and strategy do not go with passes",
            "write them as options of the recompute pass: recompute{budget=2GiB,strategy=sqrt},inplace,order,share",
        )
    if passes is not None:
        result = _pipeline(Pipeline.parse(passes).passes, progress)(graph)
    else:
        result = _plan_and_rewrite(graph, budget, max_overhead, strategy, progress)
    result = replace(result, notes=(*lowering, *result.notes))
    return _result(graph, before, result, (*missing, *_opaque_warnings(graph)), started)


def lowered(model: ModelProto) -> ModelProto:
    """The model with the operators of ONNX Runtime's training builds written as standard ones.

    Raises:
        ModelError: the model is not usable, or an operator cannot be lowered.
    """
    check_model(model)
    return LowerTrainingOpsPass()(TrainingGraph(prepare(model))).model


def inspect(
    model: ModelProto | str | os.PathLike[str],
    *,
    dims: Mapping[str, int] | None = None,
    loss: Sequence[str] = (),
    target: str = "cpu",
) -> Inspection:
    """Says where the memory of a training graph goes. Arguments and errors as for `optimize`."""
    graph, _ = _graph(model, dims, loss, target)
    index, sizes = graph.index, graph.sizes
    bound, node = lower_bound(graph.runtime)
    tensors = [(name, sizes.bytes_of(name) or 0, index.nodes[p].op_type) for name, p in index.producer.items()]
    forward = sum(graph.sections.forward)
    return Inspection(
        peak_default_bytes=graph.simulations["default"].peak_bytes,
        peak_priority_bytes=graph.simulations["priority"].peak_bytes,
        lower_bound_bytes=bound,
        lower_bound_node="" if node < 0 else index.nodes[node].name or next(iter(index.nodes[node].output), ""),
        largest=tuple(sorted(tensors, key=lambda t: (-t[1], t[0]))[:20]),
        timeline=tuple(graph.simulations["default"].profile),
        forward_nodes=forward,
        gradient_nodes=len(index.nodes) - forward,
        losses=graph.sections.losses,
        symbols=tuple(free_symbols(index)),
        unknown_size_names=tuple(sizes.unknown),
        notes=graph.sections.notes,
    )


def _graph(
    model: ModelProto | str | os.PathLike[str], dims: Mapping[str, int] | None, loss: Sequence[str], target: str
) -> tuple[TrainingGraph, tuple[str, ...]]:
    """The checked model as a graph, and a warning for each of its data files that is missing."""
    if target not in _TARGETS:
        raise UsageError(f"there is no target '{target}'", f"targets: {', '.join(_TARGETS)}")
    missing: tuple[str, ...] = ()
    if isinstance(model, ModelProto):
        check_model(model)
    elif not isinstance(model, str | os.PathLike):
        raise UsageError(f"a model is a ModelProto or a path, not {type(model).__name__}")
    else:
        folder = Path(model).parent
        model = load_model(model)
        missing = missing_warnings(check_external_data(model, folder))
    known: Target = "cpu" if target == "cpu" else "cuda"
    return TrainingGraph(prepare(model), dict(dims or {}), tuple(loss), known), missing


def _opaque_warnings(graph: TrainingGraph) -> Iterator[str]:
    """One line per domain with operators of which nothing is known."""
    operators: dict[str, dict[str, None]] = {}
    lists = [graph.index.nodes, *(f.node for f in graph.index.functions.values())]
    for node in (node for nodes in lists for node in nodes_at_any_depth(nodes)):
        if is_opaque(node, graph.index):
            operators.setdefault(domain_of(node) or "ai.onnx", {})[node.op_type] = None
    for domain, found in operators.items():
        names = ", ".join(list(found)[:_MOST_OPERATORS]) + (", ..." if len(found) > _MOST_OPERATORS else "")
        yield f"operators of domain '{domain}' are not known ({names}): their nodes are kept as they are, once each"


def _announce(progress: Callable[[str], None] | None, stage: str) -> None:
    if progress is not None:
        progress(stage)


def _pipeline(passes: Sequence[Pass], progress: Callable[[str], None] | None) -> Pipeline:
    def call_back(previous: Pass | None, graph: TrainingGraph, following: Pass | None) -> None:
        del previous, graph
        if following is not None:
            _announce(progress, following.name)

    return Pipeline(tuple(passes), call_back)


def _plan_and_rewrite(
    graph: TrainingGraph,
    budget: int | str | None,
    max_overhead: float | str | None,
    strategy: str,
    progress: Callable[[str], None] | None,
) -> PassResult:
    """The default pipeline; where it gains nothing, the same without recomputation; else the graph as it was."""
    notes = (*graph.sections.notes, *_symbol_notes(graph))
    recompute = RecomputePass(
        budget="" if budget is None else str(budget),
        max_overhead="" if max_overhead is None else _share_text(max_overhead),
        strategy=strategy,
    )
    limit = recompute.limit(graph).budget_bytes
    candidates: list[PassResult] = []
    if graph.sections.has_gradients:
        candidates.append(_within_budget(graph, recompute, limit, progress))
        if limit is None and strategy == "auto" and _falls_short(candidates[0]):
            simple = _pipeline(default_passes(replace(recompute, strategy=_SIMPLE)), None)(graph)
            if _worst(simple.graph) <= _worst(candidates[0].graph) * (1 + _LEAST_GAIN):
                candidates[0] = simple
        cloned = candidates[0].facts["plan"].clones > 0
        if limit is None and cloned and not _never_worse(graph, candidates[0].graph):
            candidates.append(_pipeline(default_passes(None), progress)(graph))
    unlimited = budget is None and max_overhead is None
    for candidate in candidates:
        # Without a limit, no order may need more than before; with one, what counts is the worst order.
        better = _never_worse(graph, candidate.graph) if unlimited else _worst(candidate.graph) < _worst(graph)
        needed = limit is None or _worst(candidate.graph) <= limit < _worst(graph)
        better = better and not (unlimited and _worse_when_fused(graph, candidate))
        if better and needed and _gains(graph, candidate.graph):
            return replace(candidate, notes=(*notes, *candidate.notes))
    if limit is not None and _worst(graph) > limit:
        raise over_budget(limit, _worst(graph), lower_bound(graph.runtime)[0])
    return PassResult(graph, notes=(*notes, f"nothing to do{_reason(graph, limit)}"))


def _falls_short(result: PassResult) -> bool:
    """Whether the runtime's orders need clearly more than the plan, and another plan costs little time."""
    plan: RematPlan = result.facts["plan"]
    short = _worst(result.graph) > _SHORT * plan.peak_bytes
    return short and plan.clones > 0 and len(result.graph.index.nodes) <= _SIMPLE_NODES


def _share_text(share: float | str) -> str:
    return share if isinstance(share, str) else f"{share:.12f}"


def _reason(graph: TrainingGraph, limit: int | None) -> str:
    if not graph.sections.has_gradients:
        return ""
    return ": no rewrite lowers the peak" if limit is None else ": the graph is within the budget as it is"


def _within_budget(
    graph: TrainingGraph, recompute: RecomputePass, limit: int | None, progress: Callable[[str], None] | None
) -> PassResult:
    """The pipeline's result within the limit.

    Where later passes need more than the plan, the plan's budget is lowered by as much; the last try is the plan of
    smallest peak.

    Raises:
        BudgetError: that one needs more too.
    """
    if limit is None:
        return _pipeline(default_passes(recompute), progress)(graph)
    planned, worst = limit, limit
    for _ in range(_BUDGET_ATTEMPTS):
        try:
            attempt = _pipeline(default_passes(replace(recompute, budget=str(planned)), limit), progress)(graph)
        except BudgetError:
            break
        worst = _worst(attempt.graph)
        if worst <= limit:
            return attempt
        planned = int(planned * min(limit / worst, 0.99))
    smallest = _pipeline(default_passes(replace(recompute, budget=""), limit), progress)(graph)
    if _worst(smallest.graph) <= limit or _worst(graph) <= limit:
        return smallest
    raise over_budget(limit, min(map(_worst, (smallest.graph, graph))), lower_bound(graph.runtime)[0])


def _worst(graph: TrainingGraph) -> int:
    return max(run.peak_bytes for run in graph.simulations.values())


def _never_worse(before: TrainingGraph, after: TrainingGraph) -> bool:
    """Whether no order of the runtime needs more than before, in all bytes and in whole pages.

    With float16 on the CPU, where the casts around it move with every change, only a clear gain counts.
    """
    share = _CLEAR_GAIN_SHARE if before.float16_in_float else 1.0

    def in_pages(graph: TrainingGraph, name: str) -> int:
        return graph.simulations[name].peak_of_blocks(graph.executed, _PAGE_BYTES)

    return all(
        run.peak_bytes <= share * before.simulations[name].peak_bytes
        and in_pages(after, name) <= share * in_pages(before, name)
        for name, run in after.simulations.items()
    )


def _worse_when_fused(before: TrainingGraph, result: PassResult) -> bool:
    """Whether a default session of the installed ONNX Runtime would need more than before.

    Fusions and blocked layouts may cost more than was saved. Nothing is known of large graphs, of other builds and
    targets, and of what the runtime refuses; graphs of less than a MiB are not asked about.
    """
    if not can_be_checked(result.graph):
        return False
    old = [file.simulations["default"].peak_bytes for file in executed_files(before, ("all",))]
    if not old or old[0] <= _SMALL_GRAPH_BYTES:
        return False
    # The order pass has asked already; only the arena's plan was written into the model since.
    files = result.facts.get("executed_files") or executed_files(result.graph, ("all",))
    return any(file.simulations["default"].peak_bytes > old[0] for file in files if file.dump.level == "all")


def _gains(before: TrainingGraph, after: TrainingGraph) -> bool:
    """Whether an order of the runtime needs less by an amount that is worth other nodes."""
    return any(
        old.peak_bytes - after.simulations[name].peak_bytes >= max(_LEAST_GAIN_BYTES, _LEAST_GAIN * old.peak_bytes)
        for name, old in before.simulations.items()
    )


def _symbol_notes(graph: TrainingGraph) -> tuple[str, ...]:
    free = [s for s in free_symbols(graph.index) if s not in graph.dims]
    if not free or not graph.sizes.unknown:
        return ()
    options = " ".join(f"--dim {s}=N" for s in free)
    return (f"{len(graph.sizes.unknown)} tensors have an unknown size: say {options} to plan for a size",)


def _result(
    graph: TrainingGraph, before: Mapping[str, int], result: PassResult, warnings: Sequence[str], started: float
) -> Result:
    after = {name: run.peak_bytes for name, run in result.graph.simulations.items()}
    plan: RematPlan | None = result.facts.get("plan")
    if plan is not None and not plan.clones:
        plan = None
    report = Report(
        peak_before_bytes=before["default"],
        peak_after_bytes=max(after.values()),
        peaks_before=dict(before),
        peaks_after=after,
        lower_bound_bytes=lower_bound(graph.runtime)[0],
        overhead=plan.overhead if plan else 0.0,
        forward_share=plan.forward_share if plan else 0.0,
        clones=plan.clones if plan else 0,
        barriers=result.facts.get("barriers", 0),
        strategy=plan.strategy if plan else "",
        unknown_size_names=tuple(graph.sizes.unknown),
        arena_bytes=result.facts.get("arena_bytes", 0),
        inplace_bytes=result.facts.get("inplace_bytes", 0),
        recomputed=dict(Counter(result.facts.get("recomputed", {}))),
        nodes_before=len(graph.index.nodes),
        nodes_after=len(result.model.graph.node),
        seconds=time.perf_counter() - started,
        notes=tuple(dict.fromkeys(result.notes)),
        warnings=tuple(warnings),
    )
    return Result(result.model, plan, report)
