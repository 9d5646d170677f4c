"""Float32 functions computed in vectors of double and then rounded: simple and accurate. All take
and give doubles which are float32 numbers or near them; the caller converts."""

from __future__ import annotations

import math

from torchair.codegen.text import maths_tables as tables
from torchair.codegen.text.maths_vector import Vector, rescued

_LARGE_ANGLE = 2.0**20
_LARGE_QUOTIENT = 2.0**28


# ---- exponentials and logarithms ----


def exp(x: Vector) -> Vector:
    """e^x within 1e-15; x is cut to a range that exceeds that of float32."""
    scale, q = _split_exp(x)
    return scale.times_plus(q, scale)


def expm1(x: Vector) -> Vector:
    """e^x - 1."""
    scale, q = _split_exp(x)
    return scale.times_plus(q, scale - 1.0)


def _split_exp(x: Vector) -> tuple[Vector, Vector]:
    """e^x as scale (1 + q) with a power of two."""
    x = x.limit(-700.0, 700.0)
    shifted = x * tables.LOG2_E + tables.ROUNDER
    n = shifted - tables.ROUNDER
    r = (x - n * tables.LN_2_HIGH) - n * tables.LN_2_LOW
    q = r.polynomial(tables.EXP).times_plus(r * r, r)
    return ((shifted.bits() << 52) + (1023 << 52)).bits(), q


def log(x: Vector) -> Vector:
    """The natural logarithm within 1e-15, of normal doubles."""
    bits = x.bits()
    whole = (bits - 0x3FE6A09E667F3BCD) >> 52  # leaves a number from sqrt(1/2) to sqrt(2)
    f = (bits - (whole << 52)).bits() - 1.0
    n = (whole + x.like(tables.ROUNDER).bits()).bits() - tables.ROUNDER
    s = f / (f + 2.0)
    near_0 = (s * s).polynomial(tables.LOG).times_plus(s, n * tables.LN_2_LOW)
    return special_logarithms(x, n.times_plus(tables.LN_2_HIGH, near_0))


def special_logarithms(x: Vector, result: Vector) -> Vector:
    """The logarithm of what is not a positive finite number, else `result`."""
    result = (x < math.inf).select(result, x)
    result = x.equals(0.0).select(x.like(-math.inf), result)
    return (x < 0.0).select(x.like(math.nan), result)


def log1p(x: Vector) -> Vector:
    """log(1 + x), exact for small x: what the sum loses is added to the result."""
    u = x + 1.0
    lost = (abs(x) < 1.0).select(x - (u - 1.0), 0.0)
    return (log(u) + lost).signed(x)


def log2(x: Vector) -> Vector:
    """The logarithm to base 2."""
    return log(x) * tables.LOG2_E


def log10(x: Vector) -> Vector:
    """The logarithm to base 10."""
    return log(x) * 0.4342944819032518


def power(x: Vector, y: Vector) -> Vector:
    """x^y with the special cases of C."""
    size = exp(log(abs(x)) * y)
    is_one = x.equals(1.0) | y.equals(0.0) | (abs(x).equals(1.0) & abs(y).equals(math.inf))
    size = is_one.select(x.like(1.0), size)
    half = y * 0.5
    is_integer = y.equals(y.intrinsic("trunc"))
    is_odd = is_integer & half.differs(half.intrinsic("trunc"))
    size = (is_odd & (x.bits() < 0)).select(-size, size)
    no_root = (x < 0.0) & (x > -math.inf) & y.differs(y.intrinsic("trunc")) & y.equals(y)
    return no_root.select(x.like(math.nan), size)


# ---- hyperbolic functions and their inverses ----


def sinh(x: Vector) -> Vector:
    """The hyperbolic sine."""
    e = expm1(abs(x))
    return ((e + e / (e + 1.0)) * 0.5).signed(x)


def cosh(x: Vector) -> Vector:
    """The hyperbolic cosine."""
    e = exp(abs(x))
    return (e + 1.0 / e) * 0.5


def asinh(x: Vector) -> Vector:
    """The inverse of sinh."""
    a = abs(x)
    square = a * a
    infinite = a.equals(math.inf)
    inner = a + square / ((square + 1.0).sqrt() + 1.0)
    return log1p(infinite.select(a, inner)).signed(x)


def acosh(x: Vector) -> Vector:
    """The inverse of cosh; NaN below 1."""
    t = x - 1.0
    return log1p(t + t.sqrt() * (t + 2.0).sqrt())


