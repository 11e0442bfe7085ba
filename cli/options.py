"""Options that several commands share, and the checks that come before any work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from onnx_sublinear.errors import UsageError

__all__ = [
    "DimOption",
    "FeedsOption",
    "JsonOption",
    "LevelOption",
    "LossOption",
    "QuietOption",
    "RunsOption",
    "SeedOption",
    "TargetOption",
    "require_file",
    "require_output",
]

DimOption = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=N", help="Size of a symbolic dimension; repeat for each.", show_default=False),
]
LossOption = Annotated[
    list[str] | None,
    typer.Option("--loss", metavar="NAME", help="A loss output, where the name does not tell; repeatable."),
]
TargetOption = Annotated[str, typer.Option("--target", metavar="cpu|cuda", help="Where the graph runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with exact bytes.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
LevelOption = Annotated[
    str, typer.Option("--level", metavar="none|basic|extended|all", help="ONNX Runtime's graph optimizations.")
]
RunsOption = Annotated[int, typer.Option("--runs", min=1, help="How often each model runs.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the random feeds.")]
FeedsOption = Annotated[
    Path | None,
    typer.Option("--feeds", metavar="NPZ", help="Inputs by name; random ones without it.", show_default=False),
]


def require_file(path: Path) -> None:
    """Check that `path` is an existing file.

    Raises:
        UsageError: it is not.
    """
    if path.is_dir():
        raise UsageError(f"'{path}' is a folder", "name the .onnx file")
    if not path.exists():
        raise UsageError(f"there is no file '{path}'", "check the path")


def require_output(output: Path, source: Path, force: bool) -> None:
    """Check, before any work, that `output` can be written and is not the input.

    Raises:
        UsageError: its folder does not exist or is not writable, it is a folder, or it is the input without `force`.
    """
    folder = output.parent
    if output.is_dir():
        raise UsageError(f"'{output}' is a folder", "name the output file")
    if not folder.is_dir():
        raise UsageError(f"the folder '{folder}' of the output does not exist", "make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"the folder '{folder}' of the output is not writable", "choose another place")
    if not force and output.exists() and output.samefile(source):
        raise UsageError(
            f"the output '{output}' is the input", "choose another output, or --force to replace the input"
        )
