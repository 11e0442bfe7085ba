"""LeNet-like convolutional network with batch normalization in training mode."""

from __future__ import annotations

import math

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["lenet_bn"]


def lenet_bn(
    channels: int = 8,
    image: int = 28,
    batch: int = 32,
    units: int = 84,
    classes: int = 10,
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """Twice conv 5x5, batch norm, ReLU, max pooling with indices; then two Gemm and cross entropy.

    Args:
        channels: channels of the first convolution; the second has twice as many.
        image: height and width of `x`, a multiple of 4.
        batch: images in a batch.
        units: units of the hidden Gemm.
        classes: classes of `labels`.
        dtype: float type of the graph.
    """
    g = TrainingGraph("lenet_bn", dtype)
    y = g.batch_input("x", [batch, 1, image, image])
    labels = g.batch_input("labels", [batch], np.int64, below=classes)
    for index in (1, 2):
        y = g.batch_norm(g.conv(y, channels * index, f"conv{index}", kernel=5), f"bn{index}")
        y = g.max_pool_indices(g.relu(y, f"relu{index}"), f"pool{index}")
    y = g.reshape(y, [batch, math.prod(y.shape[1:])], "flat")
    y = g.relu(g.dense(y, units, "fc1"), "relu3")
    return g.finish(g.cross_entropy(g.dense(y, classes, "fc2"), labels))
