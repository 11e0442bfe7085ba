"""Predicted against measured peaks in both execution orders, at level none and all, of both builds of ONNX Runtime.

    python -m benchmarks.order --training-python PATH      # half an hour on two cores; writes benchmarks/order.md

Graphs: every golden model and, where ../shared is present, every graph there that runs; as they are and optimized with
default options. Measured by ../shared/tools/ort_peak/ort_peak.py (a malloc tracer that leaves out blocks below 4 KiB;
the predictions here leave them out too), otherwise by `onnx_sublinear.measure`. `--training-python` names an
interpreter with onnxruntime-training; without it that build is left out. `--only TEXT` takes the graphs with TEXT in
their names and prints the table instead of writing it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.order_report import Figures, Row, report
from onnx_sublinear import prediction
from onnx_sublinear.errors import SublinearError
from onnx_sublinear.model_io import load_model
from onnx_sublinear.prediction import Configuration
from onnx_sublinear.run_memory import Allocation
from onnx_sublinear.training_graph import TrainingGraph

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
JUDGE = SHARED / "tools" / "ort_peak" / "ort_peak.py"
BATCH = 8
LARGE_BATCH = 4  # torchvision graphs
LEAST_BYTES = 4096
Cell = tuple[str, str, bool]  # level, order, whether arena and pattern are on
JUDGED = """
import argparse, json, sys, ort_peak
for job in json.loads(sys.argv[1]):
    try:
        ort_peak.inside(argparse.Namespace(**job))
    except Exception:
        print("{}")
    sys.stdout.flush()
"""
CELLS: list[Cell] = [(level, order, False) for level in ("none", "all") for order in ("default", "priority")]
ARENA_CELLS: list[Cell] = [(level, "default", True) for level in ("none", "all")]


@dataclass(frozen=True)
class Graph:
    """A model file with its feeds.

    Attributes:
        name: in the table.
        path: the file.
        feeds: npz file, or None for random feeds.
        dims: sizes of symbolic dims.
        golden: whether it is one of models/golden.
        training: whether only the training build runs it.
    """

    name: str
    path: Path
    feeds: Path | None
    dims: dict[str, int]
    golden: bool
    training: bool


def graphs(folder: Path) -> Iterator[Graph]:
    """All graphs; feeds of golden models are written to `folder`."""
    from models.feeds import feeds

    for path in sorted((ROOT / "models" / "golden").glob("*.onnx")):
        file = folder / f"{path.stem}.npz"
        np.savez(file, **feeds(load_model(path)))
        yield described(path, file, golden=True)
    for path in sorted((SHARED / "graphs").glob("*.onnx")):
        if not path.name.startswith("ortmodule_"):  # these need torch's operators
            file = path.with_suffix(".npz")
            yield described(path, file if file.exists() else None, golden=False)


def described(path: Path, feeds: Path | None, *, golden: bool) -> Graph:
    """The graph of a file; symbolic dims as in the feeds, else the batch above."""
    graph = TrainingGraph(load_model(path))
    given = {}
    if feeds is not None:
        with np.load(feeds) as data:
            given = {name.removeprefix("in/"): data[name].shape for name in data.files}
    dims: dict[str, int] = {}
    for name, info in graph.index.inputs.items():
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.dim_param:
                default = LARGE_BATCH if "_tv_" in path.name else BATCH
                dims.setdefault(dim.dim_param, given[name][axis] if name in given else default)
    return Graph(path.stem, path, feeds, dims, golden, graph.needs_training_build)


def optimized(graph: Graph, folder: Path) -> Graph | None:
    """The optimized graph, written to `folder`; None where it stays as it is."""
    from onnx_sublinear import optimize
    from onnx_sublinear.model_io import save_model

    result = optimize(graph.path, dims=graph.dims)
    if result.report.nodes_before == result.report.nodes_after and not result.report.barriers:
        return None
    path = folder / graph.path.name
    save_model(result.model, path, source_path=graph.path)
    return replace(graph, path=path)


def job_of(graph: Graph) -> dict[str, Any]:
    """What `predicted` needs to know."""
    cells = CELLS + (ARENA_CELLS if graph.golden else [])
    return {"path": str(graph.path), "dims": graph.dims, "cells": cells}


def predicted(job: dict[str, Any], build: Any) -> list[Figures]:
    """Predictions of the running interpreter, and those of our own model at level none, for one graph."""
    graph = TrainingGraph(load_model(job["path"]), job["dims"])
    found: list[Figures] = []
    wanted = [Configuration(build, level, order, Allocation(on, on)) for level, order, on in job["cells"]]
    for p in prediction.predict(graph, wanted, least_bytes=LEAST_BYTES):
        chosen = p.configuration
        found.append(Figures(chosen.level, chosen.order, chosen.allocation.arena, p.source, p.run_bytes, p.reason))
    own = prediction.predict(
        graph, [w for w in wanted if w.level == "none"], least_bytes=LEAST_BYTES, ask_runtime=False
    )
    for p in own:
        chosen = p.configuration
        found.append(Figures("none", chosen.order, chosen.allocation.arena, "model", p.run_bytes, p.reason))
    return found


def predictions(python: str, build: str, jobs: list[dict[str, Any]]) -> list[list[Figures]]:
    """`predicted` for each job, in a process of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        file, answer = Path(folder) / "jobs.json", Path(folder) / "answer.json"
        file.write_text(json.dumps(jobs))
        command = [python, "-m", "benchmarks.order", "--predict", str(file), str(answer), build]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
        return [[Figures(**f) for f in figures] for figures in json.loads(answer.read_text())]


