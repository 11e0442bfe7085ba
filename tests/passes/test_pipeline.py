"""The pass contract and the pipeline: text form, callback, notes and facts, contract errors."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from graphs import deep_chain, graph

from onnx_sublinear.errors import PassError, PostconditionError, PreconditionError, UsageError
from onnx_sublinear.passes import Pass, PassResult, Pipeline, registry
from onnx_sublinear.passes.inplace import InplacePass
from onnx_sublinear.passes.lower_training_ops import LowerTrainingOpsPass
from onnx_sublinear.passes.order import OrderPass
from onnx_sublinear.passes.recompute import RecomputePass
from onnx_sublinear.passes.registry import available, default_passes, pass_named
from onnx_sublinear.passes.share import SharePass
from onnx_sublinear.training_graph import TrainingGraph

TEXT = "g (float[8] x) => (float loss, float[8] dx) { loss = ReduceSum <keepdims = 0> (x)\n dx = Neg (x) }"


@dataclass(frozen=True)
class Probe(Pass):
    """A pass with options of several types that says what it was given."""

    name: ClassVar[str] = "probe"

    word: str = ""
    how_often: int = 1
    share: float = 0.5
    fails: str = ""

    def __call__(self, graph):
        if self.fails == "type":
            return graph
        return PassResult(graph, self.word == "changes", (f"probe {self.word}",), {"word": self.word, self.word: 1})

    def requires(self, graph):
        if self.fails == "before":
            raise PreconditionError("pass 'probe' misses tensor 'x'")

    def ensures(self, before, result):
        if self.fails == "after":
            raise PostconditionError("pass 'probe' lost tensor 'x'")


class TestTextForm:
    @pytest.mark.parametrize(
        "text",
        [
            "recompute",
            "recompute{budget=2GiB}",
            "recompute{budget=60%,max-overhead=20%,strategy=sqrt}",
            "recompute{budget=2GiB},inplace,order,share",
            "inplace,inplace",
        ],
    )
    def test_it_round_trips(self, text):
        pipeline = Pipeline.parse(text)
        assert str(pipeline) == text
        assert Pipeline.parse(str(pipeline)) == pipeline

    def test_the_default_passes_round_trip(self):
        pipeline = Pipeline(default_passes(RecomputePass(budget="2GiB")))
        assert str(pipeline) == "recompute{budget=2GiB},inplace,order,share"
        assert Pipeline.parse(str(pipeline)) == pipeline
        assert [p.name for p in default_passes(None)] == ["inplace", "order", "share"]

    @pytest.mark.parametrize(
        ("text", "same"),
        [
            (" recompute { budget = 2GiB } , share ", "recompute{budget=2GiB},share"),
            ("recompute{}", "recompute"),
            ("recompute{max_overhead=0.2}", "recompute{max-overhead=0.2}"),
            ("recompute{strategy=auto}", "recompute"),
        ],
    )
    def test_other_spellings(self, text, same):
        assert str(Pipeline.parse(text)) == same

    @pytest.mark.parametrize(
        "text",
        [
            *("", " ", ",", "share,", ",share", "share,,order", "share order", "share;order"),
            *("recompute{budget=1", "recompute}", "recompute{budget}", "recompute{{budget=1}}", "{budget=1}"),
            *("recompute{budget=1}share", "recompute{colour=red}", "fast", "share{size=1}", "Recompute"),
        ],
    )
    def test_malformed_text_is_a_usage_error(self, text):
        with pytest.raises(UsageError) as caught:
            Pipeline.parse(text)
        assert caught.value.hint

    def test_unknown_names_are_said_with_what_exists(self):
        with pytest.raises(UsageError, match="no pass 'fast'") as caught:
            pass_named("fast")
        assert caught.value.hint == "passes: lower-training-ops, recompute, inplace, order, share"
        with pytest.raises(UsageError, match="no option 'colour'") as caught:
            Pipeline.parse("recompute{colour=red}")
        assert caught.value.hint == "its options: budget, max-overhead, strategy"


class TestOptions:
    def test_values_take_the_type_of_the_default(self):
        probe = Probe.from_options({"word": "a", "how-often": "3", "share": "0.25"})
        assert probe == Probe("a", 3, 0.25)
        assert str(probe) == "probe{word=a,how-often=3,share=0.25}"

    def test_a_value_of_another_type_is_a_usage_error(self):
        with pytest.raises(UsageError, match="'many' is no value for option 'how_often'"):
            Probe.from_options({"how-often": "many"})


class TestRegistry:
    def test_ours_are_there(self):
        assert dict(list(available().items())[:5]) == {
            "lower-training-ops": LowerTrainingOpsPass,
            "recompute": RecomputePass,
            "inplace": InplacePass,
            "order": OrderPass,
            "share": SharePass,
        }

    def test_other_packages_register_through_an_entry_point(self, monkeypatch):
        class Entry:
            def __init__(self, name):
                self.name = name

            def load(self):
                return Probe

        entries = {"onnx_sublinear.passes": [Entry("probe"), Entry("share")]}
        monkeypatch.setattr(registry, "entry_points", lambda group: entries[group])
        assert Pipeline.parse("probe{word=hi},share").passes == (Probe("hi"), SharePass())


class TestRun:
    def test_passes_run_in_order_and_the_callback_sees_all_seams(self):
        seen = []

        def call_back(previous, graph, following):
            seen.append((previous and previous.word, isinstance(graph, TrainingGraph), following and following.word))

        result = Pipeline([Probe("a"), Probe("b")], call_back)(graph(TEXT))
        assert seen == [(None, True, "a"), ("a", True, "b"), ("b", True, None)]
        assert result.notes == ("probe a", "probe b")
        assert result.facts == {"word": "b", "a": 1, "b": 1}

    @pytest.mark.parametrize(("words", "modified"), [("ab", False), (["changes", "b"], True), (["a", "changes"], True)])
    def test_modified_if_any_pass_did(self, words, modified):
        assert Pipeline([Probe(word) for word in words])(graph(TEXT)).modified is modified

    def test_no_passes_no_change(self):
        g = graph(TEXT)
        result = Pipeline([])(g)
        assert (result.graph, result.modified, result.notes) == (g, False, ())

    @pytest.mark.parametrize(
        ("fails", "error", "message"),
        [
            ("before", PreconditionError, "pass 'probe' misses tensor 'x'"),
            ("after", PostconditionError, "pass 'probe' lost tensor 'x'"),
            ("type", PassError, "pass 'probe' returned TrainingGraph, not a PassResult"),
        ],
    )
    def test_a_broken_contract_names_the_pass(self, fails, error, message):
        with pytest.raises(error, match=message) as caught:
            Pipeline([Probe("a"), Probe(fails=fails)])(graph(TEXT))
        assert isinstance(caught.value, PassError)
        assert caught.value.exit_code == 1

    def test_passes_never_change_the_model_they_are_given(self):
        g = TrainingGraph(deep_chain(12))
        before = g.model.SerializeToString(deterministic=True)
        result = Pipeline(default_passes(RecomputePass()))(g)
        assert result.modified
        assert g.model.SerializeToString(deterministic=True) == before

    def test_a_pass_is_a_value(self):
        assert RecomputePass(budget="1") == RecomputePass(budget="1")
        assert len({OrderPass(), OrderPass(), SharePass()}) == 2
        with pytest.raises(AttributeError):
            RecomputePass().budget = "2"
