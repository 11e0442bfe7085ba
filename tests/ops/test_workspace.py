"""Workspace formulas: worked by hand, and against the resident memory of a live runtime."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from onnx_sublinear.ops.tensor_types import TensorType
from onnx_sublinear.ops.workspace import run_overhead_bytes, scratch_on_heap, workspace_bytes

FLOAT, HALF, INT64, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL


def scratch(op, inputs, outputs, *, domain="", opset=18, training=False, attributes=None, elems=None):
    """Scratch of one node; `inputs` and `outputs` are shapes (None: absent), `elems` element types of the inputs."""
    node = helper.make_node(
        op,
        ["" if s is None else f"i{k}" for k, s in enumerate(inputs)],
        ["" if s is None else f"o{k}" for k, s in enumerate(outputs)],
        domain=domain,
        **(attributes or {}),
    )
    elems = elems or [FLOAT] * len(inputs)
    given = [None if s is None else TensorType(e, s) for s, e in zip(inputs, elems, strict=True)]
    made = [None if s is None else TensorType(elems[0], s) for s in outputs]
    return workspace_bytes(node, given, made, opset, training=training)


@pytest.mark.parametrize(
    ("inputs", "output", "attributes", "expected"),
    [
        pytest.param([(8, 16, 64, 64), (32, 16, 3, 3)], (8, 32, 64, 64), {"pads": [1] * 4}, 65536, id="segments"),
        pytest.param([(8, 16, 64, 64), (32, 16, 1, 1)], (8, 32, 64, 64), {}, 0, id="pointwise"),
        pytest.param([(8, 16, 64, 64), (32, 16, 1, 1)], (8, 32, 32, 32), {"strides": [2, 2]}, 65536, id="strided 1x1"),
        pytest.param(
            [(4, 64, 8, 8), (128, 64, 3, 3)], (4, 128, 8, 8), {"pads": [1] * 4}, 64 * 64 * 9 * 4, id="more filters"
        ),
        pytest.param(
            [(4, 64, 8, 8), (256, 32, 3, 3)],
            (4, 256, 8, 8),
            {"pads": [1] * 4, "group": 2},
            64 * 32 * 9 * 4,
            id="a group's channels",
        ),
        pytest.param([(4, 1, 30, 20), (8, 1, 3, 20)], (4, 8, 28, 1), {}, 0, id="kernel of full width"),
        pytest.param([(4, 8, 500), (8, 8, 3)], (4, 8, 498), {}, 65536, id="1-D"),
    ],
)
def test_conv(inputs, output, attributes, expected):
    assert scratch("Conv", inputs, [output], attributes=attributes) == expected


def test_conv_transpose_holds_the_columns_of_one_image():
    assert scratch("ConvTranspose", [(8, 32, 10, 20), (32, 16, 3, 3)], [(8, 16, 12, 22)]) == 16 * 9 * 200 * 4


def test_conv_grad_holds_columns_and_bias_multiplier():
    shapes = [(8, 32, 10, 20), (8, 16, 10, 20), (32, 16, 3, 3)]
    found = scratch("ConvGrad", shapes, shapes[1:], domain="com.microsoft", training=True)
    assert found == (16 * 9 + 1) * 200 * 4


@pytest.mark.parametrize(
    ("a", "b", "out", "expected"),
    [
        ((30, 40), (40, 50), (30, 50), 0),
        ((7, 30, 40), (40, 50), (7, 30, 50), 0),
        ((7, 30, 40), (7, 40, 50), (7, 30, 50), 7 * 88),
        ((2, 1, 30, 40), (7, 40, 50), (2, 7, 30, 50), 14 * 88),
        ((30, 40), (40,), (30,), 30 * 88),
    ],
)
def test_matmul_takes_parameters_for_each_matrix(a, b, out, expected):
    assert scratch("MatMul", [a, b], [out]) == expected


@pytest.mark.parametrize(("axis", "opset", "factor"), [(-1, 13, 0), (2, 13, 0), (1, 13, 2), (0, 18, 2), (1, 12, 0)])
def test_softmax_transposes_for_an_inner_axis(axis, opset, factor):
    shape = (3, 4, 5)
    found = scratch("Softmax", [shape], [shape], opset=opset, attributes={"axis": axis})
    assert found == factor * 60 * 4


@pytest.mark.parametrize(
    ("op", "source", "result", "keepdims", "expected"),
    [
        pytest.param("ReduceSum", (70, 600, 11), (70, 1, 11), 1, 2 * 600 * 4, id="sum by gemm"),
        pytest.param("ReduceSum", (70, 20, 30, 11), (70, 11), 0, 2 * 600 * 4, id="neighbours merge"),
        pytest.param("ReduceMax", (70, 600, 11), (70, 1, 11), 1, 0, id="no ones for a maximum"),
        pytest.param("ReduceSum", (70, 600), (70, 1), 1, 0, id="rows"),
        pytest.param("ReduceMean", (70, 60, 5), (1, 60, 1), 1, 0, id="outer and inner"),
        pytest.param("ReduceSumSquare", (70, 60, 5), (1, 60, 1), 1, (70 + 1) * 8, id="outer and inner by index"),
        pytest.param("ReduceSum", (70, 60, 5, 3), (1, 60, 1, 3), 1, (70 + 60) * 8, id="alternating"),
        pytest.param("ReduceSum", (70, 60, 1, 3), (70, 1, 1, 1), 1, 0, id="axes of one element"),
    ],
)
def test_reduce(op, source, result, keepdims, expected):
    assert scratch(op, [source], [result], attributes={"keepdims": keepdims}) == expected


def test_variadic_needs_one_more_result_from_three_inputs_on():
    shape = (6, 7)
    assert scratch("Sum", [shape] * 2, [shape]) == 0
    assert scratch("Sum", [shape, (7,), shape], [shape]) == 42 * 4


def test_where_broadcasts_each_choice_with_the_condition_only():
    elems = [BOOL, FLOAT, FLOAT]
    assert scratch("Where", [(6, 7), (6, 7), ()], [(6, 7)], elems=elems) == 2 * 42 * 4
    assert scratch("Where", [(1, 7), (6, 7), ()], [(6, 7)], elems=elems) == (42 + 7) * 4


def test_expand_keeps_an_offset_for_each_run():
    assert scratch("Expand", [(6, 1), (2,)], [(6, 7)], elems=[FLOAT, INT64]) == 6 * 8
    assert scratch("Expand", [(7,), (2,)], [(6, 7)], elems=[FLOAT, INT64]) == 8


def test_scatter_and_gather_unpack_the_indices():
    x = (9, 9)
    assert scratch("ScatterElements", [x, (4, 9), (4, 9)], [x], elems=[FLOAT, INT64, FLOAT]) == 36 * 8
    assert scratch("ScatterND", [x, (4, 1), (4, 9)], [x], elems=[FLOAT, INT64, FLOAT]) == 4 * 8
    assert scratch("GatherElements", [x, (4, 9)], [(4, 9)], elems=[FLOAT, INT64]) == 0


@pytest.mark.parametrize(
    ("equation", "inputs", "output", "elements"),
    [
        # the right operand stands as 1 1 c d and is copied to c d 1 1; the product
        pytest.param("abc,cd->abd", [(2, 3, 5), (5, 7)], (2, 3, 7), 35 + 42, id="axes of one element move"),
        # the right operand is copied to c d, then as above
        pytest.param("abc,dc->abd", [(2, 3, 5), (7, 5)], (2, 3, 7), 35 + 35 + 42, id="right transposed"),
        # left to c a b, right to a b d 1; the product
        pytest.param("abc,abd->cd", [(2, 3, 5), (2, 3, 7)], (5, 7), 30 + 42 + 35, id="both transposed"),
        # the right operand to j k 1; the product in the order i k, and once more as k i
        pytest.param("ij,jk->ki", [(2, 3), (3, 5)], (5, 2), 15 + 10 + 10, id="result transposed"),
        pytest.param("ij->ji", [(2, 3)], (3, 2), 6, id="one operand"),
    ],
)
def test_einsum(equation, inputs, output, elements):
    assert scratch("Einsum", inputs, [output], attributes={"equation": equation}) == elements * 4


def test_lstm_holds_the_gates_of_the_whole_sequence():
    x, w, r = (10, 4, 5), (1, 24, 5), (1, 24, 6)
    assert scratch("LSTM", [x, w, r], [(10, 1, 4, 6), (1, 4, 6), (1, 4, 6)]) == (10 * 4 * 24 + 3 * 24) * 4
    assert scratch("LSTM", [x, w, r], [(10, 1, 4, 6)]) == (10 * 4 * 24 + 5 * 24) * 4


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("LayerNormalizationGrad", [(4, 6), (4, 6), (6,), (4, 1), (4, 1)], {"axis": -1}, (4 * 24 + 2 * 4) * 4),
        ("SoftmaxGrad_13", [(4, 6), (4, 6)], {"axis": -1}, (4 + 6) * 4),
        ("SoftmaxGrad_13", [(4, 6), (4, 6)], {"axis": 0}, (3 * 24 + 4 + 6) * 4),
        ("LogSoftmaxGrad_13", [(4, 6), (4, 6)], {"axis": 1}, 24 * 4),
        ("GeluGrad", [(4, 6), (4, 6)], {}, 0),
    ],
)
def test_gradient_kernels(op, inputs, attributes, expected):
    found = scratch(op, inputs, [inputs[0]], domain="com.microsoft", training=True, attributes=attributes)
    assert found == expected


def test_loss_differs_between_the_builds():
    inputs, outputs, elems = [(2, 5, 7), (2, 7)], [(), (2, 5, 7)], [FLOAT, INT64]
    assert scratch("SoftmaxCrossEntropyLoss", inputs, outputs, elems=elems) == 70 * 4
    assert scratch("SoftmaxCrossEntropyLoss", inputs, outputs, elems=elems, training=True) == (2 * 70 + 14) * 4


def test_unknown_types_and_operators_count_nothing():
    assert scratch("Conv", [None, (1, 1, 3, 3)], [(1, 1, 4, 4)]) == 0
    assert scratch("Softmax", [("batch", 4)], [("batch", 4)], attributes={"axis": 0}) == 0
    assert scratch("Custom", [(4,)], [(4,)], domain="lab") == 0
    assert scratch("Add", [(4,), (4,)], [(4,)]) == 0


def test_a_float16_node_without_a_kernel_runs_on_float_copies():
    halves = [HALF, HALF]
    # two inputs of 24 and an output of 24 elements: 4 bytes each, less the 2 of the output that the caller counts
    assert scratch("Add", [(4, 6), (4, 6)], [(4, 6)], elems=halves) == (2 * 4 + 2) * 24
    assert scratch("Transpose", [(4, 6)], [(6, 4)], elems=[HALF]) == 0
    inner = scratch("Softmax", [(4, 6)], [(4, 6)], attributes={"axis": 0}, elems=[HALF])
    assert inner > 2 * 24 * 4


def loop(steps):
    """state -> exp -> -x -> state, stacked; the second state is handed on unchanged."""
    row = [100, 10]

    def value(name, elem, shape):
        return helper.make_tensor_value_info(name, elem, shape)

    nodes = [
        helper.make_node("Identity", ["going"], ["go_on"]),
        helper.make_node("Exp", ["s"], ["e"]),
        helper.make_node("Neg", ["e"], ["t"]),
        helper.make_node("Identity", ["u"], ["v"]),
        helper.make_node("Abs", ["t"], ["y"]),
    ]
    given = [value("i", INT64, []), value("going", BOOL, []), value("s", FLOAT, row), value("u", FLOAT, row)]
    made = [value("go_on", BOOL, []), value("t", FLOAT, row), value("v", FLOAT, row), value("y", FLOAT, row)]
    body = helper.make_graph(nodes, "body", given, made)
    node = helper.make_node("Loop", ["n", "c", "s0", "u0"], ["s1", "u1", "ys"], body=body)
    state = TensorType(FLOAT, (100, 10))
    inputs = [TensorType(INT64, ()), TensorType(BOOL, ()), state, state]
    return node, inputs, [state, state, TensorType(FLOAT, (steps, 100, 10))]


def test_loop_keeps_both_states_and_every_stacked_piece():
    node, inputs, outputs = loop(5)
    assert workspace_bytes(node, inputs, outputs, 18) == (2 + 5) * 4000


def test_bodies_know_the_types_of_what_they_capture():
    """The body of the branch makes one tensor of w's shape beside its output; nothing in it has a declared type."""
    branch = helper.make_graph(
        [helper.make_node("Exp", ["w"], ["a"]), helper.make_node("Exp", ["a"], ["b"])],
        "branch",
        [],
        [helper.make_tensor_value_info("b", FLOAT, [100])],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    types = [TensorType(BOOL, ())], [TensorType(FLOAT, (100,))]
    assert workspace_bytes(node, *types, 18) == 0
    assert workspace_bytes(node, *types, 18, outer={"w": TensorType(FLOAT, (100,))}) == 400


@pytest.mark.parametrize(("steps", "states"), [(1, 0), (2, 1), (5, 2)])
def test_scan_holds_its_states_before_and_behind_a_step(steps, states):
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Exp", ["t"], ["u"])],
        "body",
        [value("s", FLOAT, [100]), value("x", FLOAT, [100])],
        [value("t", FLOAT, [100]), value("u", FLOAT, [100])],
    )
    node = helper.make_node("Scan", ["s0", "xs"], ["s1", "ys"], body=body, num_scan_inputs=1)
    stacked = TensorType(FLOAT, (steps, 100))
    types = [TensorType(FLOAT, (100,)), stacked]
    assert workspace_bytes(node, types, types, 18) == states * 400


