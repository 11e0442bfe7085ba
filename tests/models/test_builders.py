"""Builders of the reference networks: gradients by finite differences, golden graphs, command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from models import build, summary
from models.feeds import feeds
from models.files import GOLDEN_DIR
from models.gpt import gpt
from models.lenet import lenet_bn
from models.lstm import lstm
from models.mlp import chain, mlp
from models.preresnet import preresnet
from models.tape import TrainingGraph
from models.unet import unet

SIZE_LIMIT_BYTES = 400_000
GOLDEN_FILES = sorted(GOLDEN_DIR.glob("*.onnx"))

TINY: dict[str, Callable[..., onnx.ModelProto]] = {
    "mlp-relu": partial(mlp, layers=2, width=5, batch=4, inputs=3, classes=3),
    "mlp-tanh-symbolic": partial(mlp, layers=2, width=5, batch="batch", inputs=3, classes=3, activation="tanh"),
    "chain": partial(chain, n=4, width=3, batch=5),
    "lenet_bn": partial(lenet_bn, channels=2, image=8, batch=3, units=5, classes=3),
    "preresnet": partial(preresnet, blocks=3, channels=2, image=6, batch=3, classes=3),
    "preresnet-odd-image": partial(preresnet, blocks=2, channels=2, image=7, batch=2, stages=2, classes=3),
    "lstm": partial(lstm, steps=3, hidden=4, batch=2, layers=2, inputs=3, classes=3),
    "gpt": partial(gpt, layers=2, width=6, heads=2, seq=4, vocab=7, batch=2, dropout=0.3),
    "gpt-no-dropout": partial(gpt, layers=1, width=4, heads=2, seq=3, vocab=5, batch=2, dropout=0.0),
    "unet": partial(unet, depth=2, channels=2, image=4, batch=2, classes=3),
    "unet-nearest": partial(unet, depth=1, channels=2, image=4, batch=1, classes=2, learned_up=False),
}


class Erf(OpRun):
    """onnx.reference computes Erf in float32 whatever its input, too coarse for the differences below."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """The same for the function body of Gelu."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str | None = None) -> tuple[np.ndarray]:
        assert approximate == "none"
        return (x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))) / 2,)


