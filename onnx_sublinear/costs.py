"""Cost of a node in FLOP equivalents: arithmetic, plus the bytes it moves times a balance.

One unit makes kernels of both kinds comparable: a GEMM is bound by arithmetic, elementwise work by memory. The
balance is the ratio of the rates that ONNX Runtime's CPU kernels reach with one thread, measured by
`benchmarks/workspace.py --rates` on one core of an x86-64 server (AVX2): GEMM and Conv 60-75 GFLOP/s, elementwise
kernels on buffers that were in use before 12-37 GB/s, so about 4 FLOPs a byte. A GPU's balance is higher: an A100 has
19.5 TFLOP/s over 2.0 TB/s, about 10 (with TF32 or fp16 tensor cores 75 and more), so elementwise work is relatively
dearer there; use a measured profile for such a target. The few microseconds that any kernel takes to start are not
counted: they matter for tensors of a few KiB only.

Costs per element beyond the moved bytes come from the same measurement (Exp and Tanh about 10, Log, Sin and Pow
20-40, a random number about 300) and are FLOP equivalents as well. Views cost 0, every other node at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from onnx import NodeProto

from onnx_sublinear.graph import domain_of
from onnx_sublinear.ops.control_flow_scratch import scan_states, typed_bodies
from onnx_sublinear.ops.einsum_scratch import einsum, einsum_macs
from onnx_sublinear.ops.kernel_call import KernelCall, UnknownTypeError
from onnx_sublinear.ops.tensor_types import TensorType, tensor_bytes

__all__ = ["FLOPS_PER_BYTE", "node_cost"]

FLOPS_PER_BYTE = 4
"""How many FLOPs one CPU thread does in the time in which it moves a byte."""

_Flops = Callable[[KernelCall], int]


def _per_output(flops: int) -> _Flops:
    return lambda call: flops * call.out_count()


def _per_input(flops: int, slot: int = 0) -> _Flops:
    return lambda call: flops * call.count(slot)


def _conv(call: KernelCall) -> int:
    """Each output element: input channels of a group x kernel."""
    return 2 * call.out_count() * math.prod(call.shape(1)[1:])


def _conv_transpose(call: KernelCall) -> int:
    """Each input element: output channels of a group x kernel."""
    return 2 * call.count(0) * math.prod(call.shape(1)[1:])


def _conv_grad(call: KernelCall) -> int:
    """The gradients of X and of W, each as much as the Conv, where they are wanted."""
    wanted = sum(call.has_output(slot) for slot in (0, 1))
    return 2 * wanted * call.count(0) * math.prod(call.shape(2)[1:])


def _matmul(call: KernelCall) -> int:
    a = call.shape(0)
    transposed = call.integer("transA", 0) and len(a) > 1
    return 2 * call.out_count() * (a[-2] if transposed else a[-1])


def _einsum(call: KernelCall) -> int:
    """The products, and the transposed copies that the kernel makes of operands and result."""
    return 2 * einsum_macs(call) + FLOPS_PER_BYTE * 2 * einsum(call)


def _attention(call: KernelCall) -> int:
    """Both products of query, key and value (batch, length, width), heads folded into the width; and the softmax."""
    query, key = call.shape(0), call.shape(1) if call.has_input(1) else call.shape(0)
    pairs = math.prod(query[:-1]) * key[-2]
    return 4 * pairs * query[-1] + 10 * pairs


def _pool(call: KernelCall) -> int:
    return call.out_count() * math.prod(call.integers("kernel_shape") or call.shape(0)[2:])


def _recurrent(gates: int, passes: int = 1) -> _Flops:
    """`gates` products of every step's input and state with W and R, and 10 a gate for its activation."""

    def flops(call: KernelCall) -> int:
        steps, batch, features = call.shape(0)
        hidden, directions = call.shape(2)[2], call.shape(1)[0]
        return passes * directions * steps * batch * gates * hidden * (2 * (features + hidden) + 10)

    return flops


def _copied(call: KernelCall) -> int:
    """Kernels that pass over the result more than once: n-ary ones pairwise, Where by two selections."""
    return 2 * FLOPS_PER_BYTE * max(0, len(call.node.input) - 2) * call.out_count() * call.element_bytes(1)


_ONNX: dict[str, _Flops] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _conv),
    "ConvTranspose": _conv_transpose,
    **dict.fromkeys(("MatMul", "Gemm", "MatMulInteger"), _matmul),
    "Einsum": _einsum,
    "Attention": _attention,
    **dict.fromkeys(("Exp", "Tanh", "Sigmoid", "Erf", "Softplus", "Elu", "Selu", "Celu", "Mish"), _per_output(10)),
    **dict.fromkeys(("Gelu", "HardSwish", "Softsign", "Sqrt", "Div", "Mod"), _per_output(10)),
    **dict.fromkeys(("Log", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh"), _per_output(30)),
    "Pow": _per_output(30),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _per_output(10)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "GroupNormalization"), _per_output(10)),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization", "LpNormalization", "LRN"), _per_output(10)),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _per_input(10)),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _per_output(300)),
    **dict.fromkeys(("Dropout", "Bernoulli", "Multinomial"), _per_output(300)),
    **dict.fromkeys(
        (
            *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL1"),
            *("ReduceL2", "ReduceLogSum", "ArgMax", "ArgMin", "CumSum", "GlobalAveragePool", "GlobalMaxPool"),
        ),
        _per_input(1),
    ),
    "ReduceLogSumExp": _per_input(10),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    **dict.fromkeys(("TopK", "NonZero", "Unique"), _per_input(20)),
    "Resize": _per_output(10),
    **dict.fromkeys(("Where", "Sum", "Max", "Min", "Mean"), _copied),
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
}

