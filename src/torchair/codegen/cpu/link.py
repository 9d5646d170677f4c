"""Object code of several kernels linked into one image, which runs wherever it is put in memory.

Code and constants keep their distances, so all that refers to them is resolved here. What the
image needs from outside (the thread pool, functions of C) goes through a table of addresses, the
global offset table, that the loader fills: it is all that a loader has to do. No linker, compiler
or LLVM is needed then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torchair.codegen.cpu.elf import (
    BadObject,
    ElfSection,
    ObjectCode,
    Relocation,
    Symbol,
    read_object,
)

PAGE = 1 << 16
"""Memory of code and of the table is protected apart: the largest page of any processor."""
_WORD = 8  # bytes of an address
_LINE = 64


@dataclass(frozen=True)
class Image:
    """Linked code. `table` is where the table of addresses begins, after code and constants;
    `imports` are the names whose addresses it holds, in order."""

    arch: str
    code: bytes
    entries: Mapping[str, int]  # where functions are in the code
    imports: tuple[str, ...]

    @property
    def table(self) -> int:
        """Where the table of addresses begins."""
        return -(-len(self.code) // PAGE) * PAGE


def link(objects: Iterable[bytes]) -> Image:
    """One image of object files. BadObject where they need what no loader gives."""
    read = [read_object(data) for data in objects]
    arches = {o.arch for o in read}
    if len(arches) != 1:
        raise BadObject(f"code for several processors: {', '.join(sorted(arches)) or 'none'}")
    arch = arches.pop()
    return _Linking(arch, *_ARCHES[arch]).run(read)


Relocate = Callable[[bytearray, int, int, int], None]
"""Writes an address: of memory, the place there, where that place is, and the address. All places
count from the begin of the image."""


@dataclass
class _Linking:
    arch: str
    patches: Mapping[int, Relocate]
    through_table: frozenset[int]  # kinds of relocations that ask for the address of the address
    calls: frozenset[int]  # kinds that may go to a stub
    stub: Callable[[int, int], bytes]
    code: bytearray = field(default_factory=bytearray)
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # (object, section): where
    globals: dict[str, int] = field(default_factory=dict)
    imports: dict[str, int] = field(default_factory=dict)  # number in the table
    stubs: dict[str, int] = field(default_factory=dict)

    def run(self, objects: list[ObjectCode]) -> Image:
        for executable in (True, False):
            for k, found in enumerate(objects):
                for section in found.sections:
                    if section.executable is executable:
                        self.places[k, section.index] = self._put(section.data, section.alignment)
        for k, found in enumerate(objects):
            for symbol in found.symbols:
                if not symbol.local and (k, symbol.section) in self.places:
                    place = self.places[k, symbol.section] + symbol.value
                    self.globals.setdefault(symbol.name, place)
        parts = [(k, section) for k, o in enumerate(objects) for section in o.sections]
        asked = [(k, section, r) for k, section in parts for r in section.relocations]
        for k, _, relocation in asked:
            self._reserve(k, relocation)
        table = -(-len(self.code) // PAGE) * PAGE
        for name, at in self.stubs.items():
            code = self.stub(at, table + _WORD * self.imports[name])
            self.code[at : at + len(code)] = code
        for k, section, relocation in asked:
            self._apply(k, section, relocation, table)
        return Image(self.arch, bytes(self.code), dict(self.globals), tuple(self.imports))

    def _put(self, data: bytes, alignment: int) -> int:
        at = -(-len(self.code) // max(alignment, _LINE)) * max(alignment, _LINE)
        self.code += bytes(at - len(self.code)) + data
        return at

    def _place(self, k: int, symbol: Symbol) -> int | None:
        """Where a symbol is in the image, None if it is outside."""
        if (k, symbol.section) in self.places:
            return self.places[k, symbol.section] + symbol.value
        return self.globals.get(symbol.name)

    def _reserve(self, k: int, relocation: Relocation) -> None:
        """Words of the table, and stubs, for what is outside."""
        symbol, outside = relocation.symbol, self._place(k, relocation.symbol) is None
        if relocation.kind not in self.patches:
            raise BadObject(f"a relocation of kind {relocation.kind} of {self.arch} is not known")
        if relocation.kind in self.through_table and not outside:
            raise BadObject(f"{symbol.name} is inside, but asked for through the table")
        if not outside:
            return
        if not symbol.name or relocation.kind not in self.through_table | self.calls:
            raise BadObject(f"the address of {symbol.name!r} is asked for directly")
        self.imports.setdefault(symbol.name, len(self.imports))
        if relocation.kind in self.calls and symbol.name not in self.stubs:
            self.stubs[symbol.name] = self._put(bytes(len(self.stub(0, 0))), _LINE)

    def _apply(self, k: int, section: ElfSection, relocation: Relocation, table: int) -> None:
        symbol = relocation.symbol
        if relocation.kind in self.through_table:
            to = table + _WORD * self.imports[symbol.name]
        else:
            place = self._place(k, symbol)
            to = self.stubs[symbol.name] if place is None else place
        at = self.places[k, section.index] + relocation.offset
        self.patches[relocation.kind](self.code, at, at, to + relocation.addend)


# ---- x86-64 ----


def _relative(bytes_: int) -> Relocate:
    """A distance in so many bytes."""

    def patch(code: bytearray, at: int, here: int, to: int) -> None:
        code[at : at + bytes_] = (to - here).to_bytes(bytes_, "little", signed=True)

    return patch


def _x86_stub(at: int, slot: int) -> bytes:
    """`jmp [rip + distance of the slot]`."""
    return b"\xff\x25" + struct.pack("<i", slot - at - 6)


# ---- aarch64: fields of 32-bit instructions ----


def _field(low: int, width: int, value: Callable[[int, int], int]) -> Relocate:
    """Bits of an instruction that hold a number of place and target."""

    def patch(code: bytearray, at: int, here: int, to: int) -> None:
        number = value(here, to)
        if not -(1 << width - 1) <= number < 1 << width:
            raise BadObject(f"{number} does not fit an instruction")
        mask = (1 << width) - 1 << low
        (word,) = struct.unpack_from("<I", code, at)
        struct.pack_into("<I", code, at, word & ~mask | (number << low) & mask)

    return patch


def _page_distance(here: int, to: int) -> int:
    return (to >> 12) - (here >> 12)


def _adrp(code: bytearray, at: int, here: int, to: int) -> None:
    """The distance of 4 KiB pages, in two fields."""
    pages = _page_distance(here, to) & 0x1FFFFF
    (word,) = struct.unpack_from("<I", code, at)
    word = word & ~0x60FFFFE0 | (pages & 3) << 29 | (pages >> 2) << 5
    struct.pack_into("<I", code, at, word)


def _low(scale: int) -> Relocate:
    """The place inside of a page, in units of an access."""
    return _field(10, 12, lambda here, to: (to & 0xFFF) >> scale)


def _branch(low: int, width: int) -> Relocate:
    return _field(low, width, lambda here, to: to - here >> 2)


def _aarch64_stub(at: int, slot: int) -> bytes:
    """`adrp x16, page; ldr x17, [x16, place]; br x17`."""
    code = bytearray(struct.pack("<III", 0x90000010, 0xF9400211, 0xD61F0220))
    _adrp(code, 0, at, slot)
    _low(3)(code, 4, at + 4, slot)
    return bytes(code)


_ARCHES = {
    "x86_64": (
        {
            2: _relative(4),
            4: _relative(4),
            9: _relative(4),
            24: _relative(8),
            41: _relative(4),
            42: _relative(4),
        },
        frozenset({9, 41, 42}),
        frozenset({4}),
        _x86_stub,
    ),
    "aarch64": (
        {
            260: _relative(8),
            261: _relative(4),
            273: _branch(5, 19),
            275: _adrp,
            277: _low(0),
            278: _low(0),
            279: _branch(5, 14),
            280: _branch(5, 19),
            282: _branch(0, 26),
            283: _branch(0, 26),
            284: _low(1),
            285: _low(2),
            286: _low(3),
            299: _low(4),
            311: _adrp,
            312: _low(3),
        },
        frozenset({311, 312}),
        frozenset({282, 283}),
        _aarch64_stub,
    ),
}
"""By architecture: relocations that are known, those through the table, those of calls, stubs."""
