"""Pre-activation residual network (He et al., arXiv 1603.05027) of any depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["preresnet"]


def preresnet(
    blocks: int = 16,
    channels: int = 8,
    image: int = 16,
    batch: int = 4,
    stages: int = 3,
    classes: int = 10,
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """Blocks x + conv(relu(bn(conv(relu(bn(x)))))), then batch norm, ReLU, global average, Gemm and cross entropy.

    Args:
        blocks: residual blocks, spread evenly over the stages.
        channels: channels of the first stage; each later stage doubles them and halves height and width.
        image: height and width of `x`.
        batch: images in a batch.
        stages: number of stages.
        classes: classes of `labels`.
        dtype: float type of the graph.
    """
    g = TrainingGraph("preresnet", dtype)
    x = g.batch_input("x", [batch, 3, image, image])
    labels = g.batch_input("labels", [batch], np.int64, below=classes)
    y = g.conv(x, channels, "stem")
    for index in range(blocks):
        with g.scope(f"block{index:02d}"):
            y = _block(g, y, channels << (index * stages // blocks))
    y = g.relu(g.batch_norm(y, "bn"), "relu")
    y = g.dense(g.global_average(y, "pool"), classes, "head")
    return g.finish(g.cross_entropy(y, labels))


def _block(g: TrainingGraph, x: Any, channels: int) -> Any:
    """Identity shortcut, or a strided 1x1 convolution of the activated input where the shape changes."""
    first = g.relu(g.batch_norm(x, "bn1"), "relu1")
    changes = x.shape[1] != channels
    shortcut = g.conv(first, channels, "proj", kernel=1, stride=2) if changes else x
    y = g.conv(first, channels, "conv1", stride=2 if changes else 1)
    y = g.conv(g.relu(g.batch_norm(y, "bn2"), "relu2"), channels, "conv2")
    return g.add(shortcut, y, "add")
