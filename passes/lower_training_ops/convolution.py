"""Gradients of Conv and ConvTranspose.

Source: Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", arXiv 1603.07285 (sections 2 and 4),
extended to groups; input and output slots as in orttraining/orttraining/core/graph/gradient_builder.cc of ONNX Runtime
1.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx_sublinear.ops.tensor_types import Dim
from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value


@dataclass(frozen=True)
class Window:
    """How a kernel moves over the spatial axes, one number an axis.

    Attributes:
        kernel: size.
        strides: step between two positions.
        dilations: step between two elements of the kernel.
        before: padding in front.
        after: padding behind.
        group: groups of channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    group: int

    @property
    def pads(self) -> list[int]:
        """As ONNX writes them."""
        return [*self.before, *self.after]


def window(e: Emitter, kernel: tuple[int, ...], size: tuple[Dim, ...] | None) -> Window:
    """The window of the node, over an input of spatial dims `size`.

    Raises:
        ModelError: auto_pad depends on a size that is not known.
    """
    ones = (1,) * len(kernel)
    strides, dilations = tuple(e.attribute("strides", ones)), tuple(e.attribute("dilations", ones))
    auto = e.attribute("auto_pad", "NOTSET")
    pads = tuple(e.attribute("pads", (0,) * (2 * len(kernel))))
    before, after = pads[: len(kernel)], pads[len(kernel) :]
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        if size is None or not all(isinstance(d, int) for d in size):
            raise e.error(f"has auto_pad {auto} over spatial dims that are not known")
        total = []
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True):
            assert isinstance(n, int)
            total.append(max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n))
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        before = after = (0,) * len(kernel)
    return Window(kernel, strides, dilations, before, after, e.attribute("group", 1))


def spread(e: Emitter, dy: Value, weight: Value, over: Value, w: Window, dy_size: tuple[Dim, ...] | None) -> Value:
    """dY spread by the kernel over the spatial dims of `over`: a ConvTranspose that ends where `over` ends.

    The kernel's positions cover (out - 1) * stride + (k - 1) * dilation + 1 elements. Where fewer are left behind the
    padding than `over` has (the stride left a rest, or the pooling was rounded up), output_padding fills up.
    """
    shape = e.shape(over)[2:]
    last: list[int] = list(w.after)
    fill = [0] * len(shape)
    for i, (n, out) in enumerate(zip(shape, dy_size or (None,) * len(shape), strict=True)):
        if isinstance(n, int) and isinstance(out, int):
            end = (out - 1) * w.strides[i] + (w.kernel[i] - 1) * w.dilations[i] + 1 - w.before[i] - n
            last[i], fill[i] = max(end, 0), max(-end, 0)
        elif w.strides[i] != 1:
            return _spread_to_run_time_size(e, dy, weight, over, w)
    attributes: dict[str, Any] = {
        "strides": w.strides,
        "dilations": w.dilations,
        "group": w.group,
        "pads": [*w.before, *last],
    }
    if any(fill):
        attributes["output_padding"] = fill
    return e.op("ConvTranspose", dy, weight, **attributes)


def _spread_to_run_time_size(e: Emitter, dy: Value, weight: Value, over: Value, w: Window) -> Value:
    """As `spread` for sizes known only at run time: without padding, filled up with zeros, and cut to size."""
    rank = len(w.kernel)
    made = e.op("ConvTranspose", dy, weight, strides=w.strides, dilations=w.dilations, group=w.group)
    axes = e.array(list(range(2, 2 + rank)))
    size = e.op("Gather", e.op("Shape", over), axes)
    start = e.array(list(w.before))
    end = e.op("Add", size, start)
    missing = e.op("Max", e.op("Sub", end, e.op("Gather", e.op("Shape", made), axes)), e.array([0] * rank))
    padded = e.op("Pad", made, e.op("Concat", e.array([0] * (rank + 4)), missing, axis=0))
    return e.op("Slice", padded, start, end, axes)


