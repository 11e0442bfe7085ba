"""Strategy `sqrt`: near the bound on equal chains, within every limit, and never what must not run twice."""

from dataclasses import replace
from itertools import pairwise
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain, problems

from onnx_sublinear.errors import BudgetError
from onnx_sublinear.planners.problem import Limit, evaluate
from onnx_sublinear.planners.sqrt import SqrtStrategy

SIZE = 1000


def keep_all(p):
    return evaluate(p, range(len(p.reads))).peak_bytes


def lower_bound(p):
    """The most that one node needs at once (chains: no sharing)."""
    return max(sum(p.sizes[v] for v in {*p.reads[n], *p.writes[n]}) + p.workspaces[n] for n in range(len(p.reads)))


def rescored(p, plan):
    """The plan's schedule, scored here."""
    return evaluate(p, [p.labels.index(label) for label in plan.labels])


def revolve_slots(n):
    """Fewest checkpoints with which a chain of n runs with one extra forward pass (Griewank & Walther 2000)."""
    return next(c for c in range(1, n + 1) if comb(c + 2, 2) >= n)


def unlimited(p, **options):
    return SqrtStrategy().plan(p, Limit(**options), lower_bound_bytes=lower_bound(p))


def attempt(p, limit):
    """A plan, or the error that says that there is none."""
    try:
        return SqrtStrategy().plan(p, limit, lower_bound_bytes=1), None
    except BudgetError as error:
        return None, error


class TestEqualChain:
    @pytest.mark.parametrize("n", [9, 16, 32, 64, 128, 256])
    def test_peak_is_near_the_bound_for_one_extra_forward_pass(self, n):
        """Beside the checkpoints, the run in work, two gradients: four tensors above the slots of Revolve."""
        p = chain([SIZE] * n)
        plan = unlimited(p)
        assert plan.peak_bytes <= (revolve_slots(n) + 4) * SIZE
        assert plan.forward_share <= 1

    def test_the_last_run_is_not_recomputed(self):
        plan = unlimited(chain([SIZE] * 64))
        assert plan.clones > 0
        assert all(plan.labels.count(node) == 1 for node in (62, 63))

    def test_runs_get_shorter(self):
        """What is kept grows from run to run, so the room for the run in work shrinks."""
        plan = unlimited(chain([SIZE] * 100))
        kept = [-1, *(n for n in range(100) if plan.labels.count(n) == 1)]
        lengths = [b - a for a, b in pairwise(kept) if b - a > 1]
        assert lengths[0] > lengths[-1]
        assert all(a + 1 >= b for a, b in pairwise(lengths))

    def test_a_larger_budget_never_costs_more(self):
        p = chain([SIZE] * 64)
        smallest, largest = unlimited(p).peak_bytes, keep_all(p)
        costs = []
        for budget in range(smallest, largest + SIZE, SIZE):
            plan = SqrtStrategy().plan(p, Limit(budget), lower_bound_bytes=lower_bound(p))
            assert plan.peak_bytes <= budget
            costs.append(plan.overhead)
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == 0

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_short_chains_are_left_alone_or_improved(self, n):
        p = chain([SIZE] * n)
        assert unlimited(p).peak_bytes <= keep_all(p)

    def test_an_overhead_limit_is_kept(self):
        p = chain([SIZE] * 64)
        peaks = []
        for allowed in (0.0, 0.05, 0.1, 0.2, 1.0):
            plan = unlimited(p, max_overhead=allowed, max_forward_share=None)
            assert plan.overhead <= allowed
            peaks.append(plan.peak_bytes)
        assert peaks[0] == keep_all(p)
        assert peaks == sorted(peaks, reverse=True)

    def test_quick_is_worse_at_most_by_a_little(self):
        p = chain([SIZE] * 64)
        quick = SqrtStrategy().quick().plan(p, Limit(), lower_bound_bytes=lower_bound(p))
        assert quick.peak_bytes <= 2 * unlimited(p).peak_bytes


class TestBudget:
    def test_below_reach_names_the_smallest_peak_and_the_bound(self):
        p = chain([SIZE] * 64)
        with pytest.raises(BudgetError) as caught:
            SqrtStrategy().plan(p, Limit(2 * SIZE), lower_bound_bytes=lower_bound(p))
        assert caught.value.lower_bound_bytes == 3 * SIZE
        assert 3 * SIZE <= caught.value.smallest_peak_bytes <= (revolve_slots(64) + 4) * SIZE
        assert str(caught.value.smallest_peak_bytes) in caught.value.message

    def test_at_the_smallest_peak_it_is_met(self):
        p = chain([SIZE] * 64)
        with pytest.raises(BudgetError) as caught:
            SqrtStrategy().plan(p, Limit(0))
        smallest = caught.value.smallest_peak_bytes
        assert SqrtStrategy().plan(p, Limit(smallest)).peak_bytes <= smallest

    def test_above_the_peak_nothing_is_recomputed(self):
        p = chain([SIZE] * 16)
        plan = SqrtStrategy().plan(p, Limit(keep_all(p)))
        assert (plan.clones, plan.overhead) == (0, 0)


def test_fixed_nodes_are_never_recomputed():
    fixed = set(range(0, 64, 7))
    plan = unlimited(chain([SIZE] * 64, fixed=fixed))
    assert plan.clones > 0
    assert all(plan.labels.count(n) == 1 for n in fixed)


def test_small_tensors_are_not_worth_a_clone():
    sizes = [SIZE, 1] * 32
    plan = unlimited(chain(sizes))
    assert 0 < plan.clones <= 33


@settings(max_examples=60)
@given(problems(), st.one_of(st.none(), st.integers(0, 400)), st.sampled_from([None, 0.0, 0.2]))
def test_plans_keep_every_limit(p, budget, max_overhead):
    limit = Limit(budget, max_overhead=max_overhead)
    bare = evaluate(p, range(len(p.reads))).peak_bytes
    plan, error = attempt(p, limit)
    if error is not None:
        assert budget is not None
        assert budget < bare  # keeping all is always a plan
        assert error.smallest_peak_bytes <= bare
        return
    score = rescored(p, plan)
    assert (plan.peak_bytes, plan.overhead) == (score.peak_bytes, score.clone_cost / p.step_cost)
    assert plan.clones == len(plan.labels) - len(p.labels)
    assert list(dict.fromkeys(plan.labels)) == list(p.labels)
    again = {n for n in p.labels if plan.labels.count(n) > 1}
    assert all(p.recomputable[n] and plan.labels.count(n) == 2 for n in again)
    assert plan.forward_share <= 1
    assert max_overhead is None or plan.overhead <= max_overhead
    assert plan.peak_bytes <= (bare if budget is None else budget)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=24), st.data())
def test_on_any_chain_a_larger_budget_never_costs_more(sizes, data):
    p = chain(sizes, costs=[data.draw(st.integers(1, 9)) for _ in sizes])
    low = unlimited(p).peak_bytes
    budgets = sorted(data.draw(st.integers(low, keep_all(p))) for _ in range(3))
    plans = [SqrtStrategy().plan(p, Limit(budget), lower_bound_bytes=lower_bound(p)) for budget in budgets]
    costs = [plan.overhead for plan in plans]
    assert costs == sorted(costs, reverse=True)


def test_labels_follow_the_problem():
    """The problem's nodes stand for other positions of the graph."""
    p = chain([SIZE] * 16)
    shifted = replace(p, labels=tuple(label + 100 for label in p.labels))
    assert [label - 100 for label in unlimited(shifted).labels] == list(unlimited(p).labels)
