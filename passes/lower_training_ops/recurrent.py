"""LSTM with its gates kept, and its gradient: one Scan each over the steps.

Sources: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), in the form of the ONNX operator LSTM, gates in
the order i, o, f, c; orttraining/orttraining/training_ops/cpu/rnn/lstm_grad_compute.cc of ONNX Runtime 1.19. As its
kernels, the rules take the forward direction, default activations, and neither sequence lengths nor peepholes.
"""

from __future__ import annotations

from typing import Any

from onnx import GraphProto, NodeProto, helper

from onnx_sublinear.passes.lower_training_ops.emitter import Emitter, Value

_DEFAULT_ACTIVATIONS = ["sigmoid", "tanh", "tanh"]


class _Body:
    """The body of a Scan: nodes on states and slices, with names of their own; captures by name."""

    def __init__(self, e: Emitter, elem_type: int) -> None:
        self._e, self._elem = e, elem_type
        self._nodes: list[NodeProto] = []

    def name(self, stem: str) -> Value:
        return self._e.index.fresh_name(f"{self._e.node.name or self._e.node.op_type}/{stem}")

    def op(self, op_type: str, *inputs: Value, outputs: int = 1, **attributes: Any) -> list[Value]:
        made = [self.name(op_type) for _ in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), made, name=made[0], **attributes))
        return made

    def one(self, op_type: str, *inputs: Value) -> Value:
        return self.op(op_type, *inputs)[0]

    def graph(self, inputs: list[Value], outputs: list[Value]) -> GraphProto:
        """All tensors have rank 2; outputs get nodes of their own, so that none is named twice."""
        ends = [self.one("Identity", o) for o in outputs]
        given, made = (
            [helper.make_tensor_value_info(n, self._elem, [None, None]) for n in names] for names in (inputs, ends)
        )
        return helper.make_graph(self._nodes, self.name("body"), given, made)


def _check(e: Emitter) -> None:
    activations = [a.decode().lower() for a in e.attribute("activations", [])] or _DEFAULT_ACTIVATIONS
    plain = activations == _DEFAULT_ACTIVATIONS and e.attribute("direction", "forward") == "forward"
    if not plain or e.attribute("clip") is not None or e.attribute("input_forget", 0):
        raise e.error("has another direction or activation, a clip, or coupled gates")


def _row(e: Emitter, value: Value | None, x: Value, hidden: int) -> Value:
    """An initial state [1, batch, hidden] without its first axis; zeros where it is left out."""
    if value is not None:
        return e.op("Reshape", value, e.array([-1, hidden]))
    shape = e.op("Concat", e.dim_of(x, 1), e.array([hidden]), axis=0)
    return e.zeros(shape, e.elem(x))


def _hidden(e: Emitter) -> int:
    size = e.attribute("hidden_size")
    if not size:
        raise e.error("has no attribute hidden_size")
    return int(size)


def lstm_training(e: Emitter) -> list[Value]:
    """(Y, Y_h, Y_c, all cell states, gates after activation) of (X, W, R, B, -, H0, C0).

    a = X W' + H R' + B; i, o, f = sigmoid(a), c = tanh(a); C = f C + i c; H = o tanh(C), step by step. X W' + B is one
    product for all steps.
    """
    _check(e)
    x, w, r = e.inputs(3)
    if e.input(4) is not None or e.input(7) is not None:
        raise e.error("has sequence lengths or peepholes")
    hidden = _hidden(e)
    given = e.op("MatMul", x, e.op("Transpose", e.op("Reshape", w, e.array([4 * hidden, -1])), perm=[1, 0]))
    bias = e.input(3)
    if bias is not None:
        halves = e.op("Reshape", bias, e.array([2, 4 * hidden]))
        given = e.op("Add", given, e.total(halves, [0], False))
    across = e.op("Transpose", e.op("Reshape", r, e.array([4 * hidden, hidden])), perm=[1, 0])
    states = [_row(e, e.input(slot), x, hidden) for slot in (5, 6)]
    body = _forward_step(e, across, e.elem(x))
    h, c, all_h, all_c, gates = e.ops("Scan", *states, given, outputs=5, body=body, num_scan_inputs=1)
    every = [e.unsqueeze(v, [1]) for v in (all_h, all_c, gates)]
    return [every[0], e.unsqueeze(h, [0]), e.unsqueeze(c, [0]), *every[1:]]


def _forward_step(e: Emitter, across: Value, elem_type: int) -> GraphProto:
    """(H, C, X W' + B) -> (H, C; H, C, gates)."""
    b = _Body(e, elem_type)
    h, c, given = (b.name(n) for n in ("H", "C", "XW"))
    i, o, f, g = b.op("Split", b.one("Add", given, b.one("MatMul", h, across)), outputs=4, axis=1, **_quarters(e))
    i, o, f, g = (b.one("Sigmoid", i), b.one("Sigmoid", o), b.one("Sigmoid", f), b.one("Tanh", g))
    cell = b.one("Add", b.one("Mul", f, c), b.one("Mul", i, g))
    state = b.one("Mul", o, b.one("Tanh", cell))
    gates = b.op("Concat", i, o, f, g, axis=1)[0]
    return b.graph([h, c, given], [state, cell, state, cell, gates])


