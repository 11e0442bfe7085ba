"""Barriers: data dependencies that make the runtime keep to a schedule, without changing a value.

A schedule is split into stages. A stage may only start when the one before is complete: every node of it that would
otherwise be free to run early (a root) reads one of its inputs through a view that is keyed on the last results
(sinks) of the stage before::

    token = Size(sink)                          one per sink
    shape = Min(token, ..., zeros[rank X])      always zeros: Reshape copies the dim where the shape says 0
    view  = Reshape(X, shape)                   view == X, in X's buffer; not mergeable with X by the runtime

Stages:
1. `Layout` places the kernels of a RuntimeGraph in stages and works out tokens and views, in integers, so that
   many placements can be simulated without building a model.
2. `emit` writes a layout into a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from onnx_sublinear.runtime_model import Kernel, RuntimeGraph

__all__ = ["Barrier", "Layout", "StageRules", "lay_out"]

_TOKEN_BYTES = 64


@dataclass(frozen=True)
class StageRules:
    """What a barrier may touch.

    Attributes:
        viewable: per value whether a view of it can be written (a tensor of known rank).
        countable: per value whether its Size can be taken (a tensor).
        slots: per kernel the values that it reads through its own input slots (captured ones cannot be rerouted).
        small_output: per kernel whether running it early costs next to nothing.
        small_all: per kernel whether running it late costs next to nothing.
    """

    viewable: Sequence[bool]
    countable: Sequence[bool]
    slots: Sequence[Sequence[int]]
    small_output: Sequence[bool]
    small_all: Sequence[bool]


@dataclass
class Barrier:
    """The barrier in front of one stage.

    Attributes:
        tokens: values whose Size is taken.
        views: value -> id of its view in the laid-out graph.
        readers: kernel -> value that it reads through the view.
    """

    tokens: list[int] = field(default_factory=list)
    views: dict[int, int] = field(default_factory=dict)
    readers: dict[int, int] = field(default_factory=dict)


@dataclass
class Layout:
    """A schedule with barriers.

    Attributes:
        schedule: kernels of the graph without barriers, in order.
        stages: stage of each kernel (by kernel).
        barriers: stage -> its barrier (stages that need none are missing).
        graph: the file with the barrier nodes in it.
        kernel_at: per kernel of `graph` the kernel that it stands for, or -1 for a barrier node.
    """

    schedule: Sequence[int]
    stages: Sequence[int]
    barriers: dict[int, Barrier]
    graph: RuntimeGraph
    kernel_at: list[int]

    @property
    def barrier_nodes(self) -> int:
        """How many nodes the barriers add."""
        return len(self.graph.kernels) - len(self.schedule)


def _stage_numbers(schedule: Sequence[int], starts: Collection[int]) -> list[int]:
    stages = [0] * len(schedule)
    stage = 0
    for place, kernel in enumerate(schedule):
        stage += place in starts and place > 0
        stages[kernel] = stage
    return stages


def _roots_and_sinks(
    graph: RuntimeGraph, schedule: Sequence[int], stages: Sequence[int], rules: StageRules, made_by: Sequence[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Per stage the kernels that nothing in it holds back, and those whose results nothing in it reads."""
    roots: dict[int, list[int]] = {}
    has_reader_inside = bytearray(len(stages))
    for k in schedule:
        held_back = False
        for v in graph.kernels[k].reads:
            p = made_by[v]
            if p >= 0 and stages[p] == stages[k]:
                held_back = held_back or not rules.small_output[p]
                if not rules.small_all[k]:
                    has_reader_inside[p] = 1
        if not held_back and not rules.small_output[k] and not graph.kernels[k].first:
            roots.setdefault(stages[k], []).append(k)
    sinks: dict[int, list[int]] = {}
    for k in schedule:
        if not has_reader_inside[k] and not rules.small_all[k] and graph.kernels[k].writes:
            sinks.setdefault(stages[k], []).append(k)
    return roots, sinks


def _barrier(
    graph: RuntimeGraph, roots: Iterable[int], sinks: Sequence[int], rules: StageRules, made_by: Sequence[int]
) -> Barrier | None:
    """The barrier that keeps `roots` behind `sinks`; None where the roots are behind them anyway."""
    token_of = {k: v for k in sinks for v in reversed(graph.kernels[k].writes) if rules.countable[v]}
    waiting: dict[int, list[int]] = {}  # root -> inputs that can be viewed
    needed: dict[int, None] = {}
    for k in roots:
        behind = {made_by[v] for v in graph.kernels[k].reads}
        missing = [s for s in token_of if s not in behind]
        options = [v for v in dict.fromkeys(rules.slots[k]) if rules.viewable[v]]
        if missing and options:
            waiting[k] = options
            needed.update(dict.fromkeys(missing))
    if not waiting:
        return None
    barrier = Barrier()
    sink_values = {v for s in sinks for v in graph.kernels[s].writes}
    while waiting:  # greedy cover: the value that most waiting roots read, results of the last stage first
        counts: dict[int, int] = {}
        for options in waiting.values():
            for v in options:
                counts[v] = counts.get(v, 0) + 1
        chosen = max(counts, key=lambda v: (counts[v], v in sink_values, not graph.external[v], -v))
        barrier.views[chosen] = -1
        for k in [k for k, options in waiting.items() if chosen in options]:
            barrier.readers[k] = chosen
            del waiting[k]
    single = next(iter(barrier.views)) if len(barrier.views) == 1 else None
    barrier.tokens = [token_of[s] for s in needed if single is None or single not in graph.kernels[s].writes]
    return barrier if barrier.tokens else None


