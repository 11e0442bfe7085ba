"""Multi-layer perceptron, and a chain of equal layers."""

from __future__ import annotations

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["chain", "mlp"]


def mlp(
    layers: int = 4,
    width: int = 256,
    batch: int | str = 256,
    inputs: int = 64,
    classes: int = 10,
    activation: str = "relu",
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """Classifier with `layers` hidden layers y = act(x W + b), then Gemm and cross entropy.

    Args:
        layers: hidden layers.
        width: units of a hidden layer.
        batch: rows of the batch; a string makes the dim symbolic.
        inputs: features of `x`.
        classes: classes of `labels`.
        activation: "relu" or "tanh".
        dtype: float type of the graph.
    """
    g = TrainingGraph("mlp", dtype)
    y = g.batch_input("x", [batch, inputs])
    labels = g.batch_input("labels", [batch], np.int64, below=classes)
    for index in range(layers):
        with g.scope(f"layer{index:02d}"):
            y = g.dense(y, width, "fc")
            y = g.tanh(y, "tanh") if activation == "tanh" else g.relu(y, "relu")
    return g.finish(g.cross_entropy(g.dense(y, classes, "head"), labels))


def chain(n: int = 64, width: int = 64, batch: int = 4096, dtype: type = np.float32) -> onnx.ModelProto:
    """`n` equal layers y = tanh(x W), loss = mean of y^2: every layer saves one activation of batch x width."""
    g = TrainingGraph("chain", dtype)
    y = g.batch_input("x", [batch, width])
    for index in range(n):
        with g.scope(f"layer{index:02d}"):
            y = g.tanh(g.dense(y, width, "fc", bias=False), "tanh")
    return g.finish(g.mean_square(y))
