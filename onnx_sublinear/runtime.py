"""ONNX Runtime sessions for training graphs, with the options that let a smaller graph take less memory.

What the defaults of ONNX Runtime cost a training step, and what is set here instead:

- `enable_mem_pattern`: from the second run on, the pattern takes one block for the whole step while the arena still
  holds the chunks of the first run, so the resident memory about doubles. Off.
- CUDA `arena_extend_strategy`: the arena grows by powers of two. `kSameAsRequested`.
- CUDA `gpu_mem_limit`: without it the arena may take the whole device. Set on request.

The CPU arena stays on: it also grows by powers of two, but a page that is never written takes no memory.
This module imports ONNX Runtime only when a session is made.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, cast

from onnx_sublinear.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = [
    "LEVELS",
    "ORDERS",
    "TARGETS",
    "Level",
    "Order",
    "Target",
    "available_targets",
    "level_named",
    "session_options",
    "target_named",
    "training_session",
]

Level = Literal["none", "basic", "extended", "all"]
Order = Literal["default", "priority"]

LEVELS: Mapping[str, str] = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
ORDERS: Mapping[str, str] = {"default": "DEFAULT", "priority": "PRIORITY_BASED"}
_LOG_ERRORS_ONLY = 3


@dataclass(frozen=True)
class Target:
    """An execution provider that can run a training graph.

    Attributes:
        name: what `--target` calls it.
        provider: ONNX Runtime's name.
        provider_options: options of the provider, without the memory limit.
        limit_option: name of the provider option that bounds its arena in bytes, or "".
        extras: the extras of this package that bring it.
    """

    name: str
    provider: str
    provider_options: Mapping[str, str]
    limit_option: str
    extras: tuple[str, ...]


TARGETS: Mapping[str, Target] = {
    "cpu": Target("cpu", "CPUExecutionProvider", {}, "", ("gpu", "cpu")),
    "cuda": Target(
        "cuda",
        "CUDAExecutionProvider",
        {"arena_extend_strategy": "kSameAsRequested"},
        "gpu_mem_limit",
        ("gpu",),
    ),
}


def target_named(name: str) -> Target:
    """The target that `--target NAME` means.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in TARGETS:
        raise UsageError(f"there is no target '{name}'", f"choose one of: {', '.join(TARGETS)}")
    return TARGETS[name]


def level_named(name: str) -> Level:
    """The optimization level that `--level NAME` means.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in LEVELS:
        raise UsageError(f"there is no optimization level '{name}'", f"choose one of: {', '.join(LEVELS)}")
    return cast(Level, name)


def _runtime(what: str) -> Any:
    """The onnxruntime module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as e:
        raise MissingExtraError(what, ("gpu", "cpu")) from e
    return onnxruntime


def _cuda_devices() -> int:
    """How many devices the CUDA driver sees; 0 without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def available_targets() -> list[str]:
    """Names of the targets that this installation and this machine can run; empty without ONNX Runtime."""
    try:
        providers = _runtime("").get_available_providers()
    except MissingExtraError:
        return []
    usable = [t.name for t in TARGETS.values() if t.provider in providers]
    return [name for name in usable if name != "cuda" or _cuda_devices()]


def session_options(
    target: str = "cpu",
    level: Level = "all",
    order: Order = "default",
    *,
    arena: bool = True,
    pattern: bool = False,
    threads: int = 0,
) -> ort.SessionOptions:
    """Session options under which a training graph holds no more memory than it needs.

    Args:
        target: "cpu" or "cuda".
        level: graph optimizations of ONNX Runtime.
        order: execution order of the nodes, "default" (what every plain session uses) or "priority".
        arena: whether the CPU allocator keeps freed memory for the next run.
        pattern: whether to trace the first run and take one block from the second on (doubles resident memory).
        threads: threads inside an operator; 0 lets ONNX Runtime choose.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        UsageError: the target, level or order does not exist.
    """
    target_named(target)
    level_named(level)
    if order not in ORDERS:
        raise UsageError(f"there is no execution order '{order}'", f"choose one of: {', '.join(ORDERS)}")
    runtime = _runtime("a session")
    options = runtime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, LEVELS[level])
    options.execution_order = getattr(runtime.ExecutionOrder, ORDERS[order])
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = pattern
    options.intra_op_num_threads = threads
    return options


def training_session(
    path: str | PathLike[str],
    target: str = "cpu",
    level: Level = "all",
    order: Order = "default",
    *,
    memory_limit_bytes: int | None = None,
    options: ort.SessionOptions | None = None,
) -> ort.InferenceSession:
    """A session that runs the training graph in `path`; see the module's docstring for what it sets and why.

    Args:
        path: the model file.
        target: "cpu" or "cuda".
        level: graph optimizations of ONNX Runtime.
        order: execution order, "default" or "priority".
        memory_limit_bytes: most bytes that the device arena may take (CUDA only).
        options: session options to use instead of `session_options(target, level, order)`.

    Raises:
        MissingExtraError: ONNX Runtime, or a build of it with this provider, is not installed.
        UsageError: the machine cannot run the target, or the target has no memory limit.
    """
    chosen = target_named(target)
    runtime = _runtime("a session")
    if chosen.provider not in runtime.get_available_providers():
        raise MissingExtraError(f"target '{target}'", chosen.extras)
    if target not in available_targets():
        raise UsageError(f"target '{target}' finds no device on this machine", "use --target cpu")
    provider_options = dict(chosen.provider_options)
    if memory_limit_bytes is not None:
        if not chosen.limit_option:
            raise UsageError(f"target '{target}' has no memory limit", "only the arena of target cuda can be bounded")
        provider_options[chosen.limit_option] = str(memory_limit_bytes)
    if target == "cuda" and hasattr(runtime, "preload_dlls"):
        runtime.preload_dlls()  # finds the CUDA libraries of the nvidia-* wheels
    session = runtime.InferenceSession(
        fspath(path),
        options if options is not None else session_options(target, level, order),
        providers=[(chosen.provider, provider_options)],
    )
    if chosen.provider not in session.get_providers():
        raise UsageError(
            f"ONNX Runtime could not start {chosen.provider} and would use {session.get_providers()[0]}",
            "check that CUDA and cuDNN have the versions that this onnxruntime-gpu names",
        )
    return session
