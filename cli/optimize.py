"""`onnx-sublinear optimize`: write an equivalent training graph that needs less memory."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_sublinear.cli.messages import Progress, progress_to_stderr, say_warning
from onnx_sublinear.cli.options import (
    DimOption,
    JsonOption,
    LossOption,
    QuietOption,
    TargetOption,
    require_file,
    require_output,
)

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["optimize"]


def optimize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The training graph (.onnx).", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The file to write.", show_default=False)
    ],
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes at the peak: 2GiB, or 60% of the peak now.")
    ] = None,
    max_overhead: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Most extra work, as a share of a step: 20%. Default: one forward pass."),
    ] = None,
    strategy: Annotated[str, typer.Option(metavar="NAME", help="How to choose what to recompute.")] = "auto",
    dim: DimOption = None,
    loss: LossOption = None,
    target: TargetOption = "cpu",
    robust: Annotated[
        str,
        typer.Option(metavar="all|default", help="The execution orders that the plan must hold in: fewer, less added."),
    ] = "all",
    lower: Annotated[
        bool,
        typer.Option(
            "--lower", help="Write ONNX Runtime's training operators as standard ones first, for stock builds."
        ),
    ] = False,
    passes: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The passes, e.g. 'recompute{budget=2GiB},inplace,order,share'.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Allow the output to replace the input.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run both models and compare all outputs before writing.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write an equivalent training graph that holds less memory when ONNX Runtime runs it.

    Without a limit: the smallest peak for at most one extra forward pass.
    """
    from onnx_sublinear.runtime import target_named
    from onnx_sublinear.units import parse_bytes, parse_dims, parse_share

    require_file(model)
    require_output(output, model, force)
    target_named(target)
    dims = parse_dims(dim or [])
    overhead = parse_share(max_overhead) if max_overhead is not None else None
    if budget is not None:
        parse_share(budget) if budget.strip().endswith("%") else parse_bytes(budget)
    if verify:
        _require_runtime(target)

    from onnx_sublinear import api
    from onnx_sublinear.model_io import load_model, save_model
    from onnx_sublinear.report import optimize_text, report_json, to_json

    say = progress_to_stderr(quiet)
    say(f"loading {model}")
    result = api.optimize(
        model,
        budget=budget,
        max_overhead=overhead,
        strategy=strategy,
        dims=dims,
        loss=tuple(loss or ()),
        target=target,
        robust=robust,
        lower=lower,
        passes=passes,
        progress=say,
    )
    if verify:
        source, lowered = load_model(model), False
        if lower or "lower-training-ops" in (passes or ""):
            source, lowered = api.lowered(source), True
        _verify(source, result.model, model, output, dims, target, say, lowered)
    say(f"writing {output}")
    saved = save_model(result.model, output, source_path=model, force=force)
    for warning in dict.fromkeys((*result.report.warnings, *saved.warnings)):
        say_warning(warning)
    if json:
        typer.echo(to_json(report_json(result.report)))
    else:
        typer.echo(optimize_text(result.report))
        typer.echo(f"\nmeasure with: {_bench_line(model, output, dim or [], target)}")


def _bench_line(model: Path, output: Path, dims: list[str], target: str) -> str:
    words = ["onnx-sublinear", "bench", str(model), str(output)]
    for entry in dims:
        words += ["--dim", entry]
    if target != "cpu":
        words += ["--target", target]
    return shlex.join(words)


def _require_runtime(target: str) -> None:
    from onnx_sublinear.errors import MissingExtraError, UsageError
    from onnx_sublinear.runtime import TARGETS, available_targets

    usable = available_targets()
    if not usable:
        raise MissingExtraError("--verify", TARGETS[target].extras)
    if target not in usable:
        raise UsageError(f"target '{target}' cannot run on this machine", "leave --verify out, or use --target cpu")


def _verify(
    source: ModelProto,
    result: ModelProto,
    model: Path,
    output: Path,
    dims: dict[str, int],
    target: str,
    say: Progress,
    lowered: bool,
) -> None:
    """Compare both models before anything is written under the output's name.

    `source` is what lies at `model`, or that with its training operators lowered, which is then compared instead.
    """
    from onnx_sublinear.errors import VerificationError
    from onnx_sublinear.feeds import make_feeds
    from onnx_sublinear.model_io import save_model
    from onnx_sublinear.verify import check_rewrite, compare_models

    findings = check_rewrite(source, result)
    if findings:
        raise VerificationError(f"the rewrite is not provably equal: {findings[0]}", "please report it")
    feeds: dict[str, Any] = make_feeds(source, dims)
    with tempfile.TemporaryDirectory(prefix=".onnx-sublinear-", dir=output.parent) as folder:
        candidate = Path(folder) / f"result-{output.name}"
        save_model(result, candidate, source_path=model)
        original = model
        if lowered:
            original = Path(folder) / f"lowered-{output.name}"
            save_model(source, original, source_path=model)
        comparison = compare_models(original, candidate, feeds, target=target, progress=say)
    if comparison.random_outputs:
        say_warning(
            f"{len(comparison.random_outputs)} outputs are random in the input model itself and were not compared,"
            f" e.g. '{comparison.random_outputs[0]}'"
        )
    if comparison.compared:
        comparison.require()
    say(f"{comparison.compared} outputs have equal bits")
