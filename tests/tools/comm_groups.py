"""Checks in several processes of one group."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import multiprocessing


def spawned(check, folder, count=2):
    """Run `check(rank, folder)` in several processes of one group."""
    multiprocessing.spawn(_enter, (check, str(folder), count), nprocs=count)
    assert len(list(folder.glob("done*"))) == count


def _enter(rank, check, folder, count):
    warnings.simplefilter("ignore", FutureWarning)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    try:
        check(rank, Path(folder))
        Path(folder, f"done{rank}").touch()
        dist.barrier()
        os._exit(0)  # the threads of gloo abort a process now and then while it is torn down
    finally:
        dist.destroy_process_group()
