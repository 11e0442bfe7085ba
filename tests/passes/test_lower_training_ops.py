"""Rules against formulas in numpy (gradients by finite differences in float64), on whatever runtime is installed."""

import math

import numpy as np
import onnx
import pytest
from training_ops import BOOL, FLOAT, INT64, close, floats, lowered, one_node, run

from onnx_sublinear import optimize
from onnx_sublinear.errors import ModelError
from onnx_sublinear.passes import Pipeline

SHAPES = [(7,), (3, 5), (2, 3, 4)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def erf(x):
    return np.vectorize(math.erf)(x)


def slope(function, x, step=1e-6):
    """The derivative of an elementwise function, in float64."""
    x = x.astype(np.float64)
    return (function(x + step) - function(x - step)) / (2 * step)


def gradient(function, x, dy, step=1e-5):
    """The gradient of sum(function(x) * dy) in float64, element by element."""
    x = x.astype(np.float64)
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        found[at] = ((function(up) - function(down)) * dy).sum() / (2 * step)
    return found.astype(np.float32)


def gelu(x):
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def fast_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x):
    return x * sigmoid(1.702 * x)


OF_THE_INPUT = {
    "ReluGrad": (lambda x: np.maximum(x, 0), {}),
    "GeluGrad": (gelu, {}),
    "FastGeluGrad": (fast_gelu, {}),
    "QuickGeluGrad": (quick_gelu, {}),
    "QuickGeluGrad alpha": (lambda x: x * sigmoid(0.7 * x), {"alpha": 0.7}),
}
OF_THE_OUTPUT = {
    "SigmoidGrad": (sigmoid, {}),
    "TanhGrad": (np.tanh, {}),
    "LeakyReluGrad": (lambda x: np.where(x > 0, x, 0.2 * x), {"alpha": 0.2}),
    "EluGrad": (lambda x: np.where(x > 0, x, 1.5 * (np.exp(x) - 1)), {"alpha": 1.5}),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", [*OF_THE_INPUT, *OF_THE_OUTPUT])
def test_activations(op, shape):
    function, attributes = (OF_THE_INPUT | OF_THE_OUTPUT)[op]
    dy, x = floats(1, *shape), floats(2, *shape)
    second = x if op in OF_THE_INPUT else function(x).astype(np.float32)
    feeds = {"dY": dy, "in": second}
    model = one_node(op.split()[0], feeds, {"dX": FLOAT}, **attributes)
    close(run(lowered(model), feeds)["dX"], (dy * slope(function, x)).astype(np.float32))


@pytest.mark.parametrize(("op", "function"), [("BiasGeluGrad_dX", gelu), ("BiasFastGeluGrad_dX", fast_gelu)])
def test_gelu_with_bias(op, function):
    feeds = {"dY": floats(1, 2, 3, 5), "X": floats(2, 2, 3, 5), "B": floats(3, 5)}
    got = run(lowered(one_node(op, feeds, {"dX": FLOAT})), feeds)["dX"]
    close(got, (feeds["dY"] * slope(function, feeds["X"] + feeds["B"])).astype(np.float32))


def softmax(x, axes):
    e = np.exp(x - x.max(axes, keepdims=True))
    return e / e.sum(axes, keepdims=True)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("suffix", "axis", "axes"), [("_13", -1, (2,)), ("_13", 1, (1,)), ("", 1, (1, 2)), ("", 2, (2,))]
)
def test_softmax(log, suffix, axis, axes):
    def function(x):
        return np.log(softmax(x, axes)) if log else softmax(x, axes)

    x, dy = floats(1, 2, 3, 4), floats(2, 2, 3, 4)
    feeds = {"dY": dy, "Y": function(x)}
    op = f"{'Log' if log else ''}SoftmaxGrad{suffix}"
    got = run(lowered(one_node(op, feeds, {"dX": FLOAT}, axis=axis)), feeds)["dX"]
    close(got, gradient(function, x, dy))


def cross_entropy(x, labels, weights, ignored, reduction):
    """Loss of logits [N, C, ...] in the precision of x."""
    logs = np.moveaxis(np.log(softmax(x, (1,))), 1, -1)
    safe = np.where(labels == ignored, 0, labels) if ignored is not None else labels
    weight = np.ones(x.shape[1]) if weights is None else weights
    each = weight[safe] * (1 if ignored is None else labels != ignored)
    loss = -np.take_along_axis(logs, safe[..., None], -1)[..., 0] * each
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (each.sum() or 1)


CASES = [(r, w, i, s) for r in ("mean", "sum", "none") for w in (0, 1) for i in (None, -100, 2) for s in ((), (3,))]