def test_scratch_on_the_heap_is_told_apart():
    node = helper.make_node("ScatterElements", ["a", "b", "c"], ["d"])
    assert scratch_on_heap(node)
    assert not scratch_on_heap(helper.make_node("Conv", ["x", "w"], ["y"]))


def test_run_overhead_grows_with_values_and_arguments():
    assert run_overhead_bytes(1000) == 24_000
    assert run_overhead_bytes(1000, 10) == 24_000 + 10 * 104


LIVE = {
    # the scratch blocks are above 32 MiB, so that glibc gives each its own mapping and returns it at once
    "Softmax": ("Softmax", [(3000, 4000)], {"axis": 0}),
    "Where": ("Where", [(3000, 4000), (3000, 4000), ()], {}),
    "ConvTranspose": ("ConvTranspose", [(2, 8, 400, 400), (8, 16, 3, 3)], {}),
    "Conv": ("Conv", [(1, 4096, 16, 16), (257, 4096, 3, 3)], {"pads": [1, 1, 1, 1]}),
    "Einsum": ("Einsum", [(3000, 20), (20, 4000)], {"equation": "ij,jk->ki"}),
    "Sum": ("Sum", [(3000, 4000)] * 3, {}),
}

MEASURE = """
import json, sys
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

op, shapes, attributes = json.loads(sys.argv[1])
elems = [TensorProto.BOOL if op == "Where" and k == 0 else TensorProto.FLOAT for k in range(len(shapes))]
names = [f"i{k}" for k in range(len(shapes))]
graph = helper.make_graph(
    [helper.make_node(op, names, ["o"], **attributes)], "g",
    [helper.make_tensor_value_info(n, e, s) for n, e, s in zip(names, elems, shapes)],
    [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
options = ort.SessionOptions()
options.enable_cpu_mem_arena = options.enable_mem_pattern = False
options.intra_op_num_threads = options.inter_op_num_threads = 1
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
feeds = {n: np.ones(s, helper.tensor_dtype_to_np_dtype(e)) for n, e, s in zip(names, elems, shapes)}

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

session.run(None, feeds)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
output = session.run(None, feeds)[0]
print(json.dumps([status("VmHWM") - before, output.shape, output.nbytes]))
"""


