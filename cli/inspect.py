"""`onnx-sublinear inspect`: where the memory of a training graph goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onnx_sublinear.cli.options import DimOption, JsonOption, LossOption, TargetOption, require_file

__all__ = ["inspect"]


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The training graph (.onnx).", show_default=False)],
    dim: DimOption = None,
    loss: LossOption = None,
    target: TargetOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Show peak, lower bound, largest tensors and the timeline of live bytes, without running anything."""
    from onnx_sublinear.runtime import target_named
    from onnx_sublinear.units import parse_dims

    require_file(model)
    target_named(target)
    dims = parse_dims(dim or [])

    from onnx_sublinear import api
    from onnx_sublinear.report import inspection_text, to_json

    inspection = api.inspect(model, dims=dims, loss=tuple(loss or ()), target=target)
    if json:
        unknown = len(inspection.unknown_size_names)
        typer.echo(to_json({**asdict(inspection), "unknown_size_tensors": unknown}))
    else:
        typer.echo(inspection_text(inspection))
