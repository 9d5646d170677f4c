"""Native code of this processor: kernels compiled with LLVM, or taken from the disk, and memory for
the constants that they read. One `Library` holds what a process has.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from torchair.codegen import kernel_cache
from torchair.codegen.cpu.image import MappedImage
from torchair.codegen.cpu.processors import (
    Processor,
    processor_named,
    sve_bits,
    this_processor,
    tiles_permitted,
)
from torchair.codegen.llvm import binding, parse, version
from torchair.codegen.target import BrokenKernels, Kernel
from torchair.codegen.text.writer import Machine
from torchair.flags import Flags
from torchair.locks import Lock

# ---- the processor we run on ----


@cache
def host() -> Machine:
    """The machine we run on, or the one that `TORCHAIR_CPU` names; without LLVM, as far as code
    from packages must know it."""
    try:
        llvm = binding()
    except ImportError:
        return Machine("unknown", "", arch=this_processor()[0])
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if (name := Flags.read().cpu) is not None:
        processor = processor_named(name)
        if not processor.runs_here():
            raise ValueError(f"TORCHAIR_CPU={name}: this machine does not run such code")
        return processor.machine
    arch = llvm.get_process_triple().partition("-")[0]
    try:
        found = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM knows some processors of macOS and Windows by name only
        return describe(llvm.get_host_cpu_name(), {}, "", arch)
    made = describe(llvm.get_host_cpu_name(), dict(found), found.flatten(), arch)
    if (made.amx_bf16 or made.amx_i8) and not tiles_permitted():
        made = replace(made, amx_bf16=False, amx_i8=False)
    return made


def describe(name: str, has: dict[str, bool], features: str, arch: str) -> Machine:
    """A Machine from LLVM's feature flags."""
    if arch in ("aarch64", "arm64"):
        # Cores with wider SVE have as many more pipes for 128 bits, but for those with 512.
        if has.get("sve") and sve_bits() == 512:
            return Machine(name, features, 512, 32, fma=True, arch="aarch64")
        pairs, bytes_, matrices = (bool(has.get(f)) for f in ("bf16", "dotprod", "i8mm"))
        return Machine(
            name,
            features,
            128,
            32,
            pairs,
            bytes_,
            True,
            "aarch64",
            mmla_bf16=pairs,
            mmla_i8=matrices,
        )
    if all(has.get(f) for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        pairs, bytes_ = (bool(has.get(f"avx512{kind}")) for kind in ("bf16", "vnni"))
        tiles = [bool(has.get("amx-tile") and has.get(f"amx-{kind}")) for kind in ("bf16", "int8")]
        return Machine(name, features, 512, 32, pairs, bytes_, True, "x86_64", *tiles)
    if has.get("avx2") and has.get("fma"):
        return Machine(name, features, 256, 16, False, bool(has.get("avxvnni")), True)
    return Machine(name, features, 128, 16)


_PART = 8  # kernels compiled in one go
_LEVEL = 2  # of LLVM's code generator
_PATIENCE = 2.0  # seconds without a sign of life


class Library:
    """Native functions by the name of their kernel; the same text is compiled once."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._target = machine
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []  # they own the code, made of objects that must stay
        self._lock = Lock()
        self.seconds = 0.0

    @property
    def machine(self) -> Machine:
        """The processor that code is made for."""
        return self._target or host()

    def __contains__(self, kernel: Kernel) -> bool:
        return kernel.entry in self._addresses

    def add(self, kernels: Iterable[Kernel]) -> None:
        """Make machine code of those that are new."""
        with self._lock:
            new = {k.entry: k for k in kernels if k.entry not in self._addresses}
            if not new:
                return
            start = time.perf_counter()
            self._link(new, _objects(list(new.values()), self.machine))
            self.seconds += time.perf_counter() - start

    def _link(self, entries: Iterable[str], objects: list[bytes]) -> None:
        engine = _engine(objects, self.machine)
        self._engines.append((engine, objects))
        for entry in entries:
            self._addresses[entry] = engine.get_function_address(entry)

    def fetch(self, keys: Mapping[str, str]) -> bool:
        """Have the code of kernels without their text, from the disk: keys by names of kernels.
        False if some are not there."""
        store = kernel_cache.in_use()
        with self._lock:
            new = {e: key for e, key in keys.items() if e not in self._addresses}
            found = [] if store is None else [store.get(key) for key in new.values()]
            objects = [code for code in found if code is not None]
            if len(objects) < len(new):
                return False
            if new:
                self._link(new, objects)
            return True

    def adopt(self, image: MappedImage) -> None:
        """Have the code of kernels that was compiled elsewhere; what is there already stays."""
        with self._lock:
            self._engines.append(image)
            self._addresses = {**image.addresses, **self._addresses}

    def address(self, kernel: Kernel) -> int:
        """Where the code of a kernel is; compiles it if needed."""
        if kernel.entry not in self._addresses:
            self.add([kernel])
        return self._addresses[kernel.entry]


def compile_all(library: Library, kernels: Iterable[Kernel]) -> None:
    """Compile what is new; a progress bar appears when that takes long."""
    new = [k for k in {k.entry: k for k in kernels}.values() if k not in library]
    parts = [new[i : i + _PART] for i in range(0, len(new), _PART)]
    start = time.perf_counter()
    for done, part in enumerate(parts):
        _compile_part(library, part)
        if time.perf_counter() - start > _PATIENCE and done + 1 < len(parts):
            for rest in _with_progress(parts[done + 1 :]):
                _compile_part(library, rest)
            return


def _compile_part(library: Library, part: list[Kernel]) -> None:
    try:
        library.add(part)
    except RuntimeError as e:
        errors: dict[str, Exception] = {part[0].entry: e} if len(part) == 1 else {}
        for kernel in part if len(part) > 1 else []:
            try:
                _compile_part(library, [kernel])
            except BrokenKernels as broken:
                errors.update(broken.errors)
        if errors:
            raise BrokenKernels(errors) from e


def _with_progress(parts: list[list[Kernel]]) -> Iterable[list[Kernel]]:
    from rich.console import Console  # takes a tenth of a second to import, and is seldom needed
    from rich.progress import track

    console = Console(stderr=True)
    return track(parts, "compiling kernels", console=console, disable=not console.is_terminal)


def module_text(kernels: Iterable[Kernel], machine: Machine) -> str:
    """One module with all these kernels and the declarations they need, once each."""
    kernels = list(kernels)
    declared = sorted({d for k in kernels for d in k.declarations})
    width = f'"prefer-vector-width"="{machine.bits}" "min-legal-vector-width"="{machine.bits}"'
    if machine.arch == "aarch64" and machine.bits > 128:  # SVE, whose registers are as wide
        width = f"vscale_range({machine.bits // 128},{machine.bits // 128}) {width}"
    attributes = f"attributes #0 = {{ nounwind {width} }}\n"
    return "\n".join([*declared, *(k.text for k in kernels), attributes])


def _objects(kernels: Sequence[Kernel], machine: Machine) -> list[bytes]:
    """The object code of kernels, one by one, so that each is found again whatever is beside it."""
    store = kernel_cache.in_use()
    made: list[bytes] = []
    target = None
    for kernel in kernels:
        text = module_text([kernel], machine)
        key = _key(text, machine)
        code = None if store is None else store.get(key)
        if code is None:
            target = target or _target_machine(machine)
            code = target.emit_object(parse(text))
            if store is not None:
                store.put(key, code)
        made.append(code)
    return made


def objects_for(kernels: Sequence[Kernel], processor: Processor) -> list[bytes]:
    """The object code of kernels for a processor that need not be here, to be linked."""
    llvm, machine, store = binding(), processor.machine, kernel_cache.in_use()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(processor.triple).create_target_machine(
        cpu=machine.name, features=machine.features, opt=_LEVEL, reloc="pic", codemodel="small"
    )
    layout = f'target datalayout = "{target.target_data}"\ntarget triple = "{processor.triple}"\n'
    made: list[bytes] = []
    for kernel in kernels:
        text = layout + module_text([kernel], machine)
        key = kernel_cache.key_of("package", *made_with(machine), text)
        code = None if store is None else store.get(key)
        if code is None:
            code = target.emit_object(parse(text))
            if store is not None:
                store.put(key, code)
        made.append(code)
    return made


def assembly(kernel: Kernel, machine: Machine) -> str:
    """The code of a kernel in the language of the processor."""
    module = parse(module_text([kernel], machine))
    return str(_target_machine(machine).emit_assembly(module))


def made_with(machine: Machine) -> tuple[str, ...]:
    """What code follows from beside its text."""
    return version(), str(_LEVEL), machine.arch, machine.name, machine.features


def key_of(kernel: Kernel, machine: Machine) -> str:
    """The name of the code of a kernel on disk."""
    return _key(module_text([kernel], machine), machine)


def _key(text: str, machine: Machine) -> str:
    return kernel_cache.key_of("cpu", *made_with(machine), text)


def _target_machine(machine: Machine) -> Any:
    """What generates code. The middle end of LLVM is skipped: vectors are explicit, and code
    generation alone gives the same speed in a third of the time."""
    host()  # initialises LLVM
    return (
        binding()
        .Target.from_default_triple()
        .create_target_machine(cpu=machine.name, features=machine.features, opt=_LEVEL, jit=True)
    )


def _engine(objects: Iterable[bytes], machine: Machine) -> Any:
    """An execution engine with some object code."""
    llvm = binding()
    backend = _target_machine(machine)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), backend)
    for code in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
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


# ---- memory for packed constants ----


ALIGNMENT = 64  # bytes of a cache line
_LARGE = 2 << 20  # bytes of a large page
_SMALL = 32 << 10  # bytes that no large page is used for
_SHARE = 4 * _LARGE  # bytes that tensors share


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor, not filled. Systems that do not know large pages ignore the request."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = _from(memory, -memory.data_ptr() % ALIGNMENT, size)
    else:
        memory = _SHARED.take(size)
    return memory.view(dtype).view(tuple(shape))


class _Slab:
    """Large pages that tensors share, one after the other: most weights are smaller than a page, or
    end in the middle of one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = Lock()

    def take(self, size: int) -> torch.Tensor:
        """Some bytes, at the beginning of a cache line."""
        with self._lock:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            if start + size > self._memory.numel():
                self._memory, start = _large(max(size, _SHARE)), 0
            self._used = start + size
            return _from(self._memory, start, size)


def _large(size: int) -> torch.Tensor:
    """Large pages for at least so many bytes."""
    whole = -(-size // _LARGE) * _LARGE
    # A mapping of its own: memory that was used before is in small pages already.
    mapping = mmap.mmap(-1, whole + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return _from(memory, -memory.data_ptr() % _LARGE, whole)


def _from(memory: torch.Tensor, start: int, size: int) -> torch.Tensor:
    return memory[start : start + size]


_SHARED = _Slab()
