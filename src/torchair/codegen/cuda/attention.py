"""Attention for a few queries: the keys and values of a head are read once, by several blocks.

A *team* of lanes takes a key, each with some packs of it, so that a warp reads neighbouring keys;
it has the queries of the key head in registers. Each team keeps its own maximum, sum and outputs as
it goes; the teams of a warp meet by shuffles, the warps of a block in shared memory, and the blocks
of a cluster read each other's shared memory. The packs of the next keys are on their way while
those of this turn are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from torchair.codegen.cuda import packs
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.packs import PACK, REGISTERS, ZERO
from torchair.codegen.cuda.softmax import LOWEST, PartialSoftmax, Parts, Softmax, SoftmaxState
from torchair.codegen.cuda.sums import COUNTERS
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import BYTES, Element, Size
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.codegen.text.maths_wide import LOG2_E
from torchair.codegen.text.memory import memory_element, store_scalar
from torchair.codegen.text.point import positions
from torchair.codegen.text.writer import f32

MOST_QUERIES = 4
"""Queries that are served."""
WIDEST = 256
"""Features of the widest head."""
REGISTERS_FOR_ROWS = 32
"""Numbers of a lane that the queries of a block may take, and as many for their outputs."""
AHEAD = 4
"""Packs of keys that are on their way at a time, and as many of values."""
MOST_WARPS = 8
MOST_BLOCKS = 8  # of a cluster, on any GPU that has clusters
_Q, _K, _V, _MASK, _OUT, _LSE, _SCRATCH = range(7)  # words
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionForm:
    """How the keys of a head are given to warps."""

    rows: int  # query rows of a block
    keys: int  # of a team at a time
    warps: int  # of a block
    blocks: int  # of a cluster

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys}x{self.warps}x{self.blocks}"


def attention(
    request: Attention,
    gpu: Gpu,
    label: str = "attention",
    *,
    form: AttentionForm | None = None,
    early: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of an attention, and how to launch it. An `early` one may begin before the launch
    before it ends. Raises Declined for what is not served."""
    refusal = _refusal(request)
    if refusal:
        raise Declined(refusal)
    form = form or default_form(request, gpu)
    writer = _Attention(request, gpu, form)
    early = early and gpu.begins_early
    if early:
        writer.w.wait()
        writer.w.release("true")
    writer.write()
    chunks = -(-writer.all_rows // form.rows)
    units = (request.batch, request.kv_heads, chunks, form.blocks)
    launch = Launch(form.warps * WARP, 1, units, cluster=form.blocks, early=early)
    if gpu.persistent and form.blocks > 1:
        launch = replace(launch, cluster=1, scratch=_scratch(request, form, chunks))
    return writer.w.kernel(label), launch


def _scratch(request: Attention, form: AttentionForm, chunks: int) -> int:
    """Bytes in which the blocks of a head leave their parts, where they are no cluster."""
    if not isinstance(request.batch, int) or not isinstance(request.kv_heads, int):
        raise Declined("parts of a head for a number of heads that is not known")
    heads = request.batch * request.kv_heads * chunks
    if 4 * heads > COUNTERS:
        raise Declined(f"{heads} counters")
    return COUNTERS + 4 * heads * form.blocks * form.rows * (request.value_width + 2)


def _refusal(request: Attention) -> str | None:
    """Why an attention is not served."""
    if request.dtype not in packs.DTYPES:
        return f"attention over {request.dtype}"
    if not isinstance(request.length, int) or not 1 <= request.length <= MOST_QUERIES:
        return f"attention of {request.length} queries"
    group, heads = request.group, request.kv_heads
    if not group or not isinstance(heads, int) or request.heads != group * heads:
        return f"{request.heads} heads over {heads}"
    each = packs.pack_elements(request.dtype)
    for width in (request.width, request.value_width):
        if not 1 <= width <= WIDEST or width % each:
            return f"heads of {width} features"
    strides = (request.q, request.k, request.v, request.out)
    return None if all(s[3] == 1 for s in strides) else "features that are no neighbours"


def default_form(request: Attention, gpu: Gpu) -> AttentionForm:
    """A form that is good without being measured: so many blocks that a warp has two turns or
    more, and no more of them than keep the device busy. Few keys are rather read twice, each time
    for half of the queries, than that multiprocessors are idle. The batch does not count where no
    bit may depend on it: there may be more clusters than are needed then."""
    shape = _Shape(request)
    rows, batches = request.rows or 1, 1 if request.batch_invariant else request.batch
    held = max(shape.key_packs, shape.value_packs) * shape.each
    chunks = -(-rows // max(1, REGISTERS_FOR_ROWS // held))
    keys = max(1, AHEAD // max(shape.key_packs, shape.value_packs))
    tile = keys * shape.teams
    tiles = -(-request.span // tile) if isinstance(request.span, int) else 1024
    blocks, units = 1, chunks
    for size in (batches, request.kv_heads):
        units *= size if isinstance(size, int) else 1
    while (
        gpu.has_clusters
        and blocks < MOST_BLOCKS
        and tiles > 8 * blocks
        and units * blocks < gpu.multiprocessors
    ):
        blocks *= 2
    warps = 4 if tiles <= 16 * blocks else MOST_WARPS
    if warps == 4 and rows > chunks and 2 * units * blocks <= gpu.multiprocessors:
        chunks *= 2
    return AttentionForm(-(-rows // chunks), keys, warps, blocks)


def forms(request: Attention, gpu: Gpu) -> list[AttentionForm]:
    """Forms that are worth measuring, the default first."""
    first = default_form(request, gpu)
    found = {first: None}
    for blocks in dict.fromkeys((first.blocks, max(1, first.blocks // 2))):
        for warps, keys in ((4, first.keys), (8, first.keys), (8, max(1, first.keys // 2))):
            found[AttentionForm(first.rows, keys, warps, blocks)] = None
    return list(found)


class _Shape:
    """How the features of a head lie in the lanes of a team."""

    def __init__(self, request: Attention) -> None:
        self.each = packs.pack_elements(request.dtype)
        keys, values = request.width // self.each, request.value_width // self.each
        self.team = min(WARP, 1 << (max(keys, values) - 1).bit_length())
        self.teams = WARP // self.team  # of a warp
        self.key_packs = -(-keys // self.team)  # of a lane
        self.value_packs = -(-values // self.team)


class _Attention:
    """Writes the kernel."""

    def __init__(self, request: Attention, gpu: Gpu, form: AttentionForm) -> None:
        self.request, self.form, self.dtype = request, form, request.dtype
        self.shape = _Shape(request)
        assert request.rows is not None and isinstance(request.length, int)
        self.all_rows, self.length = request.rows, request.length
        self.rows = form.rows
        self.threads = form.warps * WARP
        self.w = w = GpuWriter(gpu)
        self.softmax = Softmax(w, request.adds)
        self.thread = w.thread()
        self.lane = w.entry(f"and i64 {self.thread}, {WARP - 1}")
        self.warp = w.entry(f"lshr i64 {self.thread}, 5")
        self.member = w.rem(self.lane, str(self.shape.team))  # of its team
        self.team = w.div(self.lane, str(self.shape.team))
        span = w.size(request.span)
        self.limit = w.least(span, str(self.length)) if request.causal else span
        tile = self.shape.teams * form.keys
        self.tiles = w.div(w.add(self.limit, str(tile - 1)), str(tile))
        self._place()
        self.fits = self._fits()

    def _place(self) -> None:
        """Which head and rows this block is for, and where they begin."""
        w, request = self.w, self.request
        unit, self.rank = w.block_number(), "0"
        if self.form.blocks > 1:
            self.rank = w.rem(unit, str(self.form.blocks))
            unit = w.div(unit, str(self.form.blocks))
        self.head = unit
        chunks = -(-self.all_rows // self.rows)
        sizes = (request.batch, request.kv_heads, chunks)
        self.batch, self.kv_head, chunk = positions(w, unit, sizes)
        self.first_row = w.mul(chunk, str(self.rows))
        head = (self.batch, self.kv_head)
        self.key_start = self._at(_K, self.dtype, request.k, head)
        self.value_start = self._at(_V, self.dtype, request.v, head)
        self.mask_starts = [
            self._at(_MASK, request.mask, request.mask_strides, (self.batch, *self._row(row)))
            for row in range(1 if request.one_mask_row else self.rows)
            if request.mask is not None
        ]

    def _fits(self) -> str:
        """Whether all packs begin at multiples of their size, an i1."""
        w, rest = self.w, "0"
        for operand, strides in ((_Q, self.request.q), (_K, self.request.k), (_V, self.request.v)):
            numbers = [w.entry(f"ptrtoint ptr {w.pointer(operand)} to i64")]
            numbers += [w.mul(w.size(s), str(BYTES[self.dtype])) for s in strides[:3]]
            for n in numbers:
                rest = n if rest == "0" else w(f"or i64 {rest}, {n}")
        return w(f"icmp eq i64 {w(f'and i64 {rest}, {PACK - 1}')}, 0")

    # ---- rows ----

    def _row(self, row: int | str) -> tuple[str, str]:
        """Head and query of a row of this block; rows that do not exist repeat the last one."""
        w = self.w
        number = w.add(self.first_row, str(row))
        if self.all_rows % self.rows:
            number = w.least(number, str(self.all_rows - 1))
        down = w.mul(self.kv_head, str(self.all_rows // self.length))
        return w.add(down, w.div(number, str(self.length))), w.rem(number, str(self.length))

    def _at(
        self, operand: int, dtype: Element, strides: Sequence[Size], index: Sequence[str]
    ) -> str:
        """The address of an element; `index` begins with the batch, and may be shorter."""
        w, far = self.w, "0"
        for position, stride in zip(index, strides, strict=False):
            far = w.add(far, w.mul(position, w.size(stride)))
        return w.offset(w.pointer(operand), memory_element(dtype), far)

    # ---- the kernel ----

    def write(self) -> None:
        """The turns of each warp, and then all parts together."""
        w, form = self.w, self.form
        first = w.add(w.mul(self.rank, str(form.warps)), self.warp)
        step = form.warps * form.blocks
        loaded, masks = self._packs(first), self._masks(first)
        self.queries = [self._query(row) for row in range(self.rows)]
        state = SoftmaxState.empty(self.rows, self.shape.value_packs * self.shape.each)
        kind = memory_element(self.request.mask) if self.request.mask else ""
        carried = [*(("i32", x) for x in loaded), *((kind, x) for x in masks)]
        carried += [("float", x) for x in state.flat()]
        with w.loop(first, self.tiles, step, carried) as loop:
            after = w.add(loop.index, str(step))
            following = [*self._packs(after), *self._masks(after)]
            here = loop.carried[: len(following)]
            inside = state.like(loop.carried[len(following) :])
            now = self._turn(loop.index, here[: len(loaded)], here[len(loaded) :], inside)
            loop.next = [*following, *now.flat()]
        state = state.like(loop.results[len(following) :])
        self._together(self.softmax.across(state, self.shape.team))

    # ---- loads ----

    def _keys(self, tile: str) -> list[str]:
        """The keys of this team in a turn; there may be less."""
        w, shape = self.w, self.shape
        first = w.add(w.mul(tile, str(shape.teams * self.form.keys)), self.team)
        return [w.add(first, str(k * shape.teams)) for k in range(self.form.keys)]

    def _packs(self, tile: str) -> list[str]:
        """The packs of keys and values of a turn, on their way."""
        w, request, kind = self.w, self.request, memory_element(self.dtype)

        def loaded() -> list[str]:
            keys = [w.least(key, w.sub(self.limit, "1")) for key in self._keys(tile)]
            found = []
            for start, stride, width in (
                (self.key_start, request.k[2], request.width),
                (self.value_start, request.v[2], request.value_width),
            ):
                rows = [w.offset(start, kind, w.mul(key, w.size(stride))) for key in keys]
                found += self._loaded(rows, width)
            return found

        there = w(f"icmp slt i64 {tile}, {self.tiles}")
        return w.chosen(there, "i32", loaded, "poison")

    def _loaded(self, rows: Sequence[str], width: int) -> list[str]:
        """This lane's packs of some rows of so many features, row by row."""
        w, shape = self.w, self.shape
        found = []
        for k in range(-(-width // (shape.team * shape.each))):
            number = w.add(self.member, str(k * shape.team))
            found.append(w.chosen(self._inside(k, width), "i32", self._reader(rows, number)))
        return _joined(_share(part, r, rows) for r in range(len(rows)) for part in found)

    def _inside(self, k: int, width: int) -> str | None:
        """Whether a row of so many features has a pack for this lane, its k-th one, an i1. None if
        it has one for all."""
        w, shape = self.w, self.shape
        if (k + 1) * shape.team * shape.each <= width:
            return None
        return w(f"icmp slt i64 {w.add(self.member, str(k * shape.team))}, {width // shape.each}")

    def _reader(self, rows: Sequence[str], number: str) -> Callable[[], list[str]]:
        """Loads the pack of this number of each row."""
        w, far = self.w, self.w.mul(number, str(PACK))

        def fast() -> list[str]:
            return _joined(packs.stream_pack(w, w.offset(row, "i8", far)) for row in rows)

        def slow() -> list[str]:
            starts = (w.offset(row, "i8", far) for row in rows)
            return _joined(packs.gather_pack(w, self.dtype, start) for start in starts)

        return lambda: w.either(self.fits, "i32", fast, slow)

    def _query(self, row: int) -> list[str]:
        """A row of the queries as floats, scaled."""
        w, request = self.w, self.request
        head, query = self._row(row)
        start = self._at(_Q, self.dtype, request.q, (self.batch, head, query))
        scale = request.scale if request.adds else request.scale * LOG2_E
        found = self._floats(self._loaded([start], request.width))
        return [w(f"fmul float {x}, {f32(scale)}") for x in found]

    def _masks(self, tile: str) -> list[str]:
        """The elements of the mask for a turn, as stored, by key and row."""
        w, request = self.w, self.request
        if request.mask is None:
            return []
        kind, stride = memory_element(request.mask), w.size(request.mask_strides[3])

        def loaded() -> list[str]:
            keys = [w.least(key, w.sub(self.limit, "1")) for key in self._keys(tile)]
            distances = [w.mul(key, stride) for key in keys]
            return [
                w(f"load {kind}, ptr {w.offset(start, kind, far)}")
                for far in distances
                for start in self.mask_starts
            ]

        there = w(f"icmp slt i64 {tile}, {self.tiles}")
        return w.chosen(there, kind, loaded, "poison")

    # ---- a turn ----

    def _turn(
        self, tile: str, loaded: list[str], masks: list[str], state: SoftmaxState
    ) -> SoftmaxState:
        """Some keys of each team: their scores, and their values added up."""
        keys = self._keys(tile)
        half = len(keys) * self.shape.key_packs * REGISTERS
        scores = [
            self._scores(key, self._floats(_share(loaded[:half], k, keys)), _share(masks, k, keys))
            for k, key in enumerate(keys)
        ]
        values = [self._floats(_share(loaded[half:], k, keys)) for k in range(len(keys))]
        return self.softmax.add(state, scores, values)

    def _floats(self, registers: Sequence[str]) -> list[str]:
        return _joined(packs.unpacked(self.w, self.dtype, register) for register in registers)

    def _scores(self, number: str, key: Sequence[str], masks: Sequence[str]) -> list[str]:
        """A key's scores, by row; minus infinity where it is not seen."""
        w, request = self.w, self.request
        exists = w(f"icmp slt i64 {number}, {self.limit}")
        found = []
        for row, query in enumerate(self.queries):
            score, seen = self._dot(query, key), exists
            if request.causal:
                late = w(f"icmp sle i64 {number}, {self._row(row)[1]}")
                seen = w(f"and i1 {seen}, {late}")
            if request.mask is not None:
                raw = masks[0 if request.one_mask_row else row]
                if request.mask == "bool":
                    seen = w(f"and i1 {seen}, {w(f'icmp ne i8 {raw}, 0')}")
                else:
                    score = w(f"fadd float {score}, {self._mask_number(raw)}")
            found.append(w(f"select i1 {seen}, float {score}, float {LOWEST}"))
        return found

    def _dot(self, query: Sequence[str], key: Sequence[str]) -> str:
        """The product of a query and a key, for all lanes of the team."""
        w, parts = self.w, [ZERO, ZERO]
        for k, (a, b) in enumerate(zip(query, key, strict=True)):
            parts[k % 2] = packs.fma(w, a, b, parts[k % 2])
        total, distance = packs.added(w, parts), self.shape.team // 2
        while distance:
            total = w(f"fadd float {total}, {w.shuffled(total, 'f32', distance)}")
            distance //= 2
        return total

    def _mask_number(self, raw: str) -> str:
        w, dtype = self.w, self.request.mask
        if dtype is None or dtype == "f32":
            return raw
        return packs.unpacked(w, dtype, w(f"zext i16 {raw} to i32"))[0]

    # ---- parts together ----

    def _together(self, state: SoftmaxState) -> None:
        """The warps of a block, and the blocks of a cluster."""
        w, form, width = self.w, self.form, self.request.value_width
        warps = Parts(w, form.warps, self.rows, width)
        self._put(state, warps)
        w.barrier()
        one = self._parts_of_blocks() if form.blocks > 1 else None
        with self._outputs(self.thread, self.threads) as (row, feature):
            part = self.softmax.together(
                [warps.read(number, row, feature) for number in range(form.warps)]
            )
            if one is None:
                self._result(row, feature, part)
            else:
                self._pass_on(one, row, feature, part)
        if one is None:
            return
        if w.gpu.persistent:
            self._together_in_scratch(one)
            return
        self._cluster_barrier()
        start = w.add(w.mul(self.rank, str(self.threads)), self.thread)
        with self._outputs(start, self.threads * form.blocks) as (row, feature):
            parts = [one.remote(block, row, feature) for block in range(form.blocks)]
            self._result(row, feature, self.softmax.together(parts))
        self._cluster_barrier()  # no block leaves while others read its memory

    def _parts_of_blocks(self) -> Parts:
        """Where a block leaves its part for the others of its head: in its shared memory, which a
        cluster reads, or in scratch memory, one part after the other."""
        w, width = self.w, self.request.value_width
        if not w.gpu.persistent:
            return Parts(w, 1, self.rows, width)
        parts = self.form.blocks * self.rows
        far = w.mul(self.head, str(parts * (width + 2)))
        outputs = w.offset(w.offset(w.pointer(_SCRATCH), "i8", str(COUNTERS)), "float", far)
        totals = w.offset(outputs, "float", str(parts * width))
        return Parts(
            w, 1, self.rows, width, (outputs, totals, w.offset(totals, "float", str(parts)))
        )

    def _together_in_scratch(self, one: Parts) -> None:
        """The last block of a head that gets here adds up all parts, in the order of the blocks."""
        w, form = self.w, self.form
        counter = w.offset(w.pointer(_SCRATCH), "i32", self.head)
        with (
            w.when(w.is_last(counter, str(form.blocks - 1), w.shared("i32", 1))),
            self._outputs(self.thread, self.threads) as (row, feature),
        ):
            parts = [one.read(block, row, feature) for block in range(form.blocks)]
            self._result(row, feature, self.softmax.together(parts))

    @contextmanager
    def _outputs(self, start: str, step: int) -> Iterator[tuple[str, str]]:
        """A loop over some outputs of the block, by row and feature."""
        w, width = self.w, str(self.request.value_width)
        count = self.rows * self.request.value_width
        with w.loop(start, str(count), step) as each:
            short = w(f"trunc i64 {each.index} to i32")
            row, feature = (w(f"{how} i32 {short}, {width}") for how in ("udiv", "urem"))
            yield w(f"zext i32 {row} to i64"), w(f"zext i32 {feature} to i64")

    def _put(self, state: SoftmaxState, parts: Parts) -> None:
        """What this warp has goes to shared memory, by its first team."""
        w, shape = self.w, self.shape
        with w.when(w(f"icmp eq i64 {self.team}, 0")):
            for k in range(shape.value_packs):
                number = w.add(self.member, str(k * shape.team))
                mine = slice(k * shape.each, (k + 1) * shape.each)
                inside = self._inside(k, self.request.value_width)
                with w.when(inside) if inside else nullcontext():
                    for row in range(self.rows):
                        feature = w.mul(number, str(shape.each))
                        parts.put(self.warp, row, feature, state.outputs[row][mine])
            with w.when(w(f"icmp eq i64 {self.member}, 0")):
                for row in range(self.rows):
                    parts.note(self.warp, str(row), state.total[row], state.top[row])

    def _pass_on(self, one: Parts, row: str, feature: str, part: PartialSoftmax) -> None:
        """What this block has, for the others of its cluster."""
        w = self.w
        number = self.rank if w.gpu.persistent else "0"
        one.put_one(number, row, feature, part[0])
        with w.when(w(f"icmp eq i64 {feature}, 0")):
            one.note(number, row, part[1], part[2])

    def _cluster_barrier(self) -> None:
        code = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        self.w.assembly(code, "void", "~{memory}")

    def _result(self, row: str, feature: str, part: PartialSoftmax) -> None:
        """Store an output; the logarithm of the sum too, with the first feature of a row."""
        w, request = self.w, self.request
        index = (self.batch, *self._row(row))
        exists = w(f"icmp slt i64 {w.add(self.first_row, row)}, {self.all_rows}")
        at = self._at(_OUT, self.dtype, request.out, (*index, feature))
        store_scalar(w, self.dtype, self.softmax.result(part), at, exists)
        if request.lse is None:
            return
        first = w(f"icmp eq i64 {feature}, 0")
        with w.when(w(f"and i1 {first}, {exists}")):
            place = self._at(_LSE, "f32", request.lse, index)
            w.do(f"store float {self.softmax.logarithm(part)}, ptr {place}")


def _share(items: Sequence[T], number: int, of: Sequence[str]) -> Sequence[T]:
    """One of as many equal parts of a list as another one is long."""
    size = len(items) // len(of)
    return items[number * size : (number + 1) * size]


def _joined(lists: Iterable[Sequence[str]]) -> list[str]:
    return [x for items in lists for x in items]
