"""Types and sizes: small graphs that mean something on their own, then the reference graphs against the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onnx_sublinear.errors import GraphError, UsageError
from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.ops.inference import Scope, World
from onnx_sublinear.sizes import (
    TensorSizes,
    TensorType,
    element_bits,
    free_symbols,
    infer_sizes,
    runtime_types,
    tensor_bytes,
)

F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def index_of(graph: str, opset: int = 17, ir: int = 8, functions: str = "") -> GraphIndex:
    header = f'<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1, "net.local" : 1]>'
    return GraphIndex(parser.parse_model(f"{header}\n{graph}\n{functions}"))


def sizes_of(graph: str, dims: dict[str, int] | None = None, **kwargs: Any) -> TensorSizes:
    return infer_sizes(index_of(graph, **kwargs), dims)


# Bytes.


def test_bytes_are_exact_and_sub_byte_types_round_up_per_tensor() -> None:
    assert tensor_bytes(TensorType(F, (3, 5))) == 60
    assert tensor_bytes(TensorType(TensorProto.UINT4, (3,))) == 2
    assert tensor_bytes(TensorType(TensorProto.INT4, (3, 3))) == 5
    assert tensor_bytes(TensorType(TensorProto.FLOAT8E5M2, (7,))) == 7
    assert tensor_bytes(TensorType(TensorProto.BFLOAT16, (7,))) == 14
    assert tensor_bytes(TensorType(TensorProto.COMPLEX128, ())) == 16


def test_bytes_of_zero_size_scalar_and_huge_tensors() -> None:
    assert tensor_bytes(TensorType(F, (0, 5))) == 0
    assert tensor_bytes(TensorType(BOOL, ())) == 1
    assert tensor_bytes(TensorType(F, (2**40, 2**40))) == 2**82


def test_bytes_are_unknown_without_a_dim_a_rank_or_a_width() -> None:
    assert tensor_bytes(TensorType(F, (None, 2))) is None
    assert tensor_bytes(TensorType(F, None)) is None
    assert tensor_bytes(TensorType(TensorProto.STRING, (2,))) is None
    assert tensor_bytes(TensorType(0, None)) is None
    assert tensor_bytes(TensorType(F, ("N", 2))) is None
    assert tensor_bytes(TensorType(F, ("N", 2)), {"N": 3}) == 24
    assert element_bits(TensorProto.STRING) is None


# Symbols.

SYMBOLIC_CHAIN = """
g (float[batch, 4, 6] x) => (float[batch, 24] y) <int64[1] zero = {0}, int64[1] minus = {-1}> {
  s = Shape(x)
  b = Gather(s, zero)
  target = Concat<axis = 0>(b, minus)
  y = Reshape(x, target)
  back = Reshape(y, s)
  filled = ConstantOfShape(s)
  wide = Expand(zero, b)
}
"""


def test_a_symbol_survives_shape_arithmetic() -> None:
    found = sizes_of(SYMBOLIC_CHAIN).types
    assert found["y"] == TensorType(F, ("batch", 24))
    assert found["back"] == TensorType(F, ("batch", 4, 6))
    assert found["filled"] == TensorType(F, ("batch", 4, 6))
    assert found["wide"] == TensorType(I64, ("batch",))


def test_dims_bind_symbols() -> None:
    sizes = sizes_of(SYMBOLIC_CHAIN, {"batch": 5})
    assert sizes.types["y"].shape == ("batch", 24)
    assert sizes.bound["y"].shape == (5, 24)
    assert sizes.bytes_of("y") == 480
    assert sizes.bytes_of("nothing of that name") is None
    assert sizes.unknown == []
    assert "y" in sizes_of(SYMBOLIC_CHAIN).unknown


def test_a_product_with_a_symbol_is_no_symbol_but_has_a_bound_size() -> None:
    graph = """g (float[batch, 4, 6] x) => (y) <int64[2] t = {-1, 6}> { y = Reshape(x, t) }"""
    assert sizes_of(graph).types["y"].shape == (None, 6)
    assert sizes_of(graph, {"batch": 2}).bound["y"].shape == (8, 6)


def test_torch_style_expand_to_where_minus_one() -> None:
    graph = """
    g (float[batch, 1] x, float[batch, 3] like) => (y) <int64[2] minus = {-1, -1}, int64[1] two = {2}> {
      ones = ConstantOfShape<value = int64[1] {1}>(two)
      s = Shape(like)
      keep = Equal(s, minus)
      target = Where(keep, ones, s)
      y = Expand(x, target)
    }"""
    assert sizes_of(graph).types["y"].shape == ("batch", 3)


def test_two_symbols_are_never_taken_for_one() -> None:
    found = sizes_of("g (float[a, 3] x, float[b, 3] y) => (z) { z = Add(x, y) }")
    assert found.types["z"].shape == (None, 3)
    assert found.unknown == ["z"]


def test_symbols_of_value_info_can_be_bound() -> None:
    graph = "g (float[4] x) => (y) <float[u0] n> { n = net.local.Pick(x)\n y = Relu(n) }"
    assert sizes_of(graph).unknown == ["n", "y"]
    assert sizes_of(graph, {"u0": 3}).bytes_of("y") == 12
    assert free_symbols(index_of(graph)) == []
    assert free_symbols(index_of("g (float[b, a] x, float[a, c] w) => (y) { y = MatMul(x, w) }")) == ["b", "a", "c"]


@pytest.mark.parametrize(("dims", "words"), [({"bach": 2}, ("bach", "batch")), ({"batch": 0}, ("batch", "0"))])
def test_wrong_dims_are_the_users_error(dims: dict[str, int], words: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        sizes_of(SYMBOLIC_CHAIN, dims)
    assert all(word in caught.value.message + caught.value.hint for word in words)


def test_a_negative_dim_value_is_unknown() -> None:
    index = index_of("g (float[7, 2] x) => (y) { y = Relu(x) }")
    index.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert infer_sizes(index).types["y"].shape == (None, 2)


VALUES = """
g () => (gathered, joined, cut, back, flipped, unsq, sq, resh, exp, tiled, tr, truth, picked, filled, ramp, nz, cast,
         flat, s0, s1, div, mod, pw, mn, mx, sub, neg, prod, rsum, size, shape, down) <
  int64[2, 3] m = {1, -2, 3, 4, 0, 6}, int64[3] v = {7, -7, 2}, int64[3] w = {2, 2, -2}, int64[1] one = {1},
  int64[1] zero = {0}, int64[1] two = {2}, int64[1] last = {-1}, int64[1] far = {-9223372036854775807},
  int64 a = {1}, int64 b = {9}, int64 c = {3}, float[3] f = {1.5, -2.5, 3}, int64[2] target = {-1, 2},
  int64[2] reps = {2, 1}, int64[3] wide = {2, 1, 3}
