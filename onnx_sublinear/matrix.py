"""Predicted and measured peaks of models in every configuration that the installed ONNX Runtime can have.

Each measurement has a process of its own. Resident memory is measured, so what the arena takes and never writes to is
left out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike, fspath
from typing import Any

from onnx_sublinear.errors import MissingExtraError, ModelError
from onnx_sublinear.measure import measure, peak_measurable
from onnx_sublinear.model_io import load_model
from onnx_sublinear.prediction import Configuration, Prediction, configurations, predict
from onnx_sublinear.runtime_dump import installed_build
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Cell", "Matrix", "measure_matrix"]

_NOISY_BELOW_BYTES = 20 << 20


@dataclass(frozen=True)
class Cell:
    """One model in one configuration.

    Attributes:
        model: the model's file.
        configuration: the session.
        predicted_bytes: resident bytes by the prediction, or None.
        measured_bytes: resident bytes by measurement, or None.
        source: where the prediction comes from (`Prediction.source`).
        note: why a figure is missing, or "".
    """

    model: str
    configuration: Configuration
    predicted_bytes: int | None
    measured_bytes: int | None
    source: str
    note: str = ""

    @property
    def deviation(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True)
class Matrix:
    """The table.

    Attributes:
        cells: one for each model and configuration.
        notes: what limits the figures.
    """

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]

    @property
    def worst_deviation(self) -> float | None:
        """The largest deviation in size, or None without a pair of figures."""
        return max((abs(c.deviation) for c in self.cells if c.deviation is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        cells = [{**asdict(cell), "deviation": cell.deviation} for cell in self.cells]
        return {"cells": cells, "worst_deviation": self.worst_deviation, "notes": self.notes}


def measure_matrix(
    paths: Sequence[str | PathLike[str]],
    feeds: Mapping[str, Any],
    *,
    dims: Mapping[str, int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Matrix:
    """Predicts and measures each model in each configuration, on the CPU.

    Args:
        paths: the models' files; they take the same feeds.
        feeds: values by input name.
        dims: sizes of symbolic dimensions, for the predictions.
        progress: receives a line before each step.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError, UsageError: as `measure`.
    """
    build = installed_build()
    if build is None:
        raise MissingExtraError("measuring", ("gpu", "cpu"))
    wanted = configurations(builds=[build])
    note = peak_measurable()
    cells: list[Cell] = []
    for path in paths:
        if progress is not None:
            progress(f"predicting {fspath(path)}")
        for prediction in predict(TrainingGraph(load_model(path), dict(dims or {})), wanted):
            if progress is not None:
                progress(f"measuring {fspath(path)}: {_label(prediction.configuration)}")
            cells.append(_cell(fspath(path), prediction, feeds, bool(note)))
    notes = [note] if note else []
    if any(c.measured_bytes is not None and c.measured_bytes < _NOISY_BELOW_BYTES for c in cells):
        notes.append("some peaks are small: measured figures read up to two pages high for each tensor")
    return Matrix(tuple(cells), tuple(notes))


def _label(configuration: Configuration) -> str:
    arena = "on" if configuration.allocation.arena else "off"
    return f"level {configuration.level}, order {configuration.order}, arena and pattern {arena}"


def _cell(path: str, prediction: Prediction, feeds: Mapping[str, Any], blind: bool) -> Cell:
    chosen, note, measured = prediction.configuration, prediction.reason, None
    if not blind:
        try:
            measured = measure(
                path,
                feeds,
                level=chosen.level,
                order=chosen.order,
                arena=chosen.allocation.arena,
                pattern=chosen.allocation.pattern,
            ).peak
        except ModelError as error:  # some levels of a build cannot load a graph that others can
            note = error.message
    return Cell(path, chosen, prediction.resident_bytes, measured, prediction.source, note)
