"""Elementwise layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from models.tape import TrainingGraph, layer


@layer
def add(g: TrainingGraph, a: Any, b: Any, name: str) -> gs.Variable:
    """y = a + b; b may lack leading dims of a. da = dy, db = dy summed over the missing dims."""
    with g.scope(name):
        y = g.op("Add", [a, b], "y")

        def backward(dy: gs.Variable) -> None:
            missing = list(range(len(a.shape) - len(b.shape)))
            g.add_gradient(b, g.op("ReduceSum", [dy, missing], "db", b.shape, keepdims=0) if missing else dy)
            g.add_gradient(a, dy)

        g.record([y], backward)
    return y


@layer
def mul(g: TrainingGraph, a: Any, b: Any, name: str) -> gs.Variable:
    """y = a * b of equal shapes. da = dy * b, db = dy * a."""
    with g.scope(name):
        y = g.op("Mul", [a, b], "y")

        def backward(dy: gs.Variable) -> None:
            for label, x, other in (("da", a, b), ("db", b, a)):
                if g.wants_gradient(x):
                    g.add_gradient(x, g.op("Mul", [dy, other], label))

        g.record([y], backward)
    return y


@layer
def scale(g: TrainingGraph, x: Any, factor: float, name: str) -> gs.Variable:
    """y = factor * x. dx = factor * dy."""
    with g.scope(name):
        y = g.op("Mul", [x, factor], "y")
        g.record([y], lambda dy: g.add_gradient(x, g.op("Mul", [dy, factor], "dx")))
    return y


@layer
def relu(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y = max(x, 0). dx = dy where y > 0, else 0."""
    with g.scope(name):
        y = g.op("Relu", [x], "y")

        def backward(dy: gs.Variable) -> None:
            mask = g.op("Greater", [y, 0.0], "mask", dtype=np.bool_)
            g.add_gradient(x, g.op("Where", [mask, dy, 0.0], "dx"))

        g.record([y], backward)
    return y


@layer
def tanh(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y = tanh x. dx = dy (1 - y^2)."""
    with g.scope(name):
        y = g.op("Tanh", [x], "y")

        def backward(dy: gs.Variable) -> None:
            slope = g.op("Sub", [1.0, g.op("Mul", [y, y], "y2")], "slope")
            g.add_gradient(x, g.op("Mul", [dy, slope], "dx"))

        g.record([y], backward)
    return y


@layer
def sigmoid(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y = 1 / (1 + exp -x). dx = dy y (1 - y)."""
    with g.scope(name):
        y = g.op("Sigmoid", [x], "y")

        def backward(dy: gs.Variable) -> None:
            slope = g.op("Mul", [y, g.op("Sub", [1.0, y], "not_y")], "slope")
            g.add_gradient(x, g.op("Mul", [dy, slope], "dx"))

        g.record([y], backward)
    return y


@layer
def gelu(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y = x P(x), P(x) = (1 + erf(x / sqrt 2)) / 2. dx = dy (P(x) + x exp(-x^2 / 2) / sqrt(2 pi))."""
    with g.scope(name):
        y = g.op("Gelu", [x], "y")

        def backward(dy: gs.Variable) -> None:
            erf = g.op("Erf", [g.op("Mul", [x, math.sqrt(0.5)], "x_scaled")], "erf")
            cdf = g.op("Mul", [g.op("Add", [erf, 1.0], "erf1"), 0.5], "cdf")
            exponent = g.op("Mul", [g.op("Mul", [x, x], "x2"), -0.5], "exponent")
            pdf = g.op("Mul", [g.op("Exp", [exponent], "exp"), 1 / math.sqrt(2 * math.pi)], "pdf")
            slope = g.op("Add", [cdf, g.op("Mul", [x, pdf], "x_pdf")], "slope")
            g.add_gradient(x, g.op("Mul", [dy, slope], "dx"))

        g.record([y], backward)
    return y


@layer
def dropout(g: TrainingGraph, x: Any, ratio: float, name: str) -> gs.Variable:
    """y = x mask / (1 - ratio) by the native operator in training mode, with a seed of its own.

    dx = dy / (1 - ratio) where mask, else 0.
    """
    if ratio == 0:
        return x
    g.dropout_count += 1
    with g.scope(name):
        outputs: dict[str, Any] = {"": (x.shape, None), "/mask": (x.shape, np.bool_)}
        y, mask = g.multi_op("Dropout", [x, ratio, True], "y", outputs, seed=1000 + g.dropout_count)

        def backward(dy: gs.Variable) -> None:
            scaled = g.op("Mul", [dy, 1 / (1 - ratio)], "scaled")
            g.add_gradient(x, g.op("Where", [mask, scaled, 0.0], "dx"))

        g.record([y], backward)
    return y
