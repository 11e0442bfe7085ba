"""The exception tree.

Every error that a user's file or option can cause derives from `SublinearError`
and carries the exit code of the command line::

    SublinearError                 exit code
    ├── UsageError                 2   an option or argument does not fit
    ├── ModelError                 3   the input model is not usable
    │   ├── ModelFileError         3   not a readable ONNX file
    │   ├── ExternalDataError      3   external data escapes, is missing or too short
    │   ├── GraphError             3   the graph is not valid (cycle, duplicate, dangling, types)
    │   └── NoRuntimeGraphError    3   ONNX Runtime cannot show what it makes of the model
    ├── BudgetError                4   the budget cannot be met
    ├── VerificationError          5   two models differ, or a plan does not hold
    ├── MissingExtraError          2   an optional dependency is not installed
    └── PassError                  1   a pass broke its contract
        ├── PreconditionError      1   `requires` failed
        └── PostconditionError     1   `ensures` failed

A message names the tensor, node or file; `hint` says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str, limit: int = 200) -> str:
    """`text` with control characters escaped and its length limited, fit for one line of a message."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return shown if len(shown) <= limit else f"{shown[: limit // 2]}...{shown[-limit // 2 :]}"


class SublinearError(Exception):
    """Base of all errors that are not our own bugs.

    Args:
        message: one line that names the tensor, node or file.
        hint: one line that says what to do, or "".
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SublinearError):
    """An option or argument does not fit."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional dependency is needed and not installed.

    Args:
        what: what needs it, e.g. "verify".
        extras: names of the extras that bring it, e.g. ("gpu", "cpu").
    """

    def __init__(self, what: str, extras: Iterable[str]) -> None:
        wanted = " or ".join(f"pip install 'onnx-sublinear[{extra}]'" for extra in extras)
        super().__init__(f"{what} needs an optional dependency that is not installed", wanted)


class ModelError(SublinearError):
    """The input model is not usable."""

    exit_code = 3


class ModelFileError(ModelError):
    """The file is not a readable ONNX model."""


class ExternalDataError(ModelError):
    """External data of a tensor escapes the model's folder, is missing or too short."""


class GraphError(ModelError):
    """The graph is not valid: cycle, duplicate definition, dangling input, contradicting types."""


class NoRuntimeGraphError(ModelError):
    """ONNX Runtime cannot show what it makes of the model: it refuses to load it, or its weights are too large."""


class BudgetError(SublinearError):
    """The budget cannot be met.

    Args:
        message: one line.
        smallest_peak_bytes: the smallest peak that any strategy found.
        lower_bound_bytes: no plan can have a smaller peak than this.
    """

    exit_code = 4

    def __init__(self, message: str, smallest_peak_bytes: int, lower_bound_bytes: int, hint: str = "") -> None:
        super().__init__(message, hint)
        self.smallest_peak_bytes = smallest_peak_bytes
        self.lower_bound_bytes = lower_bound_bytes


class VerificationError(SublinearError):
    """Two models differ, or a plan does not hold."""

    exit_code = 5


class PassError(SublinearError):
    """A pass broke its contract."""


class PreconditionError(PassError):
    """What a pass requires does not hold."""


class PostconditionError(PassError):
    """What a pass ensures does not hold."""
