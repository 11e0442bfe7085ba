"""Shapes of blocked operators that the runtime puts in at level all."""

import pytest
from onnx import TensorProto, helper

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.sizes import infer_sizes


def shape_of(op, inputs, **attributes):
    value = helper.make_tensor_value_info
    given = [value(f"i{k}", TensorProto.FLOAT, list(dims)) for k, dims in enumerate(inputs)]
    names = [v.name for v in given]
    node = helper.make_node(op, names, ["o"], domain="com.microsoft.nchwc", **attributes)
    graph = helper.make_graph([node], "g", given, [])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft.nchwc", 1)]
    return infer_sizes(GraphIndex(helper.make_model(graph, opset_imports=imports))).types["o"].shape


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("ReorderInput", [(2, 20, 9, 9)], {}, (2, 24, 9, 9)),
        ("ReorderInput", [(2, 9, 9, 20)], {"channels_last": 1}, (2, 24, 9, 9)),
        ("ReorderOutput", [(2, 24, 9, 9)], {"channels": 20}, (2, 20, 9, 9)),
        ("ReorderOutput", [(2, 24, 9, 9)], {"channels": 20, "channels_last": 1}, (2, 9, 9, 20)),
        ("Conv", [(2, 24, 9, 9), (32, 24, 3, 3)], {"pads": [1] * 4, "strides": [2, 2]}, (2, 32, 5, 5)),
        ("MaxPool", [(2, 24, 9, 9)], {"kernel_shape": [2, 2], "strides": [2, 2]}, (2, 24, 4, 4)),
        ("MaxPool", [(2, 24, 9, 9)], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, (2, 24, 5, 5)),
        ("GlobalAveragePool", [(2, 24, 9, 9)], {}, (2, 24, 1, 1)),
        ("Upsample", [(2, 24, 9, 9)], {"scales": [1, 1, 2, 2]}, (2, 24, 18, 18)),
    ],
)
def test_shapes(op, inputs, attributes, expected):
    assert shape_of(op, inputs, **attributes) == expected
