"""The commands on real graphs: what they print and write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_sublinear import errors
from onnx_sublinear.cli.app import run
from onnx_sublinear.measure import peak_measurable
from onnx_sublinear.rewrite_check import check_rewrite

GOLDEN = Path(__file__).parents[2] / "models" / "golden"
CHAIN = GOLDEN / "chain64.onnx"
REPORT_KEYS = {
    "peak_before_bytes",
    "peak_after_bytes",
    "lower_bound_bytes",
    "overhead",
    "forward_share",
    "clones",
    "barriers",
    "strategy",
    "unknown_size_tensors",
    "arena_bytes",
    "seconds",
}

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands") / "out.onnx"
    assert run(["optimize", str(CHAIN), "-o", str(path), "--quiet"]) == 0
    return path


def call(capsys: Captured, *arguments: object) -> Any:
    """The JSON that a command prints."""
    assert run([*map(str, arguments), "--json", *([] if arguments[0] in ("passes", "inspect") else ["--quiet"])]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


class TestOptimize:
    def test_json_has_the_fixed_keys_and_exact_bytes(self, tmp_path: Path, capsys: Captured) -> None:
        data = call(capsys, "optimize", CHAIN, "-o", tmp_path / "out.onnx")
        assert data.keys() >= REPORT_KEYS
        assert all(type(data[k]) is int for k in REPORT_KEYS if k.endswith("_bytes"))
        assert type(data["unknown_size_tensors"]) is int
        assert data["lower_bound_bytes"] <= data["peak_after_bytes"] < data["peak_before_bytes"] / 2
        assert data["clones"] > 0
        assert sum(data["recomputed"].values()) == data["clones"]

    def test_text_shows_before_and_after_and_the_next_step(self, tmp_path: Path, capsys: Captured) -> None:
        assert run(["optimize", str(CHAIN), "-o", str(tmp_path / "out.onnx")]) == 0
        out, err = capsys.readouterr()
        assert re.search(r"^peak, default order +[\d.]+ [KMG]iB +[\d.]+ [KMG]iB +[\d.]+%$", out, re.MULTILINE)
        assert f"measure with: onnx-sublinear bench {CHAIN} {tmp_path / 'out.onnx'}" in out
        assert all(line.startswith("[") for line in err.splitlines())

    def test_the_output_is_proven(self, optimized: Path) -> None:
        assert check_rewrite(onnx.load(CHAIN), onnx.load(optimized)) == []

    def test_verify_runs_before_the_output_appears(self, tmp_path: Path, capsys: Captured) -> None:
        assert run(["optimize", str(CHAIN), "-o", str(tmp_path / "out.onnx"), "--verify"]) == 0
        assert "equal bits" in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]

    def test_a_failed_verification_writes_nothing(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onnx_sublinear.verify.check_rewrite", lambda a, b: ["node 'x' is gone"])
        assert run(["optimize", str(CHAIN), "-o", str(tmp_path / "out.onnx"), "--verify", "--quiet"]) == 5
        assert "node 'x' is gone" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_a_budget_that_cannot_be_met(self, tmp_path: Path, capsys: Captured) -> None:
        assert run(["optimize", str(CHAIN), "-o", str(tmp_path / "o.onnx"), "--budget", "1KiB", "--quiet"]) == 4
        assert "cannot be met" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_is_no_model(self, tmp_path: Path, capsys: Captured) -> None:
        (tmp_path / "text.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
        assert run(["optimize", str(tmp_path / "text.onnx"), "-o", str(tmp_path / "o.onnx"), "--quiet"]) == 3
        assert "text.onnx" in capsys.readouterr().err
        assert not (tmp_path / "o.onnx").exists()

    def test_force_replaces_the_input(self, tmp_path: Path) -> None:
        model = tmp_path / "model.onnx"
        model.write_bytes(CHAIN.read_bytes())
        assert run(["optimize", str(model), "-o", str(model), "--force", "--quiet"]) == 0
        assert check_rewrite(onnx.load(CHAIN), onnx.load(model)) == []
        assert model.read_bytes() != CHAIN.read_bytes()
        assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]

    def test_dims_reach_the_plan_and_the_next_step(self, tmp_path: Path, capsys: Captured) -> None:
        output = tmp_path / "out.onnx"
        assert run(["optimize", str(GOLDEN / "mlp_symbolic.onnx"), "-o", str(output), "--dim", "batch=64"]) == 0
        assert "--dim batch=64" in capsys.readouterr().out


class TestInspect:
    def test_json(self, capsys: Captured) -> None:
        data = call(capsys, "inspect", CHAIN)
        assert data["lower_bound_bytes"] <= data["peak_priority_bytes"] <= data["peak_default_bytes"]
        assert max(data["timeline"]) == data["peak_default_bytes"]
        assert data["largest"]

    def test_text(self, capsys: Captured) -> None:
        assert run(["inspect", str(CHAIN)]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^lower bound +[\d.]+ [KMG]iB +at ", out, re.MULTILINE)
        assert "largest tensors" in out
        assert re.search(r"^\|.{10,}\|$", out, re.MULTILINE)

    def test_runtime_adds_a_prediction_for_each_session(self, capsys: Captured) -> None:
        data = call(capsys, "inspect", CHAIN, "--runtime")
        assert len(data["runtime"]) == 24
        plain = [p for p in data["runtime"] if p["configuration"]["level"] == "none" and p["source"]]
        assert min(p["peak_bytes"] for p in plain) > 0
        assert run(["inspect", str(CHAIN), "--runtime"]) == 0
        assert re.search(r"^training +none +off +[\d.]+ [KMG]iB", capsys.readouterr().out, re.MULTILINE)

    def test_runtime_is_for_the_cpu(self, capsys: Captured) -> None:
        assert run(["inspect", str(CHAIN), "--runtime", "--target", "cuda"]) == 2
        assert "--runtime predicts sessions on the CPU only" in capsys.readouterr().err


class TestVerify:
    def test_equal_models(self, optimized: Path, capsys: Captured) -> None:
        data = call(capsys, "verify", CHAIN, optimized)
        assert data["proven"]
        assert data["bitwise"]
        assert data["findings"] == []

    def test_another_model_exits_5(self, tmp_path: Path, capsys: Captured) -> None:
        model = onnx.load(CHAIN)
        tanh = next(n for n in model.graph.node if n.op_type in ("Tanh", "Relu", "Sigmoid"))
        tanh.op_type = "Identity"
        onnx.save(model, tmp_path / "other.onnx")
        assert run(["verify", str(CHAIN), str(tmp_path / "other.onnx"), "--quiet"]) == 5
        out, err = capsys.readouterr()
        assert "not proven" in out
        assert re.match(r"error: output '.*' differs: ", err)
        assert run(["verify", str(CHAIN), str(tmp_path / "other.onnx"), "--static"]) == 5

    def test_static_needs_no_runtime(self, optimized: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
        assert call(capsys, "verify", CHAIN, optimized, "--static") == {"proven": True, "findings": []}

    def test_feeds_from_a_file(self, tmp_path: Path, optimized: Path, capsys: Captured) -> None:
        from models.feeds import feeds

        np.savez(tmp_path / "feeds.npz", **feeds(onnx.load(CHAIN), 1))  # type: ignore[arg-type]
        assert call(capsys, "verify", CHAIN, optimized, "--feeds", tmp_path / "feeds.npz")["bitwise"]

    def test_a_graph_of_training_operators_names_the_extra(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = onnx.load(CHAIN)
        output = helper.make_tensor_value_info("flag", onnx.TensorProto.FLOAT, None)
        model.graph.node.append(helper.make_node("NoSuchGrad", [CHAIN.stem], ["flag"], domain="com.microsoft"))
        model.graph.node[-1].input[0] = model.graph.input[0].name
        model.graph.output.append(output)
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        onnx.save(model, tmp_path / "a.onnx")
        assert run(["verify", str(tmp_path / "a.onnx"), str(tmp_path / "a.onnx"), "--quiet"]) == 3
        assert "onnx-sublinear[training]" in capsys.readouterr().err


class TestBench:
    def test_json(self, optimized: Path, capsys: Captured) -> None:
        data = call(capsys, "bench", CHAIN, optimized, "--runs", 1)
        assert data["outputs_equal"]
        assert data["outputs_bitwise"]
        assert data["time_ratio"] > 0
        assert data["optimized"]["predicted_peak_bytes"] < data["original"]["predicted_peak_bytes"]
        if not peak_measurable():
            assert data["peak_ratio"] < 1

    def test_text(self, optimized: Path, capsys: Captured) -> None:
        assert run(["bench", str(CHAIN), str(optimized), "--runs", "1", "--quiet"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^peak, predicted +[\d.]+ [KMG]iB +[\d.]+ [KMG]iB +[\d.]+%$", out, re.MULTILINE)
        assert re.search(r"^time of a step .* x [\d.]+$", out, re.MULTILINE)
        assert "equal bits" in out

    def test_two_models_are_needed_without_matrix(self, capsys: Captured) -> None:
        assert run(["bench", str(CHAIN)]) == 2
        assert "use --matrix" in capsys.readouterr().err

    def test_matrix_is_for_the_cpu(self, capsys: Captured) -> None:
        assert run(["bench", str(CHAIN), "--matrix", "--target", "cuda"]) == 2
        assert "--matrix measures sessions on the CPU only" in capsys.readouterr().err

    def test_without_a_runtime_the_extra_is_named(
        self, optimized: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = errors.MissingExtraError("running a model", ("gpu", "cpu"))

        def missing(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr("onnx_sublinear.verify.run_in_process", missing)
        assert run(["bench", str(CHAIN), str(optimized), "--quiet"]) == 2
        assert "pip install 'onnx-sublinear[gpu]'" in capsys.readouterr().err


@pytest.mark.training
@pytest.mark.parametrize("name", ["artifacts_mlp", "artifacts_lenet_bn"])
def test_graphs_of_training_operators(name: str, tmp_path: Path, capsys: Captured) -> None:
    model, output = GOLDEN / f"{name}.onnx", tmp_path / "out.onnx"
    assert run(["optimize", str(model), "-o", str(output), "--dim", "batch=64", "--verify"]) == 0
    assert "equal bits" in capsys.readouterr().err
    assert call(capsys, "verify", model, output, "--dim", "batch=16")["bitwise"]


class TestPasses:
    def test_json(self, capsys: Captured) -> None:
        found = {entry["name"]: entry for entry in call(capsys, "passes")}
        assert found.keys() >= {"recompute", "inplace", "order", "share"}
        assert "budget" in {option["name"] for option in found["recompute"]["options"]}
        assert all(entry["summary"] for entry in found.values())

    def test_text(self, capsys: Captured) -> None:
        assert run(["passes"]) == 0
        assert re.search(r"^recompute\n    \w", capsys.readouterr().out, re.MULTILINE)
