"""Float32 functions computed in vectors of double and then rounded: simple and accurate. All take
and give doubles which are float32 numbers or near them; the caller converts.

Before them are the constants of all formulas: minimax polynomials, lowest power first, each with
its largest error before rounding, relative to the function that it serves. Tables of float32
numbers have `32` in their name.
"""

from __future__ import annotations

import math

from torchair.codegen.text.maths_vector import Vector, rescued

LOG2_E = 1.4426950408889634
PI = 3.141592653589793
ROOT_HALF = 0.7071067811865476
SMALLEST_NORMAL_32 = 2.0**-126

# Adding it rounds a number to an integer, which is then in the low bits.
ROUNDER_32 = 1.5 * 2.0**23
ROUNDER = 1.5 * 2.0**52

# ln 2 and pi / 2 as sums; a small integer times the first part is exact.
LN_2_HIGH_32 = 0.693359375
LN_2_LOW_32 = -2.12194440e-4
LN_2_HIGH = 6.93147180369123816490e-01
LN_2_LOW = 1.90821492927058770002e-10
HALF_PI_HIGH = 1.57079632673412561417e00
HALF_PI_LOW = 6.07710050650619224932e-11

EXP_32 = (
    0.4999999403953552,
    0.16666516661643982,
    0.04166810214519501,
    0.008369166404008865,
    0.0013838030863553286,
)
"""(exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2; 2^-28."""

EXP2_32 = (
    0.6931472420692444,
    0.24022692441940308,
    0.055502891540527344,
    0.009614177979528904,
    0.0013408897211775184,
    0.00016259291442111135,
)
"""(2^r - 1) / r for |r| <= 1/2; 2^-26."""

LOG_32 = (
    -0.5,
    0.3333333432674408,
    -0.24999810755252838,
    0.1999976485967636,
    -0.1668008714914322,
    0.14298947155475616,
    -0.12187893688678741,
    0.10822231322526932,
    -0.12881188094615936,
    0.11728662252426147,
)
"""(log(1 + f) - f) / f^2 for f from -1/3 to 1/3; 2^-29."""

TANH_32 = (
    -0.3333330452442169,
    0.13332071900367737,
    -0.05379495397210121,
    0.020830117166042328,
    -0.005932014901190996,
)
"""(tanh(x) / x - 1) / z with z = x^2 for |x| <= 0.6; 2^-28."""

ERF_32 = (
    0.12837916612625122,
    -0.3761262893676758,
    0.11283618211746216,
    -0.02685512602329254,
    0.005190733354538679,
    -0.0008030750323086977,
    7.920303323771805e-05,
)
"""erf(x) / x - 1 over z = x^2 for |x| <= 1; 2^-29."""

LOG2_ERFC_32 = (
    -0.0005103199509903789,
    -1.6259750127792358,
    -0.9207651615142822,
    -0.14865131676197052,
    0.0314582958817482,
    -0.004240911453962326,
    0.0002677203738130629,
)
"""log2(erfc(x)) for x from 1 to 4; error of erf 2^-29."""

SIN_32 = (-0.1666666716337204, 0.008333380334079266, -0.0001985349808819592, 2.837246938725002e-06)
"""(sin(x) / x - 1) / z with z = x^2 for |x| <= pi / 4; 2^-32."""

COS_32 = (-0.5, 0.04166664555668831, -0.00138873013202101, 2.4430670237052254e-05)
"""(cos(x) - 1) / z with z = x^2 for |x| <= pi / 4; 2^-33."""

NORMAL_TAIL_SHIFT = 2.5
NORMAL_TAIL_CENTER = 0.232421875
NORMAL_TAIL_32 = (
    0.7803803086280823,
    2.3774220943450928,
    3.125103235244751,
    -2.4054696559906006,
    -8.880178451538086,
    11.303755760192871,
    24.589736938476562,
    -73.35881042480469,
    -31.673721313476562,
    307.6064758300781,
)
"""exp(x^2 / 2) (x + shift) times the normal distribution at -x, over 1 / (x + shift) - center,
for x from 0 to 14.6; 2^-26."""

EXP = (
    0.500000000000001,
    0.16666666666666674,
    0.04166666666652209,
    0.008333333333322215,
    0.001388888894778906,
    0.0001984126988656652,
    2.4801487362024884e-05,
    2.755724236437314e-06,
    2.76326421837522e-07,
    2.5110039456587972e-08,
)
"""(exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2; 2^-57."""

LOG = (
    2.0,
    0.6666666666666734,
    0.39999999999413977,
    0.2857142874255989,
    0.22222198553931347,
    0.18183565402874022,
    0.1531402117019004,
    0.1479626111402704,
)
"""log((1 + s) / (1 - s)) / s over z = s^2 for |s| <= 0.1716; 2^-59."""

SIN = (
    -0.16666666666666632,
    0.008333333333322314,
    -0.00019841269829725124,
    2.7557313662036324e-06,
    -2.5050753261922702e-08,
    1.5896504822370115e-10,
)
"""(sin(x) / x - 1) / z with z = x^2 for |x| <= pi / 4; 2^-58."""

COS = (
    -0.5,
    0.04166666666660161,
    -0.0013888888878189202,
    2.4801580933649183e-05,
    -2.755556012754846e-07,
    2.0647281408450946e-09,
)
"""(cos(x) - 1) / z with z = x^2 for |x| <= pi / 4; 2^-53."""

