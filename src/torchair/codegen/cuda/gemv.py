"""Products of one to four rows with a matrix whose rows of memory run along k, as nn.Linear stores
its weight: what matters is that the memory is never idle.

A group of warps takes some rows of the matrix at a time and walks on by the grid. The packs of the
next rows are on their way while those of this turn are summed up; the rows of A stay in registers.
Where a group has several warps, each has a part of k, and their sums meet in shared memory.

A kernel holds two versions: with packs, for addresses that allow them, and element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchair.codegen.cuda.epilogue import Epilogue
from torchair.codegen.cuda.machine import WARP, Gpu
from torchair.codegen.cuda.nest import Crew, Form, form_of
from torchair.codegen.cuda.packs import (
    DTYPES,
    PACK,
    REGISTERS,
    ZERO,
    added,
    fma,
    folded,
    load_pack,
    pack_elements,
    stream_pack,
    unpacked,
)
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.kernel import Declined, Kernel, Launch
from torchair.codegen.loops import Nest, Store
from torchair.codegen.requests import MatMul, Product, Strides3
from torchair.codegen.text.memory import load_scalar, memory_element
from torchair.codegen.types import BYTES

MOST_ROWS = 4
"""Rows of A that are served."""
STEPS = 8
"""Packs of a lane that are on their way at a time: of a row, or of several short ones."""
SHARED = 48 * 1024
"""Bytes of shared memory that every GPU gives a block."""
_PREPARED = -1  # the operand that stands for A in shared memory


@dataclass(frozen=True)
class GemvForm:
    """How the rows of the matrix are given to warps: one of the alternatives to be measured."""

    rows: int  # that a group takes at a time
    split: int  # warps of a group, each with a part of k
    warps: int  # of a block


@dataclass(frozen=True)
class Partner:
    """A second matrix as large as B: the same group takes the same rows of it, and the epilogue
    gets its results as `given` 1."""

    word: int  # its address
    b: Strides3


def gemv(
    product: Product,
    gpu: Gpu,
    label: str = "gemv",
    *,
    form: GemvForm | None = None,
    partner: Partner | None = None,
    prologue: Nest | None = None,
    keep: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of a product, and how to launch it.

    A `prologue` is a nest whose one store is A itself: every block computes it for itself, into
    shared memory. With `keep` it is also stored where it belongs. Raises Declined for products
    that are not served.
    """
    refusal = _refusal(product.matmul, partner, prologue)
    if refusal:
        raise Declined(refusal)
    form = form or default_form(product.matmul, gpu, partner is not None)
    writer = _Gemv(product, gpu, form, partner, prologue, keep)
    writer.write()
    return writer.w.kernel(label), writer.launch()


def _refusal(matmul: MatMul, partner: Partner | None, prologue: Nest | None) -> str | None:
    """Why a product is not served."""
    if matmul.dtype not in DTYPES or matmul.batch != 1:
        return f"a batch of {matmul.batch} products of {matmul.dtype}"
    if not isinstance(matmul.m, int) or not 1 <= matmul.m <= MOST_ROWS:
        return f"{matmul.m} rows"
    if matmul.a[2] != 1 or (matmul.m > 1 and not isinstance(matmul.a[1], int)):
        return f"rows of A with strides {matmul.a}"
    each = pack_elements(matmul.dtype)
    if not isinstance(matmul.k, int) or matmul.k < 1 or matmul.k % each:
        return f"rows of {matmul.k} elements, which are no packs of {each}"
    for b in [matmul.b, *([partner.b] if partner else [])]:
        if b[1] != 1 or not isinstance(b[2], int) or b[2] % each:
            return f"a matrix with strides {b}"
    return None if prologue is None else _prologue_refusal(matmul, prologue)


def _prologue_refusal(matmul: MatMul, prologue: Nest) -> str | None:
    if len(prologue.stores) != 1:
        return f"a prologue with {len(prologue.stores)} results"
    place = prologue.stores[0].access
    if place.offset != 0 or place.extra is not None or place.mask is not None:
        return "a prologue that does not fill A"
    size = _a_elements(matmul) * BYTES[matmul.dtype]
    return f"a prologue of {size} bytes" if size > SHARED // 2 else None


def _a_elements(matmul: MatMul) -> int:
    """Elements from the first to the last one of A."""
    assert isinstance(matmul.m, int) and isinstance(matmul.k, int)
    return (matmul.m - 1) * _row_of_a(matmul) + matmul.k


def _row_of_a(matmul: MatMul) -> int:
    """Elements from one row of A to the next."""
    return matmul.a[1] if matmul.m != 1 and isinstance(matmul.a[1], int) else 0


