"""`torchair compare`: two data dumps, tensor by tensor, matched by the FX node they come from."""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchair.store import atomic_write, csv_bytes

# ---- what is in the files of a dump; nothing in them is executed


_EAGER = re.compile(
    r"^(?P<node>[^-]+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)\.(?P<moment>\d+)\.npy$"
)
_GE = re.compile(
    r"^[^.]+\.(?:.*?\.)?(?P<node>\w+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)\.output\.\d+\.npy$"
)
_CAPTURED = re.compile(r"^(?P<node>.+)_device_\d+_(?P<step>\d+)\.pt$")
_NAME = re.compile(r"^(?P<node>[^-]+)-(?P<target>.+)\.OUTPUT\.(?P<index>\d+)$")
_STATISTICS = "stats.csv"

TensorKey = tuple[int, int, str, int]
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
        tensor = tensor.detach().resolve_conj().resolve_neg()
        try:
            return tensor.numpy()
        except TypeError:  # a float that numpy does not know
            return tensor.float().numpy()


def results_in(folder: Path) -> dict[TensorKey, Dumped]:
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
        elif match := (_GE if ".output." in path.name else _EAGER).match(path.name):
            groups = match.groupdict()
            moment = int(groups.get("moment") or path.stat().st_mtime_ns)
            key = (_step_of(path), groups["node"], int(groups["index"]))
            yield key, Dumped(path, groups["target"], moment)
        elif (match := _CAPTURED.match(path.name)) is not None:
            yield (int(match["step"]), match["node"], 0), Dumped(path, "", path.stat().st_mtime_ns)


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


RTOL = 1e-3
"""Of the largest element: what differs by more diverges."""

_COLUMNS = (
    "graph", "step", "node", "target", "index", "dtype", "shape", "cosine", "largest_absolute",
    "largest_relative", "diverges", "note", "file_a", "file_b",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One tensor that both dumps have."""

    key: TensorKey
    target: str
    dtype: str
    shape: tuple[int, ...]
    cosine: float
    absolute: float
    relative: float  # to the largest element of the first
    diverges: bool
    note: str
    files: tuple[Path, Path]

    def cells(self) -> tuple[Any, ...]:
        """Cells of the table, in the order of its columns."""
        graph, step, node, index = self.key
        return (
            graph,
            step,
            node,
            self.target,
            index,
            self.dtype,
            list(self.shape),
            f"{self.cosine:.9g}",
            f"{self.absolute:.6g}",
            f"{self.relative:.6g}",
            self.diverges,
            self.note,
            *self.files,
        )


@dataclass(frozen=True)
class Comparison:
    """Two dumps side by side: what diverges first, each part in the order of the first dump."""

    rows: list[Compared]
    only_a: int
    only_b: int

    @property
    def diverging(self) -> list[Compared]:
        """Tensors that differ by more than the tolerance, the first one on top."""
        return [row for row in self.rows if row.diverges]

    def write(self, path: Path) -> Path:
        """The whole table as a CSV file."""
        return atomic_write(path, csv_bytes([_COLUMNS, *(row.cells() for row in self.rows)]))

    def __str__(self) -> str:
        lines = [f"{len(self.rows)} tensors in both, {len(self.diverging)} diverge"]
        if self.only_a or self.only_b:
            lines.append(f"only in the first: {self.only_a}, only in the second: {self.only_b}")
        if self.diverging:
            lines.append(f"first divergence: {_line(self.diverging[0])}")
        lines += [_line(row) for row in self.rows[:_SHOWN]]
        if len(self.rows) > _SHOWN:
            lines.append(f"... {len(self.rows) - _SHOWN} more in the CSV file")
        return "\n".join(lines)


_SHOWN = 40  # rows that are printed
_NAN = float("nan")


def _line(row: Compared) -> str:
    graph, step, node, index = row.key
    where = f"graph {graph} step {step} {node}" + (f":{index}" if index else "")
    mark = "!" if row.diverges else " "
    numbers = f"cosine {row.cosine:.6f}  abs {row.absolute:.3g}  rel {row.relative:.3g}"
    return f"{mark} {where:32s} {row.target:32s} {numbers}  {row.note}".rstrip()


def compare(
    first: Path, second: Path, rtol: float = RTOL, each: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Compare two dumps, each of any kind: arrays of an eager run, a dump of a compiled graph with
    its tensors or their statistics, tensors of a captured one. `each` is told of every result."""
    a, b = results_in(first), results_in(second)
    keys = sorted((k for k in a if k in b), key=lambda k: (k[0], k[1], a[k].moment))
    rows = []
    for key in keys:
        each(key[2])
        rows.append(_compared(key, a[key], b[key], rtol))
    ordered = [r for r in rows if r.diverges] + [r for r in rows if not r.diverges]
    return Comparison(ordered, len(a) - len(rows), len(b) - len(rows))


def _compared(key: TensorKey, a: Dumped, b: Dumped, rtol: float) -> Compared:
    x, y = a.load(), b.load()
    known = isinstance(x, Statistics) or isinstance(y, Statistics)
    if known:  # least and greatest element and mean are all that is compared: there is no cosine
        x, y = (t if isinstance(t, Statistics) else Statistics.of(t) for t in (x, y))

    def row(
        diverges: bool,
        note: str,
        absolute: float = _NAN,
        relative: float = _NAN,
        cosine: float = _NAN,
    ) -> Compared:
        target, files = a.target or b.target, (a.file, b.file)
        shown = (str(x.dtype), x.shape, cosine, absolute, relative)
        return Compared(key, target, *shown, diverges, note, files)

    if x.shape != y.shape:
        return row(True, f"dims differ: {list(x.shape)} and {list(y.shape)}")
    if known and (x.numbers is None or y.numbers is None):
        return row(False, "no numbers")
    if not known and (x.dtype.kind not in "biufc" or y.dtype.kind not in "biufc"):
        return row(False, f"no numbers: {x.dtype} and {y.dtype}")
    arrays = (np.array(x.numbers), np.array(y.numbers)) if known else (x, y)
    cosine, absolute, scale, odd = _numbers(*arrays)
    unscaled = float("inf") if absolute else 0.0
    relative = absolute / scale if scale else unscaled
    exact = not known and x.dtype.kind in "biu"
    diverges = bool(odd) or (absolute > 0 if exact else absolute > rtol * scale)
    if known:
        return row(diverges, "by statistics", absolute, relative)
    note = f"{odd} elements finite in one only" if odd else ""
    return row(diverges, note, absolute, relative, cosine)


def _numbers(x: Any, y: Any) -> tuple[float, float, float, int]:
    """Cosine, largest difference, largest element of the first, and how many elements are NaN or
    infinite in one only."""
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    a, b = (np.asarray(t, dtype=wide).reshape(-1) for t in (x, y))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    odd = int((~finite & ~same).sum())
    a, b = a[finite], b[finite]
    if not a.size:
        return 1.0, 0.0, 0.0, odd
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(abs(np.vdot(a, b)) / lengths) if lengths else float((a == b).all())
    if wide is np.float64 and lengths:
        cosine = float(np.dot(a, b) / lengths)
    return cosine, float(np.abs(a - b).max()), float(np.abs(a).max()), odd
