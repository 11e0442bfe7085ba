"""`TrainingGraph`: a graph-surgeon graph with a gradient tape.

Stages: a net's builder calls layer functions, each of which adds its forward nodes and records how to add its
gradient nodes; `finish` replays the records in reverse, names the gradients, exports the model and checks its shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from models.files import RANGES_KEY

OPSET = 20
IR_VERSION = 9

Dim = int | str
Shape = Sequence[Dim]
Backward = Callable[..., None]
Layer = TypeVar("Layer", bound=Callable[..., Any])


def layer(function: Layer) -> Layer:
    """Make a function whose first argument is the graph a method of graphs (`gs.Graph.register`)."""
    gs.Graph.register()(function)
    return function


class TrainingGraph(gs.Graph):  # type: ignore[misc]
    """A graph under construction; the layer functions of `models.layers` are its methods.

    Args:
        name: graph name.
        dtype: element type of every float tensor; float64 makes finite differences sharp.
    """

    def __init__(self, name: str, dtype: type = np.float32) -> None:
        super().__init__(name=name, opset=OPSET, ir_version=IR_VERSION, producer_name="onnx-sublinear-models")
        self.float_type = np.dtype(dtype)
        self.dropout_count = 0
        self._scope = ""
        self._names: set[str] = set()
        self._constants: dict[str, gs.Constant] = {}
        self._wanted: set[str] = set()
        self._gradients: dict[str, gs.Variable] = {}
        self._tape: list[tuple[str, Sequence[gs.Variable], Backward]] = []
        self._params: list[gs.Variable] = []
        self._states: list[gs.Variable] = []
        self._ranges: dict[str, int] = {}

    # names ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names made inside with `name/`."""
        outer = self._scope
        self._scope = f"{outer}{name}/"
        yield
        self._scope = outer

    def _claim(self, name: str) -> str:
        full = self._scope + name
        if full in self._names:
            raise ValueError(f"name {full!r} is taken")
        self._names.add(full)
        return full

    # tensors -------------------------------------------------------------------------------------------------------

    def batch_input(self, name: str, shape: Shape, dtype: Any = None, below: int | None = None) -> gs.Variable:
        """A graph input that gets no gradient; integer inputs take values in `[0, below)`."""
        tensor = gs.Variable(self._claim(name), dtype=np.dtype(dtype or self.float_type), shape=list(shape))
        if below is not None:
            self._ranges[tensor.name] = below
        self.inputs.append(tensor)
        return tensor

    def param(self, name: str, shape: Shape) -> gs.Variable:
        """A weight: a graph input whose gradient becomes the graph output `<name>_grad`."""
        tensor = self.batch_input(name, shape)
        self._wanted.add(tensor.name)
        self._params.append(tensor)
        return tensor

    def state_output(self, tensor: gs.Variable) -> None:
        """Make a running statistic a graph output."""
        self._states.append(tensor)

    def const(self, value: bool | float | int | Sequence[int]) -> gs.Constant:
        """An initializer, shared by equal values: floats in the graph's float type, integers in int64."""
        if isinstance(value, float):
            array, label = np.array(value, self.float_type), f"c/{value!r}"
        elif isinstance(value, bool):
            array, label = np.array(value), f"c/{value}"
        elif isinstance(value, int):
            array, label = np.array(value, np.int64), f"c/i{value}"
        else:
            array, label = np.array(value, np.int64), "c/i" + "x".join(map(str, value)) + "d"
        return self._constants.setdefault(label, gs.Constant(label, array))

    def arange(self, count: int, shape: Shape) -> gs.Constant:
        """Initializer 0, 1, ..., count-1 of the given shape."""
        label = "c/arange" + "x".join(map(str, shape))
        values = np.arange(count, dtype=np.int64).reshape([int(dim) for dim in shape])
        return self._constants.setdefault(label, gs.Constant(label, values))

    # nodes ---------------------------------------------------------------------------------------------------------

    def op(
        self, op: str, inputs: Sequence[Any], name: str, shape: Shape | None = None, dtype: Any = None, **attrs: Any
    ) -> gs.Variable:
        """Add a node with one output. Shape: numpy broadcasting of the inputs unless given."""
        tensors = [self._as_tensor(value) for value in inputs]
        out_shape = broadcast([tensor.shape for tensor in tensors]) if shape is None else shape
        return self.multi_op(op, tensors, name, {"": (out_shape, dtype)}, **attrs)[0]

    def multi_op(
        self, op: str, inputs: Sequence[Any], name: str, outputs: dict[str, tuple[Shape, Any]], **attrs: Any
    ) -> list[gs.Variable]:
        """Add a node; `outputs` maps a name suffix to (shape, element type or None for the float type)."""
        tensors = [self._as_tensor(value) for value in inputs]
        node_name = self._claim(name)
        results = [
            gs.Variable(node_name + suffix, dtype=np.dtype(dtype or self.float_type), shape=list(shape))
            for suffix, (shape, dtype) in outputs.items()
        ]
        self.nodes.append(gs.Node(op, name=node_name, attrs=attrs, inputs=tensors, outputs=results))
        if any(self.wants_gradient(tensor) for tensor in tensors):
            self._wanted.update(result.name for result in results)
        return results

    def _as_tensor(self, value: Any) -> gs.Tensor:
        return value if isinstance(value, gs.Tensor) else self.const(value)

    # gradients -----------------------------------------------------------------------------------------------------

    def wants_gradient(self, tensor: gs.Tensor) -> bool:
        """Whether the tensor depends on a weight."""
        return tensor.name in self._wanted

    def record(self, outputs: Sequence[gs.Variable], backward: Backward) -> None:
        """Remember to call `backward(gradient of each output)`; a loss records no outputs and gets no arguments."""
        self._tape.append((self._scope, outputs, backward))

    def add_gradient(self, tensor: gs.Tensor, gradient: gs.Variable) -> None:
        """Add to the gradient of `tensor`: a second contribution makes an Add node at once (one link of a chain)."""
        if not self.wants_gradient(tensor):
            return
        previous = self._gradients.get(tensor.name)
        if previous is not None:
            stem = name = f"{tensor.name.rsplit('/', 1)[-1]}_sum"
            repeat = 1
            while self._scope + name in self._names:
                repeat += 1
                name = f"{stem}{repeat}"
            gradient = self.op("Add", [previous, gradient], name)
        self._gradients[tensor.name] = gradient

    def finish(self, loss: gs.Variable) -> onnx.ModelProto:
        """Add the gradient section and export; outputs are the loss, the gradients, the running statistics."""
        for scope, outputs, backward in reversed(self._tape):
            self._scope = scope
            backward(*(self._gradients[output.name] for output in outputs))
        loss.name = "loss"
        for param in self._params:
            self._gradients[param.name].name = f"{param.name}_grad"
        self.outputs = [loss, *(self._gradients[param.name] for param in self._params), *self._states]
        model: onnx.ModelProto = gs.export_onnx(self)
        self._check_shapes(model)
        del model.graph.value_info[:]
        if self._ranges:
            onnx.helper.set_model_props(model, {RANGES_KEY: json.dumps(self._ranges, sort_keys=True)})
        return model

    @staticmethod
    def _check_shapes(model: onnx.ModelProto) -> None:
        """Compare the shapes that the layers declared with those that ONNX infers."""
        bare = onnx.ModelProto()
        bare.CopyFrom(model)
        del bare.graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True, data_prop=True)
        types = {info.name: info.type for info in inferred.graph.value_info}
        for info in model.graph.value_info:
            if types.get(info.name) != info.type:
                raise ValueError(f"tensor {info.name!r}: declared {info.type}, inferred {types.get(info.name)}")


def broadcast(shapes: Sequence[Shape]) -> list[Dim]:
    """Numpy broadcasting over static and named dims."""
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = []
    for column in zip(*([*[1] * (rank - len(shape)), *shape] for shape in shapes), strict=True):
        sizes = {dim for dim in column if dim != 1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {list(map(list, shapes))} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return result
