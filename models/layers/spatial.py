"""Convolution, pooling and up-sampling layers on [N, C, H, W], with their gradient recipes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from models.tape import TrainingGraph, layer


def _correlate(
    g: TrainingGraph, image: Any, window: Any, kernel: int, stride: int, pad: int, label: str
) -> gs.Variable:
    """Weight gradient [window channels, image channels, k, k] of a convolution that slides over `image`.

    dW[o, i] = sum over the batch of the correlation of image[:, i] with window[:, o]: a Conv with the batch and channel
    axes exchanged, dilated by the forward stride; rows that the forward pass never reached are sliced off.
    """
    batch, channels, height, _ = image.shape
    _, filters, rows, cols = window.shape
    spare = height + 2 * pad - (stride * (rows - 1) + 1) - kernel + 1
    turned = g.op("Transpose", [image], f"{label}_image", [channels, batch, *image.shape[2:]], perm=[1, 0, 2, 3])
    filt = g.op("Transpose", [window], f"{label}_window", [filters, batch, rows, cols], perm=[1, 0, 2, 3])
    shape, attrs = (
        [channels, filters, kernel + spare, kernel + spare],
        {"dilations": [stride] * 2} if stride > 1 else {},
    )
    raw = g.op("Conv", [turned, filt], f"{label}_raw", shape, pads=[pad] * 4, **attrs)
    if spare:
        shape = [channels, filters, kernel, kernel]
        raw = g.op("Slice", [raw, [0, 0], [kernel, kernel], [2, 3]], f"{label}_slice", shape)
    return g.op("Transpose", [raw], label, [filters, channels, kernel, kernel], perm=[1, 0, 2, 3])


@layer
def conv(
    g: TrainingGraph, x: Any, channels: int, name: str, kernel: int = 3, stride: int = 1, bias: bool = False
) -> gs.Variable:
    """Convolution with padding kernel // 2. dW: see `_correlate`; db = sum dy; dx = ConvTranspose(dy, W)."""
    pad = kernel // 2
    batch, inputs, height, width = x.shape
    w = g.param(f"{name}/W", [channels, inputs, kernel, kernel])
    b = [g.param(f"{name}/b", [channels])] if bias else []
    with g.scope(name):
        size = [(side + 2 * pad - kernel) // stride + 1 for side in (height, width)]
        strides = {"strides": [stride] * 2} if stride > 1 else {}
        y = g.op("Conv", [x, w, *b], "y", [batch, channels, *size], pads=[pad] * 4, **strides)

        def backward(dy: gs.Variable) -> None:
            g.add_gradient(w, _correlate(g, x, dy, kernel, stride, pad, "dW"))
            for tensor in b:
                g.add_gradient(tensor, g.op("ReduceSum", [dy, [0, 2, 3]], "db", [channels], keepdims=0))
            if g.wants_gradient(x):
                left = (height + 2 * pad - kernel) % stride
                extra = {**strides, "output_padding": [left] * 2} if left else strides
                g.add_gradient(x, g.op("ConvTranspose", [dy, w], "dx", x.shape, pads=[pad] * 4, **extra))

        g.record([y], backward)
    return y


@layer
def conv_transpose(g: TrainingGraph, x: Any, channels: int, name: str) -> gs.Variable:
    """2x up-sampling, kernel 2, stride 2. dx = Conv(dy, W) with stride 2; dW: `_correlate` with x and dy exchanged."""
    batch, inputs, height, width = x.shape
    w = g.param(f"{name}/W", [inputs, channels, 2, 2])
    with g.scope(name):
        y = g.op("ConvTranspose", [x, w], "y", [batch, channels, 2 * height, 2 * width], strides=[2, 2])

        def backward(dy: gs.Variable) -> None:
            g.add_gradient(w, _correlate(g, dy, x, 2, 2, 0, "dW"))
            g.add_gradient(x, g.op("Conv", [dy, w], "dx", x.shape, strides=[2, 2]))

        g.record([y], backward)
    return y


@layer
def upsample(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """Nearest-neighbour 2x up-sampling by Reshape and Expand. dx = sum of dy over each 2 x 2 window."""
    batch, channels, height, width = x.shape
    windows = [batch, channels, height, 2, width, 2]
    with g.scope(name):
        points = g.op(
            "Reshape", [x, [batch, channels, height, 1, width, 1]], "points", [batch, channels, height, 1, width, 1]
        )
        spread = g.op("Expand", [points, windows], "spread", windows)
        shape = [batch, channels, 2 * height, 2 * width]
        y = g.op("Reshape", [spread, shape], "y", shape)

        def backward(dy: gs.Variable) -> None:
            split = g.op("Reshape", [dy, windows], "dy_windows", windows)
            g.add_gradient(x, g.op("ReduceSum", [split, [3, 5]], "dx", x.shape, keepdims=0))

        g.record([y], backward)
    return y


@layer
def max_pool_indices(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """2x2 max pooling that keeps the flat index of each maximum. dx = dy scattered to those indices of zeros."""
    batch, channels, height, width = x.shape
    shape = [batch, channels, height // 2, width // 2]
    with g.scope(name):
        outputs: dict[str, Any] = {"": (shape, None), "/indices": (shape, np.int64)}
        y, indices = g.multi_op("MaxPool", [x], "y", outputs, kernel_shape=[2, 2], strides=[2, 2])

        def backward(dy: gs.Variable) -> None:
            size, count = math.prod(x.shape), math.prod(shape)
            zeros = g.op("ConstantOfShape", [[size]], "zeros", [size], value=gs.Constant("", np.zeros(1, g.float_type)))
            index = g.op("Reshape", [indices, [-1]], "index", [count], np.int64)
            flat = g.op(
                "ScatterElements", [zeros, index, g.op("Reshape", [dy, [-1]], "dy_flat", [count])], "flat", [size]
            )
            g.add_gradient(x, g.op("Reshape", [flat, list(x.shape)], "dx", x.shape))

        g.record([y], backward)
    return y


@layer
def max_pool_mask(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """2x2 max pooling. dx = dy where x equals the maximum of its window, else 0.

    Exact when a window has one maximum; after a ReLU ties at 0 are harmless, because its gradient is 0 there.
    """
    batch, channels, height, width = x.shape
    half = [batch, channels, height // 2, width // 2]
    points, windows = [*half[:3], 1, half[3], 1], [*half[:3], 2, half[3], 2]
    with g.scope(name):
        y = g.op("MaxPool", [x], "y", half, kernel_shape=[2, 2], strides=[2, 2])

        def backward(dy: gs.Variable) -> None:
            x_windows = g.op("Reshape", [x, windows], "x_windows", windows)
            hit = g.op("Equal", [x_windows, g.op("Reshape", [y, points], "y_points", points)], "hit", dtype=np.bool_)
            spread = g.op("Where", [hit, g.op("Reshape", [dy, points], "dy_points", points), 0.0], "dx_windows")
            g.add_gradient(x, g.op("Reshape", [spread, list(x.shape)], "dx", x.shape))

        g.record([y], backward)
    return y


@layer
def global_average(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y [N, C] = mean of x over height and width. dx = dy / (H W) at every pixel."""
    batch, channels, height, width = x.shape
    with g.scope(name):
        y = g.op("ReduceMean", [x, [2, 3]], "y", [batch, channels], keepdims=0)

        def backward(dy: gs.Variable) -> None:
            share = g.op("Mul", [dy, 1 / (height * width)], "share")
            pixel = g.op("Unsqueeze", [share, [2, 3]], "pixel", [batch, channels, 1, 1])
            g.add_gradient(x, g.op("Expand", [pixel, list(x.shape)], "dx", x.shape))

        g.record([y], backward)
    return y
