"""Barriers and views: what makes the runtime keep to a schedule, without changing a value.

A schedule is split into stages. A stage may only start when the one before is complete: every node of it that would
otherwise be free to run early (a root) reads one of its inputs through a view that is keyed on the last results
(sinks) of the stage before::

    token = Size(sink)                          one per sink
    shape = Min(token, ..., zeros[rank X])      always zeros: Reshape copies the dim where the shape says 0
    view  = Reshape(X, shape)                   view == X, in X's buffer; not mergeable with X by the runtime

On CUDA, Size makes the host wait for the device, and Shape does not, but Shape of a tensor of known dims is folded. So
the token there is Shape(probe, start=0, end=1) of a view (probe) of the sink whose shape is keyed on a graph input.

A view can also stand for itself (a release): behind it, the runtime does not know the dims, so it holds no dead buffer
for what is made from it.

A `Layout` is the file for a schedule in integers, so that many can be simulated without building a model; `emission`
writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, Kernel, RuntimeGraph

AddedKind = Literal["token", "dim", "shape", "view", "probe"]

__all__ = ["Added", "Layout", "Placement", "StageRules", "lay_out"]

_TOKEN_BYTES = 64


@dataclass(frozen=True)
class StageRules:
    """What a barrier may touch.

    Attributes:
        ranks: per value its rank; -1 where it is no tensor or its rank is unknown: then no view of it can be written.
        countable: per value whether its Size can be taken (a tensor).
        slots: per kernel the values that it reads through its own input slots (captured ones cannot be rerouted).
        small_output: per kernel whether running it early costs next to nothing.
        small_all: per kernel whether running it late costs next to nothing.
        private: views are declared with dims of their own (`emission`), so that no buffer behind them is promised.
        probes: whether tokens are taken by Shape of a probe instead of Size.
        free_source: a tensor among the graph inputs that is no constant, or -1.
    """

    ranks: Sequence[int]
    countable: Sequence[bool]
    slots: Sequence[Sequence[int]]
    small_output: Sequence[bool]
    small_all: Sequence[bool]
    private: bool
    probes: bool = False
    free_source: int = -1


@dataclass(frozen=True)
class Placement:
    """Where barriers and releases stand.

    Attributes:
        starts: places in the schedule at which a stage starts.
        entries: external values that the first stage reads through views.
        releases: kernel -> values that it reads through views of its own.
    """

    starts: Collection[int] = frozenset()
    entries: tuple[int, ...] = ()
    releases: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Added:
    """A node that a layout adds.

    Attributes:
        kind: token (Size), dim (the first dim, as a token), shape, view, or probe (a view that only a dim reads).
        value: id of what it makes.
        source: the value whose size, rank or content it takes.
        operands: tokens of a shape; the shape of a view or probe.
    """

    kind: AddedKind
    value: int
    source: int
    operands: tuple[int, ...] = ()


@dataclass
class Layout:
    """The file for a schedule.

    Attributes:
        stages: stage of each kernel of the graph without barriers.
        graph: the file with the added nodes in it.
        rows: per kernel of `graph` the kernel that it stands for, or the node that was added.
        swaps: kernel -> {value: view that it reads instead}.
    """

    stages: Sequence[int]
    graph: RuntimeGraph
    rows: list[int | Added] = field(default_factory=list)
    swaps: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def added(self) -> int:
        """How many nodes the layout adds."""
        return sum(isinstance(row, Added) for row in self.rows)

    def stage_at(self, kernel: int) -> int:
        """The stage of a kernel of `graph`; -1 for an added node."""
        row = self.rows[kernel]
        return self.stages[row] if isinstance(row, int) else -1


@dataclass
class _Barrier:
    """Tokens to take and values to view in front of a stage, and which kernel reads which view."""

    tokens: list[int]
    readers: dict[int, int]


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
    graph: RuntimeGraph,
    roots: Iterable[int],
    sinks: Sequence[int],
    rules: StageRules,
    made_by: Sequence[int],
    stages: Sequence[int],
) -> _Barrier | None:
    """The barrier that keeps `roots` behind `sinks`; None where the roots are behind them anyway."""
    token_of = {k: v for k in sinks for v in reversed(graph.kernels[k].writes) if rules.countable[v]}
    waiting: dict[int, list[int]] = {}  # root -> inputs that can be viewed
    needed: dict[int, None] = {}
    for k in roots:
        behind = {made_by[v] for v in graph.kernels[k].reads}
        missing = [s for s in token_of if s not in behind]
        options = [
            v
            for v in dict.fromkeys(rules.slots[k])
            if rules.ranks[v] >= 0 and (made_by[v] < 0 or stages[made_by[v]] < stages[k])  # made before the barrier
        ]
        if missing and options:
            waiting[k] = options
            needed.update(dict.fromkeys(missing))
    readers: dict[int, int] = {}
    sink_values = {v for s in sinks for v in graph.kernels[s].writes}
    while waiting:  # greedy cover: the value that most waiting roots read, results of the last stage first
        counts: dict[int, int] = {}
        for options in waiting.values():
            for v in options:
                counts[v] = counts.get(v, 0) + 1
        chosen = max(counts, key=lambda v: (counts[v], v in sink_values, not graph.external[v], -v))
        covered = [k for k, options in waiting.items() if chosen in options]
        readers.update(dict.fromkeys(covered, chosen))
        for k in covered:
            del waiting[k]
    viewed = set(readers.values())
    single = viewed.pop() if len(viewed) == 1 else None
    tokens = [token_of[s] for s in needed if single is None or single not in graph.kernels[s].writes]
    return _Barrier(tokens, readers) if tokens else None


def _barriers(
    graph: RuntimeGraph, schedule: Sequence[int], stages: Sequence[int], rules: StageRules, made_by: Sequence[int]
) -> dict[int, _Barrier]:
    roots, sinks = _roots_and_sinks(graph, schedule, stages, rules, made_by)
    barriers: dict[int, _Barrier] = {}
    frontier: list[int] = []  # what must be complete before the stage's roots run
    for stage in range(stages[schedule[-1]] + 1 if schedule else 0):
        members = roots.get(stage, [])
        barrier = _barrier(graph, members, frontier, rules, made_by, stages) if members and frontier else None
        if barrier is not None:
            barriers[stage] = barrier
        # A stage without roots holds nothing back: what it should have waited for is still to be waited for.
        frontier = sinks.get(stage, []) if members else frontier + sinks.get(stage, [])
    return barriers


class _Builder:
    """Appends kernels to a layout."""

    def __init__(self, graph: RuntimeGraph, stages: Sequence[int], rules: StageRules) -> None:
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
        self.layout = Layout(stages, laid)
        self.rules = rules
        self.free_token = -1
        self.free_shapes: dict[int, int] = {}  # rank -> shape that depends on a graph input only

    def add(self, kind: AddedKind, source: int, operands: tuple[int, ...] = ()) -> int:
        """Adds a node and returns the id of what it makes."""
        laid = self.layout.graph
        if kind in ("view", "probe"):
            size = 0 if laid.external[source] else laid.sizes[source]
            made = laid.add_value(laid.names[source], size, laid.layouts[source], shape=laid.shapes[source])
            kernel = Kernel((source, *operands), (made,), alias=((source, made),))
        else:
            made = laid.add_value("", _TOKEN_BYTES, UNKNOWN_LAYOUT)
            counts = kind in ("token", "dim")
            kernel = Kernel((source,) if counts else operands, (made,), first=counts)
        laid.kernels.append(kernel)
        self.layout.rows.append(Added(kind, made, source, operands))
        return made

    def free_shape(self, v: int) -> int:
        """A shape for views of the rank of `v` that waits for nothing but a graph input; needs `free_source`."""
        rank = self.rules.ranks[v]
        if self.free_token < 0:
            self.free_token = self.add("token", self.rules.free_source)
        if rank not in self.free_shapes:
            self.free_shapes[rank] = self.add("shape", v, (self.free_token,))
        return self.free_shapes[rank]

    def token(self, v: int) -> int:
        """Something to key on that exists once `v` does."""
        if not self.rules.probes or self.rules.ranks[v] < 1 or self.rules.free_source < 0:
            return self.add("token", v)
        return self.add("dim", self.add("probe", v, (self.free_shape(v),)))

    def keep(self, k: int, kernel: Kernel) -> None:
        """Adds an original kernel, reading its views."""
        self.layout.graph.kernels.append(_swapped(kernel, self.layout.swaps.get(k, {})))
        self.layout.rows.append(k)

    def barrier(self, barrier: _Barrier) -> None:
        """Adds a barrier's nodes and lets its readers read the views."""
        tokens = tuple(self.token(v) for v in barrier.tokens)
        viewed = dict.fromkeys(barrier.readers.values())
        views = {v: self.add("view", v, (self.add("shape", v, tokens),)) for v in viewed}
        for k, v in barrier.readers.items():
            self.layout.swaps.setdefault(k, {})[v] = views[v]


