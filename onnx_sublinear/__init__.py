"""onnx-sublinear: ONNX training graphs that need a fraction of the memory.

`optimize` is the main entry; `onnx_sublinear.passes` holds the passes and the pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_sublinear.api import Inspection, Report, Result, inspect, optimize

__all__ = ["Inspection", "Report", "Result", "__version__", "inspect", "optimize"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads the public functions when they are first used: importing the package stays cheap."""
    if name in __all__:
        from onnx_sublinear import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
