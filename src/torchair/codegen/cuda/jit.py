"""From the text of kernels to PTX, by LLVM's own NVPTX back end. Needs no GPU.

The text of a kernel is a function over the number of its block. A launch may hold several kernels
that do not depend on each other: an `Entry` gives the first blocks to the first, and so on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from torchair.codegen.llvm import binding, parse
from torchair.codegen.target import Kernel
from torchair.codegen.text.writer import Machine

# ---- what a GPU can do ----


WARP = 32
"""Threads that run together and can shuffle values among each other."""


@dataclass(frozen=True)
class Gpu(Machine):
    """A GPU. A vector is what one thread takes at a time: one element, unless a generator sets the
    `lanes` of its writer."""

    capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108
    persistent: bool = False  # kernels are parts of one that stays, see `super_kernel.py`

    @property
    def threads(self) -> int:
        """That one multiprocessor runs at the same time."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability, 2048)

    @property
    def has_bf16(self) -> bool:
        """Whether conversions to bfloat16 are instructions."""
        return self.capability >= (8, 0)

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can read each other's shared memory, and begin before others end."""
        return self.capability >= (9, 0)

    @property
    def begins_early(self) -> bool:
        """Whether a kernel may begin before what it needs has ended, and waits for that itself."""
        return self.has_clusters or self.persistent


_CHIPS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Those we write code for. A chip that is not here runs what was written for one before it."""
_VERSIONS = dict.fromkeys(_CHIPS[:4], "+ptx74") | {(9, 0): "+ptx80"}


def describe(capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """A GPU from what the driver says of it. The version of PTX is the oldest that knows all we
    write for that chip, so that older drivers take it too; for the newest that is LLVM's choice."""
    major, minor = max((c for c in _CHIPS if c <= capability), default=_CHIPS[0])
    return Gpu(
        f"sm_{major}{minor}",
        _VERSIONS.get((major, minor), ""),
        bits=32,
        fma=True,
        arch="nvptx",
        capability=(major, minor),
        multiprocessors=multiprocessors,
    )


@cache
def gpu(index: int) -> Gpu:
    """The GPU of this number."""
    found = torch.cuda.get_device_properties(index)
    return describe((found.major, found.minor), found.multi_processor_count)


_TRIPLE = "nvptx64-nvidia-cuda"
_REGISTER = "llvm.nvvm.read.ptx.sreg"
SHARED, MOST_SHARED = 48 * 1024, 227 * 1024
"""Bytes of shared memory that a block has, and that it can ask for."""
TENSOR_MAP = 128
"""Bytes of what the copy engine is told about a tensor."""


