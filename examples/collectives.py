"""Two processes that compile a layer cut in two: the sum of their halves is a node of the graph.

Run it: `python examples/collectives.py`. docs/collectives.md explains what it prints.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing

import torchair


def layer(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Each process has half of the columns of the first weight, half of the rows of the second."""
    y = F.relu(x @ first) @ second
    dist.all_reduce(y)
    return y + 1


def work(rank: int, folder: str) -> None:
    """What one process does."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    x, first, second = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 8)
    expected = F.relu(x @ first) @ second + 1

    config = torchair.CompilerConfig()
    config.experimental_config.cc_parallel_enable = True
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = f"{folder}/{rank}"
    compiled = torch.compile(layer, backend=torchair.get_npu_backend(compiler_config=config))
    mine = slice(8 * rank, 8 * rank + 8)
    torch.testing.assert_close(compiled(x, first[:, mine], second[mine]), expected)
    dist.destroy_process_group()
    if rank == 0:
        (file,) = Path(folder, "0").glob("dynamo_optimized_*.py")
        print(*(line for line in file.read_text().splitlines() if "Hcom" in line), sep="\n")
        print("equal to one process", flush=True)
    os._exit(0)  # Dynamo keeps the group: its threads must not meet an interpreter that ends


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (folder,), nprocs=2)
