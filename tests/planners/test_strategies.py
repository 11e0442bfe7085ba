"""All strategies: every limit is kept, the simulator's score is reported, and the bounds on equal chains are met."""

from math import comb, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, problems

from onnx_sublinear.errors import BudgetError, UsageError
from onnx_sublinear.planners import STRATEGIES, strategy_named
from onnx_sublinear.planners.auto import AutoStrategy
from onnx_sublinear.planners.problem import Limit, evaluate

SIZE = 1000
QUICK = ["sqrt", "chen", "recursive", "chain", "greedy"]


def named(name, seconds=0.3):
    return strategy_named(name, seconds=seconds)


def keep_all(p):
    return evaluate(p, range(len(p.reads))).peak_bytes


def attempt(name, p, limit):
    try:
        return named(name).plan(p, limit), None
    except BudgetError as error:
        return None, error


@pytest.mark.parametrize("name", [*QUICK, "auto"])
@settings(max_examples=30, deadline=None)
@given(p=problems(), budget=st.one_of(st.none(), st.integers(0, 400)), share=st.sampled_from([None, 0.0, 0.2]))
def test_plans_keep_every_limit(name, p, budget, share):
    plan, error = attempt(name, p, Limit(budget, share, None if budget is not None else 1.0))
    if error is not None:
        assert budget is not None
        assert error.smallest_peak_bytes > budget
        return
    score = evaluate(p, plan.labels)
    assert (plan.peak_bytes, plan.overhead) == (score.peak_bytes, score.clone_cost / p.step_cost)
    assert list(dict.fromkeys(plan.labels)) == list(p.labels)  # first runs keep their order
    assert all(p.recomputable[n] for n in p.labels if plan.labels.count(n) > 1)
    assert plan.peak_bytes <= (keep_all(p) if budget is None else budget)
    assert share is None or plan.overhead <= share
    assert budget is not None or plan.forward_share <= 1


@settings(max_examples=20, deadline=None)
@given(p=problems(), data=st.data())
def test_a_larger_budget_never_costs_more(p, data):
    budgets = sorted(data.draw(st.lists(st.integers(0, 2 * keep_all(p)), min_size=3, max_size=5)))
    plans = [attempt("auto", p, Limit(b, None, None))[0] for b in budgets]
    costs = [plan.overhead if plan else float("inf") for plan in plans]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("name", ["auto", "chain", "greedy", "exact"])
def test_equal_problems_get_equal_plans(name):
    if name == "exact":
        pytest.importorskip("ortools")
    p = chain([SIZE] * 24)
    limit = Limit(keep_all(p) * 6 // 10, None, None)
    assert named(name, 5).plan(p, limit).overhead == named(name, 5).plan(p, limit).overhead


class TestEqualChain:
    """Activations in a plan: its peak over the size of one; two gradients are among them."""

    @pytest.mark.parametrize("n", [16, 40, 100])
    @pytest.mark.parametrize("name", ["auto", "chain"])
    def test_one_extra_forward_pass(self, n, name):
        plan = named(name, 3).plan(chain([SIZE] * n), Limit())
        assert plan.peak_bytes <= ((2 * n) ** 0.5 + 3) * SIZE
        assert plan.forward_share <= 1

    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_more_forward_passes_come_near_the_bound_of_revolve(self, k):
        n = 120
        slots = next(c for c in range(1, n) if comb(c + k + 1, c) >= n)
        plan = named("chain").plan(chain([SIZE] * n), Limit(max_forward_share=float(k)))
        assert plan.peak_bytes <= (1.1 * slots + 3) * SIZE
        assert plan.forward_share <= k

    @pytest.mark.parametrize("n", [64, 1000])
    def test_recursion_needs_the_logarithm(self, n):
        plan = named("recursive").plan(chain([SIZE] * n), Limit(max_forward_share=None))
        assert plan.peak_bytes <= (2 * log2(n) + 4) * SIZE


class TestExact:
    def test_it_proves_the_optimum(self):
        pytest.importorskip("ortools")
        p = chain([4, 9, 2, 7, 5, 8], costs=[3, 1, 4, 1, 5, 9])
        budget = keep_all(p) * 3 // 4
        plan = named("exact", 10).plan(p, Limit(budget, None, None))
        assert plan.strategy == "exact"
        assert plan.overhead_bound == pytest.approx(plan.overhead)
        assert named("auto", 2).plan(p, Limit(budget, None, None)).overhead == pytest.approx(plan.overhead)


def test_auto_without_a_search_has_the_seeds():
    p = chain([SIZE] * 64)
    assert AutoStrategy().quick().plan(p, Limit()).peak_bytes <= 2 * named("auto").plan(p, Limit()).peak_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_by_name(name):
    assert strategy_named(name).name == name
    assert strategy_named(name).quick().name in STRATEGIES


def test_an_unknown_strategy_is_a_usage_error():
    with pytest.raises(UsageError, match="magic") as caught:
        strategy_named("magic")
    assert "sqrt" in caught.value.hint
