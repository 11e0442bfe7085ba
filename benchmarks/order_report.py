"""The text of benchmarks/order.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

MIB = 1 << 20
SMALL_BYTES = 16 << 10
TOLERANCE = {"none": 0.02, "all": 0.05}
ARENA_TOLERANCE = 0.05
HEADER = """# Predicted against measured

{date}. Regenerate with `python -m benchmarks.order --training-python PATH`.

Peak bytes of a run, feeds and weights left out, blocks below 4 KiB left out on both sides, measured {judge}.
A difference counts from {small} KiB on: below, the many blocks near 4 KiB decide. "dump" is the prediction from the
graph that the installed runtime saves, "own" our own model of the runtime, which needs no runtime and holds at level
none.

"""


@dataclass(frozen=True)
class Figures:
    """One prediction.

    Attributes:
        level: graph optimizations.
        order: execution order.
        arena: whether arena and memory pattern are on.
        source: "runtime dump", "model" or "".
        runs: bytes of each run.
        reason: why there is none.
    """

    level: str
    order: str
    arena: bool
    source: str
    runs: Sequence[int]
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """A prediction and the measurement.

    Attributes:
        graph: its name.
        kind: original or optimized.
        build: of ONNX Runtime.
        predicted: the prediction.
        measured: bytes of each run.
    """

    graph: str
    kind: str
    build: str
    predicted: Figures
    measured: Sequence[int]

    def pair(self) -> tuple[int, int] | None:
        """Predicted and measured bytes: with the arena what is held after both runs, else the larger run."""
        if not self.predicted.runs or not self.measured:
            return None
        total = sum if self.predicted.arena else max
        return total(self.predicted.runs), total(self.measured)

    def deviation(self) -> float:
        """(predicted - measured) / measured; 0 where one is missing or the difference is small."""
        pair = self.pair()
        if pair is None or abs(pair[0] - pair[1]) <= SMALL_BYTES:
            return 0.0
        return (pair[0] - pair[1]) / max(1, pair[1])

    def within(self) -> bool:
        """Whether the deviation is within the tolerance."""
        limit = ARENA_TOLERANCE if self.predicted.arena else TOLERANCE[self.predicted.level]
        return abs(self.deviation()) <= limit

    def column(self) -> tuple[str, str, str]:
        """Source, level and order."""
        source = {"runtime dump": "dump", "model": "own"}.get(self.predicted.source, "dump")
        return source, self.predicted.level, self.predicted.order


def report(table: Sequence[Row], *, by_judge: bool) -> str:
    """The whole file."""
    judge = "by a malloc tracer" if by_judge else "as resident memory"
    plain = [row for row in table if not row.predicted.arena]
    arena = [row for row in table if row.predicted.arena]
    parts = [HEADER.format(date=date.today(), judge=judge, small=SMALL_BYTES >> 10)]
    parts += ["## Largest deviations\n\n", *_summary(plain), "\n", *_worst(plain)]
    parts += ["\n## Arena and memory pattern off\n\n", *_cells(plain, _COLUMNS)]
    parts += [
        "\n## Arena and memory pattern on (golden models, default order)\n\n",
        "Growth over two runs. The arena grows by powers of two: a block that just fits, or not, decides.\n\n",
        *_summary(arena),
        "\n",
        *_cells(arena, _ARENA_COLUMNS),
    ]
    return "".join(parts)


_COLUMNS = [
    *(("dump", level, order) for level in ("none", "all") for order in ("default", "priority")),
    *(("own", "none", order) for order in ("default", "priority")),
]
_ARENA_COLUMNS = [("dump", "none", "default"), ("dump", "all", "default"), ("own", "none", "default")]


def _summary(table: Sequence[Row]) -> Iterable[str]:
    yield "| build | prediction | level | order | cells | within tolerance | largest | mean |\n"
    yield "|---|---|---|---|---|---|---|---|\n"
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in table:
        if row.pair() is not None:
            groups.setdefault((row.build, *row.column()), []).append(row)
    for labels, group in sorted(groups.items()):
        sizes = [abs(row.deviation()) for row in group]
        inside = sum(row.within() for row in group)
        yield f"| {' | '.join(labels)} | {len(group)} | {inside} | {max(sizes):.2%} | {sum(sizes) / len(sizes):.2%} |\n"


def _worst(table: Sequence[Row]) -> Iterable[str]:
    outside = sorted((row for row in table if not row.within()), key=lambda row: -abs(row.deviation()))
    tolerances = ", ".join(f"{share:.0%} at level {level}" for level, share in TOLERANCE.items())
    yield f"Beyond the tolerance ({tolerances}): {len(outside)} cells.\n"
    for row in outside:
        source, level, order = row.column()
        yield f"- {row.graph}, {row.kind}, {row.build}, {source}, level {level}, {order}: {_text(row)}\n"


def _text(row: Row) -> str:
    pair = row.pair()
    if pair is None:
        return "-"
    return f"{pair[0] / MIB:.2f} / {pair[1] / MIB:.2f} ({(pair[0] - pair[1]) / max(1, pair[1]):+.1%})"


def _cells(table: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> Iterable[str]:
    yield "MiB, predicted / measured; `-`: the build does not run the graph at this level.\n\n"
    yield f"| graph | | build | {' | '.join(' '.join(column) for column in columns)} |\n"
    yield f"|{'---|' * (len(columns) + 3)}\n"
    lines: dict[tuple[str, str, str], dict[tuple[str, str, str], str]] = {}
    for row in table:
        lines.setdefault((row.graph, row.kind, row.build), {})[row.column()] = _text(row)
    for labels, cells in lines.items():
        yield f"| {' | '.join(labels)} | {' | '.join(cells.get(column, '-') for column in columns)} |\n"
