"""Kernels for aarch64 under `qemu-aarch64`, on copies of this process's memory.

With `TORCHAIR_TEST_QEMU=aarch64` (or `aarch64+dotprod+bf16`, …) `conftest.py` calls `install`, and
tests that call kernels through `run_kernel` compile and run them for that processor (`make
aarch64`). It takes Debian's packages qemu-user and gcc-aarch64-linux-gnu.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from torchair.codegen.cpu import jit
from torchair.codegen.cpu.processors import Processor, processor_named
from torchair.codegen.target import Kernel

CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_PAGE = 1 << 12
_BEFORE, _AFTER = 1 << 12, 1 << 23  # bytes of memory around a pointer that a kernel may see


def why_not() -> str | None:
    """What is missing to run kernels for aarch64 here."""
    missing = [name for name in (CROSS, QEMU) if shutil.which(name) is None]
    return f"not found: {', '.join(missing)}" if missing else None


class QemuLibrary(jit.Library):
    """Programs that run one kernel each."""

    def __init__(self, machine: Any = None) -> None:
        super().__init__(machine)
        self.programs: dict[str, Path] = {}

    def program(self, kernel: Kernel) -> Path:
        """The program of a kernel."""
        if kernel.entry not in self.programs:
            processor = Processor("emulated", self.machine, frozenset())
            (code,) = jit.objects_for([kernel], processor)
            folder, file = _folder(), f"{kernel.entry}-{len(self.programs)}-{id(self)}"
            (folder / f"{file}.o").write_bytes(code)
            given = [_harness(), folder / f"{file}.o", "-lm", "-o", folder / file]
            _done([CROSS, "-static", *given, f"-Wl,--defsym=kernel_entry={kernel.entry}"])
            self.programs[kernel.entry] = folder / file
        return self.programs[kernel.entry]


def install(name: str) -> None:
    """Let tests see such a processor in the place of the one here."""
    if missing := why_not():
        raise RuntimeError(missing)
    machine = processor_named(name).machine
    patched: Any = jit
    patched.host, patched.Library, patched.run_kernel = (lambda: machine), QemuLibrary, run_kernel


def run_kernel(
    library: QemuLibrary, kernel: Kernel, words: Iterable[int], threads: int = 1
) -> None:
    """Run one kernel, its threads one after the other, on the memory that words point to."""
    program, words = library.program(kernel), list(words)
    regions = _regions(words)
    starts = [first for first, _ in regions]
    owner, inside = [], []
    for word in words:
        at = bisect_right(starts, word) - 1
        known = at >= 0 and word < sum(regions[at])
        owner.append(at if known else -1)
        inside.append(word - starts[at] if known else word)
    before = [ctypes.string_at(first, size) for first, size in regions]
    numbers = [len(regions), len(words), threads, *(size for _, size in regions), *owner, *inside]
    given, made = _folder() / "given", _folder() / "made"
    given.write_bytes(struct.pack(f"<{len(numbers)}q", *numbers) + b"".join(before))
    vectors = f"max,sve-default-vector-length={max(library.machine.bits, 128) // 8}"
    _done([QEMU, "-cpu", vectors, program, given, made])
    after, at = made.read_bytes(), 0
    for (first, size), old in zip(regions, before, strict=True):
        _write(first, old, after[at : at + size])
        at += size


def _regions(words: list[int]) -> list[tuple[int, int]]:
    """First byte and size of the memory around each word that points to some, joined."""
    spans: list[list[int]] = []
    mapped = _mapped()
    for word in sorted(set(words)):
        found = next((m for m in mapped if m[0] <= word < m[1]), None)
        if found is None:
            continue
        low = max(found[0], (word - _BEFORE) // _PAGE * _PAGE)
        high = min(found[1], word + _AFTER)
        if spans and low <= spans[-1][1]:
            spans[-1][1] = max(high, spans[-1][1])
        else:
            spans.append([low, high])
    return [(low, high - low) for low, high in spans]


def _mapped() -> list[tuple[int, int]]:
    """Memory of this process that can be written."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_ = line.split()
        if rights.startswith("rw"):
            low, high = (int(x, 16) for x in place.split("-"))
            found.append((low, high))
    return found


def _write(at: int, old: bytes, new: bytes) -> None:
    """Only what the kernel has changed: the rest belongs to Python, which goes on."""
    step = 1 << 8
    for k in range(0, len(old), step):
        if old[k : k + step] == new[k : k + step]:
            continue
        for j in range(k, min(k + step, len(old))):
            if old[j] != new[j]:
                ctypes.memset(at + j, new[j], 1)


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="torchair-qemu-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def _harness() -> Path:
    made = _folder() / "harness.o"
    source = Path(__file__).with_name("qemu_harness.c")
    _done([CROSS, "-O1", "-c", source, "-o", made])
    return made


def _done(command: list[Any]) -> None:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} gave {done.returncode}: {done.stderr[-2000:]}")