> {
  gathered = Gather<axis = 1>(m, last)
  joined = Concat<axis = 0>(v, w)
  cut = Slice(m, one, two, one)
  back = Slice(v, last, far, zero, last)
  flipped = Slice(v, two, zero, zero, last)
  unsq = Unsqueeze(v, one)
  sq = Squeeze(unsq, one)
  resh = Reshape(m, target)
  exp = Expand(v, wide)
  tiled = Tile(m, reps)
  tr = Transpose(m)
  truth = Greater(v, w)
  picked = Where(truth, v, w)
  filled = ConstantOfShape<value = int64[1] {5}>(two)
  ramp = Range(a, b, c)
  nz = NonZero(m)
  cast = Cast<to = 7>(f)
  flat = Flatten<axis = 1>(m)
  s0, s1 = Split<axis = 0>(m)
  div = Div(v, w)
  mod = Mod(v, w)
  pw = Pow(v, two)
  mn = Min(v, w)
  mx = Max(v, w)
  sub = Sub(v, w)
  neg = Neg(v)
  prod = ReduceProd<axes = [1]>(m)
  rsum = ReduceSum<keepdims = 0>(m, one)
  size = Size(m)
  shape = Shape(m)
  down = Floor(f)
}"""


def test_small_values_are_those_of_the_reference_evaluator() -> None:
    index = index_of(VALUES)
    names = [o.name for o in index.graph.output]
    results = dict(zip(names, ReferenceEvaluator(index.model).run(None, {}), strict=True))
    scope = Scope(World({}, {}), index.opset, {})
    scope.define_initializers(index.graph)
    scope.run(index.nodes)
    for name, expected in results.items():
        value = scope.value_of(name)
        assert value is not None, name
        assert value.shape == expected.shape, name
        assert list(value.items) == expected.ravel().tolist(), name
        assert scope.type_of(name) == TensorType(value.elem_type, value.shape)


def test_nothing_above_1024_elements_is_computed() -> None:
    graph = "g () => (y) <int64[1] n = {COUNT}, int64[1] one = {1}> { y = Expand(one, n) }"
    for count, known in ((1024, True), (1025, False)):
        index = index_of(graph.replace("COUNT", str(count)))
        scope = Scope(World({}, {}), index.opset, {})
        scope.define_initializers(index.graph)
        scope.run(index.nodes)
        assert (scope.value_of("y") is not None) == known
        assert scope.type_of("y") == TensorType(I64, (count,))


# What must not be executed, read or believed.


def test_bombs_are_sized_and_not_run() -> None:
    graph = """
    g () => (y) <int64[1] big = {17592186044416}, int64 n = {1099511627776}, int64 o = {0}, int64 i = {1},
                 float[2] pair = {1, 2}, int64[2] square = {1099511627776, 1099511627776}> {
      bomb = ConstantOfShape(big)
      y = Relu(bomb)
      ramp = Range(o, n, i)
      tiles = Tile(pair, big)
      all = ConstantOfShape(square)
      flat = Flatten<axis = 0>(all)
    }"""
    sizes = sizes_of(graph)
    assert sizes.bytes_of("y") == 2**46
    assert sizes.bytes_of("ramp") == 2**43
    assert sizes.bytes_of("tiles") == 2**47
    assert sizes.bytes_of("flat") == 2**82


def test_external_and_short_data_are_never_read() -> None:
    index = index_of("g (float[6] x) => (y) <int64[2] t = {2, 3}> { y = Reshape(x, t) }")
    assert infer_sizes(index).types["y"].shape == (2, 3)
    index.graph.initializer[0].ClearField("int64_data")
    index.graph.initializer[0].raw_data = b"\0" * 8
    assert infer_sizes(index).types["y"].shape == (None, None)
    index.graph.initializer[0].data_location = TensorProto.EXTERNAL
    assert infer_sizes(index).types["y"].shape == (None, None)


def test_the_value_of_an_overridable_initializer_is_not_used() -> None:
    graph = "g (float[6] x, int64[2] t = {2, 3}) => (y) { y = Reshape(x, t) }"
    assert sizes_of(graph).types["y"].shape == (None, None)
    assert sizes_of(graph, ir=3).types["y"].shape == (2, 3)  # before IR 4 every initializer had to be an input


def test_a_stale_value_info_does_not_win() -> None:
    found = sizes_of("g (float[2, 3] x) => (y) <float[3, 2, 1] h> { h = Relu(x)\n y = Relu(h) }").types
    assert found["h"].shape == found["y"].shape == (2, 3)


def test_value_info_fills_what_inference_leaves_open() -> None:
    found = sizes_of(
        "g (float[N, 3] x, bool[N] k) => (y) <float[7, 3] h> { h = Compress<axis = 0>(x, k)\n y = Relu(h) }"
    )
    assert found.types["y"].shape == (7, 3)


def test_contradicting_element_types_are_refused() -> None:
    with pytest.raises(GraphError, match=r"'h' is declared as double.*float"):
        sizes_of("g (float[2] x) => (y) <double[2] h> { h = Relu(x)\n y = Relu(h) }")


def test_a_contradiction_inside_an_operator_leaves_its_output_to_value_info() -> None:
    found = sizes_of("g (float[2, 3] x, float[4, 5] w) => (y) <float[2, 5] h> { h = MatMul(x, w)\n y = Relu(h) }")
    assert found.types["y"].shape == (2, 5)


def test_an_unknown_operator_is_known_by_its_declaration_only() -> None:
    sizes = sizes_of("g (float[2] x) => (z) <float[3] h> { h, i = net.local.Gate(x)\n y = Relu(h)\n z = Relu(i) }")
    assert sizes.bytes_of("y") == 12
    assert sizes.unknown == ["i", "z"]


@pytest.mark.parametrize(
    "node",
    [
        "y = Gather<axis = 9>(x, i)",
        "y = Concat<axis = 5>(i, i)",
        "y = Slice(x, i)",
        "y = OneHot<axis = 7>(i, i, i)",
        "y = com.microsoft.ConcatTraining<axis = 4>(x, x)",
        "y = com.microsoft.FusedConv<strides = [1]>(x, x)",
        "y = com.microsoft.MaxPoolGrad(x)",
        "y = com.microsoft.BroadcastGradientArgs(i)",
        "y = Shape()",
        "y = Loop() <body = b () => () { q = Relu(x) }>",
        "y = Scan<num_scan_inputs = 9, body = b () => (q) { q = Relu(x) }>(x)",
    ],
)
def test_a_node_that_breaks_its_specification_has_an_unknown_output(node: str) -> None:
    graph = f"g (float[2, 3] x) => (y) <int64[2] i = {{1, 0}}> {{ {node} }}"
    try:
        index = index_of(graph)
    except parser.ParseError:
        pytest.skip("this version of the parser refuses the text")
    assert infer_sizes(index).bytes_of("y") is None


# Kinds of values.


def test_strings_sequences_and_optionals_have_no_size() -> None:
    graph = """
    g (string[4] names, float[2, 3] x, int64[4] i) => (y, again, back) <int64 zero = {0}> {
      again = Gather(names, i)
      seq = SequenceConstruct(x, x)
      y = SequenceAt(seq, zero)
      opt = Optional(x)
      back = OptionalGetElement(opt)
    }"""
    sizes = sizes_of(graph)
    assert sizes.types["seq"] == sizes.types["opt"] == TensorType(0, None)
    assert sizes.types["again"] == TensorType(TensorProto.STRING, (4,))
    assert sizes.types["y"].shape == sizes.types["back"].shape == (2, 3)
    assert sizes.unknown == ["again", "seq", "opt"]


def test_sparse_initializers_count_as_the_dense_tensor_they_become() -> None:
    index = index_of("g (float[2, 3] x) => (y) <float[3, 4] w = {}> { y = MatMul(x, w) }")
    del index.graph.initializer[:]
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64))
    index.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 4]))
    assert infer_sizes(GraphIndex(index.model)).types["y"].shape == (2, 4)


def test_zero_size_tensors() -> None:
    graph = """
    g (float[4, 3] x) => (y) <int64[1] zero = {0}, int64[1] axes = {0}> {
      none = Slice(x, zero, zero, axes)
      y = Concat<axis = 0>(none, x)
    }"""
    sizes = sizes_of(graph)
    assert sizes.bytes_of("none") == 0
    assert sizes.bytes_of("y") == 48


def test_opset_9_gives_axes_and_slices_as_attributes() -> None:
    graph = """
    g (float[N, 4, 1] x, float[4] c) => (y, mean) {
      cut = Slice<axes = [1], starts = [1], ends = [3]>(x)
      flat = Squeeze<axes = [2]>(cut)
      y = ReduceSum<axes = [1], keepdims = 0>(flat)
      norm, mean, var, smean, svar = BatchNormalization(x, c, c, c, c)
      up = Unsqueeze<axes = [0]>(y)
    }"""
    found = sizes_of(graph, opset=9, ir=3).types
    assert found["flat"].shape == ("N", 2)
    assert found["y"].shape == ("N",)
    assert found["up"].shape == (1, "N")
    assert found["svar"].shape == found["mean"].shape == (4,)


# Bodies.


def test_if_keeps_what_both_branches_agree_on() -> None:
    graph = """
    g (bool c, float[2, 3] x) => (y) <int64[2] t = {3, 2}> {
      h = Relu(x)
      y, z = If(c) <
        then_branch = a () => (float[p, q] y1, float[r, s] z1) { y1 = Relu(h)\n z1 = Relu(h) },
        else_branch = b () => (float[p, q] y2, float[r, s] z2) { y2 = Tanh(h)\n z2 = Reshape(h, t) }
      >
    }"""
    found = sizes_of(graph).types
    assert found["y"].shape == (2, 3)
    assert found["z"].shape == (None, None)


LOOP = """
g (float[2, 3] x, bool go) => (last) <int64 trips = {5}, bool yes = {1}> {
  h = Relu(x)
  last, grown, all = Loop(trips, CONDITION, h, x) <
    body = b (int64 i, bool c, state, other) => (c_out, next, wider, each) {
      c_out = Identity(c)
      next = Add(state, h)
      wider = Concat<axis = 0>(other, other)
      each = Transpose(next)
    }
  >
}"""


def test_loop_states_keep_the_dims_that_no_iteration_changes() -> None:
    found = sizes_of(LOOP.replace("CONDITION", "yes")).types
    assert found["last"].shape == (2, 3)
    assert found["grown"].shape == (None, 3)
    assert found["all"].shape == (5, 3, 2)


def test_a_loop_that_may_stop_early_has_an_unknown_number_of_slices() -> None:
    assert sizes_of(LOOP.replace("CONDITION", "go")).types["all"].shape == (None, 3, 2)


def test_scan_outputs_get_the_sequence_dim() -> None:
    graph = """
    g (float[T, B, 8] xs, float[B, 8] h0) => (hs) {
      last, hs = Scan<num_scan_inputs = 1, scan_output_axes = [1],
        body = b (h, x) => (next, out) { next = Add(h, x)\n out = Relu(next) }
      >(h0, xs)
    }"""
    found = sizes_of(graph).types
    assert found["last"].shape == ("B", 8)
    assert found["hs"].shape == ("B", "T", 8)


def test_a_name_of_a_body_hides_the_outer_one() -> None:
    graph = """
    g (bool c, float[2, 3] h) => (y) {
      y = If(c) <
        then_branch = a () => (y1) <float[7] w = {1, 2, 3, 4, 5, 6, 7}> { h = net.local.Thing(w)\n y1 = Relu(h) },
        else_branch = b () => (y2) { y2 = Relu(h) }
      >
    }"""
    assert sizes_of(graph).unknown == ["y"]


def test_functions_are_walked_with_the_types_and_attributes_of_the_call() -> None:
    functions = """
    <domain: "net.local", opset_import: ["" : 17, "net.local" : 1]>
    Layer <k> (x, w) => (y, t) { h = MatMul(x, w)\n y = net.local.Act(h)\n t = Transpose<perm: ints = @k>(y) }
    <domain: "net.local", opset_import: ["" : 17]>
    Act (x) => (y) { y = Relu(x) }
    """
    graph = """
    g (float[N, 4] x, float[4, 5] w) => (b) {
      a, s = net.local.Layer<k = [1, 0]>(x, w)
      b, t = net.local.Layer<k = [0, 1]>(x, w)
    }"""
    found = sizes_of(graph, functions=functions).types
    assert found["a"].shape == ("N", 5)
    assert found["s"].shape == (5, "N")
    assert found["t"].shape == ("N", 5)


def test_a_function_that_calls_itself_ends() -> None:
    functions = '<domain: "net.local", opset_import: ["net.local" : 1]> F (x) => (y) { y = net.local.F(x) }'
    assert sizes_of("g (float[2] x) => (y) { y = net.local.F(x) }", functions=functions).unknown == ["y"]


# What the runtime sees.


def test_the_runtime_does_no_shape_arithmetic_and_forgets_loop_states() -> None:
    found = runtime_types(index_of(SYMBOLIC_CHAIN))
    assert found["y"].shape == ("batch", 24)  # declared
    assert found["back"].shape == (None, None, None)
    assert runtime_types(index_of(LOOP.replace("CONDITION", "yes")))["last"].shape is None


def test_the_runtime_knows_a_blind_gradient_by_its_declaration_only() -> None:
    graph = """
    g (float[2, 3, 4] dy, float[2, 3, 4] x, float[3] s) => (dx) INFO {
      dx, ds, db = com.microsoft.NAME(dy, x, s, s, s)
    }"""
    bare = graph.replace("NAME", "BatchNormalizationGrad")
    assert runtime_types(index_of(bare.replace("INFO", ""))).get("ds") is None
    assert runtime_types(index_of(bare.replace("INFO", "<float[3] ds>")))["ds"].shape == (3,)
    assert runtime_types(index_of(graph.replace("NAME", "LayerNormalizationGrad").replace("INFO", "")))["ds"].shape == (
        3,
    )


def test_the_runtime_prefers_numbers_and_forgets_contradictions() -> None:
    found = runtime_types(index_of("g (float[N, 3] x) => (y) <float[2, 4] h> { h = Relu(x)\n y = Relu(h) }"))
    assert found["h"].shape == (None, None)
    found = runtime_types(index_of("g (float[N, 3] x) => (y) <float[2, M] h> { h = Relu(x)\n y = Relu(h) }"))
    assert found["y"].shape == (2, 3)


# The reference graphs against what the runtime makes.

SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL = (
    *("graphs/ad_mlp_sym", "graphs/ad_lenet_bn", "graphs/ad_if_mlp_else", "graphs/ad_lstm_unrolled_T16"),
    *("graphs/ad_nn_lstm", "graphs/aot_mlp_sym", "graphs/aot_lenet_bn_sym", "graphs/jax_gru_scan_T64"),
    *("graphs/jax_mlp_sym", "graphs/ort_lenet_bn", "graphs/ort_nn_lstm", "graphs/ort_bert_L2_dropout"),
    *("graphs/ort_siamese_shared", "graphs/ort_lstm_unrolled_T16", "graphs/ortraw_lenet_bn", "graphs/ortraw_mlp"),
    *("cases/b05_unused_node_outputs", "cases/b07_zero_size_tensors", "cases/c02_scan_forward_backward"),
    *("cases/c03_nested_capture", "cases/c06_local_functions", "cases/c07_empty_optional_names"),
    *("cases/c09_sparse_initializer", "cases/c27_old_opset", "cases/c31_wrong_rank_value_info"),
)


def _feeds(path: Path, model: ModelProto) -> dict[str, Any]:
    """The recorded feeds of a graph, else zeros with 4 for every unknown dim."""
    for archive in (path.with_suffix(".npz"), path.with_suffix(".feeds.npz")):
        if archive.exists():
            with np.load(archive) as data:
                return {n.removeprefix("in/"): data[n] for n in data.files if not n.startswith("ref/")}
    defaults = {t.name for t in model.graph.initializer}
    return {
        v.name: np.zeros(
            [d.dim_value or 4 for d in v.type.tensor_type.shape.dim],
            helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type),
        )
        for v in model.graph.input
        if v.name not in defaults
    }


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "stripped"])
@pytest.mark.parametrize("name", REAL)
def test_every_size_is_what_the_runtime_makes(name: str, declared: bool) -> None:
    """All intermediate tensors as outputs of the graph; with and without the help of value_info."""
    ort = pytest.importorskip("onnxruntime")
    path = SHARED / f"{name}.onnx"
    if not path.exists():
        pytest.skip("the reference graphs are not there")
    model = onnx.load(path)
    feeds = _feeds(path, model)
    dims: dict[str, int] = {}
    for info in model.graph.input:
        for dim, value in zip(info.type.tensor_type.shape.dim, np.shape(feeds.get(info.name, ())), strict=False):
            if dim.dim_param:
                dims.setdefault(dim.dim_param, value)
    seen = onnx.load(path)
    if not declared:  # only for us: training 1.19 crashes in MaxPoolGrad when the shape of its output is not declared
        del seen.graph.value_info[:]
    sizes = infer_sizes(GraphIndex(seen), dims)

    given = {o.name for o in model.graph.output}
    made = [o for node in model.graph.node for o in node.output if o and o not in given]
    model.graph.output.extend(onnx.ValueInfoProto(name=o) for o in made)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        if "is not a registered function/op" in str(e):
            pytest.skip("needs onnxruntime-training")
        raise
    wanted = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    for tensor, value in zip(names, session.run(names, {n: feeds[n] for n in wanted}), strict=True):
        known = sizes.bound[tensor]
        assert known.shape == value.shape, tensor
        assert helper.tensor_dtype_to_np_dtype(known.elem_type) == value.dtype, tensor
        assert sizes.bytes_of(tensor) == value.nbytes, tensor
    assert sizes.unknown == []