@pytest.mark.parametrize("case", LIVE)
def test_prediction_equals_what_the_runtime_takes(case):
    pytest.importorskip("onnxruntime")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs")
    op, shapes, attributes = LIVE[case]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(LIVE[case])], capture_output=True, text=True, check=True
    )
    taken, shape, output_bytes = json.loads(done.stdout.splitlines()[-1])
    elems = [BOOL if op == "Where" and k == 0 else FLOAT for k in range(len(shapes))]
    node = helper.make_node(op, [f"i{k}" for k in range(len(shapes))], ["o"], **attributes)
    given = [TensorType(e, s) for e, s in zip(elems, shapes, strict=True)]
    predicted = workspace_bytes(node, given, [TensorType(FLOAT, tuple(shape))], 18)
    assert predicted > 2**23
    assert predicted == pytest.approx(taken - output_bytes, rel=0.02)


def test_twenty_thousand_nodes_take_well_under_a_second():
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    given = [TensorType(FLOAT, (8, 16, 64, 64)), TensorType(FLOAT, (32, 16, 3, 3))]
    made = [TensorType(FLOAT, (8, 32, 64, 64))]
    start = time.perf_counter()
    for _ in range(20_000):
        workspace_bytes(node, given, made, 18)
    assert time.perf_counter() - start < 3
