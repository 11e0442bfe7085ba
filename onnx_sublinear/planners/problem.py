"""The rematerialization problem, plans for it, and the one simulator that scores them.

A problem lists nodes in schedule order. A plan is a schedule that may name a node several times; each further naming
is a recompute clone. A reader takes the latest run of what it reads.

Memory model: storage is live from the run that makes it until the last reader of any value in it (at least for its own
step); graph outputs and values that nothing reads are live to the end. Views share their input's storage. A node that
can run in-place takes over the storage of an input that nothing reads later. While a node runs, its inputs, outputs
and workspace are live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from onnx_sublinear.errors import BudgetError
from onnx_sublinear.liveness import peak_of
from onnx_sublinear.ops.traits import may_clone, overwritten_by
from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT
from onnx_sublinear.training_graph import TrainingGraph
from onnx_sublinear.units import format_bytes

__all__ = [
    "Evaluation",
    "Limit",
    "RematPlan",
    "RematProblem",
    "evaluate",
    "expand",
    "least_bytes",
    "over_budget",
    "plan_of",
    "remat_problem",
]


@dataclass(frozen=True)
class Limit:
    """What a plan must keep to.

    Attributes:
        budget_bytes: bytes that the peak must not pass, or None for the smallest peak.
        max_overhead: cost of the clones / cost of the step, at most; None: no limit.
        max_forward_share: cost of the clones / cost of the forward section, at most; None: no limit.
    """

    budget_bytes: int | None = None
    max_overhead: float | None = None
    max_forward_share: float | None = 1.0


@dataclass(frozen=True)
class RematProblem:
    """Nodes in schedule order. Node numbers are places in that order, value numbers index `sizes`.

    Attributes:
        labels: per node the position in the graph that it stands for.
        reads: per node the values read, each once (external ones left out).
        writes: per node the values made.
        views: per node (input, output) values that always share storage.
        inplace: per node (input, output) values that share it if nothing reads the input later.
        sizes: bytes of each value.
        kept: per value whether it is live to the end.
        costs: per node, FLOP equivalents.
        workspaces: per node, bytes of scratch.
        forward: per node whether it is in the forward section.
        recomputable: per node whether it may run again.
    """

    labels: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    views: tuple[tuple[tuple[int, int], ...], ...]
    inplace: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]
    kept: tuple[bool, ...]
    costs: tuple[int, ...]
    workspaces: tuple[int, ...]
    forward: tuple[bool, ...]
    recomputable: tuple[bool, ...]

    @cached_property
    def producer(self) -> list[int]:
        """Per value the node that makes it."""
        made_by = [-1] * len(self.sizes)
        for node, values in enumerate(self.writes):
            for v in values:
                made_by[v] = node
        return made_by

    @cached_property
    def readers(self) -> list[list[int]]:
        """Per value the nodes that read it, in schedule order."""
        read_by: list[list[int]] = [[] for _ in self.sizes]
        for node, values in enumerate(self.reads):
            for v in values:
                read_by[v].append(node)
        return read_by

    @cached_property
    def step_cost(self) -> int:
        """Cost of one run of every node (at least 1)."""
        return sum(self.costs) or 1

    @cached_property
    def forward_cost(self) -> int:
        """Cost of one run of the forward section (at least 1)."""
        return sum(c for c, f in zip(self.costs, self.forward, strict=True) if f) or 1


@dataclass(frozen=True)
class Evaluation:
    """The score of one schedule.

    Attributes:
        peak_bytes: the largest live bytes.
        profile: live bytes at each step.
        clone_cost: cost of all runs beyond each node's first.
    """

    peak_bytes: int
    profile: list[int]
    clone_cost: int


@dataclass(frozen=True)
class RematPlan:
    """A schedule and its score.

    Attributes:
        strategy: who made it.
        labels: the schedule as graph positions; a position that comes again is a recompute clone.
        peak_bytes: by the simulator of this module.
        overhead: cost of the clones / cost of the step.
        forward_share: cost of the clones / cost of the forward section.
        clones: number of recompute clones.
        overhead_bound: an overhead that no plan within the budget can be below, for the problem's order and the number
            of runs that the strategy allows; None where nothing is proved.
    """

    strategy: str
    labels: tuple[int, ...]
    peak_bytes: int
    overhead: float
    forward_share: float
    clones: int
    overhead_bound: float | None = None


def remat_problem(graph: TrainingGraph, order: Sequence[int]) -> RematProblem:
    """The problem of `graph` with its nodes in the schedule `order` (graph positions, topological)."""
    runtime, index = graph.runtime, graph.index
    layouts = runtime.layouts
    overwritten = {name for node in index.nodes for name in overwritten_by(node)}
    numbers: dict[int, int] = {}
    for k in order:
        for v in runtime.kernels[k].writes:
            numbers[v] = len(numbers)
    made = list(numbers)
    read: set[int] = set()
    borrowed = {b for k in runtime.kernels for a, b in k.alias if runtime.external[a]}  # views of graph inputs
    rows: list[tuple[tuple[int, ...], ...]] = []
    pairs: list[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]] = []
    for k in order:
        kernel = runtime.kernels[k]
        rows.append(
            (
                tuple(numbers[v] for v in dict.fromkeys(kernel.reads) if v in numbers),
                tuple(numbers[v] for v in kernel.writes),
            )
        )
        read.update(rows[-1][0])
        pairs.append(
            (
                tuple((numbers[a], numbers[b]) for a, b in kernel.alias if a in numbers),
                tuple(
                    (numbers[a], numbers[b])
                    for a, b in kernel.inplace
                    if a in numbers and layouts[a] == layouts[b] != UNKNOWN_LAYOUT
                ),
            )
        )
    unknown = set(graph.sizes.unknown)
    return RematProblem(
        labels=tuple(order),
        reads=tuple(r for r, _ in rows),
        writes=tuple(w for _, w in rows),
        views=tuple(v for v, _ in pairs),
        inplace=tuple(i for _, i in pairs),
        sizes=tuple(0 if v in borrowed and not runtime.is_output[v] else runtime.sizes[v] for v in made),
        kept=tuple(runtime.is_output[v] or n not in read for n, v in enumerate(made)),
        costs=tuple(graph.costs[k] for k in order),
        workspaces=tuple(runtime.kernels[k].workspace_bytes for k in order),
        forward=tuple(graph.sections.forward[k] for k in order),
        recomputable=tuple(
            graph.sections.forward[k]
            and index.nodes[k].op_type != "Constant"
            and may_clone(index.nodes[k], index)
            and not any(o in unknown for o in index.nodes[k].output)
            and overwritten.isdisjoint(index.reads[k])
            and graph.untouchable.isdisjoint((*index.reads[k], *index.nodes[k].output))
            for k in order
        ),
    )


def evaluate(problem: RematProblem, schedule: Sequence[int]) -> Evaluation:
    """Scores `schedule` (node numbers; a number that comes again is a recompute clone).

    Every node must run, and what it reads must have run before.
    """
    reads, writes, views, inplace = problem.reads, problem.writes, problem.views, problem.inplace
    sizes, kept = problem.sizes, problem.kept
    steps = len(schedule)
    latest = [-1] * len(sizes)  # value -> storage of its latest run
    size: list[int] = []
    born: list[int] = []
    last: list[int] = []
    candidates: list[tuple[int, int, int]] = []  # (step, storage of the input, storage of the output)
    ran = bytearray(len(reads))
    clone_cost = 0
    for step, node in enumerate(schedule):
        for v in reads[node]:
            storage = latest[v]
            if last[storage] < step:
                last[storage] = step
        again = ran[node]
        for v in writes[node]:
            latest[v] = len(size)
            size.append(sizes[v])
            born.append(step)
            last.append(steps if kept[v] and not again else step)
        for a, b in views[node]:
            if not kept[b]:
                size[latest[b]] = 0
                latest[b] = latest[a]
        for a, b in inplace[node]:
            candidates.append((step, latest[a], latest[b]))
        if again:
            clone_cost += problem.costs[node]
        ran[node] = 1
    root = list(range(len(size)))
    for step, a, b in candidates:
        a = root[a]
        if last[a] == step and born[b] == step and last[b] < steps and a != b:
            root[b] = a
            last[a] = max(last[b], step)
            size[b] = 0
    delta = [0] * (steps + 2)
    for n, start, end in zip(size, born, last, strict=True):
        if n:
            delta[start] += n
            delta[end + 1] -= n
    workspaces = problem.workspaces
    profile = [live + workspaces[n] for live, n in zip(accumulate(delta), schedule, strict=False)]
    return Evaluation(peak_of(profile), profile, clone_cost)


def expand(problem: RematProblem, dropped: Sequence[bool]) -> list[int]:
    """The schedule in which the nodes marked in `dropped` run again, lazily, before the gradient nodes that need them.

    The paper's Alg. 2 with mirror counts of at most 1: before a gradient node, its not yet recomputed ancestors among
    the dropped nodes are run once more, in schedule order.
    """
    producer, forward, reads, kept = problem.producer, problem.forward, problem.reads, problem.kept
    done = bytearray(len(reads))
    schedule: list[int] = []
    for node, is_forward in enumerate(forward):
        if not is_forward:
            pending = [p for v in reads[node] if dropped[p := producer[v]] and not (done[p] or kept[v])]
            needed: list[int] = []
            while pending:
                p = pending.pop()
                if dropped[p] and not done[p]:
                    done[p] = 1
                    needed.append(p)
                    pending.extend(producer[v] for v in reads[p] if not kept[v])
            schedule.extend(sorted(needed))
        schedule.append(node)
    return schedule


def least_bytes(problem: RematProblem) -> int:
    """The largest bytes that a single node needs at once; what it may write in place counts once."""
    root = list(range(len(problem.sizes)))
    most = 0
    for node, views in enumerate(problem.views):
        for a, b in views:
            if not problem.kept[b]:
                root[b] = root[a]
        shared = {b for _, b in problem.inplace[node] if not problem.kept[b]}
        needed = {root[v] for v in problem.reads[node]} | {root[v] for v in problem.writes[node] if v not in shared}
        most = max(most, sum(problem.sizes[v] for v in needed) + problem.workspaces[node])
    return most


def over_budget(budget_bytes: int, smallest_peak_bytes: int, lower_bound_bytes: int) -> BudgetError:
    """The error that says how far away the budget is."""
    budget, smallest, bound = map(format_bytes, (budget_bytes, smallest_peak_bytes, lower_bound_bytes))
    return BudgetError(
        f"the budget of {budget} ({budget_bytes} bytes) cannot be met: the smallest peak found is {smallest} "
        f"({smallest_peak_bytes} bytes), and no plan can go below {bound} ({lower_bound_bytes} bytes)",
        smallest_peak_bytes,
        lower_bound_bytes,
        "raise the budget, allow more overhead, or make the batch smaller",
    )


def plan_of(problem: RematProblem, strategy: str, schedule: Sequence[int], score: Evaluation) -> RematPlan:
    """The plan for a scored schedule."""
    return RematPlan(
        strategy,
        tuple(problem.labels[n] for n in schedule),
        score.peak_bytes,
        score.clone_cost / problem.step_cost,
        score.clone_cost / problem.forward_cost,
        len(schedule) - len(problem.labels),
    )
