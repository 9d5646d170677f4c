"""The softmax of a tile of keys in the registers of a warpgroup: masks, maxima, weights and sums.

A thread has two rows, and of each two neighbouring columns of every eight; four threads have a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchair.codegen.cuda.flash.forms import ROWS
from torchair.codegen.cuda.flash.tiles import MASK, FlashTiles, Place
from torchair.codegen.cuda.hopper import WARPGROUP, number
from torchair.codegen.cuda.packs import ZERO, unpacked
from torchair.codegen.cuda.softmax import LOWEST
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.text.maths_wide import LOG2_E
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.operators import function
from torchair.codegen.text.writer import f32

if TYPE_CHECKING:
    from torchair.codegen.cuda.writer import GpuWriter


@dataclass
class RowState:
    """What a thread carries from tile to tile, for its two rows."""

    top: list[str]
    total: list[str]
    outputs: list[str]
    weights: list[str]  # pairs of them, of the last tile

    @classmethod
    def empty(cls, width: int) -> RowState:
        """The state of nothing, with so many outputs of a row."""
        return cls([LOWEST] * 2, [ZERO] * 2, [ZERO] * (width // 2), [])

    def flat(self) -> list[tuple[str, str]]:
        """All of it with its types, to be carried around a loop."""
        floats = [("float", x) for x in (*self.top, *self.total, *self.outputs)]
        return [*floats, *(("i32", x) for x in self.weights)]

    def like(self, flat: Sequence[str]) -> RowState:
        """Other values in the same places."""
        end = 4 + len(self.outputs)
        return RowState(list(flat[:2]), list(flat[2:4]), list(flat[4:end]), list(flat[end:]))


def row_of(k: int) -> int:
    """Which of its two rows a number of a thread belongs to."""
    return k // 2 % 2


class FragmentLayout:
    """Which rows and columns of a tile a thread has, as i32."""

    def __init__(self, w: GpuWriter) -> None:
        self.w = w
        thread = w(f"trunc i64 {w.thread()} to i32")
        self.team = number(w, "lshr", thread, WARPGROUP.bit_length() - 1)  # its warpgroup
        self.first = w(f"icmp eq i32 {thread}, 0")
        self.inside = number(w, "and", thread, WARPGROUP - 1)

    def compute(self) -> None:
        """Find out, in a warpgroup that computes."""
        w = self.w
        self.own = number(w, "sub", self.team, 1)  # its number among those that compute
        self.lead = w(f"icmp eq i32 {self.inside}, 0")
        lane = number(w, "and", self.inside, 31)
        self.top = number(w, "mul", self.own, ROWS)  # the first row of the warpgroup
        warp = number(w, "shl", number(w, "lshr", self.inside, 5), 4)
        row = number(w, "add", warp, number(w, "lshr", lane, 2))
        self.row = number(w, "add", self.top, row)  # the other one is 8 further
        self.quarter = number(w, "and", lane, 3)
        self.column = number(w, "shl", self.quarter, 1)

    def wide(self, x: str) -> str:
        """An i32 as an i64."""
        return self.w(f"zext i32 {x} to i64")

    def row_at(self, place: Place, h: int) -> str:
        """The number of a row among the queries, an i64."""
        w = self.w
        return w.add(place.first, self.wide(number(w, "add", self.row, 8 * h)))


class AttentionScores:
    """Writes the arithmetic."""

    def __init__(
        self, w: GpuWriter, request: Attention, tiles: FlashTiles, lanes: FragmentLayout
    ) -> None:
        self.w, self.request, self.tiles, self.lanes = w, request, tiles, lanes
        self.keys = tiles.form.keys

    def softmax(self, state: RowState, scores: list[str]) -> tuple[RowState, list[str], list[str]]:
        """Maxima and sums with the scores of a tile of keys, their weights, and what the outputs so
        far are to be multiplied with."""
        now = RowState([], [], state.outputs, state.weights)
        weights, fades = [""] * len(scores), []
        for h in (0, 1):
            mine = [z for z in range(len(scores)) if row_of(z) == h]
            top, base = self._top(state.top[h], [scores[z] for z in mine])
            fades.append(self._power(self.w(f"fsub float {state.top[h]}, {base}")))
            self._weigh(weights, scores, mine, base)
            sum_ = self._tree(self.sum, [weights[z] for z in mine])
            now.total.append(self._fma(state.total[h], fades[h], sum_))
            now.top.append(top)
        return now, weights, fades

    def _top(self, before: str, scores: list[str]) -> tuple[str, str]:
        """The new maximum of a row in the unit of its powers, and what to subtract: 0 where all
        scores are minus infinity."""
        w, top = self.w, self._tree(self._larger, scores)
        for distance in (1, 2):
            top = self._larger(top, w.shuffled(top, "f32", distance))
        if not self.request.adds:
            top = w(f"fmul float {top}, {self._unit()}")
        top = self._larger(before, top)
        none = w(f"fcmp oeq float {top}, {LOWEST}")
        return top, w(f"select i1 {none}, float {ZERO}, float {top}")

    def _weigh(self, weights: list[str], scores: list[str], mine: list[int], base: str) -> None:
        w = self.w
        below = w(f"fneg float {base}")
        for z in mine:
            if self.request.adds:
                x = w(f"fsub float {scores[z]}, {base}")
            else:
                x = self._fma(scores[z], self._unit(), below)
            weights[z] = self._power(x)

    def _unit(self) -> str:
        """What makes the products of queries and keys exponents of two."""
        return f32(self.request.scale * LOG2_E)

    def _power(self, x: str) -> str:
        """A power of two, or of e where a mask is added: its numbers may be too large for another
        unit."""
        if self.request.adds:
            x = self.w(f"fmul float {x}, {f32(LOG2_E)}")
        return self.w.call("float", "llvm.nvvm.ex2.approx.ftz.f", ("float", x))

    def _fma(self, a: str, b: str, c: str) -> str:
        return self.w.call("float", "llvm.fma.f32", ("float", a), ("float", b), ("float", c))

    def _larger(self, a: str, b: str) -> str:
        return self.w.call("float", "llvm.maxnum.f32", ("float", a), ("float", b))

    def sum(self, a: str, b: str) -> str:
        """A sum of two floats."""
        return self.w(f"fadd float {a}, {b}")

    def _tree(self, join: Callable[[str, str], str], values: list[str]) -> str:
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=False)
            values = [join(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
        return values[0]

    # ---- masks ----

    def masked(self, scores: list[str], mask: list[str], place: Place, at: str) -> list[str]:
        """Scores of the tile of keys `at` with the mask added, or minus infinity where a key is not
        seen."""
        w, request = self.w, self.request
        found = self._by_mask(scores, mask) if mask else list(scores)
        whole = isinstance(request.span, int) and request.span % self.keys == 0
        if whole and not request.causal:
            return found
        limits = [self._limit(place, at, h) for h in (0, 1)]
        for z, x in enumerate(found):
            seen = w(f"icmp sgt i32 {limits[row_of(z)]}, {8 * (z // 4) + z % 2}")
            found[z] = w(f"select i1 {seen}, float {x}, float {LOWEST}")
        return found

    def _limit(self, place: Place, at: str, h: int) -> str:
        """How many columns of a row are seen, counted from the first of this thread."""
        w, tiles = self.w, self.tiles
        end = tiles.short(tiles.span)
        if self.request.causal:
            row = number(w, "add", tiles.short(place.first), self.lanes.row)
            row = number(w, "add", row, 8 * h + 1)
            end = w.call("i32", "llvm.smin.i32", ("i32", end), ("i32", row))
        first = tiles.short(w.mul(at, str(self.keys)))
        return number(w, "sub", end, number(w, "add", first, self.lanes.column))

    def mask(self, place: Place, at: str) -> list[str]:
        """The elements of the mask for the tile of keys `at`, as they are stored; nothing where
        there is none. Beyond the last key there is something of that row."""
        w, request, span = self.w, self.request, self.tiles.span
        if request.mask is None:
            return []
        kind, stride = memory_element(request.mask), w.size(request.mask_strides[3])
        column = w.add(w.mul(at, str(self.keys)), self.lanes.wide(self.lanes.column))
        starts = [self._mask_row(place, h) for h in (0, 1)]

        def alone() -> list[str]:
            found = []
            for z in range(self.keys // 2):
                far = w.least(w.add(column, str(8 * (z // 4) + z % 2)), w.sub(span, "1"))
                there = w.offset(starts[row_of(z)], kind, w.mul(far, stride))
                found.append(w(f"load {kind}, ptr {there}"))
            return found

        def pairs() -> list[str]:
            found, two, size = [], f"<2 x {kind}>", 2 * BYTES[request.mask or "f32"]
            for z in range(0, self.keys // 2, 2):
                far = w.least(w.add(column, str(8 * (z // 4))), w.sub(span, "2"))
                there = w.offset(starts[row_of(z)], kind, far)
                got = w(f"load {two}, ptr {there}, align {size}")
                found += [w(f"extractelement {two} {got}, i64 {k}") for k in (0, 1)]
            return found

        if not self._has_pairs():
            return alone()
        begin = w(f"ptrtoint ptr {w.pointer(MASK)} to i64")
        rest = w(f"and i64 {begin}, {2 * BYTES[request.mask] - 1}")
        return w.either(w(f"icmp eq i64 {rest}, 0"), kind, pairs, alone)

    def _has_pairs(self) -> bool:
        """Whether two columns of a thread are neighbours in the mask, and rows have an even number
        of them."""
        *rows, along = self.request.mask_strides
        whole = [n for n in (*rows, self.request.span) if isinstance(n, int) and n % 2 == 0]
        return along == 1 and len(whole) == 4

    def _by_mask(self, scores: list[str], mask: list[str]) -> list[str]:
        """Scores with numbers added, then in natural units, or minus infinity where the mask says
        so."""
        w, request = self.w, self.request
        found = []
        for x, raw in zip(scores, mask, strict=True):
            if request.mask == "bool":
                seen = w(f"icmp ne i8 {raw}, 0")
                found.append(w(f"select i1 {seen}, float {x}, float {LOWEST}"))
                continue
            if request.mask is not None and request.mask != "f32":
                raw = unpacked(w, request.mask, w(f"zext i16 {raw} to i32"))[0]
            found.append(self._fma(x, f32(request.scale), raw))
        return found

    def _mask_row(self, place: Place, h: int) -> str:
        """Where the mask of a row begins; rows that do not exist have that of the last one."""
        w, request = self.w, self.request
        assert request.mask is not None
        row = w.least(self.lanes.row_at(place, h), w.sub(w.size(request.length), "1"))
        index = (place.batch, place.head, row)
        return address(w, MASK, request.mask, request.mask_strides, index)

    # ---- sums ----

    def totals(self, state: RowState) -> list[str]:
        """The sums of whole rows."""
        found = []
        for total in state.total:
            for distance in (1, 2):
                total = self.sum(total, self.w.shuffled(total, "f32", distance))
            found.append(total)
        return found

    def inverse(self, total: str) -> str:
        """What makes weights of a row add up to 1; 0 where there is no key."""
        w = self.w
        none = w(f"fcmp oeq float {total}, {ZERO}")
        one = w(f"fdiv float {f32(1.0)}, {total}")
        return w(f"select i1 {none}, float {ZERO}, float {one}")

    def logarithm(self, top: str, total: str) -> str:
        """The natural logarithm of the sum of a row; 0 where there is no key."""
        w = self.w
        if not self.request.adds:
            top = w(f"fmul float {top}, {f32(1 / LOG2_E)}")
        none = w(f"fcmp oeq float {total}, {ZERO}")
        sum_ = self.sum(top, function(w, "log", [total], "f32", 0))
        return w(f"select i1 {none}, float {ZERO}, float {sum_}")


def address(
    w: GpuWriter, word: int, dtype: Element, strides: Sequence[Size], index: Sequence[str]
) -> str:
    """The address of an element of an operand; `index` begins with the batch, and may be
    shorter."""
    far = "0"
    for position, stride in zip(index, strides, strict=False):
        far = w.add(far, w.mul(position, w.size(stride)))
    return w.offset(w.pointer(word), memory_element(dtype), far)
