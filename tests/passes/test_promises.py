"""Dead buffers held for a later tensor of the same size: which promises to break, and that breaking them helps."""

import pytest

from onnx_sublinear.passes.promises import breakable_promises
from onnx_sublinear.runtime_model import Kernel, RuntimeGraph, executed_orders, simulate


def pyramid(inplace=False):
    """x -> a -> b -> d -> e -> c; a (100) is dead behind b, and promised to e and c of its layout; d needs 300.

    With `inplace`, c may run in e's buffer and is no graph output; f reads it.
    """
    graph = RuntimeGraph()
    graph.add_value("x", 0, 0, external=True)
    rows = [("a", 1, 100), ("b", 2, 10), ("d", 3, 300), ("e", 1, 100), ("c", 1, 100)]
    for name, layout, size in rows:
        graph.add_value(name, size, layout, output=name == "c" and not inplace)
    for i in range(5):
        pairs = ((4, 5),) if inplace and i == 4 else ()
        graph.kernels.append(Kernel((i,), (i + 1,), inplace=pairs))
    if inplace:
        graph.add_value("f", 10, 4, output=True)
        graph.kernels.append(Kernel((5,), (6,)))
    return graph


def peaks(graph):
    return {name: simulate(graph, order).peak_bytes for name, order in executed_orders(graph).items()}


def names(graph, values):
    return {graph.names[v] for v in values}


def test_a_promise_over_the_peak_is_broken():
    graph = pyramid()
    assert peaks(graph) == {"default": 410, "priority": 410}
    assert names(graph, breakable_promises(graph, 400, ())) == {"e"}
    assert peaks(graph) == {"default": 400, "priority": 400}


@pytest.mark.parametrize("limit", [410, 500])
def test_nothing_is_broken_within_the_limit(limit):
    graph = pyramid()
    layouts = list(graph.layouts)
    assert breakable_promises(graph, limit, ()) == set()
    assert graph.layouts == layouts


def test_hopeless_values_are_left_alone():
    graph = pyramid()
    assert breakable_promises(graph, 400, {"e"}) == set()
    assert peaks(graph)["default"] == 410


def test_an_inplace_result_follows_the_broken_value():
    """c keeps running in e's buffer: both get the new layout."""
    graph = pyramid(inplace=True)
    assert names(graph, breakable_promises(graph, 400, ())) == {"e"}
    assert graph.layouts[4] == graph.layouts[5] not in (1, 2, 3, 4)
    run = simulate(graph, range(6))
    assert run.buffer_of[5] == 4
    assert run.peak_bytes == 400


def test_promises_that_do_not_lie_over_the_peak_stay():
    """A second pyramid, small, behind the first: its promise costs nothing."""
    graph = pyramid()
    for name, layout, size in (("p", 5, 50), ("q", 6, 5), ("r", 7, 60), ("s", 5, 50)):
        graph.add_value(name, size, layout, output=name == "s")
    graph.kernels += [Kernel((5,), (6,)), Kernel((6,), (7,)), Kernel((7,), (8,)), Kernel((8,), (9,))]
    assert names(graph, breakable_promises(graph, 400, ())) == {"e"}


def test_a_limit_out_of_reach_ends():
    graph = pyramid()
    assert names(graph, breakable_promises(graph, 1, ())) == {"e"}
    assert peaks(graph)["default"] == 400
