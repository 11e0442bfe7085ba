"""Abstract problems: nodes with a size and a cost, and edges, in a JSON file, as papers on the subject exchange them.

    {"nodes": [{"name": "conv1", "size": 4096, "cost": 10, "backward": false}, ...], "edges": [[0, 1], ...]}

Nodes stand in the order in which they first run, sizes are bytes of a node's one output, edges are [producer, consumer]
node numbers. Memory model: an output is live from its run to its last reader before the node runs again, at least for
its own step; nothing is in-place or a view. Every node may run again. Other keys are ignored. A schedule is a list of
node numbers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from onnx_sublinear._staging import Staging
from onnx_sublinear.errors import ModelError, ModelFileError, UsageError, printable
from onnx_sublinear.planners.problem import RematProblem

__all__ = ["load_problem", "problem_from_json", "save_schedule"]

_MOST_BYTES = 1 << 53  # of one node: beyond, JSON readers disagree on the number
_MOST_TOTAL = 1 << 62  # profiles are 64-bit
_COST_TOTAL = 1 << 50  # whole numbers that costs with fractions are scaled to


def load_problem(path: str | os.PathLike[str]) -> RematProblem:
    """The problem in the JSON file `path`.

    Raises:
        ModelFileError: the file cannot be read, or is not JSON.
        ModelError: the content is not a problem.
    """
    shown = f"'{printable(str(path))}'"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelFileError(f"{shown} cannot be read ({e.strerror})", "check the path") from e
    except (ValueError, RecursionError) as e:
        why = printable(str(e)) if isinstance(e, json.JSONDecodeError) else "no text that a JSON reader takes"
        raise ModelFileError(f"{shown} is not JSON: {why}", 'write {"nodes": [...], "edges": [...]}') from e
    try:
        return problem_from_json(content)
    except ModelError as e:
        raise ModelError(f"{shown} is not a problem: {e.message}", e.hint) from e


def problem_from_json(content: Any) -> RematProblem:
    """The problem that parsed JSON describes.

    Raises:
        ModelError: the content is not a problem; the message names what is wrong.
    """
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in ("nodes", "edges")):
        raise ModelError("it has no lists 'nodes' and 'edges'", 'write {"nodes": [...], "edges": [...]}')
    nodes, edges = content["nodes"], content["edges"]
    if not nodes:
        raise ModelError("it has no nodes", "list the nodes in the order in which they first run")
    sizes, costs = [_size(n, x) for n, x in enumerate(nodes)], [_cost(n, x) for n, x in enumerate(nodes)]
    if sum(sizes) > _MOST_TOTAL:
        raise ModelError("its sizes add up to more than 2^62 bytes", "give sizes in a larger unit")
    reads: list[dict[int, None]] = [{} for _ in nodes]
    for number, edge in enumerate(edges):
        producer, consumer = _edge(number, edge, len(nodes))
        reads[consumer][producer] = None
    count = len(nodes)
    return RematProblem(
        labels=tuple(range(count)),
        reads=tuple(tuple(r) for r in reads),
        writes=tuple((n,) for n in range(count)),
        views=((),) * count,
        inplace=((),) * count,
        sizes=tuple(sizes),
        kept=(False,) * count,
        costs=tuple(_whole(costs)),
        workspaces=(0,) * count,
        forward=tuple(_forward(nodes, sizes, reads)),
        recomputable=(True,) * count,
    )


def save_schedule(schedule: Sequence[int], path: str | os.PathLike[str]) -> None:
    """Writes a schedule as JSON; the file appears complete or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    output = Path(path).resolve()
    try:
        with Staging(output.parent) as staging:
            with staging.create(output.parent) as (temporary, file):
                file.write((json.dumps(list(schedule)) + "\n").encode())
            staging.assign(temporary, output, replace=True)
            staging.commit()
    except OSError as e:
        raise UsageError(f"'{printable(str(path))}' cannot be written ({e.strerror})", "choose another output") from e


def _number(n: int, node: Any, key: str) -> float | int:
    value = node.get(key) if isinstance(node, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"node {n} has no number '{key}'", 'write {"name": ..., "size": bytes, "cost": ...}')
    if (isinstance(value, float) and not math.isfinite(value)) or value < 0:
        shown = printable(str(value), 40)
        raise ModelError(f"node {n}: '{key}' is {shown}", f"a {key} is a finite number, 0 or more")
    return value


def _size(n: int, node: Any) -> int:
    value = _number(n, node, "size")
    if value != int(value):
        raise ModelError(f"node {n}: 'size' is {value}", "a size is a whole number of bytes")
    if value > _MOST_BYTES:
        raise ModelError(f"node {n}: 'size' is more than 2^53 bytes", "give sizes in a larger unit")
    return int(value)


def _cost(n: int, node: Any) -> float | int:
    value = _number(n, node, "cost")
    if value > 1e100:
        raise ModelError(f"node {n}: 'cost' is more than 1e100", "give costs in a larger unit")
    return value


def _edge(number: int, edge: Any, count: int) -> tuple[int, int]:
    if not isinstance(edge, list) or len(edge) != 2 or any(type(end) is not int for end in edge):
        raise ModelError(f"edge {number} is not a pair of node numbers", "write [producer, consumer]")
    producer, consumer = edge
    for end in edge:
        if not 0 <= end < count:
            shown = printable(str(end), 40) if abs(end) < 1 << 64 else "a huge number"
            raise ModelError(f"edge {number} names node {shown}, but there are {count} nodes", "nodes count from 0")
    if producer >= consumer:
        raise ModelError(
            f"edge {number} goes from node {producer} to node {consumer}, which runs no later: a cycle, or nodes out of"
            " order",
            "list the nodes in the order in which they first run",
        )
    return producer, consumer


def _whole(costs: list[float | int]) -> list[int]:
    """Costs as whole numbers: as they are, or scaled where there are fractions or the sum is out of range."""
    total = math.fsum(costs)
    if total <= _MOST_TOTAL and all(c == int(c) for c in costs):
        return [int(c) for c in costs]
    scale = _COST_TOTAL / total
    return [round(c * scale) for c in costs]


def _forward(nodes: list[Any], sizes: list[int], reads: list[dict[int, None]]) -> list[bool]:
    """Per node whether it is in the forward section: as marked, else all nodes up to the largest live bytes."""
    if any(node.get("backward") is True for node in nodes):
        return [node.get("backward") is not True for node in nodes]
    last = list(range(len(nodes)))
    for n, values in enumerate(reads):
        for v in values:
            last[v] = n
    delta = [0] * (len(nodes) + 1)
    for n, size in enumerate(sizes):
        delta[n] += size
        delta[last[n] + 1] -= size
    live = list(accumulate(delta[:-1]))
    turn = live.index(max(live))
    return [n <= turn for n in range(len(nodes))]
