"""`torch.ops.air.save_tensor`: writes a tensor to a file each time it runs, for data dumps."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from torchair.store import atomic_write

_lib = torch.library.Library("air", "FRAGMENT")
_lib.define("save_tensor(Tensor x, str save_path) -> ()")
_numbers: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)


def _save(x: torch.Tensor, save_path: str) -> None:
    """`<stem>_device_<index>_<n>.<suffix>`, where n counts the files of this path from 0."""
    device = x.device.index or 0
    path = Path(save_path)
    name = f"{path.stem}_device_{device}_{next(_numbers[save_path, device])}{path.suffix}"
    file = io.BytesIO()
    torch.save(x.detach().cpu().clone(), file)  # a clone, else a view brings all of its storage
    atomic_write(path.with_name(name), file.getvalue())


def _nothing(x: torch.Tensor, save_path: str) -> None:
    """A tensor without data has nothing to save."""


_lib.impl("save_tensor", _save, "CompositeExplicitAutograd")
_lib.impl("save_tensor", _nothing, "Meta")
