"""The vector maths library: functions of float32 and float64 vectors, written into a kernel.

Float32 results are within 2 ulp of the true value, with or without fused multiply-add; the formulas
whose speed matters are here, in float32 arithmetic, and only sin and cos branch, for large angles.
Float64 results come from the C library, lane by lane, and are there to be right and not to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.text import maths_wide as wide
from torchair.codegen.text.maths_vector import Vector, by_lane, rescued
from torchair.codegen.text.writer import Writer

VectorFormula = Callable[..., Vector]


@dataclass(frozen=True)
class Function:
    """A function of `operands` vectors: its formulas over float32 and over float64."""

    operands: int
    single: VectorFormula
    double: VectorFormula


def apply(
    w: Writer, name: str, args: Sequence[str], element: str = "f32", lanes: int | None = None
) -> str:
    """Write a function of FUNCTIONS over vectors `<lanes x float>` or, for element "f64",
    `<lanes x double>`; the result is the name of the vector of results.

    Some functions open new blocks, so do not keep the label of a block across this call.
    """
    function = FUNCTIONS[name]
    if len(args) != function.operands:
        raise ValueError(f"{name} takes {function.operands} operands, not {len(args)}")
    kind, formula = {"f32": ("float", function.single), "f64": ("double", function.double)}[element]
    count = w.lanes if lanes is None else lanes
    return formula(*(Vector(w, count, kind, arg) for arg in args)).name


def _widened(formula: VectorFormula) -> VectorFormula:
    """A formula over doubles as one over float32."""

    def narrow(*args: Vector) -> Vector:
        return formula(*(arg.to("double") for arg in args)).to("float")

    return narrow


def _library(name: str) -> VectorFormula:
    return lambda *args: by_lane(name, *args)


def _instruction(name: str) -> VectorFormula:
    return lambda x: x.intrinsic(name)


# ---- float32 formulas ----

_SPARE = 60  # powers of two that keep a sum with e^125 finite


def exp(x: Vector) -> Vector:
    """e^x, with gradual underflow."""
    whole, q = _split_exp(x.limit(-104.5, 89.0))
    first, second = _powers_of_two(whole)
    return first.times_plus(q, first) * second


def expm1(x: Vector) -> Vector:
    """e^x - 1, exact for small x."""
    whole, q = _split_exp(x.limit(-20.0, 89.0))
    half = ((whole + 126) << 23).bits()  # half of 2^whole, which would overflow
    result = half.times_plus(q, half - 0.5) * 2.0
    return (abs(x) < 2.0**-25).select(x, result)


def log(x: Vector) -> Vector:
    """The natural logarithm."""
    tiny = x < wide.SMALLEST_NORMAL_32
    bits = tiny.select(x * 2.0**23, x).bits()
    whole = (bits - 0x3F2AAAAB) >> 23  # leaves a number between 2/3 and 4/3
    f = (bits - (whole << 23)).bits() - 1.0
    n = whole.to("float") + tiny.select(x.like(-23.0), 0.0)
    near_0 = f.polynomial(wide.LOG_32).times_plus(f * f, n * wide.LN_2_LOW_32) + f
    return wide.special_logarithms(x, n.times_plus(wide.LN_2_HIGH_32, near_0))


def tanh(x: Vector) -> Vector:
    """The hyperbolic tangent: a polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere."""
    a = abs(x)
    z = a * a
    near = (a * z).times_plus(z.polynomial(wide.TANH_32), a)
    far = 1.0 - _over(2.0, _moderate_exp(*_split_exp(a.at_most(10.0) * 2.0)) + 1.0)
    return (a >= 0.6).select(far, near).signed(x)


def sigmoid(x: Vector) -> Vector:
    """1 / (1 + e^-x), with gradual underflow."""
    return _over(2.0**-_SPARE, _one_plus_exp(*_split_exp((-x).limit(-40.0, 105.0))))


def silu(x: Vector) -> Vector:
    """x sigmoid(x); NaN at -inf as x / (1 + e^-x) is."""
    a = abs(x).at_most(125.0)
    return wide.positive_part(x) - _over(a, _one_plus_exp(*_split_exp(a))) * 2.0**-_SPARE


def _one_plus_exp(whole: Vector, q: Vector) -> Vector:
    """1 + 2^whole (1 + q), over 2^_SPARE, with one rounding; `whole` is from -60 to 180."""
    power = ((whole + (127 - _SPARE)) << 23).bits()
    total = power + 2.0**-_SPARE
    return power.times_plus(q, (power - total) + 2.0**-_SPARE) + total


def erf(x: Vector) -> Vector:
    """The error function: a polynomial up to 1, and 1 - 2^p(x) elsewhere."""
    a = abs(x)
    near = (a * a).polynomial(wide.ERF_32).times_plus(a, a)
    far = 1.0 - _moderate_exp(*_split_exp2(a.at_most(4.0).polynomial(wide.LOG2_ERFC_32)))
    return (a >= 1.0).select(far, near).signed(x)


def gelu(x: Vector) -> Vector:
    """x times the normal distribution; NaN at -inf. Only for targets with fma.

    It is the positive part of x less a tail, e^(-x^2 / 2) p(x). As many rounded parts make up
    the tail, the errors of the larger ones are computed and added at the end.
    """
    a = abs(x).at_most(14.6)
    product, error = _tail_factor(a)
    square = a * a
    lost = a.fused(a, -square) * -0.5
    whole, q = _split_exp(square * -0.5)
    error = product.fused(lost, error)
    tail = product + product.fused(q, error.fused(q, error))
    first, second = _powers_of_two(whole)
    return wide.positive_part(x) - tail * first * second


def _tail_factor(a: Vector) -> tuple[Vector, Vector]:
    """e^(a^2 / 2) a times the normal distribution at -a, and the error of that.

    With s = 1 / (a + shift) it is a s m(s), and m is a polynomial.
    """
    total = a + wide.NORMAL_TAIL_SHIFT
    lost = a - (total - wide.NORMAL_TAIL_SHIFT)
    s = _about_inverse(total)
    s_error = (-s).fused(lost, (-s).fused(total, 1.0))  # relative
    t = a * s
    t_error = t.fused(s_error, a.fused(s, -t))
    distance = s - wide.NORMAL_TAIL_CENTER
    slope = distance.polynomial(wide.NORMAL_TAIL_32[1:])
    m = slope.fused(distance, wide.NORMAL_TAIL_32[0])
    m_error = slope.fused(distance, wide.NORMAL_TAIL_32[0] - m)
    m_error = (s * slope).fused(s_error, m_error)
    product = t * m
    return product, t.fused(m_error, t_error.fused(m, t.fused(m, -product)))


def _over(a: Vector | float, b: Vector) -> Vector:
    """a / b for normal b whose inverse is normal: on a GPU, where a division takes a dozen
    instructions, by a step of Newton's method."""
    if b.w.machine.arch != "nvptx":
        return a / b
    y = _about_inverse(b)
    return y.fused((-b).fused(y, 1.0), y) * a


