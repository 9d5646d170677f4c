"""What the rules of a `Lowering` are written with: operands, places, and how elements are read.

A rule sees its operands as functions from an index to an expression and returns its results in the
same form. Views are changes of the index, so they cost nothing. Sizes are integers or GuardedInts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchair.codegen import loops
from torchair.codegen.loops import Access, Expr, Index, Nest, Reduction, cast, const, op, size
from torchair.codegen.sizes import FLOATS, Element, GuardedInt, Int, register_type, same, value_of
from torchair.ge.graph import Fact, Node, Value
from torchair.operators.core import TYPES, Op, axes_of

IndexTuple = tuple[Index, ...]

_DIVISIONS = frozenset({"div", "floordiv", "remainder", "fmod"})


class Lowered:
    """A value inside a group: its dims, its type, and what its element at an index is."""

    def __init__(
        self, shape: Sequence[Int], dtype: Element, element: Callable[[IndexTuple], Expr]
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype  # in memory
        self._element = element
        self._known: dict[IndexTuple, Expr] = {}

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def at(self, index: Sequence[Index]) -> Expr:
        """The element at an index, of the register type; asked twice, it is the same object."""
        place = tuple(index)
        if place not in self._known:
            self._known[place] = cast(self._element(place), register_type(self.dtype))
        return self._known[place]


@dataclass
class Update:
    """Result of a rule that writes parts of its first input: `value` at an index of its own dims
    goes to `place(index)`; elsewhere the input stays. `mask(index)` false means no write."""

    value: Lowered
    place: Callable[[IndexTuple], IndexTuple]
    mask: Callable[[IndexTuple], Expr] | None = None


class LowerOp(Op):
    """A node as its rule sees it. Ports give Tensors by `tensor`; facts, attributes and host
    contents come as in the operator table (`shape`, `ints`, `attr`, `dtype` ...)."""

    __slots__ = ("_domain", "_fault", "_tensor", "extents")

    def __init__(
        self,
        node: Node,
        fact: Callable[[Value], Fact],
        tensor: Callable[[Value], Lowered],
        domain: Sequence[Index],
        extents: Sequence[Int] = (),
        fault: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(node, fact)
        self._fault = fault
        self._tensor = tensor
        self._domain = tuple(domain)
        self.extents = tuple(extents)  # how far the axes of the nest go

    def tensor(self, port: str) -> Lowered:
        """The operand on a port that is fed."""
        return self._tensor(self.node.value_on(port))

    def maybe(self, port: str) -> Lowered | None:
        """The operand on a port, None when it is unfed."""
        return self.tensor(port) if self.fed(port) else None

    def tensors(self, port: str) -> list[Lowered]:
        """The operands of a variable port."""
        return [self._tensor(v) for v in self.node.values_on(port)]

    def verify(self, test: Expr) -> Expr:
        """The same test; where it fails, the kernel notes it down for the caller to raise."""
        if self._fault is None:
            return test
        return Expr("verify", "bool", (test,), self._fault())

    def out_dtype(self, k: int = 0) -> Element:
        """Type of a result in memory; that of what nothing reads does not matter."""
        value = self.node.outputs[k]
        return TYPES[value.dtype] if value.uses else TYPES.get(value.dtype, "f32")

    def out_shape(self, k: int = 0) -> tuple[Int, ...]:
        """Dims of a result, for operators that have no operand to take them from."""
        return tuple(self._fact(self.node.outputs[k]).shape or ())  # type: ignore[arg-type]

    def reduce(self, kind: Reduction, x: Lowered, axes: Sequence[int]) -> Lowered:
        """A reduction over axes, which stay with size 1, of an operand that has the dims of the
        group's loop nest."""
        axes = axes_of(tuple(axes), x.rank)
        if not axes or not x.rank:
            return x
        shape = [1 if d in axes else n for d, n in enumerate(x.shape)]

        def element(place: IndexTuple) -> Expr:
            whole = [self._domain[d] if d in axes else p for d, p in enumerate(place)]
            return loops.reduce(kind, x.at(whole))

        return Lowered(shape, x.dtype, element)


LoweredResult = Lowered | Update | Sequence[Lowered | None]
LoopRule = Callable[[LowerOp], LoweredResult]


