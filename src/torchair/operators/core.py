"""What an operator means: one `Row` per operator type, and how rules and kernels read a node.

A row holds the shape rule (works on integers and symbols alike), the torch kernel, the traits that
passes ask for, and how generated code computes the operator. Families fill the table; `row_of`
looks a type up.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from torchair.codegen.sizes import FLOATS, Element
from torchair.codegen.target import AnchorKind
from torchair.errors import MissingHostValue
from torchair.extensions import load
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact, Graph, Node, Value
from torchair.ge.prototypes import UserKernel, is_users, user_kernel
from torchair.ge.shapes import Shape, broadcast

SIDE_EFFECTS = ("PrintV2", "AttentionToFFN", "FFNToAttention")
"""Operators that a pass puts in program order, and ties to the end of the graph."""
TYPES: dict[int, Element] = {
    DataType.DT_FLOAT: "f32", DataType.DT_DOUBLE: "f64", DataType.DT_BF16: "bf16",
    DataType.DT_FLOAT16: "f16", DataType.DT_BOOL: "bool", DataType.DT_UINT8: "u8",
    DataType.DT_INT8: "i8", DataType.DT_INT16: "i16", DataType.DT_INT32: "i32",
    DataType.DT_INT64: "i64",
}  # fmt: skip
"""Names of element types in generated code; what is not here has no native code."""

ANY = frozenset(TYPES.values())
NUMBERS = ANY - {"bool"}
INTEGERS = NUMBERS - FLOATS
SHORT = FLOATS - {"f64"}  # computed with in float32


class Trait(enum.Flag):
    """What passes may assume of an operator."""

    NONE = 0
    ELEMENTWISE = enum.auto()  # output element i depends on input elements i (after broadcast)
    VIEW = enum.auto()  # output may alias the first input, no arithmetic
    REDUCTION = enum.auto()
    CONTRACTION = enum.auto()  # matrix products, convolutions
    SIDE_EFFECT = enum.auto()  # must run, in order, even if nothing reads it
    COMMUNICATION = enum.auto()
    RANDOM = enum.auto()  # never folded, never merged
    DRAWS = enum.auto()  # from torch's generator: all of them run, in program order
    COMMUTATIVE = enum.auto()
    CONSTANT = enum.auto()  # value is part of the graph
    WRITES_FIRST = enum.auto()  # output 0 is input 0 updated: it may overwrite input 0
    KEEPS_FORMAT = enum.auto()  # torch's result has channels last where one of its inputs has
    CHANNELS_LAST = enum.auto()  # the result has channels last


class Op:
    """A node as its rule or kernel sees it: facts of inputs, attributes, host contents."""

    __slots__ = ("_fact", "node")

    def __init__(self, node: Node, fact: Callable[[Value], Fact] = lambda v: v.fact) -> None:
        self.node = node
        self._fact = fact

    def __getitem__(self, port: str) -> Fact:
        """Fact of a fed input."""
        return self._fact(self.node.value_on(port))

    def get(self, port: str) -> Fact | None:
        """Fact of an input, None when it is unfed."""
        value = self.node.inputs.get(port)
        return self._fact(value) if isinstance(value, Value) else None

    def list(self, port: str) -> list[Fact]:
        """Facts of a variable input."""
        return [self._fact(v) for v in self.node.values_on(port)]

    def fed(self, port: str) -> bool:
        """Whether an input is connected."""
        return self.node.inputs.get(port) is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """Attribute value, the prototype's default when it was not set."""
        return self.node.attr(name, default)

    def shape(self, port: str) -> Shape:
        """Dims of an input; MissingHostValue when they are not known yet."""
        shape = self[port].shape
        if shape is None:
            raise MissingHostValue(f"dims of input {port!r} of {self.node} are not known")
        return shape

    def content(self, port: str) -> Any:
        """Known integers of a host input: a scalar or a tuple; MissingHostValue when unknown."""
        found = self[port].content
        source = self.node.value_on(port).node
        if found is None and source.type == "Const":  # facts hold short ones only
            tensor = source.attr("value")
            found = tuple(tensor.tolist()) if tensor.dim() else tensor.item()
        if found is None:
            raise MissingHostValue(f"content of input {port!r} of {self.node} is not known")
        return found

    def ints(self, port: str) -> tuple[Any, ...]:
        """Content of a host input as a tuple, a scalar counting as one element."""
        found = self.content(port)
        return found if isinstance(found, tuple) else (found,)

    def int(self, port: str) -> Any:
        """Content of a host input as one number."""
        return self.ints(port)[0]

    def dtype(self, port: str) -> builtins.int:
        """GE type of an input."""
        return self[port].dtype

    @property
    def output(self) -> Fact:
        """What the graph declares of the first output."""
        return self.node.outputs[0].fact