def default_form(matmul: MatMul, gpu: Gpu, pair: bool = False) -> GemvForm:
    """A form that is good without being measured. So many warps share a row that each lane has at
    most `STEPS` packs of it, fewer where it has several rows of A in registers; rows that are
    shorter are taken several at a time, as long as there is work for everybody."""
    assert isinstance(matmul.k, int) and isinstance(matmul.m, int)
    packs = -(-matmul.k // (pack_elements(matmul.dtype) * WARP))  # of a lane, if it had all
    most = STEPS if matmul.m <= 2 else STEPS // 2
    split = -(-packs // most)
    split = next((s for s in (1, 2, 4) if s >= split), min(split, 16))
    warps = 4 if 4 % split == 0 else split
    steps = -(-packs // split)
    rows = 1
    while rows * 2 * steps * (1 + pair) <= STEPS and rows * matmul.m < WARP:
        groups = warps // split * gpu.multiprocessors * 4
        if isinstance(matmul.n, int) and matmul.n < 2 * rows * groups:
            break
        rows *= 2
    return GemvForm(rows, split, warps)


class _Gemv:
    """Writes the kernel."""

    def __init__(
        self, product: Product, gpu: Gpu, form: GemvForm, partner: Partner | None,
        prologue: Nest | None, keep: bool,
    ) -> None:  # fmt: skip
        self.matmul, self.form, self.keep = product.matmul, form, keep
        assert isinstance(self.matmul.m, int) and isinstance(self.matmul.k, int)
        self.m, self.k, self.dtype = self.matmul.m, self.matmul.k, self.matmul.dtype
        self.a_row = _row_of_a(self.matmul)
        self.w = w = GpuWriter(gpu)
        self.epilogue = Epilogue(w, product.epilogue, self.m)
        self.matrices = [(1, self.matmul.b), *([(partner.word, partner.b)] if partner else [])]
        self.threads = form.warps * WARP
        self.groups = form.warps // form.split
        if form.warps % form.split or form.rows * self.m > WARP:
            raise ValueError(f"{form} is no form for {self.m} rows")
        lane_step = pack_elements(self.dtype) * WARP
        self.steps = -(-self.k // (form.split * lane_step))
        self.thread = w.thread()
        self.lane = w.entry(f"and i64 {self.thread}, {WARP - 1}")
        self.warp = w.entry(f"lshr i64 {self.thread}, 5")
        self.n = w.size(self.matmul.n)
        self.prologue = None if prologue is None else self._prepared(prologue)

    def _prepared(self, prologue: Nest) -> Form:
        """The prologue with its result in shared memory."""
        w, (store,) = self.w, prologue.stores
        size = _a_elements(self.matmul) * BYTES[self.dtype]
        w.place(_PREPARED, w.shared("i128", -(-size // PACK)))
        here = Store(replace(store.access, operand=_PREPARED), store.value)
        nest = Nest(prologue.axes, (here,), prologue.reduced)
        return form_of(w, nest, Crew("0", "1", self.threads))

    # ---- the kernel ----

    def launch(self) -> Launch:
        """How many blocks there are at once, and all take as many turns."""
        matrices, m = len(self.matrices), self.m
        results = matrices * self.form.rows
        packs = self.steps * (m + 2 * results)
        registers = -(-(28 + packs * REGISTERS + 2 * results * m) // 8) * 8
        resident = min(65536 // (min(registers, 255) * self.threads), 2048 // self.threads)
        most = max(1, resident) * self.w.gpu.multiprocessors
        per_block = self.groups * self.form.rows
        return Launch(self.threads, per_block, (self.matmul.n,), most=most)

    def write(self) -> None:
        """Both versions, one of which runs."""
        w = self.w
        fits = self._fits()
        with w.when(fits):
            self._with_packs()
        with w.when(w(f"xor i1 {fits}, true")):
            self._by_element()

    def _fits(self) -> str:
        """Whether all packs begin at multiples of their size, an i1."""
        w, rest = self.w, "0"
        operands = [word for word, _ in self.matrices] + ([] if self.prologue else [0])
        for operand in operands:
            address = w.entry(f"ptrtoint ptr {w.pointer(operand)} to i64")
            rest = address if rest == "0" else w.entry(f"or i64 {rest}, {address}")
        rest = w.entry(f"or i64 {rest}, {self.a_row * BYTES[self.dtype]}")
        rest = w.entry(f"and i64 {rest}, {PACK - 1}")
        fits = w.entry(f"icmp eq i64 {rest}, 0")
        if self.prologue is None or self.prologue.lanes == 1:
            return fits
        return w(f"and i1 {fits}, {self.prologue.fits()}")

    def _prologue(self, lanes: int) -> None:
        """A is in shared memory from here on."""
        if self.prologue is None:
            return
        w = self.w
        self.prologue.write(lanes)
        w.lanes = 1
        w.barrier()
        if self.keep:
            with w.when(w(f"icmp eq i64 {w.block_number()}, 0")):
                self._keep()

    def _keep(self) -> None:
        """Store A where it belongs, too."""
        w, kind = self.w, memory_element(self.dtype)
        for row in range(self.m):
            with w.loop(self.thread, str(self.k), self.threads) as each:
                at = w.add(each.index, str(row * self.a_row))
                x = w(f"load {kind}, ptr {w.offset(self._a(), kind, at)}")
                w.do(f"store {kind} {x}, ptr {w.offset(w.pointer(0), kind, at)}")

    def _a(self) -> str:
        """Where A is read."""
        return self.w.pointer(0 if self.prologue is None else _PREPARED)

    # ---- with packs ----

    def _with_packs(self) -> None:
        w, form = self.w, self.form
        per_block = self.groups * form.rows
        first = w.mul(w.block_number(), str(per_block))
        step = w.mul(w.blocks(), str(per_block))
        part, group = "0", self.warp
        if form.split > 1:
            part = w(f"urem i64 {self.warp}, {form.split}")
            group = w(f"udiv i64 {self.warp}, {form.split}")
        mine = w.mul(group, str(form.rows))
        size = self.steps * WARP * pack_elements(self.dtype)  # of the part of a warp
        self.begin = w.add(w.mul(part, str(size)), w.mul(self.lane, str(PACK // BYTES[self.dtype])))
        packs = self._weights(w.add(first, mine))
        self._prologue(self.prologue.lanes if self.prologue else 1)
        x = self._rows_of_a()
        meeting = _Meeting(w, self, part, group) if form.split > 1 else None
        turn = [("i64", "0")] if meeting else []
        carried = [*(("i32", p) for p in packs), *turn]
        with w.loop(first, self.n, step, carried) as loop:
            row = w.add(loop.index, mine)
            following = self._weights(w.add(row, step))
            value = self.lane if meeting else w(f"lshr i64 {self.lane}, {self._shift()}")
            point = self.epilogue.at(row, value, form.rows, self.n)
            sums = self._sums(loop.carried[: len(packs)], x)
            totals = [folded(w, self._padded(mine_), self.lane) for mine_ in sums]
            if meeting:
                totals = meeting.totals(totals, loop.carried[-1])
                counts = w(f"icmp eq i64 {part}, 0")
            else:
                alone = w(f"and i64 {self.lane}, {(1 << self._shift()) - 1}")
                counts = w(f"icmp eq i64 {alone}, 0")
            point.finish(totals, counts)
            again = [w(f"xor i64 {loop.carried[-1]}, 1")] if meeting else []
            loop.next = [*following, *again]

    def _shift(self) -> int:
        """Each total is in 2 to the power of this many lanes."""
        return 5 - (_power(self.form.rows * self.m).bit_length() - 1)

    def _padded(self, values: Sequence[str]) -> list[str]:
        return [*values, *[ZERO] * (_power(len(values)) - len(values))]

    def _weights(self, row: str) -> list[str]:
        """The packs of this warp's part of some rows of the matrices, on their way."""
        w = self.w
        there = w(f"icmp slt i64 {row}, {self.n}")
        return w.chosen(there, "i32", lambda: self._rows_of_b(row), "poison")

    def _rows_of_b(self, row: str) -> list[str]:
        w, last = self.w, self.w.sub(self.n, "1")
        kind, starts = memory_element(self.dtype), []
        for r in range(self.form.rows):
            at = w.least(w.add(row, str(r)), last) if r else row
            for word, b in self.matrices:
                far = w.add(w.mul(at, str(b[2])), self.begin)
                starts.append(w.offset(w.pointer(word), kind, far))
        return [x for s in range(self.steps) for x in self._step_of_b(starts, s)]

    def _step_of_b(self, starts: Sequence[str], step: int) -> list[str]:
        def loaded() -> list[str]:
            packs = [stream_pack(self.w, start, step * PACK * WARP) for start in starts]
            return [x for pack in packs for x in pack]

        return self.w.chosen(self._inside(step), "i32", loaded)

    def _inside(self, step: int) -> str | None:
        """Whether there is a pack for this lane, an i1; None if there is one for all."""
        each = pack_elements(self.dtype) * WARP
        if ((self.form.split - 1) * self.steps + step + 1) * each <= self.k:
            return None
        w = self.w
        return w(f"icmp slt i64 {w.add(self.begin, str(step * each))}, {self.k}")

    def _rows_of_a(self) -> list[list[list[str]]]:
        """The packs of A, by row and step."""
        w = self.w
        rows = []
        for row in range(self.m):
            far = w.add(self.begin, str(row * self.a_row))
            start = w.offset(self._a(), memory_element(self.dtype), far)
            rows.append([self._pack_of_a(start, s) for s in range(self.steps)])
        return rows

    def _pack_of_a(self, start: str, step: int) -> list[str]:
        w, at = self.w, step * PACK * WARP
        return w.chosen(self._inside(step), "i32", lambda: load_pack(w, start, at))

    def _sums(self, packs: Sequence[str], x: list[list[list[str]]]) -> list[list[str]]:
        """For each matrix what this lane has of each result, A's rows around those of B."""
        w, rows, count = self.w, self.form.rows, len(self.matrices)
        parts = 4 if self.m * rows * count <= 2 else 2 if self.m * rows * count <= 4 else 1
        results = [[[ZERO] * parts for _ in range(self.m * rows)] for _ in self.matrices]
        given = iter(packs)
        for s in range(self.steps):
            factors = [
                [unpacked(w, self.dtype, register) for register in x[i][s]] for i in range(self.m)
            ]
            for r in range(rows):
                for mine in results:
                    for k in range(REGISTERS):
                        weights = unpacked(w, self.dtype, next(given))
                        for i in range(self.m):
                            sums = mine[i * rows + r]
                            for a, b in zip(factors[i][k], weights, strict=True):
                                sums[k % parts] = fma(w, a, b, sums[k % parts])
        return [[added(w, sums) for sums in mine] for mine in results]

    # ---- element by element ----

    def _by_element(self) -> None:
        """A warp for each row of B, whatever the addresses are."""
        w, warps = self.w, str(self.form.warps)
        self._prologue(1)
        first = w.add(w.mul(w.block_number(), warps), self.warp)
        step = w.mul(w.blocks(), warps)
        count = _power(self.m)
        shift = 5 - (count.bit_length() - 1)
        value = w(f"lshr i64 {self.lane}, {shift}")
        alone = w(f"icmp eq i64 {w(f'and i64 {self.lane}, {(1 << shift) - 1}')}, 0")
        with w.loop(first, self.n, step) as loop:
            point = self.epilogue.at(loop.index, value, 1, self.n)
            zeros = [("float", ZERO)] * (len(self.matrices) * self.m)
            with w.loop(self.lane, str(self.k), WARP, zeros) as along:
                factors = [
                    self._element(self._a(), w.add(along.index, str(i * self.a_row)))
                    for i in range(self.m)
                ]
                sums = iter(along.carried)
                for word, b in self.matrices:
                    far = w.add(w.mul(loop.index, str(b[2])), along.index)
                    weight = self._element(w.pointer(word), far)
                    along.next += [fma(w, a, weight, next(sums)) for a in factors]
            found = along.results
            totals = [
                folded(w, self._padded(found[at : at + self.m]), self.lane)
                for at in range(0, len(found), self.m)
            ]
            point.finish(totals, alone)

    def _element(self, pointer: str, index: str) -> str:
        w = self.w
        at = w.offset(pointer, memory_element(self.dtype), index)
        return load_scalar(w, self.dtype, at, None)


class _Meeting:
    """Where the warps of a group add up their parts: two areas of shared memory in turns, so that
    one barrier a turn suffices."""

    def __init__(self, w: GpuWriter, gemv: _Gemv, part: str, group: str) -> None:
        self.w, self.gemv, self.group = w, gemv, group
        self.values = _power(gemv.form.rows * gemv.m)
        self.area = gemv.form.warps * self.values
        self.places = [w.shared("float", 2 * self.area) for _ in gemv.matrices]

    def totals(self, parts: Sequence[str], turn: str) -> list[str]:
        """The whole sums: lane L has that of value L."""
        w, gemv, values = self.w, self.gemv, str(self.values)
        base = w.mul(turn, str(self.area))
        value = w(f"lshr i64 {gemv.lane}, {gemv._shift()}")
        mine = w.add(base, w.add(w.mul(gemv.warp, values), value))
        for place, part in zip(self.places, parts, strict=True):
            w.do(f"store float {part}, ptr {w.offset(place, 'float', mine)}")
        w.barrier()
        first = w.mul(self.group, str(self.values * gemv.form.split))
        at = w.add(base, w.add(first, w.least(gemv.lane, str(self.values - 1))))
        return [
            added(w, [
                w(f"load float, ptr {w.offset(place, 'float', w.add(at, str(k * self.values)))}")
                for k in range(gemv.form.split)
            ])
            for place in self.places
        ]  # fmt: skip


def _power(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (n - 1).bit_length()
