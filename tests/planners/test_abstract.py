"""Abstract problems: what is read, what is refused with one clear error, and the independent judge's agreement."""

import importlib.util
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judges import SHARED, needs_shared

from onnx_sublinear.errors import BudgetError, ModelError
from onnx_sublinear.planners import Limit, strategy_named
from onnx_sublinear.planners.abstract import load_problem, problem_from_json, save_schedule

NODES = [{"name": "a", "size": 5, "cost": 1}, {"name": "b", "size": 6, "cost": 2}, {"name": "c", "size": 1, "cost": 0}]


def judge():
    spec = importlib.util.spec_from_file_location("remat_eval", SHARED / "tools" / "remat_eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph(sizes, costs, edges):
    nodes = [{"name": str(n), "size": s, "cost": c} for n, (s, c) in enumerate(zip(sizes, costs, strict=True))]
    return {"nodes": nodes, "edges": edges}


@st.composite
def graphs(draw, most=24):
    count = draw(st.integers(1, most))
    edges = [
        [producer, n]
        for n in range(1, count)
        for producer in draw(st.lists(st.integers(0, n - 1), max_size=3, unique=True))
    ]
    sizes = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    return graph(sizes, draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), edges)


@needs_shared
@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(["auto", "greedy", "chain", "sqrt"]), st.integers(40, 100))
def test_the_judge_agrees_with_every_plan(content, name, percent):
    keep_all, _ = judge().evaluate(content, list(range(len(content["nodes"]))))
    p = problem_from_json(content)
    try:
        plan = strategy_named(name, seconds=0.2).plan(p, Limit(keep_all * percent // 100, None, None))
    except BudgetError as error:
        assert error.smallest_peak_bytes > keep_all * percent // 100  # noqa: PT017
        return
    assert judge().evaluate(content, list(plan.labels)) == (plan.peak_bytes, pytest.approx(plan.overhead))
    assert plan.peak_bytes <= keep_all * percent // 100


@needs_shared
@pytest.mark.parametrize(("name", "percent", "optimum"), [("vgg19_b256", 80, 0.0485), ("segnet_b32", 60, 0.0042)])
def test_auto_is_near_the_optimum(name, percent, optimum):
    path = SHARED / "bench" / "remat" / f"{name}.json"
    content, p = json.loads(path.read_text()), load_problem(path)
    plan = strategy_named("auto", seconds=5).plan(p, Limit(content["keep_all_peak"] * percent // 100, None, None))
    assert judge().evaluate(content, list(plan.labels))[1] <= optimum + 0.002


def test_without_marks_the_forward_section_ends_at_the_largest_live_bytes():
    content = graph([4, 4, 4, 1, 1], [1] * 5, [[0, 1], [1, 2], [2, 3], [1, 3], [3, 4], [0, 4]])
    assert problem_from_json(content).forward == (True, True, True, True, False)
    content["nodes"][2]["backward"] = True
    assert problem_from_json(content).forward == (True, True, False, True, True)


def test_costs_with_fractions_are_scaled():
    p = problem_from_json(graph([1, 1], [0.25, 0.75], [[0, 1]]))
    assert p.costs[1] == 3 * p.costs[0] > 1000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no lists"),
        ({"nodes": NODES}, "no lists"),
        ({"nodes": [], "edges": []}, "no nodes"),
        ({"nodes": [3], "edges": []}, "node 0 has no number 'size'"),
        ({"nodes": [{"size": 1}], "edges": []}, "node 0 has no number 'cost'"),
        ({"nodes": [{"size": True, "cost": 1}], "edges": []}, "'size'"),
        ({"nodes": [{"size": -1, "cost": 1}], "edges": []}, "'size' is -1"),
        ({"nodes": [{"size": 1.5, "cost": 1}], "edges": []}, "1.5"),
        ({"nodes": [{"size": 1, "cost": float("nan")}], "edges": []}, "'cost' is nan"),
        ({"nodes": [{"size": float("inf"), "cost": 1}], "edges": []}, "inf"),
        ({"nodes": [{"size": 1 << 60, "cost": 1}], "edges": []}, "2^53"),
        ({"nodes": [{"size": 1, "cost": 10**200}], "edges": []}, "1e100"),
        ({"nodes": [{"size": 1 << 53, "cost": 1}] * 600, "edges": []}, "add up"),
        ({"nodes": NODES, "edges": [[0]]}, "edge 0"),
        ({"nodes": NODES, "edges": [[0, 1], [0, 1.0]]}, "edge 1"),
        ({"nodes": NODES, "edges": [[0, 3]]}, "names node 3"),
        ({"nodes": NODES, "edges": [[-1, 1]]}, "names node -1"),
        ({"nodes": NODES, "edges": [[10**5000, 1]]}, "huge"),
        ({"nodes": NODES, "edges": [[1, 1]]}, "cycle"),
        ({"nodes": NODES, "edges": [[2, 1]]}, "cycle"),
    ],
)
def test_what_is_no_problem_is_named(content, said):
    with pytest.raises(ModelError) as caught:
        problem_from_json(content)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"nodes": ' + "9" * 5000])
def test_what_is_not_json_names_the_file(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"broken\.json"):
        load_problem(path)


def test_a_schedule_is_written_complete(tmp_path):
    save_schedule([0, 1, 0, 2], tmp_path / "schedule.json")
    assert json.loads((tmp_path / "schedule.json").read_text()) == [0, 1, 0, 2]
    assert len(list(tmp_path.iterdir())) == 1