@pytest.mark.parametrize(("reduction", "weighted", "ignored", "spatial"), CASES)
def test_cross_entropy(reduction, weighted, ignored, spatial):
    x = floats(1, 6, 5, *spatial)
    labels = np.random.default_rng(2).integers(0, 5, (6, *spatial))
    if ignored is not None:
        labels.ravel()[::3] = ignored
    weights = np.abs(floats(3, 5)) + 0.1 if weighted else None
    loss = np.asarray(cross_entropy(x.astype(np.float64), labels, weights, ignored, reduction))
    dy = floats(4, *loss.shape)
    log_prob = np.log(softmax(x, (1,)))
    expected = gradient(lambda v: cross_entropy(v, labels, weights, ignored, reduction), x, dy)
    options = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    feeds = {"dY": dy, "log_prob": log_prob, "label": labels, "weight": weights}
    for symbolic in (False, True):
        model = one_node("SoftmaxCrossEntropyLossGrad", feeds, {"dX": FLOAT}, symbolic=symbolic, **options)
        close(run(lowered(model), feeds)["dX"], expected)
    index = None if ignored is None else np.asarray(ignored)
    feeds["ignore_index"] = index
    internal = one_node("SoftmaxCrossEntropyLossInternalGrad", feeds, {"dX": FLOAT}, reduction=reduction)
    close(run(lowered(internal), feeds)["dX"], expected)
    feeds = {"scores": x, "label": labels, "weight": weights, "ignore_index": index}
    for constants in ((), ("ignore_index",)):
        forward = one_node(
            "SoftmaxCrossEntropyLossInternal", feeds, {"loss": FLOAT, "log_prob": FLOAT}, constants=constants,
            reduction=reduction,
        )  # fmt: skip
        got = run(lowered(forward), feeds)
        close(got["loss"], loss.astype(np.float32))
        close(got["log_prob"], log_prob)


def test_cross_entropy_of_ignored_samples_only():
    feeds = {"dY": floats(1), "log_prob": np.log(softmax(floats(2, 4, 3), (1,))), "label": np.full(4, -1)}
    model = one_node("SoftmaxCrossEntropyLossGrad", feeds, {"dX": FLOAT}, ignore_index=-1)
    assert not run(lowered(model), feeds)["dX"].any()


@pytest.mark.parametrize("constants", [(), ("ratio", "mode")])
@pytest.mark.parametrize("mode", [None, False, True])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
def test_dropout(ratio, mode, constants):
    mask = np.random.default_rng(1).random((4, 6)) > 0.3
    feeds = {"dY": floats(2, 4, 6), "mask": mask}
    feeds["ratio"] = None if ratio is None else np.asarray(ratio, np.float32)
    feeds["mode"] = None if mode is None else np.asarray(mode)
    used = [c for c in constants if feeds[c] is not None]
    got = run(lowered(one_node("DropoutGrad", feeds, {"dX": FLOAT}, constants=used)), feeds)["dX"]
    kept = 1 - (0.5 if ratio is None else ratio)
    close(got, feeds["dY"] if mode is False else np.where(mask, feeds["dY"] / kept, 0).astype(np.float32))


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((1, 4), (2, 3, 1)), ((), (2, 3))])
def test_quotient(shapes):
    a, b = floats(1, *shapes[0]), np.abs(floats(2, *shapes[1])) + 1
    dy = floats(3, *np.broadcast_shapes(*shapes))
    feeds = {"dY": dy, "A": a, "B": b}
    got = run(lowered(one_node("DivGrad", feeds, {"dA": FLOAT, "dB": FLOAT})), feeds)
    close(got["dA"], gradient(lambda v: v / b, a, dy))
    close(got["dB"], gradient(lambda v: a / v, b, dy))


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2, 3)), ((2, 3, 4), (4,)), ((4,), (2, 3, 4)), ((2, 1, 4), (3, 1)), ((5, 1), ())]
)
def test_axes_of_broadcasting(shapes):
    feeds = {"a": np.asarray(shapes[0], np.int64), "b": np.asarray(shapes[1], np.int64)}
    model = one_node("BroadcastGradientArgs", feeds, {"of_a": INT64, "of_b": INT64})
    got = run(lowered(model), feeds)
    full = np.broadcast_shapes(*shapes)
    for shape, axes in zip(shapes, got.values(), strict=True):
        summed = np.ones(full).sum(tuple(int(i) for i in axes), keepdims=True)
        assert summed.reshape(shape).shape == shape
        assert summed.sum() == math.prod(full)