def _about_inverse(x: Vector) -> Vector:
    """1 / x as well as the processor has it at once."""
    if x.w.machine.arch != "nvptx":
        return 1.0 / x
    return x.each("llvm.nvvm.rcp.approx.ftz.f")


def rsqrt(x: Vector) -> Vector:
    """1 / sqrt(x), from correctly rounded parts."""
    return 1.0 / x.sqrt()


def sin(x: Vector) -> Vector:
    """The sine; large angles come from the C library."""
    return rescued(wide.is_large_angle(x), x.equals(0.0).select(x, _sine(x, 0)), "sin", x)


def cos(x: Vector) -> Vector:
    """The cosine; large angles come from the C library."""
    return rescued(wide.is_large_angle(x), _sine(x, 1), "cos", x)


def _sine(x: Vector, quarters: int) -> Vector:
    """The sine of x and some right angles; the angle is reduced in doubles."""
    angle, count = wide.reduced(x.to("double"))
    quadrant, r = count.to("i32") + quarters, angle.to("float")
    z = r * r
    sine = (r * z).times_plus(z.polynomial(wide.SIN_32), r)
    cosine = z.polynomial(wide.COS_32).times_plus(z, 1.0)
    size = (quadrant & 1).equals(0).select(sine, cosine)
    return (size.bits() ^ ((quadrant & 2) << 30)).bits()


