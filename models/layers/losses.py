"""Losses: they record no outputs, their gradient starts the backward replay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from models.tape import TrainingGraph, layer


@layer
def cross_entropy(g: TrainingGraph, logits: Any, labels: Any, name: str = "loss", weight: float = 1.0) -> gs.Variable:
    """Mean over all N labels of -log softmax(logits)[label], classes on axis 1.

    dlogits = weight / N (softmax(logits) - onehot(labels)); `weight` is the share of this loss in the total.
    """
    classes = logits.shape[1]
    with g.scope(name):
        outputs: dict[str, Any] = {"": ([], None), "/log_prob": (logits.shape, None)}
        loss, log_prob = g.multi_op("SoftmaxCrossEntropyLoss", [logits, labels], "y", outputs, reduction="mean")

        def backward() -> None:
            prob = g.op("Exp", [log_prob], "prob")
            label = g.op("Unsqueeze", [labels, [1]], "label", [labels.shape[0], 1, *labels.shape[1:]], np.int64)
            numbers = g.arange(classes, [classes, *[1] * (len(labels.shape) - 1)])
            hit = g.op("Equal", [label, numbers], "hit", dtype=np.bool_)
            error = g.op("Sub", [prob, g.op("Cast", [hit], "onehot", to=g.float_type.type)], "error")
            share: Any
            if all(isinstance(dim, int) for dim in labels.shape):
                share = weight / math.prod(labels.shape)
            else:
                size = g.op("Size", [labels], "size", [], np.int64)
                share = g.op("Div", [weight, g.op("Cast", [size], "count", [], to=g.float_type.type)], "share")
            g.add_gradient(logits, g.op("Mul", [error, share], "dlogits"))

        g.record([], backward)
    return loss


@layer
def mean_square(g: TrainingGraph, x: Any, name: str = "loss") -> gs.Variable:
    """loss = mean x^2 over all N elements. dx = 2 x / N."""
    with g.scope(name):
        loss = g.op("ReduceMean", [g.op("Mul", [x, x], "square")], "y", [], keepdims=0)
        g.record([], lambda: g.add_gradient(x, g.op("Mul", [x, 2 / math.prod(x.shape)], "dx")))
    return loss


@layer
def mean_of(g: TrainingGraph, losses: Sequence[Any], name: str = "loss") -> gs.Variable:
    """Mean of scalar losses, added one by one; each loss weighs its own gradient with 1 / len(losses)."""
    with g.scope(name):
        total = losses[0]
        for index, loss in enumerate(losses[1:], start=1):
            total = g.op("Add", [total, loss], f"sum{index:02d}")
        return g.op("Mul", [total, 1 / len(losses)], "mean")
