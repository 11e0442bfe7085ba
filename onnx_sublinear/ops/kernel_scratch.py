"""Scratch formulas of single CPU kernels, in bytes. Rows of the table in `ops.workspace` point here.

Each formula names the source file that allocates; all were checked against the allocations that a malloc tracer
sees (`benchmarks/workspace.py`), on onnxruntime 1.31.1 and onnxruntime-training 1.19.2 with one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx_sublinear.ops.kernel_call import KernelCall, Shape, broadcast

__all__ = [
    "Rule",
    "batch_norm",
    "conv",
    "conv_grad",
    "conv_transpose",
    "copies",
    "dropout",
    "expand",
    "gru",
    "gru_training",
    "index_entries",
    "layer_norm_grad",
    "local_response_norm",
    "loss",
    "loss_grad",
    "lstm",
    "lstm_grad",
    "lstm_training",
    "matmul",
    "non_zero",
    "reduce",
    "resize",
    "rnn",
    "softmax",
    "softmax_grad",
    "top_k",
    "variadic",
    "where",
]

Rule = Callable[[KernelCall], int]

_INDEX_BYTES = 8  # int64_t, size_t, pointers
_FLOAT_BYTES = 4
_CONV_BUFFER_BYTES = 64 * 1024  # MLAS_CONV_WORKING_BUFFER_SIZE_PER_THREAD * sizeof(float)
_GEMM_PARAMS_BYTES = 64  # MLAS_SGEMM_DATA_PARAMS, one a matrix of the batch


def copies(times: int, slot: int = 0) -> Rule:
    """`times` buffers of the size of an input."""
    return lambda call: times * call.input_bytes(slot)


def index_entries(slot: int, *, per_row: bool = False) -> Rule:
    """One int64 for each index in an input, or for each row of indices (core/providers/cpu/tensor/scatter*.cc)."""
    return lambda call: math.prod(call.shape(slot)[:-1] if per_row else call.shape(slot)) * _INDEX_BYTES


def conv(call: KernelCall) -> int:
    """MlasConvPrepare (core/mlas/lib/convolve.cpp): none, im2col of one image, or one fixed buffer a thread."""
    image, weights, result = call.shape(0)[2:], call.shape(1), call.out_shape()[2:]
    channels, kernel = weights[1], weights[2:]
    unpadded = tuple(i - k + 1 for i, k in zip(image, kernel, strict=True)) == result
    if unpadded and not any(call.integers("pads")) and set(call.integers("strides")) <= {1}:
        # One GEMM reads the input where it lies: 1x1 kernels, and one channel under a kernel of its full width.
        rows, columns = ((1, *image), (1, *kernel)) if len(image) == 1 else (image, kernel)
        spans = columns[1:] == rows[1:] or (columns[0] == rows[0] and columns[1:] == (1,))
        if math.prod(kernel) == 1 or (channels == 1 and len(rows) == 2 and spans):
            return 0
    filters, points = weights[0] // max(1, call.integer("group", 1)), math.prod(result)
    if filters > points:
        return points * channels * math.prod(kernel) * call.element_bytes()
    return _CONV_BUFFER_BYTES


def conv_transpose(call: KernelCall) -> int:
    """The column buffer of one image (core/providers/cpu/nn/conv_transpose.cc)."""
    return math.prod(call.shape(1)[1:]) * math.prod(call.shape(0)[2:]) * call.element_bytes()


def conv_grad(call: KernelCall) -> int:
    """Column buffer and bias multiplier of one image (orttraining/training_ops/cpu/nn/conv_grad.cc)."""
    return (math.prod(call.shape(2)[1:]) + 1) * math.prod(call.shape(0)[2:]) * call.element_bytes()


def matmul(call: KernelCall) -> int:
    """Offsets and GEMM parameters, one a matrix of the batch (core/providers/cpu/math/matmul*.cc)."""
    a, b = call.shape(0), call.shape(1)
    if len(b) == 2 and not call.integer("transA", 0) and not call.integer("transBatchA", 0):
        return 0  # the batch of A is folded into its rows
    batch = math.prod(broadcast(a[:-2], b[:-2])) if len(b) > 1 else math.prod(a[:-1])
    return batch * (_GEMM_PARAMS_BYTES + 3 * _INDEX_BYTES) if batch > 1 else 0


def softmax(call: KernelCall) -> int:
    """Input and output transposed, where the axis is not the last (core/providers/cpu/math/softmax.h)."""
    rank = len(call.shape(0))
    last = call.opset < 13 or call.integer("axis", -1) % max(1, rank) == rank - 1
    return 0 if last else 2 * call.input_bytes()


def softmax_grad(fused: int) -> Rule:
    """`fused` full buffers (exp of LogSoftmax), row sums and ones; three transposed tensors for an inner axis.

    Source: orttraining/training_ops/cpu/op_gradients.cc.
    """

    def rule(call: KernelCall) -> int:
        shape, size = call.shape(1), call.input_bytes(1)
        rank = len(shape)
        axis = call.integer("axis", -1 if call.node.op_type.endswith("_13") else 1) % max(1, rank)
        if not call.node.op_type.endswith("_13"):
            rows, columns, transposed = math.prod(shape[:axis]), math.prod(shape[axis:]), 0
        else:
            columns = shape[axis] if shape else 1
            rows, transposed = math.prod(shape) // max(1, columns), 0 if axis == rank - 1 else 3
        return (fused + transposed) * size + (0 if fused else (rows + columns) * _FLOAT_BYTES)

    return rule


def variadic(call: KernelCall) -> int:
    """One more result for three inputs and above (core/providers/cpu/math/element_wise_ops.cc)."""
    return call.out_count() * call.element_bytes() if len(call.node.input) > 2 else 0


def where(call: KernelCall) -> int:
    """Both selections, each broadcast with the condition only (core/providers/cpu/tensor/where_op.cc)."""
    condition = call.shape(0)
    counts = (math.prod(broadcast(condition, call.shape(slot))) for slot in (1, 2))
    return sum(counts) * call.element_bytes(1)


def expand(call: KernelCall) -> int:
    """One offset for each run of the input that is copied as a whole (core/providers/cpu/tensor/expand.cc)."""
    source, result = call.shape(0), call.out_shape()
    padded = (1,) * (len(result) - len(source)) + source
    grown = [i for i, (a, b) in enumerate(zip(padded, result, strict=True)) if i == 0 or (a == 1 and b > 1)]
    if not grown or 0 in result:
        return 0
    return math.prod(padded) // math.prod(padded[grown[-1] :]) * _INDEX_BYTES


def _runs(source: Shape, result: Shape, keepdims: bool) -> list[tuple[bool, int]]:
    """Neighbouring axes of one kind merged: (is reduced, elements). Axes of one element are left out."""
    runs: list[tuple[bool, int]] = []
    kept = list(result)
    for axis, size in enumerate(source):
        if keepdims:
            reduced = axis < len(result) and result[axis] != size
        else:
            reduced = not kept or kept[0] != size
            del kept[: 0 if reduced else 1]
        if size == 1:
            continue
        if runs and runs[-1][0] == reduced:
            runs[-1] = (reduced, runs[-1][1] * size)
        else:
            runs.append((reduced, size))
    return runs


def reduce(*, by_gemm: bool = False, outer: bool = True) -> Rule:
    """Ones for a sum by GEMM, or index tables where no fast kernel fits (core/providers/cpu/reduction).

    Args:
        by_gemm: kept-reduced-kept runs are summed with two vectors of ones.
        outer: reduced-kept-reduced runs have a fast kernel.
    """

    def rule(call: KernelCall) -> int:
        runs = _runs(call.shape(0), call.out_shape(), bool(call.integer("keepdims", 1)))
        kinds = "".join("R" if reduced else "K" for reduced, _ in runs)
        if kinds == "KRK":
            return 2 * runs[1][1] * call.element_bytes() if by_gemm else 0
        if len(kinds) < 3 or (kinds == "RKR" and outer):
            return 0
        tables = (math.prod([n for reduced, n in runs if reduced is kind][:-1]) for kind in (True, False))
        return sum(tables) * _INDEX_BYTES

    return rule


def batch_norm(call: KernelCall) -> int:
    """Vectors of channels: five in training mode, else three (core/providers/cpu/nn/batch_norm.h)."""
    vectors = 5 if call.integer("training_mode", 0) else 3
    return vectors * call.shape(0)[1] * call.element_bytes() if len(call.shape(0)) > 1 else 0


def layer_norm_grad(call: KernelCall) -> int:
    """Four arrays of X's size and two row means (orttraining/training_ops/cpu/nn/layer_norm.cc)."""
    shape = call.shape(1)
    rows = math.prod(shape[: call.integer("axis", -1) % max(1, len(shape))])
    return 4 * call.input_bytes(1) + 2 * rows * call.element_bytes(1)


