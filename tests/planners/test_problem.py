"""The simulator of plans against hand-worked schedules, a naive reimplementation and the independent judge."""

import importlib.util
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judges import SHARED, needs_shared
from onnx import TensorProto, helper
from problems import chain, problem, problems

from onnx_sublinear.planners.problem import Limit, evaluate, expand, plan_of, remat_problem
from onnx_sublinear.training_graph import TrainingGraph


def naive_profile(p, schedule):
    """Live bytes at each step, by the words of the memory model alone: for each step, sum all storages live there."""
    storages = []  # each: [first step, steps that need it, bytes]
    latest = {}  # value -> number of the storage of its latest run
    made, takeovers = {}, []
    ran = set()
    for step, node in enumerate(schedule):
        for v in p.reads[node]:
            storages[latest[v]][1].append(step)
        view_of = {b: a for a, b in p.views[node] if not p.kept[b]}
        for v in p.writes[node]:
            if v in view_of:
                latest[v] = latest[view_of[v]]
                continue
            ends = [math.inf] if p.kept[v] and node not in ran else []
            latest[v] = len(storages)
            storages.append([step, [step, *ends], p.sizes[v]])
            made[step, v] = latest[v]
        takeovers += [(step, latest[a], made[step, b]) for a, b in p.inplace[node] if (step, b) in made]
        ran.add(node)
    joined = {}
    for step, a, b in takeovers:
        while a in joined:
            a = joined[a]
        if max(storages[a][1]) <= step and max(storages[b][1]) < math.inf and a != b:
            joined[b] = a
            storages[a][1] += storages[b][1]
            storages[b][2] = 0
    return [
        p.workspaces[node] + sum(size for first, needs, size in storages if first <= step <= max(needs))
        for step, node in enumerate(schedule)
    ]


def assert_valid(p, schedule, dropped):
    """Reads come after what makes them, every node runs, first runs keep their order, only dropped nodes run again."""
    available = set()
    for node in schedule:
        assert set(p.reads[node]) <= available
        available.update(p.writes[node])
    assert list(dict.fromkeys(schedule)) == list(range(len(p.reads)))
    again = [n for n in range(len(p.reads)) for _ in range(schedule.count(n) - 1)]
    assert len(again) == len(set(again))
    assert all(dropped[n] and p.forward[n] for n in again)


class TestEvaluate:
    """x -> a -> b -> c of 10, 20, 30 bytes; c is the output."""

    ROWS = (([], [0]), ([0], [1]), ([1], [2]))

    def line(self, **options):
        return problem(self.ROWS, sizes=(10, 20, 30), kept={2}, **options)

    def test_inputs_and_outputs_of_the_running_node_are_live(self):
        assert evaluate(self.line(), [0, 1, 2]).profile == [10, 30, 50]

    def test_a_view_costs_nothing(self):
        assert evaluate(self.line(views={1: ((0, 1),)}), [0, 1, 2]).profile == [10, 10, 40]

    def test_a_view_that_is_an_output_has_storage_of_its_own(self):
        p = problem(self.ROWS, sizes=(10, 20, 30), kept={1, 2}, views={1: ((0, 1),)})
        assert evaluate(p, [0, 1, 2]).profile == [10, 30, 50]

    def test_inplace_takes_over_a_dead_input(self):
        p = problem(self.ROWS, sizes=(20, 20, 30), kept={2}, inplace={1: ((0, 1),)})
        assert evaluate(p, [0, 1, 2]).profile == [20, 20, 50]

    def test_inplace_needs_the_last_reader(self):
        rows = (*self.ROWS[:2], ([0, 1], [2]))
        p = problem(rows, sizes=(20, 20, 30), kept={2}, inplace={1: ((0, 1),)})
        assert evaluate(p, [0, 1, 2]).profile == [20, 40, 70]

    def test_inplace_chains(self):
        p = problem((*self.ROWS, ([2], [3])), sizes=(20,) * 4, kept={3}, inplace={n: ((n - 1, n),) for n in (1, 2)})
        assert evaluate(p, [0, 1, 2, 3]).profile == [20, 20, 20, 40]

    def test_workspace_counts_while_its_node_runs(self):
        assert evaluate(self.line(workspaces=(0, 100, 0)), [0, 1, 2]).profile == [10, 130, 50]

    def test_outputs_and_unread_values_are_live_to_the_end(self):
        p = problem((([], [0, 1]), ([0], [2])), sizes=(10, 5, 1), kept={1, 2})
        assert evaluate(p, [0, 1]).profile == [15, 16]

    def test_a_second_run_is_storage_of_its_own_and_costs(self):
        """a is read by b and by d; run again before d, its first storage ends at b."""
        p = problem(
            (([], [0]), ([0], [1]), ([1], [2]), ([0, 2], [3])), sizes=(10, 1, 2, 3), kept={3}, costs=(5, 1, 1, 1)
        )
        assert evaluate(p, [0, 1, 2, 3]).profile == [10, 11, 13, 15]
        again = evaluate(p, [0, 1, 2, 0, 3])
        assert again.profile == [10, 11, 3, 12, 15]
        assert again.clone_cost == 5

    def test_the_clone_of_an_output_is_not_kept(self):
        p = problem((([], [0]), ([0], [1]), ([0], [2])), sizes=(10, 1, 1), kept={0, 1, 2})
        assert evaluate(p, [0, 1, 0, 2]).profile == [10, 11, 21, 22]
        assert evaluate(p, [0, 0, 1, 2]).profile == [10, 20, 21, 22]

    def test_nothing_to_run(self):
        assert evaluate(problem((), sizes=()), []).peak_bytes == 0


