"""Makes the helper modules of tests/ importable, and skips tests whose device or runtime is not here."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def _missing(marker: str) -> str | None:
    """Why tests with `marker` cannot run here, or None."""
    if marker == "gpu":
        from onnx_sublinear.runtime import available_targets

        return None if "cuda" in available_targets() else "no CUDA device"
    # Not imported: its Python part wants torch, which running a graph does not.
    there = find_spec("onnxruntime") is not None and find_spec("onnxruntime.training") is not None
    return None if there else "onnxruntime-training is not installed"


def pytest_collection_modifyitems(items):
    for marker in ("gpu", "training"):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = _missing(marker) if marked else None
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))
