"""Taking away what is not needed, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["TRIALS", "WORK", "take_away"]

TRIALS = 2000  # how often it is tried at most
WORK = 3_000_000  # nodes to be replayed for that

_T = TypeVar("_T")


def take_away(items: Sequence[_T], without: Callable[[Sequence[_T]], bool], trials: int) -> None:
    """Takes away items as far as `without` allows: all at once, else each half, down to single ones.

    Args:
        items: what could go.
        without: takes the items given away and says True, or says False and leaves them.
        trials: how often it is asked at most.
    """
    pending = [list(items)]
    while pending and trials > 0:
        group = pending.pop(0)
        if not group:
            continue
        trials -= 1
        if not without(group) and len(group) > 1:
            half = len(group) // 2
            pending += [group[:half], group[half:]]
