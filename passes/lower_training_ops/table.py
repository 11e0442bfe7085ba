"""Which rule lowers which operator, and which operators only training builds of ONNX Runtime have."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_sublinear.passes.lower_training_ops import (
    accumulators,
    activations,
    arithmetic,
    convolution,
    indexing,
    losses,
    normalization,
    pooling,
    recurrent,
)
from onnx_sublinear.passes.lower_training_ops.emitter import Rule

__all__ = ["RULES", "TRAINING_ONLY"]

_MS = "com.microsoft"

RULES: Mapping[tuple[str, str], Rule] = {
    (_MS, "ReluGrad"): activations.relu_grad,
    (_MS, "LeakyReluGrad"): activations.leaky_relu_grad,
    (_MS, "EluGrad"): activations.elu_grad,
    (_MS, "SigmoidGrad"): activations.sigmoid_grad,
    (_MS, "TanhGrad"): activations.tanh_grad,
    (_MS, "GeluGrad"): activations.gelu_grad,
    (_MS, "FastGeluGrad"): activations.fast_gelu_grad,
    (_MS, "QuickGeluGrad"): activations.quick_gelu_grad,
    (_MS, "BiasGeluGrad_dX"): activations.bias_gelu_grad,
    (_MS, "BiasFastGeluGrad_dX"): activations.bias_fast_gelu_grad,
    (_MS, "SoftmaxGrad"): activations.softmax_grad,
    (_MS, "SoftmaxGrad_13"): activations.softmax_grad,
    (_MS, "LogSoftmaxGrad"): activations.log_softmax_grad,
    (_MS, "LogSoftmaxGrad_13"): activations.log_softmax_grad,
    (_MS, "DropoutGrad"): activations.dropout_grad,
    (_MS, "SoftmaxCrossEntropyLossInternal"): losses.loss_internal,
    (_MS, "SoftmaxCrossEntropyLossInternalGrad"): losses.loss_grad,
    (_MS, "SoftmaxCrossEntropyLossGrad"): losses.loss_grad,
    (_MS, "ReduceSumTraining"): arithmetic.reduce_sum_training,
    (_MS, "Scale"): arithmetic.scale,
    (_MS, "PassThrough"): arithmetic.pass_through,
    (_MS, "Group"): arithmetic.group,
    (_MS, "ZeroGradient"): arithmetic.zero_gradient,
    (_MS, "BroadcastGradientArgs"): arithmetic.broadcast_gradient_args,
    (_MS, "DivGrad"): arithmetic.div_grad,
    (_MS, "BatchNormInternal"): normalization.batch_norm_internal,
    (_MS, "BatchNormalizationGrad"): normalization.batch_norm_grad,
    (_MS, "LayerNormalizationGrad"): normalization.layer_norm_grad,
    (_MS, "SimplifiedLayerNormalizationGrad"): normalization.simplified_layer_norm_grad,
    (_MS, "InvertibleLayerNormalizationGrad"): normalization.invertible_layer_norm_grad,
    (_MS, "ConvGrad"): convolution.conv_grad,
    (_MS, "ConvTransposeGrad"): convolution.conv_transpose_grad,
    ("", "MaxPoolGrad"): pooling.max_pool_grad,
    ("", "AveragePoolGrad"): pooling.average_pool_grad,
    (_MS, "GatherGrad"): indexing.gather_grad,
    (_MS, "GatherElementsGrad"): indexing.gather_elements_grad,
    (_MS, "GatherNDGrad"): indexing.gather_nd_grad,
    (_MS, "SliceGrad"): indexing.slice_grad,
    (_MS, "ConcatTraining"): indexing.concat_training,
    (_MS, "SplitTraining"): indexing.split_training,
    (_MS, "LSTMTraining"): recurrent.lstm_training,
    (_MS, "LSTMGrad"): recurrent.lstm_grad,
    (_MS, "InPlaceAccumulator"): accumulators.in_place_accumulator,
    (_MS, "InPlaceAccumulatorV2"): accumulators.in_place_accumulator_v2,
}
"""(domain, operator) -> its rule."""

TRAINING_ONLY = frozenset(
    {
        *("GRUTraining", "GRUGrad", "YieldOp", "WaitEvent", "RecordEvent", "PythonOp"),
        *("PythonOpGrad", "AdamOptimizer", "AdamWOptimizer", "AdamW", "SGDOptimizer", "SGDOptimizerV2", "SGDV2"),
        *("LambOptimizer", "InplaceClipGradNorm", "ReduceAllL2", "IsFinite", "IsAllFinite", "MixedPrecisionScale"),
        *("SoftmaxCrossEntropy", "SoftmaxCrossEntropyGrad", "SparseSoftmaxCrossEntropy", "BitmaskDropoutGrad"),
        *("SparseSoftmaxCrossEntropyGrad", "NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2"),
        *(
            "TrainableDropout",
            "TrainableDropoutGrad",
            "SummaryScalar",
            "SummaryHistogram",
            "SummaryMerge",
            "SummaryText",
        ),
        *("Send", "Recv", "View", "HorovodAllReduce", "HorovodBarrier", "NcclAllReduce", "NcclAllGather", "ATenOp"),
        *("NcclReduceScatter", "MegatronF", "MegatronG", "AdasumAllReduce", "FakeQuant", "FakeQuantGrad", "TopKGrad"),
        *("BatchScale", "ScaledSum", "PadAndUnflatten", "FlattenAndUnpad", "ConvGradGrad", "ResizeGrad", "SinGrad"),
        *("DynamicQuantizeLSTMGrad", "MemcpyGrad", "SigmoidCrossEntropyLoss", "BiasSoftmaxGrad", "PadGrad"),
    }
)
"""Operators of com.microsoft that stock builds do not have and that no rule lowers; so does every other `...Grad`."""
