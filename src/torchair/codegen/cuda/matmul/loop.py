"""The kernel of a large product: blocks that stay and take one tile of results after the other. One
warpgroup lets pieces of both factors come into a ring of stages; the others multiply them, and
evaluate the epilogue while the pieces of the next tile are on their way."""

from __future__ import annotations

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import ALIGNED, LINE, WARPGROUP, number
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.matmul.epilogue import TileEpilogue, TilePlace
from torchair.codegen.cuda.matmul.forms import BARRIER, MatmulForm
from torchair.codegen.cuda.matmul.operands import PIECE, factors, short
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Product
from torchair.codegen.target import Launch


class TensorMatmul:
    """Writes the kernel."""

    def __init__(self, product: Product, gpu: Gpu, form: MatmulForm, early: bool) -> None:
        self.matmul, self.form, self.early = product.matmul, form, early
        self.a, self.b = factors(self.matmul, (form.rows, form.columns))
        self.w = w = GpuWriter(gpu)
        self.start = w.asked_at(ALIGNED)
        self.m, self.n, self.k = (
            short(w, n) for n in (self.matmul.m, self.matmul.n, self.matmul.k)
        )
        self.epilogue = TileEpilogue(w, product.epilogue, self.matmul.m, form.columns, form.rows)
        self.thread = w.entry(f"trunc i64 {w.thread()} to i32")
        self.group = w.entry(f"lshr i32 {self.thread}, 7")

    def launch(self) -> Launch:
        """A block for each multiprocessor, if there are tiles for them."""
        form, matmul = self.form, self.matmul
        return Launch(
            form.threads,
            1,
            (matmul.batch, matmul.m, matmul.n),
            shared=form.shared,
            most=self.w.gpu.multiprocessors,
            early=self.early,
            resident=1,
            room=1,
            even=False,
            tile=(1, form.rows, form.columns),
        )

    def write(self) -> None:
        """Both parts."""
        w = self.w
        self._count()
        first = w(f"icmp eq i32 {self.thread}, 0")
        with w.when(first):
            arrivals = self.form.warpgroups * (WARPGROUP // WARP)
            stages = range(self.form.stages)
            full = [(self._barrier(str(s)), 1) for s in stages]
            empty = [(self._barrier(str(s), empty=True), arrivals) for s in stages]
            hopper.make_barriers(w, [*full, *empty])
        w.barrier()
        loads = w(f"icmp eq i32 {self.group}, 0")

        def load() -> list[str]:
            hopper.registers(w, self.form.registers[0], more=False)
            with w.when(first):
                self._load_all()
            return []

        def multiply() -> list[str]:
            hopper.registers(w, self.form.registers[1], more=True)
            self._multiply_all()
            return []

        w.either(loads, "i32", load, multiply)

    # ---- tiles ----

    def _count(self) -> None:
        w, form = self.w, self.form
        rows, columns, steps = (
            number(w, "udiv", number(w, "add", n, unit - 1), unit)
            for n, unit in ((self.m, form.rows), (self.n, form.columns), (self.k, LINE))
        )
        self.rows, self.columns = rows, columns
        self.each = number(w, "mul", rows, columns)
        self.tiles = number(w, "mul", self.each, short(w, self.matmul.batch))
        self.tiles = w(f"zext i32 {self.tiles} to i64")
        self.steps = w(f"zext i32 {steps} to i64")

    def _tile(self, index: str) -> tuple[str, str, str]:
        """The product, the first row and the first column of a tile: columns of some rows of tiles
        at a time, so that neighbours share what is in L2."""
        w, form = self.w, self.form
        tile, batch = w(f"trunc i64 {index} to i32"), "0"
        if self.matmul.batch != 1:
            batch = number(w, "udiv", tile, self.each)
            tile = number(w, "urem", tile, self.each)
        around = number(w, "mul", self.columns, form.group)
        first = number(w, "mul", number(w, "udiv", tile, around), form.group)
        inside = number(w, "urem", tile, around)
        left = number(w, "sub", self.rows, first)
        few = w(f"icmp ult i32 {left}, {form.group}")
        height = w(f"select i1 {few}, i32 {left}, i32 {form.group}")
        row = number(w, "add", first, number(w, "urem", inside, height))
        column = number(w, "udiv", inside, height)
        return (
            batch,
            number(w, "mul", row, form.rows),
            number(w, "mul", column, form.columns),
        )

    # ---- the ring ----

    def _barrier(self, stage: str, empty: bool = False) -> str:
        """The barrier of a stage that ends a phase when it is full, or when it is empty."""
        w, form = self.w, self.form
        far = form.stages * form.stage + (BARRIER if empty else 0)
        own = number(w, "mul", stage, 2 * BARRIER)
        return number(w, "add", number(w, "add", self.start, far), own)

    def _places(self, stage: str) -> tuple[str, str]:
        """Where the pieces of A and B of a stage are."""
        w = self.w
        a = number(w, "add", self.start, number(w, "mul", stage, self.form.stage))
        return a, number(w, "add", a, self.a.bytes)

    def _next(self, stage: str, phase: str) -> list[str]:
        """The next stage, and its phase."""
        w = self.w
        after = number(w, "add", stage, 1)
        last = w(f"icmp eq i32 {after}, {self.form.stages}")
        other = number(w, "xor", phase, 1)
        return [
            w(f"select i1 {last}, i32 0, i32 {after}"),
            w(f"select i1 {last}, i32 {other}, i32 {phase}"),
        ]

    # ---- loading ----

    def _load_all(self) -> None:
        w = self.w
        if self.early:
            w.wait()
        ring = [("i32", "0"), ("i32", "1")]
        with w.loop(w.block_number(), self.tiles, w.blocks(), ring) as tiles:
            batch, row, column = self._tile(tiles.index)
            ring = [("i32", x) for x in tiles.carried]
            with w.loop("0", self.steps, 1, ring) as steps:
                stage, phase = steps.carried
                hopper.await_phase(w, self._barrier(stage, empty=True), phase)
                full = self._barrier(stage)
                hopper.expect(w, full, self.form.stage)
                element = number(w, "mul", w(f"trunc i64 {steps.index} to i32"), LINE)
                a, b = self._places(stage)
                self.a.load(w, a, batch, row, element, full)
                self.b.load(w, b, batch, column, element, full)
                steps.next = self._next(stage, phase)
            tiles.next = steps.results

    # ---- multiplying ----

    def _multiply_all(self) -> None:
        w, form = self.w, self.form
        if self.early:
            w.wait()
        warpgroup = number(w, "sub", self.group, 1)
        own = number(w, "mul", warpgroup, form.blocks)
        rows = number(w, "mul", own, 64)
        self.first = number(w, "mul", own, PIECE)
        lane = w(f"and i32 {self.thread}, {WARP - 1}")
        self.leads = w(f"icmp eq i32 {lane}, 0")
        ring = [("i32", "0"), ("i32", "0")]
        with w.loop(w.block_number(), self.tiles, w.blocks(), ring) as tiles:
            batch, row, column = self._tile(tiles.index)
            stage, phase, *sums = self._sums(tiles.carried)
            wide = (batch, number(w, "add", row, rows), column)
            place = TilePlace(*(w(f"zext i32 {x} to i64") for x in wide))
            each = form.columns // 2
            parts = [sums[k * each : (k + 1) * each] for k in range(form.blocks)]
            self.epilogue.write(place, parts)
            tiles.next = [stage, phase]

    def _sums(self, ring: list[str]) -> list[str]:
        """The stage and the phase after a tile, and its results."""
        w, form = self.w, self.form
        carried = [*(("i32", x) for x in ring), *[("float", "0.0")] * form.sums]
        with w.loop("0", self.steps, 1, carried) as steps:
            stage, phase, *sums = steps.carried
            full = self._barrier(stage)
            hopper.await_phase(w, full, phase)
            a, b = self._places(stage)
            a = number(w, "add", a, self.first)
            each = form.columns // 2
            found = hopper.multiply(
                w,
                self.matmul.dtype,
                form.columns,
                [sums[k * each : (k + 1) * each] for k in range(form.blocks)],
                [self.a.steps(w, number(w, "add", a, PIECE * k)) for k in range(form.blocks)],
                self.b.steps(w, b),
                (not self.a.along, not self.b.along),
            )
            with w.when(self.leads):
                hopper.arrive(w, number(w, "add", full, BARRIER))
            steps.next = [*self._next(stage, phase), *(x for tile in found for x in tile)]
        return steps.results
