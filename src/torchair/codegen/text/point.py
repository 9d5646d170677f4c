"""Values of expressions at one point of a loop nest: a vector of points along the vector axis.

A value that does not vary along the vector axis is a scalar until a vector needs it. What was
written stays known in the scope it was written in, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchair.codegen.loops import OPERATORS, Access, Expr, Nest, Store, expressions
from torchair.codegen.sizes import BYTES, Size, SizeArgument, register_type
from torchair.codegen.text import memory, philox, writer
from torchair.codegen.text.operators import function, operate
from torchair.codegen.text.writer import REGISTER, KernelWriter, lane_numbers

ValueKey = tuple[object, ...]
"""Under what a written value is found again."""


@dataclass(frozen=True)
class VectorSlot:
    """One of several vectors at a time: how many elements behind the first, and its lanes."""

    shift: int = 0
    mask: str | None = None


def varying(
    order: Iterable[Expr], vector_axis: int, reduced: frozenset[int] = frozenset()
) -> set[int]:
    """Which of these expressions, operands first, vary along the vector axis, by id."""
    found: set[int] = set()
    for x in order:
        if x.kind == "axis":
            varies = x.data == vector_axis
        elif x.kind == "load":
            varies = place_varies(x.data, vector_axis, found)
        elif x.kind == "reduce":
            varies = vector_axis not in reduced and id(x.args[0]) in found
        else:
            varies = x.kind == "given" or any(id(a) in found for a in x.args)
        if varies:
            found.add(id(x))
    return found


def place_varies(place: Access, vector_axis: int, found: set[int]) -> bool:
    """Whether the elements of an access differ along the vector axis."""
    return place.strides[vector_axis] != 0 or any(
        id(e) in found for e in (place.extra, place.mask) if e is not None
    )


class Point:
    """Writes values at the position that `index` and `slots` say.

    `axis_level` and `level` tell in which loop around an axis or a value becomes known, so that
    addresses are built up loop by loop; without them everything is known at once.
    """

    def __init__(
        self,
        w: KernelWriter,
        vector_axis: int,
        varies: set[int],
        given: Sequence[str] = (),
        axis_level: Mapping[int, int] | None = None,
        level: Mapping[int, int] | None = None,
    ) -> None:
        self.w = w
        self.lanes = w.lanes
        self.vector_axis = vector_axis
        self.varies = varies
        self.given = given
        self.axis_level = axis_level or {}
        self.level = level or {}
        self.index: dict[int, str] = {}
        self.slots: list[VectorSlot] = [VectorSlot()]
        self.sources: dict[int, Callable[[int], str]] = {}  # values that are kept elsewhere
        self._scopes: list[dict[ValueKey, str]] = [{}]

    # ---- what is known ----

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A part of the code whose values are not known after it."""
        self._scopes.append({})
        yield
        self._scopes.pop()

    def find(self, key: ValueKey) -> str | None:
        """A value written before, if it is known here."""
        for known in reversed(self._scopes):
            if key in known:
                return known[key]
        return None

    def keep(self, key: ValueKey, value: str) -> str:
        """Remember a value in the innermost scope."""
        self._scopes[-1][key] = value
        return value

    # ---- values ----

    def key(self, x: Expr, slot: int) -> ValueKey:
        """Under what the value of an expression is known."""
        return (id(x), slot) if id(x) in self.varies else (id(x),)

    def value(self, x: Expr, slot: int = 0) -> str:
        """A scalar, or a vector if the expression varies along the vector axis."""
        if x.kind == "const":
            return writer.number(x.data, x.dtype)
        key = self.key(x, slot)
        return self.find(key) or self.keep(key, self._written(x, slot))

    def vector(self, x: Expr, slot: int = 0) -> str:
        """The value as a vector."""
        if x.kind == "const":
            return writer.literal(x.data, x.dtype, self.lanes)
        if id(x) in self.varies:
            return self.value(x, slot)
        key = ("splat", id(x))
        return self.find(key) or self.keep(key, self.w.splat(REGISTER[x.dtype], self.value(x)))

    def _written(self, x: Expr, slot: int) -> str:
        if id(x) in self.sources:
            return self.sources[id(x)](slot)
        if x.kind == "size":
            return self.w.size(x.data)
        if x.kind == "given":
            return self.given[x.data]
        if x.kind == "axis":
            return self._position(x, slot)
        if x.kind == "load":
            return self._load(x.data, slot, id(x) in self.varies)
        return self._computed(x, slot)

    def _position(self, x: Expr, slot: int) -> str:
        if x.data != self.vector_axis:
            return self.index[x.data]
        lanes = lane_numbers(self.lanes, 64, 1, self.slots[slot].shift)
        start = self.index[x.data]
        if start == "0":
            return lanes
        first = self.find(("start",)) or self.keep(("start",), self.w.splat("i64", start))
        return self.w(f"add {self.w.vector('i64')} {first}, {lanes}")

    def _computed(self, x: Expr, slot: int) -> str:
        w = self.w
        lanes = self.lanes if id(x) in self.varies else 0
        if x.kind == "philox":
            return self._random(x, lanes, slot)
        args = [self.vector(a, slot) if lanes else self.value(a) for a in x.args]
        if x.kind == "verify":
            return self._verify(x, args[0], lanes, slot)
        if x.kind == "narrow":
            return memory.narrow(w, args[0], x.data, lanes)
        if x.kind == "cast":
            return writer.convert(w, args[0], x.args[0].dtype, x.dtype, lanes)
        if x.kind in OPERATORS:
            return operate(w, x, args, lanes)
        return function(w, x.kind, args, x.dtype, lanes)

    def _random(self, x: Expr, lanes: int, slot: int) -> str:
        """Numbers of a generator whose state is the same for all lanes."""
        seed, offset = (self.value(a) for a in x.args[:2])
        place = self.vector(x.args[2], slot) if lanes else self.value(x.args[2])
        together = self._together(x.args[2]) if lanes else 1
        return philox.written(self.w, seed, offset, place, x.data, lanes, together)

    def _together(self, position: Expr) -> int:
        """How many neighbours of a vector have successive positions from a multiple on."""
        return 1

    def _verify(self, x: Expr, test: str, lanes: int, slot: int) -> str:
        """A test of which a failure is noted down."""
        w, kind = self.w, (f"<{lanes} x i1>" if lanes else "i1")
        wrong = w(f"xor {kind} {test}, {'splat (i1 true)' if lanes else 'true'}")
        if lanes:
            mask = self._lanes_of(slot)
            if mask is not None:
                wrong = w(f"and {kind} {wrong}, {mask}")
            wrong = w.call("i1", f"llvm.vector.reduce.or.v{lanes}i1", (kind, wrong))
        with w.when(wrong):
            w.do(f"store i64 1, ptr {w.pointer(x.data)}")
        return test

    # ---- memory ----

    def pointer(self, place: Access, level: int | None = None) -> str:
        """The address of the first slot as far as it is known in this loop, or the whole."""
        top = self._depth(place) if level is None else level
        linear = (place.operand, place.dtype, place.strides, place.offset)
        key: ValueKey = ("pointer", *linear, id(place.extra), top)
        found = self.find(key)
        if found is not None:
            return found
        before = self.pointer(place, top - 1) if top else self.w.pointer(place.operand)
        distance = self._distance(place, top)
        return self.keep(key, self.w.offset(before, memory.memory_element(place.dtype), distance))

    def _depth(self, place: Access) -> int:
        levels = [self.axis_level.get(a, 0) for a, s in enumerate(place.strides) if s != 0]
        if self._has_scalar_extra(place):
            levels.append(self.level.get(id(place.extra), 0))
        return max(levels, default=0)

    def _has_scalar_extra(self, place: Access) -> bool:
        return place.extra is not None and id(place.extra) not in self.varies

    def _axis_level(self, axis: int) -> int | None:
        """In which loop an axis becomes part of an address, None: it is not part of `pointer`."""
        return self.axis_level.get(axis, 0)

    def _distance(self, place: Access, level: int) -> str:
        """The part of an address that becomes known in one loop, in elements."""
        w = self.w
        total = w.size(place.offset) if level == 0 else "0"
        for a, stride in enumerate(place.strides):
            if stride != 0 and self._axis_level(a) == level:
                total = w.add(total, w.mul(self.index[a], w.size(stride)))
        if self._has_scalar_extra(place) and self.level.get(id(place.extra), 0) == level:
            assert place.extra is not None
            total = w.add(total, self.value(place.extra))
        return total

    def _at_slot(self, place: Access, slot: int) -> str:
        stride, shift = place.strides[self.vector_axis], self.slots[slot].shift
        if isinstance(stride, SizeArgument):
            far = self.w.entry(f"mul i64 {self.w.size(stride)}, {shift}") if shift else "0"
        else:
            far = str(stride * shift)
        return self.w.offset(self.pointer(place), memory.memory_element(place.dtype), far)

    def _index(self, place: Access, slot: int) -> tuple[str, str]:
        """Where the lanes are beside the first one: type and vector of distances."""
        w, stride = self.w, place.strides[self.vector_axis]
        wide = w.vector("i64")
        if place.extra is None or id(place.extra) not in self.varies:
            if isinstance(stride, SizeArgument):
                return wide, self._steps(stride)
            bits = 32 if abs(stride) * self.lanes < 1 << 31 else 64
            return w.vector(f"i{bits}"), lane_numbers(self.lanes, bits, stride)
        extra = self.vector(place.extra, slot)
        if stride == 0:
            return wide, extra
        return wide, w(f"add {wide} {extra}, {self._steps(stride)}")

    def _steps(self, stride: int | SizeArgument) -> str:
        w = self.w
        if not isinstance(stride, SizeArgument):
            return lane_numbers(self.lanes, 64, stride)
        wide = w.vector("i64")
        one = w.entry(f"insertelement {wide} poison, i64 {w.size(stride)}, i64 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        all_ = w.entry(f"shufflevector {wide} {one}, {wide} poison, {zeros}")
        return w.entry(f"mul {wide} {all_}, {lane_numbers(self.lanes, 64)}")

    def _lanes_of(self, slot: int) -> str | None:
        """Which lanes of a vector count, None: all do."""
        return self.slots[slot].mask

    def _mask(self, place: Access, slot: int) -> str | None:
        mine = self._lanes_of(slot)
        if place.mask is None or (place.mask.kind == "const" and place.mask.data):
            return mine
        mask = self.vector(place.mask, slot)
        return mask if mine is None else self.w(f"and {self.w.vector('i1')} {mask}, {mine}")

    def _alignment(self, place: Access) -> int:
        """Bytes that vectors of an access are known to begin at multiples of."""
        return BYTES[place.dtype]

    def _neighbours(self, place: Access) -> bool:
        apart = place.extra is not None and id(place.extra) in self.varies
        return place.strides[self.vector_axis] == 1 and not apart

    def _distances(self, place: Access, slot: int) -> list[str]:
        """Where the lanes are beside the first one, each by itself."""
        w, stride = self.w, place.strides[self.vector_axis]
        apart = place.extra is not None and id(place.extra) in self.varies
        if isinstance(stride, int) and not apart:
            return [str(k * stride) for k in range(self.lanes)]
        kind, vector = self._index(place, slot)
        return [w(f"extractelement {kind} {vector}, i64 {k}") for k in range(self.lanes)]

    def _load(self, place: Access, slot: int, varies: bool) -> str:
        w = self.w
        if not varies:
            mask = None if place.mask is None else self.value(place.mask)
            return memory.load_scalar(w, place.dtype, self.pointer(place), mask)
        mask = self._mask(place, slot)
        pointer = self._at_slot(place, slot)
        if self._neighbours(place):
            align = self._alignment(place)
            return memory.load_vector(w, place.dtype, pointer, self.lanes, mask, align)
        if mask is None:
            return memory.load_apart(w, place.dtype, pointer, self._distances(place, slot))
        return memory.gather(w, place.dtype, pointer, self._index(place, slot), self.lanes, mask)

    def store(self, what: Store, slot: int = 0) -> None:
        """Write a value where it belongs: one element, or a vector of them."""
        w, place = self.w, what.access
        kept = register_type(place.dtype)
        if not self.stores_vectors(what):
            value = writer.convert(w, self.value(what.value), what.value.dtype, kept, 0)
            mask = None if place.mask is None else self.value(place.mask)
            memory.store_scalar(w, place.dtype, value, self.pointer(place), mask)
            return
        value = writer.convert(w, self.vector(what.value, slot), what.value.dtype, kept, self.lanes)
        mask = self._mask(place, slot)
        pointer = self._at_slot(place, slot)
        if self._neighbours(place):
            align = self._alignment(place)
            memory.store_vector(w, place.dtype, value, pointer, self.lanes, mask, align)
        else:
            index = self._index(place, slot)
            memory.scatter(w, place.dtype, value, pointer, index, self.lanes, mask)

    def stores_vectors(self, what: Store) -> bool:
        """Whether a store differs along the vector axis."""
        place = what.access
        return id(what.value) in self.varies or place_varies(place, self.vector_axis, self.varies)


def positions(w: KernelWriter, flat: str, sizes: Sequence[Size]) -> list[str]:
    """Positions along some axes from the number of a point of them."""
    found: list[str] = []
    for size in reversed(sizes[1:]):
        n = w.size(size)
        found.append(w.rem(flat, n))
        flat = w.div(flat, n)
    return [*([flat] if sizes else []), *reversed(found)]


def emit_point(
    w: KernelWriter,
    stores: Sequence[Store],
    index: Sequence[str],
    vector_axis: int,
    given: Sequence[str],
    mask: str | None,
) -> None:
    """Evaluate and store at one vector of points: an epilogue of other generators.

    `index` are the positions of the axes, that of the vector axis being its first point. `given`
    are vectors for the `given` expressions; lanes where `mask` is false are not touched.
    """
    order = expressions(Nest((), tuple(stores)))
    point = Point(w, vector_axis, varying(order, vector_axis), given)
    point.index = dict(enumerate(index))
    point.slots = [VectorSlot(0, mask)]
    for x in order:
        point.value(x)
    for s in stores:
        point.store(s)
