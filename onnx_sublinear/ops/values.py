"""Small known values of tensors, element by element.

An element is a number, a symbol (the dim_param that it equals) or unknown. `ops.evaluation` computes with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_sublinear.ops.tensor_types import TensorType

__all__ = [
    "INTEGERS",
    "MAX_ELEMENTS",
    "NUMPY_TYPES",
    "Array",
    "Item",
    "Value",
    "attributes_of",
    "from_array",
    "of_shape",
    "of_tensor",
    "value_of_constant",
]

MAX_ELEMENTS = 1024

Item = int | float | bool | str | None

Array = NDArray[Any]

NUMPY_TYPES: dict[int, Any] = {
    TensorProto.BOOL: np.bool_,
    TensorProto.INT8: np.int8,
    TensorProto.INT16: np.int16,
    TensorProto.INT32: np.int32,
    TensorProto.INT64: np.int64,
    TensorProto.UINT8: np.uint8,
    TensorProto.UINT16: np.uint16,
    TensorProto.UINT32: np.uint32,
    TensorProto.UINT64: np.uint64,
    TensorProto.FLOAT16: np.float16,
    TensorProto.FLOAT: np.float32,
    TensorProto.DOUBLE: np.float64,
}

INTEGERS = {t for t, dtype in NUMPY_TYPES.items() if np.issubdtype(dtype, np.integer)}

_INT64 = int(TensorProto.INT64)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of at most `MAX_ELEMENTS` elements, known in part or in whole.

    Attributes:
        elem_type: TensorProto.DataType; bool, integer or float16/32/64.
        shape: its dims.
        items: the elements in row-major order; a string is the symbol that the element equals, None is unknown.
    """

    elem_type: int
    shape: tuple[int, ...]
    items: tuple[Item, ...]

    @property
    def is_known(self) -> bool:
        """Whether every element is a number."""
        return not any(i is None or isinstance(i, str) for i in self.items)

    def ints(self) -> list[int | str | None] | None:
        """The elements of an integer tensor of rank 0 or 1 as dims; None for another kind of tensor."""
        if self.elem_type not in INTEGERS or len(self.shape) > 1:
            return None
        return [i if i is None or isinstance(i, str) else int(i) for i in self.items]

    def scalar(self) -> int | float | None:
        """The number of a one-element tensor, else None."""
        item = self.items[0] if len(self.items) == 1 else None
        return None if isinstance(item, str) else item

    def tensor(self) -> TensorProto:
        """The TensorProto of a value that `is_known`."""
        return numpy_helper.from_array(np.array(self.items, dtype=NUMPY_TYPES[self.elem_type]).reshape(self.shape))


def of_shape(t: TensorType, start: int = 0, end: int | None = None) -> Value | None:
    """What Shape of a tensor of type `t` gives; None where its rank is unknown."""
    if t.shape is None or len(t.shape) > MAX_ELEMENTS:
        return None
    dims = t.shape[start:end]
    return Value(_INT64, (len(dims),), dims)


def of_tensor(tensor: TensorProto) -> Value | None:
    """The value of a small tensor whose data is in the file; None for large, external, short or odd ones."""
    dtype = NUMPY_TYPES.get(tensor.data_type)
    if dtype is None or tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > MAX_ELEMENTS:
        return None
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:  # data and dims disagree: the loader reports it, here it is no known value
        return None
    return from_array(tensor.data_type, array)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The attributes of `node` as Python values, without tensors and graphs."""
    plain = (AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS)
    return {
        a.name: helper.get_attribute_value(a)
        for a in node.attribute
        if a.type in plain or a.type == AttributeProto.STRING
    }


def value_of_constant(node: NodeProto) -> Value | None:
    """The value of a Constant node, where it is small and numeric."""
    for a in node.attribute:
        if a.name == "value":
            return of_tensor(a.t)
        if a.name in ("value_int", "value_ints"):
            items = list(a.ints) if a.name == "value_ints" else a.i
            return from_array(_INT64, np.array(items, dtype=np.int64)) if np.size(items) <= MAX_ELEMENTS else None
        if a.name in ("value_float", "value_floats"):
            reals = list(a.floats) if a.name == "value_floats" else a.f
            if np.size(reals) <= MAX_ELEMENTS:
                return from_array(int(TensorProto.FLOAT), np.array(reals, dtype=np.float32))
    return None


def from_array(elem_type: int, array: Array) -> Value | None:
    """The value of a numpy array; None above `MAX_ELEMENTS`."""
    if array.size > MAX_ELEMENTS:
        return None
    return Value(elem_type, tuple(array.shape), tuple(array.ravel().tolist()))
