"""The text of a persistent kernel: blocks that stay walk through lists of items.

An item is a block of one of the kernels of a plan, which are functions here, or several blocks if
there are threads for as many. While it runs, the
record of the next item is on its way from memory: which function that is, the counters that it
waits for, and its words. The function loads what is constant, waits for the counters
(`GpuWriter.wait`), and goes on. When all of its threads are through, one of them raises the counter
of the item; that it does so with `release` after a barrier, and that who waits does with `acquire`
before one, makes all results visible. The last block of all sets the counters to zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torchair.codegen.cuda.jit import Entry
from torchair.codegen.cuda.record import BLOCKS, FIRST_WAIT, KIND, RAISES
from torchair.codegen.target import Kernel

_REGISTER = "llvm.nvvm.read.ptx.sreg"
NO_SOURCE, ARENA, ROOM, GIVEN = range(4)
"""What a word of a record is counted from: nothing, the arena, scratch memory, which begins with
the counters, or the first of the addresses that each call gives."""
END = -1
"""Stands twice behind the items of a block."""
BLOCK_BITS = 32
"""An item is the number of its work and, in so many bits, that of its block."""


@dataclass(frozen=True)
class SuperEntry(Entry):
    """What the launch of a persistent kernel runs. Its parameters are the addresses of where the
    lists begin, of items and of records, how many counters there are, and the sources of words."""

    threads: tuple[int, ...] = ()  # of the blocks of each kernel
    beside: tuple[int, ...] = ()  # blocks of each kernel that an item has, side by side
    asked: tuple[int, ...] = ()  # bytes of shared memory that its launch would be asked for
    sources: int = 0  # behind `NO_SOURCE`
    record: int = 0  # words of a record
    waits: int = 0  # most of an item

    @cached_property
    def name(self) -> str:
        mark = hashlib.blake2b(self._text("super").encode(), digest_size=8).hexdigest()
        return f"super_{len(self.kernels)}_{mark}_{self.block}x{self.resident}"

    def text(self) -> str:
        return self._text(self.name)

    @property
    def declarations(self) -> set[str]:
        names = (f"{_REGISTER}.{register}" for register in ("ctaid.x", "tid.x", "nctaid.x"))
        return {*(f"declare i32 @{n}()" for n in names), "declare void @llvm.nvvm.barrier0()"}

    def annotations(self) -> list[str]:
        limits = {"maxntidx": self.block, "minctasm": self.resident}
        return [f'!{{ptr @{self.name}, !"{key}", i32 {n}}}' for key, n in limits.items()]

    def beside_of(self, kernel: Kernel) -> int:
        """Blocks of a kernel that an item has."""
        return self.beside[[k.entry for k in self.kernels].index(kernel.entry)]

    @property
    def words_at(self) -> int:
        """Where in a record the words of its kernel begin."""
        return FIRST_WAIT + 2 * self.waits

    def _text(self, name: str) -> str:
        given = ["ptr %starts", "ptr %items", "ptr %records", "i64 %counters"]
        given += [f"i64 %s{k}" for k in range(1, self.sources + 1)]
        lines = [*self._begin(), *self._loop(), *self._end()]
        body = "\n".join(line.replace("@ENTRY", f"@{name}") for line in lines)
        places = (
            f"@{name}_asked = external addrspace(3) global [0 x i8], align 16",
            *(
                f"@{name}.{what} = internal addrspace(3) global [{count} x i64] poison, align 16"
                for what, count in (("records", 2 * self.record), ("sources", self.sources + 1))
            ),
        )
        head = f"define ptx_kernel void @{name}({', '.join(given)}) {{"
        return "\n".join([*places, head, body, "}\n"])

    # ---- parts of the text ----

    def _begin(self) -> Iterable[str]:
        """Sources into shared memory, and the record of the first item."""
        yield f"  %tid = call i32 @{_REGISTER}.tid.x()"
        yield f"  %ctaid = call i32 @{_REGISTER}.ctaid.x()"
        yield "  %thread = zext i32 %tid to i64"
        yield "  %first = icmp eq i32 %tid, 0"
        yield f"  %copies = icmp ult i32 %tid, {self.record}"
        yield "  br i1 %first, label %given, label %begin"
        yield "given:"
        for k in range(self.sources + 1):
            yield f"  %source{k} = {_at('@ENTRY.sources', str(k))}"
            yield f"  store i64 {f'%s{k}' if k else 0}, ptr addrspace(3) %source{k}"
        yield "  br label %begin"
        yield "begin:"
        yield "  call void @llvm.nvvm.barrier0()"
        yield "  %block = zext i32 %ctaid to i64"
        yield "  %list = getelementptr i64, ptr %starts, i64 %block"
        yield "  %start = load i64, ptr %list"
        for k in range(2):
            yield f"  %at{k} = add i64 %start, {k}"
            yield from _read_item(f"%item{k}", f"%at{k}")
        yield "  %at2 = add i64 %start, 2"
        yield from self._read("a", "%item0")
        yield from self._put("a", "0")
        yield "  call void @llvm.nvvm.barrier0()"
        yield "  br label %loop"

    def _loop(self) -> Iterable[str]:
        """Items, one after the other."""
        yield "loop:"
        yield "  %item = phi i64 [ %item0, %a.done ], [ %next, %raised ]"
        yield "  %next = phi i64 [ %item1, %a.done ], [ %after, %raised ]"
        yield "  %at = phi i64 [ %at2, %a.done ], [ %at.next, %raised ]"
        yield "  %here = phi i64 [ 0, %a.done ], [ %other, %raised ]"
        yield f"  %item.there = icmp ne i64 %item, {END}"
        yield "  br i1 %item.there, label %work, label %done"
        yield "work:"
        yield from _read_item("%after", "%at")
        yield "  %at.next = add i64 %at, 1"
        yield f"  %other = sub i64 {self.record}, %here"
        yield from self._read("b", "%next")
        yield f"  %record = {_at('@ENTRY.records', '%here')}"
        for what, number in (("kind", KIND), ("blocks", BLOCKS), ("raises", RAISES)):
            yield f"  %{what}.at = {_at('%record', str(number))}"
            yield f"  %{what} = load i64, ptr addrspace(3) %{what}.at"
        yield f"  %words = {_at('%record', str(self.words_at))}"
        yield f"  %number = and i64 %item, {(1 << BLOCK_BITS) - 1}"
        yield "  br label %kind0"
        for k, kernel in enumerate(self.kernels):
            yield from self._kind(k, kernel)
        yield f"kind{len(self.kernels)}:"
        yield from self._put("b", "%other")
        yield "  call void @llvm.nvvm.barrier0()"
        yield "  %awaited = icmp ne i64 %raises, 0"
        yield "  %mine = and i1 %first, %awaited"
        yield "  br i1 %mine, label %raise, label %raised"
        yield "raise:"
        code = '"red.release.gpu.global.add.u32 [$0], 1;", "l,~{memory}"'
        yield f"  call void asm sideeffect {code}(i64 %raises)"
        yield "  br label %raised"
        yield "raised:"
        yield "  br label %loop"

    def _kind(self, k: int, kernel: Kernel) -> Iterable[str]:
        """Run a kernel if the item is one of its: blocks of as few threads as they have, one beside
        the other, each with shared memory and a barrier of its own."""
        after, beside, threads = f"kind{k + 1}", self.beside[k], self.threads[k]
        yield f"kind{k}:"
        yield f"  %k{k}.is = icmp eq i64 %kind, {k}"
        yield f"  %k{k}.has = icmp ult i32 %tid, {beside * threads}"
        yield f"  %k{k}.side = udiv i64 %thread, {threads}"
        yield f"  %k{k}.thread = urem i64 %thread, {threads}"
        yield f"  %k{k}.from = mul i64 %number, {beside}"
        yield f"  %k{k}.number = add i64 %k{k}.from, %k{k}.side"
        yield f"  %k{k}.there = icmp slt i64 %k{k}.number, %blocks"
        yield f"  %k{k}.mine = and i1 %k{k}.is, %k{k}.has"
        yield f"  %k{k}.runs = and i1 %k{k}.mine, %k{k}.there"
        yield f"  br i1 %k{k}.runs, label %run{k}, label %{after}"
        yield f"run{k}:"
        yield f"  %k{k}.far = mul i64 %k{k}.side, {shared_bytes(kernel.room, self.asked[k])}"
        room = f"%k{k}.room"
        yield f"  {room} = getelementptr i8, ptr addrspace(3) @ENTRY_asked, i64 %k{k}.far"
        yield f"  %k{k}.short = trunc i64 %k{k}.side to i32"
        yield f"  %k{k}.barrier = add i32 %k{k}.short, 1"
        given = [f"i64 %k{k}.number", "i64 %blocks", f"ptr addrspace(3) {room}"]
        given += [f"i64 {kernel.room}", "ptr addrspace(3) %record", "ptr addrspace(3) %words"]
        given += [f"i32 {threads}", f"i64 %k{k}.thread", f"i32 %k{k}.barrier"]
        yield f"  call void @{kernel.entry}({', '.join(given)})"
        yield f"  br label %{after}"

    def _end(self) -> Iterable[str]:
        """The last block of all clears the counters, of which the first counts blocks that end."""
        yield "done:"
        yield "  br i1 %first, label %leave, label %left"
        yield "leave:"
        code = '"atom.add.acq_rel.gpu.u32 $0, [$1], 1;", "=r,l,~{memory}"'
        yield f"  %before = call i32 asm sideeffect {code}(i64 %s{ROOM})"
        yield f"  %grid = call i32 @{_REGISTER}.nctaid.x()"
        yield "  %before.all = sub i32 %grid, 1"
        yield "  %last = icmp eq i32 %before, %before.all"
        yield "  br i1 %last, label %clear, label %left"
        yield "clear:"
        yield "  %c = phi i64 [ 0, %leave ], [ %c.next, %clear ]"
        yield f"  %counts = inttoptr i64 %s{ROOM} to ptr addrspace(1)"
        yield "  %count = getelementptr i32, ptr addrspace(1) %counts, i64 %c"
        yield "  store i32 0, ptr addrspace(1) %count"
        yield "  %c.next = add i64 %c, 1"
        yield "  %c.more = icmp slt i64 %c.next, %counters"
        yield "  br i1 %c.more, label %clear, label %left"
        yield "left:"
        yield "  ret void"

    def _read(self, tag: str, item: str) -> Iterable[str]:
        """A word of the record of an item for each thread, on its way: a value and its source."""
        t = f"%{tag}"
        yield f"  {t}.is = icmp ne i64 {item}, {END}"
        yield f"  {t}.mine = and i1 {t}.is, %copies"
        yield f"  {t}.work = lshr i64 {item}, {BLOCK_BITS}"
        yield f"  {t}.first = mul i64 {t}.work, {self.record}"
        yield f"  {t}.number = add i64 {t}.first, %thread"
        yield f"  {t}.place = getelementptr [2 x i64], ptr %records, i64 {t}.number"
        code = '"@$3 ld.global.nc.v2.b64 {$0, $1}, [$2];", "=l,=l,l,b,0,1"'
        given = f"ptr {t}.place, i1 {t}.mine, i64 0, i64 0"
        yield f"  {t}.pair = call {{ i64, i64 }} asm sideeffect {code}({given})"
        yield f"  {t}.value = extractvalue {{ i64, i64 }} {t}.pair, 0"
        yield f"  {t}.source = extractvalue {{ i64, i64 }} {t}.pair, 1"

    def _put(self, tag: str, record: str) -> Iterable[str]:
        """The word into shared memory, counted from its source."""
        t = f"%{tag}"
        yield f"  br i1 {t}.mine, label {t}.put, label {t}.done"
        yield f"{tag}.put:"
        yield f"  {t}.from = {_at('@ENTRY.sources', f'{t}.source')}"
        yield f"  {t}.base = load i64, ptr addrspace(3) {t}.from"
        yield f"  {t}.sum = add i64 {t}.base, {t}.value"
        yield f"  {t}.slot = add i64 {record}, %thread"
        yield f"  {t}.to = {_at('@ENTRY.records', f'{t}.slot')}"
        yield f"  store i64 {t}.sum, ptr addrspace(3) {t}.to"
        yield f"  br label {t}.done"
        yield f"{tag}.done:"


def shared_bytes(room: int, asked: int) -> int:
    """Of shared memory that a block of a kernel has: its own, and what its launch would ask for."""
    return -(-(room + asked) // 16) * 16


def _at(start: str, number: str) -> str:
    return f"getelementptr i64, ptr addrspace(3) {start}, i64 {number}"


def _read_item(name: str, at: str) -> Iterable[str]:
    yield f"  {name}.place = getelementptr i64, ptr %items, i64 {at}"
    code = '"ld.global.nc.b64 $0, [$1];", "=l,l"'
    yield f"  {name} = call i64 asm sideeffect {code}(ptr {name}.place)"