@dataclass(frozen=True)
class DimOrder:
    """A layout apart from sizes: `dims` from the outermost one to the innermost, all of them as
    they come where there are none; `dense` is without gaps."""

    dims: tuple[int, ...] = ()
    dense: bool = True

    def strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Strides without gaps, in this order."""
        strides, step = [0] * len(shape), 1
        for d in reversed(self.dims or range(len(shape))):
            strides[d] = step
            step *= max(1, shape[d])
        return tuple(strides)

    def arranged(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor in this order: itself, or a copy."""
        if self._fits(t):
            return t
        strides = self.strides(t.shape)
        return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)

    @cached_property
    def _row_major(self) -> bool:
        return self.dims == tuple(range(len(self.dims)))

    def _fits(self, t: torch.Tensor) -> bool:
        if self._row_major and t.is_contiguous():
            return True
        if self.dense and not self.dims:
            return False
        own = zip(t.stride(), self.strides(t.shape), t.shape, strict=True)
        if self.dense:
            return all(s == wanted or n == 1 for s, wanted, n in own)
        steps = [t.stride(d) for d in self.dims if t.shape[d] != 1 and t.stride(d)]
        return steps == sorted(steps, reverse=True)


def all_contiguous(node: Node) -> list[DimOrder | None]:
    """The layouts of a kernel that wants all its inputs contiguous."""
    return [DimOrder()] * len(node.values())


ShapeRule = Callable[[Op], "Fact | Sequence[Fact]"]
TorchKernel = Callable[..., Any]
LoopKind = Literal["map", "move", "reduce", "update"]


@dataclass(frozen=True)
class Lowering:
    """How generated code computes an operator: a rule over a `LowerOp`, and what fusion must know.

    Kinds: `map` - every operand is read at the result's own (broadcast) index; `move` - operands
    are read at other places (slices, concatenation, gathers); `reduce` - over the dims
    `reduces(op)` of the operand `domain`; what is computed besides is a map over its dims;
    `update` - writes parts of its first input, the nest runs over the dims of operand `domain`.
    `declines(op)` gives the reason why a node of this type cannot be lowered, or None. What a
    reduction that `ends` its kernel gives is read from memory: all threads of a device sum it up.
    """

    rule: Callable[[Any], Any]
    kind: LoopKind = "map"
    domain: str = ""
    reduces: Callable[[Op], tuple[int, ...]] | None = None
    declines: Callable[[Op], str | None] | None = None
    ends: bool = False


