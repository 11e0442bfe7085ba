"""How ONNX Runtime orders the nodes of a file and reuses memory, as pure functions.

Sources: onnxruntime/core/graph/graph.cc (reverse depth-first and priority-based topological sort, the training build's
hoisting of Shape and Size) and onnxruntime/core/framework/allocation_planner.cc (Alias, MayInplace, the free list,
release after the last use). Single stream, arena and memory pattern off.

Three stages:
1. `RuntimeGraph`: the file as the runtime sees it, in integers (values, buffers' layouts, kernels).
2. `default_order`, `priority_order`: the executed order of its kernels.
3. `simulate`: the allocation plan for one order, and the live bytes at each step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.liveness import Lifetime, live_profile, peak_of
from onnx_sublinear.ops.traits import Target, aliases_of, inplace_of, is_expanded, traits_of
from onnx_sublinear.ops.workspace import run_overhead_bytes, workspace_bytes
from onnx_sublinear.sizes import TensorSizes, TensorType, element_bits

__all__ = [
    "Kernel",
    "RuntimeGraph",
    "Simulation",
    "default_order",
    "executed_orders",
    "lower_bound",
    "priority_order",
    "runtime_graph",
    "simulate",
]

ALLOCATION_GRANULE_BYTES = 64  # ORT's CPU allocator aligns to the cache line
UNKNOWN_LAYOUT = -1  # below it: layouts of scalars, which may be in-place but never come from the free list


@dataclass(slots=True)
class Kernel:
    """One node as the runtime sees it; numbers are value ids.

    Attributes:
        reads: values read, one entry per input slot (repetitions count as uses), then captured ones.
        writes: values made; absent outputs left out.
        alias: (input, output) values that always share a buffer.
        inplace: (input, output) values that share it if this is the input's last use and the layouts are equal.
        workspace_bytes: scratch while it runs.
        first: Shape or Size, which the runtime hoists.
        broadcast: elementwise with the inputs' shapes made one.
        late: the runtime puts other nodes in its place, which count as the last of the file.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alias: tuple[tuple[int, int], ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    first: bool = False
    broadcast: bool = False
    late: bool = False


@dataclass
class RuntimeGraph:
    """The file in integers. Value ids index `names`, `sizes`, `shapes`, `layouts`, `external`, `is_output`.

    Attributes:
        kernels: nodes in file order (Constant nodes stay in as kernels that make nothing, so positions agree).
        names: tensor names.
        sizes: bytes of each value (0 where unknown or external).
        shapes: equal numbers mean equal dims; -1 where unknown.
        layouts: equal numbers mean "same size" in the allocation planner's sense; UNKNOWN_LAYOUT never matches.
        external: values that no kernel makes (inputs, initializers, constants).
        is_output: graph outputs.
        frame_bytes: what the run itself holds beside tensors.
        value_frame_bytes: the same for each value.
    """

    kernels: list[Kernel] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    layouts: list[int] = field(default_factory=list)
    external: list[bool] = field(default_factory=list)
    is_output: list[bool] = field(default_factory=list)
    frame_bytes: int = 0
    value_frame_bytes: int = 0

    def add_value(
        self, name: str, size_bytes: int, layout: int, *, shape: int = -1, external: bool = False, output: bool = False
    ) -> int:
        """Adds a value and returns its id."""
        self.names.append(name)
        self.sizes.append(size_bytes)
        self.shapes.append(shape)
        self.layouts.append(layout)
        self.external.append(external)
        self.is_output.append(output)
        return len(self.names) - 1

    def producers(self) -> list[int]:
        """Per value the position of its kernel, or -1."""
        made_by = [-1] * len(self.names)
        for position, kernel in enumerate(self.kernels):
            for value in kernel.writes:
                made_by[value] = position
        return made_by


def _layout_key(t: TensorType | None) -> tuple[int, tuple[int | str, ...]] | None:
    """What two tensors must share to be of the "same size"; None where they never are.

    Unknown dims never match; a symbol matches itself.
    """
    if t is None or t.shape is None:
        return None
    bits = element_bits(t.elem_type)
    dims = tuple(d for d in t.shape if d is not None and d != "")
    return None if bits is None or len(dims) != len(t.shape) else (bits, dims)


def rounded(size_bytes: int) -> int:
    """`size_bytes` as the allocator takes it from the system."""
    return -(-size_bytes // ALLOCATION_GRANULE_BYTES) * ALLOCATION_GRANULE_BYTES


def runtime_graph(
    index: GraphIndex,
    sizes: TensorSizes,
    *,
    visible: Mapping[str, TensorType] | None = None,
    target: Target = "cpu",
    training: bool = False,
) -> RuntimeGraph:
    """The index in the runtime's terms.

    Args:
        index: the model.
        sizes: bytes of its tensors.
        visible: the types that the runtime knows (they decide reuse); default: those of `sizes`.
        target: whose in-place table holds.
        training: the training build's kernels.
    """
    known = sizes.types if visible is None else visible
    unused = sum(name not in index.readers for name in index.inputs)
    graph = RuntimeGraph(
        frame_bytes=run_overhead_bytes(unused, len(index.inputs) + len(index.outputs)),
        value_frame_bytes=run_overhead_bytes(1),
    )
    ids: dict[str, int] = {}
    layouts: dict[tuple[int, tuple[int | str, ...]], int] = {}
    shapes: dict[tuple[int | str, ...], int] = {}
    constants = {o for node in index.nodes if node.op_type == "Constant" for o in node.output}

    def value(name: str) -> int:
        number = ids.get(name)
        if number is None:
            key = _layout_key(known.get(name))
            layout = UNKNOWN_LAYOUT
            if key is not None:
                layout = layouts.setdefault(key, len(layouts)) if key[1] else UNKNOWN_LAYOUT - key[0]
            external = name in constants or name not in index.producer
            size = 0 if external else rounded(sizes.bytes_of(name) or 0)
            number = ids[name] = graph.add_value(
                name,
                size,
                layout,
                shape=-1 if key is None else shapes.setdefault(key[1], len(shapes)),
                external=external,
                output=name in index.output_set and not external,
            )
        return number

    opset = index.opset.get("", 1)
    bound = sizes.bound
    for position, node in enumerate(index.nodes):
        if node.op_type == "Constant":
            graph.kernels.append(Kernel((), ()))
            continue
        reads = [value(n) for n in node.input if n] + [value(n) for n in index.captures.get(position, ())]
        graph.kernels.append(
            Kernel(
                tuple(reads),
                tuple([value(n) for n in node.output if n]),
                tuple([(value(a), value(b)) for a, b in aliases_of(node)]),
                tuple([(value(a), value(b)) for a, b in inplace_of(node, target)]),
                workspace_bytes(
                    node,
                    [bound.get(n) for n in node.input],
                    [bound.get(n) for n in node.output],
                    opset,
                    training=training,
                )
                if target == "cpu"
                else 0,
                traits_of(node).first,
                traits_of(node).broadcast,
                is_expanded(node, index, training=training),
            )
        )
    return graph


def _edges(graph: RuntimeGraph) -> list[list[int]]:
    """Per kernel the producers of what it reads, one entry per slot."""
    made_by = graph.producers()
    return [[made_by[v] for v in kernel.reads if made_by[v] >= 0] for kernel in graph.kernels]


def _places(graph: RuntimeGraph, rank: Sequence[int] | None) -> Sequence[int]:
    """Per kernel its place in the file (`rank`, else its position), those put in place of others behind all."""
    count = len(graph.kernels)
    places: Sequence[int] = range(count) if rank is None else rank
    if any(kernel.late for kernel in graph.kernels):
        return [place + count * kernel.late for place, kernel in zip(places, graph.kernels, strict=True)]
    return places


def default_order(graph: RuntimeGraph, *, rank: Sequence[int] | None = None, training_build: bool = False) -> list[int]:
    """The order of ExecutionOrder.DEFAULT: post-order of a depth-first search from the leaves, last leaf first.

    Args:
        graph: the file.
        rank: position of each kernel in the file where it differs from its place in `graph.kernels`.
        training_build: the training build moves Shape and Size nodes directly behind their producer.
    """
    edges = _edges(graph)
    count = len(edges)
    place = _places(graph, rank)
    by_rank: Sequence[int] = place if isinstance(place, range) else sorted(range(count), key=place.__getitem__)
    is_leaf = [True] * count
    for producers in edges:
        producers.sort(key=place.__getitem__)
        for p in producers:
            is_leaf[p] = False
    stack = [k for k in by_rank if is_leaf[k]]
    state = bytearray(count)  # 0 new, 1 entered
    order: list[int] = []
    while stack:
        k = stack.pop()
        if k < 0:
            order.append(~k)
            continue
        if state[k]:
            continue
        state[k] = 1
        stack.append(~k)
        stack.extend(p for p in edges[k] if not state[p])
    return _hoist_shapes(graph, edges, order, by_rank) if training_build else order


def _hoist_shapes(graph: RuntimeGraph, edges: list[list[int]], order: list[int], by_rank: Sequence[int]) -> list[int]:
    followers: dict[int, list[int]] = {}
    for k in by_rank:
        if graph.kernels[k].first and edges[k]:
            followers.setdefault(edges[k][0], []).append(k)
    if not followers:
        return order
    hoisted: list[int] = []
    placed = bytearray(len(order))
    for k in order:
        for next_kernel in (k, *followers.get(k, ())) if not placed[k] else ():
            hoisted.append(next_kernel)
            placed[next_kernel] = 1
    return hoisted


def priority_order(graph: RuntimeGraph, *, rank: Sequence[int] | None = None) -> list[int]:
    """The order of ExecutionOrder.PRIORITY_BASED: Kahn's algorithm, Shape and Size first, then by place in the file."""
    edges = _edges(graph)
    waiting = [len(e) for e in edges]
    consumers: list[list[int]] = [[] for _ in edges]
    for k, producers in enumerate(edges):
        for p in producers:
            consumers[p].append(k)
    place = _places(graph, rank)
    kernels = graph.kernels
    ready = [(not kernels[k].first, place[k], k) for k, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        k = heapq.heappop(ready)[2]
        order.append(k)
        for c in consumers[k]:
            waiting[c] -= 1
            if waiting[c] == 0:
                heapq.heappush(ready, (not kernels[c].first, place[c], c))
    return order


def executed_orders(
    graph: RuntimeGraph, *, rank: Sequence[int] | None = None, training: bool = False
) -> dict[str, list[int]]:
    """The orders that a user's session can have, by name: "default" and "priority"."""
    return {
        "default": default_order(graph, rank=rank, training_build=training),
        "priority": priority_order(graph, rank=rank),
    }


@dataclass(frozen=True)
class Simulation:
    """The allocation plan for one order.

    Attributes:
        peak_bytes: the largest live bytes, workspaces and the run's frame included.
        profile: live bytes at each step, the same included.
        lifetimes: the buffers.
        buffer_of: per value the value whose buffer it lives in (itself, if it has its own; -1 for externals).
    """

    peak_bytes: int
    profile: list[int]
    lifetimes: list[Lifetime]
    buffer_of: list[int]

    @property
    def peak_step(self) -> int:
        """The first step at which the live bytes are largest."""
        return self.profile.index(self.peak_bytes) if self.profile else 0


def _assign_buffers(graph: RuntimeGraph, order: Sequence[int], reuse: bool) -> tuple[list[int], list[bool]]:
    """The allocation planner's walk: per value its buffer, and per value whether it is an allocation of its own."""
    kernels, layouts, external, is_output = graph.kernels, graph.layouts, graph.external, graph.is_output
    count = len(graph.names)
    uses = [1 if external[v] or is_output[v] else 0 for v in range(count)]
    is_read = bytearray(count)
    for kernel in kernels:
        for v in kernel.reads:
            uses[v] += 1
            is_read[v] = 1
        for v in kernel.writes:
            uses[v] += 1
    buffer = list(range(count))
    own = [False] * count
    free: dict[int, list[int]] = {}
    for k in order:
        kernel = kernels[k]
        for out in kernel.writes:
            source = -1
            if not is_output[out]:
                for a, b in kernel.alias:
                    if b == out:
                        source = a
                layout = layouts[out]
                if source < 0 and layout != UNKNOWN_LAYOUT:
                    for a, b in kernel.inplace:
                        if b == out and layouts[a] == layout and uses[buffer[a]] == 1:
                            source = a
                            break
                    if source < 0 and reuse and layout > UNKNOWN_LAYOUT and is_read[out] and free.get(layout):
                        source = free[layout].pop()
            if source < 0:
                own[out] = True
            else:
                buffer[out] = buffer[source]
                uses[buffer[source]] += uses[out]
        for v in (*kernel.reads, *kernel.writes):
            root = buffer[v]
            uses[root] -= 1
            if uses[root] == 0 and layouts[root] > UNKNOWN_LAYOUT:
                free.setdefault(layouts[root], []).append(root)
    return buffer, own


def simulate(graph: RuntimeGraph, order: Sequence[int], *, reuse: bool = True) -> Simulation:
    """The allocation plan for `order` and its live bytes.

    A node's outputs are allocated before its inputs are released; a buffer is released after the last read of any
    value in it; a value that nothing reads is held to the end, as graph outputs are; externals are not counted.

    Args:
        graph: the file.
        order: kernel positions.
        reuse: SessionOptions.enable_mem_reuse: a dead buffer is held until a later tensor that was promised it.
    """
    buffer, own = _assign_buffers(graph, order, reuse)
    kernels, sizes = graph.kernels, graph.sizes
    steps = len(order)
    born = [-1] * len(buffer)
    last_read = [-1] * len(buffer)
    for step, k in enumerate(order):
        kernel = kernels[k]
        for v in kernel.writes:
            if own[v]:
                born[v] = step
        for v in kernel.reads:
            last_read[buffer[v]] = step
    lifetimes = [
        Lifetime(
            graph.names[v],
            sizes[v],
            born[v],
            steps if graph.is_output[v] or last_read[v] < 0 else last_read[v] + 1,
        )
        for v in range(len(buffer))
        if born[v] >= 0 and sizes[v]
    ]
    frame = graph.frame_bytes + graph.value_frame_bytes * len(graph.names)
    profile = live_profile(lifetimes, steps, [frame + kernels[k].workspace_bytes for k in order])
    located = [b if own[b] else -1 for b in buffer]
    return Simulation(peak_of(profile), profile, lifetimes, located)


def lower_bound(graph: RuntimeGraph) -> tuple[int, int]:
    """The largest bytes that any single node needs at once, and the position of that node (-1 without nodes).

    Inputs and outputs that share a buffer count once; externals do not count.
    """
    storage = list(range(len(graph.names)))
    best, where = 0, -1
    for position in priority_order(graph):
        node = graph.kernels[position]
        for a, b in node.alias:
            if not graph.is_output[b]:
                storage[b] = storage[a]
        shared = {b for a, b in node.inplace if graph.layouts[a] == graph.layouts[b] != UNKNOWN_LAYOUT}
        shared = {b for b in shared if not graph.is_output[b]}
        needed = {storage[v] for v in node.reads} | {storage[v] for v in node.writes if v not in shared}
        size = sum(graph.sizes[v] for v in needed) + node.workspace_bytes
        if size > best:
            best, where = size, position
    return best, where
