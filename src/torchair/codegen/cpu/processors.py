"""Processors by name, that code is made for on another machine, and what the one here can do.

Neither question needs LLVM: a package picks its code without it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
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
        return arch == self.machine.arch and self.flags <= flags


_KNOWN = {
    p.name: p
    for p in (
        Processor("x86-64-v2", Machine("x86-64-v2", "", 128, 16), _V2),
        Processor("x86-64-v3", Machine("x86-64-v3", "", 256, 16, fma=True), _V3),
        Processor("x86-64-v4", Machine("x86-64-v4", "", 512, 32, fma=True), _V4),
        Processor(
            "aarch64", Machine("generic", "+neon", 128, 32, fma=True, arch="aarch64"),
            frozenset({"asimd"}),
        ),
    )
}  # fmt: skip
_MORE = {"avx512vnni": ("avx512_vnni", "dot_i8"), "avx512bf16": ("avx512_bf16", "dot_bf16")}
"""What x86-64-v4 may have beyond its level: the name of the flag, and the field of a Machine."""


def processor_named(text: str) -> Processor:
    """`x86-64-v3`, or `x86-64-v4+avx512vnni`; ValueError for a name that is not known."""
    name, *more = text.strip().split("+")
    found = _KNOWN.get(name)
    if found is None or any(word not in _MORE or found.name != "x86-64-v4" for word in more):
        raise ValueError(
            f"{text!r} is no processor that code can be made for: there are {', '.join(_KNOWN)}, "
            f"and x86-64-v4 with {' or '.join(f'+{word}' for word in _MORE)}"
        )
    for word in sorted(set(more)):
        flag, field = _MORE[word]
        has: Any = {field: True}
        features = ",".join(filter(None, (found.machine.features, f"+{word}")))
        machine = replace(found.machine, features=features, **has)
        found = Processor(f"{found.name}+{word}", machine, found.flags | {flag})
    return found


def best(processors: Iterable[Processor]) -> Processor | None:
    """The one that asks for most, of those whose code runs here."""
    fitting = [p for p in processors if p.runs_here()]
    return max(fitting, key=lambda p: len(p.flags), default=None)


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
