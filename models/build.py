"""Build training graphs: `python -m models.build` makes the golden graphs, `... NET --option N -o FILE` any other.

Examples:
    python -m models.build
    python -m models.build chain64 gpt4 --out /tmp/golden
    python -m models.build preresnet --blocks 128 --image 32 -o preresnet128.onnx
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnx

from models.files import GOLDEN_DIR, save
from models.gpt import gpt
from models.lenet import lenet_bn
from models.lstm import lstm
from models.mlp import chain, mlp
from models.preresnet import preresnet
from models.unet import unet

NETS: dict[str, Callable[..., onnx.ModelProto]] = {
    "chain": chain,
    "gpt": gpt,
    "lenet_bn": lenet_bn,
    "lstm": lstm,
    "mlp": mlp,
    "preresnet": preresnet,
    "unet": unet,
}

GOLDEN: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": partial(mlp, layers=4, width=256, batch=256),
    "mlp_symbolic": partial(mlp, layers=4, width=256, batch="batch", activation="tanh"),
    "chain64": partial(chain, n=64, width=64, batch=4096),
    "lenet_bn": partial(lenet_bn, channels=8, image=28, batch=32),
    "preresnet16": partial(preresnet, blocks=16, channels=8, image=16, batch=4),
    "preresnet64": partial(preresnet, blocks=64, channels=8, image=32, batch=8),
    "lstm32": partial(lstm, steps=32, hidden=128, batch=64, layers=1),
    "gpt4": partial(gpt, layers=4, width=128, heads=4, seq=64, vocab=256, batch=8, dropout=0.1),
    "unet3": partial(unet, depth=3, channels=8, image=64, batch=4),
}
"""The golden graphs that these builders make; `models.artifacts` makes the others."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.build",
        description=__doc__,
        epilog="\n".join(f"{name}: {' '.join(_net_parser(name).format_usage().split()[5:])}" for name in NETS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", help=f"golden graphs ({', '.join(GOLDEN)}), or with -o one of: {', '.join(NETS)}"
    )
    parser.add_argument("--out", type=Path, default=GOLDEN_DIR, help="folder for golden graphs")
    parser.add_argument("-o", dest="file", type=Path, help="file for one net of any size")
    args, options = parser.parse_known_args(argv)
    if args.file is None:
        unknown = [name for name in args.names if name not in GOLDEN]
        if unknown or options:
            parser.error(
                f"not a golden graph or an option: {' '.join([*unknown, *options])}; give -o FILE to build a net"
            )
        for name in args.names or GOLDEN:
            save(GOLDEN[name](), args.out / f"{name}.onnx")
    else:
        if len(args.names) != 1 or args.names[0] not in NETS:
            parser.error(f"-o needs one net out of: {', '.join(NETS)}")
        name = args.names[0]
        save(NETS[name](**vars(_net_parser(name).parse_args(options))), args.file)


def _net_parser(name: str) -> argparse.ArgumentParser:
    """Parser of `--blocks 64` style options: one for each number, text or flag that the builder takes."""
    parser = argparse.ArgumentParser(prog=f"python -m models.build {name}", add_help=False)
    for parameter in inspect.signature(NETS[name]).parameters.values():
        kind, option = type(parameter.default), f"--{parameter.name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=parameter.default)
        elif kind in (int, float, str):
            convert: Callable[[str], object] = _size_or_name if parameter.name == "batch" else kind
            parser.add_argument(option, type=convert, default=parameter.default)
    return parser


def _size_or_name(text: str) -> int | str:
    return int(text) if text.isdigit() else text


if __name__ == "__main__":
    main()
