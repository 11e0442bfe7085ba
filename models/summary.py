"""Figures of a training graph: the rows of the table in models/README.md (`python -m models.summary`)."""

from __future__ import annotations

import math
from pathlib import Path

import onnx

from models.files import GOLDEN_DIR


def summary(model: onnx.ModelProto) -> dict[str, int]:
    """Count nodes, parameter elements and the bytes of the saved activations.

    A saved activation is a tensor that an ancestor of the loss (the first output) makes and another node reads.
    Symbolic dims count as 1; `unknown` counts the saved activations whose shape is neither declared nor inferred.
    """
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    graph = inferred.graph
    sizes = {info.name: _size_bytes(info.type) for info in [*graph.value_info, *graph.input, *graph.output]}
    maker = {output: index for index, node in enumerate(graph.node) for output in node.output}
    forward: set[int] = set()
    todo = [maker[graph.output[0].name]]
    while todo:
        index = todo.pop()
        if index not in forward:
            forward.add(index)
            todo.extend(maker[name] for name in graph.node[index].input if name in maker)
    gradient_reads = {name for i, node in enumerate(graph.node) if i not in forward for name in node.input}
    saved = {name for name in gradient_reads if maker.get(name) in forward}
    gradients = {output.name.removesuffix(".accumulation.out").removesuffix("_grad") for output in graph.output}
    return {
        "nodes": len(graph.node),
        "parameters": sum(_elements(info.type) for info in graph.input if info.name in gradients),
        "activation_bytes": sum(sizes.get(name, 0) for name in saved),
        "unknown": len(saved - sizes.keys()),
    }


def _elements(kind: onnx.TypeProto) -> int:
    return math.prod(dim.dim_value or 1 for dim in kind.tensor_type.shape.dim)


def _size_bytes(kind: onnx.TypeProto) -> int:
    return _elements(kind) * onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type).itemsize


def rows(folder: Path = GOLDEN_DIR) -> list[str]:
    """Markdown rows `| file | nodes | parameters | saved activations |`, one for each golden graph."""
    result = []
    for path in sorted(folder.glob("*.onnx")):
        figures = summary(onnx.load(path))
        unknown = f" + {figures['unknown']} of unknown shape" if figures["unknown"] else ""
        cells = [f"{figures[key]:,}" for key in ("nodes", "parameters", "activation_bytes")]
        result.append(f"| `{path.name}` | {' | '.join(cells)}{unknown} |")
    return result


if __name__ == "__main__":
    print("\n".join(rows()))
