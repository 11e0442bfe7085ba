"""Layouts: a barrier in front of every node holds any order, in both orders of the runtime."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_sublinear.passes.barriers import Added, Placement, StageRules, lay_out
from onnx_sublinear.runtime_model import Kernel, RuntimeGraph, executed_orders, simulate

X, W = 0, 1


def line(reads_of, *, outputs=()):
    """Kernel k reads `reads_of[k]` and makes value k + 2; values 0 and 1 are graph inputs."""
    graph = RuntimeGraph()
    graph.add_value("x", 0, 1, shape=1, external=True)
    graph.add_value("w", 0, 1, shape=1, external=True)
    for k, reads in enumerate(reads_of):
        graph.add_value(f"v{k}", 128, 1, shape=1, output=k in outputs)
        graph.kernels.append(Kernel(tuple(reads), (k + 2,)))
    return graph


def rules(graph, *, private=False, probes=False, ranks=None, countable=None, small=()):
    count = len(graph.kernels)
    return StageRules(
        ranks=ranks or [2] * len(graph.names),
        countable=countable or [True] * len(graph.names),
        slots=[k.reads for k in graph.kernels],
        small_output=[k in small for k in range(count)],
        small_all=[k in small for k in range(count)],
        private=private,
        probes=probes,
        free_source=X,
    )


def rows(layout):
    """The file as text: `v3` for an original node, `kind(source)` for an added one."""
    names = layout.graph.names
    return [f"{r.kind}({names[r.source]})" if isinstance(r, Added) else names[r + 2] for r in layout.rows]


def originals(layout, order):
    return [layout.rows[k] for k in order if isinstance(layout.rows[k], int)]


# Two weight gradients (v1, v3) on a chain: DEFAULT runs the chain first, then the leaves.
LEAVES = line([[X], [2, X], [2], [4, X]], outputs=(1, 3))


class TestPlacement:
    def test_without_stages_nothing_is_added(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement(), rules(LEAVES))
        assert rows(layout) == ["v0", "v1", "v2", "v3"]
        assert layout.added == 0
        assert originals(layout, executed_orders(layout.graph)["default"]) == [0, 2, 3, 1]

    def test_a_barrier_is_a_token_a_shape_and_a_view(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES))
        assert rows(layout) == ["v0", "v1", "token(v1)", "shape(v0)", "view(v0)", "v2", "v3"]
        assert layout.added == 3
        reader = layout.graph.kernels[5]
        assert reader.reads == (layout.rows[4].value,)
        assert layout.swaps == {2: {2: layout.rows[4].value}}
        for order in executed_orders(layout.graph).values():
            assert originals(layout, order) == [0, 1, 2, 3]

    def test_a_stage_that_reads_the_sink_needs_no_barrier(self):
        chain = line([[X], [2], [3]])
        layout = lay_out(chain, [0, 1, 2], Placement({1, 2}), rules(chain))
        assert rows(layout) == ["v0", "v1", "v2"]

    def test_one_view_serves_all_roots_that_read_the_value(self):
        fan = line([[X], [W], [X, W], [X]])
        layout = lay_out(fan, [0, 1, 2, 3], Placement({2}), rules(fan))
        assert rows(layout) == ["v0", "v1", "token(v0)", "token(v1)", "shape(x)", "view(x)", "v2", "v3"]
        view = layout.rows[5].value
        assert layout.graph.kernels[6].reads == (view, W)
        assert layout.graph.kernels[7].reads == (view,)

    def test_values_of_unknown_rank_are_not_viewed(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, ranks=[2, 2, -1, 2, 2, 2]))
        assert layout.added == 0

    def test_what_is_no_tensor_gets_no_token(self):
        countable = [True] * len(LEAVES.names)
        countable[3] = False
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, countable=countable))
        assert layout.added == 0

    def test_small_nodes_are_neither_held_back_nor_waited_for(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, small={2}))
        assert "view(v0)" not in rows(layout)
        waits_for_small = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, small={1}))
        assert "token(v1)" not in rows(waits_for_small)

    def test_what_a_small_node_of_the_same_stage_makes_is_not_viewed(self):
        """v1 is small, so v2 counts as a root; the view must be of w, since v1 is made behind the barrier."""
        graph = line([[X], [W], [3, W], [4]])
        layout = lay_out(graph, [0, 1, 2, 3], Placement({1}), rules(graph, small={1}))
        assert rows(layout) == ["v0", "token(v0)", "shape(w)", "view(w)", "v1", "v2", "v3"]

    def test_entries_are_viewed_in_front_of_the_first_stage(self):
        chain = line([[X], [2]])
        layout = lay_out(chain, [0, 1], Placement(entries=(X,)), rules(chain))
        assert rows(layout) == ["token(x)", "shape(x)", "view(x)", "v0", "v1"]
        assert layout.graph.kernels[3].reads == (layout.rows[2].value,)

    def test_releases_share_token_and_shape(self):
        chain = line([[X], [2], [3]])
        layout = lay_out(chain, [0, 1, 2], Placement(releases={1: (2,), 2: (3,)}), rules(chain))
        assert rows(layout) == ["v0", "token(x)", "shape(v0)", "view(v0)", "v1", "view(v1)", "v2"]

    def test_the_graph_given_is_not_changed(self):
        names, kernels = list(LEAVES.names), list(LEAVES.kernels)
        lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, private=True))
        assert (LEAVES.names, LEAVES.kernels) == (names, kernels)


class TestPrivate:
    def test_views_get_layouts_of_their_own(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, private=True))
        laid = layout.graph
        view = layout.rows[4].value
        assert laid.layouts[view] not in laid.layouts[:4]
        assert laid.layouts[4] == laid.layouts[view]  # v2, made from the view, carries its symbol
        assert lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES)).graph.layouts[view] == 1

    def test_a_view_shares_its_values_buffer(self):
        layout = lay_out(LEAVES, [0, 1, 2, 3], Placement({2}), rules(LEAVES, private=True))
        run = simulate(layout.graph, range(len(layout.rows)))
        assert run.buffer_of[layout.rows[4].value] == 2


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
@pytest.mark.parametrize("options", [{}, {"private": True}, {"probes": True}], ids=["plain", "private", "probes"])
@given(case=graphs_and_schedules())
def test_when_every_node_is_a_stage_every_order_is_the_schedule(options, training, case):
    graph, schedule = case
    layout = lay_out(graph, schedule, Placement(range(len(schedule))), rules(graph, **options))
    for order in executed_orders(layout.graph, training=training).values():
        assert sorted(order) == list(range(len(layout.rows)))
        assert originals(layout, order) == schedule


@given(case=graphs_and_schedules(), data=st.data())
def test_stages_run_one_after_the_other(case, data):
    """With any stages: nodes stay in their stages, whatever the order inside."""
    graph, schedule = case
    starts = data.draw(st.sets(st.integers(1, len(schedule))))
    layout = lay_out(graph, schedule, Placement(starts), rules(graph))
    for order in executed_orders(layout.graph).values():
        stages = [layout.stages[k] for k in originals(layout, order)]
        assert stages == sorted(stages)


@given(case=graphs_and_schedules(), data=st.data())
def test_views_read_what_the_originals_read_and_the_file_is_sorted(case, data):
    graph, schedule = case
    starts = data.draw(st.sets(st.integers(1, len(schedule))))
    small = data.draw(st.sets(st.sampled_from(schedule)))
    layout = lay_out(graph, schedule, Placement(starts), rules(graph, small=small))
    source = {r.value: r.source for r in layout.rows if isinstance(r, Added) and r.kind == "view"}
    for row, kernel in zip(layout.rows, layout.graph.kernels, strict=True):
        if isinstance(row, int):
            assert tuple(source.get(v, v) for v in kernel.reads) == graph.kernels[row].reads
    made = {v for v in range(len(graph.names)) if graph.external[v]}
    for kernel in layout.graph.kernels:
        assert set(kernel.reads) <= made
        made.update(kernel.writes)
