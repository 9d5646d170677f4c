"""Vectors of numbers as Python values: their operators write LLVM instructions, so that a formula
of the maths library reads like a formula. No fast-math flags are used here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.text.writer import Writer, f32, f64, shaped

_FLOATS = {
    "float": ("f32", f32, 32), "double": ("f64", f64, 64), "half": ("f16", f32, 16),
    "bfloat": ("bf16", f32, 16),
}  # fmt: skip
_BITS = {"i32": "float", "i64": "double", "i16": "half"}


def _size(kind: str) -> int:
    return _FLOATS[kind][2] if kind in _FLOATS else int(kind[1:])


def _binary(name: str) -> Callable[[Vector, VectorOperand], Vector]:
    """An operator on numbers of one kind."""

    def write(left: Vector, right: VectorOperand) -> Vector:
        return left.by(f"f{name}" if left.is_float else name, right)

    return write


def _flipped(name: str) -> Callable[[Vector, float], Vector]:
    """An operator whose left operand is a number."""
    plain = _binary(name)
    return lambda right, left: plain(right.like(left), right)


def _compared(ordered: str, integer: str) -> Callable[[Vector, VectorOperand], Vector]:
    """A comparison, of floats and of integers: a vector of i1."""

    def write(left: Vector, right: VectorOperand) -> Vector:
        code = f"fcmp {ordered}" if left.is_float else f"icmp {integer}"
        return left.of("i1", left.w(f"{code} {left.type} {left.name}, {left.like(right).name}"))

    return write


@dataclass(slots=True, eq=False)
class Vector:
    """A vector while its formula is written; `kind` is the LLVM type of its elements. One without
    lanes is a scalar.

    The other operand of an operator may be a number, which then stands in every lane.
    """

    w: Writer
    lanes: int
    kind: str
    name: str

    @property
    def type(self) -> str:
        """The LLVM type of the vector."""
        return shaped(self.kind, self.lanes)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating point numbers."""
        return self.kind in _FLOATS

    def of(self, kind: str, name: str) -> Vector:
        """Another value with as many lanes."""
        return Vector(self.w, self.lanes, kind, name)

    def like(self, value: VectorOperand) -> Vector:
        """An operand as a vector of this type."""
        if isinstance(value, Vector):
            return value
        text = _FLOATS[self.kind][1](value) if self.is_float else str(int(value))
        return self.of(self.kind, f"splat ({self.kind} {text})" if self.lanes else text)

    def by(self, code: str, other: VectorOperand) -> Vector:
        """An instruction of two numbers of one kind."""
        text = f"{code} {self.type} {self.name}, {self.like(other).name}"
        return self.of(self.kind, self.w(text))

    # ---- arithmetic ----

    __add__, __radd__ = _binary("add"), _flipped("add")
    __sub__, __rsub__ = _binary("sub"), _flipped("sub")
    __mul__, __rmul__ = _binary("mul"), _flipped("mul")
    __truediv__, __rtruediv__ = _binary("div"), _flipped("div")
    __lshift__, __rshift__ = _binary("shl"), _binary("ashr")
    __and__, __or__, __xor__ = _binary("and"), _binary("or"), _binary("xor")
    shifted_down = _binary("lshr")  # without a sign

    def __neg__(self) -> Vector:
        return self.of(self.kind, self.w(f"fneg {self.type} {self.name}"))

    def __abs__(self) -> Vector:
        return self.intrinsic("fabs")

    # ---- comparisons: all are false for NaN, but `differs`, which is true ----

    __lt__, __le__ = _compared("olt", "slt"), _compared("ole", "sle")
    __gt__, __ge__ = _compared("ogt", "sgt"), _compared("oge", "sge")
    equals, differs = _compared("oeq", "eq"), _compared("une", "ne")
    ordered, unordered = _compared("ord", "eq"), _compared("uno", "ne")  # of floats: NaN or not
    below, above = _compared("ult", "ult"), _compared("ugt", "ugt")  # of integers without a sign
    at_least = _compared("uge", "uge")

    def select(self, yes: Vector, no: VectorOperand) -> Vector:
        """Of a vector of i1: `yes` where it is true, `no` elsewhere."""
        values = f"{yes.type} {yes.name}, {yes.type} {yes.like(no).name}"
        return yes.of(yes.kind, self.w(f"select {self.type} {self.name}, {values}"))

    def any(self) -> str:
        """Of a vector of i1: whether one is true, as an i1."""
        return self.w.call("i1", f"llvm.vector.reduce.or.v{self.lanes}i1", (self.type, self.name))

    def at_most(self, high: float) -> Vector:
        """The smaller of the vector and a number; NaN stays."""
        return (self > high).select(self.like(high), self)

    def limit(self, low: float, high: float) -> Vector:
        """The vector cut to a range; NaN stays."""
        top = self.at_most(high)
        return (top < low).select(self.like(low), top)

    # ---- other instructions ----

    def intrinsic(self, name: str, *others: VectorOperand) -> Vector:
        """An LLVM intrinsic whose operands all have this type."""
        lanes = f"v{self.lanes}" if self.lanes else ""
        full = f"llvm.{name}.{lanes}{_FLOATS[self.kind][0] if self.is_float else self.kind}"
        args = [(self.type, v.name) for v in (self, *map(self.like, others))]
        return self.of(self.kind, self.w.call(self.type, full, *args))

    def each(self, function: str) -> Vector:
        """An instruction of a GPU for float32, for one lane after the other."""
        w, made = self.w, "poison"
        for lane in range(self.lanes):
            one = w(f"extractelement {self.type} {self.name}, i32 {lane}")
            one = w.call("float", function, ("float", one))
            made = w(f"insertelement {self.type} {made}, float {one}, i32 {lane}")
        return self.of("float", made)

    def fused(self, factor: VectorOperand, addend: VectorOperand) -> Vector:
        """self * factor + addend with one rounding; only for targets that have it."""
        return self.intrinsic("fma", factor, addend)

    def times_plus(self, factor: VectorOperand, addend: VectorOperand) -> Vector:
        """self * factor + addend the fast way: with one rounding if the machine can."""
        if self.w.machine.fma:
            return self.fused(factor, addend)
        return self * factor + addend

    def signed(self, sign: Vector) -> Vector:
        """The vector with the signs of another."""
        return self.intrinsic("copysign", sign)

    def sqrt(self) -> Vector:
        """The square root, correctly rounded."""
        return self.intrinsic("sqrt")

    def polynomial(self, coefficients: Sequence[float]) -> Vector:
        """c0 + c1 x + c2 x^2 + ..., by Horner's rule."""
        result = self.like(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            result = result.times_plus(self, c)
        return result

    def to(self, kind: str, signed: bool = True) -> Vector:
        """Converted to another kind of number."""
        if kind == self.kind:
            return self
        grows = _size(kind) > _size(self.kind)
        if self.is_float and kind in _FLOATS:
            code = "fpext" if grows else "fptrunc"
        elif self.is_float or kind in _FLOATS:
            code = "fptosi" if self.is_float else "sitofp"
        elif grows:
            code = "sext" if signed and self.kind != "i1" else "zext"
        else:
            code = "trunc"
        return self._cast(code, kind)

    def bits(self) -> Vector:
        """The same bits as integers, or those of integers as floats."""
        return self._cast("bitcast", f"i{_size(self.kind)}" if self.is_float else _BITS[self.kind])

    def _cast(self, code: str, kind: str) -> Vector:
        to = shaped(kind, self.lanes)
        return self.of(kind, self.w(f"{code} {self.type} {self.name} to {to}"))

    def load(self, at: str, align: int) -> Vector:
        """A vector of this type in memory."""
        return self.of(self.kind, self.w(f"load {self.type}, ptr {at}, align {align}"))

    def store(self, at: str, align: int) -> None:
        """Write the vector to memory."""
        self.w.do(f"store {self.type} {self.name}, ptr {at}, align {align}")


VectorOperand = Vector | float
"""What an operator takes on its right side."""


def wide(w: Writer, kind: str, name: str = "") -> Vector:
    """A vector as wide as those of the machine; of one without a name only the type counts."""
    return Vector(w, w.lanes, kind, name)


def by_lane(function: str, *args: Vector) -> Vector:
    """A function of the C library over doubles, called for one lane after the other."""
    w, lanes = args[0].w, args[0].lanes
    places = [w.scratch(8 * lanes) for _ in args]
    for place, arg in zip(places, args, strict=True):
        wide = arg.to("double")
        w.do(f"store {wide.type} {wide.name}, ptr {place}, align 8")
    with w.loop("0", lanes) as loop:
        slots = [w.offset(place, "double", loop.index) for place in places]
        values = [("double", w(f"load double, ptr {slot}")) for slot in slots]
        w.do(f"store double {w.call('double', function, *values)}, ptr {slots[0]}")
    result = args[0].of("double", "")
    result.name = w(f"load {result.type}, ptr {places[0]}, align 8")
    return result.to(args[0].kind)


def rescued(wrong: Vector, fast: Vector, function: str, *args: Vector) -> Vector:
    """`fast`, but a function of the C library in the lanes where `wrong` holds.

    The common case costs one test; the library is called in a block of its own.
    """
    values = [(fast.type, fast.name)]

    def slow() -> list[str]:
        return [wrong.select(by_lane(function, *args), fast).name]

    return fast.of(fast.kind, fast.w.changed(wrong.any(), values, slow)[0])
