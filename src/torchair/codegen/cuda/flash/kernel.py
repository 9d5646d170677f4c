"""The kernel of attention of many queries.

A block has one warpgroup that loads and some that compute, each for 64 queries of a head. The
scores of a tile of keys stay in registers: what the tensor cores leave there is what they take as
the left factor of the product with the values. While they multiply the weights of one tile with
its values, the softmax of the next one is computed. A block takes one tile of queries after the
other, so that the first loads of a tile overlap the end of the tile before.

Tiles of keys are taken from the last to the first: those that a mask or the end of the keys cuts
come first, and the loop over the others has no tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.flash.forms import ROWS, FlashForm
from torchair.codegen.cuda.flash.scores import (
    AttentionScores,
    FragmentLayout,
    RowState,
    address,
    row_of,
)
from torchair.codegen.cuda.flash.tiles import (
    KEYS,
    LSE,
    OUT,
    QUERIES,
    SWIZZLED,
    VALUES,
    FlashTiles,
)
from torchair.codegen.cuda.hopper import LINE, STEP, number
from torchair.codegen.cuda.jit import Gpu
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Attention
from torchair.codegen.target import Launch


class FlashAttention:
    """Writes the kernel."""

    def __init__(self, request: Attention, gpu: Gpu, form: FlashForm, early: bool) -> None:
        self.request, self.gpu, self.form, self.early = request, gpu, form, early
        self.w = GpuWriter(gpu)
        self.tiles = FlashTiles(self.w, request, form)
        self.lanes = FragmentLayout(self.w)
        self.scores = AttentionScores(self.w, request, self.tiles, self.lanes)

    def launch(self) -> Launch:
        """How it is launched."""
        return Launch(
            hopper.WARPGROUP * (1 + self.form.warpgroups),
            1,
            (self.request.batch, self.request.heads, self.tiles.parts),
            self.tiles.shared,
            self.form.resident * self.gpu.multiprocessors if self.form.persistent else 0,
            early=self.early,
            resident=self.form.resident,
            even=not self.request.causal,
        )

    def write(self) -> None:
        """All of it."""
        w, lanes = self.w, self.lanes
        with w.when(lanes.first):
            self.tiles.make_barriers()
        if self.early:
            w.wait()
            w.release("true")
        w.barrier()
        turns = self.tiles.turns()
        spare, own = self.form.registers
        n = w.name("R")
        loads = w(f"icmp eq i32 {lanes.team}, 0")
        w.do(f"br i1 {loads}, label %{n}.loads, label %{n}.computes")
        w.label(f"{n}.loads")
        hopper.registers(w, spare, more=False)
        with w.when(lanes.first):
            self.tiles.load(turns)
        w.do(f"br label %{n}.done")
        w.label(f"{n}.computes")
        hopper.registers(w, own, more=True)
        self._compute(turns)
        w.do(f"br label %{n}.done")
        w.label(f"{n}.done")

    # ---- tiles ----

    def _compute(self, turns: str) -> None:
        w, tiles = self.w, self.tiles
        self.lanes.compute()
        place = number(w, "add", tiles.base, number(w, "mul", self.lanes.own, ROWS * SWIZZLED))
        self.queries = hopper.descriptor(w, place)
        if self.form.alternate:  # the first one need not wait
            with w.when(w(f"icmp eq i32 {self.lanes.own}, {self.form.warpgroups - 1}")):
                self._pass_turn(self.lanes.own)
        with tiles.all(turns) as (turn, self.place):
            tiles.arrived(QUERIES, turn)
            self._store(self._attend(turn))

    def _attend(self, turn: str) -> RowState:
        """All keys of a tile of queries."""
        w, place, request = self.w, self.place, self.request
        scores = self._begin_scores(self.tiles.arrived(KEYS, place.seen))
        mask = self.scores.mask(place, place.last(w))
        scores = hopper.end(w, scores, 0)
        self._release(KEYS, place.seen)
        scores = self.scores.masked(scores, mask, place, place.last(w))
        state = RowState.empty(request.value_width)
        state, weights, _ = self.scores.softmax(state, scores)
        state.weights = self._packed(weights)
        start, masked = "1", request.mask is not None
        if not masked and self._cut_tiles() > 1:
            start = self._cut_end()
            state = self._steps(state, "1", start, masked=True)
        state = self._steps(state, start, place.count, masked)
        self._release(QUERIES, turn)
        last = w.add(place.seen, place.last(w))
        values = self.tiles.arrived(VALUES, last)
        state.outputs = hopper.end(w, self._begin_outputs(values, state), 0)
        self._release(VALUES, last)
        return state

    def _cut_tiles(self) -> int:
        """How many tiles of keys of a tile of queries have keys that some query does not see."""
        if not self.request.causal or self.form.keys % self.form.rows == 0:
            return 1
        return 1 + -(-self.form.rows // self.form.keys)

    def _cut_end(self) -> str:
        """The first step, 1 or later, whose keys are seen by all queries of this warpgroup."""
        w, place = self.w, self.place
        first = w.add(place.first, self.lanes.wide(self.lanes.top))
        limit = w.least(self.tiles.span, w.add(first, "1"))
        cut = w.sub(place.count, w.div(limit, str(self.form.keys)))
        return w.least(place.count, w.most("1", cut))

    def _steps(self, state: RowState, start: str, stop: str, masked: bool) -> RowState:
        """Some tiles of keys, counted from the last one."""
        w, place = self.w, self.place
        with w.loop(start, stop, 1, state.flat()) as step:
            now = state.like(step.carried)
            count = w.add(place.seen, step.index)
            before = w.sub(count, "1")
            keys = self.tiles.arrived(KEYS, count)
            values = self.tiles.arrived(VALUES, before)
            self._await_turn()
            scores = self._begin_scores(keys)
            outputs = self._begin_outputs(values, now)
            self._pass_turn(self.lanes.own)
            at = w.sub(place.last(w), step.index)
            mask = self.scores.mask(place, at)
            scores = hopper.end(w, scores, 1)
            self._release(KEYS, count)
            scores = self.scores.masked(scores, mask, place, at) if masked else scores
            now, weights, fades = self.scores.softmax(now, scores)
            outputs = hopper.end(w, outputs, 0)
            self._release(VALUES, before)
            now.outputs = [w(f"fmul float {x}, {fades[row_of(k)]}") for k, x in enumerate(outputs)]
            now.weights = self._packed(weights)
            step.next = [x for _, x in now.flat()]
        return state.like(step.results)

    def _release(self, kind: int, count: str) -> None:
        self.tiles.release(kind, count, self.lanes.lead)

    # ---- products ----

    def _begin_scores(self, keys: str) -> list[str]:
        """The products of the queries with a tile of keys, begun."""
        w, form = self.w, self.form
        start = hopper.descriptor(w, keys)
        a, b = [], []
        for k in range(-(-self.request.width // STEP)):
            line, within = divmod(k * STEP, LINE)
            a.append(self._moved(self.queries, line * form.rows * SWIZZLED + 2 * within))
            b.append(self._moved(start, line * form.keys * SWIZZLED + 2 * within))
        return hopper.begin(w, self.request.dtype, form.keys, a, b)

    def _begin_outputs(self, values: str, state: RowState) -> list[str]:
        """The products of the weights with a tile of values, begun."""
        w, keys, request = self.w, self.form.keys, self.request
        start = hopper.descriptor(w, values, keys * SWIZZLED)
        steps = range(keys // STEP)
        a = [state.weights[4 * k : 4 * k + 4] for k in steps]
        b = [self._moved(start, k * STEP * SWIZZLED) for k in steps]
        return hopper.begin(w, request.dtype, request.value_width, a, b, state.outputs, turned=True)

    def _await_turn(self) -> None:
        """Wait until the warpgroup before this one has begun its products."""
        if self.form.alternate:
            self._turn("bar.sync", self.lanes.own)

    def _pass_turn(self, own: str) -> None:
        """Let the next warpgroup begin its products."""
        if self.form.alternate:
            after = number(self.w, "add", own, 1)
            self._turn("bar.arrive", number(self.w, "urem", after, self.form.warpgroups))

    def _turn(self, how: str, warpgroup: str) -> None:
        barrier = number(self.w, "add", warpgroup, 1)
        text = f"{how} $0, {2 * hopper.WARPGROUP};"
        self.w.assembly(text, "void", "r,~{memory}", ("i32", barrier))

    def _moved(self, descriptor: str, bytes_: int) -> str:
        return self.w.add(descriptor, str(bytes_ >> 4))

    def _packed(self, values: Sequence[str]) -> list[str]:
        """Short floats in pairs, as the tensor cores and memory take them."""
        pairs = zip(values[::2], values[1::2], strict=True)
        return [hopper.pair(self.w, self.request.dtype, a, b) for a, b in pairs]

    # ---- results ----

    def _store(self, state: RowState) -> None:
        """Outputs over their sums, and the logarithms of the sums."""
        w, request, place = self.w, self.request, self.place
        totals = self.scores.totals(state)
        factors = [self.scores.inverse(total) for total in totals]
        results = [w(f"fmul float {x}, {factors[row_of(k)]}") for k, x in enumerate(state.outputs)]
        words = self._packed(results)
        for h in (0, 1):
            row = self.lanes.row_at(place, h)
            index = (place.batch, place.head, row)
            exists = w(f"icmp slt i64 {row}, {request.length}")
            self._store_row(words[h::2], address(w, OUT, request.dtype, request.out, index), exists)
            if request.lse is not None:
                first = w(f"icmp eq i32 {self.lanes.quarter}, 0")
                with w.when(w(f"and i1 {first}, {exists}")):
                    there = address(w, LSE, "f32", request.lse, index)
                    value = self.scores.logarithm(state.top[h], totals[h])
                    w.do(f"store float {value}, ptr {there}")

    def _store_row(self, words: list[str], at: str, exists: str) -> None:
        """A row of outputs, of which this thread has two of every eight."""
        w = self.w
        begin = w(f"ptrtoint ptr {at} to i64")
        whole = w(f"icmp eq i64 {w(f'and i64 {begin}, 15')}, 0")
        fours = [words[k : k + 4] for k in range(0, len(words), 4)]
        padded = [[*four, *["0"] * (4 - len(four))] for four in fours]
        wide = [hopper.exchanged(w, four, self.lanes.quarter) for four in padded]
        with w.when(w(f"and i1 {exists}, {whole}")):
            self._store_wide(wide, at, len(words))
        with w.when(w(f"and i1 {exists}, {w(f'xor i1 {whole}, true')}")):
            column = self.lanes.wide(self.lanes.column)
            for k, word in enumerate(words):
                for side in (0, 1):
                    half = w(f"trunc i32 {number(w, 'lshr', word, 16 * side)} to i16")
                    there = w.offset(at, "i16", w.add(column, str(8 * k + side)))
                    w.do(f"store i16 {half}, ptr {there}")

    def _store_wide(self, fours: list[list[str]], at: str, count: int) -> None:
        """Sixteen bytes at a time: each of four threads has every fourth eight of elements."""
        w = self.w
        for k, four in enumerate(fours):
            vector = "poison"
            for j, x in enumerate(four):
                vector = w(f"insertelement <4 x i32> {vector}, i32 {x}, i64 {j}")
            mine = w.add(self.lanes.wide(self.lanes.quarter), str(4 * k))
            there = w.offset(at, "i8", w.mul(mine, "16"))
            with w.when("true" if 4 * k + 4 <= count else w(f"icmp slt i64 {mine}, {count}")):
                w.do(f"store <4 x i32> {vector}, ptr {there}, align 16")
