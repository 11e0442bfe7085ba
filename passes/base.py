"""The contract of a pass.

A pass is a frozen dataclass. Its fields are its options, `name` is kebab-case, and its text form
`name{option=value,...}` round-trips. It never changes the model it is given: it returns a changed copy, or the same
model with `modified=False`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from onnx import ModelProto

from onnx_sublinear.errors import UsageError
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Pass", "PassResult"]


@dataclass(frozen=True)
class PassResult:
    """What a pass returns.

    Attributes:
        graph: the model after the pass with the same options of looking at it.
        modified: whether the model differs from the one given.
        notes: what a user should know, one line each.
        facts: what later stages and the report use, by name.
    """

    graph: TrainingGraph
    modified: bool = False
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> ModelProto:
        """The model after the pass."""
        return self.graph.model


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Runs the pass."""

    def requires(self, graph: TrainingGraph) -> None:  # noqa: B027
        """Checks what the pass needs; raises PreconditionError."""

    def ensures(self, before: TrainingGraph, result: PassResult) -> None:  # noqa: B027
        """Checks what the pass promises; raises PostconditionError."""

    def __str__(self) -> str:
        options = [
            f"{f.name.replace('_', '-')}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Pass:
        """The pass with options from their text form.

        Raises:
            UsageError: an option is not known or its value does not fit.
        """
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, text in options.items():
            option = known.get(key.replace("-", "_"))
            if option is None:
                names = ", ".join(n.replace("_", "-") for n in known) or "none"
                raise UsageError(f"pass '{cls.name}' has no option '{key}'", f"its options: {names}")
            values[option.name] = cls.parse_option(option.name, text)
        return cls(**values)

    @classmethod
    def parse_option(cls, name: str, text: str) -> Any:
        """The value of option `name` from its text; by the type of the option's default."""
        default: Any = next(f.default for f in fields(cls) if f.name == name)
        if isinstance(default, str) or default is None:
            return text
        try:
            return type(default)(text)
        except ValueError:
            raise UsageError(f"pass '{cls.name}': '{text}' is no value for option '{name}'") from None
