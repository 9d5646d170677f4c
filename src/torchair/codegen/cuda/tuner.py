"""Choosing among forms of a kernel by running them on the GPU, once for each kernel.

A form is run over and over in one device graph, on memory of its own. Operands that a model would
read from far away have so many copies that none is still in a cache when its turn comes again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from torchair.codegen.cuda.driver import Call, Library
from torchair.codegen.cuda.jit import Entry
from torchair.codegen.target import Declined, Kernel, Launch
from torchair.log import logger

Made = tuple[Kernel, Launch]
CACHED = 128 << 20
"""Bytes that no cache holds."""
FAR = 1 << 20
"""Bytes of an operand from which on it is worth having copies."""
RUNS = 16
"""Launches of a kernel in one measurement, at least."""


def fastest(
    library: Library, makers: Sequence[Callable[[], Made]], sizes: Mapping[int, int]
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
    library: Library, entry: Entry, launch: Launch, memory: Mapping[int, list[torch.Tensor]]
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
