"""Runs the work of a kernel test, and checks it: on a GPU and on a machine of numpy."""

from __future__ import annotations

import torch

from cuda_cases import Work
from cuda_tools import HOPPER, run
from ptx_machine import Memory, Order, launch


def on_numpy(work: Work, blocks: int | None = None, order: Order = "together") -> None:
    """Run and check on the machine of numpy."""
    memory = Memory()
    addresses = [memory.place(m, work.shifts.get(k, 0)) for k, m in enumerate(work.memory)]
    words = [*addresses, *work.numbers]
    launch(work.kernel, work.launch, HOPPER, memory, words, blocks, order)
    work.check([memory.read(a, m) for a, m in zip(addresses, work.memory, strict=True)])


def on_gpu(work: Work) -> None:
    """Run and check on the GPU."""
    tensors = []
    for k, m in enumerate(work.memory):
        shift = work.shifts.get(k, 0)
        area = torch.empty(m.nbytes + shift, dtype=torch.uint8, device="cuda")
        tensors.append(area[shift:])
        tensors[-1].copy_(torch.from_numpy(m.view("uint8").reshape(-1).copy()))
    run(work.kernel, work.launch, tensors, work.numbers)
    work.check(
        [
            t.cpu().numpy().view(m.dtype).reshape(m.shape)
            for t, m in zip(tensors, work.memory, strict=True)
        ]
    )
