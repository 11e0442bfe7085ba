from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, parser

from onnx_sublinear.errors import UsageError, VerificationError
from onnx_sublinear.verify import array_difference, check_rewrite, compare_models

# y = tanh(x w); loss = mean(y * y); dw = x' (2 y (1 - y * y)) / 32, with a dropout on the side.
ORIGINAL = """
<ir_version: 10, opset_import: ["" : 18]>
step (float[4,8] x, float[8,8] w, bool training) => (float[] loss, float[8,8] dw, float[4,8] noisy)
<float[1] two = {2}, float[1] n = {32}, float ratio = {0.5}>
{
  a = MatMul(x, w)
  y = Tanh(a)
  yy = Mul(y, y)
  loss = ReduceMean<keepdims=0>(yy)
  noisy, mask = Dropout<seed=7>(x, ratio, training)
  slope = Sub(n, yy)
  g = Mul(y, slope)
  xt = Transpose<perm=[1,0]>(x)
  dw = MatMul(xt, g)
}
"""


def original() -> ModelProto:
    return parser.parse_model(ORIGINAL)


def node(model: ModelProto, output: str) -> NodeProto:
    return next(n for n in model.graph.node if output in n.output)


def with_role(made: NodeProto, role: str, of: str = "") -> NodeProto:
    made.metadata_props.add(key="onnx_sublinear.role", value=role)
    if of:
        made.metadata_props.add(key="onnx_sublinear.of", value=of)
    return made


def clone(model: ModelProto, of: str, suffix: str = "/again") -> NodeProto:
    made = NodeProto()
    made.CopyFrom(node(model, of))
    made.output[:] = [f"{o}{suffix}" if o else "" for o in made.output]
    return with_role(made, "clone", of)


def barrier(op_type: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return with_role(helper.make_node(op_type, inputs, [output], **attributes), "barrier")


def rewritten() -> ModelProto:
    """`original()` with a and y recomputed behind loss, through a view of x."""
    model = original()
    zeros = helper.make_tensor("zeros", TensorProto.INT64, [2], [0, 0])
    again_a = clone(model, "a")
    again_a.input[0] = "x/view"
    again_y = clone(model, "y")
    again_y.input[0] = "a/again"
    added = [
        barrier("Constant", [], "zeros", value=zeros),
        barrier("Size", ["loss"], "token"),
        barrier("Min", ["token", "zeros"], "shape"),
        barrier("Reshape", ["x", "shape"], "x/view"),
        again_a,
        again_y,
    ]
    nodes = list(model.graph.node)
    at = nodes.index(node(model, "slope"))
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:at], *added, *nodes[at:]])
    node(model, "g").input[0] = "y/again"
    return model


def replaced_input(output: str, slot: int, name: str) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        node(model, output).input[slot] = name

    return edit


