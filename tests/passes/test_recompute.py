"""Cloning: Before/Expected listings by topology, and what the pass refuses to clone."""

from collections import Counter
from dataclasses import replace

import onnx
import pytest
from graphs import deep_chain, graph, listing

from onnx_sublinear.errors import BudgetError, PostconditionError, UsageError
from onnx_sublinear.passes import PassResult
from onnx_sublinear.passes.recompute import RecomputePass, apply_schedule
from onnx_sublinear.passes.rewriting import role_of
from onnx_sublinear.rewrite_check import check_rewrite
from onnx_sublinear.training_graph import TrainingGraph

CHAIN = """chain (float[8] x) => (float loss, float[8] dx) {
  a = Tanh (x)
  b = Exp (a)
  loss = ReduceSum <keepdims = 0> (b)
  db = Mul (b, a)
  dx = Mul (db, a)
}"""

DIAMOND = """diamond (float[8] x) => (float loss, float[8] dx) {
  a = Tanh (x)
  left = Exp (a)
  right = Neg (a)
  join = Add (left, right)
  loss = ReduceSum <keepdims = 0> (join)
  dx = Sum (left, right, join)
}"""

SKIP = """skip (float[8] x) => (float loss, float[8] dx) {
  a = Tanh (x)
  b = Exp (a)
  c = Add (b, a)
  loss = ReduceSum <keepdims = 0> (c)
  dc = Neg (c)
  dx = Sum (dc, a, b)
}"""

TWO_LOSSES = """two_losses (float[8] x) => (float loss_a, float loss_b, float[8] da, float[8] db) {
  trunk = Tanh (x)
  loss_a = ReduceSum <keepdims = 0> (trunk)
  head = Exp (trunk)
  loss_b = ReduceSum <keepdims = 0> (head)
  da = Neg (trunk)
  db = Mul (head, trunk)
}"""

SHARED_WEIGHT = """shared (float[8, 8] x, float[8, 8] W) => (float loss, float[8, 8] dW) {
  a = MatMul (x, W)
  b = MatMul (a, W)
  loss = ReduceSum <keepdims = 0> (b)
  d1 = MatMul (a, b)
  dW = MatMul (d1, W)
}"""

CAPTURE = """capture (float[8] x, bool c) => (float loss, float[8] dx) {
  a = Tanh (x)
  loss = ReduceSum <keepdims = 0> (a)
  dx = If (c) <then_branch = yes () => (float[8] y) { y = Neg (a) },
               else_branch = no () => (float[8] z) { a2 = Exp (a)  z = Mul (a2, x) }>
}"""

SHADOW = """shadow (float[8] x, bool c) => (float loss, float[8] dx) {
  a = Tanh (x)
  loss = ReduceSum <keepdims = 0> (a)
  b = Neg (a)
  dx = If (c) <then_branch = yes () => (float[8] y) { y = Neg (a) },
               else_branch = no () => (float[8] z) { z = Exp (x) }>
}"""

MULTI_OUTPUT = """multi (float[8] x) => (float loss, float[4] d) {
  left, right = Split <num_outputs = 2> (x)
  h = Mul (left, right)
  loss = ReduceSum <keepdims = 0> (h)
  d = Add (right, left)
}"""

