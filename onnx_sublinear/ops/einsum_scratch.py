"""Scratch of the Einsum kernel: the transposed operands, the product, and the transposed product.

Stages of the kernel (core/providers/cpu/math/einsum_utils), followed here on dims alone:
1. bring every operand's axes into the order in which the letters first appear (a copy where that moves an axis);
2. operand by operand, multiply with what is there so far: both sides transposed to (shared, own, summed) and
   (shared, summed, own), then a batched GEMM into a new buffer;
3. transpose the product into the output's order where needed, and copy it into the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_sublinear.ops.kernel_call import KernelCall, Shape, UnknownTypeError

__all__ = ["einsum", "einsum_macs"]


@dataclass(slots=True)
class _Operand:
    """Dims over all letters (1 where absent), and whether the kernel holds a copy of its own."""

    dims: list[int]
    own: bool

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


def _terms(equation: str, shapes: Sequence[Shape]) -> tuple[list[list[str]], list[str]]:
    """Labels of each operand and of the result; the axes under an ellipsis get labels of their own."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    named = [len(t.replace("...", "")) for t in left.split(",")]
    hidden = [f".{i}" for i in range(max((len(s) - n for s, n in zip(shapes, named, strict=True)), default=0))]

    def labels(term: str) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(hidden if dots else []), *after]

    terms = [labels(term) for term in left.split(",")]
    if arrow:
        return terms, labels(right)
    seen = [label for term in terms for label in term if not label.startswith(".")]
    return terms, [*hidden, *sorted(label for label in set(seen) if seen.count(label) == 1)]


def _moves(order: Sequence[int]) -> bool:
    return list(order) != sorted(order)


def _homogeneous(labels: list[str], shape: Shape, letters: list[str]) -> _Operand:
    """Stage 1."""
    first = list(dict.fromkeys(labels))
    sizes = dict(zip(labels, shape, strict=True))
    moved = _moves([letters.index(label) for label in first]) or len(first) < len(labels)
    return _Operand([sizes.get(label, 1) for label in letters], moved)


def _reshapes(order: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether moving the axes to `order` only moves axes of one element."""
    return not _moves([axis for axis in order if dims[axis] != 1])


def einsum(call: KernelCall) -> int:
    """Bytes at the kernel's end, where most is held; less the op's output, which the caller counts."""
    shapes = [call.shape(slot) for slot in range(len(call.node.input))]
    terms, result = _terms(call.text("equation", ""), shapes)
    if any(len(t) != len(s) for t, s in zip(terms, shapes, strict=True)):
        raise UnknownTypeError
    letters = sorted({label for t in terms for label in t if label.startswith(".")})
    letters += list(dict.fromkeys(label for t in terms for label in t if not label.startswith(".")))
    last = {label: i for i, t in enumerate(terms) for label in t if label not in result}
    operands = [_homogeneous(t, s, letters) for t, s in zip(terms, shapes, strict=True)]

    held = sum(o.elements for o in operands[1:] if o.own)
    current = operands[0]
    gone = [k for k, label in enumerate(letters) if last.get(label) == 0]
    if gone:
        held += current.elements if current.own else 0
        current = _Operand([1 if k in gone else n for k, n in enumerate(current.dims)], own=True)
    order = [k for k in range(len(letters)) if k not in gone]
    peak = held + (current.elements if current.own else 0)
    for number, right in enumerate(operands[1:], start=1):
        summed = [k for k, label in enumerate(letters) if last.get(label) == number]
        before = held + (current.elements if current.own else 0)
        current, order, scratch = _multiply(current, right, summed, final=number == len(operands) - 1)
        peak = max(peak, before + scratch)
        held_at_end = before + scratch
    if len(operands) == 1:
        held_at_end = peak
    kept = [letters[k] for k in order if letters[k] in result]
    transposed = current.elements if _moves([result.index(label) for label in kept]) else 0
    return max(peak - call.out_count(), held_at_end + transposed) * call.element_bytes()


def _multiply(left: _Operand, right: _Operand, summed: list[int], *, final: bool) -> tuple[_Operand, list[int], int]:
    """Stage 2: the product, the order of its axes, and the elements of all new buffers, the product included."""
    scratch = 0
    sides = [left.dims, right.dims]
    fresh = [False, False]
    for side, other in ((0, 1), (1, 0)):
        for k in summed:
            if sides[side][k] > 1 and sides[other][k] == 1:  # only here: summed before the product
                sides[side] = [1 if axis == k else n for axis, n in enumerate(sides[side])]
                scratch += math.prod(sides[side])
                fresh[side] = True
    a, b = sides
    kept = [k for k in range(len(a)) if k not in summed]
    shared = [k for k in kept if a[k] > 1 and b[k] > 1]
    own_left = [k for k in kept if a[k] > 1 and b[k] == 1]
    own_right = [k for k in kept if a[k] <= 1]
    for side, order in ((0, shared + own_left + summed + own_right), (1, shared + summed + own_right + own_left)):
        if _moves(order) and not (fresh[side] and _reshapes(order, sides[side])):
            scratch += math.prod(sides[side])
    dims = [1 if k in summed else max(a[k], b[k]) for k in range(len(a))]
    order = shared + own_left + summed + own_right
    product = _Operand(dims, own=True)
    scratch += product.elements
    if not final and _moves(order) and not _reshapes(order, dims):
        scratch += product.elements
    return product, order, scratch


def einsum_macs(call: KernelCall) -> int:
    """Multiply-accumulates of the pairwise products (elements read, where there is only one operand)."""
    shapes = [call.shape(slot) for slot in range(len(call.node.input))]
    terms, result = _terms(call.text("equation", ""), shapes)
    sizes: dict[str, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    if len(terms) == 1:
        return math.prod(sizes.values())
    macs, present = 0, set(terms[0])
    for number, labels in enumerate(terms[1:], start=1):
        present |= set(labels)
        macs += math.prod(sizes[label] for label in present)
        later = {label for t in terms[number + 1 :] for label in t}
        present = {label for label in present if label in result or label in later}
    return macs
