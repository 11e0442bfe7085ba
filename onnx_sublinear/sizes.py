"""Type, shape and size in bytes of every tensor of the main graph.

Stages: take what is given (graph inputs, initializers), walk the nodes once in topological order (`ops.inference`),
and, where the user gives values for symbols, walk once more with the symbols replaced. Weights are never read:
sizes come from dims and types. What stays unknown is listed, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx_sublinear.errors import UsageError, printable
from onnx_sublinear.graph import GraphIndex
from onnx_sublinear.ops.inference import Scope, World, declared_types, type_of_initializer
from onnx_sublinear.ops.tensor_types import NOT_A_TENSOR, Dim, TensorType, element_bits, tensor_bytes
from onnx_sublinear.ops.type_merging import Known
from onnx_sublinear.ops.values import of_tensor

__all__ = [
    "Dim",
    "TensorSizes",
    "TensorType",
    "element_bits",
    "free_symbols",
    "infer_sizes",
    "runtime_types",
    "tensor_bytes",
]


_DIM_LIMIT = 1 << 63


@dataclass
class TensorSizes:
    """What is known of the tensors of the main graph.

    Attributes:
        types: every tensor (input, initializer, node output) that inference knows; symbols are kept.
        bound: the same under the user's dims: symbols replaced by values.
        dims: the user's values of symbols.
        unknown: node outputs without a size in bytes, in node order: unknown dims, and what has no size at all
            (strings, sequences, optionals).
    """

    types: dict[str, TensorType]
    bound: dict[str, TensorType]
    dims: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def bytes_of(self, name: str) -> int | None:
        """Exact bytes of the tensor under `dims`; None where unknown."""
        known = self.bound.get(name)
        return None if known is None else tensor_bytes(known)

    def with_copies(self, copies: Mapping[str, str], made: Mapping[str, TensorType] | None = None) -> TensorSizes:
        """The same with further tensors: `copies` (name -> one of the same type) and `made` (name -> static type)."""
        types, bound = ({**known, **_copied(known, copies), **(made or {})} for known in (self.types, self.bound))
        unknown = set(self.unknown)
        return TensorSizes(types, bound, self.dims, self.unknown + [c for c, of in copies.items() if of in unknown])


def _copied(known: Mapping[str, TensorType], copies: Mapping[str, str]) -> dict[str, TensorType]:
    return {copy: known[of] for copy, of in copies.items() if of in known}


def infer_sizes(index: GraphIndex, dims: Mapping[str, int] | None = None) -> TensorSizes:
    """Infer types, shapes and sizes.

    Args:
        index: the graph.
        dims: values for symbolic dims, e.g. {"batch": 32}.

    Raises:
        UsageError: `dims` names a symbol that the model does not have, or a value below 1.
        GraphError: a declared element type contradicts the operator that makes the tensor.
    """
    given = dict(dims or {})
    _check_dims(index, given)
    types = _infer(index, {}, World(index.functions, {}))
    bound = _infer(index, given, World(index.functions, given)) if given else types
    sizes = TensorSizes(types, bound, given)
    sizes.unknown = [o for node in index.nodes for o in node.output if o and sizes.bytes_of(o) is None]
    return sizes


def runtime_types(index: GraphIndex, *, propagates: bool = False, private_dims: bool = False) -> dict[str, TensorType]:
    """What onnxruntime knows of the tensors of the file as it stands, at optimization level none.

    Its planner shares buffers by these types: declared types merged with ONNX's inference, in which only constants and
    initializers have values (no shape arithmetic), and no shape for the gradient operators without inference function.
    Sources: onnxruntime/core/graph/graph.cc (InferAndVerifyTypeMatch, MergeShapeInfo),
    orttraining/core/graph/training_op_defs.cc. Compared with the types of sessions of ORT 1.31 and training 1.19: equal
    but for what newer ONNX versions infer better (1.19 does not know GreaterOrEqual, Einsum and OneHot's depth), and
    for 1.31, which also follows the numbers of static shapes through Shape, Size, Gather, Squeeze, Unsqueeze, Add, Sub,
    Mul and Div (onnxruntime/core/graph/data_propagation).

    Args:
        index: the graph.
        propagates: as current stock builds (1.31), which work out the numbers that come from static shapes.
        private_dims: give every unknown dim of a node output a symbol of its own, as if it were declared that way.
    """
    return _infer(index, {}, World(index.functions, {}, runtime=True, propagates=propagates, private_dims=private_dims))


def free_symbols(index: GraphIndex) -> list[str]:
    """The symbolic dims (dim_param) of the graph inputs, in order, each once."""
    found: dict[str, None] = {}
    for info in index.inputs.values():
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                found[dim.dim_param] = None
    return list(found)


def _check_dims(index: GraphIndex, dims: Mapping[str, int]) -> None:
    if not dims:
        return
    symbols = dict.fromkeys(free_symbols(index))
    for infos in (index.graph.value_info, index.graph.output):
        for info in infos:
            symbols.update((d.dim_param, None) for d in info.type.tensor_type.shape.dim if d.dim_param)
    for name, value in dims.items():
        if name not in symbols:
            known = ", ".join(f"'{printable(s, 40)}'" for s in list(symbols)[:20])
            hint = f"its symbolic dims: {known}" if known else "all of its dims are static"
            raise UsageError(f"the model has no symbolic dim '{printable(name)}'", hint)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"the value of dim '{printable(name)}' is {value!r}, not a whole number")
        if not 0 < value < _DIM_LIMIT:
            raise UsageError(f"the value of dim '{printable(name)}' is {value}; it must be from 1 to 2^63 - 1")


def _infer(index: GraphIndex, dims: Mapping[str, int], world: World) -> dict[str, TensorType]:
    graph = index.graph
    declared = declared_types(graph.value_info, dims) | declared_types(graph.output, dims)
    scope = Scope(world, index.opset, declared)
    scope.define_initializers(graph)
    # From IR version 4 on, an initializer that is also an input is a default that a caller may override; before, it
    # had to be listed among the inputs, and the runtime treats it as constant (graph.cc, CanOverrideInitializer).
    overridable = index.model.ir_version >= 4
    inputs = declared_types(graph.input, dims)
    for name in index.inputs:
        default = index.initializers.get(name)
        if default is None:
            scope.define(name, inputs.get(name))
        elif overridable:
            scope.define(name, inputs.get(name) or type_of_initializer(default))
        else:
            scope.define(name, type_of_initializer(default), of_tensor(default))
    scope.run(index.nodes[position] for position in index.order)
    return {name: _public(known) for name, known in scope.types.items() if known is not None}


def _public(known: Known) -> TensorType:
    return known if isinstance(known, TensorType) else NOT_A_TENSOR