ATAN = (
    -0.3333333313025117, 0.1999998533510069, -0.14285343380592183, 0.11106370006539482,
    -0.09054955040843317, 0.07515385375552192, -0.06068695154711544, 0.044367079521360875,
    -0.026746141772473954, 0.011911168818629433, -0.0033772880989043335, 0.0004492048298129842,
)  # fmt: skip
"""(atan(x) / x - 1) / z with z = x^2 for |x| <= 1; 2^-36."""

ERFC = (
    (
        1.0000000004265026,
        1.0518532705225818,
        0.5432863437322981,
        0.13828132456138692,
        0.01230701568614746,
        -0.0011131232055525456,
        4.043892522292935e-05,
        -8.064355621193608e-07,
    ),
    (
        1.0,
        2.1802324887023805,
        2.00341427453515,
        0.9709200823301525,
        0.2445138861434913,
        0.021809606860396107,
        -0.0019710320497724914,
        7.1571799292439e-05,
        -1.4275264851681938e-06,
    ),
)
"""exp(x^2) erfc(x) as p / q for x from 0 to 10.4; 2^-31."""

ERFINV_NEAR = (
    0.8862269260495474, 0.2320136332062283, 0.011549648961531057, -0.002336200755976256,
    -0.00012603663680658907, 4.4500444881964395e-05, 3.36755814884431e-06,
    -1.5300747235642398e-06, 6.74186599493491e-08, 2.034886917425306e-08,
    -2.931668923978763e-09, 1.224667029602716e-10,
)  # fmt: skip
"""erfinv(x) / x over w = -log(1 - x^2) from 0 to 5; 2^-30."""

ERFINV_FAR = (
    (
        2.079812755007685,
        3.482867690977787,
        3.5500948978482265,
        2.5760701985541474,
        1.484881853872111,
        0.4173627335246347,
        0.019653437165181843,
    ),
    (
        1.0,
        1.2150902003469948,
        1.1156976571894235,
        0.7114613262980486,
        0.37165908126534686,
        0.019730026012458598,
    ),
)
"""erfinv(x) / x as p / q over sqrt(w) - sqrt(5), w = -log(1 - x^2) from 5 to 36; 2^-28."""

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
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    q = r.polynomial(EXP).times_plus(r * r, r)
    return ((shifted.bits() << 52) + (1023 << 52)).bits(), q


def log(x: Vector) -> Vector:
    """The natural logarithm within 1e-15, of normal doubles."""
    bits = x.bits()
    whole = (bits - 0x3FE6A09E667F3BCD) >> 52  # leaves a number from sqrt(1/2) to sqrt(2)
    f = (bits - (whole << 52)).bits() - 1.0
    n = (whole + x.like(ROUNDER).bits()).bits() - ROUNDER
    s = f / (f + 2.0)
    near_0 = (s * s).polynomial(LOG).times_plus(s, n * LN_2_LOW)
    return special_logarithms(x, n.times_plus(LN_2_HIGH, near_0))


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
    return log(x) * LOG2_E


def log10(x: Vector) -> Vector:
    """The logarithm to base 10."""
    return log(x) * 0.4342944819032518


def power(x: Vector, y: Vector) -> Vector:
    """x^y with the special cases of C."""
    size = exp(log(abs(x)) * y)
    is_one = x.equals(1.0) | y.equals(0.0) | (abs(x).equals(1.0) & abs(y).equals(math.inf))
    size = is_one.select(x.like(1.0), size)
    half = y * 0.5
    is_odd = y.equals(y.intrinsic("trunc")) & half.differs(half.intrinsic("trunc"))
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
    return log1p(infinite.select(a, a + square / ((square + 1.0).sqrt() + 1.0))).signed(x)


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
    top, bottom = (a.polynomial(t) for t in ERFC)
    tail = exp(-(a * a)) * top / bottom
    return (x < 0.0).select(2.0 - tail, tail)


def erfinv(x: Vector) -> Vector:
    """The inverse of erf, within 3e-9; NaN outside -1 to 1."""
    w = -log((1.0 - x) * (x + 1.0))
    distance = w.sqrt() - math.sqrt(5.0)
    top, bottom = (distance.polynomial(t) for t in ERFINV_FAR)
    ratio = (w < 5.0).select(w.polynomial(ERFINV_NEAR), top / bottom)
    return abs(x).equals(1.0).select(x * math.inf, x * ratio)


def gelu(x: Vector) -> Vector:
    """x times the normal distribution; NaN at -inf."""
    a = abs(x).at_most(14.6)
    return positive_part(x) - erfc(a * ROOT_HALF) * a * 0.5


def positive_part(x: Vector) -> Vector:
    """x where it is not negative, else -0; but NaN at -inf, where x times 0 is meant."""
    return (x >= 0.0).select(x, x * 0.0)


# ---- angles ----


def reduced(x: Vector) -> tuple[Vector, Vector]:
    """x less a multiple of pi / 2, and that multiple modulo 4 and more in the low bits of i64.

    Within 2^-60 for |x| up to 2^20.
    """
    shifted = x * (2.0 / math.pi) + ROUNDER
    n = shifted - ROUNDER
    return (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW, shifted.bits()


def is_large_angle(x: Vector) -> Vector:
    """Where `reduced` does not hold, and also at infinity."""
    return abs(x) > _LARGE_ANGLE


def tan(x: Vector) -> Vector:
    """The tangent."""
    r, quadrant = reduced(x)
    z = r * r
    sine = (r * z).times_plus(z.polynomial(SIN), r)
    cosine = z.polynomial(COS).times_plus(z, 1.0)
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
    angle = (t * z).times_plus(z.polynomial(ATAN), t)
    angle = steep.select(PI / 2 - angle, angle)
    angle = (x.bits() < 0).select(PI - angle, angle)
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
