"""Types of all tensors of one scope, in one walk over its nodes.

For each node, the first source that knows an output wins, the others fill the dims it leaves open:

1. the known value of a small tensor (`ops.evaluation`), so that shape arithmetic resolves;
2. the body of an If, Loop, Scan or model-local function, walked with the types that go in (`ops.bodies`);
3. our own rules (`ops.shape_rules`): operators without ONNX schema, and symbols that ONNX's inference drops;
4. ONNX's inference for the one node (`ops.schema_inference`);
5. the declared type (value_info).

Only bodies are entered recursively, so the depth is that of the nesting in the file, not the length of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import FunctionProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from onnx_sublinear.errors import GraphError, printable
from onnx_sublinear.graph import domain_of, node_label
from onnx_sublinear.ops import shape_rules
from onnx_sublinear.ops.bodies import CONTROL_FLOW, MAX_DEPTH, function_outputs
from onnx_sublinear.ops.evaluation import evaluate
from onnx_sublinear.ops.schema_inference import SchemaInference, schema_of
from onnx_sublinear.ops.tensor_types import TensorType, bind, type_name
from onnx_sublinear.ops.type_merging import Known, as_tensor, fill, fill_as_ort, known_type
from onnx_sublinear.ops.values import Value, of_tensor

__all__ = ["Scope", "World", "declared_types", "type_of_initializer"]

_EVALUATED_DOMAINS = ("", "com.microsoft")
# What our rules raise on a node that breaks its operator's specification: reporting it is the checker's job.
_INVALID_NODE = (IndexError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError)


_PROPAGATED = frozenset(("Shape", "Size", "Gather", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div"))


@dataclass
class World:
    """What all scopes of one model share.

    Attributes:
        functions: model-local functions by (domain, name, overload).
        dims: values of symbols; they replace the symbol wherever a type is declared.
        runtime: see only what ORT sees when it loads the file (`sizes.runtime_types`).
        propagates: the runtime also works out the numbers that come from static shapes, as stock builds of late do
            (core/graph/data_propagation).
        private_dims: give every unknown dim of a node output a symbol of its own.
        schemas: ONNX's inference, with its cache.
        calls: results of function calls, by signature.
    """

    functions: Mapping[tuple[str, str, str], FunctionProto]
    dims: Mapping[str, int]
    runtime: bool = False
    propagates: bool = False
    private_dims: bool = False
    schemas: SchemaInference = field(init=False)
    calls: dict[tuple[object, ...], tuple[list[Known], list[Value | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.schemas = SchemaInference(bodies=not self.runtime)

    def evaluates(self, op_type: str) -> bool:
        """Whether the numbers that such a node makes are worked out."""
        return not self.runtime or op_type == "Constant" or (self.propagates and op_type in _PROPAGATED)


def declared_types(infos: Iterable[ValueInfoProto], dims: Mapping[str, int]) -> dict[str, Known]:
    """What value_info says, with the symbols of `dims` replaced."""
    found: dict[str, Known] = {}
    for info in infos:
        known = known_type(info.type)
        if known is not None:
            found[info.name] = bind(known, dims) if isinstance(known, TensorType) else known
    return found


def type_of_initializer(tensor: TensorProto) -> TensorType:
    """Type of an initializer; its data is not touched."""
    return TensorType(tensor.data_type, tuple(d if d >= 0 else None for d in tensor.dims))


class Scope:
    """The tensors of one graph or function body.

    Attributes:
        world: what all scopes share.
        opset: domain -> version.
        declared: name -> declared type.
        outer: the scope around a subgraph.
        depth: of nesting.
        types: name -> type; None hides an outer tensor of the same name.
        values: name -> small known value; None hides an outer one.
        makers: name -> the node of this scope that makes it.
    """

    def __init__(
        self,
        world: World,
        opset: Mapping[str, int],
        declared: Mapping[str, Known],
        outer: Scope | None = None,
        depth: int = 0,
    ) -> None:
        self.world = world
        self.opset = opset
        self.declared = declared
        self.outer = outer
        self.depth = depth
        self.types: dict[str, Known] = {}
        self.values: dict[str, Value | None] = {}
        self.makers: dict[str, NodeProto] = {}

    def type_of(self, name: str) -> Known:
        """The type of a tensor of this scope, or of the nearest outer scope that defines it."""
        scope = self._scope_of(name)
        return scope.types[name] if scope else None

    def value_of(self, name: str) -> Value | None:
        """The known value of a tensor, looked up like its type."""
        scope = self._scope_of(name)
        return scope.values.get(name) if scope else None

    def _scope_of(self, name: str) -> Scope | None:
        scope: Scope | None = self
        while scope is not None and name not in scope.types:
            scope = scope.outer
        return scope

    def define(self, name: str, known: Known, value: Value | None = None) -> None:
        """Enter a tensor that no node of this scope makes."""
        self.types[name] = known
        self.values[name] = value

    def define_initializers(self, graph: GraphProto) -> None:
        """Enter the initializers of `graph`, with the values of the small ones."""
        for tensor in graph.initializer:
            self.define(tensor.name, type_of_initializer(tensor), of_tensor(tensor))
        for sparse in graph.sparse_initializer:  # the runtime makes it dense when it loads the file
            self.define(sparse.values.name, TensorType(sparse.values.data_type, tuple(sparse.dims)))

    def declare(self, infos: Iterable[ValueInfoProto]) -> dict[str, Known]:
        """What `infos` say, symbols replaced by the user's values."""
        return declared_types(infos, self.world.dims)

    def body(self, graph: GraphProto) -> Scope:
        """A scope for a subgraph of this one, with its initializers entered."""
        declared = self.declare(graph.value_info) | self.declare(graph.output)
        scope = Scope(self.world, self.opset, declared, outer=self, depth=self.depth + 1)
        scope.define_initializers(graph)
        return scope

    def function_body(self, function: FunctionProto) -> Scope:
        """A scope for a function body: nothing from outside is visible, symbols of its value_info mean nothing."""
        opset = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import}
        return Scope(self.world, opset, {}, depth=self.depth + 1)

    def run(self, nodes: Iterable[NodeProto]) -> None:
        """Infer the outputs of `nodes`, which come in topological order."""
        for node in nodes:
            known = [self.type_of(n) if n else None for n in node.input]
            values = [self.value_of(n) if n else None for n in node.input]
            inferred, results = self._infer(node, known, values)
            for slot, name in enumerate(node.output):
                if name:
                    merged = self._merge(node, name, inferred[slot] if slot < len(inferred) else None)
                    if self.world.runtime and isinstance(merged, bytes):
                        merged = _without_element_shape(merged)
                    self.types[name] = _with_private_dims(name, merged) if self.world.private_dims else merged
                    self.values[name] = results[slot] if slot < len(results) else None
                    self.makers[name] = node

    def _infer(
        self, node: NodeProto, known: list[Known], values: list[Value | None]
    ) -> tuple[list[Known], list[Value | None]]:
        domain = domain_of(node)
        function = self.world.functions.get((domain, node.op_type, node.overload)) if self.world.functions else None
        body = CONTROL_FLOW.get(node.op_type) if domain == "" else None
        if function is not None or body is not None:
            if self.depth >= MAX_DEPTH:
                return [], []
            if function is not None:
                return function_outputs(self, node, function, known, values)
            try:
                return (body(self, node, known, values) if body else []), []
            except _INVALID_NODE:
                return [], []
        types = [as_tensor(k) for k in known]
        results: list[Value | None] = []
        if domain in _EVALUATED_DOMAINS and self.world.evaluates(node.op_type):
            results = evaluate(node, types, values)
            if self.world.runtime and not all(r is not None and r.is_known for r in results):
                results = []  # the runtime propagates numbers, no symbols
            if len(results) == len(node.output) and all(results):
                return [TensorType(r.elem_type, r.shape) for r in results if r is not None], results
        return self._by_rule_and_schema(node, domain, known, types, values), results

    def _by_rule_and_schema(
        self,
        node: NodeProto,
        domain: str,
        known: list[Known],
        types: list[TensorType | None],
        values: list[Value | None],
    ) -> list[Known]:
        schema = schema_of(node.op_type, domain, self.opset.get(domain))
        rule = shape_rules.rule_for(node.op_type, domain, has_schema=schema is not None, runtime=self.world.runtime)
        ours: list[Known] = []
        if rule is not None:
            with contextlib.suppress(*_INVALID_NODE):
                ours.extend(rule(shape_rules.Call(node, types, values, self.opset.get("", 1), self._maker_input)))
        if schema is None or any(a.HasField("g") or a.graphs for a in node.attribute) or _complete(ours, node):
            return ours
        theirs = self.world.schemas.outputs(node, schema, self.opset, known, values)
        count = max(len(ours), len(theirs))
        return [fill(*pair) for pair in zip(_padded(ours, count), _padded(theirs, count), strict=True)]

    def _maker_input(self, name: str, op_types: tuple[str, ...], slot: int) -> TensorType | None:
        """The type of input `slot` of the node of this scope that makes `name`, if it is one of `op_types`."""
        maker = self.makers.get(name)
        if maker is None or maker.op_type not in op_types or slot >= len(maker.input):
            return None
        return as_tensor(self.type_of(maker.input[slot]))

    def _merge(self, node: NodeProto, name: str, found: Known) -> Known:
        """Inference first, then the declared type; their element types must agree."""
        declared = self.declared.get(name)
        if declared is None or found is None:
            return declared if found is None else found
        said, made = as_tensor(declared), as_tensor(found)
        if isinstance(found, TensorType) and not found.elem_type and isinstance(declared, bytes):
            return declared
        opaque = isinstance(found, bytes) != isinstance(declared, bytes)
        clash = said and made and said.elem_type and made.elem_type and said.elem_type != made.elem_type
        if said and made and (opaque or clash):
            raise GraphError(
                f"tensor '{printable(name)}' is declared as {type_name(said.elem_type)}, but {node_label(node)} "
                f"makes {type_name(made.elem_type)}",
                "correct or delete its value_info",
            )
        return fill_as_ort(found, declared) if self.world.runtime else fill(found, declared)


def _complete(types: Sequence[Known], node: NodeProto) -> bool:
    return len(types) >= len(node.output) and all(
        isinstance(t, TensorType) and t.elem_type and t.shape and None not in t.shape for t in types
    )


def _without_element_shape(known: bytes) -> bytes:
    """A type as the runtime keeps it: of a sequence only the element type (found by loading, ORT 1.19 and 1.31)."""
    proto = TypeProto()
    proto.ParseFromString(known)
    if proto.HasField("sequence_type"):
        proto.sequence_type.elem_type.tensor_type.ClearField("shape")
    return bytes(proto.SerializeToString())


def _with_private_dims(name: str, known: Known) -> Known:
    """`known` with a symbol of its own for each unknown dim."""
    if not isinstance(known, TensorType) or known.shape is None or None not in known.shape:
        return known
    return TensorType(known.elem_type, tuple(f"{name}:{i}" if d is None else d for i, d in enumerate(known.shape)))


def _padded(types: Sequence[Known], count: int) -> list[Known]:
    return [*types, *[None] * (count - len(types))]
