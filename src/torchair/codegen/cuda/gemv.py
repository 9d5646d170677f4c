"""Products of one to four rows with a matrix whose rows of memory run along k, as nn.Linear stores
its weight: a bandwidth-bound GEMV that keeps loads in flight.

A group of warps takes some rows of the matrix at a time and walks on by the grid. The packs of the
next rows are on their way while those of this turn are summed up, or their sums are added up and
stored. Where a group has several warps, each has a part of k, and their sums meet in shared memory.

A kernel holds two versions: with packs, for addresses that allow them, and element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchair.codegen.cuda import packs, prologue
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.packs import PACK, REGISTERS, ZERO
from torchair.codegen.cuda.prologue import Epilogue, RowsOfA, bytes_of_a, prologue_refusal
from torchair.codegen.cuda.quantised import Tiles
from torchair.codegen.cuda.tiles import TileForm, default_tiles, quantised_refusal, tile_forms
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Joint, MatMul, Product
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.codegen.text.memory import load_scalar, memory_element

MOST_ROWS = 4
"""Rows of A that are served."""
STEPS = 8
"""Packs of a lane that are on their way at a time: of a row, or of several short ones."""
_THREADS, _REGISTERS = 2048, 65536  # of a multiprocessor
PERSISTENT_REGISTERS = 128
"""Registers of a thread of a persistent kernel, of which 512 fit in a multiprocessor then."""


@dataclass(frozen=True)
class GemvForm:
    """How the rows of the matrix are given to warps: one of the alternatives to be measured."""

    rows: int  # that a group takes at a time
    split: int  # warps of a group, each with a part of k
    warps: int  # of a block
    ahead: bool = True  # the next rows are loaded before these are summed up, and not after that
    in_registers: bool = True  # A stays in registers, and not in shared memory

    def __str__(self) -> str:
        more = ("" if self.ahead else "-late") + ("" if self.in_registers else "-shared")
        return f"{self.rows}x{self.split}x{self.warps}{more}"


AnyForm = GemvForm | TileForm


def gemv(
    request: Product | Joint,
    gpu: Gpu,
    label: str = "gemv",
    form: AnyForm | None = None,
    early: bool = False,
) -> tuple[Kernel, Launch]:
    """The kernel of a product, with what is computed beside it, and how to launch it.

    Every block computes a prologue for itself, into shared memory. An `early` kernel may begin
    before the launch before it ends: the first rows of a constant matrix are loaded meanwhile.
    Raises Declined for products that are not served.
    """
    work = request if isinstance(request, Joint) else Joint(request)
    refusal = _refusal(work, gpu)
    if refusal:
        raise Declined(refusal)
    form, early = form or _default(work, gpu), early and gpu.begins_early
    if isinstance(form, TileForm):
        return Tiles(work, gpu, form, early).kernel(label)
    if gpu.persistent:
        form = _small_form(work, form)
    writer = _Gemv(work, gpu, form, early)
    writer.write()
    return writer.w.kernel(label), writer.launch()


def _refusal(work: Joint, gpu: Gpu) -> str | None:
    """Why a product is not served."""
    matmul = work.product.matmul
    if matmul.dtype not in packs.DTYPES or matmul.batch != 1:
        return f"a batch of {matmul.batch} products of {matmul.dtype}"
    if not isinstance(matmul.m, int) or not 1 <= matmul.m <= MOST_ROWS:
        return f"{matmul.m} rows"
    refusal = _plain_refusal if matmul.weight is None else quantised_refusal
    found = refusal(work, gpu)
    if found or work.prologue is None:
        return found
    return prologue_refusal(matmul, work.prologue)


def _plain_refusal(work: Joint, gpu: Gpu) -> str | None:
    matmul, partner = work.product.matmul, work.partner
    each = packs.pack_elements(matmul.dtype)
    row = matmul.a[1] if matmul.m != 1 else 0
    if matmul.a[2] != 1 or not isinstance(row, int) or row % each:
        return f"rows of A with strides {matmul.a}"
    if not isinstance(matmul.k, int) or matmul.k < 1 or matmul.k % each:
        return f"rows of {matmul.k} elements, which are no packs of {each}"
    for b in [matmul.b, *([partner.b] if partner else [])]:
        if b[1] != 1 or not isinstance(b[2], int) or b[2] % each:
            return f"a matrix with strides {b}"
    return None


def _default(work: Joint, gpu: Gpu) -> AnyForm:
    matmul, pair = work.product.matmul, work.partner is not None
    if matmul.batch_invariant:  # what a row is split into must not follow from their number
        matmul = replace(matmul, m=MOST_ROWS)
    if matmul.weight is not None:
        return default_tiles(matmul, gpu, pair, work.prologue is not None)
    return default_form(matmul, gpu, pair)


def default_form(matmul: MatMul, gpu: Gpu, pair: bool = False) -> GemvForm:
    """A form that is good without being measured. So many warps share a row that each lane has at
    most `STEPS` packs of it, fewer where it has several rows of A in registers; rows that are
    shorter are taken several at a time, as long as there is work for all lanes."""
    count = _packs(matmul)
    assert isinstance(matmul.m, int)
    split = -(-count // (STEPS if matmul.m <= 2 else STEPS // 2))
    split = next((s for s in (1, 2, 4) if s >= split), min(split, 16))
    warps = 4 if 4 % split == 0 else split
    steps, rows = -(-count // split), 1
    while rows * 2 * steps * (1 + pair) <= STEPS and rows * 2 * matmul.m <= WARP:
        groups = warps // split * gpu.multiprocessors * 4
        if isinstance(matmul.n, int) and matmul.n < 2 * rows * groups:
            break
        rows *= 2
    return GemvForm(rows, split, warps)


def forms(request: Product | Joint, gpu: Gpu) -> Sequence[AnyForm]:
    """Forms that are worth measuring, the default first; none of a product that is not served."""
    work = request if isinstance(request, Joint) else Joint(request)
    if _refusal(work, gpu):
        return ()
    matmul, pair, first = work.product.matmul, work.partner is not None, _default(work, gpu)
    if isinstance(first, TileForm):
        return tile_forms(matmul, first, pair)
    found = {first: None}
    for rows, split in ((1, 1), (2, 1), (1, 2)):
        for ahead, in_registers in ((True, True), (False, True), (False, False), (True, False)):
            warps = max(first.warps, first.split * split)
            form = GemvForm(first.rows * rows, first.split * split, warps, ahead, in_registers)
            if _is_sound(matmul, form, 1 + pair):
                found[form] = None
    for times in (2, 4):
        for ahead in (True, False):
            form = GemvForm(first.rows, first.split, first.warps * times, ahead)
            if _is_sound(matmul, form, 1 + pair):
                found[form] = None
    return list(found)


def _is_sound(matmul: MatMul, form: GemvForm, matrices: int) -> bool:
    """Whether a form has work for its lanes and room for what it keeps."""
    assert isinstance(matmul.m, int)
    busy = form.split <= _packs(matmul) and form.rows * matmul.m <= WARP
    room = _registers(matmul, form, matrices) <= 256 and form.warps <= 16
    return busy and room and (form.in_registers or bytes_of_a(matmul) <= prologue.MOST_OF_A)


def _packs(matmul: MatMul) -> int:
    """Packs of a row for each lane of a warp."""
    assert isinstance(matmul.k, int)
    return -(-matmul.k // (packs.pack_elements(matmul.dtype) * WARP))


def _registers(matmul: MatMul, form: GemvForm, matrices: int) -> int:
    """About how many registers a thread needs."""
    assert isinstance(matmul.m, int)
    steps, results = -(-_packs(matmul) // form.split), matrices * form.rows
    flying = steps * results * (2 if form.ahead else 1) + (
        steps * matmul.m if form.in_registers else 4
    )
    return -(-(28 + flying * REGISTERS + 2 * results * matmul.m) // 8) * 8


def _resident(matmul: MatMul, form: GemvForm, matrices: int) -> int:
    """About how many blocks a multiprocessor has room for."""
    threads = form.warps * WARP
    registers = min(_registers(matmul, form, matrices), 255)
    return max(1, min(_REGISTERS // (registers * threads), _THREADS // threads))


def _small_form(work: Joint, form: GemvForm) -> GemvForm:
    """The form with the same sums for a part of a persistent kernel: all parts have the registers
    that the largest one needs. Rather fewer loads are on their way than that fewer threads fit."""
    matmul, matrices = work.product.matmul, 1 + (work.partner is not None)
    if _registers(matmul, form, matrices) <= PERSISTENT_REGISTERS:
        return form
    late = replace(form, ahead=False)
    least = replace(late, in_registers=False)
    return least if _is_sound(matmul, least, matrices) else late


class _Gemv:
    """Writes the kernel."""

    def __init__(self, work: Joint, gpu: Gpu, form: GemvForm, early: bool) -> None:
        product, partner = work.product, work.partner
        self.matmul, self.form, self.early = product.matmul, form, early
        assert isinstance(self.matmul.m, int) and isinstance(self.matmul.k, int)
        self.m, self.k, self.dtype = self.matmul.m, self.matmul.k, self.matmul.dtype
        self.each = packs.pack_elements(self.dtype)
        if form.warps % form.split or form.rows * self.m > WARP:
            raise ValueError(f"{form} is no form for {self.m} rows")
        self.threads = form.warps * WARP
        self.groups = form.warps // form.split
        self.steps = -(-_packs(self.matmul) // form.split)
        self.matrices = [(1, self.matmul.b), *([(partner.word, partner.b)] if partner else [])]
        self.resident = _resident(self.matmul, form, len(self.matrices))
        self.w = w = GpuWriter(gpu)
        self.epilogue = Epilogue(w, product.epilogue, self.m)
        self.a = RowsOfA(w, work, self.threads, not form.in_registers)
        self.lane = w.entry(f"and i64 {w.thread()}, {WARP - 1}")
        self.warp = w.entry(f"lshr i64 {w.thread()}, 5")
        self.n = w.size(self.matmul.n)

    # ---- the kernel ----

    def launch(self) -> Launch:
        """As many blocks as there can be at once, if there is work for them."""
        most = self.resident * self.w.gpu.multiprocessors
        per_block = self.groups * self.form.rows
        return Launch(
            self.threads,
            per_block,
            (self.matmul.n,),
            most=most,
            early=self.early,
            resident=self.resident,
            room=self.resident,
        )

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
        for word, _ in self.matrices:
            address = w.entry(f"ptrtoint ptr {w.pointer(word)} to i64")
            rest = address if rest == "0" else w.entry(f"or i64 {rest}, {address}")
        rest = w.entry(f"and i64 {rest}, {PACK - 1}")
        fits = w.entry(f"icmp eq i64 {rest}, 0")
        for condition in self.a.fits():
            fits = w(f"and i1 {fits}, {condition}")
        return fits

    # ---- with packs ----

    def _with_packs(self) -> None:
        w, form = self.w, self.form
        part, group = "0", self.warp
        if form.split > 1:
            part = w(f"urem i64 {self.warp}, {form.split}")
            group = w(f"udiv i64 {self.warp}, {form.split}")
        self.begin = w.add(
            w.mul(part, str(self.steps * WARP * self.each)), w.mul(self.lane, str(self.each))
        )
        per_block = str(self.groups * form.rows)
        first, step = (w.mul(x, per_block) for x in (w.block_number(), w.blocks()))
        mine = w.mul(group, str(form.rows))
        if self.early and not self.matmul.constant:
            w.wait()
        loaded = self._weights(w.add(first, mine))
        if self.early and self.matmul.constant:
            w.wait()
        self.a.prepare(packs=True)
        in_registers = [self._rows_of_a(s) for s in range(self.steps)] if form.in_registers else []
        sums_of = _WarpReduction(w, self, part, group) if form.split > 1 else _Alone(w, self)
        carried = [*(("i32", p) for p in loaded), *sums_of.carried]
        with w.loop(first, self.n, step, carried) as loop:
            row = w.add(loop.index, mine)
            here, turn = loop.carried[: len(loaded)], loop.carried[len(loaded) :]
            following = self._weights(w.add(row, step)) if form.ahead else []
            point = self.epilogue.at(row, sums_of.value, form.rows, self.n)
            sums = self._sums(here, in_registers)
            following = following or self._weights(w.add(row, step))
            if self.early:
                w.release(w(f"icmp sge i64 {w.add(loop.index, step)}, {self.n}"))
            point.finish(*sums_of.totals(sums, turn))
            loop.next = [*following, *(w(f"xor i64 {x}, 1") for x in turn)]

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
            found = [packs.stream_pack(self.w, start, step * PACK * WARP) for start in starts]
            return [x for pack in found for x in pack]

        return self.w.chosen(self._inside(step), "i32", loaded)

    def _inside(self, step: int) -> str | None:
        """Whether there is a pack for this lane, an i1; None if there is one for all."""
        w, each = self.w, self.each * WARP
        if ((self.form.split - 1) * self.steps + step + 1) * each <= self.k:
            return None
        return w(f"icmp slt i64 {w.add(self.begin, str(step * each))}, {self.k}")

    def _rows_of_a(self, step: int) -> list[list[str]]:
        """The packs of a step, of each row of A."""
        w = self.w

        def loaded() -> list[str]:
            starts = [self.a.at(row, self.begin) for row in range(self.m)]
            load = packs.load_pack if self.form.in_registers else packs.shared_pack
            found = [load(w, start, step * PACK * WARP) for start in starts]
            return [x for pack in found for x in pack]

        flat = w.chosen(self._inside(step), "i32", loaded)
        return [flat[i * REGISTERS : (i + 1) * REGISTERS] for i in range(self.m)]

    def _sums(self, loaded: Sequence[str], in_registers: list[list[list[str]]]) -> list[list[str]]:
        """For each matrix what this lane has of each result, A's rows around those of B."""
        w, rows, count = self.w, self.form.rows, len(self.matrices)
        together = MOST_ROWS if self.matmul.batch_invariant else self.m
        per_lane = together * rows * count
        parts = next((n for n, most in ((4, 2), (2, 4)) if per_lane <= most), 1)
        results = [[[ZERO] * parts for _ in range(self.m * rows)] for _ in self.matrices]
        given = iter(loaded)
        for s in range(self.steps):
            factors = [
                [packs.unpacked(w, self.dtype, register) for register in pack]
                for pack in (in_registers[s] if in_registers else self._rows_of_a(s))
            ]
            for r in range(rows):
                for mine in results:
                    for k in range(REGISTERS):
                        weights = packs.unpacked(w, self.dtype, next(given))
                        for i in range(self.m):
                            sums = mine[i * rows + r]
                            for a, b in zip(factors[i][k], weights, strict=True):
                                sums[k % parts] = packs.fma(w, a, b, sums[k % parts])
        return [[packs.added(w, sums) for sums in mine] for mine in results]

    # ---- element by element ----

    def _by_element(self) -> None:
        """A warp for each row of B, whatever the addresses are."""
        w, warps = self.w, str(self.form.warps)
        if self.early:
            w.wait()
        self.a.prepare(packs=False)
        first = w.add(w.mul(w.block_number(), warps), self.warp)
        step = w.mul(w.blocks(), warps)
        sums_of = _Alone(w, self, rows=1)
        with w.loop(first, self.n, step) as loop:
            point = self.epilogue.at(loop.index, sums_of.value, 1, self.n)
            zeros = [("float", ZERO)] * (len(self.matrices) * self.m)
            with w.loop(self.lane, str(self.k), WARP, zeros) as along:
                factors = [self._element(self.a.at(i, along.index)) for i in range(self.m)]
                sums = iter(along.carried)
                for word, b in self.matrices:
                    far = w.add(w.mul(loop.index, str(b[2])), along.index)
                    at = w.offset(w.pointer(word), memory_element(self.dtype), far)
                    weight = self._element(at)
                    along.next += [packs.fma(w, a, weight, next(sums)) for a in factors]
            found = along.results
            parts = [found[at : at + self.m] for at in range(0, len(found), self.m)]
            point.finish(*sums_of.totals(parts, []))

    def _element(self, at: str) -> str:
        return load_scalar(self.w, self.dtype, at, None)


