"""Values at the points of one thread: vectors of neighbours, each at a position of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchair.codegen.cuda import approximate
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.loops import Access, Expr, Store
from torchair.codegen.numbers import BYTES, Word
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.point import Point, Slot
from torchair.codegen.text.writer import lane_numbers


@dataclass(frozen=True)
class Spot(Slot):
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

    def _spot(self, slot: int) -> Spot:
        spot = self.slots[slot]
        assert isinstance(spot, Spot)
        return spot

    def _position(self, x: Expr, slot: int) -> str:
        if x.data != self.vector_axis:
            return self.index[x.data]
        start = self._spot(slot).index
        lanes = lane_numbers(self.lanes, 64, 1, 0)
        first = self.w.splat("i64", start)
        return lanes if start == "0" else self.w(f"add {self.w.vector('i64')} {first}, {lanes}")

    def _computed(self, x: Expr, slot: int) -> str:
        function, argument = x.kind, x.args[:1]
        if _is_inverse_root(x):
            function, argument = "rsqrt", x.args[1].args
        corrected = function in approximate.CORRECTED and x.dtype == "f32"
        if id(x) not in self.rounded and not corrected:
            return super()._computed(x, slot)
        lanes = self.lanes if id(x) in self.varies else 0
        arg = self.vector(argument[0], slot) if lanes else self.value(argument[0])
        return approximate.written(self.w, function, arg, lanes)

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
        far = w.mul(self._spot(slot).index, w.size(stride))
        return w.offset(self.pointer(place), memory_element(place.dtype), far)

    def _steps(self, stride: int | Word) -> str:
        if not isinstance(stride, Word):
            return lane_numbers(self.lanes, 64, stride)
        w = self.w
        all_ = w.splat("i64", w.size(stride))
        return w(f"mul {w.vector('i64')} {all_}, {lane_numbers(self.lanes, 64)}")

    def _alignment(self, place: Access) -> int:
        whole = id(place) in self.aligned
        return BYTES[place.dtype] * (self.lanes if whole else 1)

    def store(self, what: Store, slot: int = 0) -> None:
        """Nothing is stored for vectors that do not count, and once for a team what is its own."""
        counts = self._spot(slot).mask if self.stores_vectors(what) else self.writes
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
