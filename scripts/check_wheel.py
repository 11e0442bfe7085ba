"""Is every module of the source tree in the wheel, and nothing else? usage: check_wheel.py WHEEL

A subpackage that pyproject.toml does not list builds without a message and is missing from the wheel.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"onnx_sublinear": "onnx_sublinear", "passes": "onnx_sublinear/passes", "cli": "onnx_sublinear/cli"}
"""Folder of the source tree -> its place in the wheel."""


def expected_files() -> set[str]:
    """The files that the wheel must hold, as its names."""
    return {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in FOLDERS.items()
        for pattern in ("*.py", "py.typed")
        for path in (ROOT / folder).rglob(pattern)
    }


def problems(wheel: Path) -> list[str]:
    """What is missing from the wheel or should not be in it, one line each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {n for n in names if ".dist-info/" not in n}
    wanted = expected_files()
    lines = [f"missing from the wheel: {n}" for n in sorted(wanted - shipped)]
    lines += [f"should not be in the wheel: {n}" for n in sorted(shipped - wanted)]
    if not any(n.endswith(".dist-info/licenses/LICENSE") for n in names):
        lines.append("missing from the wheel: LICENSE")
    return lines


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or f"{Path(sys.argv[1]).name}: {len(expected_files())} files, complete")
    sys.exit(bool(found))
