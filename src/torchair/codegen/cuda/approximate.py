"""Functions by the approximate instructions of GPUs: those whose results are rounded to bfloat16 at
once, within 2^-15 of the true value, and such as are corrected to what the maths library gives.
"""

from __future__ import annotations

from collections.abc import Callable

from torchair.codegen.loops import Nest, expressions
from torchair.codegen.text.maths_vector import Vector
from torchair.codegen.text.maths_wide import LOG2_E, positive_part
from torchair.codegen.text.writer import Writer

_SPARE = 60  # powers of two that keep a sum with e^125 finite
_LOG2_TAIL = (
    -0.9999867677688599, -1.1514426469802856, -0.4577798545360565, -0.05487241595983505,
    0.009100180119276047, -0.0011404914548620582, 0.00010391662362962961,
    -6.603251222259132e-06, 2.754900094714685e-07, -6.752101100460095e-09,
    7.346423469556385e-11,
)  # fmt: skip
"""log2(erfc(x / sqrt(2)) / 2) for x from 0 to 14.6; 2^-16."""


def written(w: Writer, name: str, arg: str, lanes: int) -> str:
    """Write a function of these tables over a vector of floats, or over a scalar for no lanes."""
    formula = CORRECTED.get(name) or APPROXIMATE[name]
    if lanes:
        return formula(Vector(w, lanes, "float", arg)).name
    single = w(f"insertelement <1 x float> poison, float {arg}, i32 0")
    result = formula(Vector(w, 1, "float", single))
    return w(f"extractelement <1 x float> {result.name}, i32 0")


def rounded_at_once(nest: Nest) -> set[int]:
    """Ids of the functions in a nest that have a formula here and whose every reader rounds them
    to bfloat16."""
    order = expressions(nest)
    found = {id(x) for x in order if x.kind in APPROXIMATE and x.dtype == "f32"}
    for x in order:
        if (x.kind, x.data) != ("narrow", "bf16") and (x.kind, x.dtype) != ("cast", "bf16"):
            found -= {id(a) for a in x.args}
        if x.kind == "load":  # a place that is computed
            found -= {id(a) for a in (x.data.extra, x.data.mask) if a is not None}
    for s in nest.stores:
        others = [a for a in (s.access.extra, s.access.mask) if a is not None]
        found -= {id(a) for a in ([*others] if s.access.dtype == "bf16" else [*others, s.value])}
    return found


def _gelu(x: Vector) -> Vector:
    """The positive part of x less a tail; NaN at -inf."""
    a = abs(x).at_most(14.6)
    return positive_part(x) - a * _exp2(a.polynomial(_LOG2_TAIL))


def _silu(x: Vector) -> Vector:
    return x * _over_one_plus_exp(x)


def _over_one_plus_exp(x: Vector) -> Vector:
    """1 / (1 + e^-x), with gradual underflow."""
    limited = (-x).limit(-105.0, 125.0)
    total = _exp2(limited.times_plus(LOG2_E, -float(_SPARE))) + 2.0**-_SPARE
    return _each("llvm.nvvm.rcp.approx.ftz.f", total) * 2.0**-_SPARE


def _exp(x: Vector) -> Vector:
    return _exp2(x.limit(-105.0, 90.0) * LOG2_E)


def _exp2(x: Vector) -> Vector:
    return _each("llvm.nvvm.ex2.approx.f", x)


def _each(function: str, x: Vector) -> Vector:
    """An instruction for one lane after the other."""
    w, made = x.w, "poison"
    for lane in range(x.lanes):
        one = w(f"extractelement {x.type} {x.name}, i32 {lane}")
        one = w.call("float", function, ("float", one))
        made = w(f"insertelement {x.type} {made}, float {one}, i32 {lane}")
    return x.of("float", made)


def _rsqrt(x: Vector) -> Vector:
    """1 / sqrt(x), with a step of Newton's method where that is a number."""
    y = _each("llvm.nvvm.rsqrt.approx.f", x)
    better = (y * 0.5).fused((-x * y).fused(y, 1.0), y)
    return better.equals(better).select(better, y)


CORRECTED: dict[str, Callable[[Vector], Vector]] = {"rsqrt": _rsqrt}
APPROXIMATE: dict[str, Callable[[Vector], Vector]] = {
    "exp": _exp, "gelu": _gelu, "sigmoid": _over_one_plus_exp, "silu": _silu,
}  # fmt: skip
