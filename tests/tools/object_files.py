"""Object files of other systems: which symbols one needs that are defined elsewhere."""

from __future__ import annotations

import struct

from torchair.codegen.cpu.elf import read_object

_MACH_O = {0x0100000C: "aarch64", 0x01000007: "x86_64"}
_COFF = {0x8664: "x86_64", 0xAA64: "aarch64"}
_SYMBOL_TABLE = 2  # a load command of Mach-O
_EXTERNAL = 2  # a storage class of COFF


def needed(data: bytes) -> tuple[str, str, set[str]]:
    """Format, architecture and undefined symbols of an object file."""
    if data[:4] == b"\x7fELF":
        code = read_object(data)
        return "ELF", code.arch, {s.name for s in code.symbols if s.name and not s.section}
    if data[:4] == struct.pack("<I", 0xFEEDFACF):
        return _mach_o(data)
    return _coff(data)


def _mach_o(data: bytes) -> tuple[str, str, set[str]]:
    _, cpu, _, _, commands, _, _, _ = struct.unpack_from("<8I", data)
    found, at = set(), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", data, at)
        if command == _SYMBOL_TABLE:
            first, count, texts, _ = struct.unpack_from("<4I", data, at + 8)
            for k in range(count):
                name, kind, _, _, _ = struct.unpack_from("<IBBHQ", data, first + 16 * k)
                if kind & 0x0E == 0 and kind & 1:  # undefined and external
                    found.add(_text(data, texts + name).removeprefix("_"))
        at += size
    return "Mach-O", _MACH_O[cpu], found


def _coff(data: bytes) -> tuple[str, str, set[str]]:
    cpu, _, _, first, count, _, _ = struct.unpack_from("<2H3I2H", data)
    texts, found, k = first + 18 * count, set(), 0
    while k < count:
        at = first + 18 * k
        value, section, _, kind, more = struct.unpack_from("<IhHBB", data, at + 8)
        if section == 0 and kind == _EXTERNAL and not value:
            long = data[at : at + 4] == bytes(4)
            place = texts + struct.unpack_from("<I", data, at + 4)[0]
            found.add(_text(data, place) if long else data[at : at + 8].rstrip(b"\0").decode())
        k += 1 + more
    return "COFF", _COFF[cpu], found


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
