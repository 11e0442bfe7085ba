"""Packing into one arena: no two live buffers overlap, and the plan in the metadata says where everything lies."""

import json

import onnx
import pytest
from graphs import deep_chain, graph
from hypothesis import given
from hypothesis import strategies as st

from onnx_sublinear.errors import PostconditionError
from onnx_sublinear.liveness import Lifetime, live_profile, peak_of
from onnx_sublinear.passes import share
from onnx_sublinear.passes.base import PassResult
from onnx_sublinear.passes.share import PLAN_KEY, SharePass, pack
from onnx_sublinear.training_graph import TrainingGraph


def plan_in(model):
    (text,) = [p.value for p in model.metadata_props if p.key == PLAN_KEY]
    return json.loads(text)


def overlaps(buffers):
    """Pairs that share bytes and time, by comparing all with all."""
    return [
        (a[0], b[0])
        for i, a in enumerate(buffers)
        for b in buffers[:i]
        if a[1] < b[1] + b[2] and b[1] < a[1] + a[2] and a[3] < b[4] and b[3] < a[4]
    ]


@st.composite
def lifetimes(draw, most=30):
    found = []
    for i in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, 20))
        size = 64 * draw(st.integers(1, 9))
        found.append(Lifetime(f"t{i}", size, start, start + draw(st.integers(1, 10))))
    return found


@pytest.mark.parametrize("with_care", [3000, 5, 0], ids=["all large", "some small", "all small"])
@given(lives=lifetimes())
def test_packing_never_overlaps(with_care, lives):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "_PACKED_WITH_CARE", with_care)
        offsets, arena = pack(lives)
    rows = [[v.name, at, v.size_bytes, v.start, v.end] for v, at in zip(lives, offsets, strict=True)]
    assert overlaps(rows) == []
    assert arena >= peak_of(live_profile(lives, 32))
    assert all(row[1] >= 0 and row[1] + row[2] <= arena for row in rows)
    assert all(row[1] % 64 == 0 for row in rows)


def test_buffers_of_disjoint_lives_share_space():
    assert pack([Lifetime("a", 128, 0, 2), Lifetime("b", 128, 2, 4), Lifetime("c", 128, 4, 5)]) == ([0, 0, 0], 128)


def test_touching_lives_do_not_overlap_since_they_are_half_open():
    assert pack([Lifetime("a", 128, 0, 3), Lifetime("b", 128, 2, 4)])[1] == 256


CHAIN = """chain (float[64] x) => (float loss, float[64] dx) {
  a = Exp (x)
  b = Tanh (a)
  c = Identity (b)
  loss = ReduceSum <keepdims = 0> (c)
  dx = Neg (b)
}"""


class TestPass:
    def test_the_plan_of_a_chain(self):
        """b runs in a's buffer, c is a view of it; loss and dx are outputs, held to the end."""
        plan = plan_in(SharePass()(graph(CHAIN)).model)
        assert {key: plan[key] for key in ("version", "order", "alignment")} == {
            "version": 1,
            "order": "default",
            "alignment": 64,
        }
        assert plan["aliases"] == {"b": "a", "c": "a"}
        assert {row[0]: row[2] for row in plan["buffers"]} == {"a": 256, "dx": 256, "loss": 64}
        assert {row[0]: row[4] for row in plan["buffers"]} == {"a": 5, "dx": 5, "loss": 5}
        assert plan["live_bytes"] == plan["arena_bytes"] == 576

    def test_facts_and_notes_repeat_the_plan(self):
        result = SharePass()(graph(CHAIN))
        plan = plan_in(result.model)
        assert result.facts == {"arena_bytes": plan["arena_bytes"], "live_bytes": plan["live_bytes"]}
        assert result.notes == ("arena 576 bytes, 0.0% above the live bytes",)

    def test_nodes_stay_and_facts_hold(self):
        g = graph(CHAIN)
        result = SharePass()(g)
        assert result.model.graph == g.model.graph
        assert result.graph.index is g.index
        assert PLAN_KEY not in [p.key for p in g.model.metadata_props]

    def test_a_second_run_replaces_the_plan(self):
        first = SharePass()(graph(CHAIN))
        assert plan_in(SharePass()(first.graph).model) == plan_in(first.model)

    def test_an_empty_graph_has_an_empty_plan(self):
        result = SharePass()(TrainingGraph(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))))
        assert plan_in(result.model)["buffers"] == []
        assert result.notes == ()
        SharePass().ensures(result.graph, result)

    def test_a_shifted_offset_is_caught(self):
        """Every buffer in turn is moved onto another one that lives at the same time."""
        g = TrainingGraph(deep_chain(6))
        result = SharePass()(g)
        SharePass().ensures(g, result)
        buffers = plan_in(result.model)["buffers"]
        assert overlaps(buffers) == []
        caught = 0
        for i in range(len(buffers)):
            partner = next(
                (j for j, b in enumerate(buffers) if j != i and b[3] < buffers[i][4] and buffers[i][3] < b[4])
            )
            planted = [list(b) for b in buffers]
            planted[i][1] = planted[partner][1] + planted[partner][2] - 64
            with pytest.raises(PostconditionError, match="'share' gave") as error:
                SharePass().ensures(g, tampered(result, planted))
            pair = tuple(part for part in error.value.message.split("'")[3::2])
            assert pair in overlaps(planted) or pair[::-1] in overlaps(planted)
            caught += 1
        assert caught == len(buffers) > 10

    @given(lives=lifetimes(most=12), data=st.data())
    def test_the_check_agrees_with_comparing_all_with_all(self, lives, data):
        rows = [[v.name, 64 * data.draw(st.integers(0, 20)), v.size_bytes, v.start, v.end] for v in lives]
        found = share._first_overlap(rows)
        every = overlaps(rows)
        assert (found is None) == (not every)
        assert found is None or found in every or found[::-1] in every


def tampered(result, buffers):
    model = onnx.ModelProto()
    model.CopyFrom(result.model)
    for entry in model.metadata_props:
        if entry.key == PLAN_KEY:
            entry.value = json.dumps({**json.loads(entry.value), "buffers": buffers})
    return PassResult(result.graph.with_model(model, same_nodes=True), True)
