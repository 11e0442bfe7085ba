"""Which operators must never run twice: the judge's own table, apart from the one that the passes use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnx_sublinear.errors import printable

__all__ = ["Repeatability", "subgraphs_of"]

_KNOWN_DOMAINS = frozenset(
    {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"}
)
# fmt: off
_RANDOM = frozenset(
    (
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
        "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout",
    )
)
_STATEFUL = frozenset(
    (
        "InPlaceAccumulator", "InPlaceAccumulatorV2", "ZeroGradient", "AdamOptimizer", "AdamWOptimizer",
        "SGDOptimizer", "SGDOptimizerV2", "LambOptimizer", "Adam", "Adagrad", "Momentum", "Gradient",
        "PythonOp", "PythonOpGrad", "ATen", "YieldOp", "RecordEvent", "WaitEvent", "Send", "Recv", "Group",
        "NcclAllReduce", "NcclAllGather", "NcclReduceScatter", "AllReduce", "AllGather", "AllToAll",
        "AdasumAllReduce", "HorovodAllReduce", "HorovodBarrier", "TritonOp", "ExternalOp",
    )
)
# fmt: on
_DROPOUT_TRAINING_SLOT = 2
_FIRST_OPSET_WITH_TRAINING_DROPOUT = 12


def subgraphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in the attributes of `node`."""
    for a in node.attribute:
        if a.HasField("g"):
            yield a.g
        yield from a.graphs


class Repeatability:
    """Says of a model's nodes whether a second run gives the same and does nothing twice.

    Args:
        model: the original model.
        constants: initializers that the caller cannot override.
    """

    def __init__(self, model: ModelProto, constants: Mapping[str, TensorProto]) -> None:
        self.constants = constants
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.default_opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)

    def reason_against(self, node: NodeProto) -> str:
        """Why a second run of `node` may not give the same, or may do something twice; "" when it may be cloned."""
        stack, called = [node], set()
        while stack:
            current = stack.pop()
            key = (current.domain, current.op_type, current.overload)
            if key in self.functions:
                stack.extend(() if key in called else self.functions[key].node)
                called.add(key)
                continue
            if current.domain not in _KNOWN_DOMAINS:
                return f"an operator of unknown domain '{printable(current.domain)}'"
            if current.op_type in _RANDOM or (current.op_type == "Dropout" and self.trains(current)):
                return f"the random operator {current.op_type}"
            if current.op_type in _STATEFUL:
                return f"{current.op_type}, which has side effects or state,"
            stack.extend(n for g in subgraphs_of(current) for n in g.node)
        return ""

    def trains(self, node: NodeProto) -> bool:
        """Whether a Dropout or BatchNormalization may run in training mode."""
        if node.op_type != "Dropout":
            flag = next((a.i for a in node.attribute if a.name == "training_mode"), 0)
            return bool(flag) or node.op_type == "BatchNormInternal"
        if self.default_opset < _FIRST_OPSET_WITH_TRAINING_DROPOUT or len(node.input) <= _DROPOUT_TRAINING_SLOT:
            return False
        name = node.input[_DROPOUT_TRAINING_SLOT]
        constant = self.constants.get(name)
        return bool(name) and (constant is None or any(constant.raw_data) or any(constant.int32_data))
