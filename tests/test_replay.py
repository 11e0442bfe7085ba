"""Replay: the same figures and orders as the simulator that it stands in for."""

import pytest
from graphs import deep_chain
from hypothesis import given
from hypothesis import strategies as st

from onnx_sublinear.orders import ByPriority, DepthFirst
from onnx_sublinear.replay import Replay
from onnx_sublinear.runtime_model import Kernel, RuntimeGraph, default_order, executed_orders, priority_order, simulate
from onnx_sublinear.training_graph import TrainingGraph


@st.composite
def files(draw):
    """Random files with views, in-place kernels, outputs, Size-like and late kernels."""
    graph = RuntimeGraph(frame_bytes=100, value_frame_bytes=3)
    for n in range(2):
        graph.add_value(f"x{n}", 0, 1, external=True)
    for k in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.integers(0, len(graph.names) - 1), min_size=0, max_size=3))
        layout = draw(st.sampled_from([-1, 1, 2]))
        size = 64 * layout if layout > 0 else draw(st.sampled_from([64, 128]))  # one layout, one size
        made = graph.add_value(f"v{k}", size, layout, output=draw(st.booleans()))
        kind = draw(st.sampled_from(["plain", "view", "in-place"])) if reads else "plain"
        if kind == "view":
            graph.sizes[made], graph.layouts[made] = graph.sizes[reads[0]], graph.layouts[reads[0]]
        pair = ((reads[0], made),) if reads else ()
        graph.kernels.append(
            Kernel(
                tuple(reads),
                (made,),
                alias=pair if kind == "view" else (),
                inplace=pair if kind == "in-place" else (),
                workspace_bytes=draw(st.sampled_from([0, 32])),
                first=draw(st.booleans()),
                late=draw(st.booleans()),
            )
        )
    return graph


@given(graph=files())
def test_profiles_and_orders_are_those_of_the_simulator(graph):
    replay = Replay(graph)
    for order in executed_orders(graph).values():
        assert replay.profile(order).tolist() == simulate(graph, order, reuse=False).profile
    assert DepthFirst(graph).order() == default_order(graph)
    assert ByPriority(graph).order() == priority_order(graph)


def test_a_real_graph():
    graph = TrainingGraph(deep_chain(12)).executed
    for order in executed_orders(graph).values():
        assert Replay(graph).profile(order).tolist() == simulate(graph, order, reuse=False).profile


@given(graph=files(), data=st.data())
def test_what_is_searched_first_is_as_leaves_at_the_end_of_the_file(graph, data):
    first = data.draw(st.lists(st.integers(0, len(graph.kernels) - 1), unique=True))
    for kernel in graph.kernels:
        kernel.late = False
    found = DepthFirst(graph).order(first)
    for k in reversed(first):
        token = graph.add_value("", 64, -1)
        graph.kernels.append(Kernel(graph.kernels[k].writes, (token,)))
    with_leaves = [k for k in default_order(graph) if k < len(found)]
    assert found == with_leaves


@given(graph=files(), data=st.data())
def test_a_further_dependency_is_as_a_further_read(graph, data):
    count = len(graph.kernels)
    awaited = {k: data.draw(st.integers(0, k - 1)) for k in range(1, count) if data.draw(st.booleans())}
    found = ByPriority(graph).order(awaited)
    for k, p in awaited.items():
        graph.kernels[k].reads += graph.kernels[p].writes
    assert found == priority_order(graph)


@pytest.mark.parametrize("steps", [0])
def test_an_empty_file(steps):
    assert len(Replay(RuntimeGraph()).profile([])) == steps
