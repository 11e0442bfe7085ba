"""Reports of `optimize` and `inspect` as JSON and as text.

JSON has exact bytes; text has sizes for people. The keys of the JSON form are fixed, more may follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from onnx_sublinear.errors import printable
from onnx_sublinear.units import format_bytes, format_share

if TYPE_CHECKING:
    from onnx_sublinear.api import Inspection, Report
    from onnx_sublinear.matrix import Matrix
    from onnx_sublinear.planners import RematPlan
    from onnx_sublinear.prediction import Configuration, Prediction

__all__ = [
    "aligned",
    "inspection_text",
    "matrix_text",
    "optimize_text",
    "plan_json",
    "plan_text",
    "predictions_text",
    "report_json",
    "sparkline",
    "to_json",
]

_MOST_NAMES = 5
_BARS = " .:-=+*#%@"
_TIMELINE_WIDTH = 72


def to_json(value: object) -> str:
    """`value` (dataclasses included) as indented JSON."""
    return json.dumps(value, indent=2, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()
    return str(value)


def report_json(report: Report) -> dict[str, Any]:
    """The fields of a report, and `unknown_size_tensors`, the number of `unknown_size_names`."""
    return {**asdict(report), "unknown_size_tensors": report.unknown_size_tensors}


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table: columns two blanks apart, those in `right` flush right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))] if rows else []
    lines = (
        "  ".join(
            cell.rjust(w) if c in right else cell.ljust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def optimize_text(report: Report) -> str:
    """The table before/after, and what was recomputed."""
    changes = [(name, report.peaks_before[name], report.peaks_after[name]) for name in report.peaks_before]
    before, after = report.peak_before_bytes, report.peak_after_bytes
    rows = [
        ["", "before", "after", ""],
        *(
            [f"peak, {name} order", format_bytes(old), format_bytes(new), format_share(new / old) if old else ""]
            for name, old, new in changes
        ),
        ["lower bound", format_bytes(report.lower_bound_bytes), "", ""],
        ["nodes", str(report.nodes_before), str(report.nodes_after), f"{report.barriers} in barriers"],
    ]
    table = aligned(rows, right=(1, 2, 3))
    per_op = sorted(report.recomputed.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count} {op}" for op, count in per_op[:_MOST_NAMES])
    more = f" and {len(per_op) - _MOST_NAMES} more operators" if len(per_op) > _MOST_NAMES else ""
    lines = [table, ""]
    if report.clones:
        lines.append(f"recomputed {report.clones} nodes ({shown}{more}), strategy {report.strategy}")
        step, forward = format_share(report.overhead), format_share(report.forward_share)
        lines.append(f"extra work {step} of a step, {forward} of a forward pass")
    elif after < before:
        lines.append("nothing is recomputed: the order of the nodes alone makes the difference")
    if report.unknown_size_tensors:
        lines.append(f"{report.unknown_size_tensors} tensors of unknown size are not in these figures")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def inspection_text(inspection: Inspection) -> str:
    """Peaks, lower bound, sections, largest tensors and the timeline of live bytes."""
    where = f"at {printable(inspection.lower_bound_node)}" if inspection.lower_bound_node else ""
    rows = [
        ["peak, default order", format_bytes(inspection.peak_default_bytes), ""],
        ["peak, priority order", format_bytes(inspection.peak_priority_bytes), ""],
        ["lower bound", format_bytes(inspection.lower_bound_bytes), where],
        ["nodes, forward section", str(inspection.forward_nodes), f"to {', '.join(map(printable, inspection.losses))}"],
        ["nodes, gradient section", str(inspection.gradient_nodes), ""],
    ]
    parts = [aligned(rows, right=(1,))]
    if inspection.largest:
        table = [[printable(n), format_bytes(b), printable(p)] for n, b, p in inspection.largest]
        parts += ["", aligned([["largest tensors", "size", "made by"], *table], right=(1,))]
    if inspection.timeline:
        line = sparkline(inspection.timeline, _TIMELINE_WIDTH)
        parts += ["", "live bytes over the step (default order)", f"|{line}|"]
    unknown = inspection.unknown_size_names
    if unknown:
        shown = ", ".join(map(printable, unknown[:_MOST_NAMES])) + (", ..." if len(unknown) > _MOST_NAMES else "")
        parts += ["", f"{len(unknown)} tensors of unknown size are not in these figures: {shown}"]
    if inspection.symbols:
        parts.append(f"symbolic dims: {', '.join(map(printable, inspection.symbols))} (--dim NAME=N)")
    return "\n".join([*parts, *(f"note: {note}" for note in inspection.notes)])


def _configuration(chosen: Configuration) -> list[str]:
    return [chosen.build, chosen.level, chosen.order, "on" if chosen.allocation.arena else "off"]


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """A row for each build, level and arena, the execution orders side by side; then why figures are missing."""
    orders = list(dict.fromkeys(p.configuration.order for p in predictions))
    rows: dict[tuple[str, ...], dict[str, Prediction]] = {}
    for prediction in predictions:
        build, level, order, arena = _configuration(prediction.configuration)
        rows.setdefault((build, level, arena), {})[order] = prediction
    table = [["build", "level", "arena and pattern", *(f"{order} order" for order in orders), "from"]]
    for labels, by_order in rows.items():
        found = [by_order.get(order) for order in orders]
        sizes = ["-" if p is None or p.peak_bytes is None else format_bytes(p.peak_bytes) for p in found]
        table.append([*labels, *sizes, next((p.source for p in found if p is not None and p.source), "")])
    reasons = dict.fromkeys(
        f"{p.configuration.build}, level {p.configuration.level}: {printable(p.reason)}"
        for p in predictions
        if p.reason
    )
    return "\n".join([aligned(table, right=range(3, 3 + len(orders))), *(f"note: {reason}" for reason in reasons)])


def matrix_text(matrix: Matrix) -> str:
    """Predicted against measured, a row for each model and configuration."""
    table = [["model", "build", "level", "order", "arena and pattern", "predicted", "measured", "deviation"]]
    for cell in matrix.cells:
        sizes = ["-" if b is None else format_bytes(b) for b in (cell.predicted_bytes, cell.measured_bytes)]
        deviation = "" if cell.deviation is None else f"{cell.deviation:+.1%}"
        table.append([printable(cell.model), *_configuration(cell.configuration), *sizes, deviation])
    reasons = dict.fromkeys(cell.note for cell in matrix.cells if cell.note)
    lines = [aligned(table, right=(5, 6, 7)), *(f"note: {printable(reason)}" for reason in reasons)]
    if matrix.worst_deviation is not None:
        lines.append(f"largest deviation {format_share(matrix.worst_deviation)}")
    return "\n".join(lines)


def plan_json(plan: RematPlan, keep_all_bytes: int, lower_bound_bytes: int, seconds: float) -> dict[str, Any]:
    """The figures of a plan for an abstract problem, without its schedule."""
    return {
        "keep_all_peak_bytes": keep_all_bytes,
        "peak_bytes": plan.peak_bytes,
        "peak_share": plan.peak_bytes / (keep_all_bytes or 1),
        "lower_bound_bytes": lower_bound_bytes,
        "overhead": plan.overhead,
        "overhead_bound": plan.overhead_bound,
        "recomputations": plan.clones,
        "strategy": plan.strategy,
        "seconds": seconds,
    }


def plan_text(plan: RematPlan, keep_all_bytes: int, lower_bound_bytes: int) -> str:
    """The peak before and after, and what it costs."""
    rows = [
        ["", "keep all", "plan", ""],
        ["peak", format_bytes(keep_all_bytes), format_bytes(plan.peak_bytes), ""],
        ["lower bound", format_bytes(lower_bound_bytes), "", ""],
    ]
    rows[1][3] = format_share(plan.peak_bytes / (keep_all_bytes or 1))
    lines = [aligned(rows, right=(1, 2, 3)), ""]
    lines.append(f"{plan.clones} recomputations, strategy {plan.strategy}: {100 * plan.overhead:.2f}% extra work")
    if plan.overhead_bound is not None:
        lines.append(f"proved: no plan within this budget has less than {100 * plan.overhead_bound:.2f}%")
    return "\n".join(lines)


def sparkline(values: Sequence[int], width: int) -> str:
    """`values` as at most `width` characters, each for the largest value of its stretch, denser for larger ones."""
    if not values:
        return ""
    width = min(width, len(values))
    stretches = (values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width))
    tops = [max(s) for s in stretches]
    highest = max(tops) or 1
    return "".join(_BARS[min(len(_BARS) - 1, t * len(_BARS) // highest)] for t in tops)
