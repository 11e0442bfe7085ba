"""Predicted peak bytes of a training graph, for each configuration of an ONNX Runtime session on the CPU.

What is installed is asked for the graph that it runs (`runtime_dump`), at any level. Other builds, and models that the
installed one refuses, are predicted by our own model of the runtime, which holds at level none only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from onnx_sublinear.errors import NoRuntimeGraphError
from onnx_sublinear.executed_graph import executed_graph
from onnx_sublinear.ops.tensor_types import TensorType, bind, tensor_bytes
from onnx_sublinear.run_memory import Allocation, RunMemory, run_memory
from onnx_sublinear.runtime import Level, Order
from onnx_sublinear.runtime_dump import Build, installed_build
from onnx_sublinear.runtime_model import RuntimeGraph, Simulation, executed_orders
from onnx_sublinear.training_graph import TrainingGraph

__all__ = ["CONFIGURATIONS", "Configuration", "Prediction", "configurations", "predict"]

BUILDS: tuple[Build, ...] = ("stock", "training")
PREDICTED_LEVELS: tuple[Level, ...] = ("none", "basic", "all")
_ORDERS: tuple[Order, ...] = ("default", "priority")
_ON_AND_OFF = (Allocation(), Allocation(arena=True, pattern=True))
Source = Literal["runtime dump", "model", ""]


@dataclass(frozen=True)
class Configuration:
    """A session of ONNX Runtime.

    Attributes:
        build: of ONNX Runtime.
        level: its graph optimizations.
        order: its execution order.
        allocation: arena and memory pattern.
    """

    build: Build = "stock"
    level: Level = "all"
    order: Order = "default"
    allocation: Allocation = field(default_factory=Allocation)


@dataclass(frozen=True)
class Prediction:
    """What the first two runs of a session take at most, weights and feeds left out, outputs included.

    Attributes:
        configuration: the session.
        peak_bytes: the most bytes held above what was held before the first run; None where there is no prediction.
        resident_bytes: the same without memory that is never written to (parts of the arena).
        run_bytes: per run the most bytes held above what was held just before that run.
        source: "runtime dump": from the graph that the installed runtime runs; "model": from our own model of the
            runtime; "" where there is no prediction.
        reason: why there is no prediction, or why it does not come from the runtime; "" otherwise.
    """

    configuration: Configuration
    peak_bytes: int | None
    resident_bytes: int | None = None
    run_bytes: tuple[int, ...] = ()
    source: Source = ""
    reason: str = ""


def configurations(
    builds: Iterable[Build] = BUILDS,
    levels: Iterable[Level] = PREDICTED_LEVELS,
    orders: Iterable[Order] = _ORDERS,
    allocations: Iterable[Allocation] = _ON_AND_OFF,
) -> tuple[Configuration, ...]:
    """All combinations."""
    return tuple(Configuration(*chosen) for chosen in product(builds, levels, orders, allocations))


CONFIGURATIONS = configurations()
"""{stock, training} x {none, basic, all} x {default, priority} x {arena and pattern off, on}."""


@dataclass(frozen=True)
class _Executed:
    """What a build runs at a level."""

    runtime: RuntimeGraph
    orders: Mapping[str, Sequence[int]]
    simulations: Mapping[str, Simulation]
    visible: Mapping[str, TensorType]
    unknown: Sequence[str]
    source: Source
    reason: str = ""


def predict(
    graph: TrainingGraph,
    wanted: Iterable[Configuration] = CONFIGURATIONS,
    *,
    least_bytes: int = 0,
    ask_runtime: bool = True,
) -> list[Prediction]:
    """One prediction for each configuration; nothing is run.

    Args:
        graph: the model with the user's dims; its target must be "cpu".
        wanted: the configurations.
        least_bytes: smaller blocks are left out, as some tools that measure do.
        ask_runtime: whether the installed ONNX Runtime may be asked; without, our own model answers.
    """
    known: dict[tuple[Build, Level], _Executed | str] = {}
    memory: dict[Configuration, RunMemory] = {}
    found: list[Prediction] = []
    for configuration in wanted:
        key = configuration.build, configuration.level
        if key not in known:
            known[key] = _executed(graph, *key, ask_runtime)
        executed = known[key]
        if isinstance(executed, str):
            found.append(Prediction(configuration, None, reason=executed))
            continue
        if configuration not in memory:
            memory[configuration] = _memory(graph, executed, configuration, least_bytes)
        taken = memory[configuration]
        found.append(
            Prediction(
                configuration,
                max(taken.held_bytes),
                max(taken.resident_bytes),
                taken.grown_bytes,
                executed.source,
                executed.reason,
            )
        )
    return found


def _executed(graph: TrainingGraph, build: Build, level: Level, ask_runtime: bool) -> _Executed | str:
    """What `build` runs at `level`, or why that is not known."""
    if build == "stock" and graph.needs_training_build:
        return "its operators need onnxruntime-training"
    reason = ""
    if ask_runtime and build == installed_build():
        try:
            found = executed_graph(graph, level)
        except NoRuntimeGraphError as error:
            reason = error.message
        else:
            return _checked(
                _Executed(
                    found.runtime, found.orders, found.simulations, found.dump.types, found.unknown, "runtime dump"
                )
            )
    if level != "none":
        return reason or f"the {build} build is not installed, and fusions are its own"
    own = graph.for_build(build)
    return _checked(
        _Executed(
            own.executed,
            executed_orders(own.executed, training=own.on_training_build),
            own.simulations,
            own.visible,
            own.sizes.unknown,
            "model",
            reason,
        )
    )


def _checked(executed: _Executed) -> _Executed | str:
    if executed.unknown:
        return f"{len(executed.unknown)} tensors have an unknown size, e.g. '{executed.unknown[0]}'"
    return executed


def _memory(graph: TrainingGraph, executed: _Executed, configuration: Configuration, least_bytes: int) -> RunMemory:
    names = executed.runtime.names

    def is_planned(value: int) -> bool:
        visible = executed.visible.get(names[value])
        return visible is not None and tensor_bytes(bind(visible, graph.dims)) is not None

    return run_memory(
        executed.runtime,
        executed.orders[configuration.order],
        executed.simulations[configuration.order],
        configuration.allocation,
        training=configuration.build == "training",
        least_bytes=least_bytes,
        is_planned=is_planned,
    )