def local_response_norm(call: KernelCall) -> int:
    """The scale and one image's padded squares (core/providers/cpu/nn/lrn.cc)."""
    channels, image = call.shape(0)[1], math.prod(call.shape(0)[2:])
    return call.input_bytes() + (channels + call.integer("size", 1) - 1) * image * call.element_bytes()


def dropout(call: KernelCall) -> int:
    """The mask, where it is no output (core/providers/cpu/nn/dropout_op.h)."""
    return 0 if call.has_output(1) else call.count(0)


def loss(call: KernelCall) -> int:
    """Shifted logits, a loss a sample, log-probabilities that are no output, and transposed logits of rank 3 and above.

    The stock build has no such kernel and expands the operator's function, which holds one tensor less at its peak.
    Source: orttraining/training_ops/cpu/loss/softmax_cross_entropy_loss.cc.
    """
    tensors = 1 + (not call.has_output(1)) + (call.training and len(call.shape(0)) > 2)
    samples = call.count(1) * call.element_bytes() if call.training or call.has_input(2) else 0
    return tensors * call.input_bytes() + samples


def loss_grad(call: KernelCall) -> int:
    """Transposed log-probabilities of rank 3 and above (softmax_cross_entropy_loss.cc)."""
    return call.input_bytes(1) if len(call.shape(1)) > 2 else 0


