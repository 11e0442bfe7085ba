"""The worker process behind `measure` and `compare_models`: `python -m onnx_sublinear._measure JOB.json`.

It runs one model in a process of its own, since allocators keep memory across sessions. The job names the model, a
feeds file and the options; the answer is written beside it as JSON, and the outputs, when asked for, as npz files.

How the peak is taken on the CPU (Linux): writing 5 to `/proc/self/clear_refs` resets the high-water mark of the
resident memory (VmHWM) before a run. The parent has set glibc's malloc so that freed memory goes back to the system at
once. Pages of files (shared libraries) that a run touches for the first time are subtracted.
On CUDA: the smallest `gpu_mem_limit` under which the runs still succeed, found by bisection; it includes weights and
feeds, which live in the same arena.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_sublinear.errors import SublinearError, UsageError
from onnx_sublinear.runtime import session_options, training_session

if TYPE_CHECKING:
    import onnxruntime as ort

_PR_SET_THP_DISABLE = 41
_FIRST_GPU_LIMIT = 64 << 20
_LAST_GPU_LIMIT = 1 << 41
_GPU_LIMIT_TOLERANCE = 0.01


class Resident:
    """Resident memory of this process, and its high-water mark since the last `reset`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        # A huge page would count as resident although a tensor covers only a part of it.
        self._libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)

    def _status(self) -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {
            k: int(v.split()[0]) * 1024 for k, v in (x.split(":", 1) for x in lines) if k.startswith(("Rss", "VmHWM"))
        }

    def settle(self) -> int:
        """Give freed memory back; the bytes that are resident then, file pages left out."""
        self._libc.malloc_trim(0)
        status = self._status()
        return status["RssAnon"] + status["RssShmem"]

    def reset(self) -> None:
        """Start a new high-water mark."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """High-water mark since `reset`, file pages left out."""
        status = self._status()
        return status["VmHWM"] - status["RssFile"]


def digest_of(outputs: Sequence[Any]) -> str:
    """A hash of all outputs of a run: types, shapes and bits."""
    digest = hashlib.sha256()
    for output in outputs:
        if isinstance(output, np.ndarray) and output.dtype != object:
            digest.update(f"{output.dtype}{output.shape}".encode())
            digest.update(np.ascontiguousarray(output).reshape(-1).view(np.uint8).data)
        elif isinstance(output, (list, tuple)):
            digest.update(digest_of(output).encode())
        else:
            digest.update(repr(output.tolist() if isinstance(output, np.ndarray) else output).encode())
    return digest.hexdigest()[:16]


def flat(values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Arrays by output name; the items of a sequence get the name with their place, strings become bytes."""
    arrays: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (list, tuple)):
            arrays.update(flat(value, [f"{name}[{i}]" for i in range(len(value))]))
        elif isinstance(value, dict):
            arrays.update(flat(list(value.values()), [f"{name}[{k!r}]" for k in value]))
        elif value is not None:
            array = np.asarray(value)
            arrays[name] = array.astype(str) if array.dtype == object else array
    return arrays


def feeds_of(session: ort.InferenceSession, path: str) -> dict[str, Any]:
    """The feeds in `path` that the model has an input for."""
    known = {i.name for i in session.get_inputs()} | {i.name for i in session.get_overridable_initializers()}
    with np.load(path, allow_pickle=False) as data:
        feeds = {name: data[name] for name in data.files if name in known}
    missing = [i.name for i in session.get_inputs() if i.name not in feeds]
    if missing:
        raise UsageError(f"the feeds have no value for input '{missing[0]}'", "add it to the npz file")
    return feeds


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the model of `job`; the answer as JSON-able dict."""
    import onnxruntime as ort

    ort.set_seed(job["seed"])

    def session_with(limit_bytes: int | None) -> ort.InferenceSession:
        options = session_options(
            job["target"],
            job["level"],
            job["order"],
            arena=job["arena"],
            pattern=job["pattern"],
            threads=job["threads"],
        )
        options.inter_op_num_threads = 1
        return training_session(job["model"], job["target"], options=options, memory_limit_bytes=limit_bytes)

    answer: dict[str, Any] = {"peaks": [], "seconds": [], "digests": [], "version": ort.__version__}
    resident = Resident() if job["peak"] and job["target"] == "cpu" else None
    session = session_with(None)
    feeds = feeds_of(session, job["feeds"])
    names = [o.name for o in session.get_outputs()]
    before = resident.settle() if resident else 0
    for run in range(job["runs"]):
        if resident:
            before = before if job["arena"] else resident.settle()
            resident.reset()
        started = time.perf_counter()
        outputs = session.run(None, feeds)
        answer["seconds"].append(time.perf_counter() - started)
        if resident:
            answer["peaks"].append(max(0, resident.peak() - before))
        answer["digests"].append(digest_of(outputs))
        if job["outputs"]:
            np.savez(Path(job["outputs"]) / f"{run}.npz", **_keyed(flat(outputs, names)))
        del outputs
    if job["peak"] and job["target"] == "cuda":
        del session
        answer["peaks"] = [smallest_limit(lambda limit: session_with(limit).run(None, feeds))]
    return answer


def _keyed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    # Names of tensors may hold what a file name in an archive may not: number the arrays and store the names.
    return {"names": np.array(list(arrays))} | {str(i): a for i, a in enumerate(arrays.values())}


def smallest_limit(attempt: Callable[[int], object]) -> int:
    """The smallest memory limit in bytes, within 1 %, under which `attempt` does not raise."""

    def fits(limit: int) -> bool:
        try:
            attempt(limit)
        except Exception:
            if limit >= _LAST_GPU_LIMIT:
                raise
            return False
        return True

    high = _FIRST_GPU_LIMIT
    while not fits(high):
        high *= 2
    low = 0 if high == _FIRST_GPU_LIMIT else high // 2
    while high - low > _GPU_LIMIT_TOLERANCE * high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def main(job_path: str) -> int:
    """Do the job in `job_path` and write the answer to the file that it names."""
    job = json.loads(Path(job_path).read_text())
    try:
        answer = run_job(job)
    except SublinearError as e:
        answer = {"error": e.message, "hint": e.hint, "exit_code": e.exit_code}
    except Exception as e:  # every kind of failure of the runtime is the answer
        answer = {"error": f"{type(e).__name__}: {e}", "hint": "", "exit_code": 0}
    Path(job["answer"]).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
