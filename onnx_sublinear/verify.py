"""Do two models give the same outputs when ONNX Runtime runs them?

Each model runs in a fresh process on the same feeds. At level "none" the outputs must have the same bits; at other
levels, where ONNX Runtime itself changes the last bits from graph to graph, the largest relative error is what counts.
An output that differs between two runs of the *original* (an operator draws without a seed) cannot be compared and is
named. `check_rewrite`, the static proof that needs no runtime, is in `rewrite_check`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from onnx_sublinear.errors import UsageError, VerificationError, printable
from onnx_sublinear.measure import run_in_process
from onnx_sublinear.rewrite_check import check_rewrite
from onnx_sublinear.runtime import Level

__all__ = ["Comparison", "OutputDifference", "check_rewrite", "compare_models"]

DEFAULT_TOLERANCE = 1e-6
"""Largest relative error that passes at levels other than "none"."""


@dataclass(frozen=True)
class OutputDifference:
    """How one output differs.

    Attributes:
        name: the output (an item of a sequence has its place behind the name).
        run: which run of the step, from 0.
        reason: one phrase for people.
        max_relative_error: max |a - b| / max |a| over the elements; inf where it has no meaning.
    """

    name: str
    run: int
    reason: str
    max_relative_error: float


@dataclass(frozen=True)
class Comparison:
    """What the comparison of two models found.

    Attributes:
        level: the optimization level of both sessions.
        runs: how often each model ran.
        outputs: names of all outputs.
        differences: outputs with other bits, the first such run of each.
        max_relative_error: the largest over all compared outputs and runs.
        tolerance: largest relative error that passes; 0 asks for equal bits.
        random_outputs: outputs that differ between two runs of the original itself; left out.
        ort_version: version of ONNX Runtime.
    """

    level: str
    runs: int
    outputs: tuple[str, ...]
    differences: tuple[OutputDifference, ...]
    max_relative_error: float
    tolerance: float
    random_outputs: tuple[str, ...]
    ort_version: str

    @property
    def equal(self) -> bool:
        """Whether every output that can be compared passes."""
        return not self.failures

    @property
    def bitwise(self) -> bool:
        """Whether every output that can be compared has the same bits."""
        return not self.differences

    @property
    def compared(self) -> int:
        """How many outputs were compared."""
        return len(self.outputs) - len(self.random_outputs)

    @property
    def failures(self) -> tuple[OutputDifference, ...]:
        """The differences above the tolerance."""
        return tuple(d for d in self.differences if not d.max_relative_error <= self.tolerance)

    def require(self) -> None:
        """Raise unless the outputs are equal.

        Raises:
            VerificationError: an output differs, or none could be compared.
        """
        if self.failures:
            worst = self.failures[0]
            more = f" (and {len(self.failures) - 1} more outputs)" if len(self.failures) > 1 else ""
            raise VerificationError(
                f"output '{printable(worst.name)}' differs: {worst.reason}{more}",
                "do not use the second model; compare at --level none to leave out ONNX Runtime's own optimizations",
            )
        if not self.compared and self.outputs:
            raise VerificationError(
                "no output can be compared: all of them differ between two runs of the first model",
                "give its random operators a seed attribute",
            )


def compare_models(
    a: str | PathLike[str],
    b: str | PathLike[str],
    feeds: Mapping[str, Any],
    *,
    level: Level = "none",
    target: str = "cpu",
    runs: int = 2,
    tolerance: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run two models on the same feeds and compare all outputs of all runs.

    Args:
        a: the original model's file.
        b: the other model's file.
        feeds: values by input name.
        level: graph optimizations in both sessions.
        target: "cpu" or "cuda".
        runs: how often each session runs the step; more than one catches state that is advanced twice.
        tolerance: largest relative error that passes; default 0 (equal bits) at level "none", else 1e-6.
        progress: receives a line before each step.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: ONNX Runtime cannot load or run one of them.
        UsageError: an option does not fit.
    """
    allowed = tolerance if tolerance is not None else 0.0 if level == "none" else DEFAULT_TOLERANCE
    if not allowed >= 0:
        raise UsageError(f"the tolerance {allowed} is negative", "use 0 for equal bits")

    def say(line: str) -> None:
        if progress is not None:
            progress(line)

    with tempfile.TemporaryDirectory(prefix="onnx-sublinear-") as folder:

        def run(path: str | PathLike[str], place: str, seed: int) -> tuple[Path, str]:
            say(f"running {fspath(path)} {runs} times")
            outputs = Path(folder) / place
            outputs.mkdir()
            answer = run_in_process(path, feeds, target=target, level=level, runs=runs, seed=seed, outputs=outputs)
            return outputs, str(answer["version"])

        first, version = run(a, "a", 1)
        second, _ = run(b, "b", 1)
        differences = dict(_differences(first, second, runs))
        random: set[str] = set()
        if differences:
            again, _ = run(a, "again", 2)
            random = set(dict(_differences(first, again, runs)))
        with np.load(first / "0.npz", allow_pickle=False) as data:
            names = tuple(map(str, data["names"]))
    kept = tuple(d for name, d in differences.items() if name not in random)
    worst = max((d.max_relative_error for d in kept), default=0.0)
    unsteady = tuple(n for n in dict.fromkeys((*names, *differences)) if n in random)
    return Comparison(level, runs, names, kept, worst, allowed, unsteady, version)


