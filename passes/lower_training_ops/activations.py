"""Gradients of elementwise functions and of softmax.

Sources: orttraining/orttraining/training_ops/cpu/activation/activations_grad.cc and
orttraining/orttraining/training_ops/cpu/op_gradients.cc of ONNX Runtime 1.19 (which input is which); Hendrycks and
Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415 (the GELU family).
"""

from __future__ import annotations

import math

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value

_SQRT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def relu_grad(e: Emitter) -> list[Value]:
    """dX = dY where X > 0, else 0. X is the input or the output of Relu: both have the same sign."""
    dy, x = e.inputs(2)
    return [e.op("Where", e.op("Greater", x, e.like(0, x)), dy, e.like(0, dy))]


def leaky_relu_grad(e: Emitter) -> list[Value]:
    """dX = dY where Y > 0, else alpha * dY."""
    dy, y = e.inputs(2)
    return [
        e.op("Where", e.op("Greater", y, e.like(0, y)), dy, e.op("Mul", dy, e.like(e.attribute("alpha", 0.01), dy)))
    ]


def elu_grad(e: Emitter) -> list[Value]:
    """dX = dY where Y > 0, else dY * (Y + alpha)."""
    dy, y = e.inputs(2)
    below = e.op("Mul", dy, e.op("Add", y, e.like(e.attribute("alpha", 1.0), y)))
    return [e.op("Where", e.op("Greater", y, e.like(0, y)), dy, below)]


def sigmoid_grad(e: Emitter) -> list[Value]:
    """dX = dY * Y * (1 - Y)."""
    dy, y = e.inputs(2)
    return [e.op("Mul", e.op("Mul", dy, y), e.op("Sub", e.like(1, y), y))]


def tanh_grad(e: Emitter) -> list[Value]:
    """dX = dY * (1 - Y * Y)."""
    dy, y = e.inputs(2)
    return [e.op("Mul", dy, e.op("Sub", e.like(1, y), e.op("Mul", y, y)))]


def _gelu_slope(e: Emitter, x: Value, like: Value) -> Value:
    """Phi(x) + x * phi(x): the normal distribution function and its density."""
    phi = e.op("Mul", e.op("Exp", e.op("Mul", e.op("Mul", x, x), e.like(-0.5, like))), e.like(_DENSITY, like))
    erf = e.op("Erf", e.op("Mul", x, e.like(_SQRT_HALF, like)))
    distribution = e.op("Mul", e.op("Add", erf, e.like(1, like)), e.like(0.5, like))
    return e.op("Add", distribution, e.op("Mul", x, phi))


def _fast_gelu_slope(e: Emitter, x: Value, like: Value) -> Value:
    """0.5 (1 + t) + 0.5 x (1 - t^2) u', with u = sqrt(2/pi) (x + 0.044715 x^3) and t = tanh(u)."""
    square = e.op("Mul", x, x)
    inner = e.op("Add", e.op("Mul", square, e.like(_TANH_SCALE * _TANH_CUBE, like)), e.like(_TANH_SCALE, like))
    t = e.op("Tanh", e.op("Mul", x, inner))
    slope = e.op("Add", e.op("Mul", square, e.like(3 * _TANH_SCALE * _TANH_CUBE, like)), e.like(_TANH_SCALE, like))
    bend = e.op("Mul", e.op("Mul", x, slope), e.op("Sub", e.like(1, like), e.op("Mul", t, t)))
    return e.op("Mul", e.op("Add", e.op("Add", t, bend), e.like(1, like)), e.like(0.5, like))


def gelu_grad(e: Emitter) -> list[Value]:
    """dX = dY * (Phi(X) + X * phi(X))."""
    dy, x = e.inputs(2)
    return [e.op("Mul", dy, _gelu_slope(e, x, x))]


def fast_gelu_grad(e: Emitter) -> list[Value]:
    """dX = dY * d/dX of 0.5 X (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3)))."""
    dy, x = e.inputs(2)
    return [e.op("Mul", dy, _fast_gelu_slope(e, x, x))]


def bias_gelu_grad(e: Emitter) -> list[Value]:
    """As GeluGrad at X + B."""
    dy, x, b = e.inputs(3)
    return [e.op("Mul", dy, _gelu_slope(e, e.op("Add", x, b), x))]


def bias_fast_gelu_grad(e: Emitter) -> list[Value]:
    """As FastGeluGrad at X + B."""
    dy, x, b = e.inputs(3)
    return [e.op("Mul", dy, _fast_gelu_slope(e, e.op("Add", x, b), x))]


def quick_gelu_grad(e: Emitter) -> list[Value]:
    """dX = dY * s * (1 + alpha X (1 - s)) with s = sigmoid(alpha X)."""
    dy, x = e.inputs(2)
    scaled = e.op("Mul", x, e.like(e.attribute("alpha", 1.702), x))
    s = e.op("Sigmoid", scaled)
    slope = e.op("Add", e.op("Mul", scaled, e.op("Sub", e.like(1, x), s)), e.like(1, x))
    return [e.op("Mul", dy, e.op("Mul", s, slope))]


def _softmax_axes(e: Emitter, y: Value) -> list[int]:
    """The axes that are normalized: one for the operators of opset 13, `axis` and all behind it before."""
    rank = len(e.shape(y))
    if e.node.op_type.endswith("_13"):
        return [e.attribute("axis", -1) % rank]
    return list(range(e.attribute("axis", 1) % rank, rank))


def softmax_grad(e: Emitter) -> list[Value]:
    """dX = Y * (dY - sum(dY * Y))."""
    dy, y = e.inputs(2)
    return [e.op("Mul", y, e.op("Sub", dy, e.total(e.op("Mul", dy, y), _softmax_axes(e, y), True)))]


def log_softmax_grad(e: Emitter) -> list[Value]:
    """dX = dY - exp(Y) * sum(dY)."""
    dy, y = e.inputs(2)
    return [e.op("Sub", dy, e.op("Mul", e.op("Exp", y), e.total(dy, _softmax_axes(e, y), True)))]


def dropout_grad(e: Emitter) -> list[Value]:
    """dX = dY / (1 - ratio) where the mask is set, else 0; dY as it is where nothing was dropped.

    The kernel (nn/dropout_op.cc) passes dY on at ratio 0, and without training mode, where the mask is all true.
    """
    dy, mask = e.inputs(2)
    keep = _kept_share(e, e.input(2), dy)
    dropped = e.op("Where", mask, e.op("Div", dy, keep), e.like(0, dy))
    training = e.input(3)
    if training is None:
        return [dropped]
    mode = e.constant(training)
    if mode is not None:
        return [dropped if bool(mode) else dy]
    return [e.op("Where", training, dropped, dy)]


def _kept_share(e: Emitter, ratio: Value | None, dy: Value) -> Value:
    """1 - ratio in the type of dY; the ratio is 0.5 where it is left out."""
    if ratio is None:
        return e.like(0.5, dy)
    held = e.constant(ratio)
    if held is None:
        return e.op("Sub", e.like(1, dy), e.cast(ratio, e.elem(dy)))
    return e.like(1 - float(held.item()), dy)
