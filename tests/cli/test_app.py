"""How a run of the command line ends: exit codes, streams, styles of errors, interrupts, start-up time."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onnx_sublinear import errors
from onnx_sublinear.cli.app import run

MODULE = [sys.executable, "-m", "onnx_sublinear"]
COMMANDS = ["optimize", "inspect", "verify", "bench", "passes"]
GOLDEN = Path(__file__).parents[2] / "models" / "golden" / "mlp.onnx"

Captured = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Any:
    def call(*arguments: object, **options: object) -> object:
        raise error

    return call


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ([], "missing command"),
            (["fly"], "fly"),
            (["optimize"], "MODEL"),
            (["optimize", str(GOLDEN)], "--output"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--no-such-option"], "--no-such-option"),
            (["optimize", "absent.onnx", "-o", "x.onnx"], "absent.onnx"),
            (["optimize", str(GOLDEN), "-o", "absent/x.onnx"], "absent"),
            (["optimize", str(GOLDEN), "-o", "."], "is a folder"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--budget", "two"], "two"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--budget", "x%"], "x%"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--max-overhead", "much"], "much"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--dim", "batch"], "batch"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--target", "tpu"], "tpu"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--strategy", "luck"], "luck"),
            (["optimize", str(GOLDEN), "-o", "x.onnx", "--passes", "fly"], "fly"),
            (["inspect", "absent.onnx"], "absent.onnx"),
            (["verify", str(GOLDEN), "absent.onnx"], "absent.onnx"),
            (["verify", str(GOLDEN), str(GOLDEN), "--level", "max"], "max"),
            (["verify", str(GOLDEN), str(GOLDEN), "--runs", "0"], "--runs"),
            (["bench", str(GOLDEN), str(GOLDEN), "--feeds", "absent.npz"], "absent.npz"),
        ],
    )
    def test_mistakes_exit_2_with_an_error_and_a_hint(
        self, arguments: list[str], named: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run(arguments) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("[")]  # without progress
        assert out == ""
        assert len(lines) == 2, err
        assert lines[0].startswith("error: ")
        assert named in lines[0]
        assert lines[1].startswith("hint: ")
        assert list(tmp_path.iterdir()) == []

    def test_the_input_is_replaced_only_by_force(self, tmp_path: Path, capsys: Captured) -> None:
        model = tmp_path / "model.onnx"
        model.write_bytes(GOLDEN.read_bytes())
        (tmp_path / "link.onnx").symlink_to(model)
        for output in (model, tmp_path / "link.onnx"):
            assert run(["optimize", str(model), "-o", str(output)]) == 2
            assert "is the input" in capsys.readouterr().err
        assert model.read_bytes() == GOLDEN.read_bytes()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_an_unwritable_folder_is_found_before_the_work(self, tmp_path: Path, capsys: Captured) -> None:
        tmp_path.chmod(0o500)
        assert run(["optimize", str(GOLDEN), "-o", str(tmp_path / "x.onnx")]) == 2
        assert "not writable" in capsys.readouterr().err


class TestEnds:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errors.UsageError("no", "do"), 2),
            (errors.GraphError("no", "do"), 3),
            (errors.BudgetError("no", 2, 1, "do"), 4),
            (errors.VerificationError("no", "do"), 5),
            (errors.PostconditionError("no"), 1),
        ],
    )
    def test_each_error_has_its_code(
        self, error: Exception, code: int, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onnx_sublinear.api.optimize", raising(error))
        assert run(["optimize", str(GOLDEN), "-o", str(tmp_path / "x.onnx"), "--quiet"]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: no\nhint: ")
        assert list(tmp_path.iterdir()) == []

    def test_a_bug_is_one_line_and_asks_for_a_report(
        self, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onnx_sublinear.api.inspect", raising(KeyError("x\ny")))
        assert run(["inspect", str(GOLDEN)]) == 1
        err = capsys.readouterr().err
        assert err.splitlines()[0].startswith("error: internal error: KeyError")
        assert "report it" in err.splitlines()[1]
        assert len(err.splitlines()) == 2
        monkeypatch.setenv("ONNX_SUBLINEAR_DEBUG", "1")
        run(["inspect", str(GOLDEN)])
        assert "Traceback" in capsys.readouterr().err

    def test_control_characters_do_not_reach_the_terminal(self, capsys: Captured, tmp_path: Path) -> None:
        assert run(["inspect", str(tmp_path / "a\x1b[2J\n.onnx")]) == 2
        assert "\x1b" not in capsys.readouterr().err

    def test_a_keyboard_interrupt_exits_130(self, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("onnx_sublinear.api.inspect", raising(KeyboardInterrupt()))
        assert run(["inspect", str(GOLDEN)]) == 130
        assert "interrupted" in capsys.readouterr().err

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_leaves_nothing_behind(self, number: signal.Signals, code: int, tmp_path: Path) -> None:
        program = (
            "import sys, time\n"
            "from onnx_sublinear import api\n"
            "from onnx_sublinear.cli import app\n"
            "def wait(*a, **k):\n"
            "    print('waiting', file=sys.stderr, flush=True)\n"
            "    time.sleep(60)\n"
            "api.optimize = wait\n"
            f"sys.argv = ['x', 'optimize', {str(GOLDEN)!r}, '-o', 'out.onnx', '--quiet']\n"
            "app.main()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "waiting\n"
            time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(20) == code
            assert "Traceback" not in process.stderr.read()
        assert list(tmp_path.iterdir()) == []

    def test_a_closed_pipe_is_no_error(self) -> None:
        shell = f"{' '.join(MODULE)} passes --json | true"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
        assert done.stderr == ""


class TestHelp:
    def test_help_names_every_command(self, capsys: Captured) -> None:
        assert run(["--help"]) == 0
        out = capsys.readouterr().out
        assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_help_and_json(self, command: str, capsys: Captured) -> None:
        assert run([command, "--help"]) == 0
        out, err = capsys.readouterr()
        assert "--json" in out
        assert err == ""
        assert "\x1b" not in out

    def test_version(self, capsys: Captured) -> None:
        from importlib.metadata import version

        assert run(["--version"]) == 0
        assert capsys.readouterr().out == f"onnx-sublinear {version('onnx-sublinear')}\n"

    def test_module_and_script_are_the_same(self) -> None:
        script = Path(sys.executable).with_name("onnx-sublinear")
        by_module, by_script = (
            subprocess.run([*words, "--help"], capture_output=True, check=True).stdout for words in (MODULE, [script])
        )
        assert by_module == by_script

    def test_help_is_quick(self) -> None:
        """Under 0.3 s of processor time: the clock would also measure what else the machine does."""

        def seconds() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*MODULE, "--help"], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        assert min(seconds() for _ in range(5)) < 0.3

    def test_help_imports_nothing_heavy(self) -> None:
        code = (
            "import sys\n"
            "from onnx_sublinear.cli.app import run\n"
            "run(['optimize', '--help'])\n"
            "sys.exit(','.join({'onnx', 'numpy', 'onnxruntime', 'rich', 'omnimalloc'} & sys.modules.keys()))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stderr.strip() == ""
