"""Vectors of an attention kernel: read, widen, exponentiate, write and transpose them."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchair.codegen.cpu.matmul.tile import fold, shuffle, transpose
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.text import memory, writer
from torchair.codegen.text.maths_vector import wide
from torchair.codegen.text.writer import KernelWriter, Writer, f32, lane_numbers

LOWEST = f"splat (float {f32(-math.inf)})"
LOG2_E = 1 / math.log(2)

# Minimax for 2**x on [0, 1) with 2**0 = 1 exactly; relative error 1.5e-7 in float32.
_POWER = (0.00186713019, 0.00901703006, 0.0557999133, 0.24016445, 0.693151312, 1.0)


def either(
    w: Writer, condition: str, kind: str, yes: Callable[[], str], no: Callable[[], str]
) -> str:
    """The value of `yes` if the condition holds, else of `no`; only that one is computed."""
    n = w.name("E")
    w.do(f"br i1 {condition}, label %{n}.yes, label %{n}.no")
    configs = []
    for label, config in (("yes", yes), ("no", no)):
        w.label(f"{n}.{label}")
        configs.append(f"[ {config()}, %{w.block} ]")
        w.do(f"br label %{n}.done")
    w.label(f"{n}.done")
    return w(f"phi {kind} {', '.join(configs)}")


def any_lane(w: Writer, flags: str) -> str:
    """Whether a lane of a vector of i1 is true."""
    bits = w(f"bitcast {w.vector('i1')} {flags} to i{w.lanes}")
    return w(f"icmp ne i{w.lanes} {bits}, 0")


def before(w: Writer, count: str) -> str:
    """Which lanes have a number below `count`."""
    return w(f"icmp slt {w.vector('i64')} {lane_numbers(w.lanes, 64)}, {w.splat('i64', count)}")


def load(w: Writer, at: str, kind: str = "float") -> str:
    """A vector of work memory, where all vectors are aligned."""
    return w(f"load {w.vector(kind)}, ptr {at}, align {w.machine.bits // 8}")


def store(w: Writer, value: str, at: str) -> None:
    """Store a vector of float32 in work memory."""
    w.do(f"store {w.vector('float')} {value}, ptr {at}, align {w.machine.bits // 8}")


def where(w: Writer, flags: str, yes: str, no: str) -> str:
    """Of two vectors of float32 the first where a flag is set, the second elsewhere."""
    vt = w.vector("float")
    return w(f"select {w.vector('i1')} {flags}, {vt} {yes}, {vt} {no}")


def larger(w: Writer, a: str, b: str) -> str:
    """The larger of two vectors, lane by lane; b where a is not a number."""
    return where(w, w(f"fcmp ogt {w.vector('float')} {a}, {b}"), a, b)


def weight(w: Writer, score: str, top: str, natural: bool) -> str:
    """2 to a score less the largest one, which may be in natural units: exactly 0 from -127 down,
    and not a number where that is not."""
    x = wide(w, "float", score) - wide(w, "float", top)
    x = x * LOG2_E if natural else x
    x = (x < -127.0).select(x.like(-127.0), x)
    whole = x.intrinsic("floor")
    part, power = x - whole, x.like(_POWER[0])
    for factor in _POWER[1:]:
        power.name = w.fused(power.name, part.name, x.like(factor).name)
    shift = whole.to("i32") << 23
    return (power.bits() + shift).bits().name


def finite(w: Writer, top: str) -> str:
    """A vector with 0 in place of minus infinity, to subtract from scores that are all so low."""
    none = w(f"fcmp oeq {w.vector('float')} {top}, {LOWEST}")
    return where(w, none, "zeroinitializer", top)


def over(w: Writer, width: int, body: Callable[[str, int], None]) -> None:
    """Write `body(first, valid)` for the vectors of a row, as a loop if they are many."""
    whole = width // w.lanes * w.lanes
    if whole > 2 * w.lanes:
        with w.loop("0", whole, w.lanes) as loop:
            body(loop.index, w.lanes)
    else:
        for first in range(0, whole, w.lanes):
            body(str(first), w.lanes)
    if whole < width:
        body(str(whole), width - whole)


# ---- elements in memory ----


def widen(w: Writer, dtype: Element, value: str) -> str:
    """A vector of elements as float32; of truth values, 0 and minus infinity."""
    value = memory.arrived(w, value, dtype, w.lanes)
    return where(w, value, "zeroinitializer", LOWEST) if dtype == "bool" else value


def read(
    w: Writer, dtype: Element, base: str, stride: str, valid: int, lanes: int | None = None
) -> str:
    """The first `valid` elements from an address on, as stored; zeros behind them."""
    n, kind = lanes or w.lanes, memory.memory_element(dtype)
    vt = f"<{n} x {kind}>"
    if stride == "1" and valid >= n:
        return w(f"load {vt}, ptr {base}, align {BYTES[dtype]}")
    if stride == "1":
        return memory.masked_load(w, kind, base, writer.prefix_mask(n, valid), n, BYTES[dtype])
    value = "zeroinitializer"
    for j in range(min(valid, n)):
        at = w.offset(base, kind, w.mul(stride, j))
        one = w(f"load {kind}, ptr {at}, align {BYTES[dtype]}")
        value = w(f"insertelement {vt} {value}, {kind} {one}, i64 {j}")
    return value


def read_up_to(w: Writer, dtype: Element, base: str, stride: str, count: str) -> str:
    """Up to a vector of a mask, widened; minus infinity from the run-time `count` on."""
    kind, raw = memory.memory_element(dtype), w.vector(memory.memory_element(dtype))
    inside = before(w, count)

    def masked() -> str:
        return memory.masked_load(w, kind, base, inside, w.lanes, BYTES[dtype])

    if stride == "1" and w.machine.bits == 512:
        value = masked()
    elif stride == "1":  # here a masked load may become many instructions
        whole = w(f"icmp sge i64 {count}, {w.lanes}")
        load = f"load {raw}, ptr {base}, align {BYTES[dtype]}"
        value = either(w, whole, raw, lambda: w(load), masked)
    else:
        value, last = "poison", w.sub(count, "1")
        for j in range(w.lanes):
            at = w.offset(base, kind, w.mul(stride, w.least(str(j), last)))
            one = w(f"load {kind}, ptr {at}, align {BYTES[dtype]}")
            value = w(f"insertelement {raw} {value}, {kind} {one}, i64 {j}")
    return where(w, inside, widen(w, dtype, value), LOWEST)


def write(w: Writer, dtype: Element, value: str, base: str, stride: str, valid: int) -> None:
    """Store the first `valid` lanes of a vector of float32 as elements."""
    if stride == "1":
        mask = None if valid >= w.lanes else writer.prefix_mask(w.lanes, valid)
        memory.store_vector(w, dtype, value, base, w.lanes, mask)
        return
    kind, value = memory.memory_element(dtype), memory.leaving(w, value, dtype, w.lanes)
    for j in range(min(valid, w.lanes)):
        one = w(f"extractelement {w.vector(kind)} {value}, i64 {j}")
        at = w.offset(base, kind, w.mul(stride, j))
        w.do(f"store {kind} {one}, ptr {at}, align {BYTES[dtype]}")


# ---- lanes ----


def transposer(w: KernelWriter) -> None:
    """Adds the function `transpose` of float32; rows and columns are multiples of four.

    Its arguments are an address and the elements from row to row, of the source, then of the
    result, and the numbers of rows and columns of the source. Squares of four are soon compiled,
    and narrow shuffles are as fast as wide ones are for their size.
    """
    places, vt = "ptr %from, i64 %from_row, ptr noalias %to, i64 %to_row", "<4 x float>"
    with (
        w.function("transpose", f"{places}, i64 %rows, i64 %columns") as h,
        h.loop("0", "%rows", 4) as down,
        h.loop("0", "%columns", 4) as right,
    ):
        base = h.offset("%from", "float", h.add(h.mul("%from_row", down.index), right.index))
        to = h.offset("%to", "float", h.add(h.mul("%to_row", right.index), down.index))
        rows = []
        for i in range(4):
            at = h.offset(base, "float", h.mul("%from_row", i))
            rows.append(h(f"load {vt}, ptr {at}, align 4"))
        for c, column in enumerate(transpose(h, "float", rows)):
            at = h.offset(to, "float", h.mul("%to_row", c))
            h.do(f"store {vt} {column}, ptr {at}, align 4")


def four_sums(w: Writer, vectors: list[str]) -> str:
    """The sums of the lanes of four vectors, as a vector of four."""
    n, total = w.lanes, fold(w, "float", w.lanes, vectors)
    while n > 4:
        parts = (list(range(first, first + n // 2)) for first in (0, n // 2))
        halves = [shuffle(w, "float", n, (total, "poison"), picks) for picks in parts]
        n //= 2
        total = w(f"fadd {writer.REASSOCIATE} <{n} x float> {halves[0]}, {halves[1]}")
    return total


def largest(w: Writer, x: str) -> str:
    """The largest lane of a vector, in every lane."""
    shift = w.lanes // 2
    while shift:
        turned = shuffle(w, "float", w.lanes, (x, "poison"), [j ^ shift for j in range(w.lanes)])
        x = larger(w, turned, x)
        shift //= 2
    return x


def dot_pairs(w: Writer, a: str, b: str, total: str) -> str:
    """total + the products of the pairs of bf16 in each lane of two vectors of raw elements."""
    a, b = (w(f"bitcast <32 x i16> {x} to <32 x bfloat>") for x in (a, b))
    return w.dot_pairs(a, b, total)
