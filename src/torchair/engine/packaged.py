"""Machine code for many processors in one piece of data, and the targets that make and run it.

A package holds one image for each processor: all kernels of a graph, and the driver that runs
programs. To make one, the graph is planned for each processor, and its kernels are collected. To
load one, the graph is planned in the same way; the code of each kernel is found by its name, which
follows from its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from torchair.codegen.cpu.driver import driver, filler_kernel
from torchair.codegen.cpu.elf import BadObject
from torchair.codegen.cpu.identity import identity_kernels
from torchair.codegen.cpu.image import MappedImage
from torchair.codegen.cpu.jit import Library, objects_for
from torchair.codegen.cpu.link import Image, link
from torchair.codegen.cpu.native_guard import guard_kernel
from torchair.codegen.cpu.openmp import package_symbols
from torchair.codegen.cpu.processors import Processor, best, processor_named
from torchair.codegen.cpu.target import CpuTarget, cpu
from torchair.codegen.cuda.jit import Entry, Gpu, describe, ptx
from torchair.codegen.cuda.target import CudaTarget, cuda
from torchair.codegen.target import BrokenKernels, Kernel
from torchair.engine.compile import GraphCompiler
from torchair.engine.optimize.passes import GraphState
from torchair.engine.options import EngineOptions
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Graph
from torchair.trace import Trace

__all__ = [
    "PackagedCode",
    "CodeError",
    "PackagedTarget",
    "RecordingTarget",
    "processor_named",
    "ptx_of",
]

_FORMAT = 1
_DIGEST = 32


class CodeError(ValueError):
    """Data that hold no code, or none for this machine."""


# ---- making ----


class RecordingTarget(CpuTarget):
    """A processor that need not be here: its kernels are noted, and compiled by `image`."""

    def __init__(self, processor: Processor) -> None:
        super().__init__(Library(processor.machine))
        self.name_of_processor = processor.name
        self._processor = processor
        self._kernels: dict[str, Kernel] = {}

    def available(self) -> str | None:
        """Text can always be made."""
        return None

    def compile(self, kernels: Sequence[Kernel]) -> None:
        """Note what is asked for."""
        self._kernels.update({k.entry: k for k in kernels})

    @property
    def count(self) -> int:
        """How many kernels were asked for."""
        return len(self._kernels)

    def image(self) -> Image:
        """The code of all that was asked for, and of what runs it."""
        machine = self._processor.machine
        around = [driver(machine), filler_kernel(), guard_kernel(), *identity_kernels()]
        kernels = {k.entry: k for k in (*around, *self._kernels.values())}
        return link(objects_for(list(kernels.values()), self._processor))


class RecordingGpu(CudaTarget):
    """A GPU that need not be here: what its launches run is noted."""

    def __init__(self, machine: Gpu) -> None:
        super().__init__(0, machine)
        self.noted: list[Entry] = []

    def build(self, plan: Any) -> None:
        """Note what is asked for."""
        self.noted += self.entries(plan)


def ptx_of(
    graph: Graph, state: GraphState, options: EngineOptions, architecture: str
) -> dict[str, str]:
    """PTX of all launches of a graph of fixed sizes on a GPU that need not be here, by the name of
    their entries."""
    if architecture not in _GPUS:
        known = ", ".join(_GPUS)
        raise ValueError(f"{architecture!r} is not a known GPU; known are {known}")
    gpu = describe(*_GPUS[architecture])
    target = RecordingGpu(gpu)
    compiler = GraphCompiler(graph, state, options, "meta", (), target)
    compiler.optimize(Trace())
    compiler.fuse({})
    data: list[Any] = [n.outputs[0] for n in graph.data]
    inputs = [torch.empty(v.shape, dtype=ge_to_torch(v.dtype), device="meta") for v in data]
    compiler.program(inputs, compiler.inputs.reader(inputs), lambda plan: None)
    return {entry.name: ptx([entry], gpu) for entry in target.noted}


_GPUS = {
    "sm_70": ((7, 0), 80), "sm_75": ((7, 5), 40), "sm_80": ((8, 0), 108), "sm_86": ((8, 6), 84),
    "sm_89": ((8, 9), 128), "sm_90": ((9, 0), 132), "sm_100": ((10, 0), 148),
    "sm_120": ((12, 0), 170),
}  # fmt: skip
"""Architectures, and how many multiprocessors their largest chips have: kernels follow from it."""


# ---- the data ----


@dataclass
class PackagedCode:
    """Images by the name of their processor, PTX by architecture and launch, and notes for who
    loads them."""

    images: dict[str, Image] = field(default_factory=dict)
    ptx: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """A header in JSON that says where the rest is, then that."""
        pieces: list[bytes] = []

        def put(data: bytes) -> dict[str, Any]:
            at = sum(map(len, pieces))
            pieces.append(data)
            return {"at": at, "size": len(data), "digest": _digest(data)}

        header = {
            "format": _FORMAT,
            "notes": self.notes,
            "images": {
                name: {
                    "arch": i.arch,
                    "entries": dict(i.entries),
                    "imports": list(i.imports),
                    **put(i.code),
                }
                for name, i in self.images.items()
            },
            "ptx": {
                arch: {name: put(text.encode()) for name, text in texts.items()}
                for arch, texts in self.ptx.items()
            },
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + b"".join(pieces)

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> PackagedCode:
        """From such bytes; CodeError where they are damaged or of another version."""
        data = memoryview(data)
        try:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(bytes(data[8 : 8 + size]))
            if header["format"] != _FORMAT:
                raise CodeError(f"its format is {header['format']}, this one reads {_FORMAT}")
            rest = data[8 + size :]
            images = {name: _image(record, rest) for name, record in header["images"].items()}
            ptx = {
                arch: {name: _piece(record, rest).decode() for name, record in texts.items()}
                for arch, texts in header["ptx"].items()
            }
            return cls(images, ptx, dict(header["notes"]))
        except CodeError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CodeError(f"{type(e).__name__}: {e}") from e

    def provide_ptx(self, index: int) -> int:
        """Have a GPU of this machine use what there is for its architecture; how many launches."""
        library = cuda(index).library
        texts = self.ptx.get(library.machine.name, {})
        library.provided |= texts
        return len(texts)

    @property
    def processors(self) -> list[Processor]:
        """Those that there is code for."""
        return [processor_named(name) for name in self.images]

    def target(self, wanted: str | None = None) -> PackagedTarget:
        """The code for this machine: of the best processor, or of the one that is `wanted`.
        CodeError where there is none."""
        known = ", ".join(self.images) or "none"
        chosen = best(self.processors) if wanted is None else processor_named(wanted)
        if chosen is None or chosen.name not in self.images:
            raise CodeError(f"there is no code for {wanted or 'this processor'}, only for {known}")
        if not chosen.runs_here():
            raise CodeError(f"this machine does not run code for {wanted}")
        return PackagedTarget(chosen, self.images[chosen.name])


def _image(record: Mapping[str, Any], rest: memoryview) -> Image:
    code = _piece(record, rest)
    entries = {str(name): int(at) for name, at in record["entries"].items()}
    if not all(0 <= at < len(code) for at in entries.values()):
        raise CodeError("a function is outside of its code")
    return Image(str(record["arch"]), code, entries, tuple(map(str, record["imports"])))


def _piece(record: Mapping[str, Any], rest: memoryview) -> bytes:
    found = bytes(rest[int(record["at"]) : int(record["at"]) + int(record["size"])])
    if len(found) != record["size"] or _digest(found) != record["digest"]:
        raise CodeError("its code is damaged")
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST).hexdigest()


# ---- running ----


class PackagedTarget(CpuTarget):
    """The processor of this machine, with code that was made elsewhere. LLVM is asked for what is
    missing, if it is there."""

    def __init__(self, processor: Processor, image: Image) -> None:
        super().__init__(Library(processor.machine))
        self.name_of_processor = processor.name
        self._image = image
        self.compiled = 0
        """Kernels that were compiled here, since the package has no code for them."""

    def available(self) -> str | None:
        """Why the code cannot be run."""
        try:
            return self._mapped
        except (OSError, RuntimeError, BadObject) as e:
            return str(e)

    @cached_property
    def _mapped(self) -> None:
        cpu().library.adopt(MappedImage(self._image, package_symbols()[0]))

    @property
    def code(self) -> Library:
        """All native code of this process runs from one place."""
        return cpu().library

    def compile(self, kernels: Sequence[Kernel]) -> None:
        """Find the code of kernels; BrokenKernels where it is neither there nor can be made."""
        missing = [k for k in kernels if k not in cpu().library]
        if not missing:
            return
        reason = cpu().available()
        if reason is not None:
            error = RuntimeError(f"the package has no code for these sizes, and {reason}")
            raise BrokenKernels({k.entry: error for k in missing})
        cpu().compile(missing)
        self.compiled += len(missing)
