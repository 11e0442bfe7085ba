"""The runtime's own graph: what it holds, that it needs no weights, and that orders worked out on it are executed."""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import deep_chain, graph, made, model
from onnx import TensorProto, helper, numpy_helper

from onnx_sublinear.errors import NoRuntimeGraphError
from onnx_sublinear.executed_graph import executed_graph
from onnx_sublinear.feeds import make_feeds
from onnx_sublinear.runtime import session_options
from onnx_sublinear.runtime_dump import dump_runtime, installed_build
from onnx_sublinear.training_graph import TrainingGraph

pytestmark = pytest.mark.skipif(installed_build() is None, reason="ONNX Runtime is not installed")

FUSED = "g (float[8, 8] x, float[8, 8] w, float[8] b) => (float[8, 8] y, float[8, 8] z) " + (
    "{ t = Transpose <perm = [1, 0]> (x)\n m = MatMul (t, w)\n y = Add (m, b)\n z = Exp (x) }"
)


def test_at_level_none_the_nodes_are_those_of_the_file():
    dump = dump_runtime(model(FUSED), "none")
    assert made(dump.model) == ["t", "m", "y", "z"]
    assert dump.indices == (0, 1, 2, 3)
    assert dump.types["m"].shape == (8, 8)
    assert dump.level == "none"


def test_a_fused_node_comes_last_and_keeps_its_output():
    dump = dump_runtime(model(FUSED), "all")
    assert made(dump.model)[-1] != "z"
    assert "t" not in made(dump.model)
    assert dump.indices[-1] >= 4


def test_origins_are_the_nodes_that_made_the_outputs():
    found = executed_graph(graph(FUSED), "all")
    by_output = dict(zip(made(found.dump.model), found.origins, strict=True))
    assert by_output["z"] == 3
    assert by_output["y"] == 2


def test_nodes_that_the_runtime_made_have_no_origin():
    text = "g (float16[8, 8] x) => (float16[8, 8] z) { y = Tanh (x)\n z = Erf (y) }"
    found = executed_graph(graph(text), "none")
    inserted = [o for o, n in zip(found.origins, found.index.nodes, strict=True) if n.output[0].startswith("Inserted")]
    assert inserted
    assert inserted[0] == -1


def with_external_weight(folder, bytes_of_weight):
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[bytes_of_weight // 32, 8])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", str(folder / "missing.data")), ("offset", "0"), ("length", str(bytes_of_weight))):
        weight.external_data.add(key=key, value=value)
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = [value("x", TensorProto.FLOAT, [4, bytes_of_weight // 32])]
    made_graph = helper.make_graph(nodes, "g", inputs, [value("y", TensorProto.FLOAT, [4, 8])], [weight])
    return helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_external_weights_are_not_needed_and_the_model_is_not_changed(tmp_path):
    proto = with_external_weight(tmp_path, 1 << 20)
    before = proto.SerializeToString()
    dump = dump_runtime(proto, "all")
    assert made(dump.model) == ["y"]
    assert not dump.model.graph.initializer[0].raw_data
    assert proto.SerializeToString() == before


def test_weights_beyond_what_a_saved_graph_can_hold_are_a_reason(tmp_path):
    with pytest.raises(NoRuntimeGraphError, match="weights are too large"):
        dump_runtime(with_external_weight(tmp_path, 3 << 30))


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dump_runtime(model(FUSED))
    assert list(tmp_path.iterdir()) == []


def test_a_refused_model_gives_the_runtimes_reason():
    proto = model("g (float[4] x) => (float[4] y) { y = lab.Unheard (x) }")
    with pytest.raises(NoRuntimeGraphError, match=r"cannot load it.*Unheard"):
        dump_runtime(proto)


LOOP = """
g (float[4] x, int64 n, bool k) => (float[4] y) {
  y = Loop (n, k, x) <
    body = b (int64 t, bool c, float[4] s) => (bool i, float[4] s2) { i = Identity (c) s2 = Add (s, x) }
  >
}
"""


def test_subgraphs_are_read():
    node = dump_runtime(model(LOOP), "none").model.graph.node[0]
    assert [n.op_type for n in node.attribute[0].g.node] == ["Identity", "Add"]


def test_attributes_are_read():
    gemm = model("g (float[4, 4] x) => (float[4, 4] y) { y = Gemm <alpha = 0.5, transB = 1> (x, x) }")
    found = dump_runtime(gemm, "none").model.graph.node[0].attribute
    assert {a.name: helper.get_attribute_value(a) for a in found}.items() >= {"alpha": 0.5, "transB": 1}.items()


def executed(proto, level, order, folder):
    """Indices of the nodes in the order in which a session runs them, by its profiler."""
    import onnxruntime

    options = session_options(level=level, order=order, threads=1)
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / f"{level}_{order}")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, make_feeds(proto, {}))
    events = json.loads(Path(session.end_profiling()).read_text())
    return [int(e["args"]["node_index"]) for e in events if e.get("name", "").endswith("_kernel_time")]


@pytest.mark.parametrize("order", ["default", "priority"])
@pytest.mark.parametrize("level", ["none", "basic", "all"])
@pytest.mark.parametrize("text", ["fused", "deep"])
def test_orders_are_executed(level, order, text, tmp_path):
    proto = model(FUSED) if text == "fused" else deep_chain(5)
    found = executed_graph(TrainingGraph(proto), level)
    expected = [found.dump.indices[k] for k in found.orders[order]]
    assert executed(proto, level, order, tmp_path) == expected


def test_symbolic_dims_are_bound_and_unknown_ones_are_named():
    text = "g (float[N, 8] x) => (float[N, 8] z) { y = Exp (x)\n z = Exp (y) }"
    assert executed_graph(graph(text, dims={"N": 32}), "none").simulations["default"].peak_bytes >= 2 * 32 * 8 * 4
    assert executed_graph(graph(text), "none").unknown == ("y", "z")


def test_inline_weights_are_read_with_their_dims_only():
    weight = numpy_helper.from_array(np.zeros((512, 512), np.float32), "w")
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    shape = value("x", TensorProto.FLOAT, [4, 512])
    made_graph = helper.make_graph(nodes, "g", [shape], [value("y", TensorProto.FLOAT, [4, 512])], [weight])
    proto = helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    read = dump_runtime(proto, "none").model.graph.initializer[0]
    assert (list(read.dims), read.raw_data) == ([512, 512], b"")
