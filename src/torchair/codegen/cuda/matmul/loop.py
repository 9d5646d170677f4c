"""The kernel of a large product: blocks that stay and take one tile of results after the other. One
warpgroup lets pieces of both factors come into a ring of stages; the others multiply them, and
evaluate the epilogue while the pieces of the next tile are on their way."""

from __future__ import annotations

from collections.abc import Sequence

from torchair.codegen.cuda import hopper
from torchair.codegen.cuda.hopper import ALIGNED, LINE, WARPGROUP, number
from torchair.codegen.cuda.jit import WARP, Gpu
from torchair.codegen.cuda.matmul.cluster import Cluster
from torchair.codegen.cuda.matmul.epilogue import TileEpilogue, TilePlace
from torchair.codegen.cuda.matmul.forms import BARRIER, MatmulForm, clusters
from torchair.codegen.cuda.matmul.operands import PIECE, MatmulOperand, factors, short
from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.requests import Product
from torchair.codegen.target import Launch


class TensorMatmul:
    """Writes the kernel."""

    def __init__(self, product: Product, gpu: Gpu, form: MatmulForm, early: bool) -> None:
        self.matmul, self.form, self.early = product.matmul, form, early
        self.a, self.b = factors(self.matmul, (form.rows, form.columns), form.kept)
        self.w = w = GpuWriter(gpu)
        self.start = w.asked_at(ALIGNED)
        self.m, self.n, self.k = (
            short(w, n) for n in (self.matmul.m, self.matmul.n, self.matmul.k)
        )
        tile = (form.rows, form.columns)
        columns = form.columns // form.split
        self.epilogue = TileEpilogue(w, product.epilogue, self.matmul.m, columns, tile)
        self.thread = w.entry(f"trunc i64 {w.thread()} to i32")
        self.group = w.entry(f"lshr i32 {self.thread}, 7")
        far = form.stages * (form.stage + 2 * BARRIER)
        barriers = w.entry(f"add i32 {self.start}, {far}")
        self.others = Cluster(w, form, barriers, self.start, self.thread)

    def launch(self) -> Launch:
        """A block for each multiprocessor, if there are tiles for them."""
        form, matmul = self.form, self.matmul
        return Launch(
            form.threads,
            1,
            (matmul.batch, matmul.m, matmul.n, form.split),
            shared=form.shared,
            most=clusters(self.w.gpu.multiprocessors, form.split) * form.split,
            cluster=form.split,
            early=self.early,
            resident=1,
            room=1,
            even=False,
            tile=(1, form.rows, form.columns, 1),
        )

    def write(self) -> None:
        """Both parts."""
        w, form = self.w, self.form
        self._count()
        first = w(f"icmp eq i32 {self.thread}, 0")
        with w.when(first):
            arrivals = form.readers * (WARPGROUP // WARP)
            stages = range(form.stages)
            full = [(self._barrier(str(s)), 1) for s in stages]
            empty = [(self._barrier(str(s), empty=True), arrivals) for s in stages]
            turns = [(self._turn(str(k)), WARPGROUP // WARP) for k in range(2)]
            if form.split > 1:
                turns = self.others.barriers()
            hopper.make_barriers(w, [*full, *empty, *turns])
        if form.split > 1:
            hopper.cluster_barrier(w)
        else:
            w.barrier()
        loads = w(f"icmp eq i32 {self.group}, 0")

        def load() -> list[str]:
            if form.registers:
                hopper.registers(w, form.registers[0], more=False)
            with w.when(first):
                self._load_all()
            return []

        def multiply() -> list[str]:
            if form.registers:
                hopper.registers(w, form.registers[1], more=True)
            self._multiply_all()
            return []

        w.either(loads, "i32", load, multiply)
        if form.split > 1:  # no block leaves while others write to its memory
            hopper.cluster_barrier(w)

    # ---- tiles ----

    def _count(self) -> None:
        w, form = self.w, self.form
        rows, columns, steps = (
            number(w, "udiv", number(w, "add", n, unit - 1), unit)
            for n, unit in ((self.m, form.rows), (self.n, form.columns), (self.k, form.depth))
        )
        self.rows, self.columns = rows, columns
        self.each = number(w, "mul", rows, columns)
        self.tiles = number(w, "mul", self.each, short(w, self.matmul.batch))
        self.tiles = w(f"zext i32 {self.tiles} to i64")
        self.begin, self.block, self.blocks = "0", w.block_number(), w.blocks()
        if form.split > 1:
            self.block, self.blocks = (w.div(n, str(form.split)) for n in (self.block, self.blocks))
            self.begin = number(w, "udiv", number(w, "mul", steps, self.others.rank), form.split)
            ends = number(w, "mul", steps, number(w, "add", self.others.rank, 1))
            steps = number(w, "sub", number(w, "udiv", ends, form.split), self.begin)
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

    def _turn(self, warpgroup: str) -> str:
        """The barrier that ends a phase when a warpgroup may begin its next tile: the phases of
        others have not passed it then."""
        w, far = self.w, self.form.stages * (self.form.stage + 2 * BARRIER)
        own = number(w, "mul", warpgroup, BARRIER)
        return number(w, "add", number(w, "add", self.start, far), own)

    def _places(self, stage: str) -> tuple[str, str]:
        """Where the pieces of A and B of a stage are."""
        w = self.w
        a = number(w, "add", self.start, number(w, "mul", stage, self.form.stage))
        return a, number(w, "add", a, self.form.lines * self.a.bytes)

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
        w, form = self.w, self.form
        ahead = self.early and bool(self.matmul.constant)
        if ahead:
            self._load_ahead()
        if self.early:
            w.wait()
        ring = [("i32", "0"), ("i32", "0"), ("i32", "1")]
        with w.loop(self.block, self.tiles, self.blocks, ring) as tiles:
            batch, row, column = self._tile(tiles.index)
            turn, *before = tiles.carried
            if form.split > 1:
                self.others.await_room(turn)
            ring = [("i32", x) for x in before]
            with w.loop("0", self.steps, 1, ring) as steps:
                stage, phase = steps.carried
                hopper.await_phase(w, self._barrier(stage, empty=True), phase)
                first = self._element(steps.index)
                if ahead:
                    begun = w(f"icmp slt i64 {steps.index}, {form.stages}")
                    begun = w(f"and i1 {begun}, {w(f'icmp eq i32 {turn}, 0')}")
                    with w.when(w(f"xor i1 {begun}, true")):
                        self._expect(stage)
                        self._load(self.b, stage, batch, column, first)
                else:
                    self._expect(stage)
                    self._load(self.b, stage, batch, column, first)
                self._load(self.a, stage, batch, row, first)
                steps.next = self._next(stage, phase)
            tiles.next = [number(w, "add", turn, 1), *steps.results]
        if self.early:
            w.release("true")

    def _load_ahead(self) -> None:
        """B, which is constant, for the first stages: before what the launch before this one writes
        is there."""
        w = self.w
        batch, _, column = self._tile(self.block)
        some = w(f"icmp slt i64 {self.block}, {self.tiles}")
        for stage in map(str, range(self.form.stages)):
            with w.when(w(f"and i1 {some}, {w(f'icmp slt i64 {stage}, {self.steps}')}")):
                self._expect(stage)
                self._load(self.b, stage, batch, column, self._element(stage))

    def _element(self, step: str) -> str:
        """Of the sum, where a step begins."""
        w = self.w
        step = number(w, "add", self.begin, w(f"trunc i64 {step} to i32"))
        return number(w, "mul", step, self.form.depth)

    def _expect(self, stage: str) -> None:
        """All of a stage."""
        coming = self.form.lines * (self.a.coming + self.b.coming)
        hopper.expect(self.w, self._barrier(stage), coming)

    def _load(self, factor: MatmulOperand, stage: str, batch: str, at: str, first: str) -> None:
        """The pieces of a factor, which begin at a row or column and an element of the sum."""
        w, full = self.w, self._barrier(stage)
        start = self._places(stage)[factor is self.b]
        for line in range(self.form.lines):
            place = number(w, "add", start, line * factor.bytes)
            factor.load(w, place, batch, at, number(w, "add", first, LINE * line), full)

    # ---- multiplying ----

    def _multiply_all(self) -> None:
        w, form = self.w, self.form
        if self.early:
            w.wait()
        warpgroup = number(w, "sub", self.group, 1)
        lane = w(f"and i32 {self.thread}, {WARP - 1}")
        self.leads = w(f"icmp eq i32 {lane}, 0")
        start, step, turn, turns, own = self.block, self.blocks, "0", 1, "0"
        if form.alternate:  # every other tile of the block
            far = w.mul(w(f"zext i32 {warpgroup} to i64"), w.blocks())
            start, step = w.add(start, far), w.mul(w.blocks(), str(form.warpgroups))
            turn, turns = warpgroup, form.warpgroups
        else:
            own = number(w, "mul", warpgroup, form.blocks)
        rows, self.first = number(w, "mul", own, 64), number(w, "mul", own, PIECE)
        with w.loop(start, self.tiles, step, [("i32", turn)]) as tiles:
            batch, row, column = self._tile(tiles.index)
            sums = self._sums(tiles.carried[0])
            wide = (batch, number(w, "add", row, rows), column)
            place = TilePlace(*(w(f"zext i32 {x} to i64") for x in wide))
            if form.split > 1:
                self.others.share(tiles.carried[0], self._parts(sums), place, self.epilogue)
            else:
                self.epilogue.write(place, self._parts(sums))
            tiles.next = [number(w, "add", tiles.carried[0], turns)]

    def _parts(self, sums: Sequence[str]) -> list[Sequence[str]]:
        """Those of each 64 rows."""
        each = self.form.columns // 2
        return [sums[k * each : (k + 1) * each] for k in range(self.form.blocks)]

    def _sums(self, turn: str) -> list[str]:
        """The results of a tile, so many tiles of the block being before it. The products of a
        step are waited for in the next one."""
        w, form = self.w, self.form
        passed = number(w, "mul", turn, w(f"trunc i64 {self.steps} to i32"))
        stage = number(w, "urem", passed, form.stages)
        phase = number(w, "and", number(w, "udiv", passed, form.stages), 1)
        if form.alternate:
            mine = number(w, "and", turn, 1)
            before = number(w, "add", number(w, "lshr", turn, 1), number(w, "add", mine, 1))
            hopper.await_phase(w, self._turn(mine), number(w, "and", before, 1))
        k = self.matmul.k  # every block is to have a step, or its sums are zeros
        known = isinstance(k, int) and -(-k // form.depth) >= form.split
        none = ("float", "poison" if known else "0.0")
        ring = [("i32", stage), ("i32", phase), ("i32", stage)]
        with w.loop("0", self.steps, 1, [*ring, *[none] * form.sums]) as steps:
            stage, phase, before, *sums = steps.carried
            full, step = self._barrier(stage), w(f"trunc i64 {steps.index} to i32")
            hopper.await_phase(w, full, phase)
            found = self._products(stage, sums, step if known else None)
            others = w(f"icmp ne i32 {step}, 0")
            with w.when(w(f"and i1 {self.leads}, {others}")):
                hopper.arrive(w, self._barrier(before, empty=True))
            steps.next = [*self._next(stage, phase), stage, *found]
        if form.alternate:
            with w.when(self.leads):
                hopper.arrive(w, self._turn(number(w, "xor", mine, 1)))
        done = hopper.end(w, steps.results[3:], 0)
        some = w(f"icmp ne i64 {self.steps}, 0")
        with w.when(w(f"and i1 {self.leads}, {some}")):
            hopper.arrive(w, self._barrier(steps.results[2], empty=True))
        return done

    def _products(self, stage: str, sums: Sequence[str], fresh: str | None) -> list[str]:
        w, form = self.w, self.form
        a, b = self._places(stage)
        a = number(w, "add", a, self.first)
        found = hopper.multiply(
            w,
            self.matmul.dtype,
            form.columns,
            self._parts(sums),
            [self._steps(self.a, number(w, "add", a, PIECE * k)) for k in range(form.blocks)],
            self._steps(self.b, b),
            (not self.a.along, not self.b.along),
            fresh,
            pending=1,
        )
        return [x for tile in found for x in tile]

    def _steps(self, factor: MatmulOperand, place: str) -> list[str]:
        """The descriptors of the steps in a stage."""
        w, lines = self.w, range(self.form.lines)
        places = [number(w, "add", place, line * factor.bytes) for line in lines]
        return [x for there in places for x in factor.steps(w, there)]