def lay_out(graph: RuntimeGraph, schedule: Sequence[int], placement: Placement, rules: StageRules) -> Layout:
    """The file for `schedule`.

    Args:
        graph: the file without barriers.
        schedule: its kernels in the order to keep.
        placement: where barriers and releases stand.
        rules: what they may touch.
    """
    made_by = graph.producers()
    stages = _stage_numbers(schedule, placement.starts)
    barriers = _barriers(graph, schedule, stages, rules, made_by)
    if placement.entries and rules.free_source >= 0:
        barriers[0] = _Barrier([rules.free_source], _entry_readers(schedule, stages, rules, placement.entries))
    builder = _Builder(graph, stages, rules)
    released = _ReleaseViews(builder, placement.releases, made_by)
    open_stage = -1
    constants = [k for k in schedule if not graph.kernels[k].reads and not graph.kernels[k].writes]
    for k in constants:  # the runtime's orders do not say where they stand; a barrier may view what they make
        builder.keep(k, graph.kernels[k])
    placed = set(constants)
    for k in schedule:
        if k in placed:
            continue
        if stages[k] != open_stage:
            open_stage = stages[k]
            if open_stage in barriers:
                builder.barrier(barriers[open_stage])
        released.before(k)
        builder.keep(k, graph.kernels[k])
        released.after(k)
    if rules.private:
        _make_private(builder.layout, len(graph.names))
    return builder.layout


