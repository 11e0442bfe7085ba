"""What a command says beside its data: progress, warnings and errors, all on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from onnx_sublinear.errors import printable

__all__ = ["Progress", "debugging", "progress_to_stderr", "say_error", "say_warning"]

Progress = Callable[[str], None]

_RED, _YELLOW, _CYAN, _PLAIN = "\033[1;31m", "\033[1;33m", "\033[36m", "\033[0m"
_MESSAGE_LIMIT = 1000


def debugging() -> bool:
    """Whether the user asked for tracebacks (ONNX_SUBLINEAR_DEBUG)."""
    return os.environ.get("ONNX_SUBLINEAR_DEBUG", "") not in ("", "0")


def _colored(text: str, color: str) -> str:
    use = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"{color}{text}{_PLAIN}" if use else text


def say_error(message: str, hint: str = "") -> None:
    """Print the `error:` line and, where there is one, the `hint:` line."""
    print(f"{_colored('error:', _RED)} {printable(message, _MESSAGE_LIMIT)}", file=sys.stderr)
    if hint:
        print(f"{_colored('hint:', _CYAN)} {printable(hint, _MESSAGE_LIMIT)}", file=sys.stderr)


def say_warning(message: str) -> None:
    """Print a `warning:` line."""
    print(f"{_colored('warning:', _YELLOW)} {printable(message, _MESSAGE_LIMIT)}", file=sys.stderr)


def progress_to_stderr(quiet: bool = False) -> Progress:
    """A callback that prints each line with the seconds since now; one that prints nothing when `quiet`."""
    started = time.monotonic()

    def say(line: str) -> None:
        if quiet:
            return
        print(f"[{time.monotonic() - started:6.1f} s] {printable(line, _MESSAGE_LIMIT)}", file=sys.stderr, flush=True)

    return say
