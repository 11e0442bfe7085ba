"""What an operator means for memory: views, in-place kernels, randomness, side effects. One row an operator.

Source of the in-place rows: the kernel registrations (`Alias`, `MayInplace`) of ONNX Runtime's CPU and CUDA providers
and of its training kernels. They are the same from 1.19 to 1.31 for the operators named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onnx import NodeProto
from onnx.defs import has as has_schema

from onnx_sublinear.graph import GraphIndex, domain_of, subgraphs_of

__all__ = [
    "Slots",
    "Target",
    "Traits",
    "aliases_of",
    "inplace_of",
    "is_opaque",
    "may_clone",
    "overwritten_by",
    "traits_of",
]

Target = Literal["cpu", "cuda"]
Slots = tuple[tuple[int, int], ...]  # (input slot, output slot) pairs

_FIRST: Slots = ((0, 0),)


@dataclass(frozen=True, slots=True)
class Traits:
    """One operator's row.

    Attributes:
        view: outputs that always share an input's buffer, with no kernel writing.
        state: outputs that always share an input's buffer, with the kernel writing into it: the input changes.
            A clone must read a copy there.
        inplace: outputs that take an input's buffer when this is its last use, per target.
        random: draws random numbers, so a second run gives other values.
        side_effect: acts on something beside its outputs, or its order among its like matters.
        first: the runtime hoists it as early as it can (Shape and Size).
        broadcast: elementwise with the inputs' shapes made one.
        expanded: has no CPU kernel (in stock builds, or in any), so the runtime puts the function's nodes in its place.
        statistics: the state is running statistics, which the other outputs do not depend on.
    """

    view: Slots = ()
    state: Slots = ()
    inplace: Mapping[str, Slots] = field(default_factory=dict)
    random: bool = False
    side_effect: bool = False
    first: bool = False
    statistics: bool = False
    broadcast: bool = False
    expanded: Literal["", "stock", "always"] = ""


_ORDINARY = Traits()
_VIEW = Traits(view=_FIRST)
_BOTH = Traits(inplace={"cpu": _FIRST, "cuda": _FIRST})
_CPU_ONLY = Traits(inplace={"cpu": _FIRST})
_CUDA_ONLY = Traits(inplace={"cuda": _FIRST})
_SUM_INPLACE = Traits(inplace={"cpu": ((3, 0),)})  # into the tensor that the kernel adds
_BROADCAST = Traits(broadcast=True)
_RANDOM = Traits(random=True)
_EFFECT = Traits(side_effect=True)

_ONNX: dict[str, Traits] = {
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"), _VIEW),
    **dict.fromkeys(("Optional", "OptionalGetElement"), _VIEW),
    **dict.fromkeys(
        (
            *("Relu", "LeakyRelu", "Elu", "Selu", "Sigmoid", "HardSigmoid", "Tanh", "Softplus", "Softsign"),
            *("ThresholdedRelu", "Shrink", "Trilu"),
        ),
        _BOTH,
    ),
    **dict.fromkeys(("Celu", "Clip", "Softmax", "LogSoftmax", "Cast", "Scatter", "ScatterElements"), _CPU_ONLY),
    **dict.fromkeys(("Gelu", "ScatterND"), _CUDA_ONLY),
    **dict.fromkeys(
        (
            *(
                "Add",
                "Sub",
                "Mul",
                "Div",
                "Pow",
                "Mod",
                "Min",
                "Max",
                "Sum",
                "Mean",
                "PRelu",
                "Where",
                "And",
                "Or",
                "Xor",
            ),
            *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
        ),
        _BROADCAST,
    ),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"), _RANDOM),
    "Dropout": _RANDOM,
    "Bernoulli": Traits(random=True, expanded="always"),
    **dict.fromkeys(
        ("GroupNormalization", "Mish", "CastLike", "CenterCropPad", "NegativeLogLikelihoodLoss"),
        Traits(expanded="always"),
    ),
    "HardSwish": Traits(inplace={"cuda": _FIRST}, expanded="always"),
    "SoftmaxCrossEntropyLoss": Traits(expanded="stock"),
    "BatchNormalization": Traits(state=((3, 1), (4, 2)), statistics=True),  # has these outputs in training mode only
    "Shape": Traits(first=True),
    "Size": Traits(first=True),
}

_MICROSOFT: dict[str, Traits] = {
    **dict.fromkeys(
        (
            *("ReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad", "SigmoidGrad", "TanhGrad", "LeakyReluGrad"),
            *("BiasGeluGrad_dX", "BiasFastGeluGrad_dX", "QuickGelu"),
        ),
        _CUDA_ONLY,
    ),
    **dict.fromkeys(
        (
            *("Gelu", "FastGelu", "BiasGelu", "SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13"),
            *("LayerNormalization", "LayerNormalizationGrad", "SimplifiedLayerNormalization", "ConvGrad"),
            *("SimplifiedLayerNormalizationGrad", "InvertibleLayerNormalizationGrad", "SkipLayerNormalization"),
            *("BatchNormalizationGrad", "DropoutGrad", "BitmaskDropoutGrad", "GatherGrad", "GatherElementsGrad"),
            *("GatherNDGrad", "SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternal", "DivGrad", "SliceGrad"),
            *("SoftmaxCrossEntropyLossInternalGrad", "ReduceSumTraining", "ConcatTraining", "SplitTraining", "Scale"),
            *("SparseSoftmaxCrossEntropy", "SparseSoftmaxCrossEntropyGrad", "SoftmaxCrossEntropy", "ConvTransposeGrad"),
            *("SoftmaxCrossEntropyGrad", "FusedMatMul", "TransposeMatMul", "FusedGemm", "Trilu"),
            *("BiasSoftmax", "Inverse", "ReduceAllL2", "IsFinite", "IsAllFinite", "MixedPrecisionScale", "ResizeGrad"),
            *("ClipGradNorm", "PadAndUnflatten", "FlattenAndUnpad", "Group", "PassThrough"),
        ),
        _ORDINARY,
    ),
    **dict.fromkeys(("BiasDropout", "BitmaskDropout", "BitmaskBiasDropout", "BiasSoftmaxDropout"), _RANDOM),
    **dict.fromkeys(
        (
            *("PythonOp", "PythonOpGrad", "YieldOp", "WaitEvent", "RecordEvent", "Send", "Recv", "NcclAllReduce"),
            *("NcclAllGather", "NcclReduceScatter", "AllReduce", "AllGather", "AllToAll", "AdasumAllReduce"),
            *("BroadcastLike", "ATen", "ATenOp"),
        ),
        _EFFECT,
    ),
    "FusedConv": _SUM_INPLACE,
    "BatchNormInternal": Traits(state=((3, 1), (4, 2)), statistics=True),
    "InPlaceAccumulatorV2": Traits(state=((0, 1),), side_effect=True),
    "InPlaceAccumulator": Traits(state=((0, 0),), side_effect=True),
    "ZeroGradient": Traits(state=((0, 0),), side_effect=True),
    "AdamWOptimizer": Traits(side_effect=True),
    "AdamOptimizer": Traits(side_effect=True),
    "LambOptimizer": Traits(side_effect=True),
    "SGDOptimizer": Traits(side_effect=True),
    "SGDOptimizerV2": Traits(side_effect=True),
}

# Operators that ONNX Runtime registers in the default domain though ONNX has no schema for them.
_ONNX_WITHOUT_SCHEMA = {"MaxPoolGrad": _ORDINARY, "AveragePoolGrad": _ORDINARY}

_TABLES: dict[str, dict[str, Traits]] = {
    "": {**_ONNX, **_ONNX_WITHOUT_SCHEMA},
    "com.microsoft": _MICROSOFT,
    "com.microsoft.nchwc": {  # put in by the runtime
        "Conv": _SUM_INPLACE,
        **dict.fromkeys(("ReorderInput", "ReorderOutput", "MaxPool", "AveragePool", "Upsample"), _ORDINARY),
        **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool"), _ORDINARY),
    },
    "ai.onnx.ml": {},
}


def _row(node: NodeProto) -> Traits | None:
    """The node's row; the ordinary one for other operators that ONNX defines; None where nothing is known."""
    domain = domain_of(node)
    row = _TABLES.get(domain, {}).get(node.op_type)
    if row is None and domain in ("", "ai.onnx.ml") and has_schema(node.op_type, domain):
        return _ORDINARY
    return row


