"""Layers that move data only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_graphsurgeon as gs

from models.tape import Dim, TrainingGraph, layer


@layer
def reshape(g: TrainingGraph, x: Any, shape: Sequence[int], name: str) -> gs.Variable:
    """y = x with other dims. dx = dy with the dims of x."""
    with g.scope(name):
        y = g.op("Reshape", [x, list(shape)], "y", shape, x.dtype)
        if g.wants_gradient(x):
            g.record([y], lambda dy: g.add_gradient(x, g.op("Reshape", [dy, list(x.shape)], "dx", x.shape)))
    return y


@layer
def transpose(g: TrainingGraph, x: Any, perm: Sequence[int], name: str) -> gs.Variable:
    """y = x with permuted axes. dx = dy with the inverse permutation."""
    inverse = [perm.index(axis) for axis in range(len(perm))]
    with g.scope(name):
        y = g.op("Transpose", [x], "y", [x.shape[axis] for axis in perm], perm=list(perm))
        g.record([y], lambda dy: g.add_gradient(x, g.op("Transpose", [dy], "dx", x.shape, perm=inverse)))
    return y


@layer
def split(g: TrainingGraph, x: Any, parts: int, axis: int, name: str) -> list[gs.Variable]:
    """Equal parts of x along an axis. dx = Concat of the parts' gradients."""
    shape: list[Dim] = list(x.shape)
    shape[axis] = x.shape[axis] // parts
    with g.scope(name):
        outputs: dict[str, Any] = {f"{part}": (shape, None) for part in range(parts)}
        ys = g.multi_op("Split", [x], "y", outputs, axis=axis, num_outputs=parts)
        g.record(ys, lambda *dys: g.add_gradient(x, g.op("Concat", dys, "dx", x.shape, axis=axis)))
    return ys


@layer
def concat(g: TrainingGraph, xs: Sequence[Any], axis: int, name: str) -> gs.Variable:
    """y = parts side by side. The parts' gradients = Split of dy."""
    sizes = [x.shape[axis] for x in xs]
    shape = list(xs[0].shape)
    shape[axis] = sum(sizes)
    with g.scope(name):
        y = g.op("Concat", xs, "y", shape, axis=axis)

        def backward(dy: gs.Variable) -> None:
            outputs: dict[str, Any] = {f"{part}": (x.shape, None) for part, x in enumerate(xs)}
            for x, dx in zip(xs, g.multi_op("Split", [dy, sizes], "dx", outputs, axis=axis), strict=True):
                g.add_gradient(x, dx)

        g.record([y], backward)
    return y
