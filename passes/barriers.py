"""Additions: what makes the runtime keep to a schedule, without changing a value.

- A **hold** makes a node wait for a result that it does not read. It reads one of its inputs through a view that is
  keyed on the result::

      token = Size(result)
      shape = Min(token, zeros[rank X])      always zeros: Reshape copies the dim where the shape says 0
      view  = Reshape(X, shape)              view == X, in X's buffer; not mergeable with X by the runtime

  On CUDA, Size makes the host wait for the device, and Shape does not, but Shape of a tensor of known dims is folded.
  So the token there is Shape(probe, start=0, end=1) of a view (probe) of the result whose shape is keyed on a graph
  input.
- A recompute **clone** must differ from its original (the runtime merges equal nodes): one of its inputs is a view in
  any case, keyed on a graph input where it is not held.
- A **marker** is a Size that nothing reads (of a value's token where there is one: two Sizes of the value would be
  merged). The default order searches depth-first from the last leaf of the file to
  the first: markers at the end of the file, in reverse schedule order, make what they read run in its turn. A result
  that nothing reads, which the runtime keeps to the end of the run, is released behind its marker (a **drain**).
- A **veil** is a view that all readers of a value read: behind it the runtime does not know the dims, so it holds no
  dead buffer for what is made from it.

A `Layout` is the file for a schedule in integers, so that many can be simulated without building a model; `emission`
writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, Kernel, RuntimeGraph

AddedKind = Literal["token", "dim", "shape", "view", "probe", "marker"]

__all__ = ["TOKEN_BYTES", "Added", "Layout", "Placement", "Rules", "lay_out", "marked_values"]

TOKEN_BYTES = 64
_RANK_NODES = 3  # zeros, shape and view: what a scalar may need that no other value does
_NEAR = 8  # places: clones that stand nearer may share the views that keep them apart from their originals


@dataclass(frozen=True)
class Rules:
    """What additions may touch.

    Attributes:
        ranks: per value its rank; -1 where it is no tensor, its rank is unknown, or it must stay a constant: then no
            view of it can be written.
        countable: per value whether its Size can be taken (a tensor).
        slots: per kernel the values that it reads through its own input slots (captured ones cannot be rerouted).
        scalars: per kernel the constants of rank 0 of which it may read a view all the same.
        small_output: per kernel whether running it early costs next to nothing.
        small_all: per kernel whether running it late costs next to nothing.
        clone: per kernel whether it is a recompute clone.
        twins: per kernel a number that clones and their original share; 0 for all others.
        small_bytes: what is next to nothing.
        bodies: kernel -> the kernels that the runtime puts in its place.
        probes: whether tokens are taken by Shape of a probe instead of Size.
        free_source: a tensor among the graph inputs that is no constant, or -1.
    """

    ranks: Sequence[int]
    countable: Sequence[bool]
    slots: Sequence[Sequence[int]]
    scalars: Mapping[int, Sequence[int]]
    small_output: Sequence[bool]
    small_all: Sequence[bool]
    clone: Sequence[bool]
    twins: Sequence[int]
    small_bytes: int = 0
    bodies: Mapping[int, Sequence[Kernel]] = field(default_factory=dict)
    probes: bool = False
    free_source: int = -1

    def options(self, k: int) -> list[int]:
        """Values of which kernel `k` may read a view."""
        return [v for v in dict.fromkeys(self.slots[k]) if self.ranks[v] >= 0 or v in self.scalars.get(k, ())]


@dataclass(frozen=True)
class Placement:
    """Which additions there are.

    Attributes:
        holds: kernel -> the value that it waits for.
        markers: kernels that the default order runs in their turn.
        drains: values that nothing reads and that are not to be kept.
        veils: values that all their readers read through a view.
    """

    holds: Mapping[int, int] = field(default_factory=dict)
    markers: Collection[int] = frozenset()
    drains: Collection[int] = frozenset()
    veils: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Added:
    """A node that a layout adds.

    Attributes:
        kind: token (Size), dim (the first dim, as a token), shape, view, probe (a view that only a dim reads), or
            marker (a Size that nothing reads).
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
        placement: what was asked for.
        graph: the file with the added nodes in it.
        rows: per kernel of `graph` the kernel that it stands for (several, one after the other, for a body), or the
            node that was added.
        swaps: kernel -> {value: view that it reads instead}.
    """

    placement: Placement
    graph: RuntimeGraph
    rows: list[int | Added] = field(default_factory=list)
    swaps: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def added(self) -> int:
        """How many nodes the layout adds."""
        return sum(isinstance(row, Added) for row in self.rows)


class _Builder:
    """Appends kernels to a layout."""

    def __init__(self, graph: RuntimeGraph, placement: Placement, rules: Rules) -> None:
        self.layout = Layout(placement, graph.with_kernels([]))
        self.kernels, self.rules = graph.kernels, rules
        self.tokens: dict[int, int] = {}  # value -> token
        self.shapes: dict[tuple[int, int], int] = {}  # (value that it waits for, rank) -> shape
        self.views: dict[tuple[int, int, int], int] = {}  # (value, value that it waits for, views between) -> view

    def add(self, kind: AddedKind, source: int, operands: tuple[int, ...] = ()) -> int:
        """Adds a node and returns the id of what it makes."""
        laid = self.layout.graph
        if kind in ("view", "probe"):
            size = 0 if laid.external[source] else laid.sizes[source]
            made = laid.add_value(laid.names[source], size, laid.layouts[source], shape=laid.shapes[source])
            kernel = Kernel((source, *operands), (made,), alias=((source, made),))
        else:
            made = laid.add_value("", TOKEN_BYTES, UNKNOWN_LAYOUT)
            counts = kind in ("token", "dim", "marker")
            kernel = Kernel((source,) if counts else operands, (made,), first=counts)
        laid.kernels.append(kernel)
        self.layout.rows.append(Added(kind, made, source, operands))
        return made

    def token(self, v: int) -> int:
        """Something to key on that exists once `v` does."""
        if v not in self.tokens:
            rules = self.rules
            if not rules.probes or v == rules.free_source or rules.ranks[v] < 1 or rules.free_source < 0:
                self.tokens[v] = self.add("token", v)
            else:
                probe = self.add("probe", v, (self.shape(rules.free_source, v),))
                self.tokens[v] = self.add("dim", probe)
        return self.tokens[v]

    def shape(self, awaited: int, v: int) -> int:
        """A shape for views of the rank of `v` that waits for `awaited`."""
        key = awaited, max(self.rules.ranks[v], 0)
        if key not in self.shapes:
            token = self.token(awaited)
            self.shapes[key] = self.add("shape", v, (token,))
        return self.shapes[key]

    def view(self, v: int, awaited: int = -1, between: int = 0) -> int:
        """A view of `v` that waits for `awaited`, or for a graph input only, with so many such views in between."""
        awaited = awaited if awaited >= 0 else self.rules.free_source
        key = v, awaited, between
        if key not in self.views:
            source = self.view(v, awaited, between - 1) if between else v
            shape = self.shape(awaited, v)
            self.views[key] = self.add("view", source, (shape,))
        return self.views[key]

    def swap(self, k: int, v: int, view: int) -> None:
        """Lets kernel `k` read `view` instead of `v`."""
        self.layout.swaps.setdefault(k, {})[v] = view

    def keep(self, k: int) -> None:
        """Adds an original kernel (or what the runtime puts in its place), reading its views."""
        for kernel in self.rules.bodies.get(k, (self.kernels[k],)):
            self.layout.graph.kernels.append(_swapped(kernel, self.layout.swaps.get(k, {})))
            self.layout.rows.append(k)


def lay_out(graph: RuntimeGraph, schedule: Sequence[int], placement: Placement, rules: Rules) -> Layout:
    """The file for `schedule`.

    Args:
        graph: the file without additions.
        schedule: its kernels in the order to keep.
        placement: which additions there are.
        rules: what they may touch.
    """
    builder = _Builder(graph, placement, rules)
    veils = _Veils(builder, placement.veils)
    holds = _Holds(builder, schedule, placement.holds)
    constants = [k for k in schedule if not graph.kernels[k].reads and not graph.kernels[k].writes]
    for k in constants:  # the runtime's orders do not say where they stand; a view may be of what they make
        builder.keep(k)
    placed = set(constants)
    for k in schedule:
        if k in placed:
            continue
        holds.before(k)
        veils.before(k)
        builder.keep(k)
        veils.after(k)
    marked: list[int] = []
    for k in schedule:
        marked += marked_values(graph, k, placement.drains, rules, marked=k in placement.markers)
    for v in reversed(marked):
        builder.add("marker", builder.tokens.get(v, v))
    return builder.layout


def marked_values(graph: RuntimeGraph, k: int, drains: Collection[int], rules: Rules, *, marked: bool) -> list[int]:
    """What markers read of kernel `k`: all that is drained, and, if it is marked, the first that has a Size.

    Where something is drained, that one is needed in a body only, whose kernels run one by one.
    """
    writes = graph.kernels[k].writes
    drained = [v for v in writes if v in drains]
    if not marked or (drained and k not in rules.bodies):
        return drained
    return drained + [v for v in writes if rules.countable[v] and v not in drains][:1]


_View = tuple[int, int, int]  # what is viewed, what the view waits for (-1: a graph input), such views in between


class _Holds:
    """Lets held kernels, and clones that the runtime would merge with their originals, read views.

    Small clones may be merged; what reads them then reads what the original makes.
    """

    def __init__(self, builder: _Builder, schedule: Sequence[int], holds: Mapping[int, int]) -> None:
        self.builder, self.schedule = builder, schedule
        rules, graph = builder.rules, builder.layout.graph
        self.wanted: dict[int, _View] = {}
        waiting: dict[int, dict[int, list[int]]] = {}  # awaited value -> kernel -> inputs that can be viewed
        for k in schedule:
            if holds.get(k, -1) >= 0 and rules.options(k):
                waiting.setdefault(holds[k], {})[k] = rules.options(k)
        for awaited, readers in waiting.items():
            self.wanted.update((k, (v, awaited, 0)) for k, v in _cover(graph, readers, rules).items())
        self.twins = [k for k in schedule if rules.twins[k]] if rules.free_source >= 0 else []
        for group in _groups(self._merged(), schedule):
            self.wanted.update((k, (v, -1, 0)) for k, v in _cover(graph, group, rules).items())
        self._tell_apart()

    def _must_differ(self, k: int) -> bool:
        rules = self.builder.rules
        return rules.clone[k] and not rules.small_output[k] and bool(rules.options(k))

    def _merged(self) -> dict[int, list[int]]:
        """Clones without a view that would be merged and must not be -> their inputs that can be viewed."""
        found: dict[int, list[int]] = {}
        numbers = _Numbers(self.builder)
        for k in self.twins:
            kind = numbers.kind_of(k, self.wanted.get(k))
            if kind in numbers.first and k not in self.wanted and self._must_differ(k):
                found[k] = self.builder.rules.options(k)
            else:
                numbers.take(k, kind)
        return found

    def _tell_apart(self) -> None:
        """Clones that would be merged all the same get one more view in between, until none would."""
        numbers = _Numbers(self.builder)
        for k in self.twins:
            kind = numbers.kind_of(k, self.wanted.get(k))
            while kind in numbers.first and self._must_differ(k):
                value, awaited, between = self.wanted.get(k, (self.builder.rules.options(k)[0], -1, -1))
                self.wanted[k] = value, awaited, between + 1
                kind = numbers.kind_of(k, self.wanted[k])
            numbers.take(k, kind)

    def before(self, k: int) -> None:
        """The view that `k` is held by."""
        if k in self.wanted:
            v, awaited, between = self.wanted[k]
            self.builder.swap(k, v, self.builder.view(v, awaited, between))


class _Numbers:
    """Values as the runtime numbers them to find equal nodes (common_subexpression_elimination.cc).

    Nodes of one kind that read values of equal numbers are merged into the first of them. Kernels that are no twins are
    taken to equal no other.
    """

    def __init__(self, builder: _Builder) -> None:
        self.kernels, self.rules = builder.kernels, builder.rules
        self.veils = builder.layout.placement.veils
        self.number: dict[int, int] = {}  # of merged values, that of the first
        self.first: dict[tuple[object, ...], int] = {}  # kind of node -> the first of its kind

    def kind_of(self, k: int, view: _View | None) -> tuple[object, ...]:
        """What is equal for kernels that would be merged; `view`: what `k` reads instead of a value."""
        return self.rules.twins[k], *(self._read(v, view) for v in self.kernels[k].reads)

    def _read(self, v: int, view: _View | None) -> object:
        number = self.number.get(v, v)
        if view is not None and view[0] == v:
            awaited = view[1] if view[1] >= 0 else self.rules.free_source
            return number, self.number.get(awaited, awaited), view[2]
        return (number, self.rules.free_source, 0) if v in self.veils else number

    def take(self, k: int, kind: tuple[object, ...]) -> None:
        """Kernel `k` is of this kind: if it is not the first, it makes what the first makes."""
        first = self.first.setdefault(kind, k)
        if first != k:
            pairs = zip(self.kernels[first].writes, self.kernels[k].writes, strict=False)
            self.number.update((b, self.number.get(a, a)) for a, b in pairs)


def _groups(readers: Mapping[int, list[int]], schedule: Sequence[int]) -> list[dict[int, list[int]]]:
    """Kernels that choose their views together: those that stand near to each other."""
    groups: list[dict[int, list[int]]] = []
    last = -_NEAR
    for at, k in enumerate(schedule):
        if k in readers:
            if at - last >= _NEAR:
                groups.append({})
            groups[-1][k] = readers[k]
            last = at
    return groups


def _cover(graph: RuntimeGraph, waiting: Mapping[int, Sequence[int]], rules: Rules) -> dict[int, int]:
    """Per kernel the one of its values to view, with few nodes in all: the value that most kernels read comes first."""
    readers: dict[int, int] = {}
    left = dict(waiting)
    while left:
        counts: dict[int, int] = {}
        for options in left.values():
            for v in options:
                counts[v] = counts.get(v, 0) + 1
        saved = {v: n - _RANK_NODES * (rules.ranks[v] < 0) for v, n in counts.items()}
        chosen = max(saved, key=lambda v: (saved[v], not graph.external[v], -v))
        covered = [k for k, options in left.items() if chosen in options]
        readers.update(dict.fromkeys(covered, chosen))
        for k in covered:
            del left[k]
    return readers


class _Veils:
    """Places views for all readers of a value: right behind what makes it, so that the runtime's order stays the same.

    A reader that reads another view of the value already keeps that one.
    """

    def __init__(self, builder: _Builder, veils: Collection[int]) -> None:
        self.builder = builder
        self.wanted = frozenset(veils if builder.rules.free_source >= 0 else ())

    def before(self, k: int) -> None:
        """The views that `k` reads; of external values they stand in front of their first reader."""
        for v in self.wanted.intersection(self.builder.rules.slots[k]):
            if v not in self.builder.layout.swaps.get(k, {}):
                self.builder.swap(k, v, self.builder.view(v))

    def after(self, k: int) -> None:
        """Views of what `k` makes."""
        for v in self.builder.kernels[k].writes:
            if v in self.wanted:
                self.builder.view(v)


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
