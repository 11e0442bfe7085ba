"""`onnx-sublinear plan`: plan an abstract rematerialization problem."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sublinear.cli.options import JsonOption, require_file, require_output

if TYPE_CHECKING:
    from onnx_sublinear.planners import Limit

__all__ = ["plan"]


def plan(
    problem: Annotated[
        Path, typer.Argument(metavar="PROBLEM", help="Nodes with size and cost, and edges (.json).", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The schedule to write (.json).", show_default=False)
    ],
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes at the peak: 2GiB, or 60% of the keep-all peak.")
    ] = None,
    max_overhead: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Most extra work, as a share of a step: 20%.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="auto, sqrt, chen, recursive, chain, greedy or exact.")
    ] = "auto",
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="How long auto and exact search.")] = 10,
    json: JsonOption = False,
) -> None:
    """Plan an abstract problem: which nodes to run again, and when.

    PROBLEM is {"nodes": [{"name", "size", "cost"}, ...], "edges": [[producer, consumer], ...]}, nodes in the order in
    which they first run, sizes in bytes. OUT is a list of node numbers; one that comes again is a recomputation.

    With a budget: the cheapest schedule within it. Without: the smallest peak within the overhead, which is one extra
    forward pass by default.
    """
    from onnx_sublinear.errors import UsageError
    from onnx_sublinear.units import parse_bytes, parse_share

    require_file(problem)
    require_output(output, problem, False)
    overhead = parse_share(max_overhead) if max_overhead is not None else None
    if budget is not None:
        parse_share(budget) if budget.strip().endswith("%") else parse_bytes(budget)
    if not time_limit < float("inf"):
        raise UsageError("the time limit is not a number of seconds", "write for example --time-limit 10")

    from onnx_sublinear.planners import strategy_named
    from onnx_sublinear.planners.abstract import load_problem, save_schedule
    from onnx_sublinear.planners.problem import evaluate, least_bytes
    from onnx_sublinear.report import plan_json, plan_text, to_json

    planner = strategy_named(strategy, seconds=time_limit, focus=True)
    content = load_problem(problem)
    started = time.monotonic()
    before = evaluate(content, range(len(content.labels))).peak_bytes
    found = planner.plan(content, _limit(budget, overhead, before), lower_bound_bytes=least_bytes(content))
    seconds = time.monotonic() - started
    save_schedule(found.labels, output)
    if json:
        typer.echo(to_json(plan_json(found, before, least_bytes(content), seconds)))
    else:
        typer.echo(plan_text(found, before, least_bytes(content)))


def _limit(budget: str | None, overhead: float | None, peak_before: int) -> Limit:
    """The limit in bytes; shares of the budget are exact, so that 60% is never a byte more than 60 %."""
    from onnx_sublinear.planners import Limit
    from onnx_sublinear.units import parse_bytes, share_of

    if budget is None and overhead is None:
        return Limit()
    if budget is None:
        return Limit(None, overhead, None)
    size = share_of(budget, peak_before) if budget.strip().endswith("%") else parse_bytes(budget)
    return Limit(size, overhead, None)
