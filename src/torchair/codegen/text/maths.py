"""The vector maths library: functions of float32 and float64 vectors, written into a kernel.
Float32 results are within 2 ulp of the true value; float64 ones come from the C library, lane by
lane, and are there to be right and not to be fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.text import maths_fast as fast
from torchair.codegen.text import maths_wide as wide
from torchair.codegen.text.maths_tables import ROOT_HALF
from torchair.codegen.text.maths_vector import Vector, by_lane
from torchair.codegen.text.writer import Writer

Formula = Callable[..., Vector]


@dataclass(frozen=True)
class Function:
    """A function of `operands` vectors: its formulas over float32 and over float64."""

    operands: int
    single: Formula
    double: Formula


def apply(
    w: Writer, name: str, args: Sequence[str], element: str = "f32", lanes: int | None = None
) -> str:
    """Write a function of FUNCTIONS over vectors `<lanes x float>` or, for element "f64",
    `<lanes x double>`; the result is the name of the vector of results.

    `softplus` also takes beta and threshold, as vectors; it is fast if beta is the literal 1
    (`w.splat("float", f32(1.0))`).
    Some functions open new blocks, so do not keep the label of a block across this call.
    """
    function = FUNCTIONS[name]
    if len(args) != function.operands:
        raise ValueError(f"{name} takes {function.operands} operands, not {len(args)}")
    kind, formula = {"f32": ("float", function.single), "f64": ("double", function.double)}[element]
    count = w.lanes if lanes is None else lanes
    return formula(*(Vector(w, count, kind, arg) for arg in args)).name


def _widened(formula: Formula) -> Formula:
    """A formula over doubles as one over float32."""

    def narrow(*args: Vector) -> Vector:
        return formula(*(arg.to("double") for arg in args)).to("float")

    return narrow


def _library(name: str) -> Formula:
    """A function of the C library."""
    return lambda *args: by_lane(name, *args)


def _instruction(name: str) -> Formula:
    """An LLVM intrinsic with one operand."""
    return lambda x: x.intrinsic(name)


# ---- formulas for both ----


def _gelu(x: Vector) -> Vector:
    """The float32 formula for this machine: the fast one needs fused multiply-add."""
    return fast.gelu(x) if x.w.machine.fma else _widened(wide.gelu)(x)


def _softplus_single(x: Vector, beta: Vector, threshold: Vector) -> Vector:
    """The float32 formula: a faster one where beta is the literal 1."""
    if beta.name == x.like(1.0).name:
        return fast.softplus(x, threshold)
    return _widened(wide.softplus)(x, beta, threshold)


def _remainder(x: Vector, y: Vector) -> Vector:
    """The remainder with the sign of y, as in Python."""
    rest = (_widened(wide.fmod) if x.kind == "float" else _library("fmod"))(x, y)
    wrong = rest.differs(0.0) & ((rest < 0.0) ^ (y < 0.0))
    return wrong.select(rest + y, rest)


def _reciprocal(x: Vector) -> Vector:
    return 1.0 / x


# ---- float64 formulas over the C library ----


def _sigmoid(x: Vector) -> Vector:
    e = by_lane("exp", -abs(x))
    return (x < 0.0).select(e, 1.0) / (e + 1.0)


def _silu(x: Vector) -> Vector:
    return x * _sigmoid(x)


def _gelu_double(x: Vector) -> Vector:
    return x * 0.5 * by_lane("erfc", x * -ROOT_HALF)


def _gelu_tanh(x: Vector) -> Vector:
    inner = (x * x * 0.044715 + 1.0) * x * math.sqrt(2.0 / math.pi)
    return x * _sigmoid(inner * 2.0)


def _softplus(x: Vector, beta: Vector, threshold: Vector) -> Vector:
    scaled = x * beta
    return (scaled > threshold).select(x, _logaddexp(scaled, x.like(0.0)) / beta)


def _logaddexp(x: Vector, y: Vector) -> Vector:
    distance = x.equals(y).select(x.like(0.0), abs(x - y))
    return (x > y).select(x, y) + by_lane("log1p", by_lane("exp", -distance))


def _erfinv(x: Vector) -> Vector:
    """Two steps of Newton's method from the float32 formula, with erfc where |x| is near 1."""
    a = abs(x)
    y = wide.erfinv(a)
    for _ in range(2):
        error = (a < 0.5).select(a - by_lane("erf", y), by_lane("erfc", y) - (1.0 - a))
        step = error * by_lane("exp", y * y) * (0.5 * math.sqrt(math.pi))
        y = (y < math.inf).select(y + step, y)
    return y.signed(x)


_IN_FLOATS = (
    fast.exp, fast.exp2, fast.expm1, fast.log, fast.tanh, fast.erf, fast.sin, fast.cos,
)  # fmt: skip
_IN_DOUBLES = (
    wide.log2, wide.log10, wide.log1p, wide.erfc, wide.tan, wide.atan, wide.asin, wide.acos,
    wide.sinh, wide.cosh, wide.asinh, wide.acosh, wide.atanh,
)  # fmt: skip
_OF_THE_C_LIBRARY: dict[str, Formula] = {
    **{formula.__name__: formula for formula in _IN_FLOATS},
    **{formula.__name__: _widened(formula) for formula in _IN_DOUBLES},
    "lgamma": _library("lgamma"),
}  # float32 formulas of functions that the C library has for float64

FUNCTIONS: dict[str, Function] = {
    **{name: Function(1, single, _library(name)) for name, single in _OF_THE_C_LIBRARY.items()},
    "sigmoid": Function(1, fast.sigmoid, _sigmoid),
    "silu": Function(1, fast.silu, _silu),
    "gelu": Function(1, _gelu, _gelu_double),
    "gelu_tanh": Function(1, fast.gelu_tanh, _gelu_tanh),
    "softplus": Function(3, _softplus_single, _softplus),
    "logaddexp": Function(2, _widened(wide.logaddexp), _logaddexp),
    "erfinv": Function(1, _widened(wide.erfinv), _erfinv),
    "atan2": Function(2, _widened(wide.atan2), _library("atan2")),
    "pow": Function(2, _widened(wide.power), _library("pow")),
    "fmod": Function(2, _widened(wide.fmod), _library("fmod")),
    "remainder": Function(2, _remainder, _remainder),
    "rsqrt": Function(1, fast.rsqrt, fast.rsqrt),
    "reciprocal": Function(1, _reciprocal, _reciprocal),
    "sqrt": Function(1, Vector.sqrt, Vector.sqrt),
    "floor": Function(1, _instruction("floor"), _instruction("floor")),
    "ceil": Function(1, _instruction("ceil"), _instruction("ceil")),
    "trunc": Function(1, _instruction("trunc"), _instruction("trunc")),
    "round": Function(1, _instruction("roundeven"), _instruction("roundeven")),
}
"""The functions of this library by name; what `apply` can write."""
