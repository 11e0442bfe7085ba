"""Random feeds for a training graph."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import onnx

from models.files import RANGES_KEY


def feeds(model: onnx.ModelProto, seed: int = 0, dims: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    """Values for every graph input that is not an initializer.

    Labels and tokens are drawn from the range in the model's metadata, weights from a normal distribution of standard
    deviation 1 / sqrt(fan_in), scales and running variances near 1, the rest of the 1-D weights near 0. The buffers and
    flags of an onnxruntime-training model are zeros and True.

    Args:
        model: the training graph.
        seed: of the random numbers; equal seeds give equal feeds.
        dims: sizes of symbolic dims; 4 for those not named.
    """
    ranges: dict[str, int] = json.loads({p.key: p.value for p in model.metadata_props}.get(RANGES_KEY, "{}"))
    known = {tensor.name for tensor in model.graph.initializer}
    rng = np.random.default_rng(seed)
    result = {}
    for info in model.graph.input:
        if info.name in known:
            continue
        kind = info.type.tensor_type
        shape = [(dims or {}).get(d.dim_param, 4) if d.dim_param else d.dim_value for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype == np.bool_:
            result[info.name] = np.ones(shape, np.bool_)
        elif np.issubdtype(dtype, np.integer):
            result[info.name] = rng.integers(0, ranges[info.name], shape, dtype=dtype)
        else:
            mean, spread = _moments(info.name, shape)
            result[info.name] = np.asarray(rng.normal(mean, spread, shape), dtype)
    return result


def _moments(name: str, shape: list[int]) -> tuple[float, float]:
    """Mean and standard deviation of a float input, by its name and rank."""
    leaf = name.replace(".", "/").rsplit("/", 1)[-1]
    if name.endswith(".accumulation.buffer"):
        return 0.0, 0.0
    if leaf in {"x", "h0", "c0"}:
        return 0.0, 1.0
    if leaf in {"gamma", "var"} or (leaf == "weight" and len(shape) == 1):
        return 1.0, 0.1
    if leaf in {"wte", "wpe"}:
        return 0.0, shape[-1] ** -0.5
    if len(shape) == 2:
        return 0.0, shape[1 if leaf == "weight" else 0] ** -0.5
    if len(shape) == 4:
        return 0.0, math.prod(shape[1:]) ** -0.5
    return 0.0, 0.1