BATCH_NORM = """bn (float[4, 2] x, float[2] s, float[2] b, float[2] m, float[2] v)
    => (float loss, float[2] m_new, float[2] v_new, float[4, 2] dx) {
  y, m_new, v_new = BatchNormalization <training_mode = 1> (x, s, b, m, v)
  loss = ReduceSum <keepdims = 0> (y)
  dx = Neg (y)
}"""


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        (CHAIN, [0, 1, 2, 0, 1, 3, 4], [
            "a/recompute = Tanh(x)",
            "b/recompute = Exp(a/recompute)",
            "db = Mul(b/recompute, a/recompute)",
            "dx = Mul(db, a/recompute)",
        ]),
        (CHAIN, [0, 1, 2, 1, 3, 4], ["b/recompute = Exp(a)", "db = Mul(b/recompute, a)", "dx = Mul(db, a)"]),
        (CHAIN, [0, 1, 2, 0, 3, 0, 4], [
            "a/recompute = Tanh(x)",
            "db = Mul(b, a/recompute)",
            "a/recompute_1 = Tanh(x)",
            "dx = Mul(db, a/recompute_1)",
        ]),
        (DIAMOND, [0, 1, 2, 3, 4, 0, 1, 2, 5], [
            "a/recompute = Tanh(x)",
            "left/recompute = Exp(a/recompute)",
            "right/recompute = Neg(a/recompute)",
            "dx = Sum(left/recompute, right/recompute, join)",
        ]),
        (SKIP, [0, 1, 2, 3, 4, 0, 1, 5], [
            "dc = Neg(c)",
            "a/recompute = Tanh(x)",
            "b/recompute = Exp(a/recompute)",
            "dx = Sum(dc, a/recompute, b/recompute)",
        ]),
        (TWO_LOSSES, [0, 1, 2, 3, 0, 4, 2, 5], [
            "trunk/recompute = Tanh(x)",
            "da = Neg(trunk/recompute)",
            "head/recompute = Exp(trunk/recompute)",
            "db = Mul(head/recompute, trunk/recompute)",
        ]),
        (SHARED_WEIGHT, [0, 1, 2, 0, 1, 3, 4], [
            "a/recompute = MatMul(x, W)",
            "b/recompute = MatMul(a/recompute, W)",
            "d1 = MatMul(a/recompute, b/recompute)",
            "dW = MatMul(d1, W)",
        ]),
        (MULTI_OUTPUT, [0, 1, 2, 0, 3], [
            "left/recompute, right/recompute = Split(x)",
            "d = Add(right/recompute, left/recompute)",
        ]),
        (BATCH_NORM, [0, 1, 0, 2], [
            "m/scratch = Neg(m)",
            "v/scratch = Neg(v)",
            "y/recompute, m_new/recompute, v_new/recompute = BatchNormalization(x, s, b, m/scratch, v/scratch)",
            "dx = Neg(y/recompute)",
        ]),
    ],
    ids=["chain", "checkpoint", "twice", "diamond", "skip", "two losses", "shared weight", "multi-output", "bn"],
)  # fmt: skip
def test_clones_stand_where_the_schedule_names_a_node_again(text, labels, expected):
    before = graph(text)
    after, recomputed = apply_schedule(before, labels)
    lines = listing(after.model)
    assert lines[-len(expected) :] == expected
    assert [line for line in lines if "/" not in line] == [line for line in listing(before.model) if line in lines]
    assert sum(recomputed.values()) == len(labels) - len(before.index.nodes)
    assert check_rewrite(before.model, after.model) == []
    onnx.checker.check_model(after.model, full_check=True)


def test_subgraphs_read_the_clone():
    before = graph(CAPTURE)
    after, _ = apply_schedule(before, [0, 1, 0, 2])
    branches = {a.name: listing(onnx.ModelProto(graph=a.g)) for a in after.model.graph.node[-1].attribute}
    assert branches == {
        "then_branch": ["y = Neg(a/recompute)"],
        "else_branch": ["a2 = Exp(a/recompute)", "z = Mul(a2, x)"],
    }
    assert check_rewrite(before.model, after.model) == []


def test_a_name_that_a_subgraph_defines_itself_is_not_the_clones():
    """Names of a subgraph may not hide outer ones in valid ONNX, but files do it; the inner definition holds."""
    before = graph(SHADOW)
    branch = next(a.g for a in before.model.graph.node[-1].attribute if a.name == "else_branch")
    branch.node.insert(0, onnx.helper.make_node("Abs", ["x"], ["a"]))
    branch.node[1].input[0] = "a"
    before = TrainingGraph(before.model)
    after, _ = apply_schedule(before, [0, 1, 0, 2, 3])
    branches = {a.name: listing(onnx.ModelProto(graph=a.g)) for a in after.model.graph.node[-1].attribute}
    assert branches == {"then_branch": ["y = Neg(a/recompute)"], "else_branch": ["a = Abs(x)", "z = Exp(a)"]}


def test_clones_carry_attributes_metadata_and_doc_string():
    before = graph(BATCH_NORM)
    node = before.model.graph.node[0]
    node.name, node.doc_string = "norm", "the norm"
    node.metadata_props.add(key="author", value="somebody")
    before = TrainingGraph(before.model)
    after, recomputed = apply_schedule(before, [0, 1, 0, 2])
    clone = next(n for n in after.model.graph.node if role_of(n) == "clone")
    assert (clone.name, clone.doc_string, list(clone.attribute)) == (
        "norm/recompute",
        node.doc_string,
        list(node.attribute),
    )
    assert {p.key: p.value for p in clone.metadata_props} == {
        "author": "somebody",
        "onnx_sublinear.role": "clone",
        "onnx_sublinear.of": "y",
    }
    assert recomputed == {"BatchNormalization": 1}


def test_new_names_are_fresh_in_every_scope():
    before = graph(CAPTURE.replace("a2", "a_recompute"))
    inner = before.model.graph.node[-1].attribute[1].g
    for names in (inner.node[0].output, inner.node[1].input):
        names[0] = "a/recompute"
    before = TrainingGraph(before.model)
    after, _ = apply_schedule(before, [0, 1, 0, 2])
    assert "a/recompute_1 = Tanh(x)" in listing(after.model)
    assert check_rewrite(before.model, after.model) == []


@pytest.fixture(scope="module")
def deep():
    return TrainingGraph(deep_chain(24))


