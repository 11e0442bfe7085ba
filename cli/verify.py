"""`onnx-sublinear verify`: do two models compute the same?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_sublinear.cli.messages import progress_to_stderr, say_warning
from onnx_sublinear.cli.options import (
    DimOption,
    FeedsOption,
    JsonOption,
    LevelOption,
    QuietOption,
    RunsOption,
    SeedOption,
    TargetOption,
    require_file,
)

__all__ = ["verify"]

_MOST_LINES = 10


def verify(
    original: Annotated[Path, typer.Argument(metavar="A", help="The original model.", show_default=False)],
    other: Annotated[Path, typer.Argument(metavar="B", help="The model to check.", show_default=False)],
    feeds: FeedsOption = None,
    dim: DimOption = None,
    seed: SeedOption = 0,
    level: LevelOption = "none",
    target: TargetOption = "cpu",
    runs: RunsOption = 2,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest relative error; default 0 (equal bits) at level none, else 1e-6."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Only prove that B is A plus clones and barriers; nothing is run.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check that B computes what A computes: a static proof, then equal outputs in ONNX Runtime.

    Outputs decide. The static proof decides with --static, or where every output is random. Exit code 5: not equal.
    """
    from onnx_sublinear.errors import VerificationError
    from onnx_sublinear.runtime import level_named, target_named
    from onnx_sublinear.units import parse_dims

    require_file(original)
    require_file(other)
    target_named(target)
    chosen_level = level_named(level)
    dims = parse_dims(dim or [])

    from onnx_sublinear.cli.feeding import feeds_from
    from onnx_sublinear.model_io import load_model
    from onnx_sublinear.report import to_json
    from onnx_sublinear.verify import check_rewrite, compare_models

    first = load_model(original)
    findings = check_rewrite(first, load_model(other))
    data: dict[str, Any] = {"proven": not findings, "findings": findings}
    comparison = None
    if not static:
        comparison = compare_models(
            original,
            other,
            feeds_from(feeds, first, dims, seed),
            level=chosen_level,
            target=target,
            runs=runs,
            tolerance=tolerance,
            progress=progress_to_stderr(quiet),
        )
        data |= {"equal": comparison.equal, "bitwise": comparison.bitwise, "comparison": comparison}
    if json:
        typer.echo(to_json(data))
    else:
        _print(findings, comparison)
    if comparison is not None and comparison.random_outputs:
        say_warning(f"{len(comparison.random_outputs)} outputs are random in A itself and were not compared")
    if comparison is not None and (comparison.compared or findings):
        comparison.require()
    elif findings:
        raise VerificationError(findings[0], "run without --static to compare the outputs")


def _print(findings: list[str], comparison: Any) -> None:
    from onnx_sublinear.errors import printable

    if findings:
        typer.echo(f"not proven: B is more than A plus clones and barriers ({len(findings)} findings)")
        _print_some([printable(finding) for finding in findings])
    else:
        typer.echo("proven: B is A plus clones and barriers")
    if comparison is None:
        return
    word = "equal bits" if comparison.bitwise else f"relative error at most {comparison.max_relative_error:.2g}"
    typer.echo(f"{comparison.compared} outputs, {comparison.runs} runs, level {comparison.level}: {word}")
    _print_some([f"{printable(d.name)}, run {d.run}: {d.reason}" for d in comparison.differences])


def _print_some(lines: list[str]) -> None:
    for line in lines[:_MOST_LINES]:
        typer.echo(f"  {line}")
    if len(lines) > _MOST_LINES:
        typer.echo(f"  ... and {len(lines) - _MOST_LINES} more (all of them with --json)")