@dataclass(frozen=True)
class Row:
    """The meaning of one operator type.

    `kernel(op)` returns a function of the tensors on all ports not named in `host`, in port order
    (None for an unfed one, a list for a variable port). Contents of `host` ports are read when the
    function is made. With `out`, that function takes `out=` (one tensor, or a tuple). It takes any
    strides, unless `layouts` says which each of its inputs should have: it then copies the others.
    Native code are `loops`, or the kernels of a generator of its own (`anchor`), for nodes whose
    first operand is of one of `types`.
    """

    type: str
    rule: ShapeRule
    kernel: Callable[[Op], TorchKernel]
    traits: Trait = Trait.NONE
    host: frozenset[str] = field(default_factory=frozenset)
    out: bool = False
    also_host: Callable[[Node], list[Value]] | None = None  # values steering shapes by other ways
    layouts: Callable[[Node], Sequence[DimOrder | None]] | None = None  # in the order of its values
    loops: Lowering | None = None
    anchor: AnchorKind | None = None
    types: frozenset[Element] = ANY

    def has(self, trait: Trait) -> bool:
        return bool(self.traits.value & trait.value)  # plain integers: this is asked very often

    @property
    def is_native(self) -> bool:
        """Whether there is native code for some nodes of this type."""
        return self.loops is not None or self.anchor is not None

    def unfit(self, op: Op) -> str | None:
        """Why the loops cannot compute a node of this type, None if they can."""
        assert self.loops is not None, f"{self.type} has no loops"
        first = next((TYPES.get(v.dtype, "other") for v in op.node.values()), None)
        if first is not None and first not in self.types:
            return f"operands of the type {first}"
        return self.loops.declines(op) if self.loops.declines is not None else None


_rows: dict[str, Row] = {}
_extension_rows: dict[str, Row] = {}  # for nodes that the rows of these types do not cover
_of_user: list[Callable[[UserKernel], Row]] = []  # the one that makes rows of users


def add_row(
    op_type: str,
    rule: ShapeRule,
    kernel: Callable[[Op], TorchKernel],
    traits: Trait = Trait.NONE,
    *,
    host: Iterable[str] = (),
    instead: bool = False,
    extension: bool = False,
    **more: Any,
) -> None:
    """Enter one operator into the table, `instead` of the row that it has, or as an `extension` for
    nodes that this row does not cover; `more` are fields of its `Row`."""
    if op_type in _rows and not instead and not extension:
        raise ValueError(f"{op_type} has a row already: give another type, or instead=True")
    table = _extension_rows if extension else _rows
    table[op_type] = Row(op_type, rule, kernel, traits, frozenset(host), **more)