def measured(graph: Graph, python: str, cells: Sequence[Cell]) -> list[tuple[int, ...]]:
    """For each cell the bytes of each run; () where the build cannot run the graph.

    The judge measures the cells of a graph in one process, those with an arena in a process each.
    """
    if not JUDGE.exists():
        return [_measured_here(graph, *cell) for cell in cells]
    groups = [[cell for cell in cells if not cell[2]], *([cell] for cell in cells if cell[2])]
    found = {cell: runs for group in groups for cell, runs in zip(group, _judged(graph, python, group), strict=True)}
    return [found[cell] for cell in cells]


def _judged(graph: Graph, python: str, cells: Sequence[Cell]) -> list[tuple[int, ...]]:
    shared = {"model": str(graph.path), "feeds": str(graph.feeds) if graph.feeds else None, "no_cse": False}
    shared |= {"dim": [f"{name}={size}" for name, size in graph.dims.items()], "runs": 2, "threads": 1}
    jobs = [{**shared, "level": level, "order": order, "arena": on, "pattern": on} for level, order, on in cells]
    library = [sys.executable, "-c", "import ort_peak; print(ort_peak.library())"]
    environment = {**os.environ, "PYTHONPATH": str(JUDGE.parent)}
    preload = subprocess.run(library, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(
        [python, "-c", JUDGED, json.dumps(jobs)],
        env={**environment, "LD_PRELOAD": preload},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answers += [{}] * (len(cells) - len(answers))
    return [tuple(answer.get("peaks", ())) for answer in answers]


def _measured_here(graph: Graph, level: Any, order: Any, arena: bool) -> tuple[int, ...]:
    from onnx_sublinear.measure import measure

    with np.load(graph.feeds) as data:
        feeds = {name.removeprefix("in/"): data[name] for name in data.files}
    try:
        return measure(graph.path, feeds, level=level, order=order, arena=arena, pattern=arena).peak_bytes
    except SublinearError:
        return ()


def rows(build: str, python: str, pairs: list[tuple[str, Graph]]) -> Iterator[Row]:
    """All cells of one build."""
    jobs = [job_of(graph) for _, graph in pairs]
    all_figures = predictions(python, build, jobs)
    with ThreadPoolExecutor(2) as pool:
        taken = pool.map(lambda pair, job: measured(pair[1], python, job["cells"]), pairs, jobs)
        for (kind, graph), job, figures, cells in zip(pairs, jobs, all_figures, taken, strict=True):
            by_cell = dict(zip(job["cells"], cells, strict=True))
            for figure in figures:
                yield Row(graph.name, kind, build, figure, by_cell[figure.level, figure.order, figure.arena])
            print(build, kind, graph.name, file=sys.stderr, flush=True)


def main() -> None:
    """Writes the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--training-python", metavar="PATH")
    options.add_argument("--only", metavar="TEXT", default="")
    options.add_argument("--predict", nargs=3, metavar=("JOBS", "ANSWER", "BUILD"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.predict:
        jobs, answer, build = given.predict
        found = [[figure.__dict__ for figure in predicted(job, build)] for job in json.loads(Path(jobs).read_text())]
        Path(answer).write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "optimized").mkdir()
        pairs: list[tuple[str, Graph]] = []
        for graph in graphs(folder):
            if given.only in graph.name:
                print("optimizing", graph.name, file=sys.stderr, flush=True)
                other = optimized(graph, folder / "optimized")
                pairs += [("original", graph), *([("optimized", other)] if other is not None else [])]
        table = list(rows("stock", sys.executable, [p for p in pairs if not p[1].training]))
        if given.training_python:
            table += rows("training", given.training_python, pairs)
    text = report(table, by_judge=JUDGE.exists())
    if given.only:
        print(text)
    else:
        Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
