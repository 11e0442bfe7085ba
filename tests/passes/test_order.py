"""Pass `order`: what it adds, and that both orders of the runtime then keep to the schedule."""

import json
from collections import Counter
from pathlib import Path

import onnx
import pytest
from graphs import deep_chain, graph, listing, made, places
from judges import load_judge, needs_shared
from onnx import TensorProto, helper

from onnx_sublinear.feeds import make_feeds
from onnx_sublinear.passes.order import OrderPass
from onnx_sublinear.passes.recompute import RecomputePass
from onnx_sublinear.passes.rewriting import role_of
from onnx_sublinear.rewrite_check import check_rewrite
from onnx_sublinear.runtime_model import executed_orders
from onnx_sublinear.training_graph import TrainingGraph

OPSETS = [20, 11]  # Min takes int64 from 12 on; before, barriers multiply
BARRIER_OPERATORS = {"Size", "Shape", "Min", "Mul", "Reshape", "Constant"}


def recomputed(layers=24, **options):
    return RecomputePass()(TrainingGraph(deep_chain(layers, **options))).graph


def roles(model):
    return Counter(role_of(n) for n in model.graph.node)


def peaks(g):
    return {name: run.peak_bytes for name, run in g.simulations.items()}


def test_every_order_keeps_to_the_schedule():
    before = recomputed()
    result = OrderPass()(before)
    planned = result.facts["scheduled_bytes"]
    assert max(peaks(before).values()) > 1.5 * planned  # a file with clones alone saves little
    assert max(peaks(result.graph).values()) <= 1.03 * planned
    assert max(peaks(TrainingGraph(result.model)).values()) <= 1.03 * planned


@pytest.mark.parametrize("opset", OPSETS)
def test_only_barriers_are_added(opset):
    before = recomputed(opset=opset)
    result = OrderPass()(before)
    added = [n for n in result.model.graph.node if role_of(n) == "barrier"]
    assert len(added) == result.facts["barriers"] == len(result.model.graph.node) - len(before.model.graph.node) > 0
    assert {n.op_type for n in added} <= BARRIER_OPERATORS
    assert ("Min" in {n.op_type for n in added}) == (opset >= 12)
    assert check_rewrite(deep_chain(24, opset=opset), result.model) == []
    onnx.checker.check_model(result.model, full_check=True)


def test_the_clones_stay_in_their_places():
    """Each recomputation waits for the gradient that comes before it: its root reads a view."""
    result = OrderPass()(recomputed())
    views = {n.output[0] for n in result.model.graph.node if n.op_type == "Reshape"}
    clones = [n for n in result.model.graph.node if role_of(n) == "clone"]
    assert clones
    assert any(set(n.input) & views for n in clones)
    for order in executed_orders(result.graph.executed).values():
        run = [result.graph.executed.kernels[k].writes for k in order]
        names = [result.graph.executed.names[v] for writes in run for v in writes]
        first_clone = min(names.index(n.output[0]) for n in clones)
        assert first_clone > names.index("loss")


def test_views_and_known_tensors_are_declared():
    result = OrderPass()(recomputed())
    declared = {v.name: v for v in result.model.graph.value_info}
    outputs = {o.name for o in result.model.graph.output}
    for node in result.model.graph.node:
        if role_of(node) != "barrier" or node.op_type == "Reshape":
            assert all(o in declared or o in outputs for o in node.output), node.name
    views = [declared[n.output[0]] for n in result.model.graph.node if n.op_type == "Reshape"]
    assert all(d.dim_param for v in views for d in v.type.tensor_type.shape.dim)


def test_the_interface_and_the_input_stay():
    before = recomputed()
    data = before.model.SerializeToString(deterministic=True)
    after = OrderPass()(before).model
    assert before.model.SerializeToString(deterministic=True) == data
    assert (after.graph.input, after.graph.output) == (before.model.graph.input, before.model.graph.output)
    assert after.graph.initializer == before.model.graph.initializer


def test_weight_gradients_run_where_they_are_needed_least():
    """Without any clone: DEFAULT would run the leaves last and hold every activation and its gradient."""
    before = TrainingGraph(deep_chain(16))
    result = OrderPass()(before)
    assert roles(result.model)["clone"] == 0
    assert peaks(result.graph)["default"] < 0.75 * peaks(before)["default"]


def test_a_graph_that_holds_its_order_gets_no_barriers():
    """chain: one leaf, each node reads the one before."""
    text = (
        "c (float[8] x) => (float loss, float[8] d) { a = Exp (x)\n loss = ReduceSum <keepdims = 0> (a)\n d = Neg (a) }"
    )
    result = OrderPass()(graph(text))
    assert result.facts["barriers"] == 0
    assert sorted(made(result.model)) == ["a", "d", "loss"]


def test_an_empty_graph_is_left_alone():
    g = TrainingGraph(helper.make_model(helper.make_graph([], "empty", [], [])))
    assert not OrderPass()(g).modified


