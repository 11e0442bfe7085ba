"""Golden graphs as onnxruntime-training writes them: `python -m models.artifacts [--out models/golden]`.

Needs onnxruntime-training 1.19.2 (its last release, Python <= 3.11) and torch; nothing else in this package does.
Stages: torch module -> torch.onnx.export -> generate_artifacts
-> the training model alone is kept. Its weights,
gradient buffers and the flag `lazy_reset_grad` are graph inputs, so the file is small; the batch dim is symbolic. The
file is as written but for one metadata entry, the number of classes, which `models.feeds` reads.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import onnx

from models.files import GOLDEN_DIR, RANGES_KEY, save

CLASSES = 10
OPSET = 17


def mlp() -> tuple[Any, Any]:
    """Perceptron with dropout and layer normalization, and a sample of its input."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from torch import nn

    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Dropout(0.1),
        nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES),
    )  # fmt: skip
    return net, torch.zeros(4, 64)


def lenet_bn() -> tuple[Any, Any]:
    """LeNet with batch normalization in training mode, and a sample of its input."""
    import torch
    from torch import nn

    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 7 * 7, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip
    return net, torch.zeros(4, 1, 28, 28)


NETS = {"artifacts_mlp": mlp, "artifacts_lenet_bn": lenet_bn}


def training_model(net: Any, sample: Any) -> onnx.ModelProto:
    """The training model of `net` with cross entropy, from the sample's shape with a symbolic batch."""
    import torch
    from onnxruntime.training import artifacts

    forward = io.BytesIO()
    torch.onnx.export(
        net.train(),
        (sample,),
        forward,
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        opset_version=OPSET,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
    )
    model = onnx.load_from_string(forward.getvalue())
    _add_saved_outputs(model)
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            model,
            requires_grad=[name for name, _ in net.named_parameters()],
            loss=artifacts.LossType.CrossEntropyLoss,
            artifact_directory=folder,
        )
        model = onnx.load(Path(folder) / "training_model.onnx")
    onnx.helper.set_model_props(model, {RANGES_KEY: json.dumps({"labels": CLASSES})})
    return model


def _add_saved_outputs(model: onnx.ModelProto) -> None:
    """Name the optional outputs that the gradient builder reads; without them it stops with an index error."""
    for node in model.graph.node:
        labels = {"LayerNormalization": ["", "Mean", "InvStdDev"], "Dropout": ["", "mask"]}.get(node.op_type, [])
        node.output.extend(f"{node.output[0]}_{label}" for label in labels[len(node.output) :])


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(prog="python -m models.artifacts", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=GOLDEN_DIR, help="folder for the files")
    args = parser.parse_args()
    import torch

    for name, net in NETS.items():
        torch.manual_seed(0)  # the exporter runs the net, so the running statistics in the file depend on the weights
        save(training_model(*net()), args.out / f"{name}.onnx")


if __name__ == "__main__":
    main()
