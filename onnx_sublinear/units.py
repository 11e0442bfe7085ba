"""Text forms of sizes and shares: `2GiB`, `60%`.

Bytes are exact integers inside; only text for people is rounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

from onnx_sublinear.errors import UsageError

__all__ = ["format_bytes", "format_share", "parse_bytes", "parse_dims", "parse_share", "share_of"]

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_SIZE = re.compile(_NUMBER + r"\s*([a-zA-Z]*)")
_PERCENT = re.compile(_NUMBER + r"\s*%")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `2GiB`, `1.5 MiB`, `300MB` or `1048576`; `K`, `M`, `G` alone are powers of 1024.

    Raises:
        UsageError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"'{text}' is not a size", "write a number of bytes or a size such as 512MiB or 2GiB")
    return int(Fraction(match[1]) * factor)


def parse_share(text: str) -> float:
    """The share that `20%` or `0.2` names, as a fraction of one.

    Raises:
        UsageError: the text is neither a percentage nor a number.
    """
    if match := _PERCENT.fullmatch(text.strip()):
        return float(Fraction(match[1]) / 100)
    if match := re.fullmatch(_NUMBER, text.strip()):
        return float(match[1])
    raise UsageError(f"'{text}' is not a share", "write a percentage such as 20% or a fraction such as 0.2")


def share_of(text: str, whole_bytes: int) -> int:
    """Bytes, rounded down without error, that the percentage `text` is of `whole_bytes`.

    Raises:
        UsageError: the text is not a percentage.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a percentage", "write a percentage such as 60%")
    return int(Fraction(match[1]) * whole_bytes / 100)


def parse_dims(entries: list[str]) -> dict[str, int]:
    """Sizes of symbolic dimensions from entries such as `batch=32`.

    Raises:
        UsageError: an entry is not NAME=N with N >= 0, or a name comes twice with different sizes.
    """
    dims: dict[str, int] = {}
    for entry in entries:
        name, _, size = entry.rpartition("=")
        if not name.strip() or not re.fullmatch(r"[0-9]+", size.strip()):
            raise UsageError(f"'{entry}' does not give a dimension a size", "write it as NAME=N, e.g. batch=32")
        if dims.setdefault(name.strip(), int(size)) != int(size):
            raise UsageError(f"dimension '{name.strip()}' has two sizes", "give each dimension once")
    return dims


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` for people, in the largest binary unit that keeps it at 1 or more."""
    amount, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1023.95 or unit == "TiB":
            break
        amount /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def format_share(share: float) -> str:
    """A fraction of one as a percentage."""
    return f"{100 * share:.1f}%"
