"""Processors by name, that code is made for on another machine, and what the one here can do.

Neither question needs LLVM: a package picks its code without it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torchair.codegen.text.writer import Machine

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True)
class Processor:
    """A kind of processor. `flags` are what it must have, as Linux names them."""

    name: str
    machine: Machine
    flags: frozenset[str]

    @property
    def triple(self) -> str:
        """The target as LLVM names it."""
        return f"{self.machine.arch}-unknown-linux-gnu"

    def runs_here(self) -> bool:
        """Whether this machine runs its code."""
        arch, flags = this_processor()
        if arch != self.machine.arch or not self.flags <= flags:
            return False
        if arch == "aarch64" and self.machine.bits > 128 and self.machine.bits != sve_bits():
            return False
        return tiles_permitted() if self.machine.amx_bf16 or self.machine.amx_i8 else True


_KNOWN = {
    p.name: p
    for p in (
        Processor("x86-64-v2", Machine("x86-64-v2", "", 128, 16), _V2),
        Processor("x86-64-v3", Machine("x86-64-v3", "", 256, 16, fma=True), _V3),
        Processor("x86-64-v4", Machine("x86-64-v4", "", 512, 32, fma=True), _V4),
        Processor(
            "aarch64",
            Machine("generic", "+neon", 128, 32, fma=True, arch="aarch64"),
            frozenset({"asimd"}),
        ),
    )
}


@dataclass(frozen=True)
class Extension:
    """What a processor may have beyond its level."""

    level: str
    flag: str  # as Linux names it
    machine: Mapping[str, Any]  # what it changes of a Machine
    feature: str = ""  # as LLVM names it, if not as we do


_MORE = {
    "avxvnni": Extension("x86-64-v3", "avx_vnni", {"dot_i8": True}),
    "avx512vnni": Extension("x86-64-v4", "avx512_vnni", {"dot_i8": True}),
    "avx512bf16": Extension("x86-64-v4", "avx512_bf16", {"dot_bf16": True}),
    "amx-bf16": Extension("x86-64-v4", "amx_bf16", {"amx_bf16": True}),
    "amx-int8": Extension("x86-64-v4", "amx_int8", {"amx_i8": True}),
    "dotprod": Extension("aarch64", "asimddp", {"dot_i8": True}),
    "i8mm": Extension("aarch64", "i8mm", {"mmla_i8": True}),
    "bf16": Extension("aarch64", "bf16", {"dot_bf16": True, "mmla_bf16": True}),
    "sve256": Extension("aarch64", "sve", {"bits": 256}, "sve"),
    "sve512": Extension("aarch64", "sve", {"bits": 512}, "sve"),
}


def processor_named(text: str) -> Processor:
    """`x86-64-v3`, or `x86-64-v4+avx512vnni`; ValueError for a name that is not known."""
    name, *more = text.strip().split("+")
    found = _KNOWN.get(name)
    if found is None or any(word not in _MORE or _MORE[word].level != name for word in more):
        extended = (f"{x.level}+{word}" for word, x in _MORE.items())
        raise ValueError(
            f"{text!r} is not a processor that code can be generated for; known are "
            f"{', '.join((*_KNOWN, *extended))}, and what has several of these"
        )
    for word in sorted(set(more)):
        new = _MORE[word]
        features = ",".join(filter(None, (found.machine.features, f"+{new.feature or word}")))
        machine = replace(found.machine, features=features, **new.machine)
        found = Processor(f"{found.name}+{word}", machine, found.flags | {new.flag})
    return found


def best(processors: Iterable[Processor]) -> Processor | None:
    """The one that asks for most, of those whose code runs here."""
    fitting = [p for p in processors if p.runs_here()]
    return max(fitting, key=lambda p: len(p.flags), default=None)


@cache
def tiles_permitted() -> bool:
    """Whether Linux lets this process use the tile registers of AMX, which must be asked for."""
    if platform.system() != "Linux" or this_processor()[0] != "x86_64":
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18  # numbers of the system call, of Linux
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0
    except (AttributeError, OSError):
        return False


@cache
def sve_bits() -> int:
    """Bits of the vector registers of SVE in this process, 0 where there are none."""
    if platform.system() != "Linux" or "sve" not in this_processor()[1]:
        return 0
    get_vector_length = 51  # of prctl, in bytes
    found = ctypes.CDLL(None).prctl(get_vector_length, 0, 0, 0, 0)
    return 8 * (found & 0xFFFF) if found > 0 else 0


@cache
def this_processor() -> tuple[str, frozenset[str]]:
    """The architecture of this machine, and flags of the processor as Linux tells them; none on
    other systems."""
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower())
    return arch or platform.machine().lower(), _flags(Path("/proc/cpuinfo"))


def _flags(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    pairs = (line.partition(":") for line in lines)
    found = next((v for k, _, v in pairs if k.strip() in ("flags", "Features")), "")
    return frozenset(found.split())
