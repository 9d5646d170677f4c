"""Fused attention: softmax(scale * q kᵀ + mask) v without the matrix of scores in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torchair.codegen.cpu.attention import parts
from torchair.codegen.cpu.attention.decode import Decode, decode_areas
from torchair.codegen.cpu.attention.form import (
    FEW_ROWS,
    AttentionSizes,
    AttentionText,
    dots_bf16,
    multiplier,
    plan,
    prefill_areas,
    round_up,
)
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import BYTES
from torchair.codegen.target import DEFAULT_CONFIG, Choices, Generated, KernelConfig
from torchair.codegen.text.maths_vector import wide
from torchair.codegen.text.writer import REASSOCIATE, KernelWriter, Machine, f32

# ---- many queries: blocks of queries times blocks of keys, queries in lanes ----


_NONE = "zeroinitializer"


class Prefill(AttentionText):
    """Writes the prefill form of a spec into a kernel.

    A work item is a block of query rows of one key head. Row r is query `r // group` of the
    query head `r % group` of that key head, so rows with nearby queries are in a block together.
    """

    def __init__(
        self,
        w: KernelWriter,
        spec: Attention,
        per_thread: int,
        config: KernelConfig = DEFAULT_CONFIG,
    ) -> None:
        super().__init__(w, spec, prefill_areas(spec, w.machine, config), per_thread)
        self.plan = plan(spec, w.machine, config)
        steps = spec.width // 2 if self.plan.pairs else spec.width
        self.steps, self.deep = steps, round_up(steps, w.lanes)
        self.wide = round_up(spec.value_width, w.lanes)
        self.stage_row = max(self.deep, self.wide, self.plan.keys)

    def write(self) -> None:
        """The whole body."""
        w, s, block = self.w, self.sizes, self.plan.block
        multiplier(w, self.plan)
        parts.transposer(w)
        with self._items(w.ceil(s.rows, block), w.mul(s.batch, s.kv_heads)) as (number, pair):
            self.first = w.mul(number, block)
            self.batch, self.head = w.div(pair, s.kv_heads), w.rem(pair, s.kv_heads)
            self._item()

    @contextmanager
    def _items(self, blocks: str, heads: str) -> Iterator[tuple[str, str]]:
        """The blocks and heads of a thread: a head after the other, so that keys stay in the cache;
        with a causal mask in turns among the threads, the blocks that see most keys first."""
        w, total = self.w, self.w.mul(blocks, heads)
        if self.spec.causal:
            with w.loop("%tid", total, "%nt") as loop:
                yield w.sub(w.sub(blocks, "1"), w.div(loop.index, heads)), w.rem(loop.index, heads)
        else:
            with w.loop(*w.share(total)) as loop:
                yield w.rem(loop.index, blocks), w.div(loop.index, blocks)

    def _item(self) -> None:
        w, s, block = self.w, self.sizes, self.plan.block
        self._remember_rows()
        self._pack_queries()
        self._clear("total", self.areas.between("total", "outputs"))
        for first in range(0, block, w.lanes):
            parts.store(w, parts.LOWEST, w.offset(self._area("top"), "float", first))
        self.limit = s.span
        if self.spec.causal:
            last = w.sub(w.least(w.add(self.first, block), s.rows), "1")
            self.limit = w.least(s.span, w.add(w.div(last, s.group), "1"))
        with w.loop("0", self.limit, self.plan.keys) as loop:
            self._key_block(loop.index)
        self._finish()

    # ---- places ----

    def _vector(self, name: str, row: str) -> str:
        """The address of a row of the current group of queries, one vector, in an area."""
        config = self.w.add(self.w.mul(row, self.plan.block), self.group)
        return self.w.offset(self._area(name), "float", config)

    def _block(self, name: str, row: str) -> str:
        """The address of a row of all queries of the block in an area."""
        config = self.w.mul(row, self.plan.block)
        return self.w.offset(self._area(name), "float", config)

    def _load(self, name: str, row: str) -> str:
        return parts.load(self.w, self._vector(name, row))

    def _store(self, value: str, name: str, row: str) -> None:
        parts.store(self.w, value, self._vector(name, row))

    def _existing(self, row: str) -> str:
        """The number of a row of the block among all rows, the last one for those behind it."""
        w = self.w
        return w.least(w.add(self.first, row), w.sub(self.sizes.rows, "1"))

    def _remember_rows(self) -> None:
        """Note of every row of the block where its mask begins and which query it is."""
        w, spec = self.w, self.spec
        masks = spec.mask and not spec.one_mask_row
        if spec.mask and spec.one_mask_row:
            self.mask_row = self._row(self.sizes.mask, "0")
        if not (masks or spec.causal):
            return
        with w.loop("0", self.plan.block) as loop:
            row = self._existing(loop.index)
            if masks:
                at = w.offset(self._area("mask rows"), "i64", loop.index)
                w.do(f"store i64 {self._row(self.sizes.mask, row)}, ptr {at}")
            if spec.causal:
                short = w(f"trunc i64 {w.div(row, self.sizes.group)} to i32")
                at = w.offset(self._area("positions"), "i32", loop.index)
                w.do(f"store i32 {short}, ptr {at}")

    # ---- queries ----

    def _pack_queries(self) -> None:
        """Transpose the queries of the block: a row for each feature, or pair of features."""
        w = self.w
        with w.loop("0", self.plan.block, w.lanes) as group:
            self.group = group.index
            with w.loop("0", w.lanes) as loop:
                at = self._row_at(0, self.sizes.q, self._existing(w.add(group.index, loop.index)))
                self._stage_query(at, w.mul(loop.index, self.stage_row))
            self._transpose_stage("queries", str(self.deep))

    def _transpose_stage(self, name: str, columns: str) -> None:
        """Transpose the staged rows of a group of queries into their lanes of an area."""
        stage, to = self._area("stage"), self._vector(name, "0")
        self.w.run("transpose", stage, self.stage_row, to, self.plan.block, self.w.lanes, columns)

    def _stage_query(self, at: str, place: str) -> None:
        w, dtype, stride = self.w, self.spec.dtype, self.sizes.q[3]
        each = 2 if self.plan.pairs else 1
        to = w.offset(self._area("stage"), "float", place)

        def stage(c: str, valid: int) -> None:
            part = w.offset(at, "i8", w.mul(w.mul(c, stride), BYTES[dtype] * each))
            value = parts.read(w, dtype, part, stride, valid * each, w.lanes * each)
            if self.plan.pairs:
                value = w(f"bitcast <{w.lanes * 2} x i16> {value} to {self.vt}")
            else:
                value = parts.widen(w, dtype, value)
            parts.store(w, value, w.offset(to, "float", c))

        parts.over(w, self.steps, stage)

    # ---- a block of keys ----

    def _key_block(self, start: str) -> None:
        w = self.w
        count = w.least(str(self.plan.keys), w.sub(self.limit, start))
        with ExitStack() as stack:
            if self.spec.mask:
                stack.enter_context(w.when(self._mask(start, count)))
            self._scores(start, count)
            self._softmax(start, count)
            self._values(start, count)

    def _mask(self, start: str, count: str) -> str:
        """Copy the mask of the block, keys by queries; whether any query sees any key."""
        w, lanes = self.w, self.w.lanes
        if self.spec.one_mask_row:
            seen = self._mask_row(self.mask_row, start, count, self._area("mask"), None)
            return parts.any_lane(w, seen)
        with w.loop("0", self.plan.block, lanes, [(w.vector("i1"), _NONE)]) as group:
            self.group = group.index
            with w.loop("0", lanes, 1, [(w.vector("i1"), group.carried[0])]) as loop:
                number = w.add(group.index, loop.index)
                row = w(f"load i64, ptr {w.offset(self._area('mask rows'), 'i64', number)}")
                to = w.mul(loop.index, self.stage_row)
                to = w.offset(self._area("stage"), "float", to)
                loop.next = [self._mask_row(row, start, count, to, loop.carried[0])]
            group.next = loop.results
            self._transpose_stage("mask", count)
        return parts.any_lane(w, group.results[0])

    def _mask_row(self, row: str, start: str, count: str, to: str, seen: str | None) -> str:
        """Widen the block's part of a mask row; which lanes had a key that is seen."""
        w, spec = self.w, self.spec
        assert spec.mask is not None
        size, stride = str(BYTES[spec.mask]), self.sizes.mask[3]
        row = w.add(row, w.mul(start, stride))
        at = w.offset(w.pointer(3), "i8", w.mul(row, size))
        with w.loop("0", count, w.lanes, [(w.vector("i1"), seen or _NONE)]) as loop:
            part = w.offset(at, "i8", w.mul(w.mul(loop.index, stride), size))
            value = parts.read_up_to(w, spec.mask, part, stride, w.sub(count, loop.index))
            parts.store(w, value, w.offset(to, "float", loop.index))
            shown = w(f"fcmp une {self.vt} {value}, {parts.LOWEST}")
            loop.next = [w(f"or {w.vector('i1')} {loop.carried[0]}, {shown}")]
        return loop.results[0]

    def _scores(self, start: str, count: str) -> None:
        """Keys times queries."""
        w, strides = self.w, self.sizes.k
        row, step = self._bytes(strides[2]), self._bytes(strides[3])
        at = self._head_at(1, strides, start)
        if self.plan.pairs:
            step = "4"
        if self.plan.copies:
            area = self._area("keys")
            self._copy(at, row, strides[3], (count, self.spec.width), area)
            at, row, step = area, str(self.deep * 4), "4"
        self._clear("scores", w.mul(w.add(count, self.plan.rows), self.plan.block * 4))
        with w.loop("0", count, self.plan.rows) as loop:
            a = w.offset(at, "i8", w.mul(loop.index, row))
            to, rows = self._block("scores", loop.index), w.sub(count, loop.index)
            self._add_product(a, row, step, "queries", (str(self.steps), rows), to)

    def _add_product(
        self, a: str, row: str, step: str, b: str, counts: tuple[str, str], to: str
    ) -> None:
        self.w.run("multiply", a, row, step, self._area(b), *counts, to)

    # ---- softmax ----

    def _softmax(self, start: str, count: str) -> None:
        """Turn scores into weights; rescale what was summed up if a larger score came."""
        w = self.w
        with w.loop("0", self.plan.block, w.lanes) as group:
            self.group = group.index
            old = self._load("top", "0")
            top = self._finish_scores(start, count, old)
            base = parts.finite(w, top)
            total = self._weights(count, base)
            self._store(top, "top", "0")
            less = parts.weight(w, old, base, self.spec.adds)
            self._store(w.fused(self._load("total", "0"), less, total), "total", "0")
            with w.loop("0", self.spec.value_width) as loop:
                value = self._load("outputs", loop.index)
                value = w(f"fmul {self.vt} {value}, {less}")
                self._store(value, "outputs", loop.index)

    def _finish_scores(self, start: str, count: str, top: str) -> str:
        """Scale and mask the scores; the largest of each query."""
        w, spec, it = self.w, self.spec, self.w.vector("i32")
        if spec.causal:
            queries = parts.load(w, self._vector("positions", "0"), "i32")
        with w.loop("0", count, 1, [(self.vt, top)]) as loop:
            key = loop.index
            value = self._load("scores", key)
            if spec.mask:
                value = w.fused(value, self.factor, self._mask_at(key))
            else:
                value = w(f"fmul {self.vt} {value}, {self.factor}")
            if spec.causal:
                number = w.splat("i32", w(f"trunc i64 {w.add(start, key)} to i32"))
                seen = w(f"icmp sle {it} {number}, {queries}")
                value = parts.where(w, seen, value, parts.LOWEST)
            self._store(value, "scores", key)
            loop.next = [parts.larger(w, value, loop.carried[0])]
        return loop.results[0]

    def _mask_at(self, key: str) -> str:
        if not self.spec.one_mask_row:
            return self._load("mask", key)
        at = self.w.offset(self._area("mask"), "float", key)
        return self.w.splat("float", self.w(f"load float, ptr {at}"))

    def _weights(self, count: str, base: str) -> str:
        """Exponentiate the scores; the sums of the weights of each query."""
        w, pairs = self.w, self.plan.pairs
        with w.loop("0", count, 2 if pairs else 1, [(self.vt, "zeroinitializer")]) as loop:
            weight = self._weight(loop.index, base)
            total = w(f"fadd {REASSOCIATE} {self.vt} {loop.carried[0]}, {weight}")
            if pairs:
                total, weight = self._pair(loop.index, count, base, (total, weight))
                self._store(weight, "weights", w.div(loop.index, "2"))
            else:
                self._store(weight, "scores", loop.index)
            loop.next = [total]
        return loop.results[0]

    def _weight(self, key: str, base: str) -> str:
        return parts.weight(self.w, self._load("scores", key), base, self.spec.adds)

    def _pair(self, key: str, count: str, base: str, first: tuple[str, str]) -> tuple[str, str]:
        """The sum and the bf16 pair with the weight of the next key, 0 if there is none."""
        w, (total, weight) = self.w, first
        behind = w.add(key, "1")
        other = self._weight(behind, base)
        exists = w(f"icmp slt i64 {behind}, {count}")
        other = w(f"select i1 {exists}, {self.vt} {other}, {self.vt} zeroinitializer")
        total = w(f"fadd {REASSOCIATE} {self.vt} {total}, {other}")
        low, high = (wide(w, "float", x).bits() + (1 << 15) for x in (weight, other))
        return total, (low.shifted_down(16) | (high & (-1 << 16))).bits().name

    # ---- values ----

    def _values(self, start: str, count: str) -> None:
        """Add the weighted values of the block to the outputs, a row for each feature."""
        w, strides, width = self.w, self.sizes.v, self.spec.value_width
        step, row = self._bytes(strides[2]), self._bytes(strides[3])
        at, steps, weights = self._head_at(2, strides, start), count, "scores"
        if self.plan.pairs:
            self._pair_values(at, step, count)
            steps, weights = w.div(w.add(count, "1"), "2"), "weights"
        elif self.plan.copies:
            self._copy(at, step, strides[3], (count, width), self._area("values"))
        if self.plan.pairs or self.plan.copies:
            at, step, row = self._area("values"), str(self.wide * 4), "4"
        with w.loop("0", width, self.plan.rows) as loop:
            a = w.offset(at, "i8", w.mul(loop.index, row))
            to, rows = self._block("outputs", loop.index), w.sub(str(width), loop.index)
            self._add_product(a, row, step, weights, (steps, rows), to)

    def _pair_values(self, at: str, step: str, count: str) -> None:
        """Put the values of two keys beside each other; zeros where there is no second one."""
        w, it, stride = self.w, self.w.vector("i32"), self.sizes.v[3]
        with w.loop("0", count, 2) as loop:
            one = w.offset(at, "i8", w.mul(loop.index, step))
            behind = w.add(loop.index, "1")
            exists = w(f"icmp slt i64 {behind}, {count}")
            two = w(f"select i1 {exists}, ptr {w.offset(one, 'i8', step)}, ptr {one}")
            place = w.mul(w.div(loop.index, "2"), self.wide)
            to = w.offset(self._area("values"), "float", place)

            def pair(c: str, valid: int) -> None:
                config = w.mul(w.mul(c, stride), 2)
                places = (w.offset(x, "i8", config) for x in (one, two))
                halves = (parts.read(w, "bf16", at, stride, valid) for at in places)
                low, high = (wide(w, "i16", x).to("i32", signed=False) for x in halves)
                high = high << 16
                high.name = w(f"select i1 {exists}, {it} {high.name}, {it} zeroinitializer")
                parts.store(w, (low | high).bits().name, w.offset(to, "float", c))

            parts.over(w, self.spec.value_width, pair)

    # ---- results ----

    def _finish(self) -> None:
        """Divide by the sums, transpose, narrow and store."""
        w, lanes = self.w, self.w.lanes
        with w.loop("0", self.plan.block, lanes) as group:
            self.group = group.index
            self._invert()
            places = self._vector("outputs", "0"), self.plan.block, self._area("stage")
            w.run("transpose", *places, self.stage_row, self.wide, lanes)
            rest = w.sub(w.sub(self.sizes.rows, self.first), group.index)
            with w.loop("0", w.least(str(lanes), rest)) as loop:
                self._write_row(loop.index, w.add(group.index, loop.index))

    def _invert(self) -> None:
        """1 / the sums of the weights, and 0 for queries that see no key."""
        w, total = self.w, self._load("total", "0")
        none = w(f"fcmp oeq {self.vt} {total}, zeroinitializer")
        inverse = w(f"fdiv {self.vt} splat (float {f32(1.0)}), {total}")
        self._store(parts.where(w, none, "zeroinitializer", inverse), "inverse", "0")

    def _write_row(self, staged: str, number: str) -> None:
        """Scale, narrow and store the output of one query."""
        w, row = self.w, self.w.add(self.first, number)
        at = w.offset(self._area("stage"), "float", w.mul(staged, self.stage_row))
        inverse = w(f"load float, ptr {w.offset(self._area('inverse'), 'float', number)}")
        self._write_output(row, at, w.splat("float", inverse))
        if self.spec.lse:
            top, total = (
                w(f"load float, ptr {w.offset(self._area(name), 'float', number)}")
                for name in ("top", "total")
            )
            self._write_lse(row, top, total)


