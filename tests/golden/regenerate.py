"""The figures of the golden models: `python tests/golden/regenerate.py [--check] [MODEL ...]` writes figures.json anew.

Run it when a change of a planner, a pass or the runtime's model is meant to change what `optimize` makes of the golden
models, or when `python -m models.build` wrote them anew; look at the printed difference, and commit the file with the
change. `tests/test_golden.py` compares with the file. `--check` writes nothing and exits 1 where something differs.

Every figure is exact, but for `overhead` (4 digits). `digest` is over the schedule: operator and outputs of every node
of the result in file order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import onnx

import onnx_sublinear
from onnx_sublinear.api import Result

FIGURES = Path(__file__).with_name("figures.json")
MODELS = Path(__file__).resolve().parents[2] / "models" / "golden"
DIMS: dict[str, dict[str, int]] = {
    "artifacts_lenet_bn": {"batch": 64},
    "artifacts_mlp": {"batch": 256},
    "mlp_symbolic": {"batch": 1024},
}
"""Values of symbolic dims; a model that is not named has none."""


def names() -> list[str]:
    """The golden models, by file name."""
    return sorted(path.stem for path in MODELS.glob("*.onnx"))


def optimized(name: str) -> Result:
    """A golden model, optimized with no option but its dims."""
    return onnx_sublinear.optimize(MODELS / f"{name}.onnx", dims=DIMS.get(name))


def digest(model: onnx.ModelProto) -> str:
    """16 hex digits of the SHA-256 of the schedule."""
    schedule = [(node.op_type, list(node.output)) for node in model.graph.node]
    return hashlib.sha256(json.dumps(schedule).encode()).hexdigest()[:16]


def figures(result: Result) -> dict[str, Any]:
    """What the file holds about one model."""
    report = result.report
    return {
        "peaks_before_bytes": dict(report.peaks_before),
        "peaks_after_bytes": dict(report.peaks_after),
        "lower_bound_bytes": report.lower_bound_bytes,
        "clones": report.clones,
        "barriers": report.barriers,
        "strategy": report.strategy,
        "overhead": round(report.overhead, 4),
        "nodes_after": report.nodes_after,
        "digest": digest(result.model),
    }


def expected() -> dict[str, dict[str, Any]]:
    """The file's content, by model."""
    content: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    return content


def main() -> int:
    """Works the figures out, prints what changed, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something differs")
    options = parser.parse_args()
    unknown = set(options.models) - set(names())
    if unknown:
        parser.error(f"there is no golden model {', '.join(sorted(unknown))}; they are: {', '.join(names())}")
    before = expected()
    after = {name: before[name] for name in names() if name in before and name not in options.models}
    changed = False
    for name in options.models or names():
        after[name] = figures(optimized(name))
        for key, value in after[name].items():
            old = before.get(name, {}).get(key)
            if old != value:
                changed = True
                print(f"{name}: {key}: {old} -> {value}", flush=True)
    gone = sorted(set(before) - set(after))
    for name in gone:
        print(f"{name}: there is no such model any more")
    if not options.check:
        ordered = {name: after[name] for name in sorted(after)}
        FIGURES.write_text(json.dumps(ordered, indent=2) + "\n")
    return int(options.check and (changed or bool(gone)))


if __name__ == "__main__":
    sys.exit(main())
