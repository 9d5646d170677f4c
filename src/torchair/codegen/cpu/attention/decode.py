"""Attention for few queries: keys and values are read once, in order, and only where seen."""

from __future__ import annotations

from contextlib import ExitStack

from torchair.codegen.cpu.attention import parts
from torchair.codegen.cpu.attention.form import FEW_ROWS, Areas, AttentionText, dots_bf16, round_up
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, f32

_KEYS = 256  # a multiple of all vector widths; their scores are kept until all are known


def decode_areas(spec: Attention, machine: Machine) -> Areas:
    """The work memory of decode."""
    areas, lanes = Areas(), machine.lanes
    wide = round_up(spec.value_width, lanes) * 4
    areas.add("scores", FEW_ROWS * _KEYS * 4)
    areas.add("outputs", FEW_ROWS * wide)
    areas.add("total", FEW_ROWS * 4)
    areas.add("top", FEW_ROWS * 4)
    if spec.mask:
        areas.add("mask", (1 if spec.one_mask_row else FEW_ROWS) * _KEYS * 4)
    areas.add("seen", _KEYS // lanes * 8)
    if spec.k[3] != 1:
        areas.add("keys", lanes * round_up(spec.width, lanes) * 4)
    if spec.v[3] != 1:
        areas.add("values", lanes * wide)
    return areas


class Decode(AttentionText):
    """Writes the decode form of a spec into a kernel.

    A work item is a key head with its query rows, or a part of the rows if there are more threads
    than heads. Blocks of keys, one for each lane, are noted if any row sees a key of them; then
    come the scores of those blocks, the softmax, and the sums of their values.
    """

    def __init__(self, w: KernelWriter, spec: Attention, per_thread: int) -> None:
        super().__init__(w, spec, decode_areas(spec, w.machine), per_thread)
        self.dots = dots_bf16(spec, w.machine)
        self.wide = round_up(spec.value_width, w.lanes)

    def write(self) -> None:
        """The whole body."""
        w, s = self.w, self.sizes
        heads = w.mul(s.batch, s.kv_heads)
        # among how many work items the rows of a head are divided
        shares = w.most(w.least(w.div("%nt", w.most(heads, 1)), s.rows), 1)
        with w.loop(*w.share(w.mul(heads, shares))) as item:
            pair, part = w.div(item.index, shares), w.rem(item.index, shares)
            self.batch, self.head = w.div(pair, s.kv_heads), w.rem(pair, s.kv_heads)
            self.first = w.div(w.mul(s.rows, part), shares)
            self.count = w.sub(w.div(w.mul(s.rows, w.add(part, 1)), shares), self.first)
            self._item()

    def _item(self) -> None:
        w, s = self.w, self.sizes
        limit = s.span
        if self.spec.causal:
            last = w.sub(w.add(self.first, self.count), "1")
            limit = w.least(limit, w.add(w.div(last, s.group), "1"))
        self.limit = limit
        # no keys yet; the sums of the weights follow the outputs in memory
        self._clear("outputs", self.areas.between("outputs", "total"))
        w.do(f"store <{FEW_ROWS} x float> {parts.LOWEST}, ptr {self._area('top')}, align 64")
        with w.loop("0", limit, _KEYS) as loop:
            end = w.least(w.add(loop.index, _KEYS), limit)
            with w.loop(loop.index, end, w.lanes, [("i64", "0")]) as block:
                block.next = [self._block(block.index, block.carried[0])]
            self.blocks = block.results[0]
            with w.loop("0", self.count) as row:
                self._softmax(row.index)
            with w.loop("0", self.blocks) as block:
                self._values(block.index)
        with w.loop("0", self.count) as row:
            self._finish(row.index)

    def _seen_at(self, block: str) -> str:
        return self.w.offset(self._area("seen"), "i64", block)

    def _block_at(self, area: str, row: str, block: str) -> str:
        """The address of what is kept of a block of keys for one row."""
        config = self.w.add(self.w.mul(row, _KEYS), self.w.mul(block, self.w.lanes))
        return self.w.offset(self._area(area), "float", config)

    def _output_at(self, row: str) -> str:
        return self.w.offset(self._area("outputs"), "float", self.w.mul(row, self.wide))

    # ---- scores ----

    def _block(self, start: str, number: str) -> str:
        """Scores of a block of keys, unless no row sees any; the number of blocks seen so far."""
        w = self.w
        one = w.add(number, "1")
        with ExitStack() as stack:
            if self.spec.mask:
                seen = self._seen(start, number)
                one = w(f"select i1 {seen}, i64 {one}, i64 {number}")
                stack.enter_context(w.when(seen))
            w.do(f"store i64 {start}, ptr {self._seen_at(number)}")
            self._score_rows(start, number)
        return one

    def _seen(self, start: str, number: str) -> str:
        """Whether the mask shows a key of a block to any row; widens the mask of the block."""
        w, flags = self.w, self.w.vector("i1")
        if self.spec.one_mask_row:
            return parts.any_lane(w, self._shown("0", start, number))
        with w.loop("0", self.count, 1, [(flags, "zeroinitializer")]) as loop:
            shown = self._shown(loop.index, start, number)
            loop.next = [w(f"or {flags} {loop.carried[0]}, {shown}")]
        return parts.any_lane(w, loop.results[0])

    def _shown(self, row: str, start: str, number: str) -> str:
        """Widen the mask of a block for one row; which keys it shows."""
        w, spec, strides = self.w, self.spec, self.sizes.mask
        assert spec.mask is not None
        config = self._row(strides, w.add(self.first, row))
        config = w.mul(w.add(config, w.mul(start, strides[3])), str(BYTES[spec.mask]))
        at = w.offset(w.pointer(3), "i8", config)
        mask = parts.read_up_to(w, spec.mask, at, strides[3], w.sub(self.limit, start))
        parts.store(w, mask, self._block_at("mask", row, number))
        return w(f"fcmp une {self.vt} {mask}, {parts.LOWEST}")

    def _score_rows(self, start: str, number: str) -> None:
        """Products of a block of keys with all rows, four keys at a time."""
        w, strides = self.w, self.sizes.k
        at, row, dtype = self._head_at(1, strides, start), self._bytes(strides[2]), self.spec.dtype
        existing = w.sub(self.limit, start)
        if strides[3] != "1":
            count = w.least(existing, w.lanes)
            self._copy(at, row, strides[3], (count, self.spec.width), self._area("keys"))
            row, dtype = str(round_up(self.spec.width, w.lanes) * 4), "f32"
            at = self._area("keys")
        last = w.sub(existing, "1")
        with w.loop("0", self.count) as rows:
            query = self._row_at(0, self.sizes.q, w.add(self.first, rows.index))
            queries = self._query(query)
            to = self._block_at("scores", rows.index, number)
            with w.loop("0", w.lanes, 4) as loop:
                keys = []
                for j in range(4):
                    key = w.least(w.add(loop.index, j), last)
                    keys.append(w.offset(at, "i8", w.mul(key, row)))
                four = parts.four_sums(w, self._four(queries, query, keys, dtype))
                w.do(f"store <4 x float> {four}, ptr {w.offset(to, 'float', loop.index)}, align 16")

    @property
    def _step(self) -> int:
        """Features that are multiplied at once."""
        return self.w.lanes * 2 if self.dots else self.w.lanes

    def _query(self, at: str) -> list[str]:
        """The vectors of a query if they are few enough to stay in registers."""
        width = self.spec.width
        if width > 4 * self._step:
            return []
        return [self._part(at, str(c), width - c) for c in range(0, width, self._step)]

    def _part(self, at: str, first: str, valid: int) -> str:
        """A vector of features of a query."""
        w, dtype, stride = self.w, self.spec.dtype, self.sizes.q[3]
        at = w.offset(at, "i8", self._bytes(w.mul(first, stride)))
        value = parts.read(w, dtype, at, stride, valid, self._step)
        return value if self.dots else parts.widen(w, dtype, value)

    def _four(self, queries: list[str], query: str, keys: list[str], dtype: Element) -> list[str]:
        """Products of a query with four keys, not yet summed over the lanes."""
        w, width, step = self.w, self.spec.width, self._step
        totals, whole = ["zeroinitializer"] * 4, width // step * step
        if queries:
            for part, c in zip(queries, range(0, width, step), strict=True):
                totals = self._add_part(totals, part, keys, str(c), min(width - c, step), dtype)
            return totals
        with w.loop("0", whole, step, [(self.vt, x) for x in totals]) as loop:
            part = self._part(query, loop.index, step)
            loop.next = self._add_part(loop.carried, part, keys, loop.index, step, dtype)
        if whole == width:
            return loop.results
        part = self._part(query, str(whole), width - whole)
        return self._add_part(loop.results, part, keys, str(whole), width - whole, dtype)

    def _add_part(
        self, totals: list[str], part: str, keys: list[str], first: str, valid: int, dtype: Element
    ) -> list[str]:
        w, sums = self.w, []
        for total, key in zip(totals, keys, strict=True):
            at = w.offset(key, "i8", w.mul(first, BYTES[dtype]))
            value = parts.read(w, dtype, at, "1", valid, self._step)
            if self.dots:
                sums.append(parts.dot_pairs(w, part, value, total))
            else:
                sums.append(w.fused(part, parts.widen(w, dtype, value), total))
        return sums

    # ---- softmax ----

    def _softmax(self, row: str) -> None:
        """Turn the scores of a row into weights; rescale what was summed up before."""
        w = self.w
        top_at, total_at = (w.offset(self._area(x), "float", row) for x in ("top", "total"))
        old = w.splat("float", w(f"load float, ptr {top_at}"))
        with w.loop("0", self.blocks, 1, [(self.vt, old)]) as loop:
            score = self._score(row, loop.index)
            loop.next = [parts.larger(w, score, loop.carried[0])]
        top = parts.largest(w, loop.results[0])
        base = parts.finite(w, top)
        with w.loop("0", self.blocks, 1, [(self.vt, "zeroinitializer")]) as loop:
            at = self._block_at("scores", row, loop.index)
            score = parts.load(w, at)
            weight = parts.weight(w, score, base, self.spec.adds)
            parts.store(w, weight, at)
            loop.next = [w(f"fadd {REASSOCIATE} {self.vt} {loop.carried[0]}, {weight}")]
        less = parts.weight(w, old, base, self.spec.adds)
        self._rescale(row, less)
        name = f"llvm.vector.reduce.fadd.v{w.lanes}f32"
        start = ("float", f32(-0.0))
        total = w.call("float", name, start, (self.vt, loop.results[0]), flags=REASSOCIATE)
        rest = w(f"fmul float {w(f'load float, ptr {total_at}')}, {self._lane(less)}")
        w.do(f"store float {w(f'fadd float {rest}, {total}')}, ptr {total_at}")
        w.do(f"store float {self._lane(top)}, ptr {top_at}")

    def _lane(self, vector: str) -> str:
        return self.w(f"extractelement {self.vt} {vector}, i64 0")

    def _score(self, row: str, block: str) -> str:
        """The scores of a block, scaled and masked; also stored."""
        w, spec, at = self.w, self.spec, self._block_at("scores", row, block)
        score = parts.load(w, at)
        if spec.mask:
            mask = self._block_at("mask", "0" if spec.one_mask_row else row, block)
            score = w.fused(score, self.factor, parts.load(w, mask))
        else:
            score = w(f"fmul {self.vt} {score}, {self.factor}")
        if spec.causal or not spec.mask:
            start = w(f"load i64, ptr {self._seen_at(block)}")
            inside = parts.before(w, w.sub(self._end(row), start))
            score = parts.where(w, inside, score, parts.LOWEST)
        parts.store(w, score, at)
        return score

    def _end(self, row: str) -> str:
        """How many keys a row may see."""
        if not self.spec.causal:
            return self.limit
        query = self.w.div(self.w.add(self.first, row), self.sizes.group)
        return self.w.least(self.limit, self.w.add(query, "1"))

    def _rescale(self, row: str, factor: str) -> None:
        w, base = self.w, self._output_at(row)

        def scale(c: str, _: int) -> None:
            at = w.offset(base, "float", c)
            value = parts.load(w, at)
            parts.store(w, w(f"fmul {self.vt} {value}, {factor}"), at)

        parts.over(w, self.wide, scale)

    # ---- values ----

    def _values(self, block: str) -> None:
        """Add the weighted values of a block of keys to the outputs of all rows."""
        w, strides, width = self.w, self.sizes.v, self.spec.value_width
        start = w(f"load i64, ptr {self._seen_at(block)}")
        count = w.least(str(w.lanes), w.sub(self.limit, start))
        at, row, dtype = self._head_at(2, strides, start), self._bytes(strides[2]), self.spec.dtype
        if strides[3] != "1":
            self._copy(at, row, strides[3], (count, width), self._area("values"))
            at, row, dtype = self._area("values"), str(self.wide * 4), "f32"
        most = w.machine.registers // 2 * w.lanes
        with w.loop("0", self.count) as rows:
            weights, to = self._block_at("scores", rows.index, block), self._output_at(rows.index)
            for first in range(0, width, most):
                columns = range(first, min(first + most, width), w.lanes)
                self._add_values(columns, weights, to, (at, row, dtype), count)

    def _add_values(
        self, columns: range, weights: str, to: str, values: tuple[str, str, Element], count: str
    ) -> None:
        """Add weights times values to these columns of one output row."""
        w, (base, row, dtype) = self.w, values
        places = [w.offset(to, "float", c) for c in columns]
        with w.loop("0", count, 1, [(self.vt, parts.load(w, at)) for at in places]) as loop:
            weight = w(f"load float, ptr {w.offset(weights, 'float', loop.index)}")
            weight = w.splat("float", weight)
            source = w.offset(base, "i8", w.mul(loop.index, row))
            for c, total in zip(columns, loop.carried, strict=True):
                at = w.offset(source, "i8", c * BYTES[dtype])
                value = parts.read(w, dtype, at, "1", self.spec.value_width - c)
                loop.next.append(w.fused(weight, parts.widen(w, dtype, value), total))
        for at, value in zip(places, loop.results, strict=True):
            parts.store(w, value, at)

    def _finish(self, row: str) -> None:
        """Divide by the sum of the weights and store."""
        w = self.w
        total, top = (
            w(f"load float, ptr {w.offset(self._area(x), 'float', row)}") for x in ("total", "top")
        )
        none = w(f"fcmp oeq float {total}, 0.0")
        inverse = w(f"fdiv float {f32(1.0)}, {total}")
        inverse = w(f"select i1 {none}, float 0.0, float {inverse}")
        number = w.add(self.first, row)
        self._write_output(number, self._output_at(row), w.splat("float", inverse))
        if self.spec.lse:
            self._write_lse(number, top, total)
