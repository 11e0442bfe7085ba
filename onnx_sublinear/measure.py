"""Peak memory and time of a model, each measured in a fresh process.

The figure is what the run adds to the process: weights and session are left out, feeds that the caller holds too, graph
outputs are in. Resident memory comes in pages, and every large block has a header, so a tensor reads up to two pages
(8 KiB) high: below 1 % at peaks of 50 MB and more, about 10 % at a few MB made of many small tensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from onnx_sublinear.errors import MissingExtraError, ModelError, SublinearError, UsageError
from onnx_sublinear.runtime import Level, Order, target_named

__all__ = ["Measurement", "measure", "peak_measurable", "run_in_process"]

# glibc: give every block from 16 KiB its own mapping, so that freeing it returns it; return the rest on trim.
_MALLOC_ENV = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "16384",
    "MALLOC_MMAP_MAX_": "60000",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}


@dataclass(frozen=True)
class Measurement:
    """One model, run in one process.

    Attributes:
        peak_bytes: per run, the most bytes held above what was held before it; empty where it cannot be measured.
        seconds: per run, wall time.
        digest: hash of all outputs of the last run.
        digests: the same per run.
        ort_version: version of ONNX Runtime.
        note: why there is no peak, or "".
    """

    peak_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    digest: str
    digests: tuple[str, ...]
    ort_version: str
    note: str = ""

    @property
    def peak(self) -> int | None:
        """The largest peak of the runs in bytes, or None."""
        return max(self.peak_bytes, default=None)

    @property
    def median_seconds(self) -> float:
        """Median wall time of the runs."""
        return median(self.seconds)


def peak_measurable(target: str = "cpu") -> str:
    """Why the peak of `target` cannot be measured here; "" where it can."""
    if target != "cpu":
        return ""
    if sys.platform != "linux":
        return f"the peak on the CPU is measured on Linux only, this is {sys.platform}; times and outputs are valid"
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as e:
        return f"the peak cannot be measured: /proc/self/clear_refs is not writable ({e.strerror})"
    return ""


def run_in_process(
    path: str | PathLike[str],
    feeds: Mapping[str, Any],
    *,
    target: str = "cpu",
    level: Level = "all",
    order: Order = "default",
    runs: int = 1,
    arena: bool = False,
    pattern: bool = False,
    threads: int = 1,
    peak: bool = False,
    seed: int = 1,
    outputs: str | PathLike[str] = "",
) -> dict[str, Any]:
    """Run the model in a fresh process; the worker's answer (peaks, seconds, digests, version).

    Args:
        path: the model file.
        feeds: values by input name; names that the model does not have are left out.
        target: "cpu" or "cuda".
        level: graph optimizations.
        order: execution order.
        runs: how often the step runs.
        arena: keep ONNX Runtime's CPU arena on.
        pattern: keep its memory pattern on.
        threads: threads inside an operator.
        peak: whether to measure the peak.
        seed: seed of operators that draw without one of their own.
        outputs: folder that receives `RUN.npz` with the outputs of each run, or "".

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: ONNX Runtime cannot load or run the model.
        UsageError: an option or feed does not fit.
    """
    target_named(target)
    if runs < 1:
        raise UsageError(f"cannot run a model {runs} times", "use at least one run")
    with tempfile.TemporaryDirectory(prefix="onnx-sublinear-") as folder:
        job_path, answer_path, feeds_path = (Path(folder) / n for n in ("job.json", "answer.json", "feeds.npz"))
        _save_feeds(feeds_path, feeds)
        job = {
            "model": os.path.abspath(fspath(path)),
            "feeds": str(feeds_path),
            "answer": str(answer_path),
            "outputs": os.path.abspath(fspath(outputs)) if outputs else "",
            "target": target,
            "level": level,
            "order": order,
            "runs": runs,
            "arena": arena,
            "pattern": pattern,
            "threads": threads,
            "peak": peak,
            "seed": seed,
        }
        job_path.write_text(json.dumps(job))
        done = subprocess.run(
            [sys.executable, "-m", "onnx_sublinear._measure", str(job_path)],
            cwd=folder,  # "-m" looks into the current folder first, and a user's may hold an `onnx` of its own
            env={**os.environ, **(_MALLOC_ENV if peak else {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if not answer_path.exists():
            raise _worker_failure(fspath(path), done.returncode, done.stderr)
        answer: dict[str, Any] = json.loads(answer_path.read_text())
    if "error" in answer:
        raise _as_error(fspath(path), answer)
    return answer


def _save_feeds(file: Path, feeds: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {k: np.asarray(v) for k, v in feeds.items()}
    with file.open("wb") as stream:
        np.savez(stream, **arrays)


def _worker_failure(path: str, status: int, stderr: str) -> SublinearError:
    if "ModuleNotFoundError" in stderr and "onnxruntime" in stderr:
        return MissingExtraError("running a model", ("gpu", "cpu"))
    last = (stderr.strip().splitlines() or [""])[-1]
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return ModelError(f"the process that ran '{path}' {how}: {last}", "it may need more memory than there is")


def _as_error(path: str, answer: Mapping[str, Any]) -> SublinearError:
    message = " ".join(str(answer["error"]).split())
    if answer["exit_code"]:
        error = UsageError if answer["exit_code"] == UsageError.exit_code else ModelError
        return error(message, answer["hint"])
    hint = "run it with the ONNX Runtime it was made for"
    if "is not a registered function/op" in message:
        hint = "training operators of com.microsoft need: pip install 'onnx-sublinear[training]' (Python 3.11 or older)"
    return ModelError(f"ONNX Runtime cannot run '{path}': {message}", hint)


def measure(
    path: str | PathLike[str],
    feeds: Mapping[str, Any],
    *,
    target: str = "cpu",
    level: Level = "all",
    order: Order = "default",
    runs: int = 2,
    arena: bool = False,
    pattern: bool = False,
    threads: int = 1,
) -> Measurement:
    """Peak bytes, time and outputs' hash of a model in a fresh process.

    With the arena off (the default) each run's peak counts from the state before that run; with the arena on, which
    keeps memory between runs, from the state before the first.

    Args:
        path: the model file.
        feeds: values by input name.
        target: "cpu" or "cuda".
        level: graph optimizations.
        order: execution order.
        runs: how often the step runs.
        arena: keep ONNX Runtime's CPU arena on.
        pattern: keep its memory pattern on.
        threads: threads inside an operator; more of them add scratch memory.

    Raises:
        MissingExtraError, ModelError, UsageError: as `run_in_process`.
    """
    note = peak_measurable(target)
    answer = run_in_process(
        path,
        feeds,
        target=target,
        level=level,
        order=order,
        runs=runs,
        arena=arena,
        pattern=pattern,
        threads=threads,
        peak=not note,
    )
    return Measurement(
        tuple(answer["peaks"]),
        tuple(answer["seconds"]),
        answer["digests"][-1],
        tuple(answer["digests"]),
        answer["version"],
        note,
    )
