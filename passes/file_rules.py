"""What additions may touch in a file, and how the runtime sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto

from onnx_sublinear.passes.barriers import Rules
from onnx_sublinear.passes.rewriting import ROLE_CLONE, clone_of, role_of
from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, Kernel, RuntimeGraph
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["SMALL_SHARE", "file_rules", "with_bodies"]

SMALL_SHARE = 1 / 2000  # of the peak: a node that moves less may run at any time
_ALL_SMALL_SHARE = 1 / 50  # of the peak: what all such values have together at most
_LEAST_BYTES = 256
_SHAPE_HAS_RANGE = 15  # opset from which on Shape takes start and end
# Element types that the kernels of both Size and Reshape take in every build and opset (no 8-bit or 4-bit floats,
# bfloat16, complex numbers).
_VIEWED_TYPES = frozenset(
    (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.STRING),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
)


def with_bodies(graph: TrainingGraph) -> tuple[RuntimeGraph, dict[int, list[Kernel]]]:
    """The file as the runtime sees it, and the kernels that it puts in place of some of its nodes."""
    runtime, executed = graph.runtime, graph.executed
    late = [k for k, kernel in enumerate(runtime.kernels) if kernel.late]
    if executed is runtime or not late or graph.float16_in_float:  # casts are put around float16 kernels, too
        return runtime, {}
    joined = runtime.with_kernels(runtime.kernels)
    ids = {name: v for v, name in enumerate(runtime.names)}
    outside = set(ids)

    def value(v: int) -> int:
        name = executed.names[v]
        if name not in ids:
            ids[name] = joined.add_value(name, executed.sizes[v], UNKNOWN_LAYOUT, external=executed.external[v])
        return ids[name]

    def pairs(of: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((value(a), value(b)) for a, b in of)

    first = len(runtime.kernels) - len(late)
    made_by = {executed.names[v]: k for k in range(first, len(executed.kernels)) for v in executed.kernels[k].writes}
    owner_of: dict[int, int] = {}
    for k in late:
        pending = [runtime.names[v] for v in runtime.kernels[k].writes]
        while pending:
            inner = made_by.get(pending.pop(), -1)
            if inner >= 0 and inner not in owner_of:
                owner_of[inner] = k
                reads = (executed.names[v] for v in executed.kernels[inner].reads)
                pending += [r for r in reads if r not in outside]
    bodies: dict[int, list[Kernel]] = {}
    round_number, previous = 1, -1
    for inner in sorted(owner_of):
        owner = owner_of[inner]
        round_number += owner < previous  # in each round the runtime goes through the file once
        previous = owner
        kernel = executed.kernels[inner]
        bodies.setdefault(owner, []).append(
            replace(
                kernel,
                reads=tuple(map(value, kernel.reads)),
                writes=tuple(map(value, kernel.writes)),
                alias=pairs(kernel.alias),
                inplace=pairs(kernel.inplace),
                late=round_number,
            )
        )
    return joined, bodies


def file_rules(
    graph: TrainingGraph, runtime: RuntimeGraph, bodies: Mapping[int, Sequence[Kernel]], limit_bytes: int
) -> Rules:
    """The rules for a graph whose peak is to be `limit_bytes`."""
    index, types = graph.index, graph.sizes.types
    probes = graph.target == "cuda" and index.opset.get("", 1) >= _SHAPE_HAS_RANGE
    viewed = _VIEWED_TYPES | {TensorProto.BFLOAT16} if probes else _VIEWED_TYPES  # Shape takes it, Size does not
    left_alone = graph.untouchable
    tensor = [name in types and types[name].elem_type in viewed and name not in left_alone for name in runtime.names]
    constants = _constants(graph)
    kept_constant = [
        name in constants and (types[name].elem_type != TensorProto.INT64 or graph.target == "cuda") if t else False
        for t, name in zip(tensor, runtime.names, strict=True)
    ]
    shapes = [types[name].shape if t else None for t, name in zip(tensor, runtime.names, strict=True)]
    rows = zip(tensor, [bool(shape) for shape in shapes], runtime.names, strict=True)
    captured = [len(index.captures.get(k, ())) for k in range(len(runtime.kernels))]
    small = _small_bytes(runtime.sizes, limit_bytes)
    moved = runtime.sizes
    unknown = set(graph.sizes.unknown)
    sized = [name not in unknown for name in runtime.names]

    def is_small(kernel_values: Sequence[int]) -> bool:
        return sum(moved[v] for v in kernel_values) <= small and all(sized[v] for v in kernel_values)

    kernels = runtime.kernels
    scalar = [c and shape == () for c, shape in zip(kept_constant, shapes, strict=True)]
    elementwise = [k for k, kernel in enumerate(kernels) if kernel.broadcast and not graph.sections.forward[k]]
    return Rules(
        free_source=_free_source(graph, tensor),
        probes=probes,
        ranks=[-1 if s is None or c else len(s) for s, c in zip(shapes, kept_constant, strict=True)],
        countable=[t and (shape or types[name].elem_type in _VIEWED_TYPES) for t, shape, name in rows],
        slots=[k.reads[: len(k.reads) - c] for k, c in zip(kernels, captured, strict=True)],
        scalars={k: found for k in elementwise if (found := [v for v in kernels[k].reads if scalar[v]])},
        small_output=[is_small(k.writes) and k.workspace_bytes <= small for k in kernels],
        small_all=[is_small((*k.writes, *k.reads)) for k in kernels],
        clone=[role_of(node) == ROLE_CLONE for node in index.nodes],
        twins=_twins(graph),
        small_bytes=small,
        bodies=bodies,
    )


def _twins(graph: TrainingGraph) -> list[int]:
    """Per node a number that clones and their original share; 0 for all others."""
    nodes, made_by = graph.index.nodes, graph.index.producer
    originals = {k: made_by[of] for k, node in enumerate(nodes) if (of := clone_of(node)) in made_by}
    found = [0] * len(nodes)
    for k, original in originals.items():
        seen = {k}
        while original in originals and original not in seen:  # a clone of a clone, from an earlier run
            seen.add(original)
            original = originals[original]
        found[k] = found[original] = original + 1
    return found


def _constants(graph: TrainingGraph) -> frozenset[str]:
    """What the runtime knows the value of: constant initializers and what is made of these alone.

    Kernels pack constant weights when the session is made, and then add up in another order: behind a view the weight
    is no constant, and the last bit may differ. A scalar operand of an elementwise kernel is no weight; in the forward
    section, fusions look for it. On CUDA, a view would take a shape away from the host, which reads it.
    """
    index = graph.index
    overridable = index.inputs if index.model.ir_version >= 4 else {}
    found = {name for name in index.initializers if name not in overridable} | index.sparse_initializers
    for k in index.order:
        makes_constant = index.reads[k] or index.nodes[k].op_type == "Constant"  # else: random numbers, say
        if makes_constant and found.issuperset(index.reads[k]):
            found.update(index.nodes[k].output)
    return frozenset(found)


def _free_source(graph: TrainingGraph, countable: Sequence[bool]) -> int:
    """A graph input that some node reads and that is no constant for the runtime (which would fold its Size)."""
    index = graph.index
    free = {name for name in index.inputs if name not in index.initializers or index.model.ir_version >= 4}
    return next((v for v, name in enumerate(graph.runtime.names) if name in free and countable[v]), -1)


def _small_bytes(sizes: Sequence[int], limit_bytes: int) -> int:
    """The size up to which values may be made at any time: one is next to nothing, and all of them are little."""
    small, total = _LEAST_BYTES, 0
    for size in sorted(filter(None, sizes)):
        total += size
        if total > limit_bytes * _ALL_SMALL_SHARE:
            break
        small = max(small, size)
    return min(small, int(limit_bytes * SMALL_SHARE))
