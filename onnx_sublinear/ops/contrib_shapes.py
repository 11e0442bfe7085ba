"""Output shapes of the fused operators of com.microsoft that occur in training graphs and that ONNX has no schema for.

Source (github.com/microsoft/onnxruntime): onnxruntime/core/graph/contrib_ops/contrib_defs.cc and bert_defs.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import TensorProto

from onnx_sublinear.ops.shape_arithmetic import Call, Types, broadcast, positive_axis
from onnx_sublinear.ops.tensor_types import Dim, TensorType

__all__ = [
    "fused_conv",
    "fused_gemm",
    "fused_matmul",
    "layer_norm",
    "simplified_layer_norm",
    "skip_layer_norm",
    "window_dims",
]

_FLOAT = int(TensorProto.FLOAT)


def _matmul(a: tuple[Dim, ...] | None, b: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
    if not a or not b:
        return None
    batch = broadcast(a[:-2], b[:-2])
    if batch is None:
        return None
    return (*batch, *(a[-2:-1] if len(a) > 1 else ()), *(b[-1:] if len(b) > 1 else ()))


def _transposed(shape: tuple[Dim, ...] | None, batch: bool, last: bool) -> tuple[Dim, ...] | None:
    """transBatch moves the first axis behind the others but the last; trans then swaps the last two."""
    if shape is None or len(shape) < 2:
        return shape
    if batch:
        shape = (*shape[1:-1], shape[0], shape[-1])
    return (*shape[:-2], shape[-1], shape[-2]) if last else shape


def fused_matmul(call: Call) -> Types:
    """MatMul of operands transposed by attributes (FusedMatMul, TransposeMatMul)."""
    a = call.attributes()
    left = _transposed(call.shape(0), bool(a.get("transBatchA", 0)), bool(a.get("transA", 0)))
    right = _transposed(call.shape(1), bool(a.get("transBatchB", 0)), bool(a.get("transB", 0)))
    return [TensorType(call.elem(0), _matmul(left, right))]


def fused_gemm(call: Call) -> Types:
    """Gemm with an activation."""
    a = call.attributes()
    left = _transposed(call.shape(0), False, bool(a.get("transA", 0)))
    right = _transposed(call.shape(1), False, bool(a.get("transB", 0)))
    return [TensorType(call.elem(0), _matmul(left, right))]


def window_dims(image: Sequence[Dim], kernel: Sequence[Dim], a: Mapping[str, Any]) -> list[Dim]:
    """Spatial dims of a convolution or a pool (onnx/defs/nn/defs.cc, convPoolShapeInference).

    Args:
        image: spatial dims of the input.
        kernel: those of the window.
        a: attributes of the node.
    """
    rank = len(image)
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    pads, auto = a.get("pads", [0] * 2 * rank), a.get("auto_pad", b"NOTSET")
    spatial: list[Dim] = []
    for i, (dim, window) in enumerate(zip(image, kernel, strict=True)):
        if not isinstance(dim, int) or not isinstance(window, int):
            spatial.append(None)
        elif auto in (b"SAME_UPPER", b"SAME_LOWER"):
            spatial.append(-(-dim // strides[i]))
        else:
            padded = dim + (pads[i] + pads[i + rank] if auto == b"NOTSET" else 0)
            free = padded - (window - 1) * dilations[i] - 1
            spatial.append((-(-free // strides[i]) if a.get("ceil_mode", 0) else free // strides[i]) + 1)
    return spatial


def fused_conv(call: Call) -> Types:
    """As Conv."""
    x, w, a = call.shape(0), call.shape(1), call.attributes()
    if x is None or w is None or len(x) != len(w) or len(x) < 3:
        return [TensorType(call.elem(0), None)]
    spatial = window_dims(x[2:], a.get("kernel_shape", w[2:]), a)
    return [TensorType(call.elem(0), (x[0], w[0], *spatial))]


def layer_norm(call: Call) -> Types:
    """Y, mean and inverse standard deviation, whose normalized axes have size 1 (float, also for double inputs)."""
    shape, a = call.shape(0), call.attributes()
    stat: tuple[Dim, ...] | None = None
    if shape is not None:
        at = positive_axis(a.get("axis", -1), len(shape))
        stat = (*shape[:at], *[1] * (len(shape) - at))
    elem = a.get("stash_type", _FLOAT)
    return [call.type(0), TensorType(elem, stat), TensorType(elem, stat)]


def simplified_layer_norm(call: Call) -> Types:
    """As `layer_norm` without mean."""
    return [t for i, t in enumerate(layer_norm(call)) if i != 1]


def skip_layer_norm(call: Call) -> Types:
    """Output, mean, inverse standard deviation (float), sum of input, skip and bias."""
    shape = call.shape(0)
    stat = TensorType(_FLOAT, None if not shape else (*shape[:-1], 1))
    return [call.type(0), stat, stat, call.type(0)]
