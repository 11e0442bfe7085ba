"""Small training graphs in ONNX's text form, and graphs as readable listings."""

import onnx
from onnx import TensorProto, helper, parser

from onnx_sublinear.training_graph import TrainingGraph


def model(text, opset=20):
    """The model of a graph in ONNX's text form: `name (inputs) => (outputs) { nodes }`."""
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}, "lab" : 1, "com.microsoft" : 1]>{text}')


def graph(text, opset=20, **options):
    """The same with its facts."""
    return TrainingGraph(model(text, opset), **options)


def listing(proto):
    """One line a node: `outputs = Operator(inputs)`."""
    return [f"{', '.join(n.output)} = {n.op_type}({', '.join(n.input)})" for n in proto.graph.node]


def made(proto):
    """The first output of every node, in file order."""
    return [n.output[0] for n in proto.graph.node]


def places(proto, *names):
    """Positions of the nodes that make `names`."""
    where = {o: i for i, n in enumerate(proto.graph.node) for o in n.output}
    return [where[name] for name in names]


def deep_chain(layers, width=1024, opset=20):
    """Layers `y = Tanh(x W)` with a weight gradient each, every tensor [width, 8]; W and its gradient are small."""
    value = helper.make_tensor_value_info
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("MatMul", [f"y{i}", f"W{i}"], [f"h{i}"], name=f"matmul{i}"))
        nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"y{i + 1}"], name=f"tanh{i}"))
    nodes.append(helper.make_node("ReduceMean", [f"y{layers}"], ["loss"], name="mean", keepdims=0))
    nodes.append(helper.make_node("Exp", [f"y{layers}"], [f"dy{layers}"], name="seed"))
    for i in reversed(range(layers)):
        nodes.append(helper.make_node("Mul", [f"dy{i + 1}", f"y{i + 1}"], [f"dh{i}"], name=f"dtanh{i}"))
        nodes.append(helper.make_node("Gemm", [f"y{i}", f"dh{i}"], [f"W{i}_grad"], name=f"dW{i}", transA=1))
        if i:
            nodes.append(helper.make_node("Gemm", [f"dh{i}", f"W{i}"], [f"dy{i}"], name=f"dy{i}", transB=1))
    inputs = [value("y0", TensorProto.FLOAT, [width, 8])]
    inputs += [value(f"W{i}", TensorProto.FLOAT, [8, 8]) for i in range(layers)]
    outputs = [value("loss", TensorProto.FLOAT, [])]
    outputs += [value(f"W{i}_grad", TensorProto.FLOAT, [8, 8]) for i in range(layers)]
    made_graph = helper.make_graph(nodes, "deep_chain", inputs, outputs)
    made_model = helper.make_model(made_graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made_model, full_check=True)
    return made_model
