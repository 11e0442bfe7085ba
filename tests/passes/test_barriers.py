"""Layouts: what holds, markers and veils add to a file, and what the runtime's orders make of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import W, X, line, originals, rows, rules

from onnx_sublinear.passes.barriers import Added, Placement, lay_out
from onnx_sublinear.runtime_model import executed_orders, simulate

# Two weight gradients (v1, v3) on a chain: DEFAULT runs the chain first, then the leaves.
LEAVES = line([[X], [2, X], [2], [4, X]], outputs=(1, 3))
CHAIN = line([[X], [2], [3]])


def test_without_additions_the_file_is_the_schedule():
    layout = lay_out(LEAVES, [0, 1, 2, 3], Placement(), rules(LEAVES))
    assert rows(layout) == ["v0", "v1", "v2", "v3"]
    assert layout.added == 0
    assert originals(layout, executed_orders(layout.graph)["default"]) == [0, 2, 3, 1]


class TestHolds:
    def test_a_hold_is_a_token_a_shape_and_a_view(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}), rules(LEAVES))
        assert rows(layout) == ["v0", "v1", "token(v1)", "shape(v0)", "view(v0)", "v2", "v3"]
        assert layout.added == 3
        assert layout.graph.kernels[5].reads == (layout.rows[4].value,)
        assert layout.swaps == {2: {2: layout.rows[4].value}}
        for order in executed_orders(layout.graph).values():
            assert originals(layout, order) == [0, 1, 2, 3]

    def test_one_view_serves_all_that_wait_for_the_value_and_read_the_same(self):
        fan = line([[X], [W], [X, W], [X]])
        layout = lay_out(fan, [0, 1, 2, 3], Placement({2: 3, 3: 3}), rules(fan))
        assert rows(layout) == ["v0", "v1", "token(v1)", "shape(x)", "view(x)", "v2", "v3"]
        view = layout.rows[4].value
        assert [k.reads for k in layout.graph.kernels[5:]] == [(view, W), (view,)]

    def test_shapes_are_shared_per_rank(self):
        fan = line([[X], [X], [W]])
        layout = lay_out(fan, [0, 1, 2], Placement({1: 2, 2: 2}), rules(fan))
        assert rows(layout) == ["v0", "token(v0)", "shape(x)", "view(x)", "v1", "view(w)", "v2"]
        other = lay_out(fan, [0, 1, 2], Placement({1: 2, 2: 2}), rules(fan, ranks=[2, 3, 2, 2, 2]))
        assert rows(other) == ["v0", "token(v0)", "shape(x)", "view(x)", "v1", "shape(w)", "view(w)", "v2"]

    def test_a_scalar_constant_serves_all_that_read_it(self):
        fan = line([*[[X]] * 7, *([v, W] for v in range(3, 9))])
        readers = [7, 8, 9, 10, 11]  # not 12: W is no scalar operand there
        may = rules(fan, ranks=[2, -1, *[2] * 13], scalars=dict.fromkeys(readers, (W,)))
        layout = lay_out(fan, range(13), Placement(dict.fromkeys([*readers, 12], 2)), may)
        text = " ".join(rows(layout))
        assert text.endswith("token(v0) shape(w) view(w) v7 v8 v9 v10 v11 shape(v6) view(v6) v12")

    def test_a_scalar_constant_stays_one_for_few(self):
        fan = line([[X], [W, X], [X], [2, W], [3, W]])
        may = rules(fan, ranks=[2, -1, *[2] * 5], scalars=dict.fromkeys([3, 4], (W,)))
        layout = lay_out(fan, range(5), Placement(dict.fromkeys([3, 4], 2)), may)
        assert [r for r in rows(layout) if "view" in r] == ["view(v0)", "view(v1)"]

    def test_values_of_unknown_rank_are_not_viewed(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}), rules(LEAVES, ranks=[2, 2, -1, 2, 2, 2]))
        assert layout.added == 0

    def test_on_cuda_the_token_is_a_dim_of_a_probe(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}), rules(LEAVES, probes=True))
        assert rows(layout)[2:7] == ["token(x)", "shape(v1)", "probe(v1)", "dim(v1)", "shape(v0)"]

    def test_a_body_reads_the_view_of_its_node(self):
        body = {2: [LEAVES.kernels[2], LEAVES.kernels[2]]}
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}), rules(LEAVES, bodies=body))
        view = layout.rows[4].value
        assert [k.reads for k, row in zip(layout.graph.kernels, layout.rows, strict=True) if row == 2] == [(view,)] * 2


class TestClones:
    def test_a_clone_that_waits_for_nothing_reads_a_view_all_the_same(self):
        twice = line([[X], [X], [2]])
        layout = lay_out(twice, [0, 1, 2], Placement(), rules(twice, clones={1: 0}))
        assert rows(layout) == ["v0", "token(x)", "shape(x)", "view(x)", "v1", "v2"]

    def test_what_reads_a_clone_differs_already(self):
        chain = line([[X], [2], [3], [X], [5], [6]])
        layout = lay_out(chain, range(6), Placement(), rules(chain, clones={3: 0, 4: 1, 5: 2}))
        assert [r for r in rows(layout) if "view" in r] == ["view(x)"]

    def test_small_clones_may_be_merged_but_not_what_reads_them(self):
        """v2 is v0 again and small: once the two are one, v3 reads what v1 reads."""
        chain = line([[X], [2, W], [X], [4, W]])
        layout = lay_out(chain, range(4), Placement(), rules(chain, clones={2: 0, 3: 1}, small={2}))
        assert rows(layout) == ["v0", "v1", "v2", "token(x)", "shape(v2)", "view(v2)", "v3"]

    def test_a_clone_whose_original_reads_other_values_needs_no_view(self):
        """v3 is v1 again but reads v2, which is no clone."""
        other = line([[X], [2], [X], [4]])
        assert lay_out(other, range(4), Placement(), rules(other, clones={3: 1})).added == 0

    def test_clones_of_one_original_are_told_apart(self):
        """v1 and v2 are both clones of v0: without a view in between, the runtime would merge them."""
        thrice = line([[X], [X], [X]])
        layout = lay_out(thrice, [0, 1, 2], Placement(), rules(thrice, clones={1: 0, 2: 0}))
        assert rows(layout) == ["v0", "token(x)", "shape(x)", "view(x)", "v1", "view(x)", "v2"]
        assert layout.graph.kernels[-1].reads != layout.graph.kernels[-3].reads

    def test_clones_that_wait_for_clones_that_are_merged_are_told_apart(self):
        """v2 and v3 are small and one for the runtime, so tokens of them are too: v4 and v5 need different views."""
        same = line([[X], [X], [X], [X], [X], [X]])
        may = rules(same, clones={2: 1, 3: 1, 4: 0, 5: 0}, small={1, 2, 3})
        layout = lay_out(same, range(6), Placement({4: 4, 5: 5}), may)
        source = {r.value: r.source for r in layout.rows if isinstance(r, Added) and r.kind == "view"}
        assert sorted(v in source for v in source.values()) == [False, False, True]

    def test_behind_a_veil_a_clone_reads_a_view_of_the_view(self):
        """The original reads the veil: the clone must not read the same."""
        twice = line([[X], [X]])
        layout = lay_out(twice, [0, 1], Placement(veils={X}), rules(twice, clones={1: 0}))
        assert rows(layout) == ["token(x)", "shape(x)", "view(x)", "v0", "view(x)", "v1"]
        assert layout.graph.kernels[3].reads != layout.graph.kernels[5].reads
        assert layout.graph.kernels[4].reads[0] == layout.rows[2].value


class TestMarkers:
    def test_markers_stand_at_the_end_the_first_last(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement(markers={1, 3}), rules(LEAVES))
        assert rows(layout) == ["v0", "v1", "v2", "v3", "marker(v3)", "marker(v1)"]
        orders = executed_orders(layout.graph)
        assert [originals(layout, orders[name]) for name in ("default", "priority")] == [[0, 1, 2, 3]] * 2

    def test_by_priority_markers_run_right_behind_what_they_read(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement(markers={1, 3}), rules(LEAVES))
        assert executed_orders(layout.graph)["priority"] == [0, 1, 5, 2, 3, 4]

    def test_what_is_no_tensor_gets_no_marker(self):
        countable = [True] * len(LEAVES.names)
        countable[3] = False
        assert lay_out(LEAVES, [0, 1, 2, 3], Placement(markers={1}), rules(LEAVES, countable=countable)).added == 0

    def test_where_there_is_a_token_a_marker_reads_that(self):
        """The runtime would merge two Sizes of one value, and the marker would be no leaf any more."""
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}, markers={1}), rules(LEAVES))
        assert rows(layout) == ["v0", "v1", "token(v1)", "shape(v0)", "view(v0)", "v2", "v3", "marker()"]
        assert layout.rows[-1].source == layout.rows[2].value
        for order in executed_orders(layout.graph).values():
            assert originals(layout, order) == [0, 1, 2, 3]


class TestVeils:
    def test_all_readers_read_the_veil(self):
        fan = line([[X], [2], [2]])
        layout = lay_out(fan, [0, 1, 2], Placement(veils={2}), rules(fan))
        assert rows(layout) == ["v0", "token(x)", "shape(v0)", "view(v0)", "v1", "v2"]
        view = layout.rows[3].value
        assert [k.reads for k in layout.graph.kernels[4:]] == [(view,), (view,)]

    def test_veils_share_token_and_shape(self):
        layout = lay_out(CHAIN, [0, 1, 2], Placement(veils={X, 3}), rules(CHAIN))
        assert rows(layout) == ["token(x)", "shape(x)", "view(x)", "v0", "v1", "view(v1)", "v2"]

    def test_who_is_held_keeps_its_view(self):
        fan = line([[X], [W], [2]])
        layout = lay_out(fan, [0, 1, 2], Placement({2: 3}, veils={2}), rules(fan))
        views = [r for r in layout.rows if isinstance(r, Added) and r.kind == "view"]
        assert layout.graph.kernels[-1].reads == (views[-1].value,)
        assert layout.graph.kernels[-2].reads[1] != views[0].operands[0]

    def test_a_veil_shares_its_values_buffer(self):
        layout = lay_out(CHAIN, [0, 1, 2], Placement(veils={2}), rules(CHAIN))
        run = simulate(layout.graph, range(len(layout.rows)))
        assert run.buffer_of[layout.rows[3].value] == 2


def test_the_graph_given_is_not_changed():
    names, kernels = list(LEAVES.names), list(LEAVES.kernels)
    lay_out(LEAVES, [0, 1, 2, 3], Placement({2: 3}, {1}, {2}), rules(LEAVES))
    assert (LEAVES.names, LEAVES.kernels) == (names, kernels)


@st.composite
def graphs_and_schedules(draw):
    """A random graph in which every kernel reads something, and a topological order of it."""
    count = draw(st.integers(1, 14))
    reads = [draw(st.lists(st.integers(0, k + 1), min_size=1, max_size=3)) for k in range(count)]
    graph = line(reads)
    waiting = {k: {v - 2 for v in reads[k] if v >= 2} for k in range(count)}
    schedule = []
    while waiting:
        ready = sorted(k for k, needs in waiting.items() if needs <= set(schedule))
        schedule.append(draw(st.sampled_from(ready)))
        del waiting[schedule[-1]]
    return graph, schedule


@pytest.mark.parametrize("training", [False, True], ids=["stock", "training"])
@given(case=graphs_and_schedules())
def test_with_a_marker_on_every_node_every_order_is_the_schedule(training, case):
    graph, schedule = case
    layout = lay_out(graph, schedule, Placement(markers=schedule), rules(graph))
    for order in executed_orders(layout.graph, training=training).values():
        assert sorted(order) == list(range(len(layout.rows)))
        assert originals(layout, order) == schedule


@pytest.mark.parametrize("probes", [False, True], ids=["plain", "probes"])
@given(case=graphs_and_schedules(), data=st.data())
def test_a_held_node_runs_after_what_it_waits_for(probes, case, data):
    graph, schedule = case
    at = data.draw(st.integers(0, len(schedule) - 1))
    holds = {k: schedule[at] + 2 for k in data.draw(st.sets(st.sampled_from(schedule))) if k in schedule[at + 1 :]}
    layout = lay_out(graph, schedule, Placement(holds), rules(graph, probes=probes))
    for order in executed_orders(layout.graph).values():
        place = {k: n for n, k in enumerate(originals(layout, order))}
        assert all(place[k] > place[schedule[at]] for k in holds)


@given(case=graphs_and_schedules(), data=st.data())
def test_views_read_what_the_originals_read_and_the_file_is_sorted(case, data):
    graph, schedule = case
    place = {k: n for n, k in enumerate(schedule)}
    holds = {
        k: awaited + 2
        for k, awaited in data.draw(st.dictionaries(st.sampled_from(schedule), st.sampled_from(schedule))).items()
        if place[awaited] < place[k]
    }
    subsets = st.sets(st.sampled_from(schedule))
    clones = data.draw(st.dictionaries(st.sampled_from(schedule), st.sampled_from(schedule)))
    markers, small = data.draw(subsets), data.draw(subsets)
    veils = data.draw(st.sets(st.integers(0, len(schedule) + 1)))
    layout = lay_out(graph, schedule, Placement(holds, markers, veils), rules(graph, small=small, clones=clones))
    source = {r.value: r.source for r in layout.rows if isinstance(r, Added) and r.kind == "view"}

    def original(v):
        while v in source:
            v = source[v]
        return v

    for row, kernel in zip(layout.rows, layout.graph.kernels, strict=True):
        if isinstance(row, int):
            assert tuple(map(original, kernel.reads)) == graph.kernels[row].reads
    made = {v for v in range(len(graph.names)) if graph.external[v]}
    for kernel in layout.graph.kernels:
        assert set(kernel.reads) <= made
        made.update(kernel.writes)
