"""Passes: each takes a TrainingGraph and returns the changed model; a Pipeline runs them in order."""

from __future__ import annotations

from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.passes.pipeline import Pipeline

__all__ = ["Pass", "PassResult", "Pipeline"]
