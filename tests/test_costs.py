"""Costs: formulas worked by hand, and what must hold between operators."""

import pytest
from onnx import TensorProto, helper

from onnx_sublinear.costs import FLOPS_PER_BYTE, node_cost
from onnx_sublinear.ops.tensor_types import TensorType

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def cost(op, inputs, outputs, *, domain="", attributes=None, absent_outputs=()):
    """Cost of one node on float tensors of the given shapes (None: unknown)."""
    node = helper.make_node(
        op,
        [f"i{k}" for k in range(len(inputs))],
        ["" if k in absent_outputs else f"o{k}" for k in range(len(outputs))],
        domain=domain,
        **(attributes or {}),
    )
    given = [None if s is None else TensorType(FLOAT, s) for s in inputs]
    made = [None if s is None or k in absent_outputs else TensorType(FLOAT, s) for k, s in enumerate(outputs)]
    return node_cost(node, given, made, 18)


def moved(*elements):
    return FLOPS_PER_BYTE * 4 * sum(elements)


@pytest.mark.parametrize(
    ("op", "inputs", "output", "attributes", "flops"),
    [
        ("MatMul", [(7, 3, 4), (4, 5)], (7, 3, 5), {}, 2 * 105 * 4),
        ("Gemm", [(4, 3), (4, 5)], (3, 5), {"transA": 1}, 2 * 15 * 4),
        ("Conv", [(2, 6, 8, 8), (4, 3, 3, 3)], (2, 4, 6, 6), {"group": 2}, 2 * 288 * 27),
        ("ConvTranspose", [(2, 4, 6, 6), (4, 3, 3, 3)], (2, 3, 8, 8), {}, 2 * 288 * 27),
        ("Add", [(4, 5), (5,)], (4, 5), {}, 0),
        ("Exp", [(4, 5)], (4, 5), {}, 10 * 20),
        ("Softmax", [(4, 5)], (4, 5), {}, 10 * 20),
        ("ReduceSum", [(4, 5)], (4, 1), {}, 20),
        ("Transpose", [(4, 5)], (5, 4), {}, 0),
    ],
)
def test_flops_and_moved_bytes(op, inputs, output, attributes, flops):
    sizes = [1]
    for shape in (*inputs, output):
        size = 1
        for dim in shape:
            size *= dim
        sizes.append(size)
    assert cost(op, inputs, [output], attributes=attributes) == flops + moved(*sizes[1:])


def test_conv_grad_is_both_gradients():
    dy, x, w = (2, 4, 6, 6), (2, 3, 8, 8), (4, 3, 3, 3)
    forward = 2 * 288 * 27
    both = cost("ConvGrad", [dy, x, w], [x, w], domain="com.microsoft")
    weights_only = cost("ConvGrad", [dy, x, w], [x, w], domain="com.microsoft", absent_outputs=(0,))
    assert both == 2 * forward + moved(288, 384, 108, 384, 108)
    assert weights_only == forward + moved(288, 384, 108, 108)


def test_fused_matmul_with_transposed_operand_counts_the_summed_axis():
    found = cost("FusedMatMul", [(4, 3), (4, 5)], [(3, 5)], domain="com.microsoft", attributes={"transA": 1})
    assert found == 2 * 15 * 4 + moved(12, 20, 15)


def test_einsum_counts_pairwise_products():
    plain = cost("Einsum", [(3, 4), (4, 5)], [(3, 5)], attributes={"equation": "ij,jk->ik"})
    assert plain >= 2 * 60 + moved(12, 20, 15)
    chain = cost("Einsum", [(3, 4), (4, 5), (5, 6)], [(3, 6)], attributes={"equation": "ij,jk,kl->il"})
    assert chain >= 2 * (60 + 90) + moved(12, 20, 30, 18)


def test_views_are_free_and_nothing_else_is():
    for op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
        assert cost(op, [(4, 5)], [(20,)]) == 0
    assert cost("Shape", [(1000, 1000)], [(2,)]) == 1
    assert cost("Relu", [None], [None]) == 1
    assert cost("Reshape", [(4, 5)], [(20,)], domain="lab") > 0


def test_unknown_types_count_the_bytes_that_are_known():
    assert cost("MatMul", [None, (4, 5)], [(3, 5)]) == moved(20, 15)
    assert cost("Custom", [(4, 5)], [(4, 5)], domain="lab") == moved(20, 20)


def test_a_slice_reads_as_much_as_it_writes():
    assert cost("Slice", [(1000, 1000)], [(10, 10)]) == moved(100, 100)


def test_elementwise_work_is_not_free_beside_a_product():
    """A product of 64 x 64 matrices takes 2 x 64 FLOPs an element; a ReLU moves 8 bytes an element."""
    product, relu = cost("MatMul", [(64, 64), (64, 64)], [(64, 64)]), cost("Relu", [(64, 64)], [(64, 64)])
    assert 1 < product / relu < 20


def test_recurrent_layers_count_every_step():
    shapes = [(10, 4, 5), (1, 24, 5), (1, 24, 6)], [(10, 1, 4, 6)]
    once = 4 * 4 * 6 * (2 * (5 + 6) + 10)
    assert cost("LSTM", *shapes) == 10 * once + moved(200, 120, 144, 240)


def scan(steps):
    rows = [helper.make_tensor_value_info(n, FLOAT, [40, 50]) for n in ("s", "x")]
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Exp", ["t"], ["y"])],
        "body",
        rows,
        [helper.make_tensor_value_info(n, FLOAT, [40, 50]) for n in ("t", "y")],
    )
    node = helper.make_node("Scan", ["s0", "xs"], ["s1", "ys"], body=body, num_scan_inputs=1)
    state, stacked = TensorType(FLOAT, (40, 50)), TensorType(FLOAT, (steps, 40, 50))
    return node_cost(node, [state, stacked], [state, stacked], 18)


def test_scan_costs_its_body_times_the_steps():
    body = moved(2000, 2000, 2000) + moved(2000, 2000) + 10 * 2000
    assert scan(10) == 10 * body


def test_if_costs_its_dearer_branch():
    cheap = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"])], "c", [], [helper.make_tensor_value_info("a", FLOAT, [4, 5])]
    )
    dear = helper.make_graph(
        [helper.make_node("RandomUniform", [], ["b"], shape=[400, 500])],
        "d",
        [],
        [helper.make_tensor_value_info("b", FLOAT, [400, 500])],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=cheap, else_branch=dear)
    assert node_cost(node, [TensorType(BOOL, ())], [TensorType(FLOAT, (4, 5))], 18) >= 300 * 200_000
