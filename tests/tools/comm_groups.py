"""Checks in several processes of one group."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import forked


def spawned(check, folder, count=2):
    """Run `check(rank, folder)`, a function of a module, in several processes of one group."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    words = [check.__module__, check.__qualname__, str(folder), str(count)]
    ranks = [forked.start(__file__, str(rank), *words, env=environment) for rank in range(count)]
    done = [p.communicate(600) for p in ranks]
    assert not any(d.returncode for d in done), [d.stdout + d.stderr for d in done]
    assert len(list(folder.glob("done*"))) == count


def enter(rank, check, folder, count):
    """What a process of the group does."""
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


if __name__ == "__main__":
    own_rank, module, name, shared, members = sys.argv[1:]
    found = getattr(importlib.import_module(module), name)
    enter(int(own_rank), found, shared, int(members))