def weight_gradient(e: Emitter, inner: Value, outer: Value, w: Window) -> Value:
    """The gradient of a kernel [M, C / group, ...] that makes `outer` [N, M, ...] of `inner` [N, C, ...].

    dW[m, c, k] = sum over n, o of outer[n, m, o] * inner[n, c, o * stride + k * dilation - pad]: a convolution with the
    batch as channels, in which `outer` is the kernel and strides and dilations change places. Groups stay groups.
    """
    rank = len(w.kernel)
    inner, outer = _batch_as_channels(e, inner, w.group, False), _batch_as_channels(e, outer, w.group, True)
    made = e.op(*("Conv", inner, outer), strides=w.dilations, dilations=w.strides, pads=w.pads, group=w.group)
    # A rest of the stride leaves positions behind the kernel's last one.
    sizes = e.array(list(w.kernel))
    if any(s != 1 for s in w.strides):
        made = e.op("Slice", made, e.array([0] * rank), sizes, e.array(list(range(2, 2 + rank))))
    return e.op("Transpose", made, perm=[1, 0, *range(2, 2 + rank)])


def _batch_as_channels(e: Emitter, x: Value, group: int, as_kernel: bool) -> Value:
    """[N, G * C, ...] as [C, G * N, ...], or as the kernel [G * C, N, ...]."""
    spatial = list(range(2, len(e.shape(x))))
    if group == 1 or as_kernel:
        return e.op("Transpose", x, perm=[1, 0, *spatial])
    shape = e.dims_of(x)
    tail = e.op("Slice", shape, e.array([2]), e.array([2 + len(spatial)]))
    batch = e.dim_of(x, 0)
    split = e.op("Concat", batch, e.array([group, -1]), tail, axis=0)
    moved = e.op("Transpose", e.op("Reshape", x, split), perm=[2, 1, 0, *(i + 1 for i in spatial)])
    joined = e.op("Concat", e.array([0]), e.op("Mul", batch, e.array([group])), tail, axis=0)
    return e.op("Reshape", moved, joined)


def _kernel(e: Emitter, weight: Value) -> tuple[int, ...]:
    held = e.attribute("kernel_shape")
    shape = tuple(held) if held else e.shape(weight)[2:]
    if not all(isinstance(d, int) for d in shape):
        raise e.error(f"has a kernel '{weight}' whose size is not known")
    return tuple(d for d in shape if isinstance(d, int))


def _bias_gradient(e: Emitter, dy: Value) -> Value:
    return e.total(dy, [i for i in range(len(e.shape(dy))) if i != 1], False)


def conv_grad(e: Emitter) -> list[Value | None]:
    """dX, dW, dB of (dY, X, W): dX = ConvTranspose(dY, W), dW by `weight_gradient`, dB = sum(dY) for each channel."""
    dy, x, weight = e.inputs(3)
    w = window(e, _kernel(e, weight), e.shape(x)[2:])
    dx = spread(e, dy, weight, x, w, e.shape(dy)[2:]) if e.wants(0) else None
    dw = weight_gradient(e, x, dy, w) if e.wants(1) else None
    return [dx, dw, _bias_gradient(e, dy)]


def conv_transpose_grad(e: Emitter) -> list[Value | None]:
    """dX, dW, dB of (dY, X, W), W [C, M / group, ...]: dX = Conv(dY, W).

    dW is as Conv's, with X and dY in each other's place.
    """
    dy, x, weight = e.inputs(3)
    if e.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or e.attribute("output_shape"):
        raise e.error("has auto_pad or output_shape")
    w = window(e, _kernel(e, weight), None)
    # output_padding adds elements behind the last that a kernel reaches: they have no gradient
    rank = len(w.kernel)
    conv: dict[str, Any] = {"strides": w.strides, "dilations": w.dilations, "group": w.group, "pads": w.pads}
    dx = e.op("Conv", dy, weight, **conv)
    axes = list(range(2, 2 + rank))
    if any(e.attribute("output_padding", ())):
        size = e.op("Slice", e.dims_of(x), e.array([2]), e.array([2 + rank]))
        dx = e.op("Slice", dx, e.array([0] * rank), size, e.array(axes))
    return [dx, weight_gradient(e, dy, x, w), _bias_gradient(e, dy)]
