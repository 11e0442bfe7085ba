"""The forward and the gradient section of a training graph.

Forward section: the ancestors of the loss outputs. Gradient section: all other nodes. The loss is what the user names;
else the scalar floating-point graph outputs whose name says "loss"; else the one output that every gradient points at:
the first scalar floating-point output; else the tensor that a loss operator makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from onnx_sublinear.errors import UsageError, printable
from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.sizes import TensorSizes

__all__ = ["Sections", "find_losses", "split_sections"]

_LOSS_NAME = re.compile(r"(^|[^a-z])(loss|cost|objective|nll|criterion)", re.IGNORECASE)
_GRADIENT_NAME = re.compile(
    r"(^|[^a-z])(grad|gradient|adj|tangent|ct|cotangent|d_?loss)([^a-z]|$)|grad$", re.IGNORECASE
)
_FLOATS = {
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
}
_LOSS_OPERATORS = {
    "SoftmaxCrossEntropyLoss",
    "SoftmaxCrossEntropyLossInternal",
    "NegativeLogLikelihoodLoss",
    "SparseSoftmaxCrossEntropy",
    "SoftmaxCrossEntropy",
}


@dataclass(frozen=True)
class Sections:
    """The split of a training graph.

    Attributes:
        losses: tensors taken as loss.
        forward: per node position, whether it belongs to the forward section.
        notes: what a user should know about the split, one line each.
    """

    losses: tuple[str, ...]
    forward: tuple[bool, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_gradients(self) -> bool:
        """Whether both sections have nodes."""
        return any(self.forward) and not all(self.forward)


def _is_scalar_float(name: str, sizes: TensorSizes) -> bool:
    t = sizes.types.get(name)
    return t is not None and t.elem_type in _FLOATS and t.shape is not None and all(d == 1 for d in t.shape)


def find_losses(index: GraphIndex, sizes: TensorSizes, named: Sequence[str] = ()) -> tuple[str, ...]:
    """The loss tensors: those of `named`, else those found (empty where there are none).

    Raises:
        UsageError: a named tensor is not made by any node.
    """
    for name in named:
        if name not in index.producer:
            hint = f"graph outputs: {', '.join(printable(o, 60) for o in index.outputs[:8])}"
            raise UsageError(f"loss '{printable(name)}' is not a tensor that a node of the graph makes", hint)
    if named:
        return tuple(dict.fromkeys(named))
    made = [o for o in dict.fromkeys(index.outputs) if o in index.producer]
    scalars = [o for o in made if _is_scalar_float(o, sizes)]
    for wanted in (
        [o for o in scalars if _LOSS_NAME.search(o) and not _GRADIENT_NAME.search(o)],
        _made_by_loss_operators(index),
        [o for o in made if _LOSS_NAME.search(o) and not _GRADIENT_NAME.search(o)],
        [o for o in scalars if not _GRADIENT_NAME.search(o)][:1],
    ):
        if wanted:
            return tuple(wanted)
    return ()


def _made_by_loss_operators(index: GraphIndex) -> list[str]:
    return [n.output[0] for n in index.nodes if n.op_type in _LOSS_OPERATORS and n.output and n.output[0]]


def _ancestors(index: GraphIndex, tensors: Iterable[str]) -> list[bool]:
    """Per node whether one of `tensors` depends on it."""
    reached = [False] * len(index.nodes)
    pending = [index.producer[t] for t in tensors]
    while pending:
        position = pending.pop()
        if reached[position]:
            continue
        reached[position] = True
        pending.extend(index.producer[t] for t in index.reads[position] if t in index.producer)
    return reached


def split_sections(index: GraphIndex, sizes: TensorSizes, losses: Sequence[str] = ()) -> Sections:
    """Forward section = ancestors of the losses; everything else is the gradient section.

    A graph that hands its outputs to the outside and takes gradients in at a YieldOp is split there.
    """
    yields = [n for n in index.nodes if n.op_type == "YieldOp"]
    if yields and not losses:
        found = tuple(dict.fromkeys(t for n in yields for t in n.input if t in index.producer))
    else:
        found = find_losses(index, sizes, losses)
    if not found:
        return Sections(
            (),
            (False,) * len(index.nodes),
            ("no gradient section was found: no output looks like a loss (name it with --loss)",),
        )
    forward = _ancestors(index, found)
    notes = []
    if len(found) > 1:
        notes.append(f"{len(found)} losses: {', '.join(printable(t, 60) for t in found)}")
    if all(forward):
        notes.append("no gradient section was found: every node is needed for the loss")
    return Sections(found, tuple(forward), tuple(notes))