def atanh(x: Vector) -> Vector:
    """The inverse of tanh; infinite at 1, NaN above."""
    a = abs(x)
    return (log1p(a * 2.0 / (1.0 - a)) * 0.5).signed(x)


# ---- the error function and the activations made of it ----


def erfc(x: Vector) -> Vector:
    """1 - erf(x), also where it is tiny."""
    a = abs(x).at_most(10.4)
    top, bottom = (a.polynomial(t) for t in tables.ERFC)
    tail = exp(-(a * a)) * top / bottom
    return (x < 0.0).select(2.0 - tail, tail)


def erfinv(x: Vector) -> Vector:
    """The inverse of erf, within 3e-9; NaN outside -1 to 1."""
    w = -log((1.0 - x) * (x + 1.0))
    distance = w.sqrt() - math.sqrt(5.0)
    top, bottom = (distance.polynomial(t) for t in tables.ERFINV_FAR)
    ratio = (w < 5.0).select(w.polynomial(tables.ERFINV_NEAR), top / bottom)
    return abs(x).equals(1.0).select(x * math.inf, x * ratio)


def gelu(x: Vector) -> Vector:
    """x times the normal distribution; NaN at -inf."""
    a = abs(x).at_most(14.6)
    return positive_part(x) - erfc(a * tables.ROOT_HALF) * a * 0.5


def positive_part(x: Vector) -> Vector:
    """x where it is not negative, else -0; but NaN at -inf, where x times 0 is meant."""
    return (x >= 0.0).select(x, x * 0.0)


# ---- angles ----


def reduced(x: Vector) -> tuple[Vector, Vector]:
    """x less a multiple of pi / 2, and that multiple modulo 4 and more in the low bits of i64.

    Within 2^-60 for |x| up to 2^20.
    """
    shifted = x * (2.0 / math.pi) + tables.ROUNDER
    n = shifted - tables.ROUNDER
    return (x - n * tables.HALF_PI_HIGH) - n * tables.HALF_PI_LOW, shifted.bits()


def is_large_angle(x: Vector) -> Vector:
    """Where `reduced` does not hold, and also at infinity."""
    return abs(x) > _LARGE_ANGLE


def tan(x: Vector) -> Vector:
    """The tangent."""
    r, quadrant = reduced(x)
    z = r * r
    sine = (r * z).times_plus(z.polynomial(tables.SIN), r)
    cosine = z.polynomial(tables.COS).times_plus(z, 1.0)
    swap = (quadrant & 1).equals(1)
    fast = swap.select(-cosine, sine) / swap.select(sine, cosine)
    fast = x.equals(0.0).select(x, fast)
    return rescued(is_large_angle(x), fast, "tan", x)


def atan2(y: Vector, x: Vector) -> Vector:
    """The angle of the point (x, y)."""
    a, b = abs(y), abs(x)
    steep = a > b
    short, long = steep.select(b, a), steep.select(a, b)
    same = (long > 0.0).select(long.like(1.0), 0.0)  # 0 / 0 is 0 here, and inf / inf is 1
    t = short.equals(long).select(same, short / long)
    z = t * t
    angle = (t * z).times_plus(z.polynomial(tables.ATAN), t)
    angle = steep.select(tables.PI / 2 - angle, angle)
    angle = (x.bits() < 0).select(tables.PI - angle, angle)
    return angle.signed(y)


def atan(x: Vector) -> Vector:
    """The inverse of tan."""
    return atan2(x, x.like(1.0))


def asin(x: Vector) -> Vector:
    """The inverse of sin; NaN outside -1 to 1."""
    return atan2(x, _other_leg(x))


def acos(x: Vector) -> Vector:
    """The inverse of cos; NaN outside -1 to 1."""
    return atan2(_other_leg(x), x)


def _other_leg(x: Vector) -> Vector:
    """sqrt(1 - x^2)."""
    return ((1.0 - x) * (x + 1.0)).sqrt()


# ---- remainders ----


def fmod(x: Vector, y: Vector) -> Vector:
    """The remainder with the sign of x; exact."""
    a, b = abs(x), abs(y)
    quotient = (a / b).intrinsic("trunc")
    rest = a - quotient * b  # all three are exact while the quotient is below 2^28
    hard = (a <= b * _LARGE_QUOTIENT).select(b, math.inf).equals(math.inf)
    return rescued(hard, rest.signed(x), "fmod", x, y)
