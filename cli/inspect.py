"""`onnx-sublinear inspect`: where the memory of a training graph goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnx_sublinear.cli.options import DimOption, JsonOption, LossOption, TargetOption, require_file
from onnx_sublinear.errors import UsageError

if TYPE_CHECKING:
    from onnx_sublinear.prediction import Prediction

__all__ = ["inspect"]


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The training graph (.onnx).", show_default=False)],
    dim: DimOption = None,
    loss: LossOption = None,
    target: TargetOption = "cpu",
    runtime: Annotated[
        bool,
        typer.Option(
            "--runtime", help="Also predict the peak of every kind of CPU session: build, level, order, arena."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show peak, lower bound, largest tensors and the timeline of live bytes, without running anything."""
    from onnx_sublinear.runtime import target_named
    from onnx_sublinear.units import parse_dims

    require_file(model)
    target_named(target)
    dims = parse_dims(dim or [])

    from onnx_sublinear import api
    from onnx_sublinear.report import inspection_text, predictions_text, to_json

    if runtime and target != "cpu":
        raise UsageError("--runtime predicts sessions on the CPU only", "leave --target out")
    inspection = api.inspect(model, dims=dims, loss=tuple(loss or ()), target=target)
    predictions = _predictions(model, dims) if runtime else []
    if json:
        data = {**asdict(inspection), "unknown_size_tensors": len(inspection.unknown_size_names)}
        typer.echo(to_json(data | ({"runtime": [asdict(p) for p in predictions]} if runtime else {})))
        return
    typer.echo(inspection_text(inspection))
    if runtime:
        typer.echo(f"\npeak of two runs in each kind of session\n{predictions_text(predictions)}")


def _predictions(model: Path, dims: dict[str, int]) -> list[Prediction]:
    """The file as it stands: a session sees its nodes in their order in the file."""
    from onnx_sublinear.model_io import load_model
    from onnx_sublinear.prediction import predict
    from onnx_sublinear.training_graph import TrainingGraph

    return predict(TrainingGraph(load_model(model), dims))
