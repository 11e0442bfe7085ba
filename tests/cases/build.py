"""Small models for the kinds of faults that people met in other tools, one function per kind, built in memory.

Each kind starts from `training_step` (a multilayer perceptron with its gradients), large enough that recomputation
pays. `feeds` gives values for a model's inputs.
"""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

BATCH, WIDTH, DEPTH = 64, 32, 6
FLOAT, DOUBLE, FLOAT16, INT64, BOOL = (getattr(TensorProto, n) for n in ("FLOAT", "DOUBLE", "FLOAT16", "INT64", "BOOL"))


def node(op_type, inputs, outputs, **attributes):
    """A node named after its first output."""
    made = next((o for o in outputs if o), "none")
    return helper.make_node(op_type, inputs, outputs, name=f"{op_type}:{made}", **attributes)


def info(name, shape, elem_type=FLOAT):
    return helper.make_tensor_value_info(name, elem_type, shape)


def constant(name, value, elem_type=FLOAT):
    array = np.asarray(value, helper.tensor_dtype_to_np_dtype(elem_type))
    return numpy_helper.from_array(array, name)


def model_of(nodes, inputs, outputs, initializers=(), *, opset=20, ir=9, **extra):
    graph = helper.make_graph(nodes, "step", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", opset), *extra.pop("imports", ())]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir, producer_name="cases", **extra)


def feeds(model, seed=0):
    """Values for the inputs that have no default; symbolic dims are BATCH."""
    rng = np.random.default_rng(seed)
    given = {t.name for t in model.graph.initializer}
    values = {}
    for v in model.graph.input:
        t = v.type.tensor_type
        shape = [d.dim_value if d.dim_value > 0 else BATCH for d in t.shape.dim]
        if v.name not in given:
            values[v.name] = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(t.elem_type))
    return values


def training_step(
    *, depth=DEPTH, batch=BATCH, opset=20, ir=9, elem_type=FLOAT, dropout=False, weights="initializers", activation=None
):
    """loss = mean((h_n - t)^2) with h_i = relu(h_{i-1} W_i), and the gradients of all W_i.

    Args:
        depth: layers.
        batch: rows of the input; a string makes it symbolic.
        opset: of the default domain.
        ir: IR version; below 4, initializers are listed as inputs too.
        elem_type: of all float tensors.
        dropout: a Dropout with seed 7 behind every layer.
        weights: "initializers", "overridable" (inputs with a default) or "constants" (Constant nodes).
        activation: (tensor in, tensor out) -> nodes to use in place of Relu.
    """
    rng = np.random.default_rng(1)
    kernel = [constant(f"W{i}", rng.standard_normal((WIDTH, WIDTH)) / 6, elem_type) for i in range(depth)]
    scalars = [constant("zero", 0, elem_type), constant("two", 2 / (BATCH * WIDTH), elem_type)]
    nodes, h = [], "x"
    if dropout:
        scalars += [constant("ratio", 0.5, FLOAT), constant("train", True, BOOL)]
    for i in range(depth):
        nodes.append(node("MatMul", [h, f"W{i}"], [f"z{i}"]))
        nodes += activation(f"z{i}", f"h{i}") if activation else [node("Relu", [f"z{i}"], [f"h{i}"])]
        h = f"h{i}"
        if dropout:
            nodes.append(node("Dropout", [h, "ratio", "train"], [f"d{i}", f"mask{i}"], seed=7))
            h = f"d{i}"
    nodes += [
        node("Sub", [h, "t"], ["err"]),
        node("Mul", ["err", "err"], ["square"]),
        node("ReduceMean", ["square"], ["loss"], keepdims=0),
        node("Mul", ["err", "two"], [f"g{depth - 1}"]),
    ]
    for i in reversed(range(depth)):
        g, below = f"g{i}", "x" if i == 0 else (f"d{i - 1}" if dropout else f"h{i - 1}")
        if dropout:
            nodes += [node("Cast", [f"mask{i}"], [f"keep{i}"], to=elem_type), node("Mul", [g, f"keep{i}"], [f"p{i}"])]
            nodes.append(node("Add", [f"p{i}", f"p{i}"], [f"q{i}"]))
            g = f"q{i}"
        nodes += [
            node("Greater", [f"h{i}", "zero"], [f"on{i}"]),
            node("Cast", [f"on{i}"], [f"step{i}"], to=elem_type),
            node("Mul", [g, f"step{i}"], [f"gz{i}"]),
            node("Transpose", [below], [f"ht{i}"], perm=[1, 0]),
            node("MatMul", [f"ht{i}", f"gz{i}"], [f"W{i}_grad"]),
        ]
        if i:
            nodes.append(node("Transpose", [f"W{i}"], [f"Wt{i}"], perm=[1, 0]))
            nodes.append(node("MatMul", [f"gz{i}", f"Wt{i}"], [f"g{i - 1}"]))
    inputs = [info("x", [batch, WIDTH], elem_type), info("t", [batch, WIDTH], elem_type)]
    outputs = [info("loss", [], elem_type), *(info(f"W{i}_grad", [WIDTH, WIDTH], elem_type) for i in range(depth))]
    if weights == "constants":
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in kernel] + nodes
        kernel = []
    if weights == "overridable" or ir < 4:
        inputs += [info(t.name, list(t.dims), t.data_type) for t in kernel + (scalars if ir < 4 else [])]
    return model_of(nodes, inputs, outputs, [*kernel, *scalars], opset=opset, ir=ir)


