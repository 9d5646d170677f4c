"""What only GPUs of compute capability 9.0 have, as text: a copy engine that brings pieces of
tensors into shared memory by itself, barriers there that count its bytes, tensor cores that read
from there, and warpgroups that hand each other registers.

Tiles lie in shared memory as the copy engine writes them with swizzled rows of 128 bytes: 64 short
floats that are neighbours in memory, row after row, eight rows making 1024 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torchair.codegen.cuda.writer import GpuWriter
from torchair.codegen.sizes import Element
from torchair.codegen.text.writer import IndexText

WARPGROUP = 128
"""Threads that multiply together."""
LINE = 64
"""Short floats of a swizzled row."""
STEP = 16
"""Products that an instruction of the tensor cores sums up."""
ALIGNED = 1024
"""Bytes that tiles in shared memory begin at multiples of."""
_MEMORY = "~{memory}"
_KINDS: dict[Element, str] = {"bf16": "bf16", "f16": "f16"}
DTYPES = tuple(_KINDS)
"""Types that the tensor cores multiply here."""


# ---- numbers of 32 bits ----


def number(w: GpuWriter, name: str, a: IndexText, b: IndexText) -> str:
    """An operation on two i32."""
    return w(f"{name} i32 {a}, {b}")


# ---- barriers in shared memory: places are i32 ----


def make_barriers(w: GpuWriter, barriers: Sequence[tuple[str, int]]) -> None:
    """Make (place, arrivals of a phase) by one thread; a barrier of the block follows."""
    for place, arrivals in barriers:
        text = f"mbarrier.init.shared::cta.b64 [$0], {arrivals};"
        w.assembly(text, "void", f"r,{_MEMORY}", ("i32", place))
    w.assembly("fence.mbarrier_init.release.cluster;", "void", _MEMORY)
    w.assembly("fence.proxy.async;", "void", _MEMORY)


def await_phase(w: GpuWriter, place: str, parity: str, cluster: bool = False) -> None:
    """Wait until a barrier has ended a phase: that of this parity, an i32. What all who arrived
    wrote before is there then, of blocks of a `cluster` too."""
    who = ".acquire.cluster" if cluster else ""
    again = f"mbarrier.try_wait.parity{who}.shared::cta.b64 %p, [$0], $1;"
    loop = f"W${{:uid}}: {again} @%p bra D${{:uid}}; bra W${{:uid}}; D${{:uid}}:"
    text = f"{{ .reg .pred %p; {loop} }}"
    w.assembly(text, "void", f"r,r,{_MEMORY}", ("i32", place), ("i32", parity))


def expect(w: GpuWriter, place: str, bytes_: IndexText) -> None:
    """Arrive at a barrier whose phase ends when so many bytes have come, too."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    w.assembly(text, "void", f"r,r,{_MEMORY}", ("i32", place), ("i32", str(bytes_)))


def arrive(w: GpuWriter, place: str) -> None:
    """Arrive at a barrier."""
    w.assembly("mbarrier.arrive.shared::cta.b64 _, [$0];", "void", f"r,{_MEMORY}", ("i32", place))


def engine_fence(w: GpuWriter) -> None:
    """What this thread did with shared memory comes before what the copy engine does there, for
    which someone waits until this thread has arrived."""
    w.assembly("fence.proxy.async.shared::cta;", "void", _MEMORY)


# ---- clusters ----


def cluster_barrier(w: GpuWriter) -> None:
    """Wait for all threads of the cluster."""
    text = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    w.assembly(text, "void", _MEMORY)


