"""The data dump of the engine: a graph runs node by node, and tensors of its nodes become files.

Says besides, in a JSON file, what is dumped of which graph of the process.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchair.engine.fuse.units import Unit
from torchair.engine.optimize.passes import GraphState
from torchair.engine.options import DumpOptions
from torchair.engine.plan.ending import Promises
from torchair.engine.plan.records import extent
from torchair.engine.strides import symbols_of
from torchair.fallbacks import Fallback, note
from torchair.fx.dump import as_array
from torchair.ge.graph import NO_WORK, Graph, Node, Value, topological
from torchair.locks import Lock
from torchair.log import logger
from torchair.operators.reference import placed, run_node, tensor_fact
from torchair.store import atomic_write, csv_bytes, npy_bytes

_STARTED = time.time()  # an older file is of another process that had the same id
_LOCK = Lock()  # of the JSON file
_MARK = "torchair_enable_data_dump"  # of nodes inside `scope.data_dump()`
_COLUMNS = ("op_type", "node", "io", "index", "dtype", "shape", "min", "max", "mean", "fx_name")


def layer_of(graph: Graph, options: DumpOptions) -> list[str]:
    """Names of nodes, and types of the nodes that `scope.data_dump()` marks."""
    marked = [n.type for n in graph.nodes if n.attr(_MARK) == "True" and _is_computed(n)]
    return list(dict.fromkeys([*options.layer.split(), *marked]))


def _is_computed(node: Node) -> bool:
    return node.type not in NO_WORK


def write_dump_options(name: str, layer: Sequence[str], options: DumpOptions) -> Path:
    """Enter a graph into the JSON file of this process, and give its path."""
    world, _, rank = os.path.basename(options.path).partition("_global_")
    path = Path("ge_dump_data_json", f"dump_options_{world}_{rank}_pid{os.getpid()}.json")
    with _LOCK:
        settings = {
            "dump_path": options.path,
            "dump_mode": options.mode,
            "dump_data": options.data,
            "dump_step": options.step,
            "quant_dumpable": options.quant_dumpable,
            "dump_list": [*_written_before(path), {"model_name": name, "layer": list(layer)}],
        }
        return atomic_write(path, json.dumps({"dump": settings}, indent=4).encode())


def _written_before(path: Path) -> list[Any]:
    """Graphs that this process has entered already."""
    if not path.is_file() or path.stat().st_mtime < _STARTED - 1:
        return []
    try:
        return list(json.loads(path.read_text())["dump"]["dump_list"])
    except (ValueError, KeyError, TypeError):  # not a file of ours
        return []


class GraphDump:
    """Runs a graph with the operator table's kernels, in the place of a plan."""

    native = False
    guards: Any = None

    def __init__(
        self, name: str, graph: Graph, device: str, promises: Promises, options: DumpOptions
    ) -> None:
        self._nodes = [n for n in topological(graph.nodes, name) if n.type != "NetOutput"]
        self._device, self._promises, self._options = device, promises, options
        layer = layer_of(graph, options)
        self._layer = frozenset(layer)
        moment = datetime.now().strftime("%Y%m%d%H%M%S")
        number = name.rpartition("_")[2]
        model = number if number.isdigit() else "0"
        index = torch.device(device).index or 0
        self._folder = Path(options.path, moment, str(index), name, model)
        self._steps = itertools.count()
        write_dump_options(name, layer, options)
        logger.warning("graph %s runs unfused, node by node: its data are dumped", name)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs; those that the graph updates are updated."""
        step = next(self._steps)
        files = _Files(self._folder / str(step), self._options)
        wanted = self._wanted if self._options.takes(step) else lambda node: False
        try:
            env = self._compute(inputs, files, wanted)
        finally:
            files.close()
        return self._results(inputs, env)

    def _wanted(self, node: Node) -> bool:
        if not self._layer:
            return _is_computed(node)
        return node.name in self._layer or node.type in self._layer

    def _compute(
        self, inputs: Sequence[torch.Tensor], files: _Files, wanted: Callable[[Node], bool]
    ) -> dict[Value, torch.Tensor]:
        env = dict(zip(self._promises.data, inputs, strict=True))
        for node in self._nodes:
            fed = bool(node.outputs) and node.outputs[0] in env
            shown = wanted(node)
            if shown:  # before the node can change them
                files.add(node, "input", [env[v] for v in node.values()])
            if not fed:
                made = placed(node, run_node(node, env), env, self._device)
                env.update(zip(node.outputs, made, strict=True))
            if shown:
                files.add(node, "output", [env[v] for v in node.outputs])
        return env

    def _results(
        self, inputs: Sequence[torch.Tensor], env: Mapping[Value, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Outputs in memory of their own, with the strides promised; then inputs are updated."""
        data, assigned = self._promises.data, self._promises.assigned
        sizes = symbols_of([(v, tensor_fact(t, v)) for v, t in zip(data, inputs, strict=True)])
        outputs = [self._own(k, env[v], sizes) for k, v in enumerate(self._promises.results)]
        for k, d in assigned.items():
            outputs[k] = inputs[d].copy_(outputs[k])
        return outputs

    def _own(self, k: int, tensor: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        strides = self._promises.strides(k, sizes)
        if k in self._promises.assigned or strides is None:
            return tensor.clone()
        start = self._promises.offset(k, sizes) or 0
        length = start + extent(tensor.shape, strides)
        memory = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
        return memory.as_strided(tensor.shape, strides, start).copy_(tensor)


class _Files:
    """What is written of one run."""

    def __init__(self, folder: Path, options: DumpOptions) -> None:
        self._folder, self._options = folder, options
        self._rows: list[tuple[Any, ...]] = []

    def add(self, node: Node, side: str, tensors: Sequence[torch.Tensor]) -> None:
        """Inputs or outputs of a node, unless only the others are wanted."""
        if self._options.mode not in ("all", side):
            return
        names = [fx_name(v) for v in (node.outputs if side == "output" else node.values())]
        for i, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
            if self._options.data == "stats":
                self._rows.append((node.type, node.name, side, i, *_statistics(tensor), name))
            else:
                stem = f"{node.name}.{name}" if name and side == "output" else node.name
                file = f"{node.type}.{stem}.{side}.{i}.npy".replace("/", "_")
                atomic_write(self._folder / file, npy_bytes(as_array(tensor)))

    def close(self) -> None:
        """Write the statistics, if they are what is wanted."""
        if self._rows:
            atomic_write(self._folder / "stats.csv", csv_bytes([_COLUMNS, *self._rows]))


def fx_name(value: Value) -> str:
    """The result of an FX node that a value is, as `<node>-<target>.OUTPUT.<number>`; an eager dump
    has a file of that name."""
    attr = value.attrs.get("_fx_tensor_name")
    return "" if attr is None else str(attr.value)


def _statistics(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, dims, least and greatest element and mean; the last three are empty where a tensor
    has no elements or no order."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__, "", "", "", ""
    kind = str(tensor.dtype).removeprefix("torch.")
    numbers = as_array(tensor)
    if not numbers.size or numbers.dtype.kind not in "biuf":
        return kind, list(tensor.shape), "", "", ""
    return kind, list(tensor.shape), numbers.min(), numbers.max(), numbers.mean(dtype=np.float64)


# ---- `fusion_result.json`: which rules, patterns and units graphs were fused by ----

FILE = "fusion_result.json"
AT_EXIT = "1"


class FusionStatistics:
    """What graphs were fused by, in the order in which they were compiled."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._lock = Lock()
        self._waiting = False

    def add(self, graph: str, state: GraphState, units: Iterable[Unit], when: str) -> None:
        """Note a graph; the file is in the current folder now, or `AT_EXIT`."""
        kinds: Counter[str] = Counter(u.kind for u in units if len(u.nodes) > 1)
        entry = {
            "session_and_graph_id": f"0_{graph.rpartition('_')[2]}",
            "graph_fusion": _times(state.matched, state.replaced),
            "ub_fusion": _times(kinds, kinds),
        }
        with self._lock:
            self._entries.append(entry)
            if when != AT_EXIT:
                self.write(os.path.abspath(FILE))
            elif not self._waiting:
                self._waiting = True
                atexit.register(self.write, os.path.abspath(FILE))

    def write(self, path: str) -> None:
        """Write the file; a folder that cannot be written to costs the file only."""
        try:
            atomic_write(path, (json.dumps(self._entries, indent=2) + "\n").encode())
        except RuntimeError as e:
            note(Fallback.CACHE_FILE, f"fusion statistics are not written to {path}", e)


def _times(matched: Mapping[str, int], effective: Mapping[str, int]) -> dict[str, Any]:
    return {
        name: {"match_times": str(matched[name]), "effect_times": str(effective.get(name, 0))}
        for name in sorted(matched)
    }


STATISTICS = FusionStatistics()
"""Those of this process."""
