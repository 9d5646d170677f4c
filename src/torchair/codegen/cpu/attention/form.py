"""What both forms of attention share: sizes, work memory, blocks, where rows and heads lie, and how
results are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchair.codegen.cpu.attention import parts
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import BYTES
from torchair.codegen.target import DEFAULT_CONFIG, KernelConfig
from torchair.codegen.text.writer import IndexText, KernelWriter, Machine, Writer, f32

FEW_ROWS = 8
"""Up to so many query rows of a key head, the decode form is the faster one."""


def dots_bf16(spec: Attention, machine: Machine) -> bool:
    """Whether pairs of bf16 features are multiplied by the processor's own instruction."""
    plain = spec.k[3] == 1 and spec.width % 2 == 0
    return spec.dtype == "bf16" and machine.dot_bf16 and machine.bits == 512 and plain


class Areas:
    """The work memory of one thread: names of areas and where they begin, in bytes."""

    def __init__(self) -> None:
        self._places: dict[str, range] = {}
        self.bytes = 0

    def add(self, name: str, bytes_: int) -> None:
        """Reserve an area, aligned to a cache line."""
        first, self.bytes = self.bytes, self.bytes + round_up(bytes_, 64)
        self._places[name] = range(first, self.bytes)

    def between(self, first: str, last: str) -> int:
        """The bytes from the beginning of an area to the end of another."""
        return self._places[last].stop - self._places[first].start

    def at(self, w: KernelWriter, name: str, per_thread: int) -> str:
        """The address of an area of this thread."""
        base = w.entry(f"mul i64 %tid, {per_thread}")
        base = w.entry(f"getelementptr i8, ptr {w.pointer(6)}, i64 {base}")
        return w.offset(base, "i8", self._places[name].start)


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below n."""
    return -(-n // unit) * unit


class AttentionSizes:
    """The sizes of a spec as values of a kernel."""

    def __init__(self, w: KernelWriter, spec: Attention) -> None:
        self.batch = w.size(spec.batch)
        self.kv_heads = w.size(spec.kv_heads)
        self.length = w.size(spec.length)
        self.span = w.size(spec.span)
        self.group = str(spec.group)
        if not spec.group:  # 1 where there are no heads
            self.group = w.most(w.div(w.size(spec.heads), w.most(self.kv_heads, 1)), 1)
        self.rows = w.mul(self.group, self.length)
        self.q, self.k, self.v, self.out, self.mask = (
            tuple(w.size(s) for s in strides)
            for strides in (spec.q, spec.k, spec.v, spec.out, spec.mask_strides)
        )
        self.lse = tuple(w.size(s) for s in spec.lse or ())


# ---- blocks of prefill ----


_KEYS = 64  # of a block; a multiple of all vector widths
_COST = {1: 1.2, 2: 1.05, 3: 1.02, 4: 1.0}
"""Time per vector of queries, by how many of them a block has; the fewer, the less is wasted."""


@dataclass(frozen=True)
class PrefillPlan:
    """How prefill cuts its work: blocks of `vectors` query vectors times `keys` keys.

    Queries lie in lanes. Then the layouts of keys and values are never changed, and the softmax
    needs no sums across lanes. A product is made in tiles of `rows` by `vectors` registers.
    """

    vectors: int
    rows: int
    keys: int
    lanes: int
    pairs: bool  # two bf16 of the summed dimension are multiplied by one instruction
    copies: bool  # keys and values are first widened to float32

    @property
    def block(self) -> int:
        """Queries of a block."""
        return self.vectors * self.lanes


def plan(spec: Attention, machine: Machine, config: KernelConfig = DEFAULT_CONFIG) -> PrefillPlan:
    """The blocks for a spec: as many queries as registers allow, unless fewer waste less."""
    vectors = most = 4 if machine.registers >= 32 else 3
    if spec.rows:
        lines = -(-spec.rows // machine.lanes)
        vectors = min(range(most, 0, -1), key=lambda n: round_up(lines, n) * _COST[n])
    vectors, keys = config.integer("queries", vectors), config.integer("keys", _KEYS)
    pairs = dots_bf16(spec, machine)
    copies = spec.dtype != "f32" and not pairs
    return PrefillPlan(vectors, 8 if vectors == 1 else 4, keys, machine.lanes, pairs, copies)


def prefill_areas(
    spec: Attention, machine: Machine, config: KernelConfig = DEFAULT_CONFIG
) -> Areas:
    """The work memory of prefill."""
    p, areas = plan(spec, machine, config), Areas()
    line, steps = p.block * 4, spec.width // 2 if p.pairs else spec.width
    deep, wide = round_up(steps, p.lanes), round_up(spec.value_width, p.lanes)
    areas.add("queries", deep * line)
    areas.add("scores", (p.keys + p.rows) * line)
    areas.add("total", line)
    areas.add("outputs", (wide + p.rows) * line)
    areas.add("stage", p.lanes * max(deep, wide, p.keys) * 4)
    areas.add("top", line)
    areas.add("inverse", line)
    if spec.causal:
        areas.add("positions", line)
    if spec.mask:
        areas.add("mask", p.keys * 4 if spec.one_mask_row else p.keys * line)
        areas.add("mask rows", p.block * 8)
    if p.pairs:
        areas.add("weights", p.keys // 2 * line)
    if p.copies:
        areas.add("keys", p.keys * deep * 4)
    if p.copies or p.pairs:
        areas.add("values", (p.keys // 2 if p.pairs else p.keys) * wide * 4)
    return areas


def multiplier(w: KernelWriter, p: PrefillPlan) -> None:
    """Adds the function `multiply`, which adds a product to a tile: to += a b.

    Row i of `a` begins `a_row` bytes after the one before, its elements are `a_step` bytes apart;
    `b` has `count` rows of a block of queries. `rows` of `a` exist; the tile is computed whole,
    with repetitions of the last of them. The rows of `to` are blocks of queries.
    """
    arguments = "ptr %a, i64 %a_row, i64 %a_step, ptr %b, i64 %count, i64 %rows, ptr %to"
    with w.function("multiply", arguments) as h:
        vt, last = h.vector("float"), h.sub("%rows", 1)
        configs = [h.mul(h.least(i, last), "%a_row") for i in range(p.rows)]
        rows = [h.offset("%a", "i8", config) for config in configs]
        places = [h.offset("%to", "float", n * p.lanes) for n in range(p.rows * p.vectors)]
        first = [parts.load(h, place) for place in places]
        carried = [("i64", "0"), ("ptr", "%b"), *((vt, x) for x in first)]
        with h.loop("0", "%count", carried=carried) as loop:
            config, b, *total = loop.carried
            right = [parts.load(h, h.offset(b, "float", v * p.lanes)) for v in range(p.vectors)]
            after = []
            for i, row in enumerate(rows):
                left = _repeated(h, p, h.offset(row, "i8", config))
                mine = total[i * p.vectors : (i + 1) * p.vectors]
                after += [_add_product(h, p, left, x, y) for x, y in zip(right, mine, strict=True)]
            loop.next = [h.add(config, "%a_step"), h.offset(b, "float", p.block), *after]
        for place, x in zip(places, loop.results[2:], strict=True):
            parts.store(h, x, place)


def _repeated(h: Writer, p: PrefillPlan, at: str) -> str:
    """An element, or a pair of them, in every lane."""
    if p.pairs:
        pair = h.splat("i32", h(f"load i32, ptr {at}, align 2"))
        return h(f"bitcast <16 x i32> {pair} to <32 x i16>")
    return h.splat("float", h(f"load float, ptr {at}, align 4"))


def _add_product(h: Writer, p: PrefillPlan, left: str, right: str, total: str) -> str:
    if not p.pairs:
        return h.fused(left, right, total)
    return parts.dot_pairs(h, left, h(f"bitcast <16 x float> {right} to <32 x i16>"), total)


class AttentionText:
    """Writes attention into a kernel. `batch` and `head` are those of the current work item;
    the head is a key head, whose query rows are numbered: row r is query `r // group` of the
    query head `r % group` of those that share the key head.
    """

    batch: str
    head: str

    def __init__(self, w: KernelWriter, spec: Attention, areas: Areas, per_thread: int) -> None:
        self.w, self.spec = w, spec
        self.sizes = AttentionSizes(w, spec)
        self.vt = w.vector("float")
        self.areas, self._per_thread = areas, per_thread
        # Scores count in units of log(2), unless a mask in natural units is added to them.
        unit = 1.0 if spec.adds else parts.LOG2_E
        self.factor = f"splat (float {f32(spec.scale * unit)})"

    def _area(self, name: str) -> str:
        return self.areas.at(self.w, name, self._per_thread)

    def _clear(self, name: str, bytes_: IndexText) -> None:
        self.w.clear(self._area(name), bytes_)

    def _row(self, strides: tuple[str, ...], row: str) -> str:
        """The offset of a query row in a tensor whose strides are given."""
        w, group = self.w, self.sizes.group
        head = w.add(w.mul(self.head, group), w.rem(row, group))
        config = w.add(w.mul(self.batch, strides[0]), w.mul(head, strides[1]))
        return w.add(config, w.mul(w.div(row, group), strides[2]))

    def _row_at(self, word: int, strides: tuple[str, ...], row: str) -> str:
        config = self.w.mul(self._row(strides, row), BYTES[self.spec.dtype])
        return self.w.offset(self.w.pointer(word), "i8", config)

    def _head_at(self, word: int, strides: tuple[str, ...], position: str) -> str:
        """The address of a position of the key head in the keys or values."""
        w = self.w
        config = w.add(w.mul(self.batch, strides[0]), w.mul(self.head, strides[1]))
        config = w.add(config, w.mul(position, strides[2]))
        return w.offset(w.pointer(word), "i8", w.mul(config, BYTES[self.spec.dtype]))

    def _bytes(self, elements: str) -> str:
        return self.w.mul(elements, BYTES[self.spec.dtype])

    def _copy(self, at: str, row: str, stride: str, shape: tuple[str, int], to: str) -> None:
        """Widen rows of keys or values, to rows of whole vectors."""
        w, dtype = self.w, self.spec.dtype
        count, width = shape
        to_row = -(-width // w.lanes) * w.lanes
        with w.loop("0", count) as loop:
            source = w.offset(at, "i8", w.mul(loop.index, row))
            place = w.offset(to, "float", w.mul(loop.index, to_row))

            def copy(c: str, valid: int) -> None:
                part = w.offset(source, "i8", self._bytes(w.mul(c, stride)))
                value = parts.widen(w, dtype, parts.read(w, dtype, part, stride, valid))
                parts.store(w, value, w.offset(place, "float", c))

            parts.over(w, width, copy)

    def _write_output(self, row: str, at: str, inverse: str) -> None:
        """Scale the float32 output of a query row, narrow it and store it."""
        w, dtype, stride = self.w, self.spec.dtype, self.sizes.out[3]
        to = self._row_at(4, self.sizes.out, row)

        def finish(c: str, valid: int) -> None:
            value = parts.load(w, w.offset(at, "float", c))
            value = w(f"fmul {self.vt} {value}, {inverse}")
            place = w.offset(to, "i8", self._bytes(w.mul(c, stride)))
            parts.write(w, dtype, value, place, stride, valid)

        parts.over(w, self.spec.value_width, finish)

    def _write_lse(self, row: str, top: str, total: str) -> None:
        """Store the logarithm of the sum of exponentials, 0 for a query that sees no key."""
        w = self.w
        log = w.call("float", "llvm.log.f32", ("float", total))
        unit = f32(1.0 if self.spec.adds else math.log(2))
        both = w(f"fadd float {w(f'fmul float {top}, {unit}')}, {log}")
        none = w(f"fcmp oeq float {total}, 0.0")
        value = w(f"select i1 {none}, float 0.0, float {both}")
        at = w.offset(w.pointer(5), "float", self._row(self.sizes.lse, row))
        w.do(f"store float {value}, ptr {at}")
