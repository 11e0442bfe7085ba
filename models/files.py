"""The golden files: where they lie, how they are written, and what their metadata says."""

from __future__ import annotations

from pathlib import Path

import onnx

GOLDEN_DIR = Path(__file__).parent / "golden"

RANGES_KEY = "models.ranges"
"""Metadata key: JSON object from integer input name to the number of classes or tokens its values select from."""


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write the model; equal models give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
