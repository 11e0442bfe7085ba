"""Access to the independent judges beside the repo (../shared); tests that need them skip where they are absent."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared folder is not beside the repo")


def load_judge(name):
    """The judge module `shared/tools/ort_sim/<name>.py`."""
    folder = SHARED / "tools" / "ort_sim"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
