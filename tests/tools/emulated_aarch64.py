"""Code for aarch64 on a machine that is none: an emulator runs it on the memory of this process.

Addresses are the same inside and outside, so a program that is bound here runs there as it is. The
kernels see no thread pool: programs run on one thread.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Any

from torchair.codegen.cpu.driver import driver
from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.link import Image
from torchair.codegen.cpu.openmp import package_symbols
from torchair.codegen.cpu.processors import processor_named
from torchair.codegen.cpu.target import CpuTarget

_PAGE = 1 << 12
_STACK = 1 << 20
_RETURN = 0x1000  # an address at which the emulator stops


class EmulatedImage:
    """An image in memory of ours, whose functions an emulator runs. Each function that it imports
    has a page of its own, at which the emulator asks us to do what it does."""

    def __init__(self, image: Image, symbols: Mapping[str, int]) -> None:
        import unicorn
        from unicorn import arm64_const

        self._registers: Any = arm64_const
        self._emulator: Any = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._mapped: set[int] = set()
        size = image.table + _PAGE * (1 + 8 * len(image.imports) // _PAGE)
        self._memory, self._stack = _memory(size + _PAGE * len(image.imports)), _memory(_STACK)
        base = _address(self._memory)
        self._outside = {base + size + _PAGE * k: n for k, n in enumerate(image.imports)}
        table = [symbols.get(name, place) for place, name in self._outside.items()]
        self._memory[: len(image.code)] = image.code
        words = b"".join(word.to_bytes(8, "little") for word in table)
        self._memory[image.table : image.table + len(words)] = words
        self._emulator.mem_map(_RETURN, _PAGE)
        kinds = ("READ", "WRITE", "FETCH")
        asked = sum(getattr(unicorn, f"UC_HOOK_MEM_{kind}_UNMAPPED") for kind in kinds)
        self._emulator.hook_add(asked, self._map)
        end = base + len(self._memory)
        self._emulator.hook_add(unicorn.UC_HOOK_CODE, self._call, None, base + size, end)
        self.addresses = {name: base + at for name, at in image.entries.items()}

    def _map(self, emulator: Any, access: int, address: int, size: int, *_: Any) -> bool:
        """Show the emulator pages of this process, as it asks for them."""
        for page in {address // _PAGE, (address + size - 1) // _PAGE} - self._mapped:
            self._mapped.add(page)
            emulator.mem_map_ptr(page * _PAGE, _PAGE, 7, page * _PAGE)
        return True

    def _call(self, emulator: Any, address: int, *_: Any) -> None:
        """A function of C, done here."""
        name, r = self._outside[address], self._registers
        first, second, third = (emulator.reg_read(r.UC_ARM64_REG_X0 + k) for k in range(3))
        if name == "memset":
            ctypes.memset(first, second & 0xFF, third)
        elif name == "memcpy":
            ctypes.memmove(first, second, third)
        else:
            raise NotImplementedError(name)
        emulator.reg_write(r.UC_ARM64_REG_PC, emulator.reg_read(r.UC_ARM64_REG_X30))

    def run(self, entry: str, argument: int) -> None:
        """Call a function of one integer."""
        r, emulator = self._registers, self._emulator
        emulator.reg_write(r.UC_ARM64_REG_X0, argument)
        emulator.reg_write(r.UC_ARM64_REG_SP, _address(self._stack) + _STACK - 64)
        emulator.reg_write(r.UC_ARM64_REG_X30, _RETURN)
        emulator.emu_start(self.addresses[entry], _RETURN)


class EmulatedTarget(CpuTarget):
    """An aarch64 processor, in the place of the one here; `entered` counts programs."""

    def __init__(self, image: Image) -> None:
        machine = processor_named("aarch64").machine
        super().__init__(Library(machine))
        self._image = EmulatedImage(image, package_symbols()[0])
        self.library._addresses = dict(self._image.addresses)
        self._entry = driver(machine).entry
        self.entered = 0

    def available(self) -> str | None:
        return None

    def compile(self, kernels: Any) -> None:
        """All of them must be there."""
        missing = [k.entry for k in kernels if k not in self.library]
        assert not missing, missing

    def driver(self) -> Any:
        def run(base: int) -> None:
            self.entered += 1
            self._image.run(self._entry, base)

        return run


def _memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