def _edit(model, nodes=(), outputs=(), initializers=(), inputs=()):
    model.graph.node.extend(nodes)
    model.graph.output.extend(outputs)
    model.graph.initializer.extend(initializers)
    model.graph.input.extend(inputs)
    return model


# What runs ----------------------------------------------------------------------------------------------------------


def seeded_dropouts():
    return training_step(dropout=True)


def unseeded_noise():
    """The same noise feeds forward and gradient: `gap` is 0 unless the noise is drawn twice."""
    nodes = [
        node("RandomNormalLike", ["h1"], ["noise"]),
        node("Mul", ["noise", "g3"], ["noise_grad"]),
        node("Div", ["noise_grad", "g3"], ["noise_again"]),
        node("Sub", ["noise_again", "noise"], ["difference"]),
        node("Abs", ["difference"], ["distance"]),
        node("Min", ["distance", "one"], ["near"]),
        node("Floor", ["near"], ["far"]),
        node("ReduceMax", ["far"], ["gap"], keepdims=0),
    ]
    return _edit(training_step(), nodes, [info("gap", [])], [constant("one", 1)])


def equal_random_nodes():
    draws = [node("RandomUniform", [], [f"u{i}"], shape=[BATCH, WIDTH]) for i in range(2)]
    nodes = [
        *draws,
        node("Equal", ["u0", "u1"], ["same"]),
        node("Cast", ["same"], ["ones"], to=FLOAT),
        node("ReduceSum", ["ones"], ["n_same"], keepdims=0),
    ]
    return _edit(training_step(), nodes, [info("n_same", [])])


def two_losses(**options):
    nodes = [
        node("Mul", ["h2", "h2"], ["square_b"]),
        node("ReduceMean", ["square_b"], ["loss_b"], keepdims=0),
        node("Transpose", ["h1"], ["ht_b"], perm=[1, 0]),
        node("MatMul", ["ht_b", "h2"], ["W2_grad_b"]),
    ]
    return _edit(training_step(**options), nodes, [info("loss_b", []), info("W2_grad_b", [WIDTH, WIDTH])])


def activations_are_outputs():
    return _edit(training_step(), outputs=[info(n, [BATCH, WIDTH]) for n in ("z1", "h1", "h3")])


