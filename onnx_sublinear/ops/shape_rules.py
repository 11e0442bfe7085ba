"""Which rule gives the output types of an operator that ONNX has no schema for, or whose symbols ONNX drops.

One row an operator. `like(a, b)` reads: output 0 has the type of input a, output 1 that of input b. A gradient has the
type of what it is the gradient of. Rules of more than a line are in `training_shapes`, `contrib_shapes` and
`symbolic_shapes`.

Sources (github.com/microsoft/onnxruntime, 1.19; input and output positions are those of the schemas):
orttraining/orttraining/core/graph/training_op_defs.cc, orttraining/orttraining/core/graph/gradient_builder.cc,
onnxruntime/core/graph/contrib_ops/contrib_defs.cc and bert_defs.cc. Types were compared with what the kernels of
onnxruntime-training 1.19.2 write: Group's flag is [1], although its schema says scalar.
"""

from __future__ import annotations

from onnx import TensorProto

from onnx_sublinear.ops import contrib_shapes as fused
from onnx_sublinear.ops import training_shapes as training
from onnx_sublinear.ops.nchwc_shapes import NCHWC_DOMAIN, NCHWC_RULES
from onnx_sublinear.ops.shape_arithmetic import Call, Rule
from onnx_sublinear.ops.symbolic_shapes import SYMBOLIC_RULES
from onnx_sublinear.ops.tensor_types import TensorType

__all__ = ["Call", "Rule", "rule_for"]

_BOOL, _INT64 = int(TensorProto.BOOL), int(TensorProto.INT64)
_FLAG = TensorType(_BOOL, (1,))
_SCALAR_BOOL = TensorType(_BOOL, ())
_AXES = TensorType(_INT64, (None,))


def like(*slots: int) -> Rule:
    """Output i has the type of input slots[i]."""
    return lambda call: [call.type(slot) for slot in slots]


def _each(first: int) -> Rule:
    """Output i has the type of input first + i, for any number of outputs."""
    return lambda call: [call.type(first + i) for i in range(len(call.node.output))]


def _fixed(*types: TensorType) -> Rule:
    return lambda _: list(types)


def _elem_only(slot: int) -> Rule:
    """Only the element type is known, that of input `slot`: the shape depends on the number of processes."""
    return lambda call: [TensorType(call.elem(slot), None) for _ in call.node.output]


# Element-wise gradients: (dY, X or Y) -> dX.
_LIKE_DY = (
    *("ReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX"),
    *("SigmoidGrad", "TanhGrad", "LeakyReluGrad", "SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad"),
    *("LogSoftmaxGrad_13", "DropoutGrad", "BitmaskDropoutGrad", "SinGrad", "FakeQuantGrad"),
)

