"""Readers that can move in front of an in-place kernel do; Before/Expected by the order of the nodes."""

import pytest
from graphs import graph, listing, made

from onnx_sublinear.errors import UsageError
from onnx_sublinear.passes.inplace import InplacePass
from onnx_sublinear.rewrite_check import check_rewrite
from onnx_sublinear.sizes import infer_sizes

BYTES = 4 * 64
HEAD = "g (float[64] x) => (float loss, float[64] out)"
TAIL = "loss = ReduceSum <keepdims = 0> (out)"


def case(body, head=HEAD):
    return graph(f"{head} {{ {body} {TAIL} }}")


@pytest.mark.parametrize(
    ("body", "expected", "inplace_bytes"),
    [
        # the docstring's example
        ("h = Exp(x) y = Relu(h) z = Mul(h, x) out = Add(y, z)", "h z y out loss", BYTES),
        # already last: nothing to move
        ("h = Exp(x) z = Mul(h, x) y = Relu(h) out = Add(y, z)", "h z y out loss", BYTES),
        # two readers behind
        ("h = Exp(x) y = Relu(h) z = Mul(h, x) w = Neg(h) out = Sum(y, z, w)", "h z w y out loss", BYTES),
        # a chain of in-place kernels
        ("h = Exp(x) y = Relu(h) z = Tanh(y) out = Add(z, x)", "h y z out loss", 2 * BYTES),
        # the other reader needs the result: it must stay behind
        ("h = Exp(x) y = Relu(h) out = Mul(h, y)", "h y out loss", 0),
        # the other reader needs what is made later
        ("h = Exp(x) y = Relu(h) k = Neg(x) z = Mul(h, k) out = Add(y, z)", "h y k z out loss", 0),
        # a graph input is never written
        ("y = Relu(x) z = Neg(x) out = Add(y, z)", "y z out loss", 0),
        # an unknown operator keeps its place
        ("h = Exp(x) y = Relu(h) z = lab.Wave(h) out = Add(y, z)", "h y z out loss", 0),
        # another width: Cast to double takes no float's buffer
        ("h = Exp(x) y = Cast <to = 11> (h) z = Neg(h) w = Cast <to = 1> (y) out = Add(w, z)", "h y z w out loss", 0),
    ],
)
def test_order_and_bytes(body, expected, inplace_bytes):
    before = case(body)
    result = InplacePass()(before)
    assert " ".join(made(result.model)) == expected
    assert result.facts["inplace_bytes"] == inplace_bytes
    assert result.modified == (expected != " ".join(made(before.model)))
    assert sorted(listing(result.model)) == sorted(listing(before.model))
    if "lab" not in body:
        assert check_rewrite(before.model, result.model) == []


def test_graph_outputs_are_never_taken_over():
    before = case("h = Exp(x) y = Relu(h) z = Mul(h, x) out = Add(y, z)", HEAD.replace("out)", "out, float[64] h)"))
    assert "h" in before.index.output_set
    result = InplacePass()(before)
    assert (result.modified, result.facts["inplace_bytes"]) == (False, 0)


def test_the_target_decides():
    """Softmax runs in-place on the CPU only."""
    body = f"{HEAD} {{ h = Exp(x) y = Softmax(h) z = Mul(h, x) out = Add(y, z) {TAIL} }}"
    assert InplacePass()(graph(body)).facts["inplace_bytes"] == BYTES
    assert InplacePass()(graph(body, target="cuda")).facts["inplace_bytes"] == 0


def test_an_unsorted_file_is_sorted():
    before = case("y = Relu(h) h = Exp(x) out = Add(y, x)")
    result = InplacePass()(before)
    assert result.modified
    assert " ".join(made(result.model)) == "h y out loss"
    assert result.graph.sizes.types == infer_sizes(result.graph.index).types


def test_it_has_no_options():
    assert str(InplacePass()) == "inplace"
    with pytest.raises(UsageError, match="no option 'fast'"):
        InplacePass.from_options({"fast": "1"})
