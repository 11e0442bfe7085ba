"""Scratch memory of ONNX Runtime's CPU kernels: bytes held while a node runs, beyond its inputs and outputs.

Three parts: the table (one row an operator, formulas in `kernel_scratch`, `einsum_scratch` and
`control_flow_scratch`), float16 nodes, which run in float, and the run's own structures. One intra-op thread: with
more, Conv takes up to 64 KiB and TopK its indices once a thread; the other formulas do not change. Operators without
a row were measured to need nothing, or are not known; they count 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from onnx import NodeProto, TensorProto

from onnx_sublinear.graph import domain_of
from onnx_sublinear.ops import kernel_scratch as scratch
from onnx_sublinear.ops.control_flow_scratch import control_flow
from onnx_sublinear.ops.einsum_scratch import einsum
from onnx_sublinear.ops.float16 import runs_in_float32
from onnx_sublinear.ops.kernel_call import KernelCall, UnknownTypeError
from onnx_sublinear.ops.tensor_types import TensorType, tensor_bytes

__all__ = ["run_overhead_bytes", "scratch_on_heap", "workspace_bytes"]

_ONNX: dict[str, scratch.Rule] = {
    "Conv": scratch.conv,
    "ConvTranspose": scratch.conv_transpose,
    "MatMul": scratch.matmul,
    "Einsum": einsum,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), scratch.softmax),
    **dict.fromkeys(("Sum", "Max", "Min", "Mean"), scratch.variadic),
    "Where": scratch.where,
    "Expand": scratch.expand,
    **dict.fromkeys(("ReduceSum", "ReduceMean"), scratch.reduce(by_gemm=True)),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), scratch.reduce()),
    **dict.fromkeys(
        (
            *("ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceL2"),
            *("ReduceLogSum", "ReduceLogSumExp"),
        ),
        scratch.reduce(outer=False),
    ),
    "OneHot": scratch.index_entries(0),
    "ScatterElements": scratch.index_entries(1),
    "ScatterND": scratch.index_entries(1, per_row=True),
    "GatherND": scratch.index_entries(1, per_row=True),
    "TopK": scratch.top_k,
    "NonZero": scratch.non_zero,
    "Resize": scratch.resize,
    "BatchNormalization": scratch.batch_norm,
    "GroupNormalization": scratch.copies(2),  # functions: no kernels of their own
    "Bernoulli": lambda call: call.count(0),
    "LRN": scratch.local_response_norm,
    "Dropout": scratch.dropout,
    "LSTM": scratch.lstm,
    "GRU": scratch.gru,
    "RNN": scratch.rnn,
    "SoftmaxCrossEntropyLoss": scratch.loss,
}

_MICROSOFT: dict[str, scratch.Rule] = {
    "FusedMatMul": scratch.matmul,
    "FusedConv": scratch.conv,
    **dict.fromkeys(("BiasGelu", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX", "DivGrad"), scratch.copies(1)),
    "FastGelu": lambda call: call.input_bytes() if call.has_input(1) else 0,
    "ConvGrad": scratch.conv_grad,
    "BatchNormInternal": scratch.batch_norm,
    **dict.fromkeys(
        ("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", "InvertibleLayerNormalizationGrad"),
        scratch.layer_norm_grad,
    ),
    **dict.fromkeys(("SoftmaxGrad", "SoftmaxGrad_13"), scratch.softmax_grad(0)),
    **dict.fromkeys(("LogSoftmaxGrad", "LogSoftmaxGrad_13"), scratch.softmax_grad(1)),
    "SoftmaxCrossEntropyLossInternal": scratch.loss,
    **dict.fromkeys(("SoftmaxCrossEntropyLossGrad", "SoftmaxCrossEntropyLossInternalGrad"), scratch.loss_grad),
    "GatherElementsGrad": scratch.index_entries(2),
    "GatherNDGrad": scratch.index_entries(1, per_row=True),
    "ReduceSumTraining": scratch.reduce(by_gemm=True),
    "LSTMTraining": scratch.lstm_training,
    "GRUTraining": scratch.gru_training,
    "LSTMGrad": scratch.lstm_grad,
}

# Kernels that take their scratch from the heap, not from the session's allocator, so never from its arena.
_ON_HEAP = frozenset(
    {
        *("MatMul", "FusedMatMul", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceSumTraining", "Expand"),
        *(
            "OneHot",
            "ScatterElements",
            "ScatterND",
            "GatherND",
            "GatherElementsGrad",
            "GatherNDGrad",
            "TopK",
            "NonZero",
        ),
        *("BatchNormalization", "SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal"),
        *("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", "InvertibleLayerNormalizationGrad"),
    }
)

_TABLES: Mapping[str, Mapping[str, scratch.Rule]] = {"": _ONNX, "com.microsoft": _MICROSOFT}
_NOTHING: Mapping[str, TensorType] = MappingProxyType({})
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})

# Operators without a float16 kernel that are functions: the runtime expands them, so more float tensors of the size
# of their output exist at once than one kernel would need.
_FLOAT16_TEMPORARIES = {"Softmax": 1, "LogSoftmax": 2, "Gelu": 2, "FastGelu": 2, "QuickGelu": 1, "TanhGrad": 1}

_ORT_VALUE_BYTES = 24  # sizeof(OrtValue)
_NAME_BYTES = 32  # sizeof(std::string)
_ARGUMENT_BYTES = 2 * _NAME_BYTES + 40  # two lists of names, and the binding's entry


def scratch_on_heap(node: NodeProto) -> bool:
    """Whether the kernel's scratch stays out of the session's arena."""
    return node.op_type in _ON_HEAP and domain_of(node) in ("", "com.microsoft")


def workspace_bytes(
    node: NodeProto,
    inputs: Sequence[TensorType | None],
    outputs: Sequence[TensorType | None],
    opset: int,
    *,
    training: bool = False,
    outer: Mapping[str, TensorType] = _NOTHING,
) -> int:
    """Bytes of scratch that ORT's CPU kernel of `node` holds while it runs, beyond inputs and outputs.

    A float16 tensor in `inputs` or `outputs` is one that exists as float16: a node that runs in float adds its float
    copies. Give tensors that the runtime holds as float only (`ops.float16.held_types`) with their float type.

    Args:
        node: the node.
        inputs: bound type of each input slot; None: absent or unknown.
        outputs: bound type of each output slot.
        opset: version of the default domain.
        training: onnxruntime-training 1.19.2 instead of current stock builds.
        outer: types of the tensors that the node's subgraphs may capture, by name.

    Returns:
        The bytes; 0 where a type that the formula needs is unknown.
    """
    domain = domain_of(node)
    call = KernelCall(node, inputs, outputs, opset, training, outer)
    if runs_in_float32(node, inputs, training=training):
        return _float32_copies(call) + _scratch(domain, call.in_float32())
    return _scratch(domain, call)


def _inner_scratch(node: NodeProto, types: Mapping[str, TensorType], *, opset: int, training: bool) -> int:
    """Scratch of a node of a body whose tensors, and those around it, have `types`."""
    inputs, outputs = ([types.get(name) for name in names] for names in (node.input, node.output))
    return workspace_bytes(node, inputs, outputs, opset, training=training, outer=types)


def _scratch(domain: str, call: KernelCall) -> int:
    rule = _TABLES.get(domain, {}).get(call.node.op_type)
    try:
        if call.node.op_type in _CONTROL_FLOW and not domain:
            return control_flow(call, partial(_inner_scratch, opset=call.opset, training=call.training))
        return max(0, rule(call)) if rule is not None else 0
    except (UnknownTypeError, IndexError):  # IndexError: an operand of too low a rank; inference reports it
        return 0


def _float32_copies(call: KernelCall) -> int:
    """Float copies of float16 inputs while the kernel runs, or of the outputs while they are cast back.

    The caller counts the float16 outputs, which do not exist yet while the kernel runs.
    """
    seen: set[str] = set()
    into = 0
    for name, known in zip(call.node.input, call.inputs, strict=False):
        if known is not None and known.elem_type == TensorProto.FLOAT16 and name not in seen:
            seen.add(name)
            into += 2 * (tensor_bytes(known) or 0)
    out_of = sum(
        tensor_bytes(known) or 0
        for known in call.outputs
        if known is not None and known.elem_type == TensorProto.FLOAT16
    )
    temporaries = 2 * _FLOAT16_TEMPORARIES.get(call.node.op_type, 0) * out_of
    return max(into + out_of + temporaries, 2 * out_of)


def run_overhead_bytes(num_values: int, num_arguments: int = 0) -> int:
    """Bytes of the run's own structures beside tensors.

    Measured: an array with one OrtValue for each value, and for each input and output two copies of the name and one
    entry of 40 bytes. A further 4 bytes for each released buffer are left out.

    Args:
        num_values: values of the main graph: inputs, initializers, node outputs.
        num_arguments: graph inputs and outputs of the run.
    """
    return _ORT_VALUE_BYTES * num_values + _ARGUMENT_BYTES * num_arguments
