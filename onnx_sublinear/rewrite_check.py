"""A static proof that a rewritten model computes what the original computes, and touches nothing else.

It looks at the two protos only; it shares no code with the passes that rewrite. What it accepts:

- the interface, metadata, initializers and functions of the original, unchanged (new metadata and initializers may
  be added);
- every original node, once, with its attributes, reading the same values;
- recompute clones: nodes with the metadata entry `onnx_sublinear.role` = `clone` and `onnx_sublinear.of` = the first
  output of their original, equal to it and reading the same values;
- `onnx_sublinear.role` = `scratch`: a copy of a running statistic that a clone's kernel may overwrite instead of it;
- barrier nodes: `onnx_sublinear.role` = `barrier`, from the few operators of `barrier_values`, whose only effect on the
  rest is a view `Reshape(X, zeros)`, which is X.

Two tensors carry the same value when following views and clones back leads to the same tensor of the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import ModelProto, TensorProto

from onnx_sublinear._rewritten_nodes import OF_KEY, ROLE_KEY, NodeCheck, serialized
from onnx_sublinear.errors import printable

__all__ = ["OF_KEY", "ROLE_KEY", "check_rewrite"]

OWN_METADATA = "onnx_sublinear"

_MOST_FINDINGS = 50


def check_rewrite(original: ModelProto, optimized: ModelProto) -> list[str]:
    """What keeps `optimized` from being provably the same computation as `original`; empty when nothing does.

    Args:
        original: the model before the rewrite.
        optimized: the model after it.

    Returns:
        One line for each finding, each naming a tensor, node or field; at most 50.
    """
    findings = [*_interface_findings(original, optimized)]
    findings += NodeCheck(original, optimized).findings()
    return findings[:_MOST_FINDINGS]


def _interface_findings(a: ModelProto, b: ModelProto) -> Iterator[str]:
    for field in ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if getattr(a, field) != getattr(b, field):
            yield f"{field} changed from {getattr(a, field)!r} to {getattr(b, field)!r}"
    for field in ("opset_import", "functions", "training_info"):
        if serialized(getattr(a, field)) != serialized(getattr(b, field)):
            yield f"{field} changed"
    for field in ("input", "output", "sparse_initializer", "quantization_annotation"):
        left, right = getattr(a.graph, field), getattr(b.graph, field)
        if serialized(left) != serialized(right):
            yield f"graph {field}: {_first_change(left, right)}"
    if (a.graph.name, a.graph.doc_string) != (b.graph.name, b.graph.doc_string):
        yield "the graph's name or doc string changed"
    for what, left, right in (("model", a, b), ("graph", a.graph, b.graph)):
        entries = {e.key: e.value for e in right.metadata_props}
        for entry in left.metadata_props:
            if entries.get(entry.key) != entry.value and not entry.key.startswith(OWN_METADATA):
                yield f"{what} metadata '{printable(entry.key)}' is gone or changed"
    kept = {t.name: t for t in b.graph.initializer}
    for tensor in a.graph.initializer:
        if tensor.name not in kept:
            yield f"initializer '{printable(tensor.name)}' is gone"
        elif not _same_tensor(tensor, kept[tensor.name]):
            yield f"initializer '{printable(tensor.name)}' changed"


def _first_change(left: Sequence[object], right: Sequence[object]) -> str:
    if len(left) != len(right):
        return f"{len(right)} entries instead of {len(left)}"
    place = next(i for i, (x, y) in enumerate(zip(serialized(left), serialized(right), strict=True)) if x != y)
    return f"entry {place} ('{printable(getattr(left[place], 'name', ''))}') changed"


def _same_tensor(a: TensorProto, b: TensorProto) -> bool:
    """Equal tensors; where both keep their data outside, the place may have changed."""
    if a.data_location != TensorProto.EXTERNAL or b.data_location != TensorProto.EXTERNAL:
        return serialized([a]) == serialized([b])
    return (a.name, a.data_type, list(a.dims)) == (b.name, b.data_type, list(b.dims))
