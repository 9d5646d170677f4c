"""Float32 functions in float32 arithmetic, those whose speed matters: within 2 ulp of the true
value, with or without fused multiply-add. Only sin and cos branch, for large angles."""

from __future__ import annotations

import math

from torchair.codegen.text import maths_tables as tables
from torchair.codegen.text.maths_vector import Vector, rescued
from torchair.codegen.text.maths_wide import (
    is_large_angle,
    positive_part,
    reduced,
    special_logarithms,
)

_SPARE = 60  # powers of two that keep a sum with e^125 finite


def exp(x: Vector) -> Vector:
    """e^x, with gradual underflow."""
    whole, q = _split_exp(x.limit(-104.5, 89.0))
    first, second = _powers_of_two(whole)
    return first.times_plus(q, first) * second


def exp2(x: Vector) -> Vector:
    """2^x, with gradual underflow."""
    whole, q = _split_exp2(x.limit(-151.0, 129.0))
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
    tiny = x < tables.SMALLEST_NORMAL_32
    bits = tiny.select(x * 2.0**23, x).bits()
    whole = (bits - 0x3F2AAAAB) >> 23  # leaves a number between 2/3 and 4/3
    f = (bits - (whole << 23)).bits() - 1.0
    n = whole.to("float") + tiny.select(x.like(-23.0), 0.0)
    u = f.polynomial(tables.LOG_32)
    near_0 = u.times_plus(f * f, n * tables.LN_2_LOW_32) + f
    result = n.times_plus(tables.LN_2_HIGH_32, near_0)
    return special_logarithms(x, result)


def tanh(x: Vector) -> Vector:
    """The hyperbolic tangent: a polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere."""
    a = abs(x)
    z = a * a
    near = (a * z).times_plus(z.polynomial(tables.TANH_32), a)
    double = a.at_most(10.0) * 2.0
    far = 1.0 - 2.0 / (_moderate_exp(*_split_exp(double)) + 1.0)
    return (a >= 0.6).select(far, near).signed(x)


def sigmoid(x: Vector) -> Vector:
    """1 / (1 + e^-x), with gradual underflow."""
    return 2.0**-_SPARE / _one_plus_exp(*_split_exp((-x).limit(-40.0, 105.0)))


def silu(x: Vector) -> Vector:
    """x sigmoid(x); NaN at -inf as x / (1 + e^-x) is."""
    a = abs(x).at_most(125.0)
    return positive_part(x) - a / _one_plus_exp(*_split_exp(a)) * 2.0**-_SPARE


def gelu_tanh(x: Vector) -> Vector:
    """x times the approximation of the normal distribution by tanh; NaN at -inf.

    That is x sigmoid(2 y) for the argument y of tanh, whose exponent is split in doubles.
    """
    a = abs(x).at_most(11.4)
    wide = a.to("double")
    scale = 2.0 * math.sqrt(2.0 / math.pi)
    exponent = (wide * wide).times_plus(scale * 0.044715, scale) * wide
    shifted = exponent.times_plus(tables.LOG2_E, tables.ROUNDER)
    r = (shifted - tables.ROUNDER).times_plus(-tables.LN_2, exponent).to("float")
    total = _one_plus_exp(shifted.bits().to("i32"), _small_expm1(r))
    return positive_part(x) - a / total * 2.0**-_SPARE


def _one_plus_exp(whole: Vector, q: Vector) -> Vector:
    """1 + 2^whole (1 + q), over 2^_SPARE, with one rounding; `whole` is from -60 to 180."""
    power = ((whole + (127 - _SPARE)) << 23).bits()
    total = power + 2.0**-_SPARE
    lost = (power - total) + 2.0**-_SPARE
    return power.times_plus(q, lost) + total


def softplus(x: Vector, threshold: Vector) -> Vector:
    """log(1 + e^x), and x itself above the threshold."""
    whole, q = _split_exp(-abs(x).at_most(105.0))
    first, second = _powers_of_two(whole)
    e = first.times_plus(q, first) * second
    factor = (e - tables.LOG1P_CENTER).polynomial(tables.LOG1P_32)
    tail = factor.times_plus(q, factor) * first * second
    return (x > threshold).select(x, (x > 0.0).select(x, 0.0) + tail)


