"""Emitter: what a rule sees of the node that it replaces, and how it writes standard nodes in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_sublinear.errors import ModelError
from onnx_sublinear.graph import GraphIndex, attribute, node_label
from onnx_sublinear.ops.tensor_types import Dim, TensorType

__all__ = ["Constants", "Emitter", "Rule", "Value"]

Value = str
"""Name of a tensor."""

_SCATTER_ADD_OPSET = 16
_AXES_INPUT_OPSET = 18
_SUM_AXES_INPUT_OPSET = 13


class Constants:
    """Initializers of the lowered graph, equal ones shared."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._names: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self.tensors: list[TensorProto] = []

    def name_of(self, array: Any) -> Value:
        """The initializer that holds `array`."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._names:
            name = self._index.fresh_name("lowered_constant")
            self._names[key] = name
            self.tensors.append(numpy_helper.from_array(array, name))
        return self._names[key]


class Emitter:
    """One node to be replaced, and the nodes written in its place.

    Attributes:
        node: the node.
        nodes: what has been written so far.
        index: the index of the model.
        opset: the version of the default domain.
        extra_outputs: tensors that have to become graph outputs, with their types (`accumulators`).
    """

    def __init__(
        self, node: NodeProto, index: GraphIndex, types: Mapping[str, TensorType], constants: Constants
    ) -> None:
        self.node = node
        self.index = index
        self.opset = index.opset.get("", 1)
        self.nodes: list[NodeProto] = []
        self.extra_outputs: dict[str, TensorType] = {}
        self._types = types
        self._constants = constants

    # What the rule sees.

    def input(self, slot: int) -> Value | None:
        """Input `slot`, or None where the node leaves it out."""
        return (self.node.input[slot] or None) if slot < len(self.node.input) else None

    def inputs(self, count: int) -> list[Value]:
        """The first `count` inputs, all needed."""
        found = [self.input(i) for i in range(count)]
        if any(f is None for f in found):
            raise self.error(f"has fewer than {count} inputs")
        return [f for f in found if f is not None]

    def wants(self, slot: int) -> bool:
        """Whether the node has an output `slot`."""
        return slot < len(self.node.output) and bool(self.node.output[slot])

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute; text as str."""
        found = attribute(self.node, name)
        value = default if found is None else helper.get_attribute_value(found)
        return value.decode() if isinstance(value, bytes) else value

    def type_of(self, name: Value) -> TensorType:
        """What is known of a tensor's type."""
        return self._types.get(name, TensorType(0, None))

    def elem(self, name: Value) -> int:
        """Element type of a tensor (a TensorProto.DataType)."""
        found = self.type_of(name).elem_type
        if not found:
            raise self.error(f"reads '{name}', whose element type is not known")
        return found

    def shape(self, name: Value) -> tuple[Dim, ...]:
        """Dims of a tensor whose rank must be known."""
        found = self.type_of(name).shape
        if found is None:
            raise self.error(f"works on '{name}', whose rank is not known")
        return found

    def known_shape(self, *names: Value) -> tuple[int, ...] | None:
        """The dims of the first of `names` whose dims are all numbers; None where there is none."""
        for name in names:
            shape = self.type_of(name).shape
            if shape is not None and all(isinstance(d, int) for d in shape):
                return tuple(d for d in shape if isinstance(d, int))
        return None

    def output_shape(self, slot: int) -> tuple[Dim, ...] | None:
        """What is known of an output's dims."""
        return self.type_of(self.node.output[slot]).shape if self.wants(slot) else None

    def constant(self, name: Value | None) -> Any | None:
        """The value of a tensor that an initializer or a Constant node holds in the file; None for any other."""
        if name is None or name in self.index.inputs:
            return None
        tensor = self.index.initializers.get(name)
        if tensor is None and name in self.index.producer:
            maker = self.index.nodes[self.index.producer[name]]
            if maker.op_type == "Identity":
                return self.constant(maker.input[0])
            held = attribute(maker, "value") if maker.op_type == "Constant" else None
            tensor = None if held is None else held.t
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(tensor)

    def maker_of(self, name: Value) -> NodeProto | None:
        """The node that makes a tensor."""
        position = self.index.producer.get(name)
        return None if position is None else self.index.nodes[position]

    def error(self, what: str, hint: str = "") -> ModelError:
        """An error that names the operator and the node."""
        return ModelError(f"{self.node.op_type} cannot be lowered: {node_label(self.node)} {what}", hint)

    def needs_opset(self, version: int, what: str) -> None:
        """Checks the opset of the model.

        Raises:
            ModelError: it is too old for `what`.
        """
        if self.opset < version:
            raise self.error(
                f"needs {what}, which opset {self.opset} does not have",
                f"export the forward model with opset {version} or newer and make the training graph again",
            )

    # How the rule writes.

    def op(self, op_type: str, *inputs: Value | None, outputs: int = 1, **attributes: Any) -> Value:
        """Writes a node of the default domain; returns its first output."""
        return self.ops(op_type, *inputs, outputs=outputs, **attributes)[0]

    def ops(self, op_type: str, *inputs: Value | None, outputs: int = 1, **attributes: Any) -> list[Value]:
        """Writes a node of the default domain; returns its outputs."""
        stem = self.node.name or next(filter(None, self.node.output), self.node.op_type)
        names = [self.index.fresh_name(f"{stem}/{op_type}") for _ in range(outputs)]
        given = {name: value for name, value in attributes.items() if value is not None}
        node = helper.make_node(op_type, [i or "" for i in inputs], names, name=names[0], **given)
        self.nodes.append(node)
        return names

    def array(self, value: Any, elem_type: int = TensorProto.INT64) -> Value:
        """A constant of an element type."""
        return self._constants.name_of(np.asarray(value, dtype=helper.tensor_dtype_to_np_dtype(elem_type)))

    def like(self, value: Any, name: Value) -> Value:
        """A constant scalar of the element type of `name`."""
        return self.array(value, self.elem(name))

    def cast(self, name: Value, elem_type: int) -> Value:
        """A tensor of the graph in another element type; itself where it has that."""
        return name if self.elem(name) == elem_type else self.op("Cast", name, to=elem_type)

    def extra_output(self, name: Value, value: Value, like: Value) -> None:
        """Makes `value` a further output of the graph, called `name` or, where that is taken, alike."""
        name = self.index.fresh_name(name)
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self.extra_outputs[name] = self.type_of(like)

    def total(self, name: Value, axes: Sequence[int], keep: bool) -> Value:
        """Sum over `axes`; a view where there are none."""
        return self.reduce("ReduceSum", name, axes, keep)

    def reduce(self, op_type: str, name: Value, axes: Sequence[int], keep: bool) -> Value:
        """A reduction over `axes`, in the form of the model's opset; over no axes, the tensor itself."""
        if not axes:
            return name
        as_input = self.opset >= (_SUM_AXES_INPUT_OPSET if op_type == "ReduceSum" else _AXES_INPUT_OPSET)
        if as_input:
            return self.op(op_type, name, self.array(list(axes)), keepdims=int(keep))
        return self.op(op_type, name, axes=list(axes), keepdims=int(keep))

    def unsqueeze(self, name: Value, axes: Sequence[int]) -> Value:
        """`name` with axes of size 1."""
        if self.opset >= _SUM_AXES_INPUT_OPSET:
            return self.op("Unsqueeze", name, self.array(list(axes)))
        return self.op("Unsqueeze", name, axes=list(axes))

    def dims_of(self, name: Value) -> Value:
        """The shape of a tensor as a tensor: a constant where the file says it."""
        known = self.known_shape(name)
        return self.op("Shape", name) if known is None else self.array(list(known))

    def dim_of(self, name: Value, axis: int) -> Value:
        """One dim as a tensor of one element."""
        dim = (self.type_of(name).shape or {axis: None})[axis]
        return (
            self.array([dim]) if isinstance(dim, int) else self.op("Gather", self.op("Shape", name), self.array([axis]))
        )

    def reshape_like(self, name: Value, other: Value) -> Value:
        """`name` in the shape of `other`."""
        return self.op("Reshape", name, self.dims_of(other))

    def zeros(self, shape: Value, elem_type: int) -> Value:
        """Zeros of a shape given as a tensor."""
        zero = helper.make_tensor("value", elem_type, [1], [0])
        return self.op("ConstantOfShape", shape, value=zero)

    def scatter_add(self, op_type: str, data: Value, indices: Value, updates: Value, **attributes: Any) -> Value:
        """ScatterElements or ScatterND that adds."""
        self.needs_opset(_SCATTER_ADD_OPSET, f"{op_type} with reduction 'add'")
        return self.op(op_type, data, indices, updates, reduction="add", **attributes)

    # What the pass takes over.

    def finished(self, results: Sequence[Value | None]) -> list[NodeProto]:
        """The nodes that the node's outputs need, writing them under its output names.

        Raises:
            ModelError: the rule gives no value for an output that the node has.
        """
        renamed: dict[Value, Value] = {}
        made = {output for node in self.nodes for output in node.output}
        for slot, name in enumerate(self.node.output):
            if not name:
                continue
            result = results[slot] if slot < len(results) else None
            if result is None:
                raise self.error(f"has an output {slot} ('{name}') that the rule does not make")
            if result in made and result not in renamed:
                renamed[result] = name
            else:
                self.nodes.append(
                    helper.make_node("Identity", [result], [name], name=self.index.fresh_name(f"{name}/Identity"))
                )
        return _needed(self.nodes, renamed, {n for n in self.node.output if n} | set(self.extra_outputs))


def _needed(nodes: Sequence[NodeProto], renamed: Mapping[Value, Value], wanted: set[Value]) -> list[NodeProto]:
    """`nodes` with renamed tensors, without those that `wanted` does not need."""
    kept: list[NodeProto] = []
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = renamed.get(name, name)
    for node in reversed(nodes):
        if wanted.isdisjoint(node.output):
            continue
        wanted.update(node.input)
        for graph in (a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
            wanted.update(name for inner in graph.node for name in inner.input)
        kept.append(node)
    return kept[::-1]


Rule = Callable[[Emitter], "Sequence[Value | None]"]
"""Writes the nodes for one node and returns the tensors that stand for its outputs, slot by slot."""
