"""Cost of two models side by side: measured peak, predicted peak, time of a step, equality of the outputs.

The peak is measured with ONNX Runtime's arena off (exact), the time with the options of `training_session`. Processes
of the two models alternate, so that what else the machine does hits both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from statistics import median
from typing import Any

from onnx_sublinear.measure import measure, run_in_process
from onnx_sublinear.runtime import Level
from onnx_sublinear.verify import Comparison, compare_models

__all__ = ["Benchmark", "Cost", "compare_cost"]

_STEPS_PER_PROCESS = 4
_NOISY_BELOW_BYTES = 20 << 20


@dataclass(frozen=True)
class Cost:
    """What a step of one model costs.

    Attributes:
        peak_bytes: measured peak, or None where it cannot be measured.
        predicted_peak_bytes: simulated peak in the default order, or None where sizes are not known.
        seconds: median step time of each process, in the order taken.
        median_seconds: median of those.
    """

    peak_bytes: int | None
    predicted_peak_bytes: int | None
    seconds: tuple[float, ...]
    median_seconds: float


@dataclass(frozen=True)
class Benchmark:
    """Two models compared.

    Attributes:
        original: cost of the first model.
        optimized: cost of the second.
        time_ratio: median over the turns of (time of the second / time of the first).
        outputs: comparison of all outputs at level "none".
        ort_version: version of ONNX Runtime.
        notes: what limits the figures.
    """

    original: Cost
    optimized: Cost
    time_ratio: float
    outputs: Comparison
    ort_version: str
    notes: tuple[str, ...]

    @property
    def noisy(self) -> bool:
        """Whether a peak is so small that whole pages weigh in it."""
        peaks = (self.original.peak_bytes, self.optimized.peak_bytes)
        return any(p is not None and p < _NOISY_BELOW_BYTES for p in peaks)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        peaks = (self.original.peak_bytes, self.optimized.peak_bytes)
        ratio = peaks[1] / peaks[0] if peaks[0] and peaks[1] is not None else None
        return {
            **asdict(self),
            "peak_ratio": ratio,
            "outputs_equal": self.outputs.equal,
            "outputs_bitwise": self.outputs.bitwise,
        }


def compare_cost(
    original: str | PathLike[str],
    optimized: str | PathLike[str],
    feeds: Mapping[str, Any],
    *,
    dims: Mapping[str, int] | None = None,
    level: Level = "all",
    target: str = "cpu",
    runs: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Benchmark:
    """Measure two models in turns.

    Args:
        original: the first model's file.
        optimized: the second model's file.
        feeds: values by input name.
        dims: sizes of symbolic dimensions, for the predicted peaks.
        level: graph optimizations while peak and time are taken; outputs are always compared at "none".
        target: "cpu" or "cuda".
        runs: timed processes for each model.
        progress: receives a line before each step.

    Raises:
        MissingExtraError, ModelError, UsageError: as `measure`.
    """

    def say(line: str) -> None:
        if progress is not None:
            progress(line)

    models = (original, optimized)
    outputs = compare_models(original, optimized, feeds, target=target, progress=progress)
    peaks: list[int | None] = []
    notes: list[str] = []
    for path in models:
        say(f"measuring the peak of {fspath(path)}")
        taken = measure(path, feeds, target=target, level=level)
        peaks.append(taken.peak)
        notes += [taken.note] if taken.note and taken.note not in notes else []
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs):
        say(f"timing both models, turn {turn + 1} of {runs}")
        for path, times in zip(models, seconds, strict=True):
            answer = run_in_process(
                path, feeds, target=target, level=level, runs=_STEPS_PER_PROCESS, arena=True, threads=0
            )
            times.append(median(answer["seconds"][1:]))  # the first step warms up
    costs = [
        Cost(peak, _predicted(path, dims, target), tuple(times), median(times))
        for path, peak, times in zip(models, peaks, seconds, strict=True)
    ]
    ratio = median(b / a for a, b in zip(*seconds, strict=True))
    return Benchmark(costs[0], costs[1], ratio, outputs, outputs.ort_version, tuple(notes))


def _predicted(path: str | PathLike[str], dims: Mapping[str, int] | None, target: str) -> int | None:
    """Simulated peak in the default order; None where the model has tensors of unknown size."""
    from onnx_sublinear.api import inspect

    inspection = inspect(path, dims=dims, target=target)
    return None if inspection.unknown_size_names else inspection.peak_default_bytes