def lay_out(
    graph: RuntimeGraph,
    schedule: Sequence[int],
    starts: Collection[int],
    rules: StageRules,
    *,
    private: bool,
    entries: Sequence[int] = (),
) -> Layout:
    """The file for `schedule` with a barrier in front of each place in `starts`.

    Args:
        graph: the file without barriers.
        schedule: its kernels in the order to keep.
        starts: places in the schedule at which a stage starts.
        rules: what a barrier may touch.
        private: views are declared with dims of their own (`emission`), so that no buffer behind them is promised.
        entries: external values that the first stage reads through views, to extend `private` to that stage.
    """
    made_by = graph.producers()
    stages = _stage_numbers(schedule, starts)
    roots, sinks = _roots_and_sinks(graph, schedule, stages, rules, made_by)
    barriers: dict[int, Barrier] = {}
    frontier: list[int] = []  # what must be complete before the stage's roots run
    for stage in range(stages[schedule[-1]] + 1 if schedule else 0):
        members = roots.get(stage, [])
        barrier = _barrier(graph, members, frontier, rules, made_by) if members and frontier else None
        if barrier is not None:
            barriers[stage] = barrier
        # A stage without roots holds nothing back: what it should have waited for is still to be waited for.
        frontier = sinks.get(stage, []) if members else frontier + sinks.get(stage, [])
    if entries:
        barriers[0] = Barrier(
            list(entries), dict.fromkeys(entries, -1), _entry_readers(schedule, stages, rules, entries)
        )
    laid = replace(
        graph,
        kernels=[],
        names=list(graph.names),
        sizes=list(graph.sizes),
        shapes=list(graph.shapes),
        layouts=list(graph.layouts),
        external=list(graph.external),
        is_output=list(graph.is_output),
    )
    kernel_at: list[int] = []
    open_stage = -1
    for k in schedule:
        if stages[k] != open_stage:
            open_stage = stages[k]
            if open_stage in barriers:
                _place(laid, barriers[open_stage])
                kernel_at += [-1] * (len(laid.kernels) - len(kernel_at))
        barrier = barriers.get(open_stage)
        viewed = barrier.readers.get(k) if barrier is not None else None
        kernel = graph.kernels[k]
        laid.kernels.append(
            kernel if viewed is None or barrier is None else _reading(kernel, viewed, barrier.views[viewed])
        )
        kernel_at.append(k)
    if private:
        _make_private(laid, len(graph.names))
    return Layout(schedule, stages, barriers, laid, kernel_at)


def _entry_readers(
    schedule: Sequence[int], stages: Sequence[int], rules: StageRules, entries: Sequence[int]
) -> dict[int, int]:
    """The kernels of the first stage that read an entry, each with the first one that it reads."""
    wanted = set(entries)
    reading = {k: [v for v in rules.slots[k] if v in wanted] for k in schedule if stages[k] == 0}
    return {k: values[0] for k, values in reading.items() if values}


def _make_private(laid: RuntimeGraph, views_from: int) -> None:
    """Gives the values behind views the layouts that the runtime cannot match with those in front of them.

    The dims of a view are symbols of its own. What ONNX infers behind it: an elementwise operator takes the known dim
    where a symbol meets one, keeps a symbol that meets itself, and knows nothing where two symbols meet; others carry
    a symbol on. (In outline: operators whose result does not have the symbol's dim are not told apart.)
    """
    origin = [0] * len(laid.names)  # 0: static; else the number of a symbol
    symbols = 0
    own: dict[tuple[int, int], int] = {}
    following = max(laid.layouts, default=0) + 1
    for kernel in laid.kernels:
        is_view = bool(kernel.alias) and kernel.writes[0] >= views_from
        for v in kernel.writes:
            symbol = 0
            if not is_view:
                read = [origin[r] for r in kernel.reads if not kernel.broadcast or laid.shapes[r] == laid.shapes[v]]
                if kernel.broadcast and not read:
                    read = [origin[r] for r in kernel.reads if origin[r]]
                met = set(read) if kernel.broadcast else set(read) - {0}
                if not met or 0 in met:
                    continue
                symbol = met.pop() if len(met) == 1 else 0
            if not symbol:
                symbols += 1
                symbol = symbols
            origin[v] = symbol
            if laid.layouts[v] >= 0:
                key = (symbol, laid.layouts[v])
                if key not in own:
                    own[key] = following
                    following += 1
                laid.layouts[v] = own[key]


def _reading(kernel: Kernel, value: int, view: int) -> Kernel:
    """`kernel` reading `view` where it read `value`."""

    def swap(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((view if a == value else a, b) for a, b in pairs)

    return Kernel(
        tuple(view if v == value else v for v in kernel.reads),
        kernel.writes,
        swap(kernel.alias),
        swap(kernel.inplace),
        kernel.workspace_bytes,
        kernel.first,
        kernel.broadcast,
    )


def _place(laid: RuntimeGraph, barrier: Barrier) -> None:
    """Adds the barrier's nodes: tokens, then a shape and a view for each viewed value."""
    tokens = []
    for value in barrier.tokens:
        token = laid.add_value("", _TOKEN_BYTES, -65)
        laid.kernels.append(Kernel((value,), (token,), first=True))
        tokens.append(token)
    for value in barrier.views:
        shape = laid.add_value("", _TOKEN_BYTES, -1)
        laid.kernels.append(Kernel(tuple(tokens), (shape,)))
        view = laid.add_value(
            laid.names[value],
            0 if laid.external[value] else laid.sizes[value],
            laid.layouts[value],
            shape=laid.shapes[value],
        )
        laid.kernels.append(Kernel((value, shape), (view,), alias=((value, view),)))
        barrier.views[value] = view
