"""Cross entropy with its log probabilities, and its gradient.

Sources: orttraining/orttraining/training_ops/cpu/loss/softmax_cross_entropy_loss.cc and cross_entropy.cc of ONNX
Runtime 1.19; the ONNX operator SoftmaxCrossEntropyLoss.
"""

from __future__ import annotations

from onnx import TensorProto

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value

_INT64 = int(TensorProto.INT64)


def _ignored(e: Emitter, slot: int) -> Value | None:
    """The ignored class as a tensor: input `slot`, else the attribute; None where no class is ignored."""
    given = e.input(slot)
    if given is not None:
        return e.cast(given, _INT64)
    value = e.attribute("ignore_index")
    return None if value is None else e.array(value)


def loss_internal(e: Emitter) -> list[Value]:
    """(loss, log_prob) of (scores, labels, weights, ignore_index): the standard loss, its index given as an input.

    The standard operator takes the ignored class as an attribute. Where it is known only at run time, ignored labels
    are moved to -1, which is no class, and the attribute names that.
    """
    scores, labels = e.inputs(2)
    at = e.input(3)
    ignored = e.attribute("ignore_index") if at is None else e.constant(at)
    if ignored is None and at is not None:
        wide = e.cast(labels, _INT64)
        labels = e.op("Where", e.op("Equal", wide, e.cast(at, _INT64)), e.array(-1), wide)
        ignored = -1
    reduction = e.attribute("reduction", "mean")
    index = None if ignored is None else int(ignored)
    made = e.ops(
        *("SoftmaxCrossEntropyLoss", scores, labels, e.input(2)), outputs=2, reduction=reduction, ignore_index=index
    )
    to = e.attribute("output_type", 0)
    return [e.op("Cast", m, to=to) for m in made] if to and to != e.elem(scores) else made


def loss_grad(e: Emitter) -> list[Value]:
    """d_logits = (exp(log_prob) - onehot(label)) * w * g, where w is 0 at ignored labels.

    w is the weight of the label's class (1 without weights). g is dY at reductions "none" and "sum"; at "mean", dY
    divided by the sum of w where that is not 0. Input 5, where there is one, is added to the result.
    """
    dy, log_prob, label = e.inputs(3)
    like = log_prob
    elem = e.elem(log_prob)
    wide = e.cast(label, _INT64)
    ignored = _ignored(e, 4)
    hit = None if ignored is None else e.op("Equal", wide, ignored)
    weight = _sample_weight(e, wide, hit, like)
    difference = _softmax_minus_label(e, log_prob, wide)
    scale = e.cast(dy, elem)
    reduction = e.attribute("reduction", "mean")
    if reduction == "mean":
        scale = e.op("Div", scale, _weight_total(e, weight, wide, like))
    if weight is not None:
        scale = e.op("Mul", weight, scale)
    if weight is not None or reduction == "none":
        scale = e.unsqueeze(scale, [1])
    result = e.op("Mul", difference, scale)
    if hit is not None:  # a NaN or an infinity at an ignored sample must not come through
        result = e.op("Where", e.unsqueeze(hit, [1]), e.like(0, like), result)
    return [_finished(e, result, elem)]


def _finished(e: Emitter, result: Value, elem: int) -> Value:
    """The result in the output's element type, with what is added to it."""
    to = e.attribute("output_type", 0)
    if to and to != elem:
        result = e.op("Cast", result, to=to)
    added = e.input(5)
    return result if added is None else e.op("Add", result, added)


def _sample_weight(e: Emitter, label: Value, hit: Value | None, like: Value) -> Value | None:
    """The weight of each sample; None where all weigh 1."""
    weight = e.input(3)
    if weight is None:
        return None if hit is None else e.op("Where", hit, e.like(0, like), e.like(1, like))
    if hit is None:
        return e.op("Gather", weight, label)
    inside = e.op("Where", hit, e.array(0), label)  # the ignored label need not be a class
    return e.op("Where", hit, e.like(0, like), e.op("Gather", weight, inside))


def _weight_total(e: Emitter, weight: Value | None, label: Value, like: Value) -> Value:
    """What "mean" divides by: the sum of the weights, or 1 where that is 0."""
    shape = e.known_shape(label)
    if weight is None and shape is not None:
        count = 1
        for d in shape:
            count *= d
        return e.like(max(count, 1), like)
    if weight is None:
        return e.op("Cast", e.op("Size", label), to=e.elem(like))
    total = e.op("ReduceSum", weight, keepdims=0)
    return e.op("Where", e.op("Equal", total, e.like(0, like)), e.like(1, like), total)


def _softmax_minus_label(e: Emitter, log_prob: Value, label: Value) -> Value:
    """exp(log_prob), less 1 at the label. The classes are axis 1."""
    rank = len(e.shape(log_prob))
    classes = e.shape(log_prob)[1]
    column = [1, -1] + [1] * (rank - 2)
    if isinstance(classes, int):
        numbers = e.array(list(range(classes)))
    else:
        count = e.op("Squeeze", e.dim_of(log_prob, 1))
        numbers = e.op("Range", e.array(0), count, e.array(1))
    is_label = e.op("Equal", e.unsqueeze(label, [1]), e.op("Reshape", numbers, e.array(column)))
    return e.op("Sub", e.op("Exp", log_prob), e.op("Cast", is_label, to=e.elem(log_prob)))
