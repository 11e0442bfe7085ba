"""float16 on the CPU provider: Before and After by topology, and the nodes that a live runtime makes of a model."""

import pytest
from onnx import TensorProto, helper, load

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.ops.float16 import held_types, runs_in_float32, with_casts
from onnx_sublinear.ops.tensor_types import TensorType

HALF, FLOAT = TensorProto.FLOAT16, TensorProto.FLOAT


def build(nodes, *, outputs, inputs="x", floats=()):
    """(op, inputs, output) triples on 4 x 4 tensors of float16, but for the names in `floats`."""
    made = []
    for op, given, result in nodes:
        to = {"to": FLOAT if result in floats else HALF} if op == "Cast" else {}
        made.append(helper.make_node(op, given.split(), [result], **to))
    names = {i for node in made for i in (*node.input, *node.output)} | set(inputs.split())
    values = {n: helper.make_tensor_value_info(n, FLOAT if n in floats else HALF, [4, 4]) for n in names}
    graph = helper.make_graph(made, "g", [values[n] for n in inputs.split()], [values[n] for n in outputs.split()])
    types = {n: TensorType(FLOAT if n in floats else HALF, (4, 4)) for n in names}
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), types


def text(model):
    return [f"{n.op_type} {' '.join(n.input)} -> {' '.join(n.output)}" for n in model.graph.node]


def cast(model, types):
    index = GraphIndex(model)
    return text(with_casts(index, types, index.order))


def test_casts_there_and_back_are_dropped_in_float_graphs_too():
    """a -> Cast to double -> Cast to float -> Sin: the casts are gone."""
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Cast", ["a"], ["d"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["d"], ["e"], to=FLOAT),
        helper.make_node("Sin", ["e"], ["z"]),
    ]
    info = {n: helper.make_tensor_value_info(n, FLOAT, [4, 4]) for n in "xz"}
    graph = helper.make_graph(nodes, "g", [info["x"]], [info["z"]])
    types = {n: TensorType(TensorProto.DOUBLE if n == "d" else FLOAT, (4, 4)) for n in "xadez"}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert cast(model, types) == ["Exp x -> a", "Sin a -> z"]


def test_chain_runs_in_float_from_end_to_end():
    model, types = build([("Tanh", "x", "y"), ("Exp", "y", "z")], outputs="z")
    assert cast(model, types) == [
        "Tanh InsertedCast_x -> InsertedCast_y",
        "Exp InsertedCast_y -> InsertedCast_z",
        "Cast x -> InsertedCast_x",
        "Cast InsertedCast_z -> z",
    ]


def test_cast_to_half_between_float_nodes_vanishes():
    model, types = build(
        [("Exp", "x", "a"), ("Cast", "a", "h"), ("Tanh", "h", "t"), ("Cast", "t", "b"), ("Exp", "b", "c")],
        outputs="c",
        floats="xabc",
    )
    assert cast(model, types) == ["Exp x -> a", "Tanh a -> InsertedCast_t", "Exp InsertedCast_t -> c"]


def test_node_with_a_float16_kernel_keeps_its_casts():
    model, types = build([("Tanh", "x", "y"), ("Transpose", "y", "z")], outputs="z")
    assert cast(model, types) == [
        "Tanh InsertedCast_x -> InsertedCast_y",
        "Transpose y -> z",
        "Cast x -> InsertedCast_x",
        "Cast InsertedCast_y -> y",
    ]


def test_node_between_float_nodes_is_forced_to_float():
    model, types = build([("Tanh", "x", "y"), ("Transpose", "y", "z"), ("Exp", "z", "w")], outputs="w")
    assert "Transpose InsertedCast_y -> InsertedCast_z" in cast(model, types)


def test_one_cast_serves_all_readers():
    model, types = build([("Tanh", "x", "y"), ("Exp", "x", "z")], outputs="y z")
    assert sum(line.startswith("Cast x ") for line in cast(model, types)) == 1


def test_graph_outputs_stay_float16():
    model, types = build([("Tanh", "x", "y"), ("Exp", "y", "z")], outputs="y z")
    assert "Cast InsertedCast_y -> y" in cast(model, types)
    assert held_types(GraphIndex(model), types) == {}


def test_model_without_float16_is_returned_as_it_is():
    model, types = build([("Tanh", "x", "y")], outputs="y", floats="xy")
    index = GraphIndex(model)
    assert with_casts(index, types, index.order) is model


def test_inserted_names_are_fresh():
    model, types = build([("Tanh", "x", "InsertedCast_x"), ("Exp", "InsertedCast_x", "z")], outputs="z")
    index = GraphIndex(with_casts(GraphIndex(model), types, [0, 1]))
    assert len(index.nodes) == 4


def test_input_model_is_not_changed():
    model, types = build([("Tanh", "x", "y"), ("Exp", "y", "z")], outputs="z")
    before = model.SerializeToString()
    cast(model, types)
    assert model.SerializeToString() == before


def test_held_in_float_between_float_nodes_only():
    model, types = build([("Tanh", "x", "y"), ("Exp", "y", "z"), ("Transpose", "z", "w")], outputs="w")
    assert held_types(GraphIndex(model), types) == {"y": TensorType(FLOAT, (4, 4))}


def test_layer_norm_has_a_kernel_in_the_stock_build_only():
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"])
    given = [TensorType(HALF, (4, 4)), TensorType(HALF, (4,))]
    assert not runs_in_float32(node, given)
    assert runs_in_float32(node, given, training=True)


NETS = {
    "chain": ([("Tanh", "x", "y"), ("Exp", "y", "z")], "z", ""),
    "forced": ([("Tanh", "x", "y"), ("Transpose", "y", "z"), ("Exp", "z", "w")], "w", ""),
    "mixed": ([("Cast", "a", "h"), ("Tanh", "h", "t"), ("Transpose", "h", "u"), ("MatMul", "t u", "m")], "m", "a"),
    "back to float": ([("Cast", "a", "h"), ("Exp", "h", "t"), ("Cast", "t", "b"), ("Relu", "b", "c")], "c", "abc"),
    "diamond": ([("Tanh", "x", "y"), ("Exp", "y", "p"), ("Transpose", "y", "q"), ("Add", "p q", "s")], "s", ""),
}


@pytest.mark.parametrize("net", NETS)
def test_the_runtime_makes_the_same_nodes(net, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    nodes, outputs, floats = NETS[net]
    model, types = build(nodes, outputs=outputs, inputs="a" if "a" in floats else "x", floats=floats)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "run.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    made = load(tmp_path / "run.onnx")
    index = GraphIndex(model)
    ours = with_casts(index, types, index.order)
    assert sorted(n.op_type for n in ours.graph.node) == sorted(n.op_type for n in made.graph.node)
