"""Object code as LLVM emits it: the sections, symbols and relocations of a relocatable ELF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_RELOCATABLE, _SYMBOLS, _RELOCATIONS, _NO_BITS = 1, 2, 4, 8
_WRITABLE, _ALLOCATED, _EXECUTABLE = 1, 2, 4  # flags of sections
_UNDEFINED, _LOCAL = 0, 0

MACHINES = {62: "x86_64", 183: "aarch64"}
"""Architectures by their number in a file."""


class BadObject(ValueError):
    """Bytes that are no object code of ours."""


@dataclass(frozen=True)
class Symbol:
    """A name: its section and place there, `section` 0 for what another file defines."""

    name: str
    section: int
    value: int
    local: bool


@dataclass(frozen=True)
class Relocation:
    """A place in a section that an address goes to."""

    offset: int
    kind: int
    symbol: Symbol
    addend: int


@dataclass
class ElfSection:
    """What is in memory when the code runs."""

    index: int
    name: str
    data: bytes
    alignment: int
    executable: bool
    relocations: list[Relocation] = field(default_factory=list)


@dataclass(frozen=True)
class ObjectCode:
    """One file."""

    arch: str
    sections: list[ElfSection]
    symbols: list[Symbol]


def read_object(data: bytes) -> ObjectCode:
    """The code of an object file; BadObject where it is none, or has data that can be written."""
    try:
        return _read(data)
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise BadObject(f"damaged object code: {e}") from e


def _read(data: bytes) -> ObjectCode:
    ident, kind, machine, _, _, _, at, _, _, _, _, size, count, names = _HEADER.unpack_from(data)
    if ident[:6] != b"\x7fELF\x02\x01" or kind != _RELOCATABLE or machine not in MACHINES:
        raise BadObject("no object code of a known processor")
    headers = [_SECTION.unpack_from(data, at + k * size) for k in range(count)]
    texts = _contents(data, headers[names])
    sections = {}
    for k, header in enumerate(headers):
        flags, alignment = header[2], header[8]
        if not flags & _ALLOCATED or not header[5]:
            continue
        name = _name(texts, header[0])
        if name.startswith((".eh_frame", ".note")):
            continue
        if flags & _WRITABLE or header[1] == _NO_BITS:
            raise BadObject(f"{name} is data that code could write to")
        content = _contents(data, header)
        sections[k] = ElfSection(k, name, content, max(alignment, 1), bool(flags & _EXECUTABLE))
    table = next((h for h in headers if h[1] == _SYMBOLS), None)
    symbols = [] if table is None else _symbols(data, table, headers)
    for header in headers:
        if header[1] == _RELOCATIONS and header[7] in sections:
            sections[header[7]].relocations += _relocations(_contents(data, header), symbols)
    return ObjectCode(MACHINES[machine], list(sections.values()), symbols)


def _contents(data: bytes, header: tuple[int, ...]) -> bytes:
    found = data[header[4] : header[4] + header[5]]
    if len(found) != header[5]:
        raise BadObject("a section goes beyond the file")
    return found


def _name(texts: bytes, at: int) -> str:
    return texts[at : texts.index(b"\0", at)].decode()


def _symbols(data: bytes, table: tuple[int, ...], headers: list[tuple[int, ...]]) -> list[Symbol]:
    texts = _contents(data, headers[table[6]])
    found = []
    for name, info, _, section, value, _ in _SYMBOL.iter_unpack(_contents(data, table)):
        found.append(Symbol(_name(texts, name), section, value, info >> 4 == _LOCAL))
    return found


def _relocations(content: bytes, symbols: list[Symbol]) -> list[Relocation]:
    return [
        Relocation(offset, info & 0xFFFFFFFF, symbols[info >> 32], addend)
        for offset, info, addend in _RELOCATION.iter_unpack(content)
    ]
