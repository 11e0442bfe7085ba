"""LSTM unrolled over time, weights shared by all steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["lstm"]


def lstm(
    steps: int = 32,
    hidden: int = 64,
    batch: int = 16,
    layers: int = 1,
    inputs: int = 32,
    classes: int = 32,
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """One prediction a step; loss = mean of the steps' cross entropies.

    The gradient of each weight is accumulated step by step in the backward direction, one Add after each step.

    Args:
        steps: time steps.
        hidden: units of a layer.
        batch: sequences in a batch.
        layers: stacked LSTM layers.
        inputs: features of a step of `x` [steps, batch, inputs].
        classes: classes of `labels` [steps, batch].
        dtype: float type of the graph.
    """
    g = TrainingGraph("lstm", dtype)
    x = g.batch_input("x", [steps, batch, inputs])
    labels = g.batch_input("labels", [steps, batch], np.int64, below=classes)
    weights, states = [], []
    for layer in range(layers):
        with g.scope(f"lstm{layer}"):
            rows = [inputs if layer == 0 else hidden, hidden]
            weights.append(
                (g.param("Wx", [rows[0], 4 * hidden]), g.param("Wh", [rows[1], 4 * hidden]), g.param("b", [4 * hidden]))
            )
            states.append((g.batch_input("h0", [batch, hidden]), g.batch_input("c0", [batch, hidden])))
    head = g.param("head/W", [hidden, classes]), g.param("head/b", [classes])
    losses = []
    for step in range(steps):
        with g.scope(f"step{step:02d}"):
            y = g.op("Gather", [x, step], "x", [batch, inputs], axis=0)
            for layer in range(layers):
                with g.scope(f"lstm{layer}"):
                    states[layer] = _cell(g, y, *states[layer], *weights[layer])
                y = states[layer][0]
            label = g.op("Gather", [labels, step], "labels", [batch], np.int64, axis=0)
            losses.append(g.cross_entropy(g.linear(y, *head, name="head"), label, weight=1 / steps))
    return g.finish(g.mean_of(losses))


def _cell(g: TrainingGraph, x: Any, h: Any, c: Any, wx: Any, wh: Any, b: Any) -> tuple[Any, Any]:
    """i, f, o, u = split(x Wx + h Wh + b); c' = sig(f) c + sig(i) tanh(u); h' = sig(o) tanh(c')."""
    gates = g.add(g.linear(x, wx, b, name="from_x"), g.linear(h, wh, name="from_h"), "gates")
    i, f, o, u = g.split(gates, 4, 1, "split")
    i, f, o, u = g.sigmoid(i, "i"), g.sigmoid(f, "f"), g.sigmoid(o, "o"), g.tanh(u, "u")
    c = g.add(g.mul(f, c, "keep"), g.mul(i, u, "write"), "c")
    return g.mul(o, g.tanh(c, "tanh_c"), "h"), c
