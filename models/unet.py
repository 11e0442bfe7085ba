"""U-Net (Ronneberger et al., arXiv 1505.04597): long-lived skip tensors from the way down to the way up."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from models.layers import TrainingGraph

__all__ = ["unet"]


def unet(
    depth: int = 3,
    channels: int = 8,
    image: int = 64,
    batch: int = 4,
    classes: int = 4,
    learned_up: bool = True,
    dtype: type = np.float32,
) -> onnx.ModelProto:
    """`depth` levels down and up, two 3x3 convolutions a level, per-pixel cross entropy.

    Args:
        depth: number of poolings; `image` is a multiple of 2^depth.
        channels: channels of the first level, doubled at each level down.
        image: height and width of `x`.
        batch: images in a batch.
        classes: classes of each pixel of `labels`.
        learned_up: go up by transposed convolutions; otherwise by nearest neighbours.
        dtype: float type of the graph.
    """
    g = TrainingGraph("unet", dtype)
    y = g.batch_input("x", [batch, 3, image, image])
    labels = g.batch_input("labels", [batch, image, image], np.int64, below=classes)
    skips = []
    for level in range(depth):
        with g.scope(f"down{level}"):
            skips.append(_convs(g, y, channels << level))
            y = g.max_pool_mask(skips[-1], "pool")
    with g.scope("bottom"):
        y = _convs(g, y, channels << depth)
    for level in reversed(range(depth)):
        with g.scope(f"up{level}"):
            y = g.conv_transpose(y, channels << level, "up") if learned_up else g.upsample(y, "up")
            y = _convs(g, g.concat([skips[level], y], 1, "skip"), channels << level)
    return g.finish(g.cross_entropy(g.conv(y, classes, "head", kernel=1, bias=True), labels))


def _convs(g: TrainingGraph, x: Any, channels: int) -> Any:
    """Convolution and ReLU, twice."""
    for index in (1, 2):
        x = g.relu(g.conv(x, channels, f"conv{index}", bias=True), f"relu{index}")
    return x
