from __future__ import annotations

import pytest

from onnx_sublinear.errors import UsageError
from onnx_sublinear.units import format_bytes, format_share, parse_bytes, parse_dims, parse_share


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("300MB", 300_000_000),
        ("16M", 16 << 20),
        ("0.1kb", 100),
        (" 7b ", 7),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_exact(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1e9", "two", "60%", "nan", "1..2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), ("0.2", 0.2), ("150 %", 1.5), ("0", 0.0), (".5", 0.5)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "%", "-5%", "x", "inf", "1e-1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a share"):
        parse_share(text)


def test_dims() -> None:
    assert parse_dims(["batch=32", " seq = 8", "a=b=3", "batch=32"]) == {"batch": 32, "seq": 8, "a=b": 3}


@pytest.mark.parametrize("entries", [["batch"], ["=3"], ["batch=-1"], ["batch=x"], ["batch="], ["b=1", "b=2"]])
def test_wrong_dims_are_refused(entries: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_dims(entries)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_shares_for_people() -> None:
    assert format_share(0.2567) == "25.7%"
