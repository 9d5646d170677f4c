"""From a group of nodes and the places of its operands to a loop nest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torchair.codegen import loops as ir
from torchair.codegen.sizes import Element, Int, register_type
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Shape
from torchair.operators.core import TYPES, Op, loops_of
from torchair.operators.loops import (
    Lowered,
    LowerOp,
    Update,
    as_stored,
    broadcast_index,
    constant,
    joined,
)

Space = tuple[int | None, ...]
"""For each dim of a value the axis of the nest it runs along, None where it has one element."""


@dataclass(frozen=True)
class Operand:
    """Where a value lives: the word with its address, its type, dims and strides."""

    word: int
    dtype: Element
    shape: tuple[Int, ...]
    strides: tuple[Int, ...]


@dataclass
class Group:
    """Nodes that become one loop nest over the dims of `domain`.

    `spaces` says how the dims of a value run along the axes; a value without a space is computed
    wherever it is read, and cannot be stored.
    """

    nodes: list[Node]
    domain: Value
    reduced: frozenset[int] = frozenset()
    spaces: dict[Value, Space] = field(default_factory=dict)
    given: list[Value] = field(default_factory=list)  # made by something else, point by point
    bias: tuple[Value, int] | None = None  # added to what is given, along this dim

    @property
    def shape(self) -> Shape:
        """Dims of the nest, symbols included."""
        assert self.domain.shape is not None
        return self.domain.shape


def single(node: Node) -> Group:
    """A group of one node."""
    loops = loops_of(node.type)
    first = node.outputs[0]
    if loops.kind in ("map", "move"):
        return Group([node], first, spaces={v: whole(v) for v in node.outputs})
    domain = node.value_on(loops.domain)
    assert domain.shape is not None
    if loops.kind == "update":
        return Group([node], domain)
    assert loops.reduces is not None
    rank = len(domain.shape)
    reduced = frozenset(d % rank for d in loops.reduces(Op(node))) if rank else frozenset()
    group = Group([node], domain, reduced)
    group.spaces = {v: reduced_space(v, domain, reduced) for v in node.outputs}
    return group


def whole(value: Value) -> Space:
    """The space of a value that has the dims of the nest itself."""
    return tuple(None if d == 1 else i for i, d in enumerate(value.shape or ()))


def reduced_space(value: Value, domain: Value, reduced: frozenset[int]) -> Space:
    """The space of a result of a reduction: whole, with ones for the reduced dims, or without."""
    shape, dims = value.shape or (), domain.shape or ()
    if len(shape) == len(dims):
        return whole(value)
    kept = [d for d in range(len(dims)) if d not in reduced]
    if len(shape) == len(kept):
        return tuple(None if n == 1 else d for n, d in zip(shape, kept, strict=True))
    normalised = sorted(reduced)  # a parameter: its dims are the last ones
    return tuple(normalised[len(normalised) - len(shape) :])


def build_nest(
    group: Group,
    operands: Mapping[Value, Operand],
    outputs: Sequence[Value],
    fact: Callable[[Value], Fact],
    fault: Callable[[], int] | None = None,
    rounds: bool = False,
) -> ir.Nest:
    """The nest that computes the group and stores these of its values. `fault` gives the word
    with the address where a kernel notes down that a test failed. What is stored is read as it is
    in memory, in the nest too: other kernels, and the backward, read it from there. If it `rounds`,
    so is every value, so that no bit depends on what is fused."""
    build = _NestBuilder(group, operands, None if rounds else frozenset(outputs), fact, fault)
    for node in group.nodes:
        build.node(node)
    return ir.Nest(build.axes, tuple(build.store(v) for v in outputs), group.reduced)


class _NestBuilder:
    def __init__(
        self,
        group: Group,
        operands: Mapping[Value, Operand],
        stored: frozenset[Value] | None,
        fact: Callable[[Value], Fact],
        fault: Callable[[], int] | None,
    ) -> None:
        """`stored` are values that are read as they are in memory: all, if it is None."""
        self.group, self.operands, self.stored = group, operands, stored
        self.fact, self.fault = fact, fault
        self.axes: tuple[Int, ...] = tuple(fact(group.domain).shape or ())  # type: ignore[arg-type]
        self.domain = tuple(ir.at_axis(k) for k in range(len(self.axes)))
        self.made: dict[Value, Lowered | Update] = {
            v: self._as_read(v, self._given(k, v)) for k, v in enumerate(group.given)
        }

    def node(self, node: Node) -> None:
        """Put the results of a node into the table."""
        view = LowerOp(node, self.fact, self.tensor, self.domain, self.axes, self.fault)
        result = loops_of(node.type).rule(view)
        results = [result] if isinstance(result, (Lowered, Update)) else list(result)
        for value, tensor in zip(node.outputs, results, strict=False):
            if isinstance(tensor, Lowered):
                tensor = self._as_read(value, tensor)
                if value in self.group.spaces:
                    tensor.at(self._place(value))  # known from now on: readers do not ask far back
            if tensor is not None:
                self.made[value] = tensor

    def _as_read(self, value: Value, made: Lowered) -> Lowered:
        return as_stored(made) if self.stored is None or value in self.stored else made

    def tensor(self, value: Value) -> Lowered:
        """A value as an operand."""
        known = self.made.get(value)
        if isinstance(known, Lowered):
            return known
        if value.node.type == "Const" and value.shape == ():
            return constant(value.node.attr("value"), TYPES[value.dtype])
        self.made[value] = made = self._outside(self.operands[value])
        return made

    def _outside(self, where: Operand) -> Lowered:
        def element(place: tuple[ir.Index, ...]) -> ir.Expr:
            positions, strides = joined(place, where.strides)
            return ir.load(ir.access(where.word, where.dtype, strides, positions, len(self.axes)))

        return Lowered(where.shape, where.dtype, element)

    def _given(self, k: int, value: Value) -> Lowered:
        dtype = TYPES[value.dtype]
        wide = register_type(dtype)
        shape: tuple[Int, ...] = tuple(self.fact(value).shape or ())  # type: ignore[arg-type]
        made = Lowered(shape, dtype, lambda _: ir.Expr("given", wide, data=k))
        if self.group.bias is None:
            return made
        bias, dim = self.group.bias
        added = self._outside(self.operands[bias])

        def element(place: tuple[ir.Index, ...]) -> ir.Expr:
            along = (place[dim],) if added.rank == 1 else place[len(place) - added.rank :]
            there = broadcast_index(along, added.shape)
            return ir.op("add", made.at(place), ir.cast(added.at(there), wide))

        return Lowered(shape, dtype, element)

    def store(self, value: Value) -> ir.Store:
        """Write a value to where it lives."""
        made, where = self.made[value], self.operands[value]
        if isinstance(made, Update):
            return self._update(made, where)
        if self.group.spaces.get(value) is None and value in self.group.given:
            index = self._row_and_column()
        else:
            index = self._place(value)
        place = ir.access(where.word, where.dtype, where.strides, index, len(self.axes))
        return ir.store(place, made.at(index))

    def _place(self, value: Value) -> tuple[ir.Index, ...]:
        """Where an element of a value is, along the axes of the nest."""
        return tuple(ir.Index() if a is None else ir.at_axis(a) for a in self.group.spaces[value])

    def _row_and_column(self) -> tuple[ir.Index, ...]:
        """The place in a matrix whose rows run along all axes of the nest but the last."""
        row = ir.Index()
        for position, size in zip(self.domain[:-1], self.axes[:-1], strict=True):
            row = row * size + position
        return row, self.domain[-1]

    def _update(self, made: Update, where: Operand) -> ir.Store:
        index = self.domain
        mask = made.mask(index) if made.mask is not None else None
        positions, strides = joined(made.place(index), where.strides)
        place = ir.access(where.word, where.dtype, strides, positions, len(self.axes), mask)
        return ir.store(place, made.value.at(index))