def top_k(call: KernelCall) -> int:
    """A heap of k indices, or one index an element (SelectTopK in core/providers/cpu/math/top_k.cc)."""
    axis, found = call.integer("axis", -1), call.out_shape()
    k, elements = found[axis], call.shape(0)[axis]
    heap = k != 1 and (k < 4 or math.log2(k) / max(1.0, math.log2(elements)) < 0.725)
    return (k if heap or k <= 1 else elements) * _INDEX_BYTES


def non_zero(call: KernelCall) -> int:
    """Room for every index (core/providers/cpu/tensor/nonzero_op.cc)."""
    return max(1, len(call.shape(0))) * call.count(0) * _INDEX_BYTES


def resize(call: KernelCall) -> int:
    """Two indices and two weights a row and a column (SetupUpsampleBilinear in core/providers/cpu/tensor/upsample)."""
    if call.text("mode", "nearest") != "linear":
        return 0
    return 4 * _FLOAT_BYTES * sum(call.out_shape()[-2:])


def _recurrent(call: KernelCall, gates: int, states: int) -> int:
    """Gate pre-activations of the whole sequence and `states` states a direction; reversed copies for backward."""
    steps, batch, features = call.shape(0)
    hidden = call.shape(2)[2]
    directions = call.shape(1)[0]
    backward = call.text("direction", "forward") != "forward"
    floats = directions * batch * hidden * (gates * steps + states)
    floats += steps * batch * (hidden + features) if backward else 0
    return floats * call.element_bytes()


def lstm(call: KernelCall) -> int:
    """core/providers/cpu/rnn/uni_directional_lstm.cc; last states that are no output are held too."""
    return _recurrent(call, 4, 3 + sum(not call.has_output(slot) for slot in (1, 2)))


def _gru_states(call: KernelCall) -> int:
    """Two; broadcast biases, where there are any; one of each more for linear_before_reset."""
    later = 1 if call.integer("linear_before_reset", 0) else 0
    return 2 + later + (3 + later if call.has_input(3) else 0)


def gru(call: KernelCall) -> int:
    """core/providers/cpu/rnn/deep_cpu_gru.cc; a last state that is no output is held too."""
    return _recurrent(call, 3, _gru_states(call) + (not call.has_output(1)))


def gru_training(call: KernelCall) -> int:
    """The states of `gru`; the gates are an output (orttraining/training_ops/cpu/rnn/gru.cc)."""
    return call.shape(0)[1] * call.shape(2)[2] * _gru_states(call) * call.element_bytes()


def rnn(call: KernelCall) -> int:
    """One direction's pre-activations (core/providers/cpu/rnn/rnn.cc)."""
    steps, batch, _ = call.shape(0)
    return steps * batch * call.shape(2)[2] * call.element_bytes()


def lstm_training(call: KernelCall) -> int:
    """The states of `lstm`; the gates are an output (orttraining/training_ops/cpu/rnn/lstm.cc)."""
    return call.shape(0)[1] * call.shape(2)[2] * 3 * call.element_bytes()


def lstm_grad(call: KernelCall) -> int:
    """Weight gradients of one sample, five hidden vectors, absent states and their gradients (lstm_grad_compute.cc)."""
    hidden, batch = call.shape(2)[2], call.shape(0)[1]
    absent = sum(not call.has_input(slot) for slot in (4, 5)) + sum(not call.has_output(slot) for slot in (4, 5))
    return (call.count(1) + call.count(2) + 5 * hidden + absent * batch * hidden) * call.element_bytes()