def passed_through():
    """Graph outputs that only pass on an input, a weight, or a view of one."""
    nodes = [node("Identity", ["x"], ["x_out"]), node("Reshape", ["t", "flat"], ["t_out"])]
    outputs = [info("x_out", [BATCH, WIDTH]), info("t_out", [BATCH * WIDTH])]
    return _edit(training_step(), nodes, outputs, [constant("flat", [-1], INT64)])


def outputs_are_weights():
    """Graph outputs that are an initializer and a Constant, and an input that nothing reads."""
    nodes = [helper.make_node("Constant", [], ["c"], value=constant("", [1.0, 2.0]))]
    return _edit(training_step(), nodes, [info("W3", [WIDTH, WIDTH]), info("c", [2])], inputs=[info("unused", [4])])


def duplicate_outputs():
    return _edit(training_step(), outputs=[info("W1_grad", [WIDTH, WIDTH]), info("loss", [])])


def unread_outputs():
    nodes = [
        node("TopK", ["h1", "k"], ["top", "places"], largest=1),
        node("Split", ["h2"], ["left", "right"], num_outputs=2, axis=1),
        node("ReduceSum", ["left"], ["left_sum"], keepdims=0),
    ]
    return _edit(training_step(), nodes, [info("left_sum", [])], [constant("k", [3], INT64)])


def zero_sizes():
    nodes = [
        node("Slice", ["h1", "none", "none", "rows"], ["empty"]),
        node("Concat", ["empty", "h1", "nothing"], ["joined"], axis=0),
        node("ReduceSum", ["empty"], ["zero_sum"], keepdims=0),
        node("Relu", ["empty"], ["empty_out"]),
        node("ReduceSum", ["joined"], ["joined_sum"], keepdims=0),
    ]
    initializers = [
        constant("none", [0], INT64),
        constant("rows", [0], INT64),
        constant("nothing", np.zeros((0, WIDTH))),
    ]
    return _edit(
        training_step(),
        nodes,
        [info("zero_sum", []), info("empty_out", [0, WIDTH]), info("joined_sum", [])],
        initializers,
    )


def half_precision():
    return training_step(elem_type=FLOAT16)


def double_precision():
    return training_step(elem_type=DOUBLE)


def low_precision_round_trips():
    """Large tensors of types that the runtime has no Size kernel for."""
    nodes, outputs = [], []
    for name, to in (("bf16", TensorProto.BFLOAT16), ("f8", TensorProto.FLOAT8E4M3FN)):
        nodes += [node("Cast", ["h2"], [name], to=to), node("Cast", [name], [f"{name}_back"], to=FLOAT)]
        nodes += [node("Sub", [f"{name}_back", "h3"], [f"{name}_gap"])]
        nodes += [node("ReduceSum", [f"{name}_gap"], [f"{name}_sum"], keepdims=0)]
        nodes += [node("Cast", [f"{name}_back"], [f"{name}_unread"], to=to), node("Cast", ["g3"], [f"{name}_g"], to=to)]
        outputs.append(info(f"{name}_sum", []))
    return _edit(training_step(), nodes, outputs)


def same_tensor_twice():
    nodes = [
        node("Sub", ["h2", "h2"], ["nil"]),
        node("Sum", ["h3", "h3", "nil"], ["twice"]),
        node("Transpose", ["twice"], ["turned"], perm=[1, 0]),
        node("MatMul", ["turned", "twice"], ["gram"]),
    ]
    return _edit(training_step(), nodes, [info("gram", [WIDTH, WIDTH])])


def symbolic_batch():
    return training_step(batch="N")


def negative_dims():
    model = training_step(batch=BATCH)
    for value in model.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_value = -1
    return model


def _branch(name, nodes, output, initializers=()):
    return helper.make_graph(nodes, name, [], [output], initializers)


