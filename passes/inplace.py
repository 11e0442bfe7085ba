"""Pass `inplace`: orders readers so that kernels which can write into their input's buffer may do so.

A kernel takes over its input's buffer only if nothing reads the input later. Where another reader stands behind it
and could as well stand in front, it is moved there::

    y = Relu(x)   z = Mul(x, c)    ->    z = Mul(x, c)   y = Relu(x)   (y in x's buffer)

Never into a graph input, a graph output, an initializer, a tensor with a later reader or a buffer of another width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.rewriting import replace_nodes
from onnx_sublinear.runtime_model import UNKNOWN_LAYOUT, RuntimeGraph, simulate
from onnx_sublinear.scheduling import fixed_nodes
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["InplacePass"]


@dataclass(frozen=True)
class InplacePass(Pass):
    """Moves readers in front of kernels that can run in-place, where that does not raise the peak."""

    name: ClassVar[str] = "inplace"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Reorders the file."""
        runtime, in_file = graph.runtime, graph.index.order
        moved = _readers_first(runtime, in_file, fixed_nodes(graph))
        before, after = (simulate(runtime, order, reuse=False) for order in (in_file, moved))
        better = after.peak_bytes <= before.peak_bytes and moved != list(in_file)
        chosen, run = (moved, after) if better else (in_file, before)
        schedule = graph.index.constants_first(chosen)
        saved = _inplace_bytes(runtime, run.buffer_of)
        facts = {"inplace_bytes": saved}
        if schedule == list(range(len(in_file))):
            return PassResult(graph, facts=facts)
        model = replace_nodes(graph.model, [graph.index.nodes[k] for k in schedule])
        reordered = graph.with_model(model, sizes=graph.sizes, visible=graph.visible)
        return PassResult(reordered, True, facts=facts)


def _inplace_bytes(runtime: RuntimeGraph, buffer_of: Sequence[int]) -> int:
    """Bytes of the outputs that live in an input's buffer because the kernel may write there."""
    return sum(
        runtime.sizes[b]
        for kernel in runtime.kernels
        for a, b in kernel.inplace
        if buffer_of[b] >= 0 and buffer_of[b] == buffer_of[a]
    )


def _readers_first(runtime: RuntimeGraph, order: Sequence[int], fixed: frozenset[int]) -> list[int]:
    """`order` with the other readers of an in-place kernel's input moved in front of it, where they can be."""
    made_by = runtime.producers()
    readers: dict[int, list[int]] = {}
    for k in order:
        for v in dict.fromkeys(runtime.kernels[k].reads):
            readers.setdefault(v, []).append(k)
    placed = bytearray(len(runtime.kernels))
    result: list[int] = []
    for k in order:
        if placed[k]:
            continue
        for a, b in runtime.kernels[k].inplace:
            if runtime.layouts[a] != runtime.layouts[b] or runtime.layouts[a] == UNKNOWN_LAYOUT:
                continue
            if runtime.external[a] or runtime.is_output[a] or runtime.is_output[b]:
                continue
            others = [r for r in readers[a] if r != k and not placed[r]]
            movable = all(
                r not in fixed and all(made_by[v] < 0 or placed[made_by[v]] for v in runtime.kernels[r].reads)
                for r in others
            )
            if movable:
                for r in others:
                    placed[r] = 1
                    result.append(r)
        placed[k] = 1
        result.append(k)
    return result