# ---- what many rules are made of ----


def broadcast_index(index: Sequence[Index], shape: Sequence[Int]) -> IndexTuple:
    """Where a result's index falls in an operand that is broadcast to it."""
    tail = index[len(index) - len(shape) :]
    return tuple(Index() if is_one(n) else i for i, n in zip(tail, shape, strict=True))


def broadcast_shape(*tensors: Lowered) -> tuple[Int, ...]:
    """Dims of a result over broadcast operands."""
    rank = max(t.rank for t in tensors)
    shape: list[Int] = [1] * rank
    for t in tensors:
        for d, n in enumerate(t.shape, rank - t.rank):
            if not is_one(n):
                shape[d] = n
    return tuple(shape)


def elementwise(
    fn: Callable[..., Expr], *tensors: Lowered, dtype: Element | None = None
) -> Lowered:
    """`fn` of the operands' elements, which come in the register types of the operands."""
    shape = broadcast_shape(*tensors)

    def element(place: IndexTuple) -> Expr:
        return fn(*(t.at(broadcast_index(place, t.shape)) for t in tensors))

    return Lowered(shape, dtype or tensors[0].dtype, element)


def as_stored(x: Lowered) -> Lowered:
    """The same elements, rounded to the tensor's type even if they were computed just now: what
    jumps (comparisons, integers) must not see more digits than torch does."""
    if x.dtype not in ("bf16", "f16"):
        return x
    return Lowered(x.shape, x.dtype, lambda place: loops.narrowed(x.at(place), x.dtype))


def masked(x: Expr, mask: Expr) -> Expr:
    """The same value, of which nothing is read where `mask` is false: what is loaded there counts
    as zero, what integers are divided by as one."""
    made: dict[int, Expr] = {}
    for e in loops.expressions(Nest((), (loops.Store(Access(0, x.dtype, ()), x),))):
        args = tuple(made[id(a)] for a in e.args)
        if e.kind == "load":
            made[id(e)] = replace(e, data=_under(e.data, mask, made))
        elif e.kind == "verify":
            made[id(e)] = replace(e, args=(op("where", mask, args[0], const(True, "bool")),))
        elif e.kind in _DIVISIONS and e.dtype not in FLOATS:
            divisor = op("where", mask, args[1], number(1, args[1]))
            made[id(e)] = replace(e, args=(args[0], divisor))
        else:
            made[id(e)] = replace(e, args=args) if args != e.args else e
    return made[id(x)]


def _under(place: Access, mask: Expr, made: dict[int, Expr]) -> Access:
    if place.mask is not None:
        mask = op("and", made[id(place.mask)], mask)
    return replace(place, mask=mask, extra=None if place.extra is None else made[id(place.extra)])


def number(value: float | int | bool, like: Expr) -> Expr:
    """A constant of the type of another value."""
    return cast(const(value, "f64" if isinstance(value, float) else "i64"), like.dtype)


def constant(tensor: Any, dtype: Element) -> Lowered:
    """A 0-d constant, part of the code."""
    value = tensor.item()
    return Lowered((), dtype, lambda _: const(value, register_type(dtype)))


# ---- positions taken apart and put together again: what a reshape does to an index ----


def is_one(n: Int) -> bool:
    """Whether a dim has one element in every plan."""
    return not isinstance(n, GuardedInt) and n == 1


def is_start(position: Index) -> bool:
    """Whether a position is 0 at every point."""
    plain = not position.terms and not position.extra
    return plain and not isinstance(position.offset, GuardedInt) and position.offset == 0


@dataclass(frozen=True)
class Part(Index):
    """`source // divisor % modulus`; without a modulus it is the leading part."""

    source: Index = field(default_factory=Index)
    divisor: Int = 1
    modulus: Int | None = None

    def __add__(self, other: Index | Int) -> Index:
        return Index(self.terms, self.offset, self.extra) + other


def part(source: Index, divisor: Int, modulus: Int | None) -> Index:
    """A part of a position, the position itself where nothing is left out."""
    if is_one(divisor) and modulus is None:
        return source
    value: Expr = source.value()
    if not is_one(divisor):
        value = op("floordiv", value, size(divisor))
    if modulus is not None:
        value = op("remainder", value, size(modulus))
    return Part((), 0, ((value, 1),), source, divisor, modulus)