class TestPass:
    def test_the_deep_chain_is_cut(self, deep):
        result = RecomputePass()(deep)
        plan = result.facts["plan"]
        assert result.modified
        assert 0 < plan.clones == sum(result.facts["recomputed"].values())
        assert plan.forward_share <= 1
        assert plan.peak_bytes < 0.6 * min(run.peak_bytes for run in deep.simulations.values())
        assert Counter(role_of(n) for n in result.model.graph.node) == {"": len(deep.index.nodes), "clone": plan.clones}
        assert check_rewrite(deep.model, result.model) == []
        RecomputePass().ensures(deep, result)

    def test_the_last_layer_is_not_recomputed(self, deep):
        names = {n.output[0] for n in RecomputePass()(deep).model.graph.node}
        assert "y24/recompute" not in names

    def test_the_input_is_not_changed(self, deep):
        before = deep.model.SerializeToString(deterministic=True)
        RecomputePass()(deep)
        assert deep.model.SerializeToString(deterministic=True) == before

    def test_a_budget_is_met_with_less_work(self, deep):
        smallest = RecomputePass()(deep).facts["plan"]
        budget = 2 * smallest.peak_bytes
        plan = RecomputePass(budget=str(budget))(deep).facts["plan"]
        assert plan.peak_bytes <= budget
        assert 0 < plan.overhead < smallest.overhead

    def test_a_budget_out_of_reach_is_an_error(self, deep):
        with pytest.raises(BudgetError) as caught:
            RecomputePass(budget="1KiB")(deep)
        assert caught.value.smallest_peak_bytes >= caught.value.lower_bound_bytes > 1024

    @pytest.mark.parametrize("share", ["0%", "3%", "10%"])
    def test_an_overhead_limit_is_kept(self, deep, share):
        assert RecomputePass(max_overhead=share)(deep).facts["plan"].overhead <= float(share[:-1]) / 100

    @pytest.mark.parametrize("options", [{"budget": "much"}, {"max_overhead": "x"}, {"strategy": "magic"}])
    def test_malformed_options_are_usage_errors(self, deep, options):
        with pytest.raises(UsageError):
            RecomputePass(**options)(deep)

    def test_without_gradients_nothing_happens(self):
        g = graph("inference (float[8] x) => (float loss) { h = Tanh (x)\n loss = ReduceSum <keepdims = 0> (h) }")
        result = RecomputePass()(g)
        assert (result.modified, result.model) == (False, g.model)
        assert "no gradient section" in result.notes[0]

    def test_unknown_operators_are_kept_once(self, deep):
        altered = onnx.ModelProto()
        altered.CopyFrom(deep.model)
        altered.opset_import.add(domain="lab", version=1)
        for node in altered.graph.node:
            if node.name in ("tanh3", "tanh9"):
                node.op_type, node.domain = "Wave", "lab"
        for i in (4, 10):
            altered.graph.value_info.append(onnx.helper.make_tensor_value_info(f"y{i}", 1, [1024, 8]))
        result = RecomputePass()(TrainingGraph(altered))
        assert result.facts["plan"].clones > 0
        assert sum(n.op_type == "Wave" for n in result.model.graph.node) == 2

    @pytest.mark.parametrize("op_type", ["Dropout", "RandomNormalLike", "Bernoulli"])
    def test_random_operators_are_never_cloned(self, deep, op_type):
        altered = onnx.ModelProto()
        altered.CopyFrom(deep.model)
        altered.graph.initializer.append(onnx.helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True]))
        for node in altered.graph.node:
            if node.op_type == "Tanh" and int(node.name[4:]) % 3 == 0:
                node.op_type = op_type
                node.input.extend(["", "yes"] if op_type == "Dropout" else [])
        before = TrainingGraph(altered)
        result = RecomputePass()(before)
        assert result.facts["plan"].clones > 0
        assert sum(n.op_type == op_type for n in result.model.graph.node) == 8
        assert check_rewrite(altered, result.model) == []

    def test_a_lost_tensor_breaks_the_contract(self, deep):
        lost = onnx.ModelProto()
        lost.CopyFrom(deep.model)
        gone = next(i for i, n in enumerate(lost.graph.node) if n.name == "dW3")
        del lost.graph.node[gone]
        del lost.graph.output[4]
        with pytest.raises(PostconditionError, match="'recompute' lost tensor 'W3_grad'"):
            RecomputePass().ensures(deep, PassResult(deep.with_model(lost), True))

    def test_an_unsorted_result_breaks_the_contract(self, deep):
        unsorted = onnx.ModelProto()
        unsorted.CopyFrom(deep.model)
        unsorted.graph.node.insert(0, unsorted.graph.node.pop())
        with pytest.raises(PostconditionError, match="unsorted"):
            RecomputePass().ensures(deep, PassResult(deep.with_model(unsorted), True))

    def test_what_did_not_change_is_not_checked(self, deep):
        RecomputePass().ensures(deep, replace(PassResult(deep), modified=False))
