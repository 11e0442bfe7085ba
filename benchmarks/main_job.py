"""The main job, measured: reference networks before and after `optimize`, in ONNX Runtime on the CPU.

    python -m benchmarks.main_job            # about ten minutes; writes benchmarks/main_job.md

Each network is built, optimized with default options, and run in fresh processes: peak bytes (feeds and weights left
out) at the default optimization level in both execution orders, and the time of a step as the median of paired ratios.
Outputs are compared bit by bit at level none. The networks are larger than the committed golden graphs, so that the
pages in which the kernel counts do not blur the figures.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import onnx
from onnx import ModelProto

from models.feeds import feeds
from models.gpt import gpt
from models.lstm import lstm
from models.mlp import chain
from models.preresnet import preresnet
from models.unet import unet
from onnx_sublinear import optimize
from onnx_sublinear.benchmark import compare_cost
from onnx_sublinear.measure import measure
from onnx_sublinear.model_io import save_model

NETS: dict[str, Callable[[], ModelProto]] = {
    "chain of 64 equal layers": lambda: chain(n=64, width=64, batch=4096),
    "residual net, 64 blocks": lambda: preresnet(blocks=64, channels=8, image=32, batch=8),
    "LSTM, 64 steps": lambda: lstm(steps=64, hidden=256, batch=256, inputs=64, classes=64),
    "GPT, 8 layers": lambda: gpt(layers=8, width=128, heads=4, seq=128, vocab=256, batch=8),
    "U-Net, depth 4": lambda: unet(depth=4, channels=16, image=128, batch=4),
}
MIB = 1 << 20
HEADER = """# The main job, measured

{date}, onnxruntime {ort} on the CPU ({machine}), onnx {onnx}, Python {python}.
Regenerate with `python -m benchmarks.main_job`. MiB; feeds and weights are not counted, outputs are.
"predicted" is what `optimize` says of the default order at level none; measured figures are at the default level.

| network | nodes | before | after | share | predicted before / after | PRIORITY before / after | extra work | time |
|---|---|---|---|---|---|---|---|---|
"""


def row(name: str, model: ModelProto, folder: Path) -> tuple[str, str]:
    """One line of the table, and the runtime's version."""
    before, after = folder / "before.onnx", folder / "after.onnx"
    save_model(model, before)
    result = optimize(model)
    save_model(result.model, after)
    values = feeds(model)
    bench = compare_cost(before, after, values, runs=5)
    if not bench.outputs.equal:
        raise SystemExit(f"{name}: outputs differ")
    priority = [measure(path, values, order="priority").peak for path in (before, after)]
    report = result.report
    peaks = (bench.original.peak_bytes, bench.optimized.peak_bytes)
    if None in peaks or None in priority:
        raise SystemExit("the peak cannot be measured on this system")

    def mib(count: int | None) -> str:
        return f"{(count or 0) / MIB:.1f}"

    line = (
        f"| {name} | {report.nodes_before} | {mib(peaks[0])} | {mib(peaks[1])} | {peaks[1] / peaks[0]:.1%} "
        f"| {mib(report.peaks_before['default'])} / {mib(report.peaks_after['default'])} "
        f"| {mib(priority[0])} / {mib(priority[1])} | {report.overhead:.1%} | x {bench.time_ratio:.2f} |"
    )
    return line, bench.ort_version


def main() -> None:
    """Writes the table."""
    lines: list[str] = []
    version = ""
    for name, build in NETS.items():
        with tempfile.TemporaryDirectory() as folder:
            line, version = row(name, build(), Path(folder))
        print(line, file=sys.stderr, flush=True)
        lines.append(line)
    header = HEADER.format(
        date=date.today(), ort=version, machine=platform.machine(), onnx=onnx.__version__, python=sys.version.split()[0]
    )
    Path(__file__).with_suffix(".md").write_text(header + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
