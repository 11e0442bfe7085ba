"""Planners on public problems and on the golden models: overhead and seconds at budgets from 0.95 to 0.3.

    python -m benchmarks.planners            # about half an hour; writes benchmarks/planners.md
    python -m benchmarks.planners segnet unet3 --strategies auto,exact

Problems: ../shared/bench/remat/*.json beside the checkout, where there are any, with the smallest overhead known, and
models/golden/*.onnx in the order of their file. Budgets are shares of the keep-all peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import onnx

from onnx_sublinear.errors import BudgetError, MissingExtraError
from onnx_sublinear.passes.prepare import prepare
from onnx_sublinear.planners import STRATEGIES, Limit, RematProblem, strategy_named
from onnx_sublinear.planners.abstract import load_problem
from onnx_sublinear.planners.problem import evaluate, remat_problem
from onnx_sublinear.scheduling import base_orders
from onnx_sublinear.training_graph import TrainingGraph

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = ROOT.parent / "shared" / "bench" / "remat"
BUDGETS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3)
EXACT_NODES = 300
DIMS = {"batch": 32}
HEADER = """# Planners

{date}, {cpus} CPUs. Regenerate with `python -m benchmarks.planners`. Overhead in percent of a step, seconds behind it;
"-": no plan found. "reference" is the smallest overhead known (with *: proved for at most one rerun a node).

"""


def problems(wanted: list[str]) -> Iterator[tuple[str, RematProblem, dict[float, str]]]:
    """Name, problem, and the reference by budget."""
    known = json.loads((PUBLIC / "reference.json").read_text()) if PUBLIC.is_dir() else {}
    for path in sorted(PUBLIC.glob("*.json")):
        if path.stem == "reference" or not any(w in path.stem for w in wanted):
            continue
        reference = {
            e["budget"]: f"{100 * e['overhead']:.2f}{'*' if e.get('proved') else ''}"
            for e in (*reversed(known.get("published", {}).get(path.stem, [])), *known.get(path.stem, []))
        }
        yield path.stem, load_problem(path), reference
    for path in sorted((ROOT / "models" / "golden").glob("*.onnx")):
        if any(w in path.stem for w in wanted):
            graph = TrainingGraph(prepare(onnx.load(path)), DIMS if "symbolic" in path.stem else {}, (), "cpu")
            yield path.stem, remat_problem(graph, next(iter(base_orders(graph)))), {}


def cell(problem: RematProblem, name: str, budget_bytes: int) -> str:
    """Overhead and seconds of one strategy."""
    started = time.perf_counter()
    try:
        plan = strategy_named(name, focus=True).plan(problem, Limit(budget_bytes, None, None))
    except (BudgetError, MissingExtraError):
        return "-"
    proved = plan.overhead_bound is not None and plan.overhead_bound >= plan.overhead * 0.9999
    return f"{100 * plan.overhead:.2f}{'*' if proved else ''} ({time.perf_counter() - started:.1f})"


def main() -> None:
    """Writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only problems whose name has this in it")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="separated by commas")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="separated by commas")
    options = parser.parse_args()
    names = options.strategies.split(",")
    tables: list[str] = []
    for title, problem, reference in problems(options.names or [""]):
        peak = evaluate(problem, range(len(problem.labels))).peak_bytes
        lines = [
            f"## {title}, {len(problem.labels)} nodes, keep-all peak {peak:,} bytes",
            "",
            f"| budget | reference | {' | '.join(names)} |",
            "|---" * (2 + len(names)) + "|",
        ]
        for budget in map(float, options.budgets.split(",")):
            cells = [
                "" if name == "exact" and len(problem.labels) > EXACT_NODES else cell(problem, name, int(budget * peak))
                for name in names
            ]
            lines.append(f"| {budget} | {reference.get(budget, '')} | {' | '.join(cells)} |")
            print(title, lines[-1], file=sys.stderr, flush=True)
            if all(c in ("", "-") for c in cells):
                break
        tables.append("\n".join(lines) + "\n")
    if not options.names:
        text = HEADER.format(date=date.today(), cpus=os.cpu_count()) + "\n".join(tables)
        Path(__file__).with_suffix(".md").write_text(text)
    else:
        print("\n".join(tables))


if __name__ == "__main__":
    main()
