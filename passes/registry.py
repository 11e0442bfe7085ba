"""The passes that exist, by name: ours, and those that other packages register.

Another package registers a pass through an entry point in the group `onnx_sublinear.passes`::

    [project.entry-points."onnx_sublinear.passes"]
    my-pass = "my_package.my_module:MyPass"
"""

from __future__ import annotations

from importlib.metadata import entry_points

from onnx_sublinear.errors import UsageError
from onnx_sublinear.passes.base import Pass
from onnx_sublinear.passes.inplace import InplacePass
from onnx_sublinear.passes.lower_training_ops import LowerTrainingOpsPass
from onnx_sublinear.passes.order import OrderPass
from onnx_sublinear.passes.recompute import RecomputePass
from onnx_sublinear.passes.share import SharePass

__all__ = ["available", "default_passes", "pass_named"]

_OURS: tuple[type[Pass], ...] = (LowerTrainingOpsPass, RecomputePass, InplacePass, OrderPass, SharePass)
_GROUP = "onnx_sublinear.passes"


def available() -> dict[str, type[Pass]]:
    """Every pass by name; ours first."""
    found: dict[str, type[Pass]] = {p.name: p for p in _OURS}
    for entry in entry_points(group=_GROUP):
        if entry.name not in found:
            found[entry.name] = entry.load()
    return found


def default_passes(recompute: RecomputePass | None, within_bytes: int | None = None) -> tuple[Pass, ...]:
    """The passes of `optimize`; without recomputation if `recompute` is None; within a budget if there is one."""
    rest = (InplacePass(), OrderPass("" if within_bytes is None else str(within_bytes)), SharePass())
    return rest if recompute is None else (recompute, *rest)


def pass_named(name: str) -> type[Pass]:
    """The pass `name`.

    Raises:
        UsageError: there is none of that name.
    """
    found = available()
    if name not in found:
        raise UsageError(f"there is no pass '{name}'", f"passes: {', '.join(found)}")
    return found[name]
