"""Files of data dumps: results of FX nodes as arrays, as tensors of captured graphs, or as
statistics. Nothing in them is executed."""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_EAGER = re.compile(
    r"^(?P<node>[^-]+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)\.(?P<moment>\d+)\.npy$"
)
_GE = re.compile(
    r"^[^.]+\.(?:.*?\.)?(?P<node>\w+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)\.output\.\d+\.npy$"
)
_CAPTURED = re.compile(r"^(?P<node>.+)_device_\d+_(?P<step>\d+)\.pt$")
_NAME = re.compile(r"^(?P<node>[^-]+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)$")
_STATISTICS = "stats.csv"

Key = tuple[int, int, str, int]
"""Number of the graph in its dump, step, FX node, number of its result."""


@dataclass(frozen=True)
class Statistics:
    """What is known of a tensor that was not kept; no numbers where it has no order."""

    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[float, float, float] | None  # least and greatest element, mean

    @classmethod
    def of(cls, array: Any) -> Statistics:
        """Those of an array."""
        if not array.size or array.dtype.kind not in "biuf":
            return cls(str(array.dtype), array.shape, None)
        mean = array.mean(dtype=np.float64)
        return cls(
            str(array.dtype), array.shape, (float(array.min()), float(array.max()), float(mean))
        )


@dataclass(frozen=True)
class Dumped:
    """A result of an FX node in a dump."""

    file: Path
    target: str
    moment: int  # when it was written: tells the order of nodes
    known: Statistics | None = None  # all there is of it, if it was not kept

    def load(self) -> Any:
        """The array, or the statistics."""
        if self.known is not None:
            return self.known
        if self.file.suffix == ".npy":
            return np.load(self.file, mmap_mode="r", allow_pickle=False)
        try:
            tensor = torch.load(self.file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as e:
            raise ValueError(f"{self.file} is not a tensor: {e}") from e
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self.file} is not a tensor but a {type(tensor).__name__}")
        return _array(tensor.detach().resolve_conj().resolve_neg())


def _array(tensor: torch.Tensor) -> Any:
    """As numpy has it; floats that it does not know are widened."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.float().numpy()


def results_in(folder: Path) -> dict[Key, Dumped]:
    """Results of FX nodes in a dump. Graphs are numbered in the order of their own numbers, which
    differ between processes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder with a data dump")
    found = list(_results(folder))
    if not found:
        raise ValueError(
            f"{folder} has no results of FX nodes: dump with debug.data_dump.type = 'npy', with "
            "dump_config.enable_dump, or with dump_tensor_data of npugraph_ex"
        )
    graphs = sorted({_graph_of(one.file) for _, one in found})
    return {(graphs.index(_graph_of(one.file)), *key): one for key, one in found}


def _results(folder: Path) -> Iterator[tuple[tuple[int, str, int], Dumped]]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.name == _STATISTICS:
            yield from _rows(path)
        elif path.suffix == ".npy" and (match := _array_name(path.name)) is not None:
            groups = match.groupdict()
            moment = int(groups.get("moment") or path.stat().st_mtime_ns)
            key = (_step_of(path), groups["node"], int(groups["index"]))
            yield key, Dumped(path, groups["target"], moment)
        elif (match := _CAPTURED.match(path.name)) is not None:
            yield (int(match["step"]), match["node"], 0), Dumped(path, "", path.stat().st_mtime_ns)


def _array_name(name: str) -> re.Match[str] | None:
    return _EAGER.match(name) if ".output." not in name else _GE.match(name)


def _rows(path: Path) -> Iterator[tuple[tuple[int, str, int], Dumped]]:
    """Results in a table of statistics, in the order of its rows."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            match = _NAME.match(row.get("fx_name") or "")
            if match is None or row["io"] != "output":
                continue
            cells = [row[name] for name in ("min", "max", "mean")]
            numbers = tuple(map(float, cells)) if all(cells) else None
            known = Statistics(row["dtype"], tuple(json.loads(row["shape"] or "[]")), numbers)  # type: ignore[arg-type]
            key = (_step_of(path), match["node"], int(match["index"]))
            yield key, Dumped(path, match["target"], number, known)


def _graph_of(path: Path) -> int:
    numbers = (re.fullmatch(r"graph_(\d+)", part) for part in path.absolute().parts)
    return next((int(m[1]) for m in numbers if m is not None), 0)


def _step_of(path: Path) -> int:
    name = path.absolute().parent.name
    return int(name) if name.isdigit() else 0