KEYS = ("64", "32", "128", "256")
"""Keys of a block of prefill."""


def attention(
    spec: Attention,
    machine: Machine,
    label: str = "attention",
    config: KernelConfig = DEFAULT_CONFIG,
) -> Generated:
    """The kernel of a spec. There is a form for few queries and one for many; if the number of
    queries is given at run time, the kernel has both."""
    w = KernelWriter(machine)
    few, many = _forms(spec)
    if form := config.choice("form"):
        few, many = form == "decode", form == "prefill"
    decode = decode_areas(spec, machine).bytes if few else 0
    per_thread = max(decode, prefill_areas(spec, machine, config).bytes if many else 0)
    if few and many:
        _both(w, spec, per_thread)
    elif few:
        Decode(w, spec, per_thread).write()
    else:
        Prefill(w, spec, per_thread, config).write()
    return Generated(w.kernel(label), per_thread)


def attention_choices(spec: Attention, machine: Machine) -> Choices:
    """The form, where few query rows leave a choice, and the blocks of prefill. Nothing for sizes
    that vary."""
    if not spec.rows or not isinstance(spec.span, int) or not isinstance(spec.batch, int):
        return {}
    few = spec.rows <= FEW_ROWS
    if few and dots_bf16(spec, machine):
        return {}  # prefill rounds more
    most = 4 if machine.registers >= 32 else 3
    queries = tuple(str(n) for n in range(min(most, -(-spec.rows // machine.lanes)), 0, -1))
    forms = {"form": ("decode", "prefill")} if few else {}
    return {**forms, "queries": queries, "keys": KEYS}


def _forms(spec: Attention) -> tuple[bool, bool]:
    """Whether a kernel of this spec may meet few, and many, query rows."""
    if spec.rows is not None:
        return spec.rows <= FEW_ROWS, spec.rows > FEW_ROWS
    return (spec.group or 1) <= FEW_ROWS, True


def _both(w: KernelWriter, spec: Attention, per_thread: int) -> None:
    """Both forms as functions, and the choice between them."""
    few = w(f"icmp sle i64 {AttentionSizes(w, spec).rows}, {FEW_ROWS}")
    forms: list[tuple[str, str, type[Decode] | type[Prefill]]]
    forms = [("few", few, Decode), ("many", w(f"xor i1 {few}, true"), Prefill)]
    for name, condition, form in forms:
        with w.function(name, "i64 %tid, i64 %nt, ptr noalias %words") as part:
            form(part, spec, per_thread).write()
        with w.when(condition):
            w.run(name, "%tid", "%nt", "%words")
