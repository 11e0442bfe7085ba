"""The table of rules for operators without ONNX schema: types in, types out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.ops.shape_arithmetic import broadcast, quotient
from onnx_sublinear.ops.shape_rules import _RUNTIME_OPS
from onnx_sublinear.sizes import Dim, infer_sizes

F, F16, I64, I32, BOOL, U32 = (
    int(t)
    for t in (
        *(TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL),
        TensorProto.UINT32,
    )
)
Shape = tuple[Dim, ...]
Typed = tuple[int, Shape]


def outputs_of(
    op_type: str,
    inputs: list[Typed | np.ndarray[Any, Any] | None],
    count: int,
    domain: str = "com.microsoft",
    **attributes: Any,
) -> list[Typed | None]:
    """The inferred types of one node; an array among the inputs becomes an initializer, None an omitted input."""
    names, infos, constants = [], [], []
    for i, given in enumerate(inputs):
        names.append(f"i{i}" if given is not None else "")
        if isinstance(given, np.ndarray):
            constants.append(numpy_helper.from_array(given, f"i{i}"))
        elif given is not None:
            infos.append(helper.make_tensor_value_info(f"i{i}", given[0], list(given[1])))
    outputs = [f"o{i}" for i in range(count)]
    node = helper.make_node(op_type, names, outputs, domain=domain, **attributes)
    graph = helper.make_graph([node], "g", infos, [ValueInfoProto(name=o) for o in outputs], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    found = infer_sizes(GraphIndex(helper.make_model(graph, opset_imports=imports, ir_version=8))).types
    types = [found.get(o) for o in outputs]
    return [(t.elem_type, t.shape) if t and t.shape is not None else None for t in types]


X, C, S = (F, ("N", 3, 8, 8)), (F, (3,)), (F, ())
ROW: Typed = (F, ("N", 6))
IDS: Typed = (I64, ("N",))


ELEMENTWISE = (
    *("ReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad", "SigmoidGrad", "TanhGrad", "LeakyReluGrad"),
    *("SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "BiasGeluGrad_dX"),
    *("BiasFastGeluGrad_dX", "InPlaceAccumulator", "ZeroGradient", "BiasGelu", "FastGelu"),
)


@pytest.mark.parametrize("op_type", ELEMENTWISE)
def test_elementwise_rules_keep_the_type_of_their_first_input(op_type: str) -> None:
    assert outputs_of(op_type, [X, X], 1) == [X]


# fmt: off
RULES: list[tuple[str, list[Any], dict[str, Any], list[Any]]] = [  # operator, inputs, attributes, outputs
    ("LayerNormalizationGrad", [ROW, ROW, (F, (6,)), (F, ("N", 1)), (F, ("N", 1))], {}, [ROW, (F, (6,)), (F, (6,))]),
    ("SimplifiedLayerNormalizationGrad", [ROW, ROW, (F, (6,)), (F, ("N", 1))], {}, [ROW, (F, (6,))]),
    ("InvertibleLayerNormalizationGrad", [ROW, ROW, (F, (6,)), (F, (6,)), (F, ("N", 1))], {},
     [ROW, (F, (6,)), (F, (6,))]),
    ("BatchNormalizationGrad", [X, X, C, C, C], {}, [X, C, C]),
    ("BatchNormInternal", [X, C, C, C, C], {}, [X, C, C, C, C]),
    ("ConvGrad", [(F, ("N", 5, 6, 6)), X, (F, (5, 3, 3, 3))], {}, [X, (F, (5, 3, 3, 3)), (F, (5,))]),
    ("ConvTransposeGrad", [(F, ("N", 5, 10, 10)), X, (F, (3, 5, 3, 3))], {}, [X, (F, (3, 5, 3, 3)), (F, (5,))]),
    ("DropoutGrad", [X, (BOOL, X[1]), S, (BOOL, ())], {}, [X]),
    ("BiasDropout", [ROW, (F, (6,)), None, S, (BOOL, ())], {}, [ROW, (BOOL, ROW[1])]),
    ("BitmaskDropout", [(F, (5, 33))], {}, [(F, (5, 33)), (U32, (6,))]),
    ("BiasSoftmaxDropout", [ROW, ROW, S], {"axis": 1}, [ROW, (BOOL, ROW[1]), ROW]),
    ("GatherGrad", [np.array([7, 6]), IDS, ROW], {"axis": 0}, [(F, (7, 6))]),
    ("GatherElementsGrad", [ROW, np.array([9, 6]), (I64, ROW[1])], {"axis": 0}, [(F, (9, 6))]),
    ("GatherNDGrad", [np.array([9, 6]), (I64, ("N", 1)), ROW], {}, [(F, (9, 6))]),
    ("SliceGrad", [ROW, np.array([9, 6]), np.array([0]), np.array([1])], {}, [(F, (9, 6))]),
    ("SoftmaxCrossEntropyLossGrad", [S, ROW, IDS], {}, [ROW]),
    ("SoftmaxCrossEntropyLossInternal", [(F16, ROW[1]), IDS], {"output_type": F}, [S, ROW]),
    ("SoftmaxCrossEntropyLossInternal", [ROW, IDS], {"reduction": "none"}, [(F, ("N",)), ROW]),
    ("SoftmaxCrossEntropyLossInternalGrad", [S, ROW, IDS], {}, [ROW]),
    ("SoftmaxCrossEntropy", [ROW, ROW], {"reduction": "none"}, [(F, ("N",)), ROW]),
    ("SoftmaxCrossEntropyGrad", [S, ROW, ROW], {}, [ROW]),
    ("InPlaceAccumulatorV2", [ROW, ROW], {}, [(BOOL, (1,)), ROW]),
    ("DivGrad", [ROW, ROW, (F, (6,))], {}, [ROW, (F, (6,))]),
    ("ReduceSumTraining", [X, np.array([0, 2])], {"keepdims": 1}, [(F, (1, 3, 1, 8))]),
    ("ReduceSumTraining", [X, np.array([0, -1])], {"keepdims": 0}, [(F, (3, 8))]),
    ("ReduceSumTraining", [X, np.zeros(0, np.int64)], {"noop_with_empty_axes": 1}, [X]),
    ("ReduceSumTraining", [X, IDS], {}, [(F, (None,) * 4)]),
    ("ConcatTraining", [ROW, (F, ("N", 2))], {"axis": 1}, [(F, ("N", 8)), (I64, (2,))]),
    ("SplitTraining", [ROW, np.array([2, 4])], {"axis": 1}, [(F, ("N", 2)), (F, ("N", 4))]),
    ("Group", [S, X], {}, [(BOOL, (1,))]),
    ("PassThrough", [S, X], {}, [S, X]),
    ("WaitEvent", [(I64, ()), ROW], {}, [ROW]),
    ("YieldOp", [S, ROW, X], {"full_shape_outputs": [2], "non_differentiable_outputs": [0]}, [None, X]),
    ("Scale", [X, S], {"scale_down": 1}, [X]),
    ("AdamOptimizer", [S, (I64, ()), ROW, ROW, ROW, ROW], {}, [(I64, ()), ROW, ROW, ROW, ROW]),
    ("IsAllFinite", [X, ROW], {}, [(BOOL, ())]),
    ("IsFinite", [X], {}, [(BOOL, X[1])]),
    ("MixedPrecisionScale", [S, (F, (2, 3)), (F, (5,))], {"to": F16}, [(F16, (2, 3)), (F16, (5,))]),
    ("MixedPrecisionScale", [S, (F, (2, 3)), (F, (5,))], {"to": F16, "fuse_outputs": 1}, [(F16, (11,))]),
    ("PadAndUnflatten", [(F, ("n", 4)), (I64, ("n",)), np.array([2, 3])], {}, [(F, (2, 3, 4))]),
    ("FlattenAndUnpad", [(F, (2, 3, 4)), (I64, ("n",))], {}, [(F, ("n", 4)), (I64, (2,))]),
    ("ResizeGrad", [(F, ("N", 3, 16, 16)), X], {}, [X]),
    ("LSTMTraining", [(F, ("T", "N", 6)), (F, (1, 32, 6)), (F, (1, 32, 8))], {"hidden_size": 8},
     [(F, ("T", 1, "N", 8)), (F, (1, "N", 8)), (F, (1, "N", 8)), (F, ("T", 1, "N", 8)), (F, ("T", 1, "N", 32))]),
    ("NcclAllReduce", [ROW, X], {}, [ROW, X]),
    ("NcclAllGather", [ROW], {}, [None]),
    ("NcclReduceScatter", [ROW], {}, [None]),
    ("FusedMatMul", [(F, ("N", 4, 2, 5)), (F, ("N", 4, 6, 5))], {"transB": 1}, [(F, ("N", 4, 2, 6))]),
    ("FusedMatMul", [(F, (7, 3, 2, 5)), (F, (3, 2, 5, 6))], {"transBatchA": 1}, [(F, (3, 2, 7, 6))]),
    ("TransposeMatMul", [(F, (5, "N")), (F, (5, 6))], {"transA": 1}, [ROW]),
    ("FusedGemm", [(F, ("N", 3)), (F, (6, 3)), (F, (6,))], {"transB": 1, "activation": "Relu"}, [ROW]),
    ("FusedConv", [X, (F, (4, 3, 3, 3))], {"activation": "Relu", "pads": [1] * 4, "strides": [2, 2]},
     [(F, ("N", 4, 4, 4))]),
    ("SkipLayerNormalization", [(F, (2, "T", 6)), (F, (2, "T", 6)), (F, (6,))], {},
     [(F, (2, "T", 6)), (F, (2, "T", 1)), (F, (2, "T", 1)), (F, (2, "T", 6))]),
    ("SimplifiedLayerNormalization", [(F16, ROW[1]), (F16, (6,))], {}, [(F16, ROW[1]), (F, ("N", 1))]),
]
# fmt: on


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "expected"), RULES)
def test_rules(op_type: str, inputs: list[Any], attributes: dict[str, Any], expected: list[Any]) -> None:
    domain = "" if op_type == "SimplifiedLayerNormalization" else "com.microsoft"
    assert outputs_of(op_type, inputs, len(expected), domain, **attributes) == expected


def test_every_rule_survives_a_node_without_known_inputs() -> None:
    for op_type in _RUNTIME_OPS:
        domain = "" if op_type.endswith("PoolGrad") else "com.microsoft"
        inputs: list[Any] = [(F, None)] * 7  # every input float of unknown rank
        names = [f"i{i}" for i in range(len(inputs))]
        infos = [helper.make_tensor_value_info(n, F, None) for n in names]
        node = helper.make_node(op_type, names, ["o0", "o1"], domain=domain, axis=0)
        graph = helper.make_graph([node], "g", infos, [ValueInfoProto(name="o0")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        infer_sizes(GraphIndex(model))


def test_max_pool_grad_has_the_type_of_what_was_pooled() -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["y", "where"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("MaxPoolGrad", ["y", "where"], ["dx"]),
        helper.make_node("AveragePoolGrad", ["y"], ["da"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    x = helper.make_tensor_value_info("x", F, ["N", 3, 9, 9])
    graph = helper.make_graph(nodes, "g", [x], [ValueInfoProto(name="dx")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = infer_sizes(GraphIndex(model)).types
    assert found["dx"].shape == ("N", 3, 9, 9)
    assert found["da"].shape == ("N", 3, None, None)


def test_split_training_takes_the_lengths_that_concat_training_reported() -> None:
    ms = {"domain": "com.microsoft", "axis": 0}
    nodes = [
        helper.make_node("ConcatTraining", ["a", "b"], ["c", "lengths"], **ms),
        helper.make_node("SplitTraining", ["c", "lengths"], ["da", "db"], **ms),
    ]
    infos = [helper.make_tensor_value_info(n, F, [d, 4]) for n, d in (("a", "N"), ("b", 3))]
    graph = helper.make_graph(nodes, "g", infos, [ValueInfoProto(name="da")])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    found = infer_sizes(GraphIndex(helper.make_model(graph, opset_imports=imports, ir_version=8))).types
    assert found["c"].shape == (None, 4)
    assert found["da"].shape == ("N", 4)
    assert found["db"].shape == (3, 4)


def test_broadcast() -> None:
    assert broadcast((2, 1), (3,)) == (2, 3)
    assert broadcast(("N", 1), (1, "M")) == ("N", "M")
    assert broadcast(("N",), ("M",)) == (None,)
    assert broadcast(("N",), (4,)) == (4,)
    assert broadcast((0,), (1,)) == (0,)
    assert broadcast((None, 2), (5, 2)) == (5, 2)
    assert broadcast((2,), None) is None


def test_quotient_is_exact_or_unknown() -> None:
    assert quotient((4, 6), (3,)) == 8
    assert quotient(("N", 4, 6), (24,)) == "N"
    assert quotient(("N", 4, 6), ("N", 2)) == 12
    assert quotient(("N", 4), (2,)) is None
    assert quotient(("N", "M"), ()) is None
    assert quotient((5,), (2,)) is None
    assert quotient((None, 4), (4,)) is None
    assert quotient((2**40, 2**40), ()) == 2**80
