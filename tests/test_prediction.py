"""Predictions for each configuration: where they come from, and why there is none."""

import onnx
import pytest
from graphs import deep_chain, graph

from onnx_sublinear import matrix, prediction
from onnx_sublinear.feeds import make_feeds
from onnx_sublinear.matrix import measure_matrix
from onnx_sublinear.measure import peak_measurable
from onnx_sublinear.prediction import CONFIGURATIONS, Configuration, configurations, predict
from onnx_sublinear.report import matrix_text, predictions_text
from onnx_sublinear.run_memory import Allocation
from onnx_sublinear.runtime_dump import installed_build
from onnx_sublinear.training_graph import TrainingGraph

needs_runtime = pytest.mark.skipif(installed_build() is None, reason="ONNX Runtime is not installed")


@pytest.fixture
def without_runtime(monkeypatch):
    monkeypatch.setattr(prediction, "installed_build", lambda: None)


def chain():
    return TrainingGraph(deep_chain(6))


def test_the_table_is_complete():
    assert len(CONFIGURATIONS) == len(set(CONFIGURATIONS)) == 2 * 3 * 2 * 2


def test_without_a_runtime_our_own_model_answers_at_level_none(without_runtime):
    found = predict(chain())
    assert [p.configuration for p in found] == list(CONFIGURATIONS)
    assert all((p.peak_bytes is not None) == (p.configuration.level == "none") for p in found)
    assert {p.source for p in found if p.peak_bytes} == {"model"}
    assert {p.reason for p in found if not p.peak_bytes} == {
        f"the {build} build is not installed, and fusions are its own" for build in ("stock", "training")
    }


@needs_runtime
def test_the_installed_build_is_asked_and_agrees_with_our_own_model():
    wanted = configurations(builds=[installed_build()], levels=["none"])
    asked, own = (predict(chain(), wanted, ask_runtime=ask) for ask in (True, False))
    assert {p.source for p in asked} == {"runtime dump"}
    assert [p.peak_bytes for p in asked] == [p.peak_bytes for p in own]


def test_training_operators_have_no_prediction_on_the_stock_build(without_runtime):
    g = graph("g (float[8] x) => (float[8] y) { h = Tanh (x)\n y = com.microsoft.TanhGrad (h, h) }")
    stock, training = predict(g, configurations(levels=["none"], orders=["default"], allocations=[Allocation()]))
    assert stock.peak_bytes is None
    assert "onnxruntime-training" in stock.reason
    assert training.peak_bytes is not None


@needs_runtime
def test_a_model_that_the_runtime_refuses_falls_back_and_says_so():
    g = graph("g (float[8] x) => (float[8] y) { h = Tanh (x)\n y = lab.Unheard (h) }")
    found = predict(g, configurations(builds=[installed_build()], levels=["none", "all"], orders=["default"]))
    assert all("cannot load it" in p.reason for p in found)
    assert {(p.configuration.level, p.source) for p in found} == {("none", "model"), ("all", "")}


def test_unknown_sizes_give_a_reason(without_runtime):
    g = graph("g (float[N, 8] x) => (float[N, 8] z) { y = Exp (x)\n z = Exp (y) }")
    (found,) = predict(g, [Configuration("stock", "none")])
    assert found.peak_bytes is None
    assert found.reason == "2 tensors have an unknown size, e.g. 'y'"


def test_the_pattern_doubles_the_stock_builds_memory_in_the_second_run(without_runtime):
    off, on = predict(
        TrainingGraph(deep_chain(8, width=65536)),
        [Configuration("stock", "none", allocation=Allocation(True, pattern)) for pattern in (False, True)],
    )
    assert off.run_bytes[1] < off.run_bytes[0] / 10
    assert on.peak_bytes > 1.2 * off.peak_bytes


def test_text_has_a_row_for_each_build_level_and_arena(without_runtime):
    lines = predictions_text(predict(chain())).splitlines()
    assert len(lines) == 1 + 2 * 3 * 2 + 2 * 2
    assert lines[1].split()[:3] == ["stock", "none", "off"]
    assert lines[-1].startswith("note: training, level all: ")


@needs_runtime
@pytest.mark.skipif(bool(peak_measurable()), reason="the peak is measured on Linux")
def test_matrix_measures_what_is_predicted(tmp_path, monkeypatch):
    proto = deep_chain(4, width=1 << 17)  # tensors of 4 MiB
    path = tmp_path / "chain.onnx"
    onnx.save(proto, path)
    few = configurations(builds=[installed_build()], levels=["none"], orders=["default"])
    monkeypatch.setattr(matrix, "configurations", lambda **_: few)
    lines = []
    found = measure_matrix([path], make_feeds(proto, {}), progress=lines.append)
    assert len(found.cells) == len(few) == 2
    assert found.cells[0].deviation == pytest.approx(0, abs=0.05)
    assert found.worst_deviation < 0.05
    assert len(lines) == 3
    assert "largest deviation" in matrix_text(found)
    assert found.to_dict()["cells"][0]["configuration"]["level"] == "none"