def remote(w: GpuWriter, place: str, block: IndexText) -> str:
    """A place in the shared memory of another block of the cluster."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return w.assembly(text, "i32", "=r,r,r", ("i32", place), ("i32", str(block)))


def arrive_there(w: GpuWriter, place: str) -> None:
    """Arrive at a barrier of another block, which then sees what this warp wrote there."""
    text = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];"
    w.assembly(text, "void", f"r,{_MEMORY}", ("i32", place))


def send(w: GpuWriter, place: str, values: Sequence[str]) -> None:
    """Store four floats in the shared memory of another block."""
    text = "st.shared::cluster.v4.f32 [$0], {$1, $2, $3, $4};"
    given = [("i32", place), *(("float", x) for x in values)]
    w.assembly(text, "void", f"r,f,f,f,f,{_MEMORY}", *given)


def received(w: GpuWriter, place: str) -> list[str]:
    """Four floats in the shared memory of this block."""
    text = "ld.shared::cta.v4.f32 {$0, $1, $2, $3}, [$4];"
    kind = "{float, float, float, float}"
    got = w.assembly(text, kind, f"=f,=f,=f,=f,r,{_MEMORY}", ("i32", place))
    return [w(f"extractvalue {kind} {got}, {k}") for k in range(4)]


# ---- the copy engine ----


def load_tile(
    w: GpuWriter, target: str, tensor: str, position: Sequence[str], barrier: str
) -> None:
    """Let a piece of a tensor come to a place in shared memory; a barrier counts its bytes. The
    position is that of its first element, along the contiguous dim first; elements outside of the
    tensor are zeros."""
    count = len(position)
    at = ", ".join(f"${2 + k}" for k in range(count))
    what = f"cp.async.bulk.tensor.{count}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    text = f"{what} [$0], [$1, {{{at}}}], [${2 + count}];"
    given = [("i32", target), ("i64", tensor), *(("i32", p) for p in position), ("i32", barrier)]
    w.assembly(text, "void", f"r,l,{'r,' * count}r,{_MEMORY}", *given)


# ---- warpgroups ----


def registers(w: GpuWriter, count: int, more: bool) -> None:
    """Let the threads of this warpgroup have so many registers each from now on."""
    how = "inc" if more else "dec"
    w.assembly(f"setmaxnreg.{how}.sync.aligned.u32 {count};", "void", _MEMORY)


def descriptor(w: GpuWriter, place: str, apart: int = 16) -> str:
    """A tile in shared memory as the tensor cores are told of it, an i64. Of a tile whose rows run
    along the sum each step of the sum is 32 bytes further (`ALONG`). Of one whose rows run across
    it, tiles of 64 columns lie so many bytes `apart`, and a step is 2048 bytes further
    (`ACROSS`)."""
    short = number(w, "lshr", number(w, "and", place, (1 << 18) - 1), 4)
    wide = w(f"zext i32 {short} to i64")
    return w(f"or i64 {wide}, {1 << 62 | (ALIGNED >> 4) << 32 | (apart >> 4) << 16}")


ALONG, ACROSS = 32 >> 4, 2048 >> 4
"""What a descriptor grows by from one step of a sum to the next."""


def multiply(
    w: GpuWriter,
    dtype: Element,
    columns: int,
    sums: Sequence[Sequence[str]],
    a: Sequence[Sequence[str]],
    b: Sequence[str],
    turned: tuple[bool, bool] = (False, False),
    fresh: str | None = None,
    pending: int = 0,
) -> list[list[str]]:
    """Sums of a warpgroup and the products of tiles of 64 rows of A with one of B: `columns` / 2
    floats a thread for each of these. `a` has for each tile, `b` for the one of B the descriptors
    of each step. `turned` are tiles whose rows run across the sum. Where `fresh`, an i32, is 0,
    there are no sums yet. So many calls may still be `pending` when this is done: nothing but
    another call may touch their results before `end`."""
    each = columns // 2
    count, steps = each * len(sums), len(b)
    operands = [*(x for tile in a for x in tile), *b]
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{_KINDS[dtype]}.{_KINDS[dtype]}"
    layout = f"1, 1, {int(turned[0])}, {int(turned[1])}"
    lines = ["wgmma.fence.sync.aligned;"]
    if fresh is not None:
        where = count + len(operands)
        lines = ["{ .reg .pred %p;", f"setp.ne.b32 %p, ${where}, 0;", *lines]
    for step in range(steps):
        for tile in range(len(sums)):
            own = ", ".join(f"${tile * each + i}" for i in range(each))
            first, second = (count + k * steps + step for k in (tile, len(sums)))
            adds = "%p" if fresh is not None and step == 0 else "1"
            lines.append(f"{name} {{{own}}}, ${first}, ${second}, {adds}, {layout};")
    lines += ["wgmma.commit_group.sync.aligned;", f"wgmma.wait_group.sync.aligned {pending};"]
    given = [("i64", x) for x in operands]
    constraints = ["=f"] * count + ["l"] * len(operands)
    if fresh is not None:
        lines.append("}")
        given.append(("i32", fresh))
        constraints.append("r")
    values = _floats(w, " ".join(lines), count, constraints, given, [*chain(*sums)])
    return [values[i * each : (i + 1) * each] for i in range(len(sums))]


def begin(
    w: GpuWriter,
    dtype: Element,
    columns: int,
    a: Sequence[str | Sequence[str]],
    b: Sequence[str],
    sums: Sequence[str] | None = None,
    turned: bool = False,
) -> list[str]:
    """Products of a tile of 64 rows of A with one of B that are only begun, and added to `sums` if
    there are some: what it gives must not be touched before it went through `end`. `a` has for each
    step a descriptor, or the four registers of a thread; `turned` is a B whose rows run across the
    sum."""
    count = columns // 2
    given: list[tuple[str, str]] = []
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{STEP}.f32.{_KINDS[dtype]}.{_KINDS[dtype]}"
    own = ", ".join(f"${i}" for i in range(count))
    lines = ["wgmma.fence.sync.aligned;"]
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        first = f"${count + len(given)}"
        if isinstance(left, str):
            given.append(("i64", left))
            layout = f"1, 1, 0, {int(turned)}"
        else:
            first = f"{{{', '.join(f'${count + len(given) + k}' for k in range(len(left)))}}}"
            given += [("i32", x) for x in left]
            layout = f"1, 1, {int(turned)}"
        given.append(("i64", right))
        adds = int(step > 0 or sums is not None)
        lines.append(f"{name} {{{own}}}, {first}, ${count + len(given) - 1}, {adds}, {layout};")
    lines.append("wgmma.commit_group.sync.aligned;")
    constraints = ["=f"] * count + ["l" if kind == "i64" else "r" for kind, _ in given]
    return _floats(w, " ".join(lines), count, constraints, given, sums or ())


def end(w: GpuWriter, values: Sequence[str], left: int) -> list[str]:
    """What `begin` or `multiply` gave, when at most so many products begun later are still under
    way."""
    text, count = f"wgmma.wait_group.sync.aligned {left};", len(values)
    return _floats(w, text, count, ["=f"] * count, [], values)


def _floats(
    w: GpuWriter,
    text: str,
    count: int,
    constraints: Sequence[str],
    given: Sequence[tuple[str, str]],
    before: Sequence[str],
) -> list[str]:
    """So many floats that some code leaves, its first operands; in the registers where those of
    `before` were, if there are any."""
    kind = f"{{{', '.join(['float'] * count)}}}"
    tied = ",".join([*constraints, *map(str, range(len(before))), _MEMORY])
    got = w.assembly(text, kind, tied, *given, *(("float", x) for x in before))
    return [w(f"extractvalue {kind} {got}, {i}") for i in range(count)]


# ---- results ----


def pair(w: GpuWriter, dtype: Element, low: str, high: str) -> str:
    """Two floats as short ones in one register."""
    text = f"cvt.rn.{_KINDS[dtype]}x2.f32 $0, $1, $2;"
    return w.assembly(text, "i32", "=r,f,f", ("float", high), ("float", low))


def exchanged(w: GpuWriter, words: Sequence[str], lane: str) -> list[str]:
    """Word k of lane j of every four lanes becomes word j of lane k; `lane` is the number of this
    one among its four, an i32."""
    found = list(words)
    for bit in (0, 1):
        odd = w(f"icmp ne i32 {number(w, 'and', lane, 1 << bit)}, 0")
        for k in range(4):
            if k >> bit & 1:
                continue
            other = k | 1 << bit
            sent = w(f"select i1 {odd}, i32 {found[k]}, i32 {found[other]}")
            got = w.shuffled(sent, "i32", 1 << bit)
            found[k], found[other] = (
                w(f"select i1 {odd}, i32 {got}, i32 {found[k]}"),
                w(f"select i1 {odd}, i32 {found[other]}, i32 {got}"),
            )
    return found