class TestStaticProof:
    def test_the_original_is_itself(self) -> None:
        assert check_rewrite(original(), original()) == []

    def test_clones_and_barriers_are_proven(self) -> None:
        assert check_rewrite(original(), rewritten()) == []

    def test_any_order_of_nodes_is_proven(self) -> None:
        model = rewritten()
        nodes = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend(reversed(nodes))
        assert check_rewrite(original(), model) == []

    def test_a_rewritten_model_can_be_the_original(self) -> None:
        assert check_rewrite(rewritten(), rewritten()) == []

    def test_commutative_operands_may_swap(self) -> None:
        model = rewritten()
        node(model, "g").input[:] = ["slope", "y/again"]
        assert check_rewrite(original(), model) == []

    def test_products_and_shape_tokens_are_proven(self) -> None:
        model = rewritten()
        node(model, "token").CopyFrom(barrier("Shape", ["loss"], "token", start=0, end=1))
        node(model, "shape").CopyFrom(barrier("Mul", ["zeros", "token"], "shape"))
        # The shape of a scalar is empty, so use that of x.
        node(model, "token").input[0] = "yy"
        assert check_rewrite(original(), model) == []

    @pytest.mark.parametrize(
        ("edit", "finding"),
        [
            (replaced_input("g", 0, "a/again"), "input 0 of Mul 'g' is 'a' instead of 'y'"),
            (replaced_input("y/again", 0, "x/view"), "input 0 of Tanh 'y/again' is 'x' instead of 'a'"),
            (replaced_input("dw", 0, "nowhere"), "input 0 of MatMul 'dw' is '?nowhere' instead of 'xt'"),
            (replaced_input("x/view", 1, "token"), "not provably a vector of zeros"),
            (replaced_input("shape", 1, "token"), "not provably a vector of zeros"),
            (replaced_input("shape", 0, "dw"), "Min is not provably a token"),
            (replaced_input("x/view", 0, "loss"), "has rank 0"),
            (lambda m: node(m, "xt").attribute[0].ints.reverse(), "attribute 'perm' of Transpose 'xt' changed"),
            (lambda m: m.graph.node.remove(node(m, "yy")), "Mul 'yy' is gone"),
            (
                lambda m: m.graph.node.append(helper.make_node("Relu", ["x"], ["more"])),
                "neither a node of the original",
            ),
            (lambda m: node(m, "zeros").attribute[0].t.int64_data.__setitem__(0, 3), "not provably"),
            (lambda m: m.graph.node.append(clone(m, "noisy")), "the random operator Dropout must never be cloned"),
            (lambda m: setattr(node(m, "a/again"), "op_type", "Gemm"), "is a Gemm, its original a MatMul"),
            (lambda m: setattr(m, "ir_version", 11), "ir_version changed"),
            (lambda m: setattr(m.opset_import[0], "version", 19), "opset_import changed"),
            (lambda m: m.graph.output.pop(), "graph output: 2 entries instead of 3"),
            (lambda m: setattr(m.graph.input[1], "name", "v"), "graph input: entry 1 ('w') changed"),
            (lambda m: m.graph.initializer.pop(), "initializer 'ratio' is gone"),
            (lambda m: m.graph.initializer[0].float_data.__setitem__(0, 3), "initializer 'two' changed"),
            (lambda m: node(m, "x/view").attribute.append(helper.make_attribute("allowzero", 1)), "allowzero"),
        ],
    )
    def test_every_departure_is_found(self, edit: Callable[[ModelProto], None], finding: str) -> None:
        model = rewritten()
        edit(model)
        found = check_rewrite(original(), model)
        assert any(finding in line for line in found), found

    def test_lost_metadata_is_found(self) -> None:
        before = original()
        before.metadata_props.add(key="author", value="me")
        node(before, "a").metadata_props.add(key="layer", value="1")
        assert len(check_rewrite(before, rewritten())) == 3  # the model's, the node's, the clone's

    def test_operators_with_state_are_not_cloned(self) -> None:
        for domain, op_type in (
            ("com.microsoft", "InPlaceAccumulatorV2"),
            ("lab.custom", "Fused"),
            ("", "RandomUniform"),
        ):
            model = parser.parse_model(
                '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1, "lab.custom" : 1]>'
                " g (float[2] x) => (float[2] y) { y = Relu(x) }"
            )
            model.graph.node.insert(0, helper.make_node(op_type, [], ["r"], domain=domain))
            twice = ModelProto()
            twice.CopyFrom(model)
            twice.graph.node.append(clone(model, "r"))
            assert any("must never be cloned" in line for line in check_rewrite(model, twice)), op_type

    def test_batch_normalization_clones_leave_running_statistics_out(self) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]>'
            " g (float[2,3] x, float[3] s, float[3] m) => (float[2,3] y, float[3] mean, float[3] var)"
            " { y, mean, var = BatchNormalization<training_mode=1>(x, s, s, m, m) }"
        )
        good, bad = ModelProto(), ModelProto()
        for copy, outputs in ((good, ["y/again", "", ""]), (bad, ["y/again", "mean/again", ""])):
            copy.CopyFrom(model)
            again = clone(model, "y")
            again.output[:] = outputs
            copy.graph.node.append(again)
        assert check_rewrite(model, good) == []
        assert any("advances the running statistics" in line for line in check_rewrite(model, bad))

    def test_batch_normalization_clones_may_advance_scratch(self) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]>'
            " g (float[2,3] x, float[3] s, float[3] m) => (float[2,3] y, float[3] mean, float[3] var)"
            " { y, mean, var = BatchNormalization<training_mode=1>(x, s, s, m, m) }"
        )
        good, other, shared = ModelProto(), ModelProto(), ModelProto()
        for copy, inputs in ((good, "mm"), (other, "sm"), (shared, "mm")):
            copy.CopyFrom(model)
            again = clone(model, "y")
            again.input[3:] = ["m1", "m2"]
            for name, read in zip(("m1", "m2"), inputs, strict=True):
                copy.graph.node.append(with_role(helper.make_node("Neg", [read], [name]), "scratch", "y"))
            copy.graph.node.append(again)
        reader = with_role(helper.make_node("Size", ["m1"], ["token"]), "barrier")
        shared.graph.node.append(reader)
        assert check_rewrite(model, good) == []
        assert check_rewrite(model, other) == ["input 3 of BatchNormalization 'y/again' is 's' instead of 'm'"]
        assert "scratch 'm1' is read 2 times" in check_rewrite(model, shared)

    def test_statistics_from_scratch_may_not_be_read(self) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]>'
            " g (float[2,3] x, float[3] s, float[3] m) => (float[3] z)"
            " { y, mean, var = BatchNormalization<training_mode=1>(x, s, s, m, m)  z = Neg(mean) }"
        )
        changed = ModelProto()
        changed.CopyFrom(model)
        again = clone(model, "y")
        again.input[3:] = ["m1", "m2"]
        scratch = [with_role(helper.make_node("Neg", ["m"], [n]), "scratch", "y") for n in ("m1", "m2")]
        nodes = list(changed.graph.node)
        del changed.graph.node[:]
        changed.graph.node.extend([nodes[0], *scratch, again, nodes[1]])
        assert check_rewrite(model, changed) == []
        node(changed, "z").input[0] = "mean/again"
        assert check_rewrite(model, changed) == ["input 0 of Neg 'z' is '?mean/again' instead of 'mean'"]

    def test_captures_may_read_clones_and_nothing_else(self) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]>'
            " g (float[2] x, bool c) => (float[2] y)"
            " { h = Tanh(x)  k = Neg(x)  y = If (c) <"
            "   then_branch = t () => (float[2] r) { r = Relu(h) },"
            "   else_branch = e () => (float[2] q) { q = Identity(k) } > }"
        )
        for name, findings in (("h/again", 0), ("k", 1)):
            changed = ModelProto()
            changed.CopyFrom(model)
            changed.graph.node.insert(2, clone(model, "h"))
            branch = next(a.g for a in node(changed, "y").attribute if a.name == "then_branch")
            branch.node[0].input[0] = name
            assert len(check_rewrite(model, changed)) == findings

    def test_external_data_may_move(self) -> None:
        before, after = original(), rewritten()
        for model, place in ((before, "a.bin"), (after, "b.bin")):
            tensor = model.graph.initializer[0]
            tensor.ClearField("float_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=place)
        assert check_rewrite(before, after) == []
        after.graph.initializer[0].dims[0] = 2
        assert check_rewrite(before, after) == ["initializer 'two' changed"]


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_nan_equals_nan_and_zeros_have_a_sign(self, dtype: type[np.floating[Any]]) -> None:
        values = np.array([np.nan, np.inf, -0.0, 1.0], dtype)
        assert array_difference(values, values.copy()) == ("", 0.0)
        reason, error = array_difference(values, np.array([np.nan, np.inf, 0.0, 1.0], dtype))
        assert reason
        assert error == 0.0
        assert array_difference(values, np.array([1.0, np.inf, -0.0, 1.0], dtype))[1] == np.inf
        assert array_difference(values, np.array([np.nan, -np.inf, -0.0, 1.0], dtype))[1] == np.inf

    def test_relative_error_is_of_the_largest_element(self) -> None:
        assert array_difference(np.array([4.0, 1e-9]), np.array([4.0, 2.0]))[1] == pytest.approx(0.5)

    def test_types_shapes_and_strings(self) -> None:
        ones = np.ones(2, np.float32)
        assert "type" in array_difference(ones, ones.astype(np.float64))[0]
        assert "shape" in array_difference(ones, ones[None])[0]
        assert array_difference(np.array(["a", "bc"]), np.array(["a", "bc"])) == ("", 0.0)
        assert array_difference(np.array(["a"]), np.array(["b"]))[1] == np.inf
        assert array_difference(np.array([True]), np.array([False]))[1] == np.inf
        assert array_difference(np.float32(2.0), np.float32(2.0)) == ("", 0.0)
        assert array_difference(np.zeros((0, 3)), np.zeros((0, 3))) == ("", 0.0)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[ModelProto, str], Path]:
    def save(model: ModelProto, name: str) -> Path:
        onnx.save(model, tmp_path / f"{name}.onnx")
        return tmp_path / f"{name}.onnx"

    return save