def test_symbolic_dims_take_barriers_that_hold_for_any_size():
    model = deep_chain(12)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    sizes = {n: TrainingGraph(model, {"batch": n}) for n in (512, 4096)}
    results = {n: OrderPass()(RecomputePass()(g).graph) for n, g in sizes.items()}
    for n, result in results.items():
        assert result.facts["barriers"] > 0
        assert check_rewrite(model, result.model) == []
        elsewhere = TrainingGraph(result.model, {"batch": n // 2})
        assert max(peaks(elsewhere).values()) < min(peaks(TrainingGraph(model, {"batch": n // 2})).values())


def test_tensors_of_unknown_rank_are_not_viewed():
    """What an unknown operator makes has no shape: its readers cannot be held back, and nothing fails."""
    model = deep_chain(12)
    model.opset_import.add(domain="lab", version=1)
    for node in model.graph.node:
        if node.name == "tanh5":
            node.op_type, node.domain = "Wave", "lab"
    result = OrderPass()(RecomputePass()(TrainingGraph(model)).graph)
    viewed = {n.input[0] for n in result.model.graph.node if n.op_type == "Reshape"}
    assert "y6" not in viewed
    assert len([n for n in result.model.graph.node if n.op_type == "Wave"]) == 1


def test_nodes_with_effects_keep_their_order():
    body = "\n".join(
        f"done{i}, sum{i} = com.microsoft.InPlaceAccumulatorV2 (w{i}, g{i}, reset)\n g{i} = Exp (h)" for i in range(3)
    )
    buffers = ", ".join(f"float[64] w{i}" for i in range(3))
    flags = ", ".join(f"bool[1] done{i}" for i in range(3))
    before = graph(
        f"""accumulate (float[64] x, bool[1] reset, {buffers}) => (float loss, {flags}) {{
          h = Tanh (x)
          loss = ReduceSum <keepdims = 0> (h)
          {body}
        }}"""
    )
    after = OrderPass()(before).model
    where = places(after, "done0", "done1", "done2")
    assert where == sorted(where)


def test_a_captured_tensor_stays_captured():
    """Barriers reroute input slots only; a branch keeps reading the tensor of its own."""
    before = graph(
        """capture (float[64, 64] x, bool c) => (float loss, float[64, 64] dx, float[64, 64] dy) {
          a = Exp (x)
          b = Exp (a)
          loss = ReduceSum <keepdims = 0> (b)
          dy = Mul (b, b)
          dx = If (c) <then_branch = yes () => (float[64, 64] y) { y = Neg (a) },
                       else_branch = no () => (float[64, 64] z) { z = Abs (a) }>
        }"""
    )
    after = OrderPass()(before).model
    (branching,) = [n for n in after.graph.node if n.op_type == "If"]
    assert [a.g.node[0].input[0] for a in branching.attribute] == ["a", "a"]
    assert check_rewrite(before.model, after) == []


class TestRuntime:
    """What onnxruntime itself makes of the file."""

    @staticmethod
    def dump(model, level, folder):
        ort = pytest.importorskip("onnxruntime")
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(folder / "dump.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(folder / "dump.onnx")

    @pytest.mark.parametrize("opset", OPSETS)
    @pytest.mark.parametrize("level", ["BASIC", "ALL"])
    def test_clones_are_not_merged(self, level, opset, tmp_path):
        before = recomputed(opset=opset)
        alone = Counter(n.op_type for n in self.dump(before.model, level, tmp_path).graph.node)
        held = Counter(n.op_type for n in self.dump(OrderPass()(before).model, level, tmp_path).graph.node)
        clones = Counter(n.op_type for n in before.model.graph.node if role_of(n) == "clone")
        assert clones["Tanh"] > 5
        assert alone["Tanh"] == 24  # without barriers the runtime merges every clone with its original
        assert held["Tanh"] == 24 + clones["Tanh"]
        assert held["MatMul"] == 24 + clones["MatMul"]

    @pytest.mark.parametrize("name", ["default", "priority"])
    def test_the_executed_order_is_the_predicted_one(self, name, tmp_path):
        ort = pytest.importorskip("onnxruntime")
        result = OrderPass()(recomputed())
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.execution_order = ort.ExecutionOrder.DEFAULT if name == "default" else ort.ExecutionOrder.PRIORITY_BASED
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")
        options.log_severity_level = 4
        session = ort.InferenceSession(result.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, make_feeds(result.model))
        events = json.loads(Path(session.end_profiling()).read_text())
        kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")]
        ran = [e["name"].removesuffix("_kernel_time") for e in sorted(kernels, key=lambda e: e["ts"])]
        node_of = {o: n.name for n in result.model.graph.node for o in n.output}
        runtime = result.graph.executed
        predicted = [
            node_of[runtime.names[v]] for k in executed_orders(runtime)[name] for v in runtime.kernels[k].writes[:1]
        ]
        assert ran == predicted


@needs_shared
def test_the_independent_simulator_agrees_on_the_orders():
    ordersim = load_judge("ordersim")
    result = OrderPass()(recomputed())
    nodes = list(result.model.graph.node)
    constants = {k for k, n in enumerate(nodes) if n.op_type == "Constant"}
    ours = executed_orders(result.graph.runtime)
    for name, theirs in (("default", ordersim.default_order(nodes)), ("priority", ordersim.priority_order(nodes))):
        assert [k for k in ours[name] if k not in constants] == [k for k in theirs if k not in constants]


def test_zeros_are_shared_per_rank():
    result = OrderPass()(recomputed())
    constants = [n for n in result.model.graph.node if n.op_type == "Constant"]
    ranks = [helper.get_attribute_value(n.attribute[0]).dims[0] for n in constants]
    assert ranks == [2]
    assert listing(result.model)[0].endswith("= Constant()")
    tensor = constants[0].attribute[0].t
    assert tensor.data_type == TensorProto.INT64
    assert not any(onnx.numpy_helper.to_array(tensor))
