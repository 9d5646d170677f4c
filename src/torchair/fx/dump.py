"""Data dumps: the values of a graph as files, by running it node by node or by saving nodes.

Says what to run instead of a compiled graph; knows neither converters nor capture.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import has_side_effect

from torchair.configs.compiler_config import Settings
from torchair.configs.debug_sections import rank_directory
from torchair.configs.options import NPUGRAPH_EX
from torchair.log import logger
from torchair.store import DIRECTORY_MODE, atomic_write, npy_bytes
from torchair.torch_private.dispatch import OpOverload

_SAVE = torch.ops.air.save_tensor.default
_WITHOUT_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

Wanted = Callable[[fx.Node], fx.Node | None]
"""Which node to dump in place of a node, None for no dump; `debug.data_dump.filter` is one."""


def dumping(
    gm: fx.GraphModule,
    name: str,
    settings: Settings,
    convertible: Callable[[Any], Any] = lambda _target: True,
) -> Callable[..., Any]:
    """What runs instead of a compiled graph when `Settings.dumps_instead` says so.

    `convertible` tells of a target whether it has a converter; without one it is not dumped,
    except in the mode `npugraph_ex`, which knows no converters.
    """
    if settings.data_dump_type is None and not settings.run_eagerly:
        logger.warning("data dump is on: %s runs as traced, without compilation", name)
        own = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        save_after_each_node(own, settings.tensor_dump_path)
        return own
    logger.warning("data dump is on: %s runs node by node, without compilation", name)
    root = settings.tensor_dump_path
    if settings.data_dump_type is not None:
        root = rank_directory(settings.data_dump_path or ".")
    choose = settings.data_dump_filter or (lambda node: node)
    everything = settings.mode == NPUGRAPH_EX

    def wanted(node: fx.Node) -> fx.Node | None:
        return choose(node) if everything or convertible(node.target) else None

    return eager_dump(gm, os.path.join(root, name), wanted)


# ---- saving nodes in the graph


def save_after_each_node(gm: fx.GraphModule, directory: str) -> None:
    """Let the graph write each tensor it computes to `<directory>/<node>_device_<d>_<n>.pt`."""
    packet = getattr(torch.ops.npu, "save_npugraph_tensor", None)  # of an NPU stack
    operator = _SAVE if packet is None else packet.default
    has_side_effect(operator)
    for node in list(gm.graph.nodes):
        tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "call_function" or not tensor or node.target is operator:
            continue
        with gm.graph.inserting_after(node):
            gm.graph.call_function(operator, (node,), {"save_path": f"{directory}/{node.name}.pt"})
    gm.recompile()


# ---- running node by node


def eager_dump(gm: fx.GraphModule, directory: str, wanted: Wanted) -> Callable[..., Any]:
    """A graph that is interpreted, with the arguments and results of its nodes as numpy files.

    They go to `<path>/worldsize<W>_global_rank<R>/<graph>/<step>/`, where `step` counts calls.
    """
    steps = itertools.count()

    def run(*args: Any) -> Any:
        folder = os.path.join(directory, str(next(steps)))
        os.makedirs(folder, DIRECTORY_MODE, exist_ok=True)
        return _Dumper(gm, folder, wanted).run(*args)

    return run


class _Dumper(fx.Interpreter):
    """One run of a graph."""

    def __init__(self, gm: fx.GraphModule, folder: str, wanted: Wanted) -> None:
        super().__init__(gm)
        self._folder, self._wanted = folder, wanted

    def run_node(self, n: fx.Node) -> Any:
        shown = self._wanted(n) if n.op == "call_function" else None
        if shown is None:
            return super().run_node(n)
        stem = f"{self._folder}/{shown.name}-{_target_name(shown)}"
        arguments, _ = self.fetch_args_kwargs_from_env(n)
        _write_all(f"{stem}.INPUT", arguments)  # before the node can change them
        result = super().run_node(n)
        _write_all(f"{stem}.OUTPUT", result if isinstance(result, tuple | list) else (result,))
        return result


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target)).replace("/", "_")


def _write_all(stem: str, values: Sequence[Any]) -> None:
    moment = datetime.now(UTC).strftime("%Y%m%d%H%M%S%f")
    for i, value in enumerate(values):
        if isinstance(value, list | tuple) and any(isinstance(x, torch.Tensor) for x in value):
            for j, element in enumerate(value):
                _write(f"{stem}.{i}.{j}.{moment}.npy", element)
        else:
            _write(f"{stem}.{i}.{moment}.npy", value)


def _write(path: str, value: Any) -> None:
    atomic_write(path, npy_bytes(as_array(value)))


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """A value of a graph as a numpy array; text for what is neither tensor nor number."""
    if not isinstance(value, torch.Tensor):
        items = value if isinstance(value, list | tuple) else (value,)
        fits = all(isinstance(item, bool | int | float | complex | str) for item in items)
        return np.array(value if fits else str(value))
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    wide = _WITHOUT_NUMPY.get(plain.dtype, plain.dtype)
    if plain.is_floating_point() and plain.element_size() == 1:
        wide = torch.float32
    return plain.to(wide).numpy()
