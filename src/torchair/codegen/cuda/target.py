"""An NVIDIA GPU as a target: its generators, what they decline, rates, and the choice among forms
of a kernel by running them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from torchair.codegen.cuda.attention import attention
from torchair.codegen.cuda.driver import Call, GpuLibrary, available, library
from torchair.codegen.cuda.gemv import gemv
from torchair.codegen.cuda.jit import Entry, Gpu, foreign, ptx
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.tiles import packs_of
from torchair.codegen.requests import Attention, Loops, Product, Request
from torchair.codegen.target import AS_EVER, Choices, Declined, Generated, Head, Kernel, Launch, Way
from torchair.log import logger

# ---- forms, each run over and over in one device graph, once for each kernel ----


Made = tuple[Kernel, Launch]
CACHED = 128 << 20
"""Bytes that no cache holds."""
FAR = 1 << 20
"""Bytes of an operand from which on it is worth having copies."""
RUNS = 16
"""Launches of a kernel in one measurement, at least."""


def fastest(
    library: GpuLibrary, makers: Sequence[Callable[[], Made]], sizes: Mapping[int, int]
) -> Made:
    """The best of some kernels that do the same. `sizes` are the bytes behind each of their
    address words, none of which must hold anything in particular."""
    made = {m[0].entry: m for m in map(_tried, makers) if m is not None}
    found = list(made.values())
    entries = [Entry((kernel,), launch.block) for kernel, launch in found]
    broken = library.add(entries)
    with torch.cuda.device(library.index):
        memory = {word: _copies(size) for word, size in sizes.items()}
        times = {
            entry.name: _time(library, entry, launch, memory)
            for entry, (_, launch) in zip(entries, found, strict=True)
            if entry.name not in broken
        }
    if not times:
        return found[0]
    best = min(times, key=times.__getitem__)
    logger.info(
        "%s: %s", best, ", ".join(f"{t:.1f} us" for t in times.values()),
    )  # fmt: skip
    return next(m for m, e in zip(found, entries, strict=True) if e.name == best)


def _tried(make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except Declined:
        return None


def _copies(size: int) -> list[torch.Tensor]:
    count = min(RUNS, max(1, -(-CACHED // size))) if size >= FAR else 1
    return [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]


def _time(
    library: GpuLibrary, entry: Entry, launch: Launch, memory: Mapping[int, list[torch.Tensor]]
) -> float:
    """Microseconds of a launch."""
    (kernel,) = entry.kernels
    blocks = launch.blocks(lambda word: 0)
    calls = []
    for turn in range(RUNS):
        given = [memory[w][turn % len(memory[w])].data_ptr() for w in kernel.words]
        calls.append(Call(library, entry, blocks, [blocks, *given], launch.shared, launch.cluster))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call(torch.cuda.current_stream().cuda_stream)
    graph.replay()
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / RUNS)
    return statistics.median(found)


TYPES = ("f32", "bf16", "f16")
WIDEST_HEAD = 256  # features of a head of attention
FEW = 4
"""Rows of a product, or queries of attention, that kernels of our own are for. More are served by
torch's libraries, with our kernels around them."""


class CudaTarget:
    """One GPU."""

    channels_last = False
    piecewise = False
    resizes = False
    quantised = FEW
    library_channels_last = True
    overlaps = True

    def __init__(self, index: int, machine: Gpu | None = None) -> None:
        """With a `machine` kernels are generated for that one, which need not be here."""
        self.index = index
        self.name = f"cuda:{index}"
        self._own = None if machine is None else GpuLibrary(index, machine)
        self._joined: dict[Any, tuple[Kernel, Launch] | None] = {}

    @property
    def library(self) -> GpuLibrary:
        """The kernels of this GPU."""
        return self._own or library(self.index)

    @property
    def processor(self) -> str:
        """The architecture of the GPU."""
        return f"cuda {self.library.machine.name}"

    def available(self) -> str | None:
        """The driver, a device or LLVM may be missing."""
        try:
            import llvmlite  # noqa: F401
        except ImportError as e:
            return str(e)
        return available()

    def declines(self, head: Head) -> str | None:
        """Why there is no generator for an operator."""
        if head.kind not in ("matmul", "attention") or head.dtype not in TYPES:
            return "torch's libraries serve it"
        if head.rows is None or not 1 <= head.rows <= FEW:
            return "torch's libraries serve many rows"
        if head.quantised:
            return None if head.constant else "its quantised weights may change"
        if head.kind == "matmul":
            return None if head.along else "its matrix is not stored along the sum"
        wide = head.width is None or head.width > WIDEST_HEAD or head.width % 8
        return "its heads are too wide" if wide else None

    def choices(self, request: Request) -> Choices:
        """Nothing yet: forms of large products are measured where launches are made."""
        return {}

    def generate(self, request: Request, label: str, way: Way = AS_EVER) -> Generated:
        """The kernel of a request."""
        make = GENERATORS.get(type(request))
        if make is None:
            raise Declined(f"no GPU kernel for {type(request).__name__}")
        kernel, launch = make(request, self.library.machine, label)
        unknown = foreign([kernel])
        if unknown:
            raise Declined(f"no GPU has the functions {', '.join(sorted(unknown))}")
        pack = packs_of(request.matmul) if isinstance(request, Product) else {}
        return Generated(kernel, 0, pack, launch)

    def joined(
        self, key: Any, make: Callable[[], tuple[Kernel, Launch]]
    ) -> tuple[Kernel, Launch] | None:
        """A kernel for several requests at once, made once for requests like these; None if there
        is none."""
        if key not in self._joined:
            try:
                self._joined[key] = make()
            except Declined:
                self._joined[key] = None
        return self._joined[key]

    def compile(self, kernels: Sequence[Kernel]) -> None:
        """Kernels are compiled with those that stand beside them in a launch."""

    def machine_text(self, generated: Generated) -> str:
        """PTX of a launch of this kernel alone."""
        assert generated.launch is not None
        entry = Entry((generated.kernel,), generated.launch.block)
        return ptx([entry], self.library.machine)

    @property
    def seconds(self) -> float:
        """Time spent in compiling so far."""
        return self.library.seconds

    def work(self, moved: int, points: int, flops: float) -> float:
        """Microseconds of the whole device."""
        return 2.0 + moved / 3e6


def _loops(request: Loops, gpu: Any, label: str) -> tuple[Kernel, Launch]:
    return print_nest(request.nest, gpu, label)


GENERATORS: dict[type, Callable[..., tuple[Kernel, Launch]]] = {
    Loops: _loops,
    Product: gemv,
    Attention: attention,
}


@cache
def cuda(index: int) -> CudaTarget:
    """The target of a GPU of this process."""
    return CudaTarget(index)
