"""Values at the points of one thread: vectors of neighbours, each at a position of its own; and the
functions for which a GPU has approximate instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Nest, Store, expressions
from torchair.codegen.philox import FOUR
from torchair.codegen.sizes import BYTES, SizeArgument
from torchair.codegen.text.maths_vector import Vector
from torchair.codegen.text.maths_wide import LOG2_E, positive_part
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.philox import is_run
from torchair.codegen.text.point import Point, ValueKey, VectorSlot
from torchair.codegen.text.writer import Writer, lane_numbers


@dataclass(frozen=True)
class Spot(VectorSlot):
    """A vector of a thread: where it begins along the vector axis. A `mask` is an i1 here: whether
    the vector counts. If it does not, `index` is some place that can be read all the same."""

    index: str = "0"


class ThreadPoint(Point):
    """Writes values for one thread of a block. Slots are `Spot`s."""

    w: GpuWriter

    def __init__(
        self,
        w: GpuWriter,
        vector_axis: int,
        varies: set[int],
        given: Sequence[str] = (),
        axis_level: Mapping[int, int] | None = None,
        level: Mapping[int, int] | None = None,
        writes: str | None = None,
        aligned: frozenset[int] = frozenset(),
        rounded: frozenset[int] = frozenset(),
    ) -> None:
        """`writes` is an i1: whether this thread stores what is the same for the whole team.
        `aligned` are ids of accesses whose vectors begin at multiples of their size, `rounded` of
        functions that may be approximate."""
        super().__init__(w, vector_axis, varies, given, axis_level, level)
        self.writes = writes
        self.aligned = aligned
        self.rounded = rounded

    @contextmanager
    def known(self, values: dict[ValueKey, str]) -> Iterator[None]:
        """A scope that can be left and entered again: its values are in this dict."""
        self._scopes.append(values)
        yield
        self._scopes.pop()

    def spot(self, slot: int) -> Spot:
        """Where a vector of the thread is."""
        spot = self.slots[slot]
        assert isinstance(spot, Spot)
        return spot

    def _position(self, x: Expr, slot: int) -> str:
        if x.data != self.vector_axis:
            return self.index[x.data]
        start = self.spot(slot).index
        lanes = lane_numbers(self.lanes, 64, 1, 0)
        first = self.w.splat("i64", start)
        return lanes if start == "0" else self.w(f"add {self.w.vector('i64')} {first}, {lanes}")

    def _computed(self, x: Expr, slot: int) -> str:
        function, argument = x.kind, x.args[:1]
        if _is_inverse_root(x):
            function, argument = "rsqrt", x.args[1].args
        corrected = function in CORRECTED and x.dtype == "f32"
        if id(x) not in self.rounded and not corrected:
            return super()._computed(x, slot)
        lanes = self.lanes if id(x) in self.varies else 0
        arg = self.vector(argument[0], slot) if lanes else self.value(argument[0])
        return written(self.w, function, arg, lanes)

    def _together(self, position: Expr) -> int:
        count = min(FOUR, self.lanes)
        whole = bool(self.aligned)  # vectors begin at multiples of their lanes
        return count if whole and is_run(position, self.vector_axis, count) else 1

    def _lanes_of(self, slot: int) -> str | None:
        """All: a vector that does not count repeats one that does, so that its failures are true
        ones, and its stores are left out as a whole."""
        return None

    # ---- memory ----

    def _axis_level(self, axis: int) -> int | None:
        """An address is that of all vectors of the thread: each has its own place along the vector
        axis."""
        return None if axis == self.vector_axis else super()._axis_level(axis)

    def _at_slot(self, place: Access, slot: int) -> str:
        w, stride = self.w, place.strides[self.vector_axis]
        far = w.mul(self.spot(slot).index, w.size(stride))
        return w.offset(self.pointer(place), memory_element(place.dtype), far)

    def _steps(self, stride: int | SizeArgument) -> str:
        if not isinstance(stride, SizeArgument):
            return lane_numbers(self.lanes, 64, stride)
        w = self.w
        all_ = w.splat("i64", w.size(stride))
        return w(f"mul {w.vector('i64')} {all_}, {lane_numbers(self.lanes, 64)}")

    def _alignment(self, place: Access) -> int:
        whole = id(place) in self.aligned
        return BYTES[place.dtype] * (self.lanes if whole else 1)

    def store(self, what: Store, slot: int = 0) -> None:
        """Nothing is stored for vectors that do not count, and once for a team what is its own."""
        counts = self.spot(slot).mask if self.stores_vectors(what) else self.writes
        if counts is None:
            super().store(what, slot)
            return
        # What a store needs is known outside of it too, where that is cheap to have.
        self.value(what.value, slot)
        with self.w.when(counts), self.scope():
            super().store(what, slot)


def _is_inverse_root(x: Expr) -> bool:
    """Whether it is 1 / sqrt(y)."""
    if x.kind != "div" or x.args[1].kind != "sqrt":
        return False
    return x.args[0].kind == "const" and x.args[0].data == 1.0


# ---- approximate functions: within 2^-15 of the true value, for results that become bfloat16 ----


_SPARE = 60  # powers of two that keep a sum with e^125 finite
_LOG2_TAIL = (
    -0.9999867677688599,
    -1.1514426469802856,
    -0.4577798545360565,
    -0.05487241595983505,
    0.009100180119276047,
    -0.0011404914548620582,
    0.00010391662362962961,
    -6.603251222259132e-06,
    2.754900094714685e-07,
    -6.752101100460095e-09,
    7.346423469556385e-11,
)
"""log2(erfc(x / sqrt(2)) / 2) for x from 0 to 14.6; 2^-16."""
_TANH = (-0.33328208327293396, 0.13208740949630737, -0.044912438839673996)
"""(tanh(x) / x - 1) / z with z = x^2 for |x| <= 0.5; 2^-19."""


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
    return total.each("llvm.nvvm.rcp.approx.ftz.f") * 2.0**-_SPARE


def _tanh(x: Vector) -> Vector:
    """A polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere."""
    a = abs(x)
    z = a * a
    near = (a * z).times_plus(z.polynomial(_TANH), a)
    total = (a.at_most(10.0) * (2.0 * LOG2_E)).each("llvm.nvvm.ex2.approx.ftz.f") + 1.0
    far = 1.0 - total.each("llvm.nvvm.rcp.approx.ftz.f") * 2.0
    return (a >= 0.5).select(far, near).signed(x)


def _exp(x: Vector) -> Vector:
    return _exp2(x.limit(-105.0, 90.0) * LOG2_E)


def _exp2(x: Vector) -> Vector:
    return x.each("llvm.nvvm.ex2.approx.f")


def _rsqrt(x: Vector) -> Vector:
    """1 / sqrt(x), with a step of Newton's method where that is a number."""
    y = x.each("llvm.nvvm.rsqrt.approx.f")
    better = (y * 0.5).fused((-x * y).fused(y, 1.0), y)
    return better.equals(better).select(better, y)


CORRECTED: dict[str, Callable[[Vector], Vector]] = {"rsqrt": _rsqrt}
APPROXIMATE: dict[str, Callable[[Vector], Vector]] = {
    "exp": _exp,
    "gelu": _gelu,
    "sigmoid": _over_one_plus_exp,
    "silu": _silu,
    "tanh": _tanh,
}
