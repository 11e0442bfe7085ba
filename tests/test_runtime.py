from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from onnx_sublinear import measure as measuring
from onnx_sublinear.errors import MissingExtraError, ModelError, UsageError
from onnx_sublinear.feeds import input_specs, load_feeds, make_feeds
from onnx_sublinear.measure import measure, peak_measurable
from onnx_sublinear.runtime import TARGETS, available_targets, session_options, training_session

MIB = 1 << 20
LINUX = pytest.mark.skipif(bool(peak_measurable()), reason="the peak is measured on Linux")

HELD = """
<ir_version: 10, opset_import: ["" : 17]>
held (float[{n}] x) => (float[] loss) {{
  a = Exp(x)
  b = Exp(a)
  c = Add(a, b)
  d = Add(b, c)
  e = Add(a, d)
  loss = ReduceMean<keepdims=0>(e)
}}
"""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph that holds four tensors of 16 MiB at its peak: a, b, c and d."""
    path = tmp_path_factory.mktemp("runtime") / "held.onnx"
    onnx.save(parser.parse_model(HELD.format(n=4 * MIB)), path)
    return path


@pytest.fixture(scope="module")
def held_feeds() -> dict[str, np.ndarray]:
    return {"x": np.full(4 * MIB, -1, np.float32)}


def model_of(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "feeds", list(inputs), []))


class TestSessions:
    def test_options_keep_memory_low(self) -> None:
        import onnxruntime as ort

        options = session_options()
        assert not options.enable_mem_pattern
        assert options.enable_cpu_mem_arena
        assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        assert options.execution_order == ort.ExecutionOrder.DEFAULT

    def test_a_session_runs(self, held: Path, held_feeds: dict[str, np.ndarray]) -> None:
        session = training_session(held, level="none", order="priority")
        (loss,) = session.run(None, held_feeds)
        one = np.exp(np.float32(-1))
        assert loss == pytest.approx(float(2 * one + 2 * np.exp(one)), rel=0.02)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [({"target": "tpu"}, "tpu"), ({"level": "max"}, "max"), ({"order": "random"}, "random")],
    )
    def test_what_does_not_exist_is_named(self, arguments: dict[str, str], named: str) -> None:
        with pytest.raises(UsageError, match=named) as caught:
            session_options(**arguments)  # type: ignore[arg-type]
        assert caught.value.hint.startswith("choose one of")

    def test_cpu_has_no_limit(self, held: Path) -> None:
        with pytest.raises(UsageError, match="no memory limit"):
            training_session(held, memory_limit_bytes=MIB)

    def test_cpu_is_available(self) -> None:
        assert "cpu" in available_targets()
        assert set(available_targets()) <= set(TARGETS)

    @pytest.mark.skipif("cuda" in available_targets(), reason="there is a CUDA device")
    def test_cuda_without_a_device_is_one_clear_error(self, held: Path) -> None:
        with pytest.raises(UsageError, match="target 'cuda'"):
            training_session(held, "cuda")

    def test_without_a_runtime_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        assert available_targets() == []
        with pytest.raises(MissingExtraError) as caught:
            session_options()
        assert "onnx-sublinear[gpu]" in caught.value.hint

    def test_importing_needs_no_runtime(self) -> None:
        code = "import sys, onnx_sublinear.runtime, onnx_sublinear.verify; sys.exit('onnxruntime' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.gpu
    def test_cuda_runs_under_a_limit(self, held: Path, held_feeds: dict[str, np.ndarray]) -> None:
        session = training_session(held, "cuda", level="none", memory_limit_bytes=200 * MIB)
        assert np.isfinite(session.run(None, held_feeds)[0])
        with pytest.raises(Exception, match=r"[Mm]emory|alloc"):
            training_session(held, "cuda", level="none", memory_limit_bytes=40 * MIB).run(None, held_feeds)


class TestFeeds:
    def test_values_fit_names_and_types(self) -> None:
        feeds = make_feeds(
            model_of(
                helper.make_tensor_value_info("w", TensorProto.FLOAT, [64, 64]),
                helper.make_tensor_value_info("bn.running_var", TensorProto.FLOAT16, [64]),
                helper.make_tensor_value_info("tokens", TensorProto.INT64, [8, 16]),
                helper.make_tensor_value_info("attention_mask", TensorProto.BOOL, [8, 16]),
                helper.make_tensor_value_info("float_mask", TensorProto.DOUBLE, [8, 16]),
                helper.make_tensor_value_info("training_mode", TensorProto.BOOL, []),
                helper.make_tensor_value_info("ratio", TensorProto.FLOAT, []),
                helper.make_tensor_value_info("text", TensorProto.STRING, [2]),
            )
        )
        assert feeds["w"].dtype == np.float32
        assert 0.05 < feeds["w"].std() < 0.2
        assert feeds["bn.running_var"].dtype == np.float16
        assert (feeds["bn.running_var"] > 0).all()
        assert feeds["tokens"].dtype == np.int64
        assert set(np.unique(feeds["tokens"])) == {0, 1}
        assert feeds["attention_mask"].dtype == np.bool_
        assert set(np.unique(feeds["float_mask"])) == {0.0, 1.0}
        assert feeds["training_mode"].shape == ()
        assert feeds["training_mode"]
        assert 0 <= feeds["ratio"] < 1
        assert feeds["text"].tolist() == ["0", "0"]

    def test_equal_seeds_and_names_give_equal_values(self) -> None:
        w, v = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("w", "v"))
        first, other_order = make_feeds(model_of(w, v), seed=3), make_feeds(model_of(v, w), seed=3)
        assert (first["w"] == other_order["w"]).all()
        assert (first["w"] != first["v"]).all()
        assert (first["w"] != make_feeds(model_of(w), seed=4)["w"]).all()

    def test_symbolic_dims_are_bound_or_named(self) -> None:
        model = model_of(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "width"]))
        assert make_feeds(model, {"batch": 2, "width": 5})["x"].shape == (2, 3, 5)
        with pytest.raises(UsageError, match="batch, width") as caught:
            make_feeds(model, {})
        assert caught.value.hint == "--dim batch=N --dim width=N"
        with pytest.raises(UsageError, match="dimension 1 of input 'y'"):
            make_feeds(model_of(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None])))

    def test_types_without_values_are_named(self) -> None:
        sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [1])
        for value in (sequence, helper.make_tensor_value_info("s", TensorProto.COMPLEX64, [1])):
            with pytest.raises(UsageError, match="input 's'"):
                make_feeds(model_of(value))

    def test_defaults_are_not_fed(self) -> None:
        model = model_of(*(helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "w")))
        model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]))
        assert [s.name for s in input_specs(model)] == ["x"]

    def test_a_session_gives_the_same_specs(self, held: Path) -> None:
        assert input_specs(training_session(held)) == input_specs(onnx.load(held))

    def test_npz_with_plain_and_prefixed_keys(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "plain.npz", x=np.ones(2), y=np.zeros(1))
        assert load_feeds(tmp_path / "plain.npz", ["x"]).keys() == {"x"}
        np.savez(tmp_path / "prefixed.npz", **{"in/x": np.ones(2), "ref/loss": np.zeros(1)})  # type: ignore[arg-type]
        assert load_feeds(tmp_path / "prefixed.npz").keys() == {"x"}

    def test_wrong_files_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "text.npz").write_text("no archive")
        for name in ("text.npz", "absent.npz"):
            with pytest.raises(UsageError, match=name):
                load_feeds(tmp_path / name)
        np.savez(tmp_path / "other.npz", z=np.ones(2))
        with pytest.raises(UsageError, match="none of the model's inputs") as caught:
            load_feeds(tmp_path / "other.npz", ["x"])
        assert "z" in caught.value.hint


class TestMeasure:
    @LINUX
    @pytest.mark.parametrize("order", ["default", "priority"])
    def test_the_peak_is_what_the_graph_holds(
        self, held: Path, held_feeds: dict[str, np.ndarray], order: measuring.Order
    ) -> None:
        taken = measure(held, held_feeds, level="none", order=order, runs=3)
        assert len(taken.peak_bytes) == len(taken.seconds) == 3
        assert taken.peak is not None
        for peak in taken.peak_bytes:
            assert peak == pytest.approx(64 * MIB, rel=0.02)

    @LINUX
    def test_the_pattern_doubles_the_second_run(self, held: Path, held_feeds: dict[str, np.ndarray]) -> None:
        plain = measure(held, held_feeds, level="none", arena=True)
        pattern = measure(held, held_feeds, level="none", arena=True, pattern=True)
        assert plain.peak is not None
        assert pattern.peak_bytes[-1] > 1.5 * plain.peak

    def test_equal_runs_have_equal_digests(self, held: Path, held_feeds: dict[str, np.ndarray]) -> None:
        first, again = (measure(held, held_feeds, level="none") for _ in range(2))
        assert {first.digest, *first.digests, *again.digests} == {first.digest}
        other = measure(held, {"x": held_feeds["x"] + 1}, level="none", runs=1)
        assert other.digest != first.digest

    def test_without_procfs_there_is_a_note(
        self, held: Path, held_feeds: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measuring.sys, "platform", "darwin")
        taken = measure(held, held_feeds, runs=1)
        assert taken.peak_bytes == ()
        assert taken.peak is None
        assert "Linux" in taken.note
        assert taken.median_seconds > 0

    def test_what_the_runtime_refuses_is_a_model_error(self, tmp_path: Path) -> None:
        text = '<ir_version: 10, opset_import: ["" : 17, "lab" : 1]> g (float[2] x) => (float[2] y) { y = lab.Op(x) }'
        onnx.save(parser.parse_model(text), tmp_path / "custom.onnx")
        with pytest.raises(ModelError, match=r"custom\.onnx.*not a registered") as caught:
            measure(tmp_path / "custom.onnx", {"x": np.ones(2, np.float32)})
        assert "\n" not in caught.value.message

    def test_a_missing_feed_is_named(self, held: Path) -> None:
        with pytest.raises(UsageError, match="input 'x'"):
            measure(held, {"z": np.ones(2)})

    def test_no_runs_is_a_usage_error(self, held: Path) -> None:
        with pytest.raises(UsageError):
            measure(held, {}, runs=0)

    def test_a_folder_with_modules_does_no_harm(
        self, held: Path, held_feeds: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
        monkeypatch.chdir(tmp_path)
        assert measure(held, held_feeds, runs=1).digest

    @pytest.mark.gpu
    def test_the_cuda_peak_is_found_by_bisection(self, held: Path, held_feeds: dict[str, np.ndarray]) -> None:
        taken = measure(held, held_feeds, target="cuda", level="none", runs=1)
        assert taken.peak is not None
        assert 64 * MIB <= taken.peak <= 1.1 * 80 * MIB  # the feed is on the device as well

    def test_bisection_finds_the_smallest_limit(self) -> None:
        from onnx_sublinear._measure import smallest_limit

        def attempt(limit: int) -> None:
            if limit < 300 * MIB:
                raise RuntimeError("out of memory")

        assert 300 * MIB <= smallest_limit(attempt) <= 303 * MIB

    def test_a_failure_that_memory_does_not_cure_is_raised(self) -> None:
        from onnx_sublinear._measure import smallest_limit

        def attempt(limit: int) -> None:
            raise RuntimeError(f"wrong feed, at {limit} too")

        with pytest.raises(RuntimeError, match="wrong feed"):
            smallest_limit(attempt)


@pytest.mark.training
@LINUX
def test_the_training_build_measures_alike(held: Path, held_feeds: dict[str, np.ndarray]) -> None:
    taken = measure(held, held_feeds, level="none")
    assert taken.peak is not None
    assert taken.peak == pytest.approx(64 * MIB, rel=0.02)