def _quarters(e: Emitter) -> dict[str, int]:
    """Split in equal parts, as the opset writes it."""
    return {"num_outputs": 4} if e.opset >= 18 else {}


def lstm_grad(e: Emitter) -> list[Value]:
    """dX, dW, dR, dB, dH0, dC0 of (X, W, R, -, H0, C0, all H, all C, gates, d all H, dH at the end, dC at the end).

    From the last step to the first, with t = tanh(C): dH += d all H; dC += dH o (1 - t^2);
    da = (dC c i (1 - i), dH t o (1 - o), dC C_before f (1 - f), dC i (1 - c^2)); dC = dC f; dH = da R.
    Then dX = da W, dW = da' X, dR = da' H_before, dB = sum of da, for the bias of W and for that of R.
    """
    _check(e)
    x, w, r = e.inputs(3)
    all_h, all_c, gates = (e.input(slot) for slot in (6, 7, 8))
    if e.input(3) is not None or all_h is None or all_c is None or gates is None:
        raise e.error("has sequence lengths, or lacks what LSTMTraining keeps")
    hidden = _hidden(e)
    first = [_row(e, e.input(slot), x, hidden) for slot in (4, 5)]
    last = [_row(e, e.input(slot), x, hidden) for slot in (10, 11)]
    h, c, gate_rows = (
        e.op("Reshape", v, e.array([0, -1, n * hidden])) for v, n in ((all_h, 1), (all_c, 1), (gates, 4))
    )
    before_h, before_c = (_shifted(e, v, f) for v, f in ((h, first[0]), (c, first[1])))
    d_h = e.input(9)
    d_rows = e.op("Sub", h, h) if d_h is None else e.op("Reshape", d_h, e.array([0, -1, hidden]))
    across = e.op("Reshape", r, e.array([4 * hidden, hidden]))
    body = _backward_step(e, across, e.like(1, x), e.elem(x))
    d_h0, d_c0, d_gates = e.ops(
        *("Scan", *last, d_rows, gate_rows, c, before_c), outputs=3, body=body, num_scan_inputs=4,
        scan_input_directions=[1] * 4, scan_output_directions=[1],
    )  # fmt: skip
    flat = e.op("Reshape", d_gates, e.array([-1, 4 * hidden]))
    turned = e.op("Transpose", flat, perm=[1, 0])
    size = e.shape(x)[2]
    width = e.array([size]) if isinstance(size, int) else e.dim_of(x, 2)
    columns = e.op("Reshape", x, e.op("Concat", e.array([-1]), width, axis=0))
    d_x = e.op("MatMul", d_gates, e.op("Reshape", w, e.array([4 * hidden, -1])))
    d_w = e.unsqueeze(e.op("MatMul", turned, columns), [0])
    d_r = e.unsqueeze(e.op("MatMul", turned, e.op("Reshape", before_h, e.array([-1, hidden]))), [0])
    half = e.total(flat, [0], True)
    return [d_x, d_w, d_r, e.op("Concat", half, half, axis=1), e.unsqueeze(d_h0, [0]), e.unsqueeze(d_c0, [0])]


def _shifted(e: Emitter, rows: Value, first: Value) -> Value:
    """What each step started from: `first`, then all rows but the last."""
    but_last = e.op("Slice", rows, e.array([0]), e.array([-1]), e.array([0]))
    return e.op("Concat", e.unsqueeze(first, [0]), but_last, axis=0)


def _backward_step(e: Emitter, across: Value, one: Value, elem_type: int) -> GraphProto:
    """(dH, dC, d all H, gates, C, C before) -> (dH, dC; da)."""
    b = _Body(e, elem_type)
    d_h, d_c, given, gates, cell, before = (b.name(n) for n in ("dH", "dC", "dY", "gates", "C", "C_before"))

    def through(value: Value, gate: Value) -> Value:  # times the derivative of the sigmoid
        return b.one("Mul", value, b.one("Mul", gate, b.one("Sub", one, gate)))

    def through_tanh(value: Value, result: Value) -> Value:
        return b.one("Mul", value, b.one("Sub", one, b.one("Mul", result, result)))

    i, o, f, g = b.op("Split", gates, outputs=4, axis=1, **_quarters(e))
    total_h, bent = b.one("Add", d_h, given), b.one("Tanh", cell)
    total_c = b.one("Add", d_c, through_tanh(b.one("Mul", total_h, o), bent))
    parts = [
        through(b.one("Mul", total_c, g), i),
        through(b.one("Mul", total_h, bent), o),
        through(b.one("Mul", total_c, before), f),
        through_tanh(b.one("Mul", total_c, i), g),
    ]
    d_gates = b.op("Concat", *parts, axis=1)[0]
    inputs = [d_h, d_c, given, gates, cell, before]
    return b.graph(inputs, [b.one("MatMul", d_gates, across), b.one("Mul", total_c, f), d_gates])