# ---- sums of lanes and warps ----


class _Alone:
    """A warp has whole sums: each total is in some neighbouring lanes, of which the first counts.
    `value` is the number of the total that a lane has."""

    carried: tuple[tuple[str, str], ...] = ()

    def __init__(self, w: GpuWriter, gemv: _Gemv, rows: int | None = None) -> None:
        self.w, self.gemv = w, gemv
        self.count = 1 << (gemv.m * (rows or gemv.form.rows) - 1).bit_length()
        self.value = self.own = w.div(gemv.lane, str(WARP // self.count))

    def totals(self, sums: list[list[str]], turn: list[str]) -> tuple[list[str], str]:
        """The totals in each lane, by matrix, and an i1: whether the lane counts."""
        w = self.w
        first = w.rem(self.gemv.lane, str(WARP // self.count))
        return [self._folded(mine) for mine in sums], w(f"icmp eq i64 {first}, 0")

    def _folded(self, sums: list[str]) -> str:
        missing = [ZERO] * (self.count - len(sums))
        return packs.folded(self.w, [*sums, *missing], self.gemv.lane)


class _WarpReduction(_Alone):
    """Several warps have parts of the sums. They meet in one of two areas of shared memory in
    turns, so that one barrier a turn suffices; lane L of the first warp has total L then."""

    carried = (("i64", "0"),)

    def __init__(self, w: GpuWriter, gemv: _Gemv, part: str, group: str) -> None:
        super().__init__(w, gemv)
        self.part, self.group, self.value = part, group, gemv.lane
        self.area = gemv.form.warps * self.count
        self.places = [w.shared("float", 2 * self.area) for _ in gemv.matrices]

    def totals(self, sums: list[list[str]], turn: list[str]) -> tuple[list[str], str]:
        """The totals in each lane, by matrix, and an i1: whether the lane counts."""
        w, gemv = self.w, self.gemv
        base = w.mul(turn[0], str(self.area))
        mine = w.add(base, w.add(w.mul(gemv.warp, str(self.count)), self.own))
        for place, part in zip(self.places, sums, strict=True):
            w.do(f"store float {self._folded(part)}, ptr {w.offset(place, 'float', mine)}")
        w.barrier()
        first = w.mul(self.group, str(self.count * gemv.form.split))
        at = w.add(base, w.add(first, w.least(gemv.lane, str(self.count - 1))))
        totals = [packs.added(w, self._parts(place, at)) for place in self.places]
        return totals, w(f"icmp eq i64 {self.part}, 0")

    def _parts(self, place: str, at: str) -> list[str]:
        w = self.w
        distances = [w.add(at, str(k * self.count)) for k in range(self.gemv.form.split)]
        return [w(f"load float, ptr {w.offset(place, 'float', far)}") for far in distances]
