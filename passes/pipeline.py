"""Pipeline: passes in a row, with a text form and one callback between them.

`recompute{budget=2GiB},inplace,order,share` is a pipeline's text form; `str` and `Pipeline.parse` round-trip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from onnx_sublinear.errors import PassError, UsageError
from onnx_sublinear.passes.base import Pass, PassResult
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["Callback", "Pipeline"]

Callback = Callable[[Pass | None, TrainingGraph, Pass | None], None]
"""Called as (previous pass, graph, next pass) before the first pass, between passes and after the last."""

_ITEM = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(?:\{([^{}]*)\})?\s*(,|$)")


def _split(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    at = 0
    while at < len(text) or at == 0:
        item = _ITEM.match(text, at)
        if item is None or (item[3] == "," and item.end() == len(text)):
            raise UsageError(
                f"'{text}' is no list of passes", "write passes as recompute{budget=2GiB},inplace,order,share"
            )
        options: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in (item[2] or "").split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise UsageError(f"'{part}' in pass '{item[1]}' is no option", "write options as name=value")
            options[key.strip()] = value.strip()
        yield item[1], options
        at = item.end()


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run.

    Attributes:
        passes: the passes.
        callback: serves progress, timing and printing.
    """

    passes: Sequence[Pass]
    callback: Callback | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, text: str, callback: Callback | None = None) -> Pipeline:
        """The pipeline that `text` describes.

        Raises:
            UsageError: the text is malformed, or names an unknown pass or option.
        """
        from onnx_sublinear.passes.registry import pass_named

        return cls(tuple(pass_named(name).from_options(options) for name, options in _split(text)), callback)

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Runs the passes. Notes and facts of all of them are in the result (a later fact replaces an earlier one).

        Raises:
            PassError: a pass broke its contract.
        """
        result = PassResult(graph)
        previous: Pass | None = None
        for current in self.passes:
            self._call_back(previous, result.graph, current)
            before = result.graph
            current.requires(before)
            step = current(before)
            if not isinstance(step, PassResult):
                raise PassError(f"pass '{current.name}' returned {type(step).__name__}, not a PassResult")
            current.ensures(before, step)
            result = replace(
                step,
                modified=result.modified or step.modified,
                notes=result.notes + step.notes,
                facts={**result.facts, **step.facts},
            )
            previous = current
        self._call_back(previous, result.graph, None)
        return result

    def _call_back(self, previous: Pass | None, graph: TrainingGraph, following: Pass | None) -> None:
        if self.callback is not None:
            self.callback(previous, graph, following)
