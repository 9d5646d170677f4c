"""Compile kernels in memory with LLVM. One `Library` holds what a process has compiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from torchair.codegen.cpu.machine import host
from torchair.codegen.kernel import Kernel
from torchair.codegen.text.machine import Machine


class Library:
    """Native functions by the name of their kernel; the same text is compiled once."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._target = machine
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []  # they own the code
        self._lock = threading.Lock()
        self.seconds = 0.0

    @property
    def machine(self) -> Machine:
        """The processor that code is made for."""
        return self._target or host()

    def __contains__(self, kernel: Kernel) -> bool:
        return kernel.entry in self._addresses

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Compile those that are new, as one module."""
        with self._lock:
            new = {k.entry: k for k in kernels if k.entry not in self._addresses}
            if not new:
                return
            start = time.perf_counter()
            engine = _compile(module_text(new.values(), self.machine), self.machine)
            self._engines.append(engine)
            for entry in new:
                self._addresses[entry] = engine.get_function_address(entry)
            self.seconds += time.perf_counter() - start

    def address(self, kernel: Kernel) -> int:
        """Where the code of a kernel is; compiles it if needed."""
        if kernel.entry not in self._addresses:
            self.add([kernel])
        return self._addresses[kernel.entry]


def module_text(kernels: Iterable[Kernel], machine: Machine) -> str:
    """One module with all these kernels and the declarations they need, once each."""
    kernels = list(kernels)
    declared = sorted({d for k in kernels for d in k.declarations})
    width = f'"prefer-vector-width"="{machine.bits}" "min-legal-vector-width"="{machine.bits}"'
    attributes = f"attributes #0 = {{ nounwind {width} }}\n"
    return "\n".join([*declared, *(k.text for k in kernels), attributes])


def _compile(text: str, machine: Machine) -> Any:
    """An execution engine with the code of a module. The middle end of LLVM is skipped: vectors
    are explicit, and code generation alone gives the same speed in a third of the time."""
    import llvmlite.binding as llvm

    host()  # initialises LLVM
    module = llvm.parse_assembly(text)
    backend = llvm.Target.from_default_triple().create_target_machine(
        cpu=machine.name, features=machine.features, opt=2, jit=True
    )
    engine = llvm.create_mcjit_compiler(module, backend)
    engine.finalize_object()
    return engine


def run_kernel(library: Library, kernel: Kernel, words: Iterable[int], threads: int = 1) -> None:
    """Run one kernel, its threads one after the other: for tests and for constants."""
    import ctypes

    block = (ctypes.c_int64 * max(1, len(words := list(words))))(*words)
    entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    function = entry(library.address(kernel))
    for tid in range(threads):
        function(tid, threads, ctypes.addressof(block))
