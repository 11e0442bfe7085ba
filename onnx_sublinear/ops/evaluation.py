"""What shape arithmetic (Shape -> Gather -> Concat -> Reshape) computes, without running a model.

Structural operators move elements of any kind (`value_movement`); arithmetic needs numbers, apart from identities that
hold for every dim (`value_arithmetic`). Nothing is ever guessed, and nothing large is ever computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_sublinear.ops.tensor_types import TensorType
from onnx_sublinear.ops.value_arithmetic import BINARY, REDUCE, UNARY, UnknownValue, pairwise
from onnx_sublinear.ops.value_movement import STRUCTURAL, ValueCall, concat, split
from onnx_sublinear.ops.values import NUMPY_TYPES, Array, Value, attributes_of, from_array, of_shape, value_of_constant

__all__ = ["evaluate"]

_INT64 = int(TensorProto.INT64)


def _reduce(call: ValueCall) -> Array:
    value, axes = call.value(0), call.numbers(1, "axes")
    if not value.is_known:
        raise UnknownValue
    if not axes and call.attributes.get("noop_with_empty_axes", 0):
        return call.array(0)
    data = np.array(value.items, dtype=NUMPY_TYPES[value.elem_type]).reshape(value.shape)
    keep = bool(call.attributes.get("keepdims", 1))
    result = REDUCE[call.node.op_type](data, axis=tuple(axes) if axes else None, keepdims=keep)
    return np.asarray(result).astype(data.dtype).astype(object)


_Operands = Sequence[Value | None]

_InputTypes = Sequence[TensorType | None]


def _shape_values(node: NodeProto, types: _InputTypes, operands: _Operands) -> list[Value | None]:
    del operands
    attributes, first = attributes_of(node), types[0]
    return [of_shape(first, attributes.get("start", 0), attributes.get("end")) if first else None]


def _concat_training(node: NodeProto, types: _InputTypes, operands: _Operands) -> list[Value | None]:
    """Concat, and the length of each input along the axis."""
    try:
        whole = from_array(operands[0].elem_type, concat(ValueCall(node, operands))) if operands[0] else None
    except UnknownValue:
        whole = None
    axis = attributes_of(node)["axis"]
    lengths = tuple(t.shape[axis] if t and t.shape is not None else None for t in types)
    return [whole, Value(_INT64, (len(lengths),), lengths)]


def _broadcast_axes(node: NodeProto, types: _InputTypes, operands: _Operands) -> list[Value | None]:
    """BroadcastGradientArgs: the axes along which an operand was broadcast, from last to first.

    Source: orttraining/orttraining/training_ops/cpu/op_gradients.cc.
    """
    del types
    shapes = [value.ints() for value in operands if value is not None]
    if len(shapes) != 2 or shapes[0] is None or shapes[1] is None:
        return []
    rank = max(len(s) for s in shapes if s is not None)
    left, right = ([None] * (rank - len(s)) + list(s) for s in shapes if s is not None)
    missing = [rank - len(s) for s in shapes if s is not None]
    axes: tuple[list[int], list[int]] = ([], [])
    for axis in reversed(range(rank)):
        a, b = left[axis], right[axis]
        if axis < missing[0] or axis < missing[1]:
            axes[0 if axis < missing[0] else 1].append(axis)
        elif a is None or b is None or (a != b and (isinstance(a, str) or isinstance(b, str))):
            return []
        elif a != b and 1 in (a, b):
            axes[0 if a == 1 else 1].append(axis)
    return [Value(_INT64, (len(found),), tuple(found)) for found in axes[: len(node.output)]]


def _size(t: TensorType | None) -> Value | None:
    if t is None or t.shape is None:
        return None
    dims = [d for d in t.shape if d != 1]
    if all(isinstance(d, int) for d in dims):
        count = math.prod(d for d in dims if isinstance(d, int))
        return Value(_INT64, (), (count,)) if count < 1 << 63 else None
    return Value(_INT64, (), (0 if 0 in dims else dims[0] if len(dims) == 1 else None,))


_FROM_TYPES: dict[str, Callable[[NodeProto, _InputTypes, _Operands], list[Value | None]]] = {
    "BroadcastGradientArgs": _broadcast_axes,
    "ConcatTraining": _concat_training,
    "Constant": lambda node, _types, _operands: [value_of_constant(node)],
    "Shape": _shape_values,
    "Size": lambda _node, types, _operands: [_size(types[0])],
}

_KNOWN = {*STRUCTURAL, *BINARY, *UNARY, *REDUCE, "Split"}


def evaluate(
    node: NodeProto, types: Sequence[TensorType | None], operands: Sequence[Value | None]
) -> list[Value | None]:
    """The values of the outputs of a node of the default domain or of com.microsoft, as far as they are known.

    Args:
        node: the node.
        types: types of its inputs, None where unknown or omitted.
        operands: known values of its inputs, None elsewhere.

    Returns:
        One entry an output; an empty list where nothing is known.
    """
    op_type = node.op_type
    try:
        if op_type in _FROM_TYPES:
            return _FROM_TYPES[op_type](node, types, operands)
        if node.domain == "com.microsoft" or op_type not in _KNOWN or not any(operands):
            return []
        return _evaluate(ValueCall(node, operands))
    except (UnknownValue, ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError):
        return []  # an invalid node is for the checker to report; here its value is not known


def _evaluate(call: ValueCall) -> list[Value | None]:
    op_type = call.node.op_type
    elem_type = call.value(1 if op_type == "Where" else 0).elem_type
    if call.attributes.get("fmod"):
        return []
    if op_type in BINARY:
        result = call.value(0)
        for slot in range(1, len(call.node.input)):
            result = pairwise(op_type, result, call.value(slot))
        return [result]
    if op_type in UNARY:
        value = call.value(0)
        if not value.is_known:
            return []
        data = np.array(value.items, dtype=NUMPY_TYPES[elem_type])
        with np.errstate(all="ignore"):
            data = np.asarray(UNARY[op_type](data)).astype(data.dtype)
        return [Value(elem_type, value.shape, tuple(data.tolist()))]
    if op_type == "Split":
        return [from_array(elem_type, part) for part in split(call)]
    if op_type in REDUCE:
        return [from_array(elem_type, _reduce(call))]
    if op_type == "Cast":
        elem_type = call.attributes["to"]
    elif op_type == "ConstantOfShape":
        fill = next((a.t.data_type for a in call.node.attribute if a.name == "value"), int(TensorProto.FLOAT))
        elem_type = fill
    elif op_type == "NonZero":
        elem_type = _INT64
    return [from_array(elem_type, STRUCTURAL[op_type](call))]
