"""Enforcement: few additions, and every order within the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import W, X, line, originals, rows, rules

from onnx_sublinear.passes.enforcement import Enforcement
from onnx_sublinear.passes.holds import clone_holds
from onnx_sublinear.passes.take_away import take_away
from onnx_sublinear.runtime_model import executed_orders, simulate


def search(graph, schedule, limit, *, forward=(), fixed=(), training=False, **options):
    is_forward = [k in forward for k in range(len(graph.kernels))]
    return Enforcement(graph, schedule, is_forward, fixed, rules(graph, **options), limit, training)


def peaks(layout):
    return {n: simulate(layout.graph, o, reuse=False).peak_bytes for n, o in executed_orders(layout.graph).items()}


def chain_with_leaves(count):
    """g0 <- x; per step a small leaf that reads the gradient, and the next gradient. Kernels 2n+1 are leaves."""
    reads = [[X]]
    for n in range(count):
        gradient = 2 + (0 if n == 0 else 2 * n)
        reads += [[gradient, X], [gradient]]
    graph = line(reads, outputs=[*range(1, 2 * count, 2), 2 * count], size=9600)
    for n in range(count):
        graph.sizes[2 * n + 3] = 64
    return graph


class TestMarkers:
    def test_weight_gradients_run_in_their_turn(self):
        graph = chain_with_leaves(8)
        schedule = list(range(len(graph.kernels)))
        planned = simulate(graph, schedule, reuse=False).peak_bytes
        free = peaks(search(graph, schedule, 10**9).run())
        layout = search(graph, schedule, planned + 600).run()  # markers have a size, too
        assert free["default"] > planned + 600
        assert max(peaks(layout).values()) <= planned + 600

    def test_what_is_not_needed_is_taken_away(self):
        graph = chain_with_leaves(8)
        layout = search(graph, list(range(len(graph.kernels))), 10**9).run()
        assert layout.added == 0

    def test_the_training_builds_order_is_kept_as_well(self):
        graph = chain_with_leaves(8)
        schedule = list(range(len(graph.kernels)))
        planned = simulate(graph, schedule, reuse=False).peak_bytes
        layout = search(graph, schedule, planned + 600, training=True).run()
        order = executed_orders(layout.graph, training=True)["default"]
        assert simulate(layout.graph, order, reuse=False).peak_bytes <= planned + 600


class TestDrains:
    """v1 (9,600 bytes) is read by nothing: the runtime would keep it to the end."""

    GRAPH = line([[X], [2], [2], [4], [5], [6]], outputs=(5,), size=9600)

    def test_what_nothing_reads_is_released_by_a_marker(self):
        layout = search(self.GRAPH, range(6), 2 * 9600 + 1000).run()
        assert "marker(v1)" in rows(layout)
        assert max(peaks(layout).values()) <= 2 * 9600 + 1000

    def test_where_it_is_not_in_the_way_it_stays(self):
        assert search(self.GRAPH, range(6), 10**9).run().added == 0


class TestHolds:
    def test_what_would_overtake_a_late_node_waits_for_it(self):
        """v0 is made anew by the runtime (late): by priority, v2 .. v5, which read x alone, would all run before it."""
        graph = line([[X], [2], [X], [X], [X], [X], [3, 4], [8, 5], [9, 6], [10, 7]], late={0})
        schedule = [0, 1, 2, 6, 3, 7, 4, 8, 5, 9]
        planned = simulate(graph, schedule, reuse=False).peak_bytes
        layout = search(graph, schedule, planned + 64 * 3).run()
        assert any(r.startswith("view") for r in rows(layout))
        assert peaks(layout)["priority"] <= planned + 64 * 3

    def test_nodes_whose_order_matters_wait_for_each_other(self):
        graph = line([[X], [X], [W]], outputs=(0, 1, 2))
        layout = search(graph, [0, 1, 2], 10**9, fixed={0, 1, 2}).run()
        for order in executed_orders(layout.graph).values():
            assert originals(layout, order) == [0, 1, 2]

    def test_where_nothing_can_be_viewed_they_are_given_up(self):
        graph = line([[X], [X], [W]], outputs=(0, 1, 2))
        assert search(graph, [0, 1, 2], 10**9, fixed={0, 1, 2}, ranks=[-1] * 5).run() is None


class TestClones:
    def test_a_clone_waits_for_the_last_leaf_before_it(self):
        #        x -> v0    v1 = grad    v2 = leaf     v3 = clone of v0, v4 reads it
        graph = line([[X], [2], [3], [X], [3, 5]], outputs=(2,))
        assert clone_holds(graph, range(5), [True] + [False] * 4, rules(graph, clones={3})) == {3: 4}

    def test_without_a_leaf_for_the_last_result(self):
        graph = line([[X], [2], [X], [3, 4]])
        assert clone_holds(graph, range(4), [True, False, False, False], rules(graph, clones={2})) == {2: 3}

    def test_only_the_first_of_a_row_waits(self):
        graph = line([[X], [2], [X], [4], [3, 5]])
        found = clone_holds(graph, range(5), [True, False, False, False, False], rules(graph, clones={2, 3}))
        assert found == {2: 3}


class TestTakeAway:
    @given(needed=st.sets(st.integers(0, 30)), count=st.integers(0, 31))
    def test_what_is_needed_stays(self, needed, count):
        items = set(range(count))

        def without(group):
            if needed & set(group):
                return False
            items.difference_update(group)
            return True

        take_away(range(count), without, 10**6)
        assert items == needed & set(range(count))

    @pytest.mark.parametrize("trials", [0, 1, 3])
    def test_it_asks_no_more_often_than_allowed(self, trials):
        asked = []
        take_away(range(8), lambda group: bool(asked.append(group)), trials)
        assert len(asked) <= trials
