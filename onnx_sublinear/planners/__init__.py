"""Planners: one interface (RematProblem, Limit -> RematPlan), one file per strategy, one simulator that scores."""

from __future__ import annotations

from typing import ClassVar, Protocol

from onnx_sublinear.errors import UsageError
from onnx_sublinear.planners.problem import Limit, RematPlan, RematProblem
from onnx_sublinear.planners.sqrt import SqrtStrategy

__all__ = ["Limit", "RematPlan", "RematProblem", "Strategy", "strategy_named"]


class Strategy(Protocol):
    """What a strategy offers."""

    name: ClassVar[str]

    def quick(self) -> Strategy:
        """The same with less effort, to compare problems with."""
        ...

    def plan(self, problem: RematProblem, limit: Limit, *, lower_bound_bytes: int = 0) -> RematPlan:
        """The plan of smallest peak within the limit's overhead, or the cheapest one within its budget."""
        ...


STRATEGIES: dict[str, type[Strategy]] = {"sqrt": SqrtStrategy}


def strategy_named(name: str) -> Strategy:
    """The strategy `name`; "auto" is the best of those that there are.

    Raises:
        UsageError: there is none of that name.
    """
    found = STRATEGIES.get("sqrt" if name == "auto" else name)
    if found is None:
        raise UsageError(f"there is no strategy '{name}'", f"strategies: auto, {', '.join(STRATEGIES)}")
    return found()
