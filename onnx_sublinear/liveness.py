"""Lifetimes and live bytes: from half-open intervals to a profile, its peak and where it stands.

A buffer is live in the schedule positions [start, end). Bytes are exact integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Lifetime", "live_profile", "peak_of"]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer's life.

    Attributes:
        name: the tensor that the buffer was made for.
        size_bytes: exact size.
        start: the schedule position that makes it.
        end: one past the last position that needs it.
    """

    name: str
    size_bytes: int
    start: int
    end: int


def live_profile(lifetimes: Iterable[Lifetime], steps: int, extra: Sequence[int] = ()) -> list[int]:
    """Live bytes at each of `steps` schedule positions.

    Args:
        lifetimes: buffers; ends beyond `steps` count as `steps`.
        steps: length of the schedule.
        extra: bytes that each step needs beside the buffers (kernel workspaces), or empty.
    """
    delta = [0] * (steps + 1)
    for life in lifetimes:
        delta[life.start] += life.size_bytes
        delta[life.end if life.end < steps else steps] -= life.size_bytes
    live = list(accumulate(delta))[:steps]
    return [a + b for a, b in zip(live, extra, strict=True)] if extra else live


def peak_of(profile: Sequence[int]) -> int:
    """The largest live bytes (0 for an empty schedule)."""
    return max(profile, default=0)
