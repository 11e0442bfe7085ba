"""Feeds for a training graph: from an npz file, or made from the names and types of its inputs.

Made feeds are for measuring and comparing, not for training: the values are random, but kept where the operators that
usually read them accept them (ids and labels 0 or 1, variances positive, probabilities below one).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnx_sublinear.errors import UsageError, printable

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["Feeds", "InputSpec", "input_specs", "load_feeds", "make_feeds"]

Feeds = dict[str, Any]
"""Input name -> numpy array."""

_DTYPES: Mapping[str, str] = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    "bool": "bool",
    "string": "str",
} | {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_WEIGHT_SCALE = 0.1
_MASK_KEEP = 0.9
_POSITIVE = re.compile(r"var(iance)?\b|running_var|_var\b|(^|[._/])lr$|learning_rate|scale|gamma", re.IGNORECASE)
_PROBABILITY = re.compile(r"ratio|dropout|prob", re.IGNORECASE)
_MASK = re.compile(r"mask", re.IGNORECASE)


@dataclass(frozen=True)
class InputSpec:
    """What a graph input asks for.

    Attributes:
        name: the input's name.
        kind: the type as ONNX Runtime writes it, e.g. "tensor(float)".
        shape: per dimension its size, the name of a symbolic dimension, or None.
    """

    name: str
    kind: str
    shape: tuple[int | str | None, ...]


def input_specs(source: ort.InferenceSession | ModelProto) -> list[InputSpec]:
    """The inputs that a run must feed: graph inputs without a default value, in order."""
    if isinstance(source, ModelProto):
        return list(_model_specs(source))
    return [InputSpec(i.name, i.type, tuple(i.shape)) for i in source.get_inputs()]


def _model_specs(model: ModelProto) -> Iterator[InputSpec]:
    defaults = {t.name for t in model.graph.initializer} | {s.values.name for s in model.graph.sparse_initializer}
    for value in model.graph.input:
        if value.name in defaults:
            continue
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") != "tensor_type":
            yield InputSpec(value.name, str(value.type.WhichOneof("value")), ())
            continue
        shape = tuple(
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else d.dim_param or None
            for d in tensor.shape.dim
        )
        yield InputSpec(value.name, f"tensor({_type_name(tensor.elem_type)})", shape)


def _type_name(elem_type: int) -> str:
    if elem_type == TensorProto.FLOAT:
        return "float"
    if elem_type == TensorProto.STRING:
        return "string"
    try:
        return str(helper.tensor_dtype_to_np_dtype(elem_type)).replace("float64", "double")
    except KeyError:
        return f"type {elem_type}"


def _bound_shape(spec: InputSpec, dims: Mapping[str, int]) -> tuple[int, ...]:
    shape: list[int] = []
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, int):
            shape.append(dim)
        elif dim is None:
            raise UsageError(
                f"dimension {axis} of input '{printable(spec.name)}' has neither a size nor a name",
                "give the inputs as a file: --feeds FEEDS.npz",
            )
        else:
            shape.append(dims[dim])
    return tuple(shape)


def make_feeds(
    source: ort.InferenceSession | ModelProto, dims: Mapping[str, int] | None = None, seed: int = 0
) -> Feeds:
    """Random feeds for every input that a run must feed.

    Args:
        source: a session or a model.
        dims: sizes of the symbolic dimensions.
        seed: feeds are equal for equal seeds; the values of an input depend on its name, not on the other inputs.

    Raises:
        UsageError: a symbolic dimension has no size, or an input has a type for which no values can be made.
    """
    sizes = dict(dims or {})
    specs = input_specs(source)
    missing = dict.fromkeys(d for s in specs for d in s.shape if isinstance(d, str) and d not in sizes)
    if missing:
        raise UsageError(
            f"the inputs have symbolic dimensions without a size: {', '.join(map(printable, missing))}",
            " ".join(f"--dim {printable(name)}=N" for name in missing),
        )
    return {s.name: _values(s, _bound_shape(s, sizes), seed) for s in specs}


def _values(spec: InputSpec, shape: Sequence[int], seed: int) -> Any:
    dtype = _DTYPES.get(spec.kind.removeprefix("tensor(").removesuffix(")"), "")
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if dtype == "str":
        return np.full(shape, "0")
    if dtype == "bool":
        return rng.random(shape) < _MASK_KEEP if shape else np.array(True)
    if "int" in dtype:
        return rng.integers(0, 2, shape).astype(dtype)
    if not dtype:
        raise UsageError(
            f"no values can be made for input '{printable(spec.name)}' of type {spec.kind}",
            "give the inputs as a file: --feeds FEEDS.npz",
        )
    if _MASK.search(spec.name):
        return (rng.random(shape) < _MASK_KEEP).astype(dtype)
    if _PROBABILITY.search(spec.name) and not shape:
        return np.array(0.1, dtype)
    if _POSITIVE.search(spec.name):
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    return (rng.standard_normal(shape) * _WEIGHT_SCALE).astype(dtype)


def load_feeds(path: str | PathLike[str], names: Collection[str] | None = None) -> Feeds:
    """Feeds from an npz file, whose keys are `INPUT` or `in/INPUT`.

    Args:
        path: the file. Where it has keys with `in/`, all other keys are something else and left out.
        names: the inputs to take (required and optional ones); all of the file without it.

    Raises:
        UsageError: the file cannot be read, or holds none of the inputs.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            prefixed = [k for k in data.files if k.startswith("in/")]
            wanted = {k.removeprefix("in/"): k for k in prefixed or data.files}
            feeds = {n: data[k] for n, k in wanted.items() if names is None or n in names}
    except (OSError, ValueError, EOFError, AttributeError) as e:
        raise UsageError(f"'{fspath(path)}' is not a readable npz file: {e}", "write it with numpy.savez") from e
    if wanted and not feeds:
        raise UsageError(
            f"'{fspath(path)}' holds none of the model's inputs",
            f"its keys are {', '.join(map(printable, list(wanted)[:5]))}; name them after the inputs",
        )
    return feeds
