"""Joins, splits, slices, repetitions and paddings.

Where a result is put together from several operands, each is read under a mask, so that nothing
outside of it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchair.catalog import Op
from torchair.catalog.slicing import slice_length
from torchair.codegen.loops import Expr, Index, cast, const, op, size
from torchair.codegen.numbers import Int, Number
from torchair.codegen.types import FLOATS, register_type
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    Update,
    lowering,
    masked,
    number,
)
from torchair.engine.lower.places import is_one, split

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


# ---- choices by position ----


def at_least(position: Index, bound: Int) -> Expr:
    """Whether a position reaches a bound."""
    return op("ge", position.value(), size(bound))


def below(position: Index, bound: Int) -> Expr:
    """Whether a position lies before a bound."""
    return op("lt", position.value(), size(bound))


def all_of(tests: Sequence[Expr]) -> Expr | None:
    """All tests at once; None when there is none."""
    result: Expr | None = None
    for test in tests:
        result = test if result is None else op("and", result, test)
    return result


def replaced(place: Place, dim: int, position: Index) -> Place:
    """A place with another position along one dim."""
    return (*place[:dim], position, *place[dim + 1 :])


class Joined:
    """Pieces of these sizes one after the other along a dim: `read(k, place)` is the element of
    piece `k`, at a place whose position along the dim counts from the start of the piece."""

    def __init__(self, axis: int, sizes: Sequence[Int], read: Callable[[int, Place], Expr]) -> None:
        self.axis, self.read = axis, read
        self.used: list[int] = []
        self.starts: list[Int] = [0]
        for k, n in enumerate(sizes):
            if isinstance(n, Number) or n > 0:
                self.used.append(k)
            self.starts.append(self.starts[-1] + n)

    def element(self, place: Place) -> Expr:
        """The element of the piece that a place falls into."""
        position = place[self.axis]
        known = self._known(position)
        if known is not None:
            return self._piece(known, place)
        result: Expr | None = None
        for k in reversed(self.used):
            first, last = k == self.used[0], k == self.used[-1]
            tests = [] if first else [at_least(position, self.starts[k])]
            before = [] if last else [below(position, self.starts[k + 1])]
            inside = all_of(tests + before)
            piece = self._piece(k, place)
            piece = piece if inside is None else masked(piece, inside)
            result = piece if result is None else op("where", before[0], piece, result)
        return const(0, "i64") if result is None else result  # nothing to join has no elements

    def _known(self, position: Index) -> int | None:
        """The piece of a position that is the same at every point."""
        numbers = (position.offset, *self.starts)
        if position.terms or position.extra or any(isinstance(n, Number) for n in numbers):
            return None
        return next((k for k in self.used if position.offset < self.starts[k + 1]), None)

    def _piece(self, k: int, place: Place) -> Expr:
        position = place[self.axis] + (0 - self.starts[k])
        return self.read(k, replaced(place, self.axis, position))


# ---- joins ----


def _ranks_differ(o: Op) -> str | None:
    ranks = {len(f.shape) if f.shape else 1 for f in o.list("x") if f.shape is not None}
    return None if len(ranks) == 1 else "operands of different ranks"


@lowering("ConcatV2", kind="move", declines=_ranks_differ)
def concat(o: LowerOp) -> Tensor:
    """Operands one after the other; a scalar counts as one element."""
    parts, shape = o.tensors("x"), o.out_shape()
    axis, wide = o.int("concat_dim") % len(shape), register_type(o.out_dtype())

    def read(k: int, place: Place) -> Expr:
        return cast(parts[k].at(place if parts[k].rank else ()), wide)

    sizes = [p.shape[axis] if p.rank else 1 for p in parts]
    return Tensor(shape, o.out_dtype(), Joined(axis, sizes, read).element)


@lowering("Pack", kind="move")
def pack(o: LowerOp) -> Tensor:
    """Operands side by side along a new dim."""
    parts, shape = o.tensors("x"), o.out_shape()
    axis, wide = o.attr("axis") % len(shape), register_type(o.out_dtype())

    def read(k: int, place: Place) -> Expr:
        return cast(parts[k].at((*place[:axis], *place[axis + 1 :])), wide)

    return Tensor(shape, o.out_dtype(), Joined(axis, [1] * len(parts), read).element)


# ---- splits and slices ----


def _shifted(x: Tensor, shape: Sequence[Int], axis: int, start: Int) -> Tensor:
    """A part of `x` that begins at `start` along one dim."""
    return Tensor(shape, x.dtype, lambda place: x.at(replaced(place, axis, place[axis] + start)))


@lowering("SplitV", kind="move")
def split_parts(o: LowerOp) -> list[Tensor]:
    """Parts of given sizes; one of them may be -1, which means the rest."""
    x, sizes = o.tensor("x"), list(o.ints("size_splits"))
    axis = o.int("split_dim") % x.rank
    rest = [k for k, n in enumerate(sizes) if not isinstance(n, Number) and n == -1]
    for k in rest:
        sizes[k] = x.shape[axis] - (sum(sizes) + 1)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [_shifted(x, o.out_shape(k), axis, start) for k, start in enumerate(starts)]


@lowering("Unpack", kind="move")
def unpack(o: LowerOp) -> list[Tensor]:
    """One tensor for each position along a dim."""
    x = o.tensor("x")
    axis = o.attr("axis") % x.rank

    def taken(k: int) -> Tensor:
        here = Index(offset=k)
        return Tensor(
            o.out_shape(k), x.dtype, lambda place: x.at((*place[:axis], here, *place[axis:]))
        )

    return [taken(k) for k in range(len(o.node.outputs))]


def _has_masks(o: Op) -> str | None:
    return next((m for m in _MASKS if o.attr(m)), None)


def _ranges(o: Op) -> list[tuple[int, Int, Int, int]]:
    """Axis, begin, end and step of every axis a slice names."""
    begins = o.ints("begin")
    axes = o.ints("axes") if o.fed("axes") else tuple(range(len(begins)))
    steps = o.ints("strides") if o.fed("strides") else (1,) * len(begins)
    return list(zip(axes, begins, o.ints("end"), steps, strict=True))


def _start(begin: Int, n: Int) -> Int:
    """Where a slice begins. One that begins past the end has no elements."""
    if begin >= 0:
        return begin
    from_end = begin + n
    return from_end if from_end >= 0 else 0


def _source(o: Op, x: Tensor) -> Callable[[Place], Place]:
    """The place in the sliced tensor that a place in the slice means."""
    starts: dict[int, tuple[Int, int]] = {}
    for axis, begin, _, step in _ranges(o):
        starts[axis % x.rank] = _start(begin, x.shape[axis]), step

    def place(index: Place) -> Place:
        found = list(index)
        for axis, (start, step) in starts.items():
            found[axis] = index[axis] * step + start if step != 1 else index[axis] + start
        return tuple(found)

    return place


@lowering("StridedSliceV2", "StridedSlice", kind="move", declines=_has_masks)
def strided_slice(o: LowerOp) -> Tensor:
    """Every so many elements between two bounds."""
    x = o.tensor("x")
    source = _source(o, x)
    return Tensor(o.out_shape(), x.dtype, lambda place: x.at(source(place)))


def _assign_declines(o: Op) -> str | None:
    if _has_masks(o):
        return _has_masks(o)
    dims = list(o.shape("var"))
    for axis, begin, end, step in _ranges(o):
        dims[axis] = slice_length(begin, end, step, dims[axis])  # type: ignore[arg-type]
    return None if tuple(dims) == o.shape("input_value") else "a value that is broadcast"


@lowering("StridedSliceAssign", kind="update", domain="input_value", declines=_assign_declines)
def strided_slice_assign(o: LowerOp) -> Update:
    """A value written over a slice."""
    return Update(o.tensor("input_value"), _source(o, o.tensor("var")))


# ---- repetitions and other orders ----


@lowering("Tile", kind="move")
def tile(o: LowerOp) -> Tensor:
    """The operand again and again."""
    x, times = o.tensor("x"), o.ints("multiples")
    lead = len(times) - x.rank

    def once(d: int, position: Index) -> Index:
        if not isinstance(times[lead + d], Number) and times[lead + d] == 1:
            return position
        return Index() if is_one(x.shape[d]) else split(position, x.shape[d], o.extents)[1]

    def element(place: Place) -> Expr:
        return x.at([once(d, p) for d, p in enumerate(place[lead:])])

    return Tensor(o.out_shape(), x.dtype, element)


@lowering("ReverseV2", kind="move")
def reverse(o: LowerOp) -> Tensor:
    """Dims from the last element to the first."""
    x = o.tensor("x")
    axes = {a % x.rank for a in o.ints("axis")} if x.rank else set()

    def element(place: Place) -> Expr:
        return x.at([p * -1 + (x.shape[d] - 1) if d in axes else p for d, p in enumerate(place)])

    return Tensor(x.shape, x.dtype, element)


def _flat_roll(o: Op) -> str | None:
    return None if o.attr("dims") or len(o.shape("x")) == 1 else "a roll across dims"


@lowering("Roll", kind="move", declines=_flat_roll)
def roll(o: LowerOp) -> Tensor:
    """Elements moved along dims, those that leave come in again at the other end."""
    x = o.tensor("x")
    for axis, shift in zip(o.attr("dims") or [0], o.attr("shifts"), strict=True):
        x = _rolled(x, axis % x.rank, shift)
    return x


def _rolled(x: Tensor, axis: int, shift: int) -> Tensor:
    n = x.shape[axis]
    if shift == 0 or n == 0:
        return x
    first: Int = (n * abs(shift) + shift) % n

    def read(k: int, place: Place) -> Expr:
        return x.at(replaced(place, axis, place[axis] + (n - first)) if k == 0 else place)

    return Tensor(x.shape, x.dtype, Joined(axis, [first, n - first], read).element)


# ---- paddings ----


def _paddings(o: Op) -> list[tuple[Int, Int]]:
    """Before and after for every dim, leading dim first."""
    flat = o.ints("paddings")
    half = len(flat) // 2
    if o.attr("paddings_contiguous", True):
        return [(flat[2 * i], flat[2 * i + 1]) for i in range(half)]
    return list(zip(flat[:half], flat[half:], strict=True))


def _not_constant(o: Op) -> str | None:
    mode = o.attr("mode", "constant")
    return None if mode == "constant" else f"padding of mode {mode}"


@lowering("PadV3", kind="move", declines=_not_constant)
def pad(o: LowerOp) -> Tensor:
    """A number around the operand; a negative padding takes elements away."""
    x, pads, value = o.tensor("x"), _paddings(o), o.maybe("constant_values")

    def tests(d: int, position: Index) -> list[Expr]:
        before, after = pads[d]
        found = []
        if isinstance(before, Number) or before > 0:
            found.append(at_least(position, before))
        if isinstance(after, Number) or after > 0:
            found.append(below(position, before + x.shape[d]))
        return found

    def element(place: Place) -> Expr:
        inside = all_of([t for d, p in enumerate(place) for t in tests(d, p)])
        part = x.at([p + (0 - pads[d][0]) for d, p in enumerate(place)])
        if inside is None:
            return part
        filling = number(0, part) if value is None else value.at([Index()] * value.rank)
        return op("where", inside, masked(part, inside), cast(filling, part.dtype))

    return Tensor(o.out_shape(), x.dtype, element)


# ---- halves of one axis ----


def _not_floats(o: Op) -> str | None:
    return None if TYPES.get(o.dtype("x")) in FLOATS else "integers have no sigmoid"


def _halves(x: Tensor, axis: int, place: Place) -> tuple[Expr, Expr]:
    """The element of the first half at a place, and that of the second half."""
    half = x.shape[axis] // 2
    return x.at(place), x.at(replaced(place, axis, place[axis] + half))


@lowering("GLU", kind="move", declines=_not_floats)
def glu(o: LowerOp) -> Tensor:
    """The first half times the sigmoid of the second."""
    x = o.tensor("x")
    axis = o.attr("dim") % x.rank

    def element(place: Place) -> Expr:
        value, gate = _halves(x, axis, place)
        return op("mul", value, op("sigmoid", gate))

    return Tensor(o.out_shape(), x.dtype, element)


@lowering("GLUGrad", kind="move", declines=_not_floats)
def glu_grad(o: LowerOp) -> Tensor:
    """The gradients of both halves, one after the other."""
    x, grad = o.tensor("x"), o.tensor("y_grad")
    axis = o.attr("dim") % x.rank

    def read(k: int, place: Place) -> Expr:
        value, gate = _halves(x, axis, place)
        gate = op("sigmoid", gate)
        result = op("mul", grad.at(place), gate)
        if k == 0:
            return result
        return op("mul", op("mul", result, op("sub", number(1.0, gate), gate)), value)

    half = x.shape[axis] // 2
    return Tensor(x.shape, x.dtype, Joined(axis, [half, half], read).element)
