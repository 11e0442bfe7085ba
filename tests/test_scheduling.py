"""Base schedules: Before/Expected by the names of what the nodes make, and that all of them are orders at all."""

import random

import pytest
from graphs import deep_chain, graph, made

from onnx_sublinear.runtime_model import simulate
from onnx_sublinear.scheduling import base_orders, fixed_nodes, forward_first, hoist, lazy, sink
from onnx_sublinear.training_graph import TrainingGraph


def named(g, order):
    names = made(g.model)
    return " ".join(names[k] for k in order)


def in_file(g):
    return g.index.order


def is_schedule(g, order):
    """Whether every node runs once, after what it reads."""
    place = {k: i for i, k in enumerate(order)}
    makers = g.index.producer
    return sorted(order) == list(range(len(g.index.nodes))) and all(
        place[makers[name]] < place[k] for k in order for name in g.index.reads[k] if name in makers
    )


class TestSink:
    def test_what_depends_on_inputs_alone_goes_to_its_first_reader(self):
        g = graph(
            """transposed (float[8, 8] x, float[8, 8] W) => (float[8, 8] y, float[8, 8] z) {
              t = Transpose (W)
              u = Neg (t)
              h = Tanh (x)
              y = MatMul (h, h)
              z = MatMul (y, u)
            }"""
        )
        # h reads the input x alone, so it is sinkable too.
        assert named(g, sink(g.runtime, in_file(g))) == "h y t u z"

    def test_graph_outputs_and_fixed_nodes_stay(self):
        g = graph("out (float[8] x) => (float[8] a, float[8] c) { a = Neg (x)\n b = Exp (x)\n c = Add (a, b) }")
        assert named(g, sink(g.runtime, in_file(g))) == "a b c"
        assert named(g, sink(g.runtime, [1, 0, 2])) == "a b c"
        assert named(g, sink(g.runtime, [1, 0, 2], fixed={1})) == "b a c"

    def test_what_nothing_reads_goes_to_the_end(self):
        g = graph("dead (float[8] x) => (float[8] y) { a = Neg (x)\n h = Exp (x)\n y = Tanh (h) }")
        assert named(g, sink(g.runtime, in_file(g))) == "h y a"


HEADS = """heads (float[64, 64] x) => (float loss_a, float loss_b, float[64, 64] da, float m, float[64, 64] db) {
  trunk = Tanh (x)
  loss_a = ReduceSum <keepdims = 0> (trunk)
  da = Mul (trunk, trunk)
  m = ReduceMax <keepdims = 0> (trunk)
  head = Exp (trunk)
  loss_b = ReduceMin <keepdims = 0> (head)
  db = Mul (head, trunk)
}"""


def test_forward_first_moves_gradients_behind_and_leaves_statistics():
    g = graph(HEADS)
    order = forward_first(g.runtime, in_file(g), g.sections.forward)
    assert named(g, order) == "trunk loss_a m head loss_b da db"


WEIGHTS = """weights (float[8] x) => (float loss, float[8] w2, float[8] w1) {
  y1 = Tanh (x)
  y2 = Exp (y1)
  loss = ReduceSum <keepdims = 0> (y2)
  d2 = Neg (y2)
  factor = Abs (y1)
  d1 = Mul (d2, factor)
  w1 = Mul (d1, x)
  w2 = Mul (d2, y1)
}"""


def test_lazy_makes_weight_gradients_of_the_last_layer_first_and_deep_values_before_shallow_ones():
    g = graph(WEIGHTS)
    assert named(g, lazy(g.runtime, in_file(g), g.sections.forward)) == "y1 y2 loss d2 w2 factor d1 w1"


def test_lazy_keeps_the_order_of_fixed_nodes():
    g = graph(WEIGHTS)
    order = lazy(g.runtime, in_file(g), g.sections.forward, fixed={6, 7})
    assert order.index(6) < order.index(7)
    assert is_schedule(g, order)


class TestHoist:
    TEXT = """hoist (float[1024] x) => (float loss, float s, float[2048] z) {
      a = Tanh (x)
      loss = ReduceMax <keepdims = 0> (a)
      d = Exp (a)
      e = Neg (d)
      z = Concat <axis = 0> (e, x)
      s = ReduceSum <keepdims = 0> (d)
    }"""

    def test_a_node_that_frees_more_than_it_makes_runs_at_once(self):
        g = graph(self.TEXT)
        assert named(g, hoist(g.runtime, in_file(g))) == "a loss d e s z"

    def test_fixed_nodes_stay(self):
        g = graph(self.TEXT)
        assert named(g, hoist(g.runtime, in_file(g), fixed={5})) == "a loss d e z s"


def test_nodes_with_effects_and_readers_of_updated_tensors_are_fixed():
    g = graph(
        """update (float[8] w, float[8] dw, bool[1] reset) => (bool[1] done, float[8] after, float[8] y) {
          y = Neg (dw)
          done, sum = com.microsoft.InPlaceAccumulatorV2 (w, dw, reset)
          after = Exp (w)
          z = lab.Unknown (y)
        }"""
    )
    assert fixed_nodes(g) == {1, 2, 3}


def random_graph(seed):
    rng = random.Random(seed)
    names, lines = ["x"], []
    for i in range(rng.randrange(6, 40)):
        op = rng.choice(["Relu", "Neg", "Add", "Mul", "Identity", "Tanh", "Softmax"])
        sources = [rng.choice(names[-6:]) for _ in range(2 if op in ("Add", "Mul") else 1)]
        lines.append(f"t{i} = {op} ({', '.join(sources)})")
        names.append(f"t{i}")
    middle = rng.choice(names[1:])
    lines.append(f"loss = ReduceSum <keepdims = 0> ({middle})")
    body = "\n".join(lines)
    return graph(f"random (float[16, 4] x) => (float loss, float[16, 4] {names[-1]}) {{ {body} }}")


@pytest.mark.parametrize("seed", range(25))
def test_every_base_order_is_a_schedule(seed):
    g = random_graph(seed)
    orders = base_orders(g)
    assert all(is_schedule(g, order) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)


def test_some_base_order_is_no_worse_than_the_file():
    g = TrainingGraph(deep_chain(8))
    peaks = [simulate(g.runtime, order).peak_bytes for order in base_orders(g)]
    assert min(peaks) <= simulate(g.runtime, in_file(g)).peak_bytes
