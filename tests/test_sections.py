"""Where the forward section ends: which output is the loss, and what depends on it."""

import pytest
from graphs import graph, made

from onnx_sublinear.errors import UsageError
from onnx_sublinear.sections import find_losses, split_sections

CHAIN = """chain (float[8] x) => (float loss, float[8] dx) {
  h = Tanh (x)
  loss = ReduceSum <keepdims = 0> (h)
  dh = Mul (h, h)
  dx = Sub (x, dh)
}"""


def forward_of(g, losses=()):
    sections = split_sections(g.index, g.sizes, losses)
    return [name for name, forward in zip(made(g.model), sections.forward, strict=True) if forward]


def scalars(*outputs):
    """A graph whose nodes make scalar outputs of these names."""
    head = ", ".join(f"float {name}" for name in outputs)
    body = "".join(f"{name} = ReduceSum <keepdims = 0> (x)\n" for name in outputs)
    return graph(f"scalars (float[8] x) => ({head}) {{ {body} g = Neg (x) }}")


def test_forward_is_what_the_loss_needs():
    g = graph(CHAIN)
    assert forward_of(g) == ["h", "loss"]
    assert g.sections.losses == ("loss",)
    assert g.sections.has_gradients
    assert g.sections.notes == ()


@pytest.mark.parametrize(
    ("outputs", "losses"),
    [
        (["loss"], ("loss",)),
        (["accuracy", "loss"], ("loss",)),
        (["train_loss_1", "accuracy"], ("train_loss_1",)),
        (["nll", "objective"], ("nll", "objective")),
        (["loss", "loss_grad"], ("loss",)),
        (["grad_loss", "loss"], ("loss",)),
        (["dloss", "loss"], ("loss",)),
        (["glossy", "result"], ("glossy",)),  # no word "loss": the first scalar is taken
        (["first", "second"], ("first",)),
        (["w_grad", "value"], ("value",)),
    ],
)
def test_a_loss_is_found_by_name_then_by_shape(outputs, losses):
    g = scalars(*outputs)
    assert find_losses(g.index, g.sizes) == losses


def test_a_loss_operator_is_found_where_names_say_nothing():
    g = graph(
        """ce (float[4, 3] logits, int64[4] labels) => (float[4, 3] step, float other) {
          value = SoftmaxCrossEntropyLoss (logits, labels)
          other = ReduceSum <keepdims = 0> (logits)
          step = Mul (logits, value)
        }"""
    )
    assert g.sections.losses == ("value",)
    assert forward_of(g) == ["value"]


def test_a_vector_named_loss_is_taken_when_no_scalar_is():
    g = graph("vector (float[8] x) => (float[8] loss, float[8] dx) { loss = Abs (x)\n dx = Sign (x) }")
    assert g.sections.losses == ("loss",)


def test_two_losses_share_a_trunk_and_one_head_runs_after_the_others_gradient():
    """trunk -> loss_a, its gradient, then loss_b: the second head is forward although it stands behind."""
    g = graph(
        """heads (float[8] x) => (float loss_a, float loss_b, float[8] da, float[8] db) {
          trunk = Tanh (x)
          loss_a = ReduceSum <keepdims = 0> (trunk)
          da = Mul (trunk, trunk)
          head = Exp (trunk)
          loss_b = ReduceMax <keepdims = 0> (head)
          db = Mul (head, trunk)
        }"""
    )
    assert forward_of(g) == ["trunk", "loss_a", "head", "loss_b"]
    assert g.sections.notes == ("2 losses: loss_a, loss_b",)
    assert forward_of(g, ["loss_a"]) == ["trunk", "loss_a"]


def test_named_losses_win_and_count_once():
    g = graph(CHAIN)
    assert find_losses(g.index, g.sizes, ["dh", "dh"]) == ("dh",)
    assert forward_of(g, ["dh"]) == ["h", "dh"]


@pytest.mark.parametrize("name", ["nothing", "x"])
def test_a_named_loss_must_be_made_by_a_node(name):
    g = graph(CHAIN)
    with pytest.raises(UsageError, match=f"'{name}'") as caught:
        find_losses(g.index, g.sizes, [name])
    assert "loss, dx" in caught.value.hint


def test_without_a_loss_nothing_is_forward():
    g = graph("none (float[8] x) => (float[8] y) { y = Tanh (x) }")
    assert (g.sections.losses, g.sections.forward) == ((), (False,))
    assert not g.sections.has_gradients
    assert "--loss" in g.sections.notes[0]


def test_inference_graphs_have_no_gradient_section():
    g = graph("inference (float[8] x) => (float loss) { h = Tanh (x)\n loss = ReduceSum <keepdims = 0> (h) }")
    assert not g.sections.has_gradients
    assert g.sections.notes == ("no gradient section was found: every node is needed for the loss",)


def test_what_a_branch_captures_is_forward():
    g = graph(
        """branch (float[8] x, bool c) => (float loss, float[8] dx) {
          h = Tanh (x)
          y = If (c) <then_branch = yes () => (float[8] a) { a = Exp (h) },
                      else_branch = no () => (float[8] b) { b = Neg (x) }>
          loss = ReduceSum <keepdims = 0> (y)
          dx = Mul (y, y)
        }"""
    )
    assert forward_of(g) == ["h", "y", "loss"]


def test_a_yield_is_where_forward_ends():
    g = graph(
        """module (float[8] x) => (float[8] dx) {
          h = Tanh (x)
          dh = com.microsoft.YieldOp (h)
          dx = Mul (dh, h)
        }"""
    )
    assert g.sections.losses == ("h",)
    assert forward_of(g) == ["h"]
