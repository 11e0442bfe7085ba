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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.liveness import Lifetime, peak_of
from onnx_sublinear.ops.traits import Target, aliases_of, inplace_of, is_expanded, traits_of
from onnx_sublinear.ops.workspace import run_overhead_bytes, scratch_on_heap, workspace_bytes
from onnx_sublinear.orders import ByPriority, DepthFirst
from onnx_sublinear.sizes import TensorSizes, TensorType, element_bits

__all__ = [
    "Kernel",
    "LayoutNumbers",
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
RELEASE_COUNT_BYTES = 4  # an atomic counter (StreamExecutionContext)
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
        late: 0, or the round in which the runtime makes it anew; such nodes count as the last of the file, round by
            round.
        on_heap: the workspace never comes from the session's arena.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alias: tuple[tuple[int, int], ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    first: bool = False
    broadcast: bool = False
    late: int = 0
    on_heap: bool = False


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
        release_frame_bytes: the same for each buffer that it releases.
        weights: bytes of each initializer and constant that is read.
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
    release_frame_bytes: int = 0
    weights: list[int] = field(default_factory=list)

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

    def with_kernels(self, kernels: list[Kernel]) -> RuntimeGraph:
        """Other kernels on the same values, whose lists are copies, so that values can be added."""
        return replace(
            self,
            kernels=kernels,
            names=list(self.names),
            sizes=list(self.sizes),
            shapes=list(self.shapes),
            layouts=list(self.layouts),
            external=list(self.external),
            is_output=list(self.is_output),
        )

    def frame_counting(self, least_bytes: int, released: int) -> int:
        """What the run itself holds, in blocks of at least `least_bytes` each.

        Args:
            least_bytes: smaller ones are left out.
            released: number of buffers that the run releases.
        """
        lists = (self.value_frame_bytes * len(self.names), self.release_frame_bytes * released)
        arguments = self.frame_bytes if self.frame_bytes >= 3 * least_bytes else 0  # three lists
        return arguments + sum(size for size in lists if size >= least_bytes)

    def unread(self) -> frozenset[int]:
        """Values that a kernel makes and that neither a kernel nor the caller reads."""
        read = {v for kernel in self.kernels for v in kernel.reads}
        made = (v for kernel in self.kernels for v in kernel.writes)
        return frozenset(v for v in made if v not in read and not self.is_output[v])

    def producers(self) -> list[int]:
        """Per value the position of its kernel, or -1."""
        made_by = [-1] * len(self.names)
        for position, kernel in enumerate(self.kernels):
            for value in kernel.writes:
                made_by[value] = position
        return made_by

    def edges(self) -> list[list[int]]:
        """Per kernel the producers of what it reads, one entry per slot."""
        made_by = self.producers()
        return [[made_by[v] for v in kernel.reads if made_by[v] >= 0] for kernel in self.kernels]


def _layout_key(t: TensorType | None) -> tuple[int, tuple[int | str, ...]] | None:
    """What two tensors must share to be of the "same size"; None where they never are.

    Unknown dims never match; a symbol matches itself.
    """
    if t is None or t.shape is None:
        return None
    bits = element_bits(t.elem_type)
    dims = tuple(d for d in t.shape if d is not None and d != "")
    return None if bits is None or len(dims) != len(t.shape) else (bits, dims)


class LayoutNumbers:
    """Numbers for dims and layouts: equal ones get the same number (`RuntimeGraph.shapes`, `RuntimeGraph.layouts`)."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int | str, ...], int] = {}
        self._layouts: dict[tuple[int, tuple[int | str, ...]], int] = {}

    def of(self, t: TensorType | None) -> tuple[int, int]:
        """The shape's and the layout's number."""
        key = _layout_key(t)
        if key is None:
            return -1, UNKNOWN_LAYOUT
        shape = self._shapes.setdefault(key[1], len(self._shapes))
        if not key[1]:
            return shape, UNKNOWN_LAYOUT - key[0]
        return shape, self._layouts.setdefault(key, len(self._layouts))


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
    settled: bool = False,
) -> RuntimeGraph:
    """The index in the runtime's terms.

    Args:
        index: the model.
        sizes: bytes of its tensors.
        visible: the types that the runtime knows (they decide reuse); default: those of `sizes`.
        target: whose in-place table holds.
        training: the training build's kernels.
        settled: the nodes are the runtime's own (`runtime_dump`): nothing is put in their place any more.
    """
    known = sizes.types if visible is None else visible
    unused = sum(name not in index.readers for name in index.inputs)
    graph = RuntimeGraph(
        frame_bytes=run_overhead_bytes(unused, len(index.inputs) + len(index.outputs)),
        value_frame_bytes=run_overhead_bytes(1),
        release_frame_bytes=RELEASE_COUNT_BYTES,
    )
    constants = {o for node in index.nodes if node.op_type == "Constant" for o in node.output}
    weights = [name for name in (*index.initializers, *constants) if name in index.readers]
    graph.weights = [sizes.bytes_of(name) or 0 for name in weights]
    ids: dict[str, int] = {}
    numbers = LayoutNumbers()

    def value(name: str) -> int:
        number = ids.get(name)
        if number is None:
            shape, layout = numbers.of(known.get(name))
            external = name in constants or name not in index.producer
            size = 0 if external else rounded(sizes.bytes_of(name) or 0)
            number = ids[name] = graph.add_value(
                name,
                size,
                layout,
                shape=shape,
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
                    outer=bound if position in index.captures else {},
                )
                if target == "cpu"
                else 0,
                traits_of(node).first,
                traits_of(node).broadcast,
                not settled and is_expanded(node, index, training=training),
                scratch_on_heap(node),
            )
        )
    return graph


def default_order(graph: RuntimeGraph, *, training_build: bool = False) -> list[int]:
    """The order of ExecutionOrder.DEFAULT: post-order of a depth-first search from the leaves, last leaf first.

    Args:
        graph: the file.
        training_build: the training build moves Shape and Size nodes directly behind their producer.
    """
    search = DepthFirst(graph)
    order = search.order()
    return _hoist_shapes(graph, search, order) if training_build else order


def _hoist_shapes(graph: RuntimeGraph, search: DepthFirst, order: list[int]) -> list[int]:
    followers: dict[int, list[int]] = {}
    for k in search.by_rank:
        if graph.kernels[k].first and search.edges[k]:
            followers.setdefault(search.edges[k][0], []).append(k)
    if not followers:
        return order
    hoisted: list[int] = []
    placed = bytearray(len(order))
    for k in order:
        for next_kernel in (k, *followers.get(k, ())) if not placed[k] else ():
            hoisted.append(next_kernel)
            placed[next_kernel] = 1
    return hoisted


def priority_order(graph: RuntimeGraph) -> list[int]:
    """The order of ExecutionOrder.PRIORITY_BASED: Kahn's algorithm, Shape and Size first, then by place in the file."""
    return ByPriority(graph).order()


def executed_orders(graph: RuntimeGraph, *, training: bool = False) -> dict[str, list[int]]:
    """The orders that a user's session can have, by name: "default" and "priority"."""
    return {
        "default": default_order(graph, training_build=training),
        "priority": priority_order(graph),
    }


@dataclass(frozen=True)
class Simulation:
    """The allocation plan for one order.

    Attributes:
        peak_bytes: the largest live bytes, workspaces and the run's frame included.
        profile: live bytes at each step, the same included.
        spans: per value that has a buffer of its own, the steps [start, end) in which that is held.
        buffer_of: per value the value whose buffer it lives in (itself, if it has its own; -1 for externals).
        scratch: kernel workspaces at each step.
        released: number of buffers that end before the run does.
        promises: (value, start, end): it takes over a dead buffer, which is held for it in the steps [start, end).
    """

    peak_bytes: int
    profile: list[int]
    spans: dict[int, tuple[int, int]]
    buffer_of: list[int]
    scratch: list[int] = field(default_factory=list)
    released: int = 0
    promises: list[tuple[int, int, int]] = field(default_factory=list)

    def peak_counting(self, graph: RuntimeGraph, least_bytes: int) -> int:
        """The peak, workspaces and frame included, of blocks of at least `least_bytes` each.

        A tracer that leaves out small blocks sees this figure.
        """
        delta = [0] * (len(self.profile) + 1)
        delta[0] = graph.frame_counting(least_bytes, self.released)
        for v, (start, end) in self.spans.items():
            if graph.sizes[v] >= least_bytes:
                delta[start] += graph.sizes[v]
                delta[end] -= graph.sizes[v]
        scratch = (size if size >= least_bytes else 0 for size in self.scratch)
        return max(map(sum, zip(accumulate(delta), scratch, strict=False)), default=0)

    def peak_of_blocks(self, graph: RuntimeGraph, least_bytes: int) -> int:
        """The peak with blocks below `least_bytes` left out: the system does not see these come and go."""
        delta = [0] * (len(self.profile) + 1)
        for v, (start, end) in self.spans.items():
            if graph.sizes[v] >= least_bytes:
                delta[start] += graph.sizes[v]
                delta[end] -= graph.sizes[v]
        return max(accumulate(delta), default=0)

    def lifetimes(self, graph: RuntimeGraph) -> list[Lifetime]:
        """The buffers that have a size."""
        return [
            Lifetime(graph.names[v], graph.sizes[v], start, end)
            for v, (start, end) in self.spans.items()
            if graph.sizes[v]
        ]


def _use_counts(graph: RuntimeGraph) -> tuple[list[int], bytearray]:
    """Per value how often it is used (made, read per slot, held from outside), and whether any kernel reads it."""
    uses = [int(external or output) for external, output in zip(graph.external, graph.is_output, strict=True)]
    is_read = bytearray(len(uses))
    for kernel in graph.kernels:
        for v in kernel.reads:
            uses[v] += 1
            is_read[v] = 1
        for v in kernel.writes:
            uses[v] += 1
    return uses, is_read


def _source_of(graph: RuntimeGraph, kernel: Kernel, out: int, uses: Sequence[int], buffer: Sequence[int]) -> int:
    """The input whose buffer `out` shares, as a view or in-place; -1 where it shares none."""
    for a, b in kernel.alias:
        if b == out:
            return a
    layouts = graph.layouts
    for a, b in kernel.inplace:
        if b == out and layouts[a] == layouts[out] != UNKNOWN_LAYOUT and uses[buffer[a]] == 1:
            return a
    return -1


def simulate(graph: RuntimeGraph, order: Sequence[int], *, reuse: bool = True) -> Simulation:
    """The allocation plan for `order` and its live bytes.

    A node's outputs are allocated before its inputs are released; a buffer is released after the last read of any
    value in it; a value that nothing reads is held to the end, as graph outputs are; externals are not counted.

    Args:
        graph: the file.
        order: kernel positions.
        reuse: SessionOptions.enable_mem_reuse: a dead buffer is held until a later tensor that was promised it.
    """
    kernels, layouts, sizes, is_output = graph.kernels, graph.layouts, graph.sizes, graph.is_output
    uses, is_read = _use_counts(graph)
    buffer = list(range(len(uses)))
    born = [-1] * len(uses)  # per value with a buffer of its own, the step that makes it
    last_read = [-1] * len(uses)  # per buffer
    free: dict[int, list[tuple[int, int]]] = {}  # layout -> (dead buffer, first step without it)
    promises: list[tuple[int, int, int]] = []
    for step, k in enumerate(order):
        kernel = kernels[k]
        for out in kernel.writes:
            source = -1
            if not is_output[out]:
                if kernel.alias or kernel.inplace:
                    source = _source_of(graph, kernel, out, uses, buffer)
                if source < 0 and reuse and is_read[out] and layouts[out] > UNKNOWN_LAYOUT:
                    dead = free.get(layouts[out])
                    if dead:
                        source, since = dead.pop()
                        if since < step:
                            promises.append((out, since, step))
            if source < 0:
                born[out] = step
            else:
                buffer[out] = root = buffer[source]
                uses[root] += uses[out]
        for v in kernel.reads:
            root = buffer[v]
            last_read[root] = step
            uses[root] -= 1
            if not uses[root] and layouts[root] > UNKNOWN_LAYOUT:
                free.setdefault(layouts[root], []).append((root, step + 1))
        for v in kernel.writes:
            root = buffer[v]
            uses[root] -= 1
            if not uses[root] and layouts[root] > UNKNOWN_LAYOUT:
                free.setdefault(layouts[root], []).append((root, step + 1))
    steps = len(order)
    spans: dict[int, tuple[int, int]] = {}
    delta = [0] * (steps + 1)
    released = sum(born[v] >= 0 and last_read[v] >= 0 and not is_output[v] for v in range(len(born)))
    delta[0] = graph.frame_counting(0, released)
    for v, start in enumerate(born):
        if start >= 0:
            end = steps if is_output[v] or last_read[v] < 0 else last_read[v] + 1
            spans[v] = (start, end)
            delta[start] += sizes[v]
            delta[end] -= sizes[v]
    scratch = [kernels[k].workspace_bytes for k in order]
    profile = list(map(sum, zip(accumulate(delta), scratch, strict=False)))
    located = [b if born[b] >= 0 else -1 for b in buffer]
    return Simulation(peak_of(profile), profile, spans, located, scratch, released, promises)


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
