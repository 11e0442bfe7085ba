"""Planners: one interface (RematProblem, Limit -> RematPlan), one file per strategy, one simulator that scores.

`sqrt`, `chen` and `recursive` are the paper's; `chain` is optimal on chains; `greedy` works on any graph; `exact`
proves its plans and needs OR-Tools; `auto` combines them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol

from onnx_sublinear.errors import UsageError
from onnx_sublinear.planners.auto import AutoStrategy
from onnx_sublinear.planners.chain import ChainStrategy
from onnx_sublinear.planners.chen import ChenStrategy
from onnx_sublinear.planners.exact import ExactStrategy
from onnx_sublinear.planners.greedy import GreedyStrategy
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.recursive import RecursiveStrategy
from onnx_sublinear.planners.sqrt import SqrtStrategy

__all__ = ["STRATEGIES", "Limit", "RematPlan", "RematProblem", "Strategy", "strategy_named"]


class Strategy(Protocol):
    """What a strategy offers."""

    name: ClassVar[str]

    def quick(self) -> Strategy:
        """The same with less effort, to compare problems with."""
        ...

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget."""
        ...


STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind
    for kind in (
        AutoStrategy,
        SqrtStrategy,
        ChenStrategy,
        RecursiveStrategy,
        ChainStrategy,
        GreedyStrategy,
        ExactStrategy,
    )
}


def strategy_named(name: str, *, seconds: float | None = None, focus: bool = False) -> Strategy:
    """The strategy `name`.

    Args:
        name: one of STRATEGIES.
        seconds: time limit of those that search (`auto`, `exact`); None: their default.
        focus: see `AutoStrategy`.

    Raises:
        UsageError: there is none of that name.
    """
    kind = STRATEGIES.get(name)
    if kind is None:
        raise UsageError(f"there is no strategy '{name}'", f"strategies: {', '.join(STRATEGIES)}")
    strategy = kind()
    if isinstance(strategy, AutoStrategy | ExactStrategy) and seconds is not None:
        strategy = replace(strategy, seconds=seconds)
    return replace(strategy, focus=focus) if isinstance(strategy, AutoStrategy) else strategy
