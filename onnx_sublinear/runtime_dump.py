"""The runtime's own graph: what ONNX Runtime makes of a model when it loads it at a level, without running it.

A session is created on a copy of the model without weights, and told to save its graph: the nodes after function
inlining, constant folding, merging of equal nodes, fusions and layout changes, with the casts that it inserts; the
types that it knows, by which its planner shares buffers; and the index of each node, which decides both execution
orders (`runtime_model.default_order`, `priority_order`). Only ORT's own format has the indices (onnxruntime/core/graph/
graph.cc, Graph::SaveToOrtFormat).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from onnx import ModelProto

from onnx_sublinear._ort_format import read_ort_format
from onnx_sublinear._placeholder_weights import write_placeholder
from onnx_sublinear.errors import MissingExtraError, NoRuntimeGraphError, printable
from onnx_sublinear.ops.tensor_types import TensorType
from onnx_sublinear.runtime import Level, session_options

__all__ = ["Build", "RuntimeDump", "dump_runtime", "installed_build"]

Build = Literal["stock", "training"]

_MOST_WEIGHT_BYTES = 1 << 30  # the saved graph holds the weights, and a flatbuffer ends at 2 GiB


@dataclass(frozen=True)
class RuntimeDump:
    """The graph that a session runs.

    Attributes:
        level: the session's graph optimizations.
        build: what is installed.
        version: of ONNX Runtime.
        model: the graph, nodes by ascending index; large constants without data.
        indices: per node the runtime's index of it. Nodes of the file have their place there (Constant nodes not
            counted); nodes that the runtime made have larger ones.
        types: what the runtime knows of the main graph's tensors.
    """

    level: Level
    build: Build
    version: str
    model: ModelProto
    indices: tuple[int, ...]
    types: Mapping[str, TensorType]


def installed_build() -> Build | None:
    """Which build of ONNX Runtime is installed; None without one."""
    if find_spec("onnxruntime") is None:
        return None
    return "training" if find_spec("onnxruntime.training") is not None else "stock"


def dump_runtime(model: ModelProto, level: Level = "all") -> RuntimeDump:
    """The graph that a session of the installed ONNX Runtime runs on the CPU.

    Args:
        model: the model; its external data is not needed.
        level: graph optimizations.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        NoRuntimeGraphError: no session can be created (unknown operators, no kernel, an invalid model), or the
            weights are too large. The message says which.
    """
    build = installed_build()
    if build is None:
        raise MissingExtraError("the runtime's own graph", ("gpu", "cpu"))
    with tempfile.TemporaryDirectory(prefix="onnx-sublinear-") as name:
        folder = Path(name)
        file = write_placeholder(model, folder)
        if file.hole_bytes > _MOST_WEIGHT_BYTES:
            raise NoRuntimeGraphError(f"its weights are too large for a saved graph ({file.hole_bytes} bytes)")
        saved = folder / "saved.ort"
        version = _create_session(file.path, saved, level)
        found = read_ort_format(saved.read_bytes())
    return RuntimeDump(level, build, version, found.model, found.indices, found.types)


def _create_session(path: Path, saved: Path, level: Level) -> str:
    """Lets a session save its graph; ONNX Runtime's version."""
    import onnxruntime

    options: Any = session_options(level=level, arena=False, threads=1)
    options.log_severity_level = 4
    options.enable_mem_reuse = False  # which buffers are shared is not asked here, and takes long to find out
    options.optimized_model_filepath = str(saved)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.add_session_config_entry("session.disable_prepacking", "1")  # it would copy the weights
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises RuntimeError and classes of its own
        lines = " ".join(str(error).split())
        raise NoRuntimeGraphError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load it: {printable(lines)}"
        ) from None
    return str(onnxruntime.__version__)