def native(
    op_type: str,
    rule: ShapeRule,
    kernel: Callable[[Op], TorchKernel],
    traits: Trait = Trait.NONE,
    *,
    kind: LoopKind = "map",
    domain: str = "",
    reduces: Callable[[Op], tuple[int, ...]] | None = None,
    declines: Callable[[Op], str | None] | None = None,
    ends: bool = False,
    **more: Any,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter an operator whose loops are the function below: what `add_row` and `Lowering` take."""

    def enter(loops: Callable[[Any], Any]) -> Callable[[Any], Any]:
        lowering = Lowering(loops, kind, domain, reduces, declines, ends)
        add_row(op_type, rule, kernel, traits, loops=lowering, **more)
        return loops

    return enter


def _values(op: Op, arguments: Sequence[Any]) -> list[Any]:
    return [_value(op, a) for a in arguments]


def _value(op: Op, argument: Any) -> Any:
    """An argument of a kernel: an attribute by name, a function of the operator, or a value."""
    if isinstance(argument, str):
        return op.attr(argument)
    return argument(op) if callable(argument) else argument


def call(function: TorchKernel, *arguments: Any) -> Callable[[Op], TorchKernel]:
    """A kernel that calls a function with the tensors, then with arguments: a str is the attribute
    of that name, a function is asked what it finds in the node."""

    def make(op: Op) -> TorchKernel:
        values = _values(op, arguments)
        return lambda *tensors, **out: function(*tensors, *values, **out)

    return make if arguments else lambda _op: function


def update(function: Callable[..., Any], *arguments: Any) -> Callable[[Op], TorchKernel]:
    """The same of a function that changes its first tensor."""
    made = call(function, *arguments)
    return lambda op: writes_first(made(op))


def backward(
    packet: Any, *arguments: Any, order: Sequence[int] = (0, 1), out: str = "grad_input"
) -> Callable[[Op], TorchKernel]:
    """A kernel that calls a gradient of torch: the tensors of these numbers, then arguments as for
    `call`. `out` is the overload that writes to `grad_input`, an argument of that name."""
    into = getattr(packet, out)

    def make(op: Op) -> TorchKernel:
        values = _values(op, arguments)

        def run(*given: Any, out: Any = None) -> Any:
            tensors = [given[k] for k in order]
            if out is None:
                return packet.default(*tensors, *values)
            return into(*tensors, *values, **{into._schema.arguments[-1].name: out})

        return run

    return make


def ints(port: str) -> Callable[[Op], tuple[Any, ...]]:
    """An argument for `call`: the content of a host input."""
    return lambda op: op.ints(port)


def torch_type(attr: str) -> Callable[[Op], torch.dtype]:
    """An argument for `call`: the type that an attribute names."""
    return lambda op: ge_to_torch(op.attr(attr))


def writes_first(change: Callable[..., Any]) -> TorchKernel:
    """A kernel from one that updates its first tensor: without `out` a copy is updated, `out` being
    the first tensor itself or its memory means in place, any other `out` gets a copy first."""

    def run(x: torch.Tensor, *rest: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = x.clone(memory_format=torch.contiguous_format)
        elif out is not x and not _same_place(out, x):
            out.copy_(x)
        change(out, *rest)
        return out

    return run


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def row_of(op_type: str) -> Row | None:
    """The row of a type, None when neither the operator table nor a user gives it a meaning."""
    row = _declared_row(op_type)
    if row is not None:
        return row
    kernel = user_kernel(op_type)
    return None if kernel is None else _of_user[0](kernel)


def _declared_row(op_type: str) -> Row | None:
    """The row that the table has; a type of GE that it has none for may be an extension's."""
    row = _rows.get(op_type)
    if row is None and op_type != "NetOutput" and not is_users(op_type):
        load("operators")
        row = _rows.get(op_type)
    return row


def extension_row(op_type: str) -> Row:
    """The row for nodes that the row of their type does not cover, which an extension has."""
    load("operators")
    return _extension_rows[op_type]


def is_declared(op_type: str) -> bool:
    """Whether the table has a row of this type: its traits say what it does."""
    return _declared_row(op_type) is not None


def operands_of(node: Node) -> list[Value]:
    """Inputs that are data, as opposed to host numbers that steer the operator."""
    row = row_of(node.type)
    host = row.host if row is not None else frozenset()
    return [v for port, _, v in node.slots() if v is not None and port not in host]


def has_trait(node: Node, traits: Trait) -> bool:
    """Whether a node's operator is known, and has one of these traits."""
    row = row_of(node.type)
    return row is not None and row.has(traits)


def has_loops(op_type: str) -> bool:
    """Whether generated loops can compute an operator."""
    row = row_of(op_type)
    return row is not None and row.loops is not None


def loops_of(op_type: str) -> Lowering:
    """How generated code computes an operator that has loops."""
    row = row_of(op_type)
    assert row is not None and row.loops is not None, f"{op_type} has no loops"
    return row.loops


def rows_of_users(make: Callable[[UserKernel], Row]) -> Callable[[UserKernel], Row]:
    """Decorates what makes the row of an operator that a user gave a kernel."""
    _of_user.append(make)
    return make


def steering_values(node: Node) -> list[Value]:
    """Inputs whose content decides dims or arguments, so that it must be known when planning."""
    row = row_of(node.type)
    if row is None:
        return []
    values = [v for port, _, v in node.slots() if port in row.host and v is not None]
    return values + (row.also_host(node) if row.also_host is not None else [])


def steering_nodes(graph: Graph) -> set[Node]:
    """Nodes whose numbers decide dims or arguments somewhere."""
    found: set[Node] = set()
    stack = [v.node for n in graph.nodes for v in steering_values(n)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.type != "Shape":  # which asks for dims, not for numbers
                stack += [v.node for v in node.values()]
    return found


def loaded_rows() -> dict[str, Row]:
    """The table as far as it is loaded: graphs that exist have no other operators."""
    return _rows


def rows() -> dict[str, Row]:
    """The whole table, with the rows of extensions."""
    load("operators")
    return dict(_rows)


def infer(node: Node, fact: Callable[[Value], Fact] | None = None) -> list[Fact]:
    """Facts of a node's outputs; unknown parts are left open, a wrong graph raises."""
    row = row_of(node.type)
    if row is None:
        return [Fact() for _ in node.outputs]
    op = Op(node) if fact is None else Op(node, fact)
    try:
        result = row.rule(op)
    except MissingHostValue:
        return [Fact(o.dtype) for o in node.outputs]
    facts = [result] if isinstance(result, Fact) else list(result)
    if len(facts) < len(node.outputs):
        facts += [Fact(o.dtype, o.shape) for o in node.outputs[len(facts) :]]
    return facts


# ---- rules shared by many families ----


def same_as(port: str) -> ShapeRule:
    """Result has type and dims of one input."""
    return lambda op: Fact(op.dtype(port), op.shape(port))


def like(*ports: str) -> Callable[[Op], list[Fact]]:
    """Results have types and dims of these inputs."""
    return lambda op: [Fact(op.dtype(p), op.shape(p)) for p in ports]


def of_type(attr: str, port: str = "x") -> Callable[[Op], Fact]:
    """Result has the type that an attribute names, and dims of one input."""
    return lambda op: Fact(op.attr(attr), op.shape(port))


def copy_of(port: str) -> ShapeRule:
    """Result is one input unchanged, its known content included."""
    return lambda op: Fact(op.dtype(port), op.shape(port), op[port].content)


def like_first(op: Op) -> Fact:
    """Result has type and dims of the first input."""
    first = op._fact(op.node.values()[0])
    if first.shape is None:
        raise MissingHostValue(f"dims of the first input of {op.node} are not known")
    return Fact(first.dtype, first.shape)


def broadcast_rule(op: Op) -> Fact:
    """Elementwise: dims broadcast over all inputs, type of the first."""
    facts = [op._fact(v) for v in op.node.values()]
    shapes = [f.shape for f in facts if f.shape is not None]
    if len(shapes) < len(facts):
        raise MissingHostValue(f"dims of an input of {op.node} are not known")
    return Fact(facts[0].dtype, broadcast(*shapes))


def broadcast_over(*ports: str) -> ShapeRule:
    """Dims broadcast over these inputs, type of the first."""
    return lambda op: Fact(op.dtype(ports[0]), broadcast(*(op.shape(p) for p in ports)))


def like_each(port: str) -> ShapeRule:
    """Results have types and dims of the members of a variable input."""
    return lambda op: [Fact(f.dtype, f.shape) for f in op.list(port)]


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Axes normalised to 0..rank-1, sorted; nothing given means all."""
    if axes is None:
        return tuple(range(rank))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    limit = max(rank, 1)
    for a in axes:
        if not -limit <= a < limit:
            raise ValueError(f"axis {a} is out of range for rank {rank}")
    return tuple(sorted({a % limit for a in axes}))


def reduced_shape(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """Dims after reducing over normalised axes."""
    if keep:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def known_number(op: Op, port: str) -> Any:
    """The number that a 0-d constant feeds to a port; None when something else feeds it."""
    value = op.node.inputs.get(port)
    if isinstance(value, Value) and value.node.type == "Const" and value.shape == ():
        return value.node.attr("value").item()
    return None


def scalar(op: Op, port: str) -> Callable[[Any], Any]:
    """A function from the tensor on a port to its number, read once when it is constant."""
    known = known_number(op, port)
    return (lambda t: t.item()) if known is None else (lambda _t: known)
