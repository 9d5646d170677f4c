"""Attention for many queries on Hopper's tensor cores.

A block has one warpgroup that loads and some that compute, each for 64 queries of a head. The
scores of a tile of keys stay in registers: what the tensor cores leave there is what they take as
the left factor of the product with the values. While they multiply the weights of one tile with
its values, the softmax of the next one is computed. A block takes one tile of queries after the
other, so that the first loads of a tile overlap the end of the tile before.

Tiles of keys are taken from the last to the first: those that a mask or the end of the keys cuts
come first, and the loop over the others has no tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import ALIGNED, LINE, STEP, WARPGROUP, number
from torchair.codegen.cuda.jit import MOST_SHARED, Gpu
from torchair.codegen.cuda.packs import ZERO, unpacked
from torchair.codegen.cuda.softmax import LOWEST
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import Element, Size
from torchair.codegen.target import Declined, Kernel, Launch, TensorTile
from torchair.codegen.text.maths_wide import LOG2_E
from torchair.codegen.text.memory import memory_element
from torchair.codegen.text.operators import function
from torchair.codegen.text.writer import f32

ROWS = 64
"""Queries of a computing warpgroup, which is what one instruction multiplies."""
SWIZZLED = 2 * LINE
"""Bytes of a row of a tile in shared memory; wider heads are several such tiles."""
WIDEST = 256
SHARES = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
"""By computing warpgroups: registers of a thread that loads, and of one that computes."""
_Q, _K, _V, _MASK, _OUT, _LSE = range(6)  # words
_KEYS, _VALUES, _QUERIES = range(3)  # kinds of tiles


@dataclass(frozen=True)
class FlashForm:
    """How a block computes."""

    groups: int  # computing warpgroups
    keys: int  # of a tile
    stages: int = 2  # tiles of keys, and of values, in shared memory
    persistent: bool = True  # no more blocks than there are multiprocessors

    def __str__(self) -> str:
        return f"{self.groups}x{self.keys}x{self.stages}{'' if self.persistent else 'x1'}"


def flash(
    request: Attention, gpu: Gpu, label: str = "attention", *, form: FlashForm | None = None
) -> tuple[Kernel, Launch]:
    """The kernel of an attention, and how to launch it. Raises Declined for what is not served."""
    refusal = refused(request, gpu)
    if refusal:
        raise Declined(refusal)
    writer = _Flash(request, gpu, form or default_form(request))
    writer.write()
    return writer.w.kernel(label), writer.launch()


def refused(request: Attention, gpu: Gpu) -> str | None:
    """Why an attention is not served."""
    if gpu.capability != (9, 0):
        return "the tensor cores of this GPU are others"
    if request.dtype not in hopper.DTYPES:
        return f"attention over {request.dtype}"
    group, heads = request.group, request.kv_heads
    if not group or not isinstance(heads, int) or request.heads != group * heads:
        return f"{request.heads} heads over {heads}"
    for width in (request.width, request.value_width):
        if not 1 <= width <= WIDEST or width % 8:
            return f"heads of {width} features"
    for size in (request.batch, request.length, request.span):
        if not isinstance(size, int) or size < 1:
            return f"{size} queries, keys or batches"
    strides = (request.q, request.k, request.v, request.out)
    if any(s[3] != 1 for s in strides):
        return "features that are no neighbours"
    if any(not isinstance(n, int) or n % 8 for s in strides[:3] for n in s[:3]):
        return "rows that do not begin at multiples of 16 bytes"
    return None if request.scale > 0 else f"a scale of {request.scale}"


def default_form(request: Attention) -> FlashForm:
    """The form that was measured to be best."""
    wide = max(request.width, request.value_width)
    if request.mask is not None:
        return FlashForm(2, 64)
    if wide <= 64:
        return FlashForm(3, 128)
    return FlashForm(2, 128 if wide <= 128 else 64)


@dataclass
class _Place:
    """Where a block is, as i64."""

    batch: str
    head: str
    first: str  # the first query of its tile
    count: str  # tiles of keys
    seen: str = "0"  # tiles of keys before


@dataclass
class _State:
    """What a thread carries from tile to tile, for its two rows."""

    top: list[str]
    total: list[str]
    outputs: list[str]
    weights: list[str]  # pairs of them, of the last tile

    def flat(self) -> list[tuple[str, str]]:
        """All of it, to be carried around a loop."""
        floats = [("float", x) for x in (*self.top, *self.total, *self.outputs)]
        return [*floats, *(("i32", x) for x in self.weights)]

    def like(self, flat: Sequence[str]) -> _State:
        """Other values in the same places."""
        end = 4 + len(self.outputs)
        return _State(list(flat[:2]), list(flat[2:4]), list(flat[4:end]), list(flat[end:]))


class _Flash:
    """Writes the kernel."""

    def __init__(self, request: Attention, gpu: Gpu, form: FlashForm) -> None:
        self.request, self.form, self.gpu = request, form, gpu
        assert isinstance(request.length, int) and request.group is not None
        self.group, self.length = request.group, request.length
        self.w = w = GpuWriter(gpu)
        self.rows = ROWS * form.groups
        self.parts = -(-self.length // self.rows)  # tiles of queries
        self.units = (request.batch, request.heads, self.parts)
        self.span, self.heads = w.size(request.span), w.size(request.heads)
        self.pairs = w.mul(w.size(request.batch), self.heads)
        self._share()
        self.base = w.asked_at(ALIGNED)
        self.thread = w.entry(f"trunc i64 {w.thread()} to i32")
        self.team = w.entry(f"lshr i32 {self.thread}, 7")  # number of the warpgroup

    def launch(self) -> Launch:
        """How it is launched."""
        threads = WARPGROUP * (self.form.groups + 1)
        most = self.gpu.multiprocessors if self.form.persistent else 0
        return Launch(
            threads, 1, self.units, self.shared, most, resident=1, even=not self.request.causal
        )

    # ---- shared memory ----

    def _share(self) -> None:
        """Where everything is in shared memory, in bytes."""
        form, request = self.form, self.request
        lines = [-(-x // LINE) for x in (request.width, request.value_width, request.width)]
        self.lines = lines  # tiles of 64 features side by side, by kind
        self.tall = [form.keys, form.keys, self.rows]
        self.bytes = [a * b * SWIZZLED for a, b in zip(lines, self.tall, strict=True)]
        keys = self.bytes[_QUERIES]
        values = keys + form.stages * self.bytes[_KEYS]
        self.starts = [keys, values, 0]
        self.barriers = values + form.stages * self.bytes[_VALUES]
        self.shared = self.barriers + 16 * (1 + 2 * form.stages)
        if self.shared > MOST_SHARED:
            raise Declined(f"{self.shared} bytes of shared memory")

    def _tensors(self) -> list[str]:
        """Keys, values and queries as the copy engine is told of them."""
        r = self.request
        return [
            self._tensor(_K, r.k, r.kv_heads, r.span, r.width, self.form.keys),
            self._tensor(_V, r.v, r.kv_heads, r.span, r.value_width, self.form.keys),
            self._tensor(_Q, r.q, r.heads, r.length, r.width, self.rows),
        ]

    def _tensor(
        self, word: int, strides: Sequence[Size], heads: Size, length: Size, width: int, rows: int
    ) -> str:
        dims = (width, length, heads, self.request.batch)
        far = tuple(strides[k] if n != 1 else LINE for k, n in zip((2, 1, 0), dims[1:], strict=True))
        # What is repeated has one element along that dim.
        dims = (width, *(1 if far[k] == 0 else n for k, n in enumerate(dims[1:])))
        far = tuple(n or LINE for n in far)
        tile = TensorTile(word, self.request.dtype, dims, far, (LINE, rows, 1, 1))
        return self.w.tensor(tile)

    def _barrier(self, kind: int, stage: str, empty: bool) -> str:
        """The barrier of a tile: full, or empty."""
        w, first = self.w, {_QUERIES: 0, _KEYS: 1, _VALUES: 1 + self.form.stages}[kind]
        start = number(w, "add", self.base, self.barriers + 16 * first + 8 * empty)
        return start if kind == _QUERIES else number(w, "add", start, number(w, "shl", stage, 4))

    def _stage(self, kind: int, count: str) -> tuple[str, str]:
        """Which stage the tile of this number, an i64, goes to, and the parity of the phase of its
        barriers then."""
        w, short = self.w, self._short(count)
        if kind == _QUERIES:
            return "0", number(w, "and", short, 1)
        stages = self.form.stages
        turn = number(w, "lshr", short, stages.bit_length() - 1)
        return number(w, "and", short, stages - 1), number(w, "and", turn, 1)

    def _tile(self, kind: int, stage: str) -> str:
        """Where a tile is."""
        w, start = self.w, number(self.w, "add", self.base, self.starts[kind])
        if kind == _QUERIES:
            return start
        return number(w, "add", start, number(w, "mul", stage, self.bytes[kind]))

    def _short(self, x: str) -> str:
        return self.w(f"trunc i64 {x} to i32") if x[0] == "%" else x

    # ---- tiles of queries ----

    def _turns(self) -> str:
        """How many tiles of queries this block takes."""
        w = self.w
        all_tiles = w.mul(self.pairs, str(self.parts))
        whole, left = w.div(all_tiles, w.blocks()), w.rem(all_tiles, w.blocks())
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

    def _place(self, turn: str, seen: str) -> _Place:
        """The tile of queries of a turn. With a causal mask the longest come first."""
        w, end = self.w, self.span
        unit = w.add(w.mul(turn, w.blocks()), self._seat(turn))
        if self.request.causal:
            part = w.sub(str(self.parts - 1), w.div(unit, self.pairs))
            pair = w.rem(unit, self.pairs)
        else:
            part, pair = w.rem(unit, str(self.parts)), w.div(unit, str(self.parts))
        first = w.mul(part, str(self.rows))
        if self.request.causal:
            end = w.least(end, w.add(first, str(self.rows)))
        count = w.ceil(end, str(self.form.keys))
        return _Place(w.div(pair, self.heads), w.rem(pair, self.heads), first, count, seen)

    # ---- the kernel ----

    def write(self) -> None:
        """All of it."""
        w, groups = self.w, self.form.groups
        with w.when(w(f"icmp eq i32 {self.thread}, 0")):
            places = [number(w, "add", self.base, self.barriers + 8 * k) for k in range(
                2 * (1 + 2 * self.form.stages))]
            hopper.make_barriers(w, [(p, groups if k % 2 else 1) for k, p in enumerate(places)])
        w.barrier()
        turns = self._turns()
        loads = w(f"icmp eq i32 {self.team}, 0")
        spare, own = SHARES[groups]
        n = w.name("R")
        w.do(f"br i1 {loads}, label %{n}.loads, label %{n}.computes")
        w.label(f"{n}.loads")
        hopper.registers(w, spare, more=False)
        with w.when(w(f"icmp eq i32 {self.thread}, 0")):
            self._load(turns)
        w.do(f"br label %{n}.done")
        w.label(f"{n}.computes")
        hopper.registers(w, own, more=True)
        self._compute(turns)
        w.do(f"br label %{n}.done")
        w.label(f"{n}.done")

    # ---- loading ----

    def _load(self, turns: str) -> None:
        """Load all tiles, in the order in which they are used."""
        w, tensors = self.w, self._tensors()
        with w.loop("0", turns, 1, [("i64", "0")]) as turn:
            place = self._place(turn.index, turn.carried[0])

            def load(kind: int, count: str, row: str) -> None:
                self._fetch(tensors[kind], kind, count, place, row)

            last = w.sub(place.count, "1")
            load(_QUERIES, turn.index, place.first)
            load(_KEYS, place.seen, w.mul(last, str(self.form.keys)))
            with w.loop("1", place.count, 1) as step:
                count = w.add(place.seen, step.index)
                row = w.mul(w.sub(last, step.index), str(self.form.keys))
                load(_KEYS, count, row)
                load(_VALUES, w.sub(count, "1"), w.add(row, str(self.form.keys)))
            load(_VALUES, w.add(place.seen, last), "0")
            turn.next = [w.add(place.seen, place.count)]

    def _fetch(self, tensor: str, kind: int, count: str, place: _Place, row: str) -> None:
        """Load the tile of this number, when there is room."""
        w, request = self.w, self.request
        stage, parity = self._stage(kind, count)
        hopper.await_phase(w, self._barrier(kind, stage, True), number(w, "xor", parity, 1))
        full = self._barrier(kind, stage, False)
        hopper.expect(w, full, self.bytes[kind])
        head = place.head if kind == _QUERIES else w.div(place.head, str(self.group))
        strides = (request.k, request.v, request.q)[kind]
        index = [  # what is repeated has one element
            self._short(x) if stride != 0 else "0"
            for x, stride in ((row, strides[2]), (head, strides[1]), (place.batch, strides[0]))
        ]
        start = self._tile(kind, stage)
        for k in range(self.lines[kind]):
            there = number(w, "add", start, k * self.tall[kind] * SWIZZLED)
            hopper.load_tile(w, there, tensor, [str(LINE * k), *index], full)

    # ---- computing ----

    def _compute(self, turns: str) -> None:
        w = self.w
        own = number(w, "sub", self.team, 1)  # number of the warpgroup among those that compute
        inside = number(w, "and", self.thread, WARPGROUP - 1)
        lane = number(w, "and", inside, 31)
        self.lead = w(f"icmp eq i32 {inside}, 0")
        self.top_row = number(w, "mul", own, ROWS)  # of this warpgroup in its tile
        warp = number(w, "shl", number(w, "lshr", inside, 5), 4)
        row = number(w, "add", warp, number(w, "lshr", lane, 2))
        self.row = number(w, "add", self.top_row, row)  # of this thread; it has the eighth after it
        self.quarter = number(w, "and", lane, 3)
        self.column = number(w, "shl", self.quarter, 1)  # it has the one after it, and every eighth
        place = number(w, "add", self.base, number(w, "mul", own, ROWS * SWIZZLED))
        self.queries = hopper.descriptor(w, place)
        with w.loop("0", turns, 1, [("i64", "0")]) as turn:
            self.place = self._place(turn.index, turn.carried[0])
            self._arrived(_QUERIES, turn.index)
            self._store(self._attend(turn.index))
            turn.next = [w.add(self.place.seen, self.place.count)]

    def _arrived(self, kind: int, count: str) -> str:
        """Wait for the tile of this number: where it is."""
        stage, parity = self._stage(kind, count)
        hopper.await_phase(self.w, self._barrier(kind, stage, False), parity)
        return self._tile(kind, stage)

    def _release(self, kind: int, count: str) -> None:
        """Let the tile of this number be overwritten."""
        stage, _ = self._stage(kind, count)
        with self.w.when(self.lead):
            hopper.arrive(self.w, self._barrier(kind, stage, True))

    def _attend(self, turn: str) -> _State:
        """All keys of a tile of queries."""
        w, place, request = self.w, self.place, self.request
        scores = hopper.end(w, self._scores(place.seen), 0)
        self._release(_KEYS, place.seen)
        state = _State([LOWEST] * 2, [ZERO] * 2, [ZERO] * (request.value_width // 2), [])
        state, weights, _ = self._softmax(state, scores, w.sub(place.count, "1"), masked=True)
        state.weights = self._packed(weights)
        start, masked = "1", request.mask is not None
        if not masked and self._cut_tiles() > 1:
            limit = w.least(self.span, w.add(self._first_row(), "1"))
            cut = w.sub(place.count, w.div(limit, str(self.form.keys)))
            stop = w.least(place.count, w.most("1", cut))
            state = self._steps(state, start, stop, masked=True)
            start = stop
        state = self._steps(state, start, place.count, masked)
        self._release(_QUERIES, turn)
        last = w.sub(w.add(place.seen, place.count), "1")
        state.outputs = hopper.end(w, self._outputs(last, state), 0)
        self._release(_VALUES, last)
        return state

    def _cut_tiles(self) -> int:
        """How many tiles of keys of a tile of queries have keys that some query does not see."""
        keys = self.form.keys
        if not self.request.causal or keys % self.rows == 0:
            return 1
        return 1 + -(-self.rows // keys)

    def _first_row(self) -> str:
        """The first query of this warpgroup."""
        w = self.w
        return w.add(self.place.first, w(f"zext i32 {self.top_row} to i64"))

    def _steps(self, state: _State, start: str, stop: str, masked: bool) -> _State:
        """Some tiles of keys, counted from the last one."""
        w = self.w
        with w.loop(start, stop, 1, state.flat()) as step:
            now = state.like(step.carried)
            count = w.add(self.place.seen, step.index)
            before = w.sub(count, "1")
            scores = self._scores(count)
            outputs = self._outputs(before, now)
            scores = hopper.end(w, scores, 1)
            self._release(_KEYS, count)
            at = w.sub(w.sub(self.place.count, "1"), step.index)
            now, weights, fades = self._softmax(now, scores, at, masked)
            outputs = hopper.end(w, outputs, 0)
            self._release(_VALUES, before)
            now.outputs = [w(f"fmul float {x}, {fades[k // 2 % 2]}") for k, x in enumerate(outputs)]
            now.weights = self._packed(weights)
            step.next = [x for _, x in now.flat()]
        return state.like(step.results)

    def _scores(self, count: str) -> list[str]:
        """The products of the queries with a tile of keys, begun."""
        w, keys = self.w, self.form.keys
        start = hopper.descriptor(w, self._arrived(_KEYS, count))
        a, b = [], []
        for k in range(-(-self.request.width // STEP)):
            line, within = divmod(k * STEP, LINE)
            a.append(self._moved(self.queries, line * self.rows * SWIZZLED + 2 * within))
            b.append(self._moved(start, line * keys * SWIZZLED + 2 * within))
        return hopper.begin(w, self.request.dtype, keys, a, b)

    def _outputs(self, count: str, state: _State) -> list[str]:
        """The products of the weights with a tile of values, begun."""
        w, keys = self.w, self.form.keys
        start = hopper.descriptor(w, self._arrived(_VALUES, count), keys * SWIZZLED)
        steps = range(keys // STEP)
        a = [state.weights[4 * k : 4 * k + 4] for k in steps]
        b = [self._moved(start, k * STEP * SWIZZLED) for k in steps]
        width = self.request.value_width
        return hopper.begin(w, self.request.dtype, width, a, b, state.outputs, turned=True)

    def _moved(self, descriptor: str, bytes_: int) -> str:
        return self.w.add(descriptor, str(bytes_ >> 4))

    def _packed(self, values: Sequence[str]) -> list[str]:
        """Short floats in pairs, as the tensor cores and memory take them."""
        pairs = zip(values[::2], values[1::2], strict=True)
        return [hopper.pair(self.w, self.request.dtype, a, b) for a, b in pairs]

    # ---- softmax ----

    def _softmax(
        self, state: _State, scores: list[str], at: str, masked: bool
    ) -> tuple[_State, list[str], list[str]]:
        """Maxima and sums with the scores of the tile of keys `at`, their weights, and what the
        outputs so far are to be multiplied with."""
        scores = self._masked(scores, at) if masked else scores
        now = _State([], [], state.outputs, state.weights)
        weights, fades = [""] * len(scores), []
        for h in (0, 1):
            mine = [z for z in range(len(scores)) if z // 2 % 2 == h]
            top, base = self._top(state.top[h], [scores[z] for z in mine])
            fades.append(self._power(self.w(f"fsub float {state.top[h]}, {base}")))
            self._weigh(weights, scores, mine, base)
            sum_ = self._tree(self._sum, [weights[z] for z in mine])
            now.total.append(self._fma(state.total[h], fades[h], sum_))
            now.top.append(top)
        return now, weights, fades

    def _top(self, before: str, scores: Sequence[str]) -> tuple[str, str]:
        """The new maximum of a row in the unit of its powers, and what to subtract: 0 where all
        scores are minus infinity."""
        w, top = self.w, self._tree(self._larger, list(scores))
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
        """A power of two, or of e where a mask is added: in other units it might overflow."""
        if self.request.adds:
            x = self.w(f"fmul float {x}, {f32(LOG2_E)}")
        return self.w.call("float", "llvm.nvvm.ex2.approx.ftz.f", ("float", x))

    def _fma(self, a: str, b: str, c: str) -> str:
        return self.w.call("float", "llvm.fma.f32", ("float", a), ("float", b), ("float", c))

    def _larger(self, a: str, b: str) -> str:
        return self.w.call("float", "llvm.maxnum.f32", ("float", a), ("float", b))

    def _sum(self, a: str, b: str) -> str:
        return self.w(f"fadd float {a}, {b}")

    def _tree(self, join: Callable[[str, str], str], values: list[str]) -> str:
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=False)
            values = [join(a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
        return values[0]

    # ---- masks ----

    def _masked(self, scores: list[str], at: str) -> list[str]:
        """Scores with the mask added, or minus infinity where a key is not seen."""
        w, request = self.w, self.request
        found = scores if request.mask is None else self._by_mask(scores, at)
        whole = isinstance(request.span, int) and request.span % self.form.keys == 0
        if whole and not request.causal:
            return found
        first = number(w, "add", self._short(w.mul(at, str(self.form.keys))), self.column)
        limits = []
        for h in (0, 1):
            end = self._short(self.span)
            if request.causal:
                row = number(w, "add", self._short(self.place.first), self.row)
                row = number(w, "add", row, 8 * h + 1)
                end = w.call("i32", "llvm.smin.i32", ("i32", end), ("i32", row))
            limits.append(number(w, "sub", end, first))
        seen = [
            w(f"icmp sgt i32 {limits[z // 2 % 2]}, {8 * (z // 4) + z % 2}")
            for z in range(len(found))
        ]
        return [
            w(f"select i1 {s}, float {x}, float {LOWEST}")
            for s, x in zip(seen, found, strict=True)
        ]

    def _by_mask(self, scores: list[str], at: str) -> list[str]:
        """Scores with numbers added, then in natural units, or minus infinity where the mask says
        so."""
        w, request = self.w, self.request
        assert request.mask is not None
        kind, stride = memory_element(request.mask), w.size(request.mask_strides[3])
        last = w.sub(self.span, "1")
        column = w.add(
            w.mul(at, str(self.form.keys)), w(f"zext i32 {self.column} to i64")
        )
        starts = [self._mask_row(h) for h in (0, 1)]
        found = []
        for z, x in enumerate(scores):
            place = w.least(w.add(column, str(8 * (z // 4) + z % 2)), last)
            raw = w(f"load {kind}, ptr {w.offset(starts[z // 2 % 2], kind, w.mul(place, stride))}")
            if request.mask == "bool":
                seen = w(f"icmp ne i8 {raw}, 0")
                found.append(w(f"select i1 {seen}, float {x}, float {LOWEST}"))
                continue
            if request.mask != "f32":
                raw = unpacked(w, request.mask, w(f"zext i16 {raw} to i32"))[0]
            found.append(self._fma(x, f32(request.scale), raw))
        return found

    def _mask_row(self, h: int) -> str:
        """Where the mask of a row begins; rows that do not exist have that of the last one."""
        assert self.request.mask is not None
        row = self.w.least(self._row(h), str(self.length - 1))
        index = (self.place.batch, self.place.head, row)
        return self._at(_MASK, self.request.mask, self.request.mask_strides, index)

    # ---- results ----

    def _row(self, h: int) -> str:
        """The number of a row of this thread among the queries, an i64."""
        w = self.w
        return w.add(self.place.first, w(f"zext i32 {number(w, 'add', self.row, 8 * h)} to i64"))

    def _at(
        self, operand: int, dtype: Element, strides: Sequence[Size], index: Sequence[str]
    ) -> str:
        """The address of an element; `index` begins with the batch, and may be shorter."""
        w, far = self.w, "0"
        for position, stride in zip(index, strides, strict=False):
            far = w.add(far, w.mul(position, w.size(stride)))
        return w.offset(w.pointer(operand), memory_element(dtype), far)

    def _store(self, state: _State) -> None:
        """Outputs over their sums, and the logarithms of the sums."""
        w, request = self.w, self.request
        factors = []
        for h in (0, 1):
            for distance in (1, 2):
                other = w.shuffled(state.total[h], "f32", distance)
                state.total[h] = self._sum(state.total[h], other)
            none = w(f"fcmp oeq float {state.total[h]}, {ZERO}")
            factor = w(f"fdiv float {f32(1.0)}, {state.total[h]}")
            factors.append(w(f"select i1 {none}, float {ZERO}, float {factor}"))
        numbers = [
            w(f"fmul float {x}, {factors[k // 2 % 2]}") for k, x in enumerate(state.outputs)
        ]
        words = self._packed(numbers)
        for h in (0, 1):
            row = self._row(h)
            index = (self.place.batch, self.place.head, row)
            exists = w(f"icmp slt i64 {row}, {self.length}")
            self._store_row(words[h::2], self._at(_OUT, request.dtype, request.out, index), exists)
            if request.lse is not None:
                first = w(f"icmp eq i32 {self.quarter}, 0")
                with w.when(w(f"and i1 {first}, {exists}")):
                    there = self._at(_LSE, "f32", request.lse, index)
                    w.do(f"store float {self._logarithm(state, h)}, ptr {there}")

    def _logarithm(self, state: _State, h: int) -> str:
        """The natural logarithm of the sum of a row; 0 where it has no key."""
        w, top, total = self.w, state.top[h], state.total[h]
        if not self.request.adds:
            top = w(f"fmul float {top}, {f32(1 / LOG2_E)}")
        none = w(f"fcmp oeq float {total}, {ZERO}")
        sum_ = self._sum(top, function(w, "log", [total], "f32", 0))
        return w(f"select i1 {none}, float {ZERO}, float {sum_}")

    def _store_row(self, words: list[str], at: str, exists: str) -> None:
        """A row of outputs, of which this thread has two of every eight. Four threads exchange
        them, so that each stores 16 bytes."""
        w, count = self.w, len(words)
        fours = [words[k : k + 4] for k in range(0, count, 4)]
        fours = [hopper.exchanged(w, [*f, *["0"] * (4 - len(f))], self.quarter) for f in fours]
        begin = w(f"ptrtoint ptr {at} to i64")
        whole = w(f"icmp eq i64 {w(f'and i64 {begin}, 15')}, 0")
        own = w(f"zext i32 {self.quarter} to i64")
        with w.when(w(f"and i1 {exists}, {whole}")):
            for k, four in enumerate(fours):
                mine = w.add(own, str(4 * k))
                vector = "poison"
                for j, x in enumerate(four):
                    vector = w(f"insertelement <4 x i32> {vector}, i32 {x}, i64 {j}")
                there = w.offset(at, "i8", w.mul(mine, "16"))
                with w.when("true" if 4 * k + 4 <= count else w(f"icmp slt i64 {mine}, {count}")):
                    w.do(f"store <4 x i32> {vector}, ptr {there}, align 16")
        with w.when(w(f"and i1 {exists}, {w(f'xor i1 {whole}, true')}")):
            column = w(f"zext i32 {self.column} to i64")
            for k, word in enumerate(words):
                for side in (0, 1):
                    half = w(f"trunc i32 {number(w, 'lshr', word, 16 * side)} to i16")
                    there = w.offset(at, "i16", w.add(column, str(8 * k + side)))
                    w.do(f"store i16 {half}, ptr {there}")
