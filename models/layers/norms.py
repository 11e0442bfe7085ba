"""Normalization layers and softmax, with their gradient recipes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from models.tape import TrainingGraph, layer

EPSILON = 1e-5
"""Added to the variance; the default of both normalization operators."""


@layer
def batch_norm(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """Native BatchNormalization in training mode on [N, C, H, W]; running statistics leave as graph outputs.

    With m and v the mean and biased variance of x over N, H, W, s = sqrt(v + eps) and xhat = (x - m) / s:
    dbeta = sum dy, dgamma = sum dy xhat, dx = gamma / s (dy - mean dy - xhat mean(dy xhat))
    (Ioffe and Szegedy, arXiv 1502.03167, section 3). The gradient computes m, v and xhat again from x.
    """
    channels = x.shape[1]
    gamma, beta = g.param(f"{name}/gamma", [channels]), g.param(f"{name}/beta", [channels])
    mean, var = g.batch_input(f"{name}/mean", [channels]), g.batch_input(f"{name}/var", [channels])
    with g.scope(name):
        outputs: dict[str, Any] = {"": (x.shape, None), "/mean": ([channels], None), "/var": ([channels], None)}
        y, new_mean, new_var = g.multi_op(
            "BatchNormalization", [x, gamma, beta, mean, var], "y", outputs, training_mode=1
        )
        new_mean.name, new_var.name = f"{mean.name}_new", f"{var.name}_new"
        g.state_output(new_mean)
        g.state_output(new_var)

        def backward(dy: gs.Variable) -> None:
            axes, keep = [0, 2, 3], [1, channels, 1, 1]
            centred = g.op("Sub", [x, g.op("ReduceMean", [x, axes], "m", keep)], "xc")
            variance = g.op("ReduceMean", [g.op("Mul", [centred, centred], "xc2"), axes], "v", keep)
            std = g.op("Sqrt", [g.op("Add", [variance, EPSILON], "ve")], "s")
            xhat = g.op("Div", [centred, std], "xhat")
            dy_xhat = g.op("Mul", [dy, xhat], "dy_xhat")
            g.add_gradient(gamma, g.op("ReduceSum", [dy_xhat, axes], "dgamma", [channels], keepdims=0))
            g.add_gradient(beta, g.op("ReduceSum", [dy, axes], "dbeta", [channels], keepdims=0))
            shift = g.op("Sub", [dy, g.op("ReduceMean", [dy, axes], "dy_m", keep)], "dyc")
            tilt = g.op("Mul", [xhat, g.op("ReduceMean", [dy_xhat, axes], "dy_xhat_m", keep)], "tilt")
            factor = g.op("Div", [g.op("Reshape", [gamma, keep], "gamma4", keep), std], "factor")
            g.add_gradient(x, g.op("Mul", [g.op("Sub", [shift, tilt], "inner"), factor], "dx"))

        g.record([y], backward)
    return y


@layer
def layer_norm(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """Native LayerNormalization over the last axis of [N, D]; its outputs m (mean) and r = 1 / sqrt(v + eps) are kept.

    With xhat = (x - m) r and t = dy gamma: dbeta = sum dy, dgamma = sum dy xhat,
    dx = r (t - mean t - xhat mean(t xhat)) (Ba, Kiros and Hinton, arXiv 1607.06450).
    """
    rows, width = x.shape
    gamma, beta = g.param(f"{name}/gamma", [width]), g.param(f"{name}/beta", [width])
    with g.scope(name):
        outputs: dict[str, Any] = {"": (x.shape, None), "/m": ([rows, 1], np.float32), "/r": ([rows, 1], np.float32)}
        y, mean, inverse = g.multi_op("LayerNormalization", [x, gamma, beta], "y", outputs, axis=-1)

        def widened(statistic: gs.Variable, label: str) -> gs.Variable:
            """The operator's statistics are float32 in a float64 graph too."""
            same = g.float_type == np.float32
            return statistic if same else g.op("Cast", [statistic], label, to=g.float_type.type)

        def backward(dy: gs.Variable) -> None:
            m, r = widened(mean, "m_wide"), widened(inverse, "r_wide")
            xhat = g.op("Mul", [g.op("Sub", [x, m], "xc"), r], "xhat")
            g.add_gradient(
                gamma, g.op("ReduceSum", [g.op("Mul", [dy, xhat], "dy_xhat"), [0]], "dgamma", [width], keepdims=0)
            )
            g.add_gradient(beta, g.op("ReduceSum", [dy, [0]], "dbeta", [width], keepdims=0))
            t = g.op("Mul", [dy, gamma], "t")
            shift = g.op("Sub", [t, g.op("ReduceMean", [t, [1]], "t_m", [rows, 1])], "tc")
            overlap = g.op("ReduceMean", [g.op("Mul", [t, xhat], "t_xhat"), [1]], "t_xhat_m", [rows, 1])
            inner = g.op("Sub", [shift, g.op("Mul", [xhat, overlap], "tilt")], "inner")
            g.add_gradient(x, g.op("Mul", [inner, r], "dx"))

        g.record([y], backward)
    return y


@layer
def softmax(g: TrainingGraph, x: Any, name: str) -> gs.Variable:
    """y = softmax over the last axis. dx = y (dy - sum dy y)."""
    with g.scope(name):
        y = g.op("Softmax", [x], "y", axis=-1)

        def backward(dy: gs.Variable) -> None:
            total = g.op("ReduceSum", [g.op("Mul", [dy, y], "dy_y"), [-1]], "dy_y_sum", [*x.shape[:-1], 1], keepdims=1)
            g.add_gradient(x, g.op("Mul", [y, g.op("Sub", [dy, total], "dyc")], "dx"))

        g.record([y], backward)
    return y


@layer
def causal_mask(g: TrainingGraph, length: int, name: str) -> gs.Variable:
    """Bool [length, length], true where the key position is not after the query position."""
    return g.op("LessOrEqual", [g.arange(length, [1, length]), g.arange(length, [length, 1])], name, dtype=bool)


@layer
def keep_where(g: TrainingGraph, mask: Any, x: Any, name: str) -> gs.Variable:
    """y = x where mask, else -1e9, to be read by a softmax. dx = dy: the softmax gradient is 0 where y is masked."""
    with g.scope(name):
        y = g.op("Where", [mask, x, -1e9], "y")
        g.record([y], lambda dy: g.add_gradient(x, dy))
    return y