_RUNTIME_OPS: dict[str, Rule] = {
    **{name: like(0) for name in _LIKE_DY},
    "AllReduce": like(0),
    "AveragePoolGrad": training.average_pool_grad,
    "AdamOptimizer": like(1, 4, 5, 2, 3, 6),
    "AdamWOptimizer": lambda call: [TensorType(_BOOL, call.shape(1)), *map(call.type, (2, 4, 5))],
    "BatchScale": lambda call: [call.type(0)] * len(call.node.output),
    "BatchNormInternal": training.batch_norm_internal,
    "BatchNormalizationGrad": like(1, 2, 2),
    "BiasDropout": lambda call: [call.type(0), training.mask(call)],
    "BiasFastGelu": like(0),
    "BiasGelu": like(0),
    "BiasSoftmax": like(0),
    "BiasSoftmaxDropout": lambda call: [call.type(0), training.mask(call), call.type(0)],
    "BitmaskBiasDropout": lambda call: [call.type(0), training.bitmask(call)],
    "BitmaskDropout": lambda call: [call.type(0), training.bitmask(call)],
    "BroadcastGradientArgs": _fixed(_AXES, _AXES),
    "ConcatTraining": training.concat_training,
    "ConvGrad": training.conv_grad,
    "ConvTransposeGrad": training.conv_transpose_grad,
    "DivGrad": like(1, 2),
    "FastGelu": like(0),
    "FakeQuant": lambda call: [call.type(0), training.mask(call)],
    "FlattenAndUnpad": training.flatten_and_unpad,
    "FusedConv": fused.fused_conv,
    "FusedGemm": fused.fused_gemm,
    "FusedMatMul": fused.fused_matmul,
    "GatherElementsGrad": training.shape_from(1, 0),
    "GatherGrad": training.shape_from(0, 2),
    "GatherNDGrad": training.shape_from(0, 2),
    "Gelu": like(0),
    "Group": _fixed(_FLAG),
    "InplaceClipGradNorm": like(0),
    "InPlaceAccumulator": like(0),
    "InPlaceAccumulatorV2": lambda call: [_FLAG, call.type(0)],
    "Inverse": like(0),
    "InvertibleLayerNormalizationGrad": like(1, 2, 2),
    "IsAllFinite": _fixed(_SCALAR_BOOL),
    "IsFinite": lambda call: [training.mask(call)],
    "LSTMGrad": training.lstm_grad,
    "LSTMTraining": training.lstm_training,
    "LayerNormalization": fused.layer_norm,
    "LayerNormalizationGrad": like(1, 2, 2),
    "MaxPoolGrad": training.pool_input,
    "MixedPrecisionScale": training.mixed_precision_scale,
    "NcclAllGather": _elem_only(0),
    "NcclAllReduce": _each(0),
    "NcclReduceScatter": _elem_only(0),
    "PadAndUnflatten": training.pad_and_unflatten,
    "PassThrough": _each(0),
    "QuickGelu": like(0),
    "RecordEvent": _each(1),
    "ReduceAllL2": _fixed(TensorType(0, ())),
    "ReduceSumTraining": training.reduce_sum_training,
    "ResizeGrad": like(1),
    "SGDOptimizerV2": lambda call: [_SCALAR_BOOL, call.type(1)],
    "Scale": like(0),
    "ScaledSum": like(0),
    "SimplifiedLayerNormalization": fused.simplified_layer_norm,
    "SimplifiedLayerNormalizationGrad": like(1, 2),
    "SkipLayerNormalization": fused.skip_layer_norm,
    "SkipSimplifiedLayerNormalization": fused.skip_layer_norm,
    "SliceGrad": training.shape_from(1, 0),
    "SoftmaxCrossEntropy": training.one_hot_loss,
    "SoftmaxCrossEntropyGrad": like(1),
    "SoftmaxCrossEntropyLossGrad": training.loss_grad,
    "SoftmaxCrossEntropyLossInternal": training.loss,
    "SoftmaxCrossEntropyLossInternalGrad": training.loss_grad,
    "SparseSoftmaxCrossEntropy": training.loss,
    "SparseSoftmaxCrossEntropyGrad": like(1),
    "SplitTraining": training.split_training,
    "TransposeMatMul": fused.fused_matmul,
    "Trilu": like(0),
    "YieldOp": training.yield_op,
    "WaitEvent": _each(1),
    "ZeroGradient": like(0),
}

# Registered without inference in the training build: there, the runtime knows of these only what value_info declares.
_BLIND_IN_ORT = frozenset(
    (
        *("AdamOptimizer", "AveragePoolGrad", "BatchNormalizationGrad", "ConvGrad", "ConvTransposeGrad"),
        *("FlattenAndUnpad", "GatherElementsGrad", "GatherGrad", "GatherNDGrad"),
        *("InvertibleLayerNormalizationGrad", "IsFinite", "MaxPoolGrad", "PadAndUnflatten", "ResizeGrad"),
        *("SimplifiedLayerNormalizationGrad", "SliceGrad", "SparseSoftmaxCrossEntropyGrad"),
    )
)
# Where the inference of the runtime differs from what its kernels write.
_SEEN_BY_ORT: dict[str, Rule] = {"Group": _fixed(_SCALAR_BOOL)}


def rule_for(op_type: str, domain: str, has_schema: bool, runtime: bool) -> Rule | None:
    """The rule of an operator, or None.

    Args:
        op_type: operator.
        domain: its domain; "" is the default domain.
        has_schema: whether ONNX has a schema for it; our rule then only adds to ONNX's inference.
        runtime: only what ORT's inference knows.
    """
    if has_schema:
        return SYMBOLIC_RULES.get(op_type) if domain == "" and not runtime else None
    if domain == NCHWC_DOMAIN:
        return NCHWC_RULES.get(op_type)
    if domain not in ("", "com.microsoft") or (runtime and op_type in _BLIND_IN_ORT):
        return None
    return (_SEEN_BY_ORT.get(op_type) if runtime else None) or _RUNTIME_OPS.get(op_type)