def captures():
    """An If inside a Loop reads an activation two levels up."""
    then = _branch("then", [node("Add", ["state", "h1"], ["sum_t"])], info("sum_t", [BATCH, WIDTH]))
    other = _branch("else", [node("Sub", ["state", "h4"], ["sum_e"])], info("sum_e", [BATCH, WIDTH]))
    body = helper.make_graph(
        [
            node("Less", ["i", "limit"], ["early"]),
            node("If", ["early"], ["next"], then_branch=then, else_branch=other),
            node("Identity", ["go"], ["go_on"]),
            node("Identity", ["h2"], ["taken"]),
        ],
        "body",
        [info("i", [], INT64), info("go", [], BOOL), info("state", [BATCH, WIDTH])],
        [info("go_on", [], BOOL), info("next", [BATCH, WIDTH]), info("taken", [BATCH, WIDTH])],
    )
    nodes = [
        node("Loop", ["trips", "yes", "h3"], ["final", "all_taken"], body=body),
        node("ReduceSum", ["final"], ["final_sum"], keepdims=0),
        node("ReduceSum", ["all_taken"], ["taken_sum"], keepdims=0),
    ]
    initializers = [constant("trips", 3, INT64), constant("yes", True, BOOL), constant("limit", 1, INT64)]
    return _edit(training_step(), nodes, [info("final_sum", []), info("taken_sum", [])], initializers)


def local_functions():
    """Every layer calls a function that calls another; body names equal names of the graph."""
    inner = helper.make_function(
        "local", "Rectify", ["z0"], ["h0"], [helper.make_node("Relu", ["z0"], ["h0"])], [helper.make_opsetid("", 20)]
    )
    outer_nodes = [
        helper.make_node("Rectify", ["x"], ["h1"], domain="local"),
        helper.make_node("Identity", ["h1"], ["y"]),
    ]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    outer = helper.make_function("local", "Layer", ["x"], ["y"], outer_nodes, imports)
    model = training_step(activation=lambda z, h: [node("Layer", [z], [h], domain="local")])
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.extend([inner, outer])
    return model


def empty_optional_names():
    def clip(z, h):
        return [node("Clip", [z, "", "six"], [h])]

    nodes = [
        node("Dropout", ["h2", "", "yes"], ["dropped", ""], seed=3),
        node("ReduceSum", ["dropped"], ["dropped_sum"], keepdims=0),
    ]
    initializers = [constant("six", 6), constant("yes", False, BOOL)]
    return _edit(training_step(activation=clip), nodes, [info("dropped_sum", [])], initializers)


def overridable_weights():
    return training_step(weights="overridable")


def weights_as_constants():
    return training_step(weights="constants")


def two_losses_and_constants():
    return two_losses(weights="constants")


def sparse_weight():
    model = training_step()
    dense = next(t for t in model.graph.initializer if t.name == "W2")
    values = numpy_helper.to_array(dense).ravel().copy()
    values[::3] = 0
    places = np.flatnonzero(values)
    model.graph.initializer.remove(dense)
    sparse = helper.make_sparse_tensor(constant("W2", values[places]), constant("", places, INT64), [WIDTH, WIDTH])
    model.graph.sparse_initializer.append(sparse)
    return model


def metadata():
    model = training_step()
    helper.set_model_props(model, {"author": "someone", "": "empty key"})
    model.doc_string, model.graph.doc_string, model.domain, model.model_version = "model", "graph", "org.example", 7
    for i, n in enumerate(model.graph.node):
        n.doc_string = f"node {i}"
        n.metadata_props.add(key="place", value=str(i))
    annotation = model.graph.quantization_annotation.add(tensor_name="h1")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="two")
    model.training_info.add().algorithm.CopyFrom(helper.make_graph([], "algorithm", [], []))
    return model