class TestExpand:
    def test_nothing_dropped_is_the_schedule_itself(self):
        p = chain([1, 1, 1])
        assert expand(p, [False] * 6) == [0, 1, 2, 3, 4, 5]

    def test_a_dropped_node_runs_again_just_before_the_gradient_that_needs_it(self):
        """y1 is dropped: d2 (node 3) does not need it, d1 (node 4) does."""
        assert expand(chain([1, 1, 1]), [False, True, False, False, False, False]) == [0, 1, 2, 3, 1, 4, 5]

    def test_a_dropped_run_is_recomputed_from_its_checkpoint(self):
        p = chain([1] * 4)
        assert expand(p, [False, True, True, False, *[False] * 4]) == [0, 1, 2, 3, 4, 1, 2, 5, 6, 7]

    def test_graph_outputs_are_not_recomputed(self):
        p = problem((([], [0]), ([0], [1]), ([0, 1], [2])), sizes=(1, 1, 1), kept={0, 2}, gradient={2})
        assert expand(p, [True, False, False]) == [0, 1, 2]


@given(problems(), st.data())
def test_any_expansion_is_valid_and_its_score_is_the_naive_one(p, data):
    dropped = [ok and data.draw(st.booleans(), label=f"drop {n}") for n, ok in enumerate(p.recomputable)]
    schedule = expand(p, dropped)
    assert_valid(p, schedule, dropped)
    score = evaluate(p, schedule)
    assert score.profile == naive_profile(p, schedule)
    assert score.peak_bytes == max(score.profile)
    assert score.clone_cost == sum(p.costs[n] for n in schedule) - sum(p.costs)


@needs_shared
@given(problems(plain=True), st.data())
def test_plain_problems_score_as_the_independent_judge_says(p, data):
    spec = importlib.util.spec_from_file_location("remat_eval", SHARED / "tools" / "remat_eval.py")
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    dropped = [ok and data.draw(st.booleans()) for ok in p.recomputable]
    schedule = expand(p, dropped)
    abstract = {
        "nodes": [{"name": str(n), "size": p.sizes[n], "cost": p.costs[n]} for n in range(len(p.reads))],
        "edges": [[v, n] for n, reads in enumerate(p.reads) for v in reads],  # value v is made by node v
    }
    peak, overhead = judge.evaluate(abstract, schedule)
    score = evaluate(p, schedule)
    assert score.peak_bytes == peak
    assert score.clone_cost / p.step_cost == pytest.approx(overhead)


def test_a_plan_names_graph_positions_and_shares():
    p = chain([10, 10, 10])
    schedule = [0, 1, 2, 3, 1, 4, 5]
    plan = plan_of(p, "by hand", schedule, evaluate(p, schedule))
    assert (plan.strategy, plan.labels, plan.clones) == ("by hand", tuple(schedule), 1)
    assert plan.forward_share == pytest.approx(1 / 3)
    assert plan.overhead == pytest.approx(1 / 9)


def test_without_limits_one_extra_forward_pass_is_allowed():
    assert Limit() == Limit(budget_bytes=None, max_overhead=None, max_forward_share=1.0)


def test_a_graph_becomes_a_problem():
    """x -> Relu a -> Reshape b -> Dropout c (output); d = Neg(a) is a gradient node without a reader."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Dropout", ["b", "", "yes"], ["c", "mask"]),
        helper.make_node("ReduceSum", ["c"], ["loss"], keepdims=0),
        helper.make_node("Neg", ["b"], ["d"]),
    ]
    constants = [
        helper.make_tensor("shape", TensorProto.INT64, [1], [32]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
    ]
    outputs = [value("loss", TensorProto.FLOAT, []), value("d", TensorProto.FLOAT, [32])]
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, [4, 8])], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    p = remat_problem(TrainingGraph(model), [0, 1, 2, 3, 4])
    assert p.labels == (0, 1, 2, 3, 4)
    assert p.reads == ((), (0,), (1,), (2,), (1,))
    assert p.writes == ((0,), (1,), (2, 3), (4,), (5,))
    assert p.views == ((), ((0, 1),), (), (), ())
    assert p.inplace == ((), (), (), (), ())  # Relu's input is the graph's
    assert p.sizes == (128, 128, 128, 64, 64, 128)  # rounded to the allocator's granule
    assert p.kept == (False, False, False, True, True, True)  # the unread mask is live to the end
    assert p.forward == (True, True, True, True, False)
    assert p.recomputable == (True, True, False, True, False)