def erf(x: Vector) -> Vector:
    """The error function: a polynomial up to 1, and 1 - 2^p(x) elsewhere."""
    a = abs(x)
    near = (a * a).polynomial(tables.ERF_32).times_plus(a, a)
    exponent = a.at_most(4.0).polynomial(tables.LOG2_ERFC_32)
    far = 1.0 - _moderate_exp(*_split_exp2(exponent))
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
    return positive_part(x) - tail * first * second


def _tail_factor(a: Vector) -> tuple[Vector, Vector]:
    """e^(a^2 / 2) a times the normal distribution at -a, and the error of that.

    With s = 1 / (a + shift) it is a s m(s), and m is a polynomial.
    """
    total = a + tables.NORMAL_TAIL_SHIFT
    lost = a - (total - tables.NORMAL_TAIL_SHIFT)
    s = 1.0 / total
    s_error = (-s).fused(lost, (-s).fused(total, 1.0))  # relative
    t = a * s
    t_error = t.fused(s_error, a.fused(s, -t))
    distance = s - tables.NORMAL_TAIL_CENTER
    slope = distance.polynomial(tables.NORMAL_TAIL_32[1:])
    m = slope.fused(distance, tables.NORMAL_TAIL_32[0])
    m_error = slope.fused(distance, tables.NORMAL_TAIL_32[0] - m)
    m_error = (s * slope).fused(s_error, m_error)
    product = t * m
    return product, t.fused(m_error, t_error.fused(m, t.fused(m, -product)))


def rsqrt(x: Vector) -> Vector:
    """1 / sqrt(x), from correctly rounded parts."""
    return 1.0 / x.sqrt()


def sin(x: Vector) -> Vector:
    """The sine; large angles come from the C library."""
    return rescued(is_large_angle(x), x.equals(0.0).select(x, _sine(x, 0)), "sin", x)


def cos(x: Vector) -> Vector:
    """The cosine; large angles come from the C library."""
    return rescued(is_large_angle(x), _sine(x, 1), "cos", x)


def _sine(x: Vector, quarters: int) -> Vector:
    """The sine of x and some right angles; the angle is reduced in doubles."""
    angle, count = reduced(x.to("double"))
    quadrant, r = count.to("i32") + quarters, angle.to("float")
    z = r * r
    sine = (r * z).times_plus(z.polynomial(tables.SIN_32), r)
    cosine = z.polynomial(tables.COS_32).times_plus(z, 1.0)
    size = (quadrant & 1).equals(0).select(sine, cosine)
    return (size.bits() ^ ((quadrant & 2) << 30)).bits()


def _split_exp(x: Vector) -> tuple[Vector, Vector]:
    """e^x as 2^whole (1 + q): an integer and a number, for |x| < 2^20."""
    whole, n = _rounded(x, tables.LOG2_E)
    r = n.times_plus(-tables.LN_2_HIGH_32, x)
    return whole, _small_expm1(n.times_plus(-tables.LN_2_LOW_32, r))


def _small_expm1(r: Vector) -> Vector:
    """e^r - 1 for |r| <= ln(2) / 2."""
    return r.polynomial(tables.EXP_32).times_plus(r * r, r)


def _split_exp2(x: Vector) -> tuple[Vector, Vector]:
    """2^x as 2^whole (1 + q): an integer and a number, for |x| < 2^20."""
    whole, n = _rounded(x, 1.0)
    r = x - n
    return whole, r.polynomial(tables.EXP2_32) * r


def _rounded(x: Vector, factor: float) -> tuple[Vector, Vector]:
    """x times a factor as an integer, and that as a float, for results up to 2^22."""
    shifted = x.times_plus(factor, tables.ROUNDER_32)
    bits = shifted.bits() - shifted.like(tables.ROUNDER_32).bits()
    return bits, shifted - tables.ROUNDER_32


def _moderate_exp(whole: Vector, q: Vector) -> Vector:
    """2^whole (1 + q) that is neither subnormal nor infinite."""
    return ((q + 1.0).bits() + (whole << 23)).bits()


def _powers_of_two(whole: Vector) -> tuple[Vector, Vector]:
    """Two normal numbers whose product is 2^whole, for |whole| < 250."""
    half = whole >> 1
    rest = whole - half
    return ((half + 127) << 23).bits(), ((rest + 127) << 23).bits()
