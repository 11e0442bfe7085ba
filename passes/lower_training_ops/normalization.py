"""Batch and layer normalization: the training forms with saved statistics, and the gradients.

Sources: Ioffe and Szegedy, arXiv 1502.03167, section 3 (gradients); Ba, Kiros and Hinton, arXiv 1607.06450;
orttraining/orttraining/training_ops/cpu/nn/batch_norm_grad.cc, batch_norm_internal.cc and layer_norm.cc of ONNX
Runtime 1.19 (which statistics are saved). The variances are the biased ones.
"""

from __future__ import annotations

import math

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value


def _others(e: Emitter, x: Value) -> list[int]:
    """All axes but the channels (axis 1)."""
    return [i for i in range(len(e.shape(x))) if i != 1]


def _per_channel(e: Emitter, value: Value, x: Value) -> Value:
    """A value for each channel, fit to be broadcast with X."""
    axes = list(range(1, len(e.shape(x)) - 1))
    return e.unsqueeze(value, axes) if axes else value


def _count(e: Emitter, x: Value, axes: list[int]) -> Value:
    """How many elements of X one reduction over `axes` takes, as a scalar of the type of X."""
    dims = [e.shape(x)[i] for i in axes]
    if all(isinstance(d, int) for d in dims):
        return e.like(math.prod(d for d in dims if isinstance(d, int)), x)
    product = e.op("ReduceProd", e.op("Gather", e.op("Shape", x), e.array(axes)), keepdims=0)
    return e.op("Cast", product, to=e.elem(x))


def batch_norm_internal(e: Emitter) -> list[Value]:
    """(Y, running mean, running variance, mean, 1 / sqrt(variance + epsilon)) of (X, scale, B, mean, variance).

    running = momentum * running + (1 - momentum) * current. The statistics are computed here and given to
    BatchNormalization in inference mode: its training mode saves none, and on CUDA takes the unbiased variance.
    """
    x, scale, bias, old_mean, old_variance = e.inputs(5)
    axes, epsilon, momentum = _others(e, x), e.attribute("epsilon", 1e-5), e.attribute("momentum", 0.9)
    elem, stat = e.elem(x), e.elem(old_mean)
    mean = e.reduce("ReduceMean", x, axes, True)
    centred = e.op("Sub", x, mean)
    variance = e.reduce("ReduceMean", e.op("Mul", centred, centred), axes, False)
    flat = e.op("Reshape", mean, e.array([-1]))
    if stat != elem:
        flat, variance = (e.op("Cast", v, to=stat) for v in (flat, variance))
    y = e.op("BatchNormalization", x, scale, bias, flat, variance, epsilon=epsilon)

    def moved(old: Value, now: Value) -> Value:
        kept = e.op("Mul", old, e.like(momentum, old))
        return e.op("Add", kept, e.op("Mul", now, e.like(1 - momentum, old)))

    deviation = e.op("Sqrt", e.op("Add", variance, e.like(epsilon, old_variance)))
    inverse = e.op("Reciprocal", deviation)
    return [y, moved(old_mean, flat), moved(old_variance, variance), flat, inverse]


def batch_norm_grad(e: Emitter) -> list[Value]:
    """dX, d_scale, dB of (dY, X, scale, mean, inverse deviation), sums over all axes but the channels.

    dB = sum(dY); d_scale = sum(dY * x) with x = (X - mean) * inverse deviation;
    dX = scale * inverse deviation * (dY - (dB + x * d_scale) / n), n elements a channel.
    """
    dy, x, scale, mean, inverse = e.inputs(5)
    elem = e.elem(x)
    axes = _others(e, x)
    mean, inverse, factor = (_per_channel(e, e.cast(v, elem), x) for v in (mean, inverse, scale))
    normal = e.op("Mul", e.op("Sub", x, mean), inverse)
    d_scale = e.total(e.op("Mul", dy, normal), axes, False)
    d_bias = e.total(dy, axes, False)
    count = _count(e, x, axes)
    bias_part, scale_part = (_per_channel(e, e.op("Div", v, count), x) for v in (d_bias, d_scale))
    rest = e.op("Sub", e.op("Sub", dy, bias_part), e.op("Mul", normal, scale_part))
    dx = e.op("Mul", rest, e.op("Mul", factor, inverse))
    if e.elem(scale) != elem:
        d_scale, d_bias = (e.op("Cast", v, to=e.elem(scale)) for v in (d_scale, d_bias))
    return [dx, d_scale, d_bias]


def layer_norm_grad(e: Emitter) -> list[Value]:
    """dX, d_scale, dB of (dY, X, scale, mean, inverse deviation), means over the axes from `axis` on.

    g = dY * scale; x = (X - mean) * inverse deviation; dX = inverse deviation * (g - mean(g) - x * mean(g * x));
    d_scale = sum(dY * x) and dB = sum(dY) over the other axes.
    """
    dy, x, scale, mean, inverse = e.inputs(5)
    wide = e.elem(mean)
    normal = e.op("Mul", e.op("Sub", e.cast(x, wide), mean), inverse)
    return _layer_norm(e, dy, x, scale, inverse, normal, centred=True)


def simplified_layer_norm_grad(e: Emitter) -> list[Value]:
    """As LayerNormalizationGrad, without means.

    x = X * inverse deviation; dX = inverse deviation * (g - x * mean(g * x)).
    """
    dy, x, scale, inverse = e.inputs(4)
    normal = e.op("Mul", e.cast(x, e.elem(inverse)), inverse)
    return _layer_norm(e, dy, x, scale, inverse, normal, centred=False)[:2]


def invertible_layer_norm_grad(e: Emitter) -> list[Value]:
    """As LayerNormalizationGrad, from the output: x = (Y - B) / scale."""
    dy, y, scale, bias, inverse = e.inputs(5)
    wide = e.elem(inverse)
    normal = e.op("Div", e.op("Sub", e.cast(y, wide), e.cast(bias, wide)), e.cast(scale, wide))
    return _layer_norm(e, dy, y, scale, inverse, normal, centred=True)


def _layer_norm(
    e: Emitter, dy: Value, x: Value, scale: Value, inverse: Value, normal: Value, *, centred: bool
) -> list[Value]:
    """The three gradients, computed in the type of the saved statistics."""
    rank, wide, narrow = len(e.shape(x)), e.elem(inverse), e.elem(x)
    axis = e.attribute("axis", -1) % rank
    inner, outer = list(range(axis, rank)), list(range(axis))
    given = e.cast(dy, wide)
    scaled = e.op("Mul", given, e.cast(scale, wide))
    along = e.reduce("ReduceMean", e.op("Mul", scaled, normal), inner, True)
    rest = e.op("Sub", scaled, e.op("Mul", normal, along))
    if centred:
        rest = e.op("Sub", rest, e.reduce("ReduceMean", scaled, inner, True))
    dx = e.op("Mul", rest, inverse)
    results = [dx, e.total(e.op("Mul", given, normal), outer, False), e.total(given, outer, False)]
    if wide == narrow:
        return results
    return [e.op("Cast", r, to=narrow) for r in results]