_MICROSOFT: dict[str, _Flops] = {
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul", "FusedGemm"), _matmul),
    "FusedConv": _conv,
    "ConvGrad": _conv_grad,
    **dict.fromkeys(("MultiHeadAttention", "GroupQueryAttention"), _attention),
    **dict.fromkeys(("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "BiasSoftmax"), _per_output(10)),
    **dict.fromkeys(("SkipLayerNormalization", "SimplifiedLayerNormalization"), _per_output(10)),
    **dict.fromkeys(("SkipSimplifiedLayerNormalization", "BatchNormInternal"), _per_output(10)),
    **dict.fromkeys(("GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX"), _per_output(20)),
    **dict.fromkeys(("BiasFastGeluGrad_dX", "SigmoidGrad"), _per_output(20)),
    **dict.fromkeys(("TanhGrad", "ReluGrad", "LeakyReluGrad", "DropoutGrad"), _per_output(3)),
    **dict.fromkeys(("SoftmaxGrad", "SoftmaxGrad_13"), _per_output(5)),
    **dict.fromkeys(("LogSoftmaxGrad", "LogSoftmaxGrad_13"), _per_output(10)),
    **dict.fromkeys(("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"), _per_input(60)),
    **dict.fromkeys(("InvertibleLayerNormalizationGrad",), _per_input(60)),
    "BatchNormalizationGrad": _per_input(15),
    "SoftmaxCrossEntropyLossInternal": _per_input(10),
    **dict.fromkeys(("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad"), _per_input(10, 1)),
    **dict.fromkeys(("BitmaskDropout", "BiasDropout", "BitmaskBiasDropout"), _per_input(300)),
    "ReduceSumTraining": _per_input(1),
    "DivGrad": _per_input(20, 1),
    "LSTMTraining": _recurrent(4),
    "GRUTraining": _recurrent(3),
    "LSTMGrad": _recurrent(4, 2),
    "GRUGrad": _recurrent(3, 2),
}

_TABLES: Mapping[str, Mapping[str, _Flops]] = {"": _ONNX, "com.microsoft": _MICROSOFT}

_FREE = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant", "Optional"})
_NO_DATA = frozenset({"Shape", "Size"})  # they read dims, not elements


def node_cost(
    node: NodeProto, inputs: Sequence[TensorType | None], outputs: Sequence[TensorType | None], opset: int
) -> int:
    """FLOP equivalents of one run of `node`.

    Args:
        node: the node.
        inputs: bound type of each input slot; None: absent or unknown.
        outputs: bound type of each output slot.
        opset: version of the default domain.

    Returns:
        0 for views; else at least 1. Where a type is unknown, only the bytes that are known count.
    """
    domain = domain_of(node)
    if not domain and node.op_type in _FREE:
        return 0
    if not domain and node.op_type in _NO_DATA:
        return 1
    call = KernelCall(node, inputs, outputs, opset)
    cost = FLOPS_PER_BYTE * _moved_bytes(call)
    if not domain and node.op_type in _TRIPS:
        return max(1, cost, _TRIPS[node.op_type](call) * _body_cost(call))
    rule = _TABLES.get(domain, {}).get(node.op_type)
    with suppress(UnknownTypeError, IndexError, ValueError):  # the last two: a rank that does not fit
        cost += rule(call) if rule is not None else 0
    return max(1, cost)


def _moved_bytes(call: KernelCall) -> int:
    """Bytes read and written: an input is read in full, or as much of it as the result has (Slice, Gather)."""
    written = sum((tensor_bytes(t) or 0) for t in call.outputs if t is not None)
    read = 0
    for known in call.inputs:
        size = (tensor_bytes(known) or 0) if known is not None else 0
        read += min(size, written) if call.node.op_type in _PARTIAL_READERS else size
    return read + written


_PARTIAL_READERS = frozenset({"Slice", "Gather", "GatherND", "GatherElements"})


def _body_cost(call: KernelCall) -> int:
    """Cost of the dearest body."""
    costs = [
        sum(
            node_cost(n, [types.get(i) for i in n.input], [types.get(o) for o in n.output], call.opset)
            for n in body.node
        )
        for body, types in typed_bodies(call)
    ]
    return max(costs, default=0)


def _scan_trips(call: KernelCall) -> int:
    """The length of the first scanned input."""
    states = scan_states(call)
    axes = call.integers("scan_input_axes") or (0,)
    return _static_dim(call.inputs, states, axes[0])


def _loop_trips(call: KernelCall) -> int:
    """The length of the first stacked output."""
    return _static_dim(call.outputs, len(call.node.input) - 2, 0)


def _static_dim(types: Sequence[TensorType | None], slot: int, axis: int) -> int:
    known = types[slot] if slot < len(types) else None
    dim = known.shape[axis] if known is not None and known.shape and -len(known.shape) <= axis < len(known.shape) else 1
    return dim if isinstance(dim, int) else 1


_TRIPS: Mapping[str, Callable[[KernelCall], int]] = {"If": lambda _: 1, "Loop": _loop_trips, "Scan": _scan_trips}
