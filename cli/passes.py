"""`onnx-sublinear passes`: the passes that `--passes` accepts."""

from __future__ import annotations

from typing import Any

import typer

from onnx_sublinear.cli.options import JsonOption

__all__ = ["passes"]


def passes(json: JsonOption = False) -> None:
    """List the passes with their options and defaults."""
    from onnx_sublinear.passes import registry
    from onnx_sublinear.report import to_json

    found = [_described(name, kind) for name, kind in registry.available().items()]
    if json:
        typer.echo(to_json(found))
        return
    for entry in found:
        typer.echo(f"{entry['name']}\n    {entry['summary']}")
        for option in entry["options"]:
            typer.echo(f"    {option['name']}={option['default']}")


def _described(name: str, kind: type[Any]) -> dict[str, Any]:
    from dataclasses import MISSING, fields

    options = [
        {"name": f.name.replace("_", "-"), "default": None if f.default is MISSING else f.default}
        for f in fields(kind)
        if f.init
    ]
    return {"name": name, "summary": (kind.__doc__ or "").strip().split("\n")[0], "options": options}