def test_sums_and_scales():
    x, axes = floats(1, 2, 3, 4), np.asarray([0, 2])
    feeds = {"x": x, "axes": axes}
    got = run(lowered(one_node("ReduceSumTraining", feeds, {"y": FLOAT}, keepdims=0)), feeds)["y"]
    close(got, x.sum((0, 2)))
    empty = {"x": x, "axes": np.asarray([], np.int64)}
    got = run(lowered(one_node("ReduceSumTraining", empty, {"y": FLOAT}, noop_with_empty_axes=1)), empty)["y"]
    close(got, x)
    feeds = {"x": x, "s": np.asarray(4.0, np.float64)}
    close(run(lowered(one_node("Scale", feeds, {"y": FLOAT})), feeds)["y"], x * 4)
    close(run(lowered(one_node("Scale", feeds, {"y": FLOAT}, scale_down=1)), feeds)["y"], x / 4)


def test_what_only_orders():
    feeds = {"a": floats(1, 3), "b": floats(2, 2, 2)}
    got = run(lowered(one_node("PassThrough", feeds, {"x": FLOAT, "y": FLOAT})), feeds)
    assert np.array_equal(got["x"], feeds["a"])
    assert np.array_equal(got["y"], feeds["b"])
    assert run(lowered(one_node("Group", feeds, {"done": BOOL})), feeds)["done"] == np.asarray(True)
    assert not run(lowered(one_node("ZeroGradient", feeds, {"z": FLOAT})), feeds)["z"].any()


@pytest.mark.parametrize("overwrite", [None, False, True])
@pytest.mark.parametrize("named", [False, True])
def test_accumulators(overwrite, named):
    """The buffer after the step is an output; what it held before does not matter where it is overwritten."""
    feeds = {"buffer": floats(1, 2, 3), "gradient": floats(2, 2, 3)}
    feeds["flag"] = None if overwrite is None else np.asarray([overwrite])
    if overwrite:
        feeds["buffer"][0] = np.nan
    outputs = {"done": BOOL} | ({"sum": FLOAT} if named else {})
    got = run(lowered(one_node("InPlaceAccumulatorV2", feeds, outputs)), feeds)
    assert list(got) == ["done", "sum" if named else "buffer.updated"]
    assert got["done"].tolist() == [True]
    expected = feeds["gradient"] if overwrite else feeds["buffer"] + feeds["gradient"]
    assert np.array_equal(got[list(got)[1]], expected)


@pytest.mark.parametrize("update", [None, False, True])
def test_the_older_accumulator(update):
    feeds = {"buffer": floats(1, 2, 3), "gradient": floats(2, 2, 3)}
    feeds["flag"] = None if update is None else np.asarray([update])
    got = run(lowered(one_node("InPlaceAccumulator", feeds, {"sum": FLOAT})), feeds)["sum"]
    assert np.array_equal(got, feeds["buffer"] if update is False else feeds["buffer"] + feeds["gradient"])


@pytest.mark.parametrize("op", ["YieldOp", "SomethingNewGrad"])
def test_an_operator_without_a_rule_is_named(op):
    model = one_node(op, {"x": floats(1, 3)}, {"y": FLOAT})
    with pytest.raises(ModelError, match=f"{op}.*node 'node'") as found:
        optimize(model, lower=True)
    assert found.value.exit_code == 3


def test_an_operator_in_a_subgraph_is_named():
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("ReluGrad", ["x", "x"], ["g"], name="deep", domain="com.microsoft")], "then", [],
        [onnx.helper.make_tensor_value_info("g", FLOAT, [3])],
    )  # fmt: skip
    model = one_node("ReluGrad", {"x": floats(1, 3), "y": floats(2, 3)}, {"z": FLOAT})
    model.graph.input.append(onnx.helper.make_tensor_value_info("c", BOOL, []))
    model.graph.node.append(onnx.helper.make_node("If", ["c"], ["w"], then_branch=inner, else_branch=inner))
    with pytest.raises(ModelError, match="ReluGrad cannot be lowered: node 'deep' lies in a subgraph"):
        optimize(model, lower=True)


def test_an_old_opset_is_refused():
    model = one_node("ReluGrad", {"x": floats(1, 3), "y": floats(2, 3)}, {"z": FLOAT}, opset=12)
    with pytest.raises(ModelError, match="needs opset 13"):
        optimize(model, lower=True)


def test_as_a_pass_among_others():
    feeds = {"dY": floats(1, 64), "X": floats(2, 64)}
    model = one_node("ReluGrad", feeds, {"dX": FLOAT})
    pipeline = Pipeline.parse("lower-training-ops,inplace,order,share")
    assert str(pipeline) == "lower-training-ops,inplace,order,share"
    result = optimize(model, passes=str(pipeline))
    assert any("1 training operators" in note for note in result.report.notes)
    assert np.array_equal(run(result.model, feeds)["dX"], np.where(feeds["X"] > 0, feeds["dY"], 0))
    assert [n.op_type for n in model.graph.node] == ["ReluGrad"]  # the model given is not changed