Save = Callable[[ModelProto, str], Path]


def feeds(training: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 8), "w": (8, 8)}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()} | {"training": np.array(training)}


class TestComparison:
    def test_equal_bits(self, saved: Save) -> None:
        found = compare_models(saved(original(), "a"), saved(rewritten(), "b"), feeds(training=True), runs=3)
        assert found.outputs == ("loss", "dw", "noisy")
        assert found.bitwise
        assert found.equal
        assert found.compared == 3
        found.require()

    def test_a_different_output_is_named(self, saved: Save) -> None:
        model = original()
        node(model, "g").input[0] = "a"
        found = compare_models(saved(original(), "a"), saved(model, "b"), feeds())
        assert [d.name for d in found.differences] == ["dw"]
        assert found.max_relative_error > 1e-3
        with pytest.raises(VerificationError, match="output 'dw' differs"):
            found.require()

    def test_the_last_bits_pass_with_a_tolerance(self, saved: Save) -> None:
        model = original()
        node(model, "slope").op_type = "Add"
        node(model, "slope").input[:] = ["n", "minus"]
        model.graph.node.insert(3, helper.make_node("Mul", ["yy", "less"], ["minus"]))
        model.graph.initializer.append(helper.make_tensor("less", TensorProto.FLOAT, [], [-1.0000001]))
        paths = saved(original(), "a"), saved(model, "b")
        assert not compare_models(*paths, feeds()).equal
        loose = compare_models(*paths, feeds(), level="all")
        assert loose.equal
        assert not loose.bitwise
        assert 0 < loose.max_relative_error <= loose.tolerance == 1e-6

    def test_state_that_advances_is_caught_in_a_later_run(self, saved: Save) -> None:
        model = original()
        node(model, "noisy").attribute[0].i = 8
        found = compare_models(saved(original(), "a"), saved(model, "b"), feeds(training=True))
        assert [d.name for d in found.differences] == ["noisy"]

    def test_random_outputs_are_set_apart(self, saved: Save) -> None:
        model = original()
        del node(model, "noisy").attribute[:]
        path = saved(model, "a")
        found = compare_models(path, saved(rewritten(), "b"), feeds(training=True))
        assert found.random_outputs == ("noisy",)
        assert found.equal
        assert found.compared == 2

    def test_nothing_to_compare_is_no_success(self, saved: Save) -> None:
        text = '<ir_version: 10, opset_import: ["" : 18]> g () => (float[9] y) { y = RandomNormal<shape=[9]>() }'
        model = parser.parse_model(text)
        found = compare_models(saved(model, "a"), saved(model, "b"), {})
        if found.differences or found.random_outputs:
            with pytest.raises(VerificationError, match="no output can be compared"):
                found.require()

    def test_a_negative_tolerance_is_refused(self, saved: Save) -> None:
        path = saved(original(), "a")
        with pytest.raises(UsageError, match="negative"):
            compare_models(path, path, feeds(), tolerance=-1.0)

    def test_sequences_and_strings_are_compared(self, saved: Save) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]>'
            " g (float[2] x, string[2] s) => (seq(float[2]) q, string[2] t)"
            " { q = SequenceConstruct(x, x)  t = Identity(s) }"
        )
        path = saved(model, "a")
        values = {"x": np.ones(2, np.float32), "s": np.array(["a", "bä"])}
        found = compare_models(path, path, values)
        assert found.outputs == ("q[0]", "q[1]", "t")
        assert found.bitwise
