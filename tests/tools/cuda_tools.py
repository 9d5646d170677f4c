"""Running generated GPU kernels by hand, for the tests that have a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import ptx_machine
from nest_plain import as_words
from torchair.codegen.cuda.driver import KernelLaunch, library
from torchair.codegen.cuda.jit import Entry, Gpu, describe, foreign
from torchair.codegen.cuda.nest import print_nest
from torchair.codegen.cuda.sums import COUNTERS
from torchair.codegen.loops import Nest
from torchair.codegen.target import Kernel, Launch

HOPPER = describe((9, 0), 132)
OLDER = describe((7, 5), 40)
Made = tuple[Kernel, Launch, list[int]]
"""A kernel, its launch, and the numbers of its words behind the operands."""


def made(
    nest: Nest, operands: int, gpu: Gpu, wordy: Callable[[int], bool] = lambda n: False
) -> Made:
    """The kernel of a nest, some of whose sizes are words. The address of scratch memory is one
    more word behind those."""
    printed, words = as_words(nest, operands, wordy)
    return (*print_nest(printed, gpu, scratch=operands + len(words)), words)


def entry_of(kernel: Kernel, launch: Launch) -> Entry:
    return Entry((kernel,), launch.block, launch.resident)


def run(
    kernel: Kernel, launch: Launch, tensors: Sequence[torch.Tensor], words: Sequence[int] = ()
) -> None:
    """Launch a kernel on tensors of a GPU; words follow the addresses, and scratch memory those."""
    scratch = torch.zeros(launch.scratch, dtype=torch.uint8, device="cuda")
    values = [*(t.data_ptr() for t in tensors), *words, scratch.data_ptr()]
    blocks = launch.blocks(lambda word: values[word])
    entry = entry_of(kernel, launch)
    given = [blocks, *(values[w] for w in kernel.words)]
    size = (launch.shared, launch.cluster)
    call = KernelLaunch(
        library(0),
        entry,
        blocks,
        given,
        *size,
        together=launch.together,
        number=values.__getitem__,
    )
    call(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not scratch[:COUNTERS].any(), "the next launch finds no zeros"


def on_machine(
    made: Made, gpu: Gpu, memory: Sequence[np.ndarray], order: ptx_machine.Order = "together"
) -> list[np.ndarray]:
    """What a kernel leaves in memory, by the machine in numpy."""
    kernel, launch, words = made
    there = ptx_machine.Memory(1 << 24)
    addresses = [there.place(m) for m in memory]
    scratch = np.zeros(launch.scratch, np.uint8)
    room = there.place(scratch)
    ptx_machine.launch(kernel, launch, gpu, there, [*addresses, *words, room], order=order)
    assert not there.read(room, scratch)[:COUNTERS].any(), "the next launch finds no zeros"
    return [there.read(a, m) for a, m in zip(addresses, memory, strict=True)]


def on_gpu(memory: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Copies of arrays as bytes on the GPU."""
    return [torch.from_numpy(m.view(np.uint8).copy()).cuda() for m in memory]


def back(tensors: Sequence[torch.Tensor], memory: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same arrays as they are on the GPU now."""
    return [t.cpu().numpy().view(m.dtype) for t, m in zip(tensors, memory, strict=True)]


def run_nest_on_gpu(
    nest: Nest, operands: Sequence[torch.Tensor], inputs: int, words: Sequence[int]
) -> None:
    """Run a printed nest on copies of host tensors, those after the first `inputs` being results,
    and bring all their memory back. Where no GPU has a function that it calls, torch's kernels run
    instead, so there is nothing to test."""
    kernel, launch = print_nest(nest, library(0).machine)
    if foreign([kernel]):
        pytest.skip("needs the C library")
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in operands}
    copies = {at: storage.cuda() for at, storage in memory.items()}
    tensors = []
    for t in operands:
        empty = torch.empty(0, dtype=t.dtype, device="cuda")
        copy = copies[t.untyped_storage().data_ptr()]
        tensors.append(empty.set_(copy, t.storage_offset(), t.shape, t.stride()))
    run(kernel, launch, tensors, words)
    for t in operands[inputs:]:
        at = t.untyped_storage().data_ptr()
        memory[at].copy_(copies[at])
