"""Tiles of queries, keys and values: where they are in shared memory, who waits for whom, which of
them a block takes, and how they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import ALIGNED, LINE, number
from torchair.codegen.cuda.jit import MOST_SHARED
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import Size
from torchair.codegen.target import Declined, TensorTile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchair.codegen.cuda.flash.forms import FlashForm
    from torchair.codegen.cuda.writer import GpuWriter

SWIZZLED = 2 * LINE
"""Bytes of a row of a tile; one of a wider head is several such tiles."""
KEYS, VALUES, QUERIES = range(3)
"""Kinds of tiles."""
Q, K, V, MASK, OUT, LSE = range(6)
"""Words of an attention."""
_SPARE = ALIGNED
"""Bytes of shared memory that stay free."""


@dataclass
class Place:
    """The tile of queries that a block is at, as i64."""

    batch: str
    head: str
    first: str  # its first query
    count: str  # tiles of keys
    seen: str  # tiles of keys before

    def last(self, w: GpuWriter) -> str:
        """The number of its last tile of keys."""
        return w.sub(self.count, "1")


class FlashTiles:
    """Writes what has to do with tiles. A warpgroup numbers those of each kind in the order in
    which they are loaded."""

    def __init__(self, w: GpuWriter, request: Attention, form: FlashForm) -> None:
        self.w, self.request, self.form = w, request, form
        assert isinstance(request.length, int) and request.group is not None
        self.group = request.group
        self.parts = -(-request.length // form.rows)  # tiles of queries of a head
        self.span, self.heads = w.size(request.span), w.size(request.heads)
        self.pairs = w.mul(w.size(request.batch), self.heads)
        self.base = w.asked_at(ALIGNED)
        widths = (request.width, request.value_width, request.width)
        self.lines = [-(-width // LINE) for width in widths]  # tiles side by side, by kind
        self.rows = [form.keys, form.keys, form.rows]
        self.bytes = [a * b * SWIZZLED for a, b in zip(self.lines, self.rows, strict=True)]
        self._keys = self.bytes[QUERIES]
        self._values = self._keys + form.stages * self.bytes[KEYS]
        self._barriers = self._values + form.stages * self.bytes[VALUES]
        self.shared = self._barriers + 16 * (1 + 2 * form.stages)
        if form.resident * (self.shared + _SPARE) > MOST_SHARED:
            raise Declined(f"{self.shared} bytes of shared memory")

    # ---- shared memory ----

    def make_barriers(self) -> None:
        """Make all barriers, by one thread: a tile is full when it was loaded once, and empty when
        all warpgroups have read it."""
        count = 2 * (1 + 2 * self.form.stages)
        places = [number(self.w, "add", self.base, self._barriers + 8 * k) for k in range(count)]
        arrivals = [1, self.form.warpgroups] * count
        hopper.make_barriers(self.w, list(zip(places, arrivals, strict=False)))

    def _barrier(self, kind: int, stage: str, empty: bool) -> str:
        w, first = self.w, {QUERIES: 0, KEYS: 1, VALUES: 1 + self.form.stages}[kind]
        start = number(w, "add", self.base, self._barriers + 16 * first + 8 * empty)
        return start if kind == QUERIES else number(w, "add", start, number(w, "shl", stage, 4))

    def _stage(self, kind: int, count: str) -> tuple[str, str]:
        """Which stage the tile of this number, an i64, goes to, and the parity of the phase of its
        barriers then."""
        w, short = self.w, self.short(count)
        if kind == QUERIES:
            return "0", number(w, "and", short, 1)
        turn = number(w, "lshr", short, self.form.stages.bit_length() - 1)
        return number(w, "and", short, self.form.stages - 1), number(w, "and", turn, 1)

    def _at(self, kind: int, stage: str) -> str:
        w, start = self.w, {QUERIES: 0, KEYS: self._keys, VALUES: self._values}[kind]
        place = number(w, "add", self.base, start)
        if kind == QUERIES:
            return place
        return number(w, "add", place, number(w, "mul", stage, self.bytes[kind]))

    def short(self, x: str) -> str:
        """An i64 as an i32."""
        return self.w(f"trunc i64 {x} to i32") if x[0] == "%" else x

    def arrived(self, kind: int, count: str) -> str:
        """Wait for the tile of this number: where it is."""
        stage, parity = self._stage(kind, count)
        hopper.await_phase(self.w, self._barrier(kind, stage, False), parity)
        return self._at(kind, stage)

    def release(self, kind: int, count: str, lead: str) -> None:
        """Let the tile of this number be overwritten; `lead` is true in one thread."""
        stage, _ = self._stage(kind, count)
        with self.w.when(lead):
            hopper.arrive(self.w, self._barrier(kind, stage, True))

    # ---- tiles of queries ----

    @contextmanager
    def all(self, turns: str) -> Iterator[tuple[str, Place]]:
        """A loop over the tiles of queries of this block: number and place."""
        w = self.w
        with w.loop("0", turns, 1, [("i64", "0")]) as turn:
            place = self._place(turn.index, turn.carried[0])
            yield turn.index, place
            turn.next = [w.add(place.seen, place.count)]

    def turns(self) -> str:
        """How many tiles of queries this block takes."""
        w = self.w
        count = w.mul(self.pairs, str(self.parts))
        whole, left = w.div(count, w.blocks()), w.rem(count, w.blocks())
        more = w(f"icmp slt i64 {self._seat(whole)}, {left}")
        return w.add(whole, w(f"zext i1 {more} to i64"))

    def _seat(self, turn: str) -> str:
        """The number of this block among those of a turn. With a causal mask every second turn
        counts backwards: tiles become shorter, and so all blocks have as much to do."""
        w, own = self.w, self.w.block_number()
        if not self.request.causal:
            return own
        back = w.sub(w.sub(w.blocks(), "1"), own)
        odd = w(f"trunc i64 {turn} to i1")
        return w(f"select i1 {odd}, i64 {back}, i64 {own}")

    def _place(self, turn: str, seen: str) -> Place:
        """The tile of queries of a turn. With a causal mask the longest come first."""
        w, end = self.w, self.span
        unit = w.add(w.mul(turn, w.blocks()), self._seat(turn))
        if self.request.causal:
            part = w.sub(str(self.parts - 1), w.div(unit, self.pairs))
            pair = w.rem(unit, self.pairs)
        else:
            part, pair = w.rem(unit, str(self.parts)), w.div(unit, str(self.parts))
        first = w.mul(part, str(self.form.rows))
        if self.request.causal:
            end = w.least(end, w.add(first, str(self.form.rows)))
        count = w.ceil(end, str(self.form.keys))
        return Place(w.div(pair, self.heads), w.rem(pair, self.heads), first, count, seen)

    # ---- loading ----

    def load(self, turns: str) -> None:
        """Load all tiles, in the order in which they are used, by one thread."""
        w, keys, tensors = self.w, str(self.form.keys), self._tensors()
        with self.all(turns) as (turn, place):

            def fetch(kind: int, count: str, row: str) -> None:
                self._fetch(tensors[kind], kind, count, place, row)

            last = place.last(w)
            fetch(QUERIES, turn, place.first)
            fetch(KEYS, place.seen, w.mul(last, keys))
            with w.loop("1", place.count, 1) as step:
                count = w.add(place.seen, step.index)
                row = w.mul(w.sub(last, step.index), keys)
                fetch(KEYS, count, row)
                fetch(VALUES, w.sub(count, "1"), w.add(row, keys))
            fetch(VALUES, w.add(place.seen, last), "0")

    def _tensors(self) -> list[str]:
        """Keys, values and queries as the copy engine is told of them."""
        r, keys = self.request, self.form.keys
        return [
            self._tensor(K, r.k, (r.width, r.span, r.kv_heads, r.batch), keys),
            self._tensor(V, r.v, (r.value_width, r.span, r.kv_heads, r.batch), keys),
            self._tensor(Q, r.q, (r.width, r.length, r.heads, r.batch), self.form.rows),
        ]

    def _tensor(self, word: int, strides: Sequence[Size], dims: tuple[Size, ...], rows: int) -> str:
        far = strides[2::-1]
        known = tuple(1 if step == 0 else n for n, step in zip(dims[1:], far, strict=True))
        steps = tuple(LINE if n == 1 else step for n, step in zip(known, far, strict=True))
        box = (LINE, rows, 1, 1)
        tile = TensorTile(word, self.request.dtype, (dims[0], *known), steps, box)
        return self.w.tensor(tile)

    def _fetch(self, tensor: str, kind: int, count: str, place: Place, row: str) -> None:
        """Load the tile of this number, when there is room."""
        w, request = self.w, self.request
        stage, parity = self._stage(kind, count)
        hopper.await_phase(w, self._barrier(kind, stage, True), number(w, "xor", parity, 1))
        full = self._barrier(kind, stage, False)
        hopper.expect(w, full, self.bytes[kind])
        head = place.head if kind == QUERIES else w.div(place.head, str(self.group))
        far = (request.k, request.v, request.q)[kind][2::-1]
        index = [  # what is repeated has one element
            self.short(x) if step != 0 else "0"
            for x, step in zip((row, head, place.batch), far, strict=True)
        ]
        start = self._at(kind, stage)
        for k in range(self.lines[kind]):
            there = number(w, "add", start, k * self.rows[kind] * SWIZZLED)
            hopper.load_tile(w, there, tensor, [str(LINE * k), *index], full)
