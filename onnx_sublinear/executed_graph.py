"""What a session holds and in which order it runs, worked out on the runtime's own graph.

The nodes, their order and the visible types come from `runtime_dump`; sizes in bytes too, and where the runtime does
not know a dim, from what is known of the original graph under the user's dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.ops.tensor_types import TensorType, bind, tensor_bytes
from onnx_sublinear.runtime import Level
from onnx_sublinear.runtime_dump import RuntimeDump, dump_runtime
from onnx_sublinear.runtime_model import RuntimeGraph, Simulation, executed_orders, runtime_graph, simulate
from onnx_sublinear.sizes import TensorSizes, infer_sizes
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["ExecutedGraph", "executed_graph"]


@dataclass(frozen=True)
class ExecutedGraph:
    """The graph of a session of the installed ONNX Runtime.

    Attributes:
        dump: the runtime's graph.
        index: its def-use index; positions are positions in `runtime.kernels` too.
        runtime: the same for `runtime_model`.
        origins: per node of it the position of the original node that makes one of its outputs; -1 for nodes that
            the runtime made (casts, layout changes, bodies of functions).
        unknown: tensors that it makes whose size is not known; they count as nothing.
    """

    dump: RuntimeDump
    index: GraphIndex
    runtime: RuntimeGraph
    origins: tuple[int, ...]
    unknown: tuple[str, ...]

    @cached_property
    def orders(self) -> dict[str, list[int]]:
        """The executed orders of its nodes, "default" and "priority"."""
        return executed_orders(self.runtime, training=self.dump.build == "training")

    @cached_property
    def simulations(self) -> dict[str, Simulation]:
        """What each order holds, without arena and memory pattern."""
        return {name: simulate(self.runtime, order) for name, order in self.orders.items()}


def executed_graph(graph: TrainingGraph, level: Level = "all") -> ExecutedGraph:
    """The graph that a CPU session of the installed ONNX Runtime runs; nothing is run.

    Args:
        graph: the model with the user's dims.
        level: graph optimizations.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        NoRuntimeGraphError: it cannot load the model; the message says why.
    """
    dump = dump_runtime(graph.model, level)
    index = GraphIndex(dump.model)
    sizes = TensorSizes(dict(dump.types), _bound(index, dump, graph), dict(graph.dims))
    training = dump.build == "training"
    runtime = runtime_graph(index, sizes, visible=dump.types, training=training, settled=True)
    made_at = graph.index.producer
    origins = tuple(next((made_at[o] for o in node.output if o in made_at), -1) for node in index.nodes)
    unknown = tuple(o for node in index.nodes for o in node.output if o and sizes.bytes_of(o) is None)
    return ExecutedGraph(dump, index, runtime, origins, unknown)


def _bound(index: GraphIndex, dump: RuntimeDump, graph: TrainingGraph) -> dict[str, TensorType]:
    """Types under the user's dims: the runtime's, else those of the original tensor of the name, else inferred."""
    bound = {name: bind(known, graph.dims) for name, known in dump.types.items()}
    open_names = [name for name, known in bound.items() if tensor_bytes(known) is None and known.elem_type]
    if open_names:
        _fill(bound, open_names, graph.sizes.bound)
        open_names = [name for name in open_names if tensor_bytes(bound[name]) is None]
    if open_names:
        _fill(bound, open_names, infer_sizes(index, _used_dims(index, graph.dims)).bound)
    return bound


def _fill(bound: dict[str, TensorType], names: list[str], source: Mapping[str, TensorType]) -> None:
    """Takes the types of `source` that have a size and the same elements."""
    for name in names:
        known = source.get(name)
        if known is not None and known.elem_type == bound[name].elem_type and tensor_bytes(known) is not None:
            bound[name] = known


def _used_dims(index: GraphIndex, dims: Mapping[str, int]) -> dict[str, int]:
    """The dims whose symbol the inputs still have."""
    symbols = {d.dim_param for info in index.inputs.values() for d in info.type.tensor_type.shape.dim}
    return {name: value for name, value in dims.items() if name in symbols}
