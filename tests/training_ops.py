"""Single training operators as models: random inputs, the node as it stands, and the node lowered."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from onnx_sublinear.passes.lower_training_ops import LowerTrainingOpsPass
from onnx_sublinear.training_graph import TrainingGraph


def one_node(
    op, feeds, outputs, domain="com.microsoft", opset=17, constants=(), symbolic=False, shapes=None, **attributes
):
    """The model of one node: `feeds` are its inputs in order (None: left out), by name; `outputs` their types by name.

    Inputs named in `constants` are initializers. With `symbolic`, every axis of the other inputs has a symbol.
    """
    inputs, initializers = [], []
    for name, value in feeds.items():
        if value is None:
            continue
        elem = helper.np_dtype_to_tensor_dtype(value.dtype)
        if name in constants:
            initializers.append(helper.make_tensor(name, elem, value.shape, value.ravel()))
        else:
            dims = [f"{name}_{i}" for i in range(value.ndim)] if symbolic else list(value.shape)
            inputs.append(helper.make_tensor_value_info(name, elem, dims))
    names = ["" if v is None else k for k, v in feeds.items()]
    node = helper.make_node(op, names, list(outputs), name="node", domain=domain, **attributes)
    made = [helper.make_tensor_value_info(n, t, (shapes or {}).get(n)) for n, t in outputs.items() if n]
    graph = helper.make_graph([node], "one", inputs, made, initializers)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def lowered(model):
    result = LowerTrainingOpsPass()(TrainingGraph(model))
    assert result.modified
    assert all(n.domain == "" for n in result.model.graph.node)
    return result.model


def run(model, feeds):
    """The outputs by name, at optimization level none."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in wanted}), strict=True))


def floats(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got, expected, tolerance=1e-5):
    """Relative to the largest value."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = max(np.abs(expected.astype(np.float64)).max(initial=0), 1e-6)
    assert np.abs(got.astype(np.float64) - expected).max(initial=0) <= tolerance * scale


FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
