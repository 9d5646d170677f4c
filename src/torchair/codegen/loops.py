"""The loop IR: one fused group as expressions over the axes of a loop nest.

An `Expr` is a value at one point of the nest. A `Nest` says which axes there are, which of them are
reduced, and what is stored. `simplify` brings a nest into the form that is fast to run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torchair.codegen import sizes
from torchair.codegen.sizes import Element, Int, Size, SizeArgument, is_known, value_of

ExprOperator = Literal[
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "abs",
    "min",
    "max",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "xor",
    "not",
    "shl",
    "shr",
    "where",
    "floordiv",
    "remainder",
    "fmod",
    "isnan",
    "isinf",
    "isfinite",
    "sign",
]
"""Operators on values that need no maths library. On integers `div` truncates, `floordiv` and
`remainder` follow Python; `min` and `max` of floats give NaN if either is; comparisons give bool;
`where` takes a bool first; `and`, `or`, `xor`, `not` are bitwise on integers and logical on
bool."""

Maths = Literal[
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "expm1",
    "floor",
    "gelu",
    "log",
    "log10",
    "log1p",
    "log2",
    "pow",
    "round",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
"""Functions of the maths library."""

Operation = ExprOperator | Maths

OPERATORS: frozenset[ExprOperator] = frozenset(get_args(ExprOperator))
MATHS: frozenset[Maths] = frozenset(get_args(Maths))

ExprSource = Literal[
    "const", "size", "axis", "load", "given", "cast", "narrow", "verify", "reduce", "philox"
]
"""Kinds of expressions that are no operations, see `Expr`."""

Reduction = Literal["sum", "prod", "max", "min", "any", "all"]


@dataclass(frozen=True, eq=False)
class Access:
    """Elements of one operand: `base + offset + sum(axis * stride) + extra`, counted in elements.

    Where `mask` is false nothing is touched; a load then gives zero.
    """

    operand: int  # index of the address among the words of the kernel
    dtype: Element  # in memory
    strides: tuple[Any, ...]  # Int, or Size once printed; one per axis of the nest
    offset: Any = 0
    extra: Expr | None = None  # i64, where the place depends on data or is not linear in the axes
    mask: Expr | None = None


@dataclass(frozen=True, eq=False)
class Expr:
    """A value. `kind` is one of

    - `const` (data: a Python number), `size` (data: Int), `axis` (data: its number; i64),
    - `load` (data: Access), `given` (data: k; a value that the caller of the nest hands in),
    - `cast` to `dtype`, `narrow` (data: bf16 or f16): an f32 as that type holds it, as an f32,
    - `verify` (data: a word): a bool as it is; where it is false, 1 is stored at the address in
      that word,
    - `reduce` (data: a Reduction) over the reduced axes of the nest,
    - `philox` (data: PhiloxLayout) of seed, offset and position, all i64: the random number that
      torch's generator of a GPU draws for the element there, an f32 above 0 and up to 1,
    - an `Operation` on values.

    `dtype` is the type in a register: f32, f64, i64, i32, i16, i8, u8 or bool. bf16 and f16 exist
    in memory only; loading gives f32, storing rounds.
    """

    kind: ExprSource | Operation
    dtype: Element
    args: tuple[Expr, ...] = ()
    data: Any = None


@dataclass(frozen=True, eq=False)
class Store:
    """A value written to memory."""

    access: Access
    value: Expr


@dataclass(frozen=True)
class Nest:
    """`for` loops over `axes`; the last one is the vector axis.

    Axes in `reduced` are summed up by `reduce` expressions; the others are independent of each
    other, so that they can be shared among threads. A store whose address and value vary over no
    reduced axis is done once after the reductions it needs.
    """

    axes: tuple[Any, ...]  # Int, or Size once printed
    stores: tuple[Store, ...]
    reduced: frozenset[int] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return listing(self)


# ---- making expressions ----


def const(value: float | int | bool, dtype: Element) -> Expr:
    """A number of a type."""
    return Expr("const", dtype, data=value)


def size(value: Int) -> Expr:
    """A size as an i64 value."""
    if isinstance(value, sizes.GuardedInt):
        return Expr("size", "i64", data=value)
    return const(value, "i64")


def axis(number: int) -> Expr:
    """The position along an axis, an i64."""
    return Expr("axis", "i64", data=number)


def cast(x: Expr, dtype: Element) -> Expr:
    """A value in another type, as C converts; bf16 and f16 mean f32 here."""
    dtype = sizes.register_type(dtype)
    if x.dtype == dtype:
        return x
    if x.kind == "const":
        return const(_converted(x.data, dtype), dtype)
    return Expr("cast", dtype, (x,))


def narrowed(x: Expr, dtype: Element) -> Expr:
    """A value rounded as it would be in memory of a type, where that is a short float."""
    known = x.kind == "const" or (x.kind == "load" and x.data.dtype == dtype)
    if dtype not in sizes.SHORT_FLOATS or known or (x.kind == "narrow" and x.data == dtype):
        return x
    return Expr("narrow", "f32", (x,), dtype)


def _converted(value: Any, dtype: Element) -> Any:
    if dtype == "bool":
        return bool(value)
    return float(value) if dtype in ("f32", "f64") else int(value)


def op(kind: Operation, *args: Expr, dtype: Element | None = None) -> Expr:
    """An operator applied to values of one type; comparisons give bool."""
    if dtype is None:
        compares = kind in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")
        dtype = "bool" if compares else args[-1].dtype
    return Expr(kind, dtype, args)


def operation(name: str) -> Operation:
    """The operation that a table names."""
    found = next((k for k in (*OPERATORS, *MATHS) if k == name), None)
    assert found is not None, f"{name} is no operation of the loop IR"
    return found


def reduce(kind: Reduction, x: Expr) -> Expr:
    """`x` summed up (or its maximum ...) over the reduced axes."""
    return Expr("reduce", x.dtype, (x,), kind)


# ---- positions ----


@dataclass(frozen=True)
class Index:
    """A position along one dim of a tensor: linear in the axes, plus what is not."""

    terms: tuple[tuple[int, Int], ...] = ()  # (axis, factor)
    offset: Int = 0
    extra: tuple[tuple[Expr, Int], ...] = ()  # (i64 value, factor)

    def __add__(self, other: Index | Int) -> Index:
        if not isinstance(other, Index):
            return replace(self, offset=self.offset + other)
        factors = dict(self.terms)
        for a, f in other.terms:
            factors[a] = factors[a] + f if a in factors else f
        return Index(tuple(factors.items()), self.offset + other.offset, self.extra + other.extra)

    def __mul__(self, factor: Int) -> Index:
        return Index(
            tuple((a, f * factor) for a, f in self.terms),
            self.offset * factor,
            tuple((e, f * factor) for e, f in self.extra),
        )

    def value(self) -> Expr:
        """The position as an i64 value."""
        parts = [_times(axis(a), f) for a, f in self.terms]
        parts += [_times(e, f) for e, f in self.extra]
        if not parts or not is_known(self.offset, 0):
            parts.append(size(self.offset))
        total = parts[0]
        for part in parts[1:]:
            total = op("add", total, part)
        return total


def at_axis(number: int) -> Index:
    """The position that an axis of the nest stands for."""
    return Index(((number, 1),))


def at_value(x: Expr) -> Index:
    """A position that is computed or read, as an i64 value."""
    return Index((), x.data) if x.kind == "const" else Index(extra=((x, 1),))


def _times(x: Expr, factor: Int) -> Expr:
    return x if is_known(factor, 1) else op("mul", x, size(factor))


def access(
    operand: int,
    dtype: Element,
    strides: Sequence[Int],
    index: Sequence[Index],
    axes: int,
    mask: Expr | None = None,
) -> Access:
    """The element at an index of a tensor with these strides, in a nest with so many axes."""
    flat = Index()
    for position, stride in zip(index, strides, strict=True):
        flat = flat + position * stride
    factors: dict[int, Int] = dict(flat.terms)
    extra = replace(flat, terms=(), offset=0).value() if flat.extra else None
    return Access(
        operand, dtype, tuple(factors.get(a, 0) for a in range(axes)), flat.offset, extra, mask
    )


def store(place: Access, x: Expr) -> Store:
    """A value written there. Writing rounds, so that a value need not be rounded to the same type
    before."""
    return Store(place, x.args[0] if x.kind == "narrow" and x.data == place.dtype else x)


def load(place: Access) -> Expr:
    """The value there; bf16 and f16 become f32."""
    return Expr("load", sizes.register_type(place.dtype), data=place)


# ---- walking ----


def children(x: Expr) -> Iterator[Expr]:
    """Values that `x` is made of, those of its address included."""
    yield from x.args
    if x.kind == "load":
        yield from (e for e in (x.data.extra, x.data.mask) if e is not None)


def expressions(nest: Nest) -> list[Expr]:
    """Every expression of a nest once, operands before those that use them."""
    seen: set[int] = set()
    order: list[Expr] = []
    stack: list[tuple[Expr, bool]] = []
    for s in reversed(nest.stores):
        roots = [s.value, s.access.extra, s.access.mask]
        stack += [(e, False) for e in reversed(roots) if e is not None]
    while stack:
        x, ready = stack.pop()
        if ready:
            order.append(x)
        elif id(x) not in seen:
            seen.add(id(x))
            stack.append((x, True))
            stack += [(c, False) for c in children(x) if id(c) not in seen]
    return order


def accesses(nest: Nest) -> list[Access]:
    """Every load and store."""
    return [x.data for x in expressions(nest) if x.kind == "load"] + [s.access for s in nest.stores]


# ---- the form that is fast to run ----


def simplify(nest: Nest) -> Nest:
    """The same nest with axes of size 1 dropped, the best axis last, and neighbours merged."""
    nest = _permuted(nest, _order(nest))
    return _merge(nest, len(nest.axes) - 2)


def vectors(nest: Nest) -> int:
    """The axis along which vectors will lie."""
    return _order(nest)[-1]


def _order(nest: Nest) -> list[int]:
    """Parallel axes by falling stride of what is stored, then reduced ones; the axis along which
    most memory is contiguous comes last: operands count by the elements that are touched."""
    kept = [a for a, n in enumerate(nest.axes) if not is_known(n, 1)]
    if not kept:
        return [len(nest.axes) - 1] if nest.axes else []
    used = accesses(nest)
    stored = [s.access for s in nest.stores]

    def stride(a: int) -> int:
        largest = max((abs(value_of(x.strides[a])) for x in stored), default=0)
        return largest or max((abs(value_of(x.strides[a])) for x in used), default=0)

    sizes = [value_of(n) for n in nest.axes]
    counted = [(x.strides, _elements(x, sizes)) for x in used]

    def contiguous(a: int) -> tuple[int, int, int]:
        unit = sum(n for strides, n in counted if value_of(strides[a]) == 1)
        writes = sum(value_of(x.strides[a]) == 1 for x in stored)
        scattered = sum(n for strides, n in counted if abs(value_of(strides[a])) > 1)
        return unit - scattered, writes, a

    last = max(kept, key=contiguous)
    others = [a for a in kept if a != last]
    others.sort(key=lambda a: (a in nest.reduced, -stride(a), a))
    return [*others, last]


def _elements(place: Access, sizes: Sequence[int]) -> int:
    """How many elements an access touches, in axes of these sizes."""
    return math.prod(n for n, s in zip(sizes, place.strides, strict=True) if value_of(s) != 0)


def join_rows(nest: Nest) -> Nest:
    """The same nest with as few leading axes as possible; the last axis stays what it is."""
    return _merge(nest, len(nest.axes) - 3)


def _permuted(nest: Nest, order: list[int]) -> Nest:
    place = {a: k for k, a in enumerate(order)}
    return rebuilt(
        nest,
        lambda x: replace(x, strides=tuple(x.strides[a] for a in order)),
        _axes_as(lambda a: axis(place[a]) if a in place else const(0, "i64")),
        tuple(nest.axes[a] for a in order),
        frozenset(place[a] for a in nest.reduced if a in place),
    )


def _merge(nest: Nest, last: int) -> Nest:
    """Two neighbouring axes that every access walks through without a jump are one, up to the
    pair that begins with the last one to be joined."""
    named = {x.data for x in expressions(nest) if x.kind == "axis"}
    for k in range(last, -1, -1):
        if _mergeable(nest, k, named):
            nest = _joined(nest, k)
            named = {a - 1 if a > k else a for a in named}
    return nest


def _mergeable(nest: Nest, k: int, named: set[int]) -> bool:
    if {k, k + 1} & named or (k in nest.reduced) != (k + 1 in nest.reduced):
        return False
    inner = nest.axes[k + 1]
    return all(x.strides[k] == x.strides[k + 1] * inner for x in accesses(nest))


def _joined(nest: Nest, k: int) -> Nest:
    return rebuilt(
        nest,
        lambda x: replace(x, strides=(*x.strides[:k], *x.strides[k + 1 :])),
        _axes_as(lambda a: axis(a - 1 if a > k else a)),
        (*nest.axes[:k], nest.axes[k] * nest.axes[k + 1], *nest.axes[k + 2 :]),
        frozenset(a - 1 if a > k else a for a in nest.reduced),
    )


def _axes_as(renamed: Callable[[int], Expr]) -> ExprRewrite:
    return lambda x, made: renamed(x.data) if x.kind == "axis" else made


def with_words(nest: Nest, word: Callable[[Int], Size]) -> Nest:
    """The nest as it is printed: Numbers have become words of the argument block."""
    return _printed(nest, word, lambda k: k)


def renumbered(nest: Nest, word: Callable[[int], int]) -> Nest:
    """A printed nest with other words."""
    return _printed(
        nest, lambda n: SizeArgument(word(n.index)) if isinstance(n, SizeArgument) else n, word
    )


def _printed(nest: Nest, size: Callable[[Any], Size], operand: Callable[[int], int]) -> Nest:
    def place(x: Access) -> Access:
        strides = tuple(size(s) for s in x.strides)
        return replace(x, operand=operand(x.operand), strides=strides, offset=size(x.offset))

    def value(x: Expr, made: Expr) -> Expr:
        if x.kind == "size":
            return replace(x, data=size(x.data))
        return replace(made, data=operand(x.data)) if x.kind == "verify" else made

    return rebuilt(nest, place, value, tuple(size(n) for n in nest.axes))


def substituted(nest: Nest, known: Mapping[int, Expr]) -> Nest:
    """A nest with other values in the place of some of its expressions, which are given by id."""
    return rebuilt(nest, value=lambda x, made: known.get(id(x), made))


ExprRewrite = Callable[[Expr, Expr], Expr]
"""What takes the place of an expression, given also as it is with new operands."""


def rebuilt(
    nest: Nest,
    place: Callable[[Access], Access] = lambda x: x,
    value: ExprRewrite = lambda x, made: made,
    axes: tuple[Any, ...] | None = None,
    reduced: frozenset[int] | None = None,
) -> Nest:
    """A nest with every access and every expression replaced, those of which others are made
    first, sharing kept. `place` gets an access whose own expressions have been replaced."""
    known: dict[int, Expr] = {}

    def moved(x: Access) -> Access:
        extra = known[id(x.extra)] if x.extra is not None else None
        mask = known[id(x.mask)] if x.mask is not None else None
        return place(replace(x, extra=extra, mask=mask))

    for x in expressions(nest):
        made = x
        if x.kind == "load":
            made = replace(x, data=moved(x.data))
        elif x.args:
            made = replace(x, args=tuple(known[id(a)] for a in x.args))
        known[id(x)] = value(x, made)
    stores = tuple(Store(moved(s.access), known[id(s.value)]) for s in nest.stores)
    reduced = nest.reduced if reduced is None else reduced
    return Nest(nest.axes if axes is None else axes, stores, reduced)


# ---- a nest as text that can be read ----


SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "floordiv": "//", "remainder": "%",
}  # fmt: skip
"""Operators that are written between their operands."""
LONGEST = 72
"""Characters of a formula before its parts get names."""
LEAVES = frozenset({"const", "size", "axis", "given"})


def listing(nest: Nest) -> str:
    """The text of a nest."""
    text = _Formulas(nest)
    lines = [
        f"for a{k} in range({_size(n)})" + ("  # reduced" if k in nest.reduced else "")
        for k, n in enumerate(nest.axes)
    ]
    lines += [f"    {line}" for line in text.lines]
    lines += [f"    {text.place(s.access)} = {text.of(s.value)}" for s in nest.stores]
    return "\n".join(lines)


class _Formulas:
    """The text of each expression: a formula, or the name of a line before."""

    def __init__(self, nest: Nest) -> None:
        self.lines: list[str] = []
        self._text: dict[int, str] = {}
        self._joint: set[int] = set()  # of several parts: in brackets inside of others
        order = expressions(nest)
        uses = [e for x in order for e in children(x)] + [s.value for s in nest.stores]
        uses += [e for s in nest.stores for e in (s.access.extra, s.access.mask) if e is not None]
        self._uses = Counter(map(id, uses))
        for x in order:
            self._add(x)

    def of(self, x: Expr) -> str:
        """How an expression is called."""
        return self._text[id(x)]

    def _add(self, x: Expr) -> None:
        formula = self._formula(x)
        again = self._uses[id(x)] > 1 and x.kind not in LEAVES
        if again or len(formula) > LONGEST or x.kind == "reduce":
            self.lines.append(f"t{len(self.lines)} = {formula}")
            formula = f"t{len(self.lines) - 1}"
        elif x.kind in SIGNS or (x.kind == "load" and x.data.mask is not None):
            self._joint.add(id(x))
        self._text[id(x)] = formula

    def _formula(self, x: Expr) -> str:
        if x.kind in ("const", "size"):
            return _size(x.data)
        if x.kind in ("axis", "given"):
            return f"a{x.data}" if x.kind == "axis" else f"given{x.data}"
        if x.kind == "load":
            return self.place(x.data)
        if x.kind in SIGNS:
            return f" {SIGNS[x.kind]} ".join(self._inside(a) for a in x.args)
        name = {"cast": x.dtype, "reduce": x.data, "narrow": x.data}.get(x.kind, x.kind)
        name += str(x.data) if x.kind == "philox" else ""
        args = (self._inside(a) if a.kind == "load" else self.of(a) for a in x.args)
        return f"{name}({', '.join(args)})"

    def _inside(self, x: Expr) -> str:
        return f"({self.of(x)})" if id(x) in self._joint else self.of(x)

    def place(self, place: Access) -> str:
        """Where something is loaded from or stored to."""
        terms = [
            f"a{k}" if is_known(s, 1) else f"{_size(s)} * a{k}"
            for k, s in enumerate(place.strides)
            if not is_known(s, 0)
        ]
        if place.extra is not None:
            terms.append(self.of(place.extra))
        if not terms or not is_known(place.offset, 0):
            terms.append(_size(place.offset))
        where = f"{place.dtype} word{place.operand}[{' + '.join(terms)}]"
        return where if place.mask is None else f"{where} if {self._inside(place.mask)}"


def _size(n: Any) -> str:
    """A number, or the word that holds it at run time."""
    return f"n{n.index}" if isinstance(n, SizeArgument) else str(n)
