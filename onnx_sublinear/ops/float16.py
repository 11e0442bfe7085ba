"""float16 on the CPU provider: which nodes run in float, and which tensors it then holds in float.

Most CPU kernels have no float16 version. For a node without one, the runtime casts the inputs to float and the
outputs back (InsertCastTransformer), and then drops every pair float -> float16 -> float. What is left between two
such nodes is a float tensor of twice the bytes; a Cast of the model between them is gone. In graphs without float16
casts there and back are dropped too (float -> double -> float).

Sources: core/optimizer/insert_cast_transformer.cc; the kernels by experiment on x86-64 without AVX512-FP16 (machines
with float16 arithmetic have more of them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_sublinear.graph import GraphIndex, domain_of, subgraphs_of
from onnx_sublinear.ops.tensor_types import TensorType

__all__ = ["held_types", "runs_in_float32", "with_casts"]

_FLOAT16_KERNELS = frozenset(
    {
        *("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Concat", "Split"),
        *("Slice", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Shape", "ConstantOfShape"),
        *("Max", "Min", "Mod", "Clip", "Round", "Sign", "IsNaN", "If", "Loop", "Scan", "Constant"),
    }
)
_STOCK_KERNELS = _FLOAT16_KERNELS | {"LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"}
_TRAINING_KERNELS = _FLOAT16_KERNELS | {"SplitTraining", "ConcatTraining", "SliceGrad", "InPlaceAccumulatorV2"}


def _is_float16(known: TensorType | None) -> bool:
    return known is not None and known.elem_type == TensorProto.FLOAT16


def runs_in_float32(node: NodeProto, inputs: Sequence[TensorType | None], *, training: bool = False) -> bool:
    """Whether the CPU provider casts the node's float16 inputs to float.

    Args:
        node: the node.
        inputs: the type of each input slot.
        training: onnxruntime-training 1.19.2 instead of current stock builds.
    """
    if not any(map(_is_float16, inputs)) or domain_of(node) not in ("", "com.microsoft"):
        return False
    return node.op_type not in (_TRAINING_KERNELS if training else _STOCK_KERNELS)


def _nodes_in_float32(index: GraphIndex, types: Mapping[str, TensorType], training: bool) -> list[bool]:
    in_float = [runs_in_float32(n, [types.get(i) for i in n.input], training=training) for n in index.nodes]
    for position in range(len(in_float)):  # in file order: one forced node lets the next one follow
        in_float[position] = in_float[position] or _is_isolated(index, types, in_float, position)
    return in_float


def _is_isolated(index: GraphIndex, types: Mapping[str, TensorType], in_float: Sequence[bool], position: int) -> bool:
    """A node with a float16 kernel whose neighbours all run in float is forced to float (IsIsolatedFp16NodeOnCpu)."""
    node = index.nodes[position]
    if subgraphs_of(node) or any(o in index.output_set for o in node.output):
        return False
    sources = [i for i in node.input if _is_float16(types.get(i))]
    results = [o for o in node.output if _is_float16(types.get(o))]
    made_in_float = all(i in index.producer and in_float[index.producer[i]] for i in sources)
    readers = [r for o in results for r in index.readers.get(o, ())]
    return bool(sources and readers) and made_in_float and all(in_float[r] for r in readers)


def held_types(index: GraphIndex, types: Mapping[str, TensorType], *, training: bool = False) -> dict[str, TensorType]:
    """Float types of the float16 tensors that the CPU provider holds in float only: an approximation node by node.

    It keeps the file's nodes; a Cast whose input and output then have the same type is a view. What it leaves out:
    casts shared by several readers, and their effect on the order. `with_casts` has both.

    Args:
        index: the graph.
        types: types of its tensors.
        training: onnxruntime-training 1.19.2 instead of current stock builds.

    Returns:
        Only the tensors whose type differs; lay it over `types`.
    """
    if not any(map(_is_float16, types.values())):
        return {}
    in_float = _nodes_in_float32(index, types, training)
    held: dict[str, TensorType] = {}
    for name, position in index.producer.items():
        known, node = types.get(name), index.nodes[position]
        readers = index.readers.get(name, ())
        if known is None or not _is_float16(known) or name in index.output_set or not readers:
            continue
        source = types.get(node.input[0]) if node.op_type == "Cast" else None
        is_float_inside = in_float[position] or (source is not None and source.elem_type == TensorProto.FLOAT)
        if is_float_inside and all(in_float[r] or index.nodes[r].op_type == "Cast" for r in readers):
            held[name] = TensorType(TensorProto.FLOAT, known.shape)
    return held


def with_casts(
    index: GraphIndex, types: Mapping[str, TensorType], order: Sequence[int], *, training: bool = False
) -> ModelProto:
    """The model that the CPU provider runs: casts around nodes without a float16 kernel, and cast pairs dropped.

    Before: `x16 -> Tanh -> y16 -> Tanh -> z16`. After: `x16 -> Cast -> Tanh -> Tanh -> Cast -> z16`.
    Inserted casts come last in the file, as the runtime numbers them. Bodies of control flow are left as they are.

    Args:
        index: the graph.
        types: types of its tensors.
        order: the runtime's default order of the graph's nodes, which decides the order of the inserted casts.
        training: onnxruntime-training 1.19.2 instead of current stock builds.

    Returns:
        A new model, or the given one if it has neither a float16 tensor nor a cast of a cast.
    """
    has_float16 = any(map(_is_float16, types.values()))
    if not has_float16 and not _has_cast_of_cast(index):
        return index.model
    in_float = _nodes_in_float32(index, types, training) if has_float16 else [False] * len(index.nodes)
    rewriter = _CastRewriter(index, types, in_float)
    rewriter.insert(order)
    rewriter.drop_pairs()
    model = ModelProto()
    model.CopyFrom(index.model)
    del model.graph.node[:]
    model.graph.node.extend(node for node in rewriter.nodes if node is not None)
    return model


def _has_cast_of_cast(index: GraphIndex) -> bool:
    casts = [node for node in index.nodes if node.op_type == "Cast"]
    return not {node.input[0] for node in casts}.isdisjoint(node.output[0] for node in casts)


class _CastRewriter:
    """InsertCastTransformer and RemoveDuplicateCastTransformer on copies of the nodes; a removed node is None."""

    def __init__(self, index: GraphIndex, types: Mapping[str, TensorType], in_float: Sequence[bool]) -> None:
        self.index = index
        self.in_float = in_float
        self.elem = {name: known.elem_type for name, known in types.items()}
        self.nodes: list[NodeProto | None] = []
        for node in index.nodes:
            copy = NodeProto()
            copy.CopyFrom(node)
            self.nodes.append(copy)
        self.pinned = set(index.output_set).union(*index.captures.values())
        self.names = set(index.producer) | set(self.elem)

    def insert(self, order: Sequence[int]) -> None:
        """Casts before and behind each node that runs in float; one cast of a tensor serves all its readers."""
        as_float: dict[str, str] = {}
        for position in order:
            node = self.nodes[position]
            if node is None or not self.in_float[position]:
                continue
            for slot, name in enumerate(node.input):
                if self.elem.get(name) == TensorProto.FLOAT16:
                    if name not in as_float:
                        as_float[name] = self._cast(name, self._fresh(name), TensorProto.FLOAT)
                    node.input[slot] = as_float[name]
            for slot, name in enumerate(node.output):
                if self.elem.get(name) == TensorProto.FLOAT16:
                    node.output[slot] = self._fresh(name)
                    self.elem[node.output[slot]] = TensorProto.FLOAT
                    self._cast(node.output[slot], name, TensorProto.FLOAT16)
            for attribute in node.attribute:
                if attribute.name == "dtype" and attribute.i == TensorProto.FLOAT16:
                    attribute.i = TensorProto.FLOAT

    def _fresh(self, name: str) -> str:
        number, fresh = 0, f"InsertedCast_{name}"
        while fresh in self.names:
            number += 1
            fresh = f"InsertedCast_{name}_{number}"
        self.names.add(fresh)
        return fresh

    def _cast(self, source: str, result: str, to: int) -> str:
        self.nodes.append(helper.make_node("Cast", [source], [result], to=to))
        self.elem[result] = to
        return result

    def drop_pairs(self) -> None:
        """Removes casts there and back, and a cast that only casts read; in the order of the nodes."""
        readers: dict[str, list[tuple[int, int]]] = {}
        for position, node in enumerate(self.nodes):
            for slot, name in enumerate(node.input if node is not None else ()):
                readers.setdefault(name, []).append((position, slot))

        def reconnect(old: str, new: str) -> None:
            for position, slot in readers.pop(old, ()):
                reader = self.nodes[position]
                if reader is not None:
                    reader.input[slot] = new
                    readers.setdefault(new, []).append((position, slot))

        for position, node in enumerate(self.nodes):
            if node is None or node.op_type != "Cast":
                continue
            source, result = node.input[0], node.output[0]
            children = readers.get(result, [])
            casts = [(p, c) for p, _ in children if (c := self.nodes[p]) is not None and c.op_type == "Cast"]
            if any(self._loses(source, result, child.output[0]) for _, child in casts):
                continue
            only_casts = bool(children) and len(casts) == len(children) and result not in self.pinned
            for child_position, child in casts:
                if self.elem.get(child.output[0]) == self.elem.get(source) and child.output[0] not in self.pinned:
                    reconnect(child.output[0], source)
                    readers[result].remove((child_position, 0))
                    self.nodes[child_position] = None
            if only_casts:
                reconnect(result, source)
                readers[source].remove((position, 0))
                self.nodes[position] = None

    def _loses(self, source: str, result: str, final: str) -> bool:
        """Whether source -> result -> final cannot be shortened, as the middle type is of a poorer kind."""
        a, b, c = (_KINDS.get(self.elem.get(name, TensorProto.UNDEFINED), -1) for name in (source, result, final))
        return min(a, b, c) < 0 or (a > b and c > b)


_KINDS: Mapping[int, int] = {
    TensorProto.BOOL: 0,
    **dict.fromkeys((TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64), 1),
    **dict.fromkeys((TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64), 1),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE), 2),
}