@dataclass(frozen=True)
class Entry:
    """What one launch runs: kernels side by side, with blocks of so many threads. Its parameters
    are, for each kernel, the number of its blocks and its words. So many `resident` blocks are to
    have room in a multiprocessor at once; without that the driver's assembler and its linker spend
    registers as they like, each otherwise. If they run `together`, they wait for each other."""

    kernels: tuple[Kernel, ...]
    block: int
    resident: int = 0
    together: bool = False
    shared: int = 0  # bytes that the launch asks for, as far as there must be room for them

    @cached_property
    def name(self) -> str:
        """The name of the function that is launched."""
        size = f"{self.block}x{self.resident}" if self.resident else str(self.block)
        if len(self.kernels) == 1:
            return f"{self.kernels[0].entry}_{size}"
        names = " ".join(k.entry for k in self.kernels)
        label = self.kernels[0].entry.rpartition("_")[0]
        mark = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
        return f"{label}_and_{len(self.kernels) - 1}_{mark}_{size}"

    def text(self) -> str:
        """The function that is launched."""
        parameters, lines = [], [f"  %id = call i32 @{_REGISTER}.ctaid.x()"]
        lines.append("  %b0 = zext i32 %id to i64")
        for k, kernel in enumerate(self.kernels):
            names = [f"{kind} %k{k}.w{word}" for word, kind in kernel.words.items()]
            tensors = [f"%k{k}.t{i}" for i in range(len(kernel.tensors))]
            copied = [f"ptr byval([{TENSOR_MAP} x i8]) align 64 {t}" for t in tensors]
            parameters += [f"i64 %k{k}.blocks", *names, *copied]
            given = [*names, *(f"ptr {t}" for t in tensors)]
            call = ", ".join([f"i64 %b{k}", f"i64 %k{k}.blocks", *given])
            run = f"  call void @{kernel.entry}({call})"
            if k + 1 == len(self.kernels):
                lines += [run, "  ret void"]
                continue
            lines += [
                f"  %m{k} = icmp slt i64 %b{k}, %k{k}.blocks",
                f"  br i1 %m{k}, label %mine{k}, label %next{k}",
                f"mine{k}:",
                run,
                "  ret void",
                f"next{k}:",
                f"  %b{k + 1} = sub i64 %b{k}, %k{k}.blocks",
            ]
        head = f"define ptx_kernel void @{self.name}({', '.join(parameters)}) {{"
        return "\n".join([head, *lines, "}\n"])

    def annotations(self) -> list[str]:
        """What the driver is told about the function, as LLVM's metadata."""
        limits = {"maxntidx": self.block, "minctasm": self.resident}
        notes = [f'"{key}", i32 {n}' for key, n in limits.items() if n]
        before, stay = 0, []
        for kernel in self.kernels:
            first = before + 2 + len(kernel.words)  # counted from 1, behind the number of blocks
            stay += [f"i32 {first + i}" for i in range(len(kernel.tensors))]
            before = first + len(kernel.tensors) - 1
        if stay:  # the copy engine reads these parameters where they are
            notes.append(f'"grid_constant", !{{{", ".join(stay)}}}')
        return [f"!{{ptr @{self.name}, !{note}}}" for note in notes]

    @property
    def declarations(self) -> set[str]:
        """What the function calls that is defined elsewhere."""
        return {f"declare i32 @{_REGISTER}.ctaid.x()"}

    @property
    def needs_own_chip(self) -> bool:
        """Whether it has instructions that only the very chip has, and none after it."""
        return any(kernel.tensors for kernel in self.kernels)


def module_text(entries: Sequence[Entry]) -> str:
    """One module with all these entries, and what they need once each."""
    kernels = {k.entry: k for e in entries for k in e.kernels}
    declared = {d for e in entries for d in e.declarations}
    declared |= {d for k in kernels.values() for d in k.declarations}
    head = f'target triple = "{_TRIPLE}"'
    parts = [*(k.text for k in kernels.values()), *(e.text() for e in entries)]
    notes = list(enumerate(note for e in entries for note in e.annotations()))
    named = f"!nvvm.annotations = !{{{', '.join(f'!{i}' for i, _ in notes)}}}"
    return "\n".join([head, *sorted(declared), *parts, named, *(f"!{i} = {n}" for i, n in notes)])


def ptx(entries: Sequence[Entry], gpu: Gpu) -> str:
    """What the driver takes. LLVM puts kernels into their entries and generates code; nothing else
    of its middle end runs, since vectors are explicit."""
    llvm = binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = parse(module_text(entries))
    machine = _machine(llvm, gpu, any(e.needs_own_chip for e in entries))
    module.data_layout = str(machine.target_data)  # versions of LLVM have different ones
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return str(machine.emit_assembly(module))


def _machine(llvm: Any, gpu: Gpu, own_chip: bool) -> Any:
    name = f"{gpu.name}a" if own_chip else gpu.name
    return llvm.Target.from_triple(_TRIPLE).create_target_machine(
        cpu=name, features=gpu.features, opt=3
    )


def foreign(kernels: Iterable[Kernel]) -> set[str]:
    """Functions that no GPU has, of those that some kernels call: the C library's."""
    names = {re.findall(r"@([\w.]+)", d)[0] for k in kernels for d in k.declarations}
    return {n for n in names if not n.startswith("llvm.")}
