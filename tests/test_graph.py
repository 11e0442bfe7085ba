"""GraphIndex: definitions, readers, captures, order, fresh names."""

import time

import pytest
from onnx import TensorProto, helper

from onnx_sublinear.errors import GraphError
from onnx_sublinear.graph import GraphIndex

FLOAT = TensorProto.FLOAT


def tensor(name, shape=(2,)):
    return helper.make_tensor_value_info(name, FLOAT, shape)


def model_of(nodes, inputs=("x",), outputs=("y",), **graph):
    made = helper.make_graph(nodes, "g", [tensor(n) for n in inputs], [tensor(n) for n in outputs], **graph)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)])


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, **attributes)


def test_readers_are_per_node_not_per_slot():
    index = GraphIndex(model_of([node("Mul", ["x", "x"], ["h"]), node("Concat", ["h", "x", "h"], ["y"], axis=0)]))
    assert index.readers == {"x": [0, 1], "h": [1]}
    assert index.reads == [("x",), ("h", "x")]
    assert index.producer == {"h": 0, "y": 1}


def test_empty_names_are_no_tensors():
    index = GraphIndex(model_of([node("Clip", ["x", "", "x"], ["h"]), node("Dropout", ["h", ""], ["y", ""])]))
    assert "" not in index.producer
    assert "" not in index.readers


def nested(body_nodes, outputs):
    return helper.make_graph(body_nodes, "body", [], [tensor(n) for n in outputs])


def test_captures_at_any_depth_respect_scopes():
    inner = nested([node("Add", ["outer", "local"], ["b"]), node("Identity", ["x"], ["deep"])], ["deep"])
    middle = nested(
        [node("Neg", ["x"], ["local"]), node("If", ["c"], ["m"], then_branch=inner, else_branch=inner)], ["m"]
    )
    model = model_of(
        [
            node("Relu", ["x"], ["outer"]),
            node("If", ["c"], ["y"], then_branch=middle, else_branch=nested([node("Neg", ["w"], ["e"])], ["e"])),
        ],
        inputs=("x", "c", "w"),
    )
    index = GraphIndex(model)
    assert set(index.captures[1]) == {"x", "c", "outer", "w"}
    assert index.readers["outer"] == [1]
    assert index.readers["w"] == [1]


def test_shadowed_name_is_not_captured():
    body = helper.make_graph(
        [node("Neg", ["h"], ["b"])], "body", [], [tensor("b")], [helper.make_tensor("h", FLOAT, [1], [0.0])]
    )
    index = GraphIndex(
        model_of([node("Relu", ["x"], ["h"]), node("If", ["c"], ["y"], then_branch=body, else_branch=body)], ("x", "c"))
    )
    assert "h" not in index.readers


def test_branch_that_returns_an_outer_tensor_captures_it():
    branch = nested([], ["h"])
    index = GraphIndex(
        model_of(
            [node("Relu", ["x"], ["h"]), node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)], ("x", "c")
        )
    )
    assert index.captures[1] == ("h",)


def test_unsorted_nodes_get_a_deterministic_order():
    index = GraphIndex(model_of([node("Neg", ["h"], ["y"]), node("Abs", ["x"], ["i"]), node("Relu", ["x"], ["h"])]))
    assert index.order == [1, 2, 0]


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        ([node("Add", ["x", "b"], ["a"]), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"])], "cycle"),
        ([node("Neg", ["x"], ["y"]), node("Abs", ["x"], ["y"])], "'y' is defined twice"),
        ([node("Neg", ["x"], ["x"]), node("Neg", ["x"], ["y"])], "'x' is defined twice"),
        ([node("Add", ["x", "ghost"], ["y"])], "'ghost'"),
        ([node("Neg", ["x"], ["z"])], "output 'y'"),
    ],
)
def test_invalid_graphs_are_refused_by_name(nodes, word):
    with pytest.raises(GraphError, match=word):
        GraphIndex(model_of(nodes))


def test_cycle_message_names_a_tensor_on_the_cycle():
    chain = [
        node("Add", ["x", "b"], ["a"]),
        node("Neg", ["a"], ["b"]),
        node("Neg", ["b"], ["y"]),
        node("Abs", ["y"], ["z"]),
    ]
    with pytest.raises(GraphError, match=r"'(a|b)'"):
        GraphIndex(model_of(chain, outputs=("z",)))


def test_fresh_names_avoid_every_scope():
    body = nested([node("Neg", ["x"], ["h/recompute"], name="h/recompute_1")], ["h/recompute"])
    index = GraphIndex(model_of([node("If", ["c"], ["y"], then_branch=body, else_branch=body)], ("x", "c")))
    assert index.fresh_name("h/recompute") == "h/recompute_2"
    assert index.fresh_name("h/recompute") == "h/recompute_3"
    assert index.fresh_name("new") == "new"


def test_deep_chains_and_ladders_need_no_recursion():
    chain = [node("Neg", [f"t{i}" if i else "x"], [f"t{i + 1}"]) for i in range(7800)]
    chain.append(node("Neg", ["t7800"], ["y"]))
    assert len(GraphIndex(model_of(chain)).order) == 7801
    ladder = []
    for i in range(60):
        a, b = (f"a{i}", f"b{i}") if i else ("x", "x")
        ladder += [node("Add", [a, b], [f"a{i + 1}"]), node("Mul", [a, b], [f"b{i + 1}"])]
    ladder.append(node("Add", ["a60", "b60"], ["y"]))
    started = time.perf_counter()
    GraphIndex(model_of(ladder))
    assert time.perf_counter() - started < 1
