"""Output shapes of ONNX Runtime's training operators that need more than "like input k".

Sources (github.com/microsoft/onnxruntime, 1.19; input and output positions are those of the schemas):
orttraining/orttraining/core/graph/training_op_defs.cc (schemas and inference),
orttraining/orttraining/core/graph/gradient_builder.cc (which tensor a gradient operator gets in which slot).
"""

from __future__ import annotations

from onnx import TensorProto

from onnx_sublinear.ops.shape_arithmetic import Call, Rule, Types, positive_axis, quotient, sum_of
from onnx_sublinear.ops.tensor_types import Dim, TensorType

_BOOL, _INT64 = int(TensorProto.BOOL), int(TensorProto.INT64)


def shape_from(slot: int, elem_slot: int) -> Rule:
    """Input `slot` holds the shape of the output; its element type is that of input `elem_slot`."""

    def rule(call: Call) -> Types:
        dims = call.dims(slot)
        return [TensorType(call.elem(elem_slot), None if dims is None else tuple(dims))]

    return rule


def pool_input(call: Call) -> Types:
    """MaxPoolGrad gets dY and the indices: dX is like the input of the MaxPool that made the indices."""
    found = call.maker_input(call.node.input[1], ("MaxPool",), 0)
    return [found if found is not None else TensorType(call.elem(0), rank_only(call.shape(0)))]