def split(index: Index, n: Int, extents: Sequence[Int]) -> tuple[Index, Index]:
    """Quotient and remainder of a position by a size, given how far the axes of the nest go."""
    if is_one(n):
        return index, Index()
    if isinstance(index, Part):
        if index.modulus is None:
            return part(index.source, index.divisor * n, None), part(index.source, index.divisor, n)
        return part(index, n, None), part(index, 1, n)
    found = _split_terms(index, n, extents)
    return found if found is not None else (part(index, n, None), part(index, 1, n))


def _split_terms(index: Index, n: Int, extents: Sequence[Int]) -> tuple[Index, Index] | None:
    """The same by dividing each factor, where no carry is possible."""
    if (
        n == 0
        or isinstance(index.offset, GuardedInt)
        or (index.offset and isinstance(n, GuardedInt))
    ):
        return None
    high, low = Index(), Index()
    most: Int = 0
    for axis, factor in index.terms:
        times = _exact(factor, n)
        if times is not None:
            high += Index(((axis, times),))
        elif value_of(factor) < 0:
            return None
        else:
            low += Index(((axis, factor),))
            most = most + factor * (extents[axis] - 1)
    for value, factor in index.extra:
        times = _exact(factor, n)
        if times is None:
            return None
        high += Index(extra=((value, times),))
    whole, rest = divmod(index.offset, n) if not isinstance(n, GuardedInt) else (0, 0)
    return (high + whole, low + rest) if _below(low, most + rest, n, extents) else None


def _below(low: Index, most: Int, n: Int, extents: Sequence[Int]) -> bool:
    """Whether the low part, which is `most` at most, is less than `n` in every plan."""
    if not isinstance(most, GuardedInt) and not isinstance(n, GuardedInt):
        return most < n
    if len(low.terms) != 1 or low.offset != 0:
        return not low.terms and low.offset == 0
    axis, factor = low.terms[0]
    return same(factor * extents[axis], n)


def _exact(factor: Int, n: Int) -> Int | None:
    """`factor / n` where that is whole."""
    if same(factor, n):
        return 1
    if isinstance(n, GuardedInt) or value_of(factor) % n:
        return None
    return factor // n if factor % n == 0 else None


def unflattened(index: Index, shape: Sequence[Int], extents: Sequence[Int]) -> list[Index]:
    """The place that a flat position means in a tensor of these dims."""
    place: list[Index] = []
    for n in reversed(shape[1:]):
        index, rest = split(index, n, extents)
        place.append(rest)
    return [index, *reversed(place)]


def flattened(place: Sequence[Index], shape: Sequence[Int]) -> Index:
    """The position of a place in a contiguous tensor."""
    strides: list[Int] = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    positions, strides = joined(place, strides[: len(shape)])
    if len(positions) == 1 and is_one(strides[0]):
        return positions[0]
    total = Index()
    for position, stride in zip(positions, strides, strict=True):
        total = total + position * stride
    return total


def joined(place: Sequence[Index], strides: Sequence[Int]) -> tuple[list[Index], list[Int]]:
    """Positions and strides with neighbouring parts of one position put together again, wherever
    the strides allow it."""
    positions: list[Index] = []
    steps: list[Int] = []
    for position, stride in zip(place, strides, strict=True):
        before = positions[-1] if positions else None
        if isinstance(position, Part) and isinstance(before, Part):
            whole = _whole(before, position, steps[-1], stride)
            if whole is not None:
                positions[-1], steps[-1] = whole, stride
                continue
        if not is_start(position):
            positions.append(position)
            steps.append(stride)
    return positions, steps


def _equal(a: Int, b: Int) -> bool:
    """Whether sizes are equal; only that they are is written down for other plans."""
    return value_of(a) == value_of(b) and a == b


def _whole(left: Part, right: Part, left_stride: Int, right_stride: Int) -> Index | None:
    if left.source != right.source or right.modulus is None:
        return None
    if not _equal(left.divisor, right.divisor * right.modulus):
        return None
    if not _equal(left_stride, right_stride * right.modulus):
        return None
    modulus = None if left.modulus is None else left.modulus * right.modulus
    return part(left.source, right.divisor, modulus)