def traits_of(node: NodeProto) -> Traits:
    """The row of `node`'s operator; an unknown operator counts as one with side effects."""
    return _row(node) or _EFFECT


def is_opaque(node: NodeProto, index: GraphIndex) -> bool:
    """Whether nothing is known about `node`: no table has its operator, and no function of the model defines it."""
    return index.function_of(node) is None and _row(node) is None


def _pairs(node: NodeProto, slots: Slots) -> list[tuple[str, str]]:
    return [
        (node.input[i], node.output[o])
        for i, o in slots
        if i < len(node.input) and o < len(node.output) and node.input[i] and node.output[o]
    ]


def aliases_of(node: NodeProto) -> list[tuple[str, str]]:
    """(input, output) names that always share a buffer."""
    row = traits_of(node)
    return _pairs(node, row.view + row.state) if row.view or row.state else []


def overwritten_by(node: NodeProto) -> list[str]:
    """Inputs that the kernel writes into: a later reader finds other values there."""
    row = traits_of(node)
    return [a for a, _ in _pairs(node, row.state)] if row.state and not row.statistics else []


def inplace_of(node: NodeProto, target: str) -> list[tuple[str, str]]:
    """(input, output) names where the kernel takes over the input's buffer if this is its last use."""
    slots = traits_of(node).inplace.get(target, ())
    return _pairs(node, slots) if slots else []


def is_expanded(node: NodeProto, index: GraphIndex, *, training: bool) -> bool:
    """Whether the CPU runtime replaces `node` by the nodes of a function (operator without kernel, local function)."""
    expanded = traits_of(node).expanded
    return expanded == "always" or (expanded == "stock" and not training) or index.function_of(node) is not None


def may_clone(node: NodeProto, index: GraphIndex) -> bool:
    """Whether running `node` twice on the same inputs is safe: same values, no effect beside the outputs.

    Refused: random operators, side effects and state, unknown operators and domains, model-local functions,
    and control flow with any of these inside.
    """
    pending = [node]
    while pending:
        current = pending.pop()
        row = _row(current)
        if row is None or row.random or row.side_effect or index.function_of(current) is not None:
            return False
        for graph in subgraphs_of(current):
            pending.extend(graph.node)
    return True
