"""The register tile of attention over many queries, and the sizes of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torchair.codegen.cpu.attention.parts import (
    dot_pairs,
    fma,
    load,
    store,
)
from torchair.codegen.cpu.attention.spec import Areas, Attention, dots_bf16, round_up
from torchair.codegen.text.machine import Machine
from torchair.codegen.text.writer import KernelWriter, Writer
from torchair.codegen.ways import AS_EVER, Way

_KEYS = 64  # of a block; a multiple of all vector widths
_COST = {1: 1.2, 2: 1.05, 3: 1.02, 4: 1.0}
"""Time per vector of queries, by how many of them a block has; the fewer, the less is wasted."""


@dataclass(frozen=True)
class Plan:
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


def plan(spec: Attention, machine: Machine, way: Way = AS_EVER) -> Plan:
    """The blocks for a spec: as many queries as registers allow, unless fewer waste less."""
    vectors = most = 4 if machine.registers >= 32 else 3
    if spec.rows:
        lines = -(-spec.rows // machine.lanes)
        vectors = min(range(most, 0, -1), key=lambda n: round_up(lines, n) * _COST[n])
    vectors, keys = way.number("queries", vectors), way.number("keys", _KEYS)
    pairs = dots_bf16(spec, machine)
    copies = spec.dtype != "f32" and not pairs
    return Plan(vectors, 8 if vectors == 1 else 4, keys, machine.lanes, pairs, copies)


def prefill_areas(spec: Attention, machine: Machine, way: Way = AS_EVER) -> Areas:
    """The work memory of prefill."""
    p, areas = plan(spec, machine, way), Areas()
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


def multiplier(w: KernelWriter, p: Plan) -> str:
    """The name of a function that adds a product to a tile: to += a b.

    Row i of `a` begins `a_row` bytes after the one before, its elements are `a_step` bytes apart;
    `b` has `count` rows of a block of queries. `rows` of `a` exist; the tile is computed whole,
    with repetitions of the last of them. The rows of `to` are blocks of queries.
    """
    h, name = Writer(w.machine), "@ENTRY.multiply"
    vt, last = h.vector("float"), h.sub("%rows", "1")
    ways = [h.mul(h.least(str(i), last), "%a_row") for i in range(p.rows)]
    rows = [h.offset("%a", "i8", way) for way in ways]
    places = [h.offset("%to", "float", str(n * p.lanes)) for n in range(p.rows * p.vectors)]
    first = [load(h, place) for place in places]
    carried = [("i64", "0"), ("ptr", "%b"), *((vt, x) for x in first)]
    with h.loop("0", "%count", carried=carried) as loop:
        way, b, *total = loop.carried
        right = [load(h, h.offset(b, "float", str(v * p.lanes))) for v in range(p.vectors)]
        after = []
        for i, row in enumerate(rows):
            left = _repeated(h, p, h.offset(row, "i8", way))
            mine = total[i * p.vectors : (i + 1) * p.vectors]
            after += [_add_product(h, p, left, x, y) for x, y in zip(right, mine, strict=True)]
        loop.next = [h.add(way, "%a_step"), h.offset(b, "float", str(p.block)), *after]
    for place, x in zip(places, loop.results[2:], strict=True):
        store(h, x, place)
    w.declared.update(h.declared)
    arguments = "ptr %a, i64 %a_row, i64 %a_step, ptr %b, i64 %count, i64 %rows, ptr %to"
    w.helper(name, h.text(f"internal void {name}({arguments})"))
    return name


def _repeated(h: Writer, p: Plan, at: str) -> str:
    """An element, or a pair of them, in every lane."""
    if p.pairs:
        pair = h.splat("i32", h(f"load i32, ptr {at}, align 2"))
        return h(f"bitcast <16 x i32> {pair} to <32 x i16>")
    return h.splat("float", h(f"load float, ptr {at}, align 4"))


def _add_product(h: Writer, p: Plan, left: str, right: str, total: str) -> str:
    if not p.pairs:
        return fma(h, left, right, total)
    return dot_pairs(h, left, h(f"bitcast <16 x float> {right} to <32 x i16>"), total)