def sequences():
    nodes = [
        node("SequenceConstruct", ["h1", "h2"], ["pair"]),
        node("SequenceAt", ["pair", "place"], ["first"]),
        node("ConcatFromSequence", ["pair"], ["both"], axis=0),
        node("Optional", ["h3"], ["maybe"]),
        node("OptionalGetElement", ["maybe"], ["surely"]),
        node("Sub", ["first", "surely"], ["apart"]),
        node("ReduceSum", ["apart"], ["apart_sum"], keepdims=0),
        node("ReduceSum", ["both"], ["both_sum"], keepdims=0),
    ]
    return _edit(training_step(), nodes, [info("apart_sum", []), info("both_sum", [])], [constant("place", 0, INT64)])


def strings():
    """String labels mapped to numbers in front of the loss."""
    nodes = [
        helper.make_node(
            "LabelEncoder",
            ["labels"],
            ["numbers"],
            domain="ai.onnx.ml",
            keys_strings=["cat", "dog"],
            values_floats=[1.0, 2.0],
        ),
        node("ReduceSum", ["numbers"], ["number_sum"], keepdims=0),
    ]
    labels = helper.make_tensor("labels", TensorProto.STRING, [3], [b"cat", b"dog", b"cat"])
    model = _edit(training_step(), nodes, [info("number_sum", [])], [labels])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return model


def unsorted_nodes():
    model = training_step()
    nodes = list(model.graph.node)
    order = np.random.default_rng(3).permutation(len(nodes))
    del model.graph.node[:]
    model.graph.node.extend(nodes[i] for i in order)
    return model


def odd_names():
    """Unnamed nodes; tensor names with blanks, slashes, colons, other scripts, control characters and 400 letters."""
    model = training_step()
    odd = [
        "a b:0",
        "deep/er/\u00e9\u4e2d",
        "line\nbreak\x1b[31m",
        "n" * 400,
        "h1/recompute",
        "barrier/zeros2",
        "view{}",
    ]
    names = dict(zip(["h0", "h1", "h2", "h3", "h4", "g2", "gz1"], odd, strict=True))
    for n in model.graph.node:
        n.name = ""
        n.input[:] = [names.get(i, i) for i in n.input]
        n.output[:] = [names.get(o, o) for o in n.output]
    return model


def equal_node_names():
    model = training_step()
    for n in model.graph.node[::2]:
        n.name = "same"
    return model


def forward_only():
    model = training_step()
    del model.graph.output[:]
    model.graph.output.append(info("h5", [BATCH, WIDTH]))
    keep = [n for n in model.graph.node if n.output[0][0] in "zh" and n.output[0][1:].isdigit()]
    del model.graph.node[:]
    model.graph.node.extend(keep)
    return model


def odd_imports():
    model = training_step()
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("ai.onnx", 20), helper.make_opsetid("never.used", 3)])
    return model


def old_opset():
    return training_step(opset=9, ir=3)


def empty_graph():
    return model_of([], [info("x", [2])], [info("w", [2])], [constant("w", [1, 2])])


