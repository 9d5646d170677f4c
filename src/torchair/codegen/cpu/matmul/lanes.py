"""Moving and masking lanes of vectors: sums over lanes of many vectors at once, transpositions of
square blocks, and loads that stop at the end of a row."""

from __future__ import annotations

from torchair.codegen.text.values import prefix_mask
from torchair.codegen.text.writer import REASSOCIATE, Writer


def halves(w: Writer, kind: str, lanes: int, pair: tuple[str, str], level: int) -> tuple[str, str]:
    """The lanes of two vectors of elements `kind`, sorted into two vectors.

    Level 0 and 1 work within four lanes, which is 128 bits of float32, and sort pairs 0 1 2 3
    and 4 5 6 7 into 0 4 1 5 and 2 6 3 7, or into 0 1 4 5 and 2 3 6 7; the further levels take
    the even and the odd ones of such fours. Each is one instruction where 512 bits are a vector.
    """
    made = []
    for i in (0, 2):
        if level == 0:
            four = (i, lanes + i, i + 1, lanes + i + 1)
        else:
            four = (i, i + 1, lanes + i, lanes + i + 1)
        picks = [block + x for block in range(0, lanes, 4) for x in four]
        if level > 1:
            picks = [block + x for block in range(2 * i, 2 * lanes, 8) for x in range(4)]
        made.append(_shuffle(w, kind, lanes, pair, picks))
    return made[0], made[1]


def _shuffle(w: Writer, kind: str, lanes: int, pair: tuple[str, str], picks: list[int]) -> str:
    mask = ", ".join(f"i32 {pick}" for pick in picks)
    given = ", ".join(f"<{lanes} x {kind}> {x}" for x in pair)
    return w(f"shufflevector {given}, <{len(picks)} x i32> <{mask}>")


def _pairs(vectors: list[str]) -> list[tuple[str, str]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def fold(w: Writer, kind: str, lanes: int, vectors: list[str], level: int = 0) -> str:
    """Add halves of vectors, two by two, until one is left. When as many vectors as lanes have
    been folded, lane i holds the sum of vector i; one may fold groups of them first and the
    results, from the `level` reached on, later."""
    while len(vectors) > 1:
        sorted_pairs = [halves(w, kind, lanes, pair, level) for pair in _pairs(vectors)]
        vectors = [
            w(f"fadd {REASSOCIATE} <{lanes} x {kind}> {low}, {high}") for low, high in sorted_pairs
        ]
        level += 1
    return vectors[0]


def transpose(w: Writer, kind: str, rows: list[str]) -> list[str]:
    """The columns of a square block, given as one vector for each row."""
    columns = _columns(w, kind, len(rows), rows, 0)
    return [columns[i] for i in range(len(rows))]


def _columns(w: Writer, kind: str, lanes: int, rows: list[str], level: int) -> dict[int, str]:
    if len(rows) == 1:
        return {0: rows[0]}
    distance = (2, 1, 4, 8)[level]
    found: dict[int, str] = {}
    both = [halves(w, kind, lanes, pair, level) for pair in _pairs(rows)]
    for start, half in enumerate(zip(*both, strict=True)):
        below = _columns(w, kind, lanes, list(half), level + 1)
        found |= {start * distance + i: vector for i, vector in below.items()}
    return found


def lanes_below(w: Writer, count: str, lanes: int) -> str:
    """A mask of the lanes whose number is less than `count`."""
    if not count.startswith("%"):
        return prefix_mask(lanes, int(count))
    numbered = ", ".join(f"i32 {i}" for i in range(lanes))
    limit = w.splat("i32", w(f"trunc i64 {count} to i32"), lanes)
    return w(f"icmp ult <{lanes} x i32> <{numbered}>, {limit}")


def masked_load(w: Writer, kind: str, lanes: int, at: str, mask: str, align: int) -> str:
    """The elements under a mask; the other lanes are zero and their memory is not touched."""
    vector, masks = f"<{lanes} x {kind}>", f"<{lanes} x i1>"
    short = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}.get(kind, kind)
    name = f"llvm.masked.load.v{lanes}{short}.p0"
    w.declared[name] = f"declare {vector} @{name}(ptr, {masks}, {vector})"
    given = f"ptr align {align} {at}, {masks} {mask}, {vector} zeroinitializer"
    return w(f"call {vector} @{name}({given})")