def _split_exp(x: Vector) -> tuple[Vector, Vector]:
    """e^x as 2^whole (1 + q): an integer and a number, for |x| < 2^20."""
    whole, n = _rounded(x, wide.LOG2_E)
    r = n.times_plus(-wide.LN_2_LOW_32, n.times_plus(-wide.LN_2_HIGH_32, x))  # |r| <= ln(2) / 2
    return whole, r.polynomial(wide.EXP_32).times_plus(r * r, r)  # e^r - 1


def _split_exp2(x: Vector) -> tuple[Vector, Vector]:
    """2^x as 2^whole (1 + q): an integer and a number, for |x| < 2^20."""
    whole, n = _rounded(x, 1.0)
    r = x - n
    return whole, r.polynomial(wide.EXP2_32) * r


def _rounded(x: Vector, factor: float) -> tuple[Vector, Vector]:
    """x times a factor as an integer, and that as a float, for results up to 2^22."""
    shifted = x.times_plus(factor, wide.ROUNDER_32)
    return shifted.bits() - shifted.like(wide.ROUNDER_32).bits(), shifted - wide.ROUNDER_32


def _moderate_exp(whole: Vector, q: Vector) -> Vector:
    """2^whole (1 + q) that is neither subnormal nor infinite."""
    return ((q + 1.0).bits() + (whole << 23)).bits()


def _powers_of_two(whole: Vector) -> tuple[Vector, Vector]:
    """Two normal numbers whose product is 2^whole, for |whole| < 250."""
    half = whole >> 1
    rest = whole - half
    return ((half + 127) << 23).bits(), ((rest + 127) << 23).bits()


def _gelu(x: Vector) -> Vector:
    """The float32 formula for this machine: the fast one needs fused multiply-add."""
    return gelu(x) if x.w.machine.fma else _widened(wide.gelu)(x)


# ---- float64 formulas over the C library ----


def _sigmoid(x: Vector) -> Vector:
    e = by_lane("exp", -abs(x))
    return (x < 0.0).select(e, 1.0) / (e + 1.0)


def _erfinv(x: Vector) -> Vector:
    """Two steps of Newton's method from the float32 formula, with erfc where |x| is near 1."""
    a = abs(x)
    y = wide.erfinv(a)
    for _ in range(2):
        error = (a < 0.5).select(a - by_lane("erf", y), by_lane("erfc", y) - (1.0 - a))
        step = error * by_lane("exp", y * y) * (0.5 * math.sqrt(math.pi))
        y = (y < math.inf).select(y + step, y)
    return y.signed(x)


_IN_FLOATS = (exp, expm1, log, tanh, erf, sin, cos)
_IN_DOUBLES = (
    wide.log2, wide.log10, wide.log1p, wide.erfc, wide.tan, wide.atan, wide.asin, wide.acos,
    wide.sinh, wide.cosh, wide.asinh, wide.acosh, wide.atanh,
)  # fmt: skip
_OF_THE_C_LIBRARY: dict[str, VectorFormula] = {
    **{formula.__name__: formula for formula in _IN_FLOATS},
    **{formula.__name__: _widened(formula) for formula in _IN_DOUBLES},
}  # float32 formulas of functions that the C library has for float64

FUNCTIONS: dict[str, Function] = {
    **{name: Function(1, single, _library(name)) for name, single in _OF_THE_C_LIBRARY.items()},
    "sigmoid": Function(1, sigmoid, _sigmoid),
    "silu": Function(1, silu, lambda x: x * _sigmoid(x)),
    "gelu": Function(1, _gelu, lambda x: x * 0.5 * by_lane("erfc", x * -wide.ROOT_HALF)),
    "erfinv": Function(1, _widened(wide.erfinv), _erfinv),
    "atan2": Function(2, _widened(wide.atan2), _library("atan2")),
    "pow": Function(2, _widened(wide.power), _library("pow")),
    "fmod": Function(2, _widened(wide.fmod), _library("fmod")),
    "rsqrt": Function(1, rsqrt, rsqrt),
    "sqrt": Function(1, Vector.sqrt, Vector.sqrt),
    "floor": Function(1, _instruction("floor"), _instruction("floor")),
    "ceil": Function(1, _instruction("ceil"), _instruction("ceil")),
    "trunc": Function(1, _instruction("trunc"), _instruction("trunc")),
    "round": Function(1, _instruction("roundeven"), _instruction("roundeven")),
}
"""The functions of this library by name; what `apply` can write."""