def _differences(a: Path, b: Path, runs: int) -> Iterator[tuple[str, OutputDifference]]:
    """The outputs in folders `a` and `b` that differ, each at its first such run."""
    found: dict[str, OutputDifference] = {}
    for run in range(runs):
        with (
            np.load(a / f"{run}.npz", allow_pickle=False) as left,
            np.load(b / f"{run}.npz", allow_pickle=False) as right,
        ):
            left_keys = {str(n): str(i) for i, n in enumerate(left["names"])}
            right_keys = {str(n): str(i) for i, n in enumerate(right["names"])}
            for name in dict.fromkeys((*left_keys, *right_keys)):
                if name not in left_keys or name not in right_keys:
                    which = "first" if name in left_keys else "second"
                    difference = OutputDifference(name, run, f"only the {which} model has it", float("inf"))
                else:
                    reason, error = array_difference(left[left_keys[name]], right[right_keys[name]])
                    if not reason:
                        continue
                    difference = OutputDifference(name, run, reason, error)
                found.setdefault(name, difference)
    yield from found.items()


def array_difference(a: Any, b: Any) -> tuple[str, float]:
    """What differs between two arrays ("" for nothing: same type, shape and bits, any NaN equal to any NaN), and by
    how much: max |a - b| / max |a|, inf where types, shapes, strings or the places of NaN and infinity differ.
    """
    if a.dtype != b.dtype and not (a.dtype.kind == "U" and b.dtype.kind == "U"):
        return f"its type is {b.dtype} instead of {a.dtype}", float("inf")
    if a.shape != b.shape:
        return f"its shape is {list(b.shape)} instead of {list(a.shape)}", float("inf")
    if a.dtype.kind not in "fc":
        other = int(np.count_nonzero(a != b))
        return (f"{other} of {a.size} elements are not equal", float("inf")) if other else ("", 0.0)
    same = _bits(a) == _bits(b)
    same |= np.isnan(a) & np.isnan(b)
    if same.all():
        return "", 0.0
    finite = np.isfinite(a) & np.isfinite(b)
    if not (finite | same).all():
        return f"{int(np.count_nonzero(~(finite | same)))} of {a.size} elements are NaN or infinite in one", float(
            "inf"
        )
    wide = np.float64 if a.dtype.kind == "f" else np.complex128
    left, right = a[finite].astype(wide), b[finite].astype(wide)
    largest, gap = float(np.abs(left).max(initial=0.0)), float(np.abs(left - right).max(initial=0.0))
    error = gap / largest if largest else float("inf") if gap else 0.0
    return f"{int(np.count_nonzero(~same))} of {a.size} elements, relative error {error:.2g}", error


def _bits(array: Any) -> Any:
    if array.dtype.kind == "c" or array.dtype.itemsize not in (1, 2, 4, 8):
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