def evaluate(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    outputs = ReferenceEvaluator(model, new_ops=[Erf, Gelu]).run(None, dict(values))
    return [np.asarray(output) for output in outputs]


def loss_only(model: onnx.ModelProto) -> onnx.ModelProto:
    """The nodes up to the loss: builders list the forward section first."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    last = next(i for i, node in enumerate(model.graph.node) if "loss" in node.output)
    del result.graph.node[last + 1 :]
    del result.graph.output[1:]
    return result


@pytest.mark.parametrize("name", TINY)
def test_gradients_match_central_differences(name: str) -> None:
    """Along a random direction of each weight, in float64: d loss / d step = <gradient, direction>."""
    model = TINY[name](dtype=np.float64)
    values = feeds(model, seed=1)
    results = dict(zip([output.name for output in model.graph.output], evaluate(model, values), strict=True))
    forward = loss_only(model)
    rng = np.random.default_rng(2)
    step = 1e-6
    for output in [name for name in results if name.endswith("_grad")]:
        param = output.removesuffix("_grad")
        direction = rng.standard_normal(values[param].shape)
        sides = [evaluate(forward, {**values, param: values[param] + by * direction})[0] for by in (step, -step)]
        expected = (sides[0] - sides[1]) / (2 * step)
        assert np.vdot(results[output], direction) == pytest.approx(expected, rel=1e-5, abs=1e-8), param


@pytest.mark.parametrize("name", TINY)
def test_every_weight_has_a_gradient_output_of_its_shape(name: str) -> None:
    model = TINY[name]()
    onnx.checker.check_model(model, full_check=True)
    inputs = {info.name: info.type for info in model.graph.input}
    gradients = {o.name.removesuffix("_grad"): o.type for o in model.graph.output if o.name.endswith("_grad")}
    assert model.graph.output[0].name == "loss"
    assert gradients
    assert all(inputs[param] == kind for param, kind in gradients.items())
    node_names = [node.name for node in model.graph.node]
    assert len(set(node_names)) == len(node_names)


def test_golden_folder_holds_what_the_builders_and_the_artifact_script_make() -> None:
    built = {path.stem for path in GOLDEN_FILES if not path.stem.startswith("artifacts_")}
    assert built == set(build.GOLDEN)


@pytest.mark.parametrize("name", build.GOLDEN)
def test_golden_graph_regenerates_byte_for_byte(name: str, tmp_path: Path) -> None:
    build.main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.onnx").read_bytes() == (GOLDEN_DIR / f"{name}.onnx").read_bytes()


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_golden_graph_is_small_and_valid(path: Path) -> None:
    assert path.stat().st_size < SIZE_LIMIT_BYTES
    if not path.stem.startswith("artifacts_"):  # their com.microsoft ops have no schema in onnx
        onnx.checker.check_model(onnx.load(path), full_check=True)


@pytest.mark.parametrize("name", build.GOLDEN)
def test_golden_graph_runs_in_onnxruntime(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = onnx.load(GOLDEN_DIR / f"{name}.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for info, value in zip(session.get_outputs(), session.run(None, feeds(model, dims={"batch": 16})), strict=True):
        assert np.isfinite(value).all(), info.name
        assert info.name != "loss" or 0 < value < 20


@pytest.mark.training
@pytest.mark.parametrize(
    "path", [path for path in GOLDEN_FILES if path.stem.startswith("artifacts_")], ids=lambda path: path.stem
)
def test_artifact_graph_runs_in_onnxruntime_training(path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = onnx.load(path)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    loss, *flags = session.run(None, feeds(model, dims={"batch": 16}))
    assert 0 < loss < 20
    assert all(flag.item() for flag in flags)


def test_feeds_repeat_and_stay_in_range() -> None:
    model = gpt(vocab=7, seq=8, batch=4)
    first, again, other = feeds(model, 1), feeds(model, 1), feeds(model, 2)
    assert first.keys() == {info.name for info in model.graph.input}
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["tokens"] != other["tokens"]).any()
    assert 0 <= first["labels"].min() < first["labels"].max() <= 6


def test_dropouts_have_their_own_seeds_and_used_masks() -> None:
    nodes = TINY["gpt"]().graph.node
    seeds = [a.i for node in nodes if node.op_type == "Dropout" for a in node.attribute if a.name == "seed"]
    masks = [node.output[1] for node in nodes if node.op_type == "Dropout"]
    read = {name for node in nodes for name in node.input}
    assert len(set(seeds)) == len(masks) == 7
    assert set(masks) <= read


def test_tied_table_gets_the_sum_of_both_gradients() -> None:
    nodes = {output: node for node in TINY["gpt"]().graph.node for output in node.output}
    assert nodes["wte_grad"].op_type == "Add"
    assert {nodes[name].op_type for name in nodes["wte_grad"].input} == {"Gemm", "ScatterND"}


def test_shared_weight_gradients_form_a_chain_of_adds() -> None:
    nodes = {output: node for node in lstm(steps=6, hidden=2, batch=1).graph.node for output in node.output}
    node, links = nodes["lstm0/Wh_grad"], 0
    while node.op_type == "Add":
        links += 1
        node = nodes[node.input[0]]
    assert links == 5


def test_chain_saves_one_activation_a_layer() -> None:
    assert summary.summary(chain(n=7, width=8, batch=16))["activation_bytes"] == 7 * 8 * 16 * 4


def test_readme_table_is_current() -> None:
    text = (GOLDEN_DIR.parent / "README.md").read_text(encoding="utf-8")
    missing = [row for row in summary.rows() if row not in text]
    assert not missing


def test_command_line_builds_a_net_of_any_size(tmp_path: Path) -> None:
    build.main(["preresnet", "--blocks", "5", "--batch", "2", "-o", str(tmp_path / "net.onnx")])
    assert onnx.load(tmp_path / "net.onnx") == preresnet(blocks=5, batch=2)
    build.main(["unet", "--no-learned-up", "-o", str(tmp_path / "net.onnx")])
    assert onnx.load(tmp_path / "net.onnx") == unet(learned_up=False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonesuch"], "not a golden graph or an option: nonesuch;"),
        (["chain64", "--blocks", "5"], "not a golden graph or an option: --blocks 5;"),
        (["nonesuch", "-o", "x.onnx"], "-o needs one net"),
        (["chain", "--blocks", "5", "-o", "x.onnx"], "unrecognized arguments: --blocks 5"),
    ],
)
def test_command_line_refuses_unknown_names(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build.main(argv)
    assert caught.value.code == 2
    assert "error: " + message in capsys.readouterr().err


def test_tape_refuses_a_taken_name() -> None:
    g = TrainingGraph("twice")
    g.param("w", [2])
    with pytest.raises(ValueError, match="'w' is taken"):
        g.param("w", [2])