def rank_only(shape: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
    """A pooled shape with the spatial dims unknown: batch and channels stay."""
    return None if shape is None else (*shape[:2], *[None] * (len(shape) - 2))


def average_pool_grad(call: Call) -> Types:
    """AveragePoolGrad gets only dY, so the spatial dims of dX cannot be told; the kernel takes the declared ones."""
    return [TensorType(call.elem(0), rank_only(call.shape(0)))]


def conv_grad(call: Call) -> Types:
    """dX, dW, dB of (dY, X, W): dB has one element an output channel."""
    shape, elem = call.shape(2), call.elem(2)
    return [call.type(1), call.type(2), TensorType(elem, shape[:1] if shape else (None,))]


def conv_transpose_grad(call: Call) -> Types:
    """As ConvGrad, but W is [C, M/group, ...]: the output channels are those of dY."""
    shape, elem = call.shape(0), call.elem(2)
    return [call.type(1), call.type(2), TensorType(elem, shape[1:2] if shape else (None,))]


def batch_norm_internal(call: Call) -> Types:
    """Y, running mean and variance, saved mean and inverse standard deviation, of (X, scale, B, mean, var)."""
    return [call.type(0), call.type(3), call.type(4), call.type(3), call.type(4)]


def loss(call: Call) -> Types:
    """Loss and log_prob of (scores, labels): a scalar unless reduction is "none"."""
    attributes = call.attributes()
    elem = attributes.get("output_type", 0) or call.elem(0)
    per_sample = attributes.get("reduction", b"mean") == b"none"
    shape = call.shape(0)
    log_prob = TensorType(elem, shape)
    return [TensorType(elem, call.shape(1) if per_sample else ()), log_prob]


def one_hot_loss(call: Call) -> Types:
    """SoftmaxCrossEntropy: loss and log_prob of (logits, one-hot labels)."""
    per_sample = call.attributes().get("reduction", b"mean") == b"none"
    labels = call.shape(1)
    return [TensorType(call.elem(0), (labels[:-1] if labels else None) if per_sample else ()), call.type(0)]


def loss_grad(call: Call) -> Types:
    """d_logits of (dY, log_prob, label, ...)."""
    elem = call.attributes().get("output_type", 0) or call.elem(1)
    return [TensorType(elem, call.shape(1))]


def reduce_sum_training(call: Call) -> Types:
    """As ReduceSum; the axes are an input."""
    shape, axes = call.shape(0), call.numbers(1)
    attributes, elem = call.attributes(), call.elem(0)
    keep = bool(attributes.get("keepdims", 1))
    if shape is None:
        return [TensorType(elem, None)]
    if axes is None:
        return [TensorType(elem, (None,) * len(shape) if keep else None)]
    if not axes and attributes.get("noop_with_empty_axes", 0):
        return [call.type(0)]
    gone = {positive_axis(a, len(shape)) for a in axes} or set(range(len(shape)))
    if keep:
        return [TensorType(elem, tuple(1 if i in gone else d for i, d in enumerate(shape)))]
    return [TensorType(elem, tuple(d for i, d in enumerate(shape) if i not in gone))]


def concat_training(call: Call) -> Types:
    """As Concat; also the length of each input along the axis."""
    shapes = [call.shape(i) for i in range(len(call.node.input))]
    lengths = TensorType(_INT64, (len(shapes),))
    first = shapes[0] if shapes else None
    if first is None or any(s is None or len(s) != len(first) for s in shapes):
        return [TensorType(call.elem(0), None), lengths]
    columns = list(zip(*(s for s in shapes if s is not None), strict=True))
    at = positive_axis(call.attributes().get("axis", 0), len(first))
    dims: list[Dim] = []
    for axis, column in enumerate(columns):
        if axis == at:
            dims.append(sum_of(column))
        else:
            dims.append(next((d for d in column if isinstance(d, int)), column[0]))
    return [TensorType(call.elem(0), tuple(dims)), lengths]


def split_training(call: Call) -> Types:
    """As Split; the lengths are an input, in a gradient those that ConcatTraining reported."""
    shape, count = call.shape(0), len(call.node.output)
    if shape is None:
        return [TensorType(call.elem(0), None)] * count
    at = positive_axis(call.attributes().get("axis", 0), len(shape))
    lengths = call.dims(1)
    if lengths is None or len(lengths) != count:
        lengths = [None] * count
    return [TensorType(call.elem(0), (*shape[:at], d, *shape[at + 1 :])) for d in lengths]


def mixed_precision_scale(call: Call) -> Types:
    """Each input but the first, cast; or all in one flat buffer."""
    attributes = call.attributes()
    to, shapes = attributes.get("to", 0), [call.shape(i) for i in range(1, len(call.node.input))]
    if not attributes.get("fuse_outputs", 0):
        return [TensorType(to, s) for s in shapes]
    counts = [None if s is None else quotient(s, ()) for s in shapes]
    return [TensorType(to, (sum_of(counts),))]


def bitmask(call: Call) -> TensorType:
    """One bit an element, in words of 32 bits (bitmask_dropout.cc)."""
    shape = call.shape(0)
    count = None if shape is None else quotient(shape, ())
    return TensorType(int(TensorProto.UINT32), ((count + 31) // 32 if isinstance(count, int) else None,))


def mask(call: Call) -> TensorType:
    """A bool for each element of input 0."""
    return TensorType(_BOOL, call.shape(0))


def lstm_training(call: Call) -> Types:
    """Y, Y_h, Y_c, all cell states, the activations of the gates i, o, f, c; of (X, W, R, ...)."""
    x, elem = call.shape(0), call.elem(0)
    hidden = call.attributes().get("hidden_size")
    if hidden is None and (recurrent := call.shape(2)) is not None and len(recurrent) == 3:
        hidden = recurrent[2]
    directions = 2 if call.attributes().get("direction", b"forward") == b"bidirectional" else 1
    steps, batch = (x[0], x[1]) if x is not None and len(x) == 3 else (None, None)
    last = TensorType(elem, (directions, batch, hidden))
    gates = quotient((4, hidden), ())
    every = TensorType(elem, (steps, directions, batch, hidden))
    return [every, last, last, every, TensorType(elem, (steps, directions, batch, gates))]


def lstm_grad(call: Call) -> Types:
    """dX, dW, dR, dB, dH0, dC0, dP of (X, W, R, lens, H0, C0, ...)."""
    r = call.shape(2)
    bias = None if r is None or len(r) != 3 else (r[0], quotient((8, r[2]), ()))
    x, elem = call.shape(0), call.elem(0)
    peephole = None if r is None or len(r) != 3 else (r[0], quotient((3, r[2]), ()))
    state = None if r is None or x is None or len(r) != 3 or len(x) != 3 else (r[0], x[1], r[2])
    rest = [TensorType(elem, shape) for shape in (bias, state, state, peephole)]
    return [*(call.type(i) for i in range(3)), *rest]


def yield_op(call: Call) -> Types:
    """The gradients that come back; only those of `full_shape_outputs` surely have the shape of what went out."""
    a = call.attributes()
    skipped, full = set(a.get("non_differentiable_outputs", ())), set(a.get("full_shape_outputs", ()))
    slots = [i for i in range(len(call.node.input)) if i not in skipped]
    return [call.type(i) if i in full else TensorType(call.elem(i), None) for i in slots]


def pad_and_unflatten(call: Call) -> Types:
    """[d1, d2, ...] with the first axis padded and split into the two dims that input 2 holds."""
    shape, dims = call.shape(0), call.dims(2)
    known = shape is not None and dims is not None
    return [TensorType(call.elem(0), (*dims, *shape[1:]) if known and dims and shape else None)]


def flatten_and_unpad(call: Call) -> Types:
    """[M1, M2, d2, ...] with the first two axes made one, of which the rows in `indices` are kept; and [M1, M2]."""
    shape, indices = call.shape(0), call.shape(1)
    kept = None if not shape or not indices else (indices[0], *shape[2:])
    return [TensorType(call.elem(0), kept), TensorType(_INT64, (2,))]
