"""`onnx-sublinear bench`: measured peak and time of two models, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_sublinear.cli.messages import progress_to_stderr, say_warning
from onnx_sublinear.cli.options import (
    DimOption,
    FeedsOption,
    JsonOption,
    LevelOption,
    QuietOption,
    SeedOption,
    TargetOption,
    require_file,
)
from onnx_sublinear.errors import UsageError

if TYPE_CHECKING:
    from onnx_sublinear.benchmark import Benchmark

__all__ = ["bench"]


def bench(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", show_default=False)],
    optimized: Annotated[
        Path | None, typer.Argument(metavar="OPTIMIZED", help="Only --matrix goes without.", show_default=False)
    ] = None,
    feeds: FeedsOption = None,
    dim: DimOption = None,
    seed: SeedOption = 0,
    level: LevelOption = "all",
    target: TargetOption = "cpu",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed processes for each model, taken in turns.")] = 3,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Predicted and measured peaks in every kind of session; no times, no outputs."),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure peak and time of both models, and whether their outputs are equal.

    Every measurement has a process of its own; the two models take turns, so that a busy machine hits both alike.
    """
    from onnx_sublinear.runtime import level_named, target_named
    from onnx_sublinear.units import parse_dims

    require_file(original)
    if optimized is not None:
        require_file(optimized)
    target_named(target)
    chosen_level = level_named(level)
    dims = parse_dims(dim or [])
    if matrix:
        if target != "cpu":
            raise UsageError("--matrix measures sessions on the CPU only", "leave --target out")
        _matrix([original, *([optimized] if optimized is not None else [])], feeds, dims, seed, json, quiet)
        return
    if optimized is None:
        raise UsageError("bench compares two models", "name the optimized model too, or use --matrix")

    from onnx_sublinear.benchmark import compare_cost
    from onnx_sublinear.cli.feeding import feeds_from
    from onnx_sublinear.model_io import load_model
    from onnx_sublinear.report import to_json

    result = compare_cost(
        original,
        optimized,
        feeds_from(feeds, load_model(original), dims, seed),
        dims=dims,
        level=chosen_level,
        target=target,
        runs=runs,
        progress=progress_to_stderr(quiet),
    )
    if json:
        typer.echo(to_json(result.to_dict()))
    else:
        typer.echo(_text(result))
    for note in result.notes:
        say_warning(note)
    result.outputs.require()


def _matrix(models: list[Path], feeds: Path | None, dims: dict[str, int], seed: int, json: bool, quiet: bool) -> None:
    from onnx_sublinear.cli.feeding import feeds_from
    from onnx_sublinear.matrix import measure_matrix
    from onnx_sublinear.model_io import load_model
    from onnx_sublinear.report import matrix_text, to_json

    values = feeds_from(feeds, load_model(models[0]), dims, seed)
    result = measure_matrix(models, values, dims=dims, progress=progress_to_stderr(quiet))
    typer.echo(to_json(result.to_dict()) if json else matrix_text(result))
    for note in result.notes:
        say_warning(note)


def _text(result: Benchmark) -> str:
    from onnx_sublinear.report import aligned
    from onnx_sublinear.units import format_bytes, format_share

    def row(name: str, before: int | None, after: int | None) -> list[str]:
        sizes = ["-" if b is None else format_bytes(b) for b in (before, after)]
        return [name, *sizes, format_share(after / before) if before and after else ""]

    a, b = result.original, result.optimized
    rows: list[list[str]] = [
        ["", "original", "optimized", ""],
        row("peak, measured", a.peak_bytes, b.peak_bytes),
        row("peak, predicted", a.predicted_peak_bytes, b.predicted_peak_bytes),
        ["time of a step", _seconds(a.median_seconds), _seconds(b.median_seconds), f"x {result.time_ratio:.2f}"],
    ]
    outputs: Any = result.outputs
    verdict = "equal bits" if outputs.bitwise else f"relative error at most {outputs.max_relative_error:.2g}"
    lines = [
        aligned(rows, right=(1, 2, 3)),
        f"outputs: {outputs.compared} compared at level {outputs.level}: {verdict}",
    ]
    if result.noisy:
        lines.append("the peak is small: measured figures read some KiB high for each tensor")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
