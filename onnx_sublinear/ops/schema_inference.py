"""Types of one node's outputs by ONNX's own inference, cached: the layers of a training graph repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import NodeProto, OperatorSetIdProto, TensorProto, TypeProto, ValueInfoProto, defs, helper, shape_inference

from onnx_sublinear.ops.tensor_types import TensorType, to_proto
from onnx_sublinear.ops.type_merging import Known, known_type
from onnx_sublinear.ops.values import Value

__all__ = ["SchemaInference", "schema_of"]

# Operators whose output shape never depends on the numbers in their inputs: keeps the cache small.
_ELEMENTWISE = frozenset(
    (
        *("Add", "And", "Div", "Equal", "Gemm", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "MatMul", "Max"),
        *("Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor"),
    )
)
_REALS_MATTER = frozenset(("Range", "Resize", "Upsample"))
_REALS = (int(TensorProto.FLOAT), int(TensorProto.DOUBLE), int(TensorProto.FLOAT16))


def schema_of(op_type: str, domain: str, version: int | None) -> defs.OpSchema | None:
    """ONNX's schema of an operator at a version of its domain; None where it has none."""
    try:
        return defs.get_schema(op_type, domain) if version is None else defs.get_schema(op_type, version, domain)
    except defs.SchemaError:
        return None


class SchemaInference:
    """Asks ONNX about one node at a time.

    Args:
        bodies: whether to go through the function body of operators that have no inference of their own. ORT does not.
    """

    def __init__(self, bodies: bool = True) -> None:
        self._bodies = bodies
        self._cache: dict[tuple[object, ...], list[Known]] = {}

    def outputs(
        self,
        node: NodeProto,
        schema: defs.OpSchema,
        opset: Mapping[str, int],
        types: Sequence[Known],
        values: Sequence[Value | None],
    ) -> list[Known]:
        """One entry an output; [] where the inference finds a contradiction or lacks the type of an input.

        Only which symbols are equal matters, so they are numbered: layers that differ in symbols share an entry.
        """
        numbers: dict[str, str] = {}
        types = [_with_symbols(t, numbers, number=True) for t in types]
        data: tuple[Value | None, ...] = ()
        if node.op_type not in _ELEMENTWISE:
            reals = node.op_type in _REALS_MATTER
            data = tuple(v if v and v.is_known and (reals or v.elem_type not in _REALS) else None for v in values)
        signature = (
            node.op_type,
            schema.domain,
            schema.since_version,
            tuple(a.SerializeToString(deterministic=True) for a in node.attribute),
            tuple(bool(n) for n in node.input),
            tuple(bool(n) for n in node.output),
            tuple(types),
            data,
        )
        cached = self._cache.get(signature)
        if cached is None:
            cached = self._cache[signature] = self._ask(node, schema, opset, types, data)
        if not numbers:
            return cached
        names = {number: name for name, number in numbers.items()}
        return [_with_symbols(t, names) for t in cached]

    def _ask(
        self,
        node: NodeProto,
        schema: defs.OpSchema,
        opset: Mapping[str, int],
        known: Sequence[Known],
        data: Sequence[Value | None],
    ) -> list[Known]:
        alone = NodeProto()
        alone.CopyFrom(node)
        del alone.input[:], alone.output[:]
        alone.input.extend(f"i{k}" if name else "" for k, name in enumerate(node.input))
        alone.output.extend(f"o{k}" if name else "" for k, name in enumerate(node.output))
        types = {f"i{k}": _proto(entry) for k, entry in enumerate(known) if node.input[k]}
        tensors = {f"i{k}": value.tensor() for k, value in enumerate(data) if value is not None}
        imports = [OperatorSetIdProto(domain=d, version=v) for d, v in opset.items()]
        try:
            if schema.has_type_and_shape_inference_function:
                found = shape_inference.infer_node_outputs(schema, alone, types, tensors, opset_imports=imports)
            else:
                found = _infer_in_model(alone, types, tensors, imports) if self._bodies else {}
        except Exception:  # InferenceError, or a C++ exception without a type of its own
            return []
        return [known_type(found[f"o{k}"]) if f"o{k}" in found else None for k in range(len(node.output))]


def _with_symbols(known: Known, names: dict[str, str], *, number: bool = False) -> Known:
    """`known` with its symbols replaced by `names`; with `number`, new ones get the next number."""
    if not isinstance(known, TensorType) or known.shape is None:
        return known
    shape = known.shape
    for d in shape:
        if isinstance(d, str):
            break
    else:
        return known
    if number:
        for d in shape:
            if isinstance(d, str) and d not in names:
                names[d] = f"#{len(names)}"
    return TensorType(known.elem_type, tuple(names.get(d, d) if isinstance(d, str) else d for d in shape))


def _proto(known: Known) -> TypeProto:
    if isinstance(known, TensorType):
        return to_proto(known)
    proto = TypeProto()
    proto.ParseFromString(known or b"")
    return proto


def _infer_in_model(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    tensors: Mapping[str, TensorProto],
    imports: Sequence[OperatorSetIdProto],
) -> dict[str, TypeProto]:
    """For operators that ONNX defines by a function body and without inference of their own."""
    inputs = [ValueInfoProto(name=n, type=t) for n, t in types.items() if n not in tensors]
    outputs = [ValueInfoProto(name=n) for n in node.output if n]
    constants: list[TensorProto] = []
    for name, tensor in tensors.items():
        tensor.name = name
        constants.append(tensor)
    model = helper.make_model(helper.make_graph([node], "one", inputs, outputs, constants), opset_imports=list(imports))
    symbols = {d.dim_param for t in types.values() for d in t.tensor_type.shape.dim}
    found = {v.name: v.type for v in shape_inference.infer_shapes(model).graph.output}
    for proto in found.values():
        for dim in proto.tensor_type.shape.dim if proto.HasField("tensor_type") else ():
            if dim.dim_param and dim.dim_param not in symbols:  # a name that the inference made up
                dim.Clear()
    return found
