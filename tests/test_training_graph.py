"""TrainingGraph: facts are worked out once, handed on where they hold, and equal to those of the model itself."""

import pytest
from graphs import deep_chain, graph, model

from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.passes.inplace import InplacePass
from onnx_sublinear.passes.order import OrderPass
from onnx_sublinear.passes.recompute import RecomputePass
from onnx_sublinear.passes.share import SharePass
from onnx_sublinear.sizes import infer_sizes, runtime_types
from onnx_sublinear.training_graph import TrainingGraph

TEXT = "g (float[N, 8] x) => (float loss) { h = Tanh (x)\n loss = ReduceSum <keepdims = 0> (h) }"
DEEP = {"static": deep_chain(12), "opset 11": deep_chain(12, opset=11)}


def test_facts_are_worked_out_once():
    g = graph(TEXT)
    for fact in ("index", "sizes", "sections", "visible", "runtime", "simulations", "costs"):
        assert getattr(g, fact) is getattr(g, fact)


def test_another_model_starts_without_facts_and_with_the_same_options():
    g = graph(TEXT, dims={"N": 4}, losses=("h",), target="cuda")
    assert g.sections.losses == ("h",)
    other = g.with_model(model(TEXT))
    assert (other.dims, other.losses, other.target) == (g.dims, g.losses, g.target)
    assert other.index is not g.index
    assert g.model is not other.model


def test_facts_that_the_caller_knows_are_taken():
    g = graph(TEXT)
    other = g.with_model(model(TEXT), index=g.index, sizes=g.sizes, visible=g.visible)
    assert (other.index, other.sizes, other.visible) == (g.index, g.sizes, g.visible)
    assert other.index is g.index


def test_the_same_nodes_keep_every_fact():
    g = graph(TEXT)
    facts = {name: getattr(g, name) for name in ("index", "sizes", "visible", "runtime", "simulations", "costs")}
    other = g.with_model(model(TEXT), same_nodes=True)
    assert all(getattr(other, name) is fact for name, fact in facts.items())


def test_another_build_shares_the_facts_of_the_file_only():
    g = graph(TEXT, dims={"N": 4})
    facts = (g.index, g.sizes, g.runtime)
    other = g.for_build("training")
    assert (other.index, other.sizes) == facts[:2]
    assert other.runtime is not facts[2]
    assert other.on_training_build
    assert not g.on_training_build


def test_dims_bind_sizes_only():
    g = graph(TEXT, dims={"N": 100})
    assert g.sizes.bytes_of("h") == 3200
    assert g.sizes.types["h"].shape == ("N", 8)
    assert g.visible["h"].shape == ("N", 8)


@pytest.mark.parametrize(
    ("node", "needed"),
    [
        ("y = Tanh (x)", False),
        ("y = com.microsoft.Gelu (x)", False),
        ("y = com.microsoft.ReluGrad (x, x)", True),
        ("y = com.microsoft.SplitTraining (x, x)", True),
        ("y = MaxPoolGrad (x, x)", True),
        ("y = lab.ReluGrad (x, x)", False),
        ("y = If (c) <then_branch = t () => (float[8] a) { a = com.microsoft.ReluGrad (x, x) }, "
         "else_branch = e () => (float[8] b) { b = Neg (x) }>", True),
    ],
)  # fmt: skip
def test_which_graphs_need_the_training_build(node, needed):
    assert graph(f"g (float[8] x, bool c) => (float[8] y) {{ {node} }}").needs_training_build is needed


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("step", [RecomputePass(), InplacePass(), OrderPass()], ids=lambda step: step.name)
def test_what_a_pass_hands_on_is_what_the_model_says(name, step):
    g = TrainingGraph(DEEP[name])
    after = step(g).graph
    index = GraphIndex(after.model)
    sizes = infer_sizes(index)
    assert after.index.producer == index.producer
    assert after.index.readers == index.readers
    assert after.index.order == index.order
    assert after.sizes.types == sizes.types
    assert after.sizes.bound == sizes.bound
    assert after.sizes.unknown == sizes.unknown
    assert dict(after.visible) == runtime_types(index)


def test_simulations_handed_on_are_those_of_the_model():
    g = TrainingGraph(DEEP["static"])
    for step in (RecomputePass(), InplacePass(), OrderPass(), SharePass()):
        g = step(g).graph
        handed = {order: run.peak_bytes for order, run in g.simulations.items()}
        fresh = {order: run.peak_bytes for order, run in TrainingGraph(g.model).simulations.items()}
        assert handed == fresh, step.name


def test_both_orders_are_simulated():
    runs = graph(TEXT, dims={"N": 100}).simulations
    assert list(runs) == ["default", "priority"]
    assert all(run.peak_bytes >= 3200 for run in runs.values())