class _ReleaseViews:
    """Places the views of releases: right behind what makes the value, so that the runtime's order stays the same."""

    def __init__(self, builder: _Builder, releases: Mapping[int, tuple[int, ...]], made_by: Sequence[int]) -> None:
        self.builder = builder
        self.behind: dict[int, list[tuple[int, int]]] = {}  # producer -> (reader, value)
        self.external: dict[int, list[int]] = {}
        for k, values in releases.items():
            for v in values if builder.rules.free_source >= 0 else ():
                if made_by[v] >= 0:
                    self.behind.setdefault(made_by[v], []).append((k, v))
                else:
                    self.external.setdefault(k, []).append(v)

    def _view(self, k: int, v: int) -> None:
        swaps = self.builder.layout.swaps.setdefault(k, {})
        if v not in swaps:
            swaps[v] = self.builder.add("view", v, (self.builder.free_shape(v),))

    def before(self, k: int) -> None:
        """Views of external values stand in front of their reader."""
        for v in self.external.get(k, ()):
            self._view(k, v)

    def after(self, k: int) -> None:
        """Views of what `k` makes."""
        for reader, v in self.behind.get(k, ()):
            self._view(reader, v)


def _entry_readers(
    schedule: Sequence[int], stages: Sequence[int], rules: StageRules, entries: Sequence[int]
) -> dict[int, int]:
    """The kernels of the first stage that read an entry, each with the first one that it reads."""
    wanted = set(entries)
    reading = {k: [v for v in rules.slots[k] if v in wanted] for k in schedule if stages[k] == 0}
    return {k: values[0] for k, values in reading.items() if values}


def _swapped(kernel: Kernel, views: Mapping[int, int]) -> Kernel:
    """`kernel` reading views where it read their values."""
    if not views:
        return kernel

    def swap(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((views.get(a, a), b) for a, b in pairs)

    return replace(
        kernel,
        reads=tuple(views.get(v, v) for v in kernel.reads),
        alias=swap(kernel.alias),
        inplace=swap(kernel.inplace),
    )


def _make_private(layout: Layout, views_from: int) -> None:
    """Gives the values behind views the layouts that the runtime cannot match with those in front of them.

    The dims of a view are symbols of its own. What ONNX infers behind it: an elementwise operator takes the known dim
    where a symbol meets one, keeps a symbol that meets itself, and knows nothing where two symbols meet; others carry
    a symbol on. (In outline: operators whose result does not have the symbol's dim are not told apart.)
    """
    laid = layout.graph
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
