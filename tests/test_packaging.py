"""What ships: every module, the marker file, the licence; and what the documents promise."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
FOLDERS = {"onnx_sublinear": "onnx_sublinear", "passes": "onnx_sublinear.passes", "cli": "onnx_sublinear.cli"}


def modules() -> Iterator[str]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *(p for p in parts if p != "__init__")))


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", [m for m in modules() if not m.endswith("__main__")])
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_every_subpackage_is_listed() -> None:
    listed = set(project()["tool"]["setuptools"]["packages"])  # type: ignore[index]
    found = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found == listed


def test_every_folder_is_a_package() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_public_names_exist() -> None:
    for name in modules():
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"


def test_versions_agree() -> None:
    import onnx_sublinear

    assert metadata("onnx-sublinear")["Version"] == onnx_sublinear.__version__ == project()["project"]["version"]  # type: ignore[index]


def test_each_runtime_is_an_extra_and_none_is_required() -> None:
    lines = requires("onnx-sublinear") or []
    runtimes = {re.match(r"[\w-]+", line)[0]: line for line in lines if line.startswith("onnxruntime")}  # type: ignore[index]
    assert runtimes.keys() == {"onnxruntime", "onnxruntime-gpu", "onnxruntime-training-cpu"}
    assert all("extra ==" in line for line in runtimes.values())


def test_imports_go_one_way() -> None:
    """cli -> passes -> onnx_sublinear; the one exception is api.py, which drives the passes."""
    forbidden = {"onnx_sublinear": r"onnx_sublinear\.(cli|passes)", "passes": r"onnx_sublinear\.(cli|api)"}
    exempt = {ROOT / "onnx_sublinear" / name for name in ("api.py", "__main__.py")}
    for folder, pattern in forbidden.items():
        for path in (ROOT / folder).rglob("*.py"):
            if path not in exempt:
                assert not re.search(rf"^\s*(from|import) {pattern}\b", path.read_text(), re.MULTILINE), path


def test_the_judge_shares_no_code_with_what_it_judges() -> None:
    for name in ("rewrite_check.py", "_rewritten_nodes.py", "_repeatable.py", "barrier_values.py", "verify.py"):
        imports = re.findall(r"^from (onnx_sublinear[.\w]*) import", (ROOT / "onnx_sublinear" / name).read_text(), re.M)
        allowed = r"_repeatable|_rewritten_nodes|barrier_values|errors|graph|measure|rewrite_check|runtime|sizes"
        assert all(re.fullmatch(rf"onnx_sublinear\.({allowed})", i) for i in imports), name


class TestDocuments:
    def test_relative_links_lead_somewhere(self) -> None:
        for document in [*ROOT.glob("*.md"), *(ROOT / "models").glob("*.md")]:
            for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
                assert (document.parent / target).exists(), f"{document.name}: {target}"

    def test_the_readme_has_two_commands_that_install_what_they_need(self) -> None:
        blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        assert len(blocks) == 2
        for block in blocks:
            assert block.count("\n") == 1
            assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
            assert "'.[gpu,test]'" in block
        assert re.search(r"optimize (models/golden/\S+)", blocks[0])
        assert (ROOT / re.search(r"models/golden/\S+", blocks[0])[0]).exists()  # type: ignore[index]
        assert blocks[1].rstrip().endswith("-m pytest")

    def test_the_readme_names_every_command(self) -> None:
        from onnx_sublinear.cli.app import app

        text = (ROOT / "README.md").read_text()
        for command in app.registered_commands:
            assert command.callback is not None
            assert f"| `{command.callback.__name__}" in text

    def test_the_changelog_has_the_version_or_unreleased(self) -> None:
        assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
