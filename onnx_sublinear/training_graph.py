"""TrainingGraph: a model with the facts about it, each worked out once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from onnx import ModelProto, TensorProto

from onnx_sublinear.costs import node_cost
from onnx_sublinear.expansion import expanded
from onnx_sublinear.graph import GraphIndex, domain_of, nodes_at_any_depth
from onnx_sublinear.ops.float16 import with_casts
from onnx_sublinear.ops.traits import Target
from onnx_sublinear.runtime_model import (
    RuntimeGraph,
    Simulation,
    default_order,
    executed_orders,
    runtime_graph,
    simulate,
)
from onnx_sublinear.sections import Sections, split_sections
from onnx_sublinear.sizes import TensorSizes, TensorType, infer_sizes, runtime_types

__all__ = ["TrainingGraph"]


@dataclass(frozen=True)
class TrainingGraph:
    """A model and how to look at it.

    Attributes:
        model: the model; passes never change it, they return another.
        dims: values of symbolic dims, for planning only.
        losses: names of the loss tensors where the user gave them.
        target: the execution provider that the plan is for.
        build: the build of ONNX Runtime that it is for; "" is the one that the graph needs.
        robust: whether all execution orders count, or only the default one.
    """

    model: ModelProto
    dims: Mapping[str, int] = field(default_factory=dict)
    losses: Sequence[str] = ()
    target: Target = "cpu"
    build: Literal["", "stock", "training"] = ""
    robust: Literal["all", "default"] = "all"

    def with_model(
        self,
        model: ModelProto,
        *,
        index: GraphIndex | None = None,
        sizes: TensorSizes | None = None,
        visible: Mapping[str, TensorType] | None = None,
        runtime: RuntimeGraph | None = None,
        executed: RuntimeGraph | None = None,
        same_nodes: bool = False,
    ) -> TrainingGraph:
        """The same view of another model.

        Args:
            model: the other model.
            index: the index of a model with the same nodes, where the caller has one.
            sizes: its sizes, where the caller knows them.
            visible: what the runtime sees of it, where the caller knows that.
            runtime: the file as the runtime sees it, where the caller knows that.
            executed: the file as the runtime runs it, where the caller knows that.
            same_nodes: whether its nodes and types are the same, so that every fact worked out so far holds.
        """
        other = replace(self, model=model)
        known: dict[str, object] = {"index": index, "sizes": sizes, "visible": visible, "runtime": runtime}
        known["executed"] = executed
        if same_nodes:
            known = {name: self.__dict__.get(name) for name in _FACTS}
        other.__dict__.update((name, fact) for name, fact in known.items() if fact is not None)
        return other

    def for_build(self, build: Literal["stock", "training"]) -> TrainingGraph:
        """The same model as another build of ONNX Runtime sees it."""
        other = replace(self, build=build)
        known = {name: self.__dict__.get(name) for name in _FACTS_OF_THE_FILE}
        other.__dict__.update((name, fact) for name, fact in known.items() if fact is not None)
        return other

    def counting(self, all_orders: bool) -> TrainingGraph:
        """The same with all execution orders counted, or the default one only."""
        return replace(self, robust="all" if all_orders else "default")

    @cached_property
    def index(self) -> GraphIndex:
        """The def-use index."""
        return GraphIndex(self.model)

    @cached_property
    def sizes(self) -> TensorSizes:
        """Bytes of every tensor."""
        return infer_sizes(self.index, self.dims)

    @cached_property
    def sections(self) -> Sections:
        """Forward and gradient section."""
        return split_sections(self.index, self.sizes, self.losses)

    @cached_property
    def needs_training_build(self) -> bool:
        """Whether the graph has operators that only onnxruntime-training runs."""
        return any(
            n.op_type.endswith("Grad") or n.op_type in _TRAINING_ONLY
            for n in nodes_at_any_depth(self.index.nodes)
            if domain_of(n) in ("", "com.microsoft")
        )

    @property
    def on_training_build(self) -> bool:
        """Whether the training build runs it."""
        return self.build == "training" or (not self.build and self.needs_training_build)

    @cached_property
    def float16_in_float(self) -> bool:
        """Whether there are float16 tensors that the CPU mostly holds in float (`ops.float16`)."""
        return self.target == "cpu" and any(t.elem_type == TensorProto.FLOAT16 for t in self.sizes.types.values())

    @cached_property
    def untouchable(self) -> frozenset[str]:
        """Tensors that must get neither views nor clones: float16 on the CPU, and what stands between two casts.

        On the CPU most float16 kernels run in float between casts. Whether a value is rounded to float16 on its way,
        and whether a pair of casts is made one, depends on which nodes stand next to each other
        (insert_cast_transformer.cc): another node beside them could change a bit.
        """
        if self.target != "cpu":
            return frozenset()
        index = self.index
        found = {name for name, t in self.sizes.types.items() if t.elem_type == TensorProto.FLOAT16}
        casts = [node for node in index.nodes if node.op_type == "Cast"]
        found.update({node.output[0] for node in casts} & {node.input[0] for node in casts})
        return frozenset(found)

    @cached_property
    def visible(self) -> Mapping[str, TensorType]:
        """The types that the runtime knows."""
        return runtime_types(self.index, propagates=not self.on_training_build)

    @cached_property
    def runtime(self) -> RuntimeGraph:
        """The file as the runtime sees it."""
        return runtime_graph(
            self.index, self.sizes, visible=self.visible, target=self.target, training=self.on_training_build
        )

    @cached_property
    def executed(self) -> RuntimeGraph:
        """The file as the runtime runs it: `runtime`, but for what it puts in place of operators without a kernel."""
        if self.target != "cpu":
            return self.runtime
        training = self.on_training_build
        graph = self
        model, types, known = expanded(self.index, self.sizes, self.visible, training=training)
        if model is not self.model:
            sizes = TensorSizes({**self.sizes.types, **types}, {**self.sizes.bound, **types}, dict(self.dims))
            graph = self.with_model(model, sizes=sizes, visible={**self.visible, **known})
        order = default_order(graph.runtime, training_build=training)
        cast = with_casts(graph.index, graph.sizes.bound, order, training=training)
        return graph.runtime if cast is graph.model else self.with_model(cast).runtime

    @cached_property
    def simulations(self) -> dict[str, Simulation]:
        """What each order of the runtime that counts needs: "default" and "priority"."""
        orders = executed_orders(self.executed, training=self.on_training_build)
        counted = ("default",) if self.robust == "default" else tuple(orders)
        return {name: simulate(self.executed, orders[name]) for name in counted}

    @cached_property
    def costs(self) -> list[int]:
        """Per node its cost in FLOP equivalents."""
        bound, opset = self.sizes.bound, self.index.opset.get("", 1)
        return [
            node_cost(n, [bound.get(t) for t in n.input], [bound.get(t) for t in n.output], opset)
            for n in self.index.nodes
        ]


_FACTS_OF_THE_FILE = (
    *("index", "sizes", "sections", "costs"),
    *("needs_training_build", "untouchable", "float16_in_float"),
)
_FACTS = (*_FACTS_OF_THE_FILE, "visible", "runtime", "executed", "simulations")

_TRAINING_ONLY = frozenset(
    {
        *("InPlaceAccumulator", "InPlaceAccumulatorV2", "BatchNormInternal", "SoftmaxCrossEntropyLossInternal"),
        *("ReduceSumTraining", "SplitTraining", "ConcatTraining", "GeluGrad", "BiasGeluGrad_dX", "ZeroGradient"),
        *("BiasFastGeluGrad_dX", "PassThrough", "Group", "YieldOp", "SoftmaxGrad_13", "LogSoftmaxGrad_13"),
    }
)
