"""Abstract problems: a JSON file with sizes, costs and edges, as rematerialization papers exchange them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from onnx_sublinear.errors import ModelError, ModelFileError, printable
from onnx_sublinear.planners.problem import RematProblem

__all__ = ["load_problem", "problem_from_json"]

_MOST = 1 << 53  # bytes or cost of one node: beyond, JSON readers disagree on the value
_COST_STEPS = 1 << 40


def load_problem(path: str | os.PathLike[str]) -> RematProblem:
    """The problem in the JSON file `path`.

    Raises:
        ModelFileError: the file is not readable, or not JSON.
        ModelError: what it says is no problem.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelFileError(f"'{path}' cannot be read: {printable(str(e))}") from e
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"'{path}' is not JSON: {printable(str(e))}") from e
    try:
        return problem_from_json(content)
    except ModelError as e:
        raise ModelError(f"'{path}': {e.message}", e.hint) from e


def problem_from_json(content: Any) -> RematProblem:
    nodes, edges = content["nodes"], content["edges"]
    n = len(nodes)
    reads: list[list[int]] = [[] for _ in range(n)]
    for u, v in edges:
        reads[v].append(u)
    return RematProblem(
        labels=tuple(range(n)),
        reads=tuple(tuple(dict.fromkeys(r)) for r in reads),
        writes=tuple((v,) for v in range(n)),
        views=((),) * n,
        inplace=((),) * n,
        sizes=tuple(x["size"] for x in nodes),
        kept=(False,) * n,
        costs=tuple(x["cost"] for x in nodes),
        workspaces=(0,) * n,
        forward=tuple(not x.get("backward", False) for x in nodes),
        recomputable=(True,) * n,
    )
