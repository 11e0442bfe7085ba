"""Matrix products and table look-ups."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from models.tape import TrainingGraph, layer


@layer
def linear(g: TrainingGraph, x: Any, w: Any, b: Any = None, name: str = "linear", tied: bool = False) -> gs.Variable:
    """y = x W + b with x [N, in] and W [in, out], or with the transpose of a `tied` table W [out, in].

    dW = x^T dy (tied: dy^T x), db = sum dy, dx = dy W^T (tied: dy W).
    """
    with g.scope(name):
        shape = [x.shape[0], w.shape[0 if tied else 1]]
        if b is None and not tied:
            y = g.op("MatMul", [x, w], "y", shape)
        else:
            y = g.op("Gemm", [x, w] if b is None else [x, w, b], "y", shape, **({"transB": 1} if tied else {}))

        def backward(dy: gs.Variable) -> None:
            g.add_gradient(w, g.op("Gemm", [dy, x] if tied else [x, dy], "dW", w.shape, transA=1))
            if b is not None:
                g.add_gradient(b, g.op("ReduceSum", [dy, [0]], "db", b.shape, keepdims=0))
            if g.wants_gradient(x):
                if tied:
                    g.add_gradient(x, g.op("MatMul", [dy, w], "dx", x.shape))
                else:
                    g.add_gradient(x, g.op("Gemm", [dy, w], "dx", x.shape, transB=1))

        g.record([y], backward)
    return y


@layer
def dense(g: TrainingGraph, x: Any, units: int, name: str, bias: bool = True) -> gs.Variable:
    """`linear` with weights of its own, `<name>/W` and `<name>/b`."""
    w = g.param(f"{name}/W", [x.shape[1], units])
    return g.linear(x, w, g.param(f"{name}/b", [units]) if bias else None, name=name)


@layer
def matmul(g: TrainingGraph, a: Any, b: Any, name: str) -> gs.Variable:
    """y = a b over equal leading dims. da = dy b^T, db = a^T dy (on the last two dims)."""
    with g.scope(name):
        y = g.op("MatMul", [a, b], "y", [*a.shape[:-1], b.shape[-1]])

        def flipped(x: Any, label: str) -> gs.Variable:
            rank = len(x.shape)
            perm = [*range(rank - 2), rank - 1, rank - 2]
            return g.op("Transpose", [x], label, [x.shape[axis] for axis in perm], perm=perm)

        def backward(dy: gs.Variable) -> None:
            g.add_gradient(b, g.op("MatMul", [flipped(a, "aT"), dy], "db", b.shape))
            g.add_gradient(a, g.op("MatMul", [dy, flipped(b, "bT")], "da", a.shape))

        g.record([y], backward)
    return y


@layer
def embedding(g: TrainingGraph, table: Any, ids: Any, name: str) -> gs.Variable:
    """y = table[ids]. dtable = scatter-add of dy into zeros at the rows ids."""
    rows, width = table.shape
    with g.scope(name):
        y = g.op("Gather", [table, ids], "y", [*ids.shape, width], axis=0)

        def backward(dy: gs.Variable) -> None:
            zero = gs.Constant("", np.zeros(1, g.float_type))
            zeros = g.op("ConstantOfShape", [[rows, width]], "zeros", [rows, width], value=zero)
            index = g.op("Unsqueeze", [ids, [-1]], "index", [*ids.shape, 1], np.int64)
            g.add_gradient(table, g.op("ScatterND", [zeros, index, dy], "dtable", table.shape, reduction="add"))

        g.record([y], backward)
    return y
