"""Feeds for the commands that run models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnx_sublinear.cli.options import require_file
from onnx_sublinear.feeds import load_feeds, make_feeds

__all__ = ["feeds_from"]


def feeds_from(file: Path | None, model: ModelProto, dims: Mapping[str, int], seed: int) -> dict[str, Any]:
    """The feeds in `file`, else random ones for the model's inputs."""
    if file is None:
        return make_feeds(model, dims, seed)
    require_file(file)
    return load_feeds(file, {v.name for v in model.graph.input})
