"""The command `plan`: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnx_sublinear.cli.app import run

Captured = pytest.CaptureFixture[str]
LAYERS = 12


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """A chain of equal layers and their gradients."""
    nodes = [{"name": f"y{n}", "size": 100, "cost": 1, "backward": False} for n in range(LAYERS)]
    nodes += [{"name": f"d{n}", "size": 100, "cost": 2, "backward": True} for n in reversed(range(LAYERS))]
    edges = [[n, n + 1] for n in range(2 * LAYERS - 1)]
    edges += [[n, 2 * LAYERS - 1 - n] for n in range(LAYERS - 1)]
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}))
    return path


def test_a_budget_is_kept_and_json_has_the_fixed_keys(problem: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "schedule.json"
    assert run(["plan", str(problem), "--budget", "60%", "-o", str(out), "--json", "--time-limit", "1"]) == 0
    data = json.loads(capsys.readouterr().out)
    keys = {
        "keep_all_peak_bytes",
        "peak_bytes",
        "lower_bound_bytes",
        "overhead",
        "recomputations",
        "strategy",
        "seconds",
    }
    assert data.keys() >= keys
    assert data["lower_bound_bytes"] <= data["peak_bytes"] <= 0.6 * data["keep_all_peak_bytes"]
    schedule = json.loads(out.read_text())
    assert len(schedule) == 2 * LAYERS + data["recomputations"]
    assert set(schedule) == set(range(2 * LAYERS))


@pytest.mark.parametrize("options", [[], ["--max-overhead", "10%"], ["--budget", "900", "--strategy", "greedy"]])
def test_text_says_what_it_costs(problem: Path, tmp_path: Path, capsys: Captured, options: list[str]) -> None:
    assert run(["plan", str(problem), "-o", str(tmp_path / "s.json"), "--time-limit", "1", *options]) == 0
    out, err = capsys.readouterr()
    assert "% extra work" in out
    assert err == ""


def test_a_budget_out_of_reach_exits_4_and_writes_nothing(problem: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(["plan", str(problem), "--budget", "200", "-o", str(tmp_path / "s.json"), "--time-limit", "1"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "smallest peak found is" in err
    assert "(300 bytes)" in err  # the lower bound
    assert not (tmp_path / "s.json").exists()


def test_a_file_that_is_no_problem_exits_3(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"nodes": [], "edges": []}')
    assert run(["plan", str(path), "-o", str(tmp_path / "s.json")]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert "broken.json" in lines[0]
    assert lines[1].startswith("hint: ")
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    "options", [["--budget", "much"], ["--strategy", "luck"], ["--time-limit", "nan"], ["--time-limit", "0"]]
)
def test_mistakes_exit_2(problem: Path, tmp_path: Path, options: list[str]) -> None:
    assert run(["plan", str(problem), "-o", str(tmp_path / "s.json"), *options]) == 2
    assert not (tmp_path / "s.json").exists()