def wrong_rank():
    model = training_step()
    model.graph.value_info.append(info("h1", [4, BATCH // 4, WIDTH]))
    return model


def unknown_domain():
    """Custom operators in the middle of forward and gradient."""
    model = training_step()
    for n in model.graph.node:
        if n.output[0] == "h2":
            n.op_type, n.domain = "FusedGate", "lab.custom"
        elif n.output[0] == "gz2":
            n.op_type, n.domain = "FusedGateGrad", "lab.custom"
    model.opset_import.append(helper.make_opsetid("lab.custom", 1))
    return model


def side_effects():
    """Collectives in every layer's gradient, and an accumulator whose flag nothing reads."""
    model = training_step()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    inputs = [info("sum3", [WIDTH, WIDTH]), info("reset", [1], BOOL)]
    for i in range(DEPTH):
        model.graph.node.append(node("NcclAllReduce", [f"W{i}_grad"], [f"W{i}_all"], domain="com.microsoft"))
    flag = node("InPlaceAccumulatorV2", ["sum3", "W3_grad", "reset"], ["flag"], domain="com.microsoft")
    outputs = [info(f"W{i}_all", [WIDTH, WIDTH]) for i in range(DEPTH)]
    return _edit(model, [flag], outputs, inputs=inputs)


def bomb():
    """A tensor of 2^44 floats beside a training step: only its size may be worked out."""
    nodes = [node("ConstantOfShape", ["huge"], ["bomb"]), node("ReduceSum", ["bomb"], ["bomb_sum"], keepdims=0)]
    return _edit(training_step(), nodes, [info("bomb_sum", [])], [constant("huge", [2**44], INT64)])


def deep_chain(layers=250):
    nodes = [node("Tanh", ["x" if i == 0 else f"a{i - 1}"], [f"a{i}"]) for i in range(layers)]
    nodes += [node("ReduceMean", [f"a{layers - 1}"], ["loss"], keepdims=0)]
    for i in reversed(range(layers)):
        g = "one" if i == layers - 1 else f"g{i + 1}"
        nodes += [
            node("Mul", [f"a{i}", f"a{i}"], [f"s{i}"]),
            node("Sub", ["one", f"s{i}"], [f"r{i}"]),
            node("Mul", [g, f"r{i}"], [f"g{i}"]),
        ]
    return model_of(nodes, [info("x", [32])], [info("loss", []), info("g0", [32])], [constant("one", 1)])


def diamond_ladder(levels=60):
    """Fully connected pairs of nodes: 2^levels paths."""
    nodes, a, b = [], "x", "x"
    for i in range(levels):
        nodes += [node("Add", [a, b], [f"a{i}"]), node("Sub", [a, b], [f"b{i}"])]
        a, b = f"a{i}", f"b{i}"
    nodes += [node("Add", [a, b], ["y"]), node("ReduceMean", ["y"], ["loss"], keepdims=0)]
    nodes += [node("Mul", ["y", "a3"], ["y_grad"])]
    return model_of(nodes, [info("x", [32])], [info("loss", []), info("y_grad", [32])])


# What is refused ----------------------------------------------------------------------------------------------------


def cycle():
    return _edit(training_step(), [node("Add", ["h1", "b"], ["a"]), node("Relu", ["a"], ["b"])])


def defined_twice():
    return _edit(training_step(), [node("Neg", ["h2"], ["h1"])])


def dangling():
    return _edit(training_step(), [node("Neg", ["ghost"], ["n"])])


def gradient_node():
    node_ = helper.make_node("Gradient", ["x"], ["dx"], domain="ai.onnx.preview.training", xs=["x"], y="loss")
    model = _edit(training_step(), [node_], [info("dx", [BATCH, WIDTH])])
    model.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    return model


def branch_returns_outer():
    then = helper.make_graph([], "then", [], [info("h2", [BATCH, WIDTH])])
    other = _branch("else", [node("Neg", ["h2"], ["negated"])], info("negated", [BATCH, WIDTH]))
    branch = node("If", ["yes"], ["chosen"], then_branch=then, else_branch=other)
    return _edit(training_step(), [branch], [info("chosen", [BATCH, WIDTH])], [constant("yes", True, BOOL)])


def wrong_type():
    model = training_step()
    model.graph.value_info.append(info("h1", [BATCH, WIDTH], DOUBLE))
    return model


def future_versions():
    model = training_step()
    model.ir_version, model.opset_import[0].version = 99, 999
    return model


def huge_dims():
    evil = TensorProto(name="evil", data_type=FLOAT, dims=[2**40, 2**40])
    return _edit(training_step(), initializers=[evil])


def short_data():
    model = training_step()
    model.graph.initializer[1].raw_data = model.graph.initializer[1].raw_data[:40]
    return model


def external(location, size_bytes=WIDTH * WIDTH * 4):
    """W1 lies in a file."""
    model = training_step()
    tensor = model.graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size_bytes))):
        tensor.external_data.add(key=key, value=value)
    return model


def truncated():
    data = training_step().SerializeToString()
    return data[: len(data) * 6 // 10]
