"""Texts about a process: what was compiled in it (`--explain`), and what it runs on (`env`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

from torchair import emulate
from torchair.emulate.finder import real_package

if TYPE_CHECKING:
    from torchair.explanation.api import Collector

_PACKAGES = ("torchair", "torch", "llvmlite", "numpy", "protobuf", "transformers")
_VARIABLES = ("TORCHAIR_", "TNG_", "TORCH_COMPILE", "TORCHDYNAMO_", "ASCEND_", "OMP_NUM_THREADS")


def explain(collector: Collector) -> str:
    """Graphs, breaks, fallbacks and compile time of this process so far, then all graphs that were
    seen, step by step."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not (utils.counters or collector.graphs):
        return "torchair: nothing was compiled"
    lines = ["torchair: what was compiled", *_graphs(utils.counters), *_times(utils)]
    return "\n".join([*lines, str(collector.explanation())])


def _graphs(counters: Any) -> list[str]:
    ours, breaks = counters["torchair"], counters["graph_break"]
    generic, captures = counters["torchair_generic"], counters["npugraph_ex"]
    captured = sum(n for name, n in captures.items() if name.startswith("captured_"))
    frames = counters["stats"]["unique_graphs"]
    lines = [
        f"  graphs         {frames} by Dynamo; in the engine {ours['static']} of fixed sizes, "
        f"{ours['dynamic']} of varying sizes; {captured} captures",
        f"  graph breaks   {sum(breaks.values())}",
    ]
    lines += [f"    {count} x {_first_line(reason)}" for reason, count in breaks.items()]
    lines.append(f"  fallbacks      {sum(generic.values())} operators without a converter")
    lines += [f"    {count} x {name}" for name, count in sorted(generic.items())]
    return lines


def _first_line(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[0] if lines else ""


def _times(utils: Any) -> list[str]:
    spent = utils.calculate_time_spent()
    whole = spent.get("total_wall_time", 0.0)
    behind = spent.get("backend_compile", 0.0)
    engine = utils.counters["torchair"]["engine_microseconds"] / 1e6
    return [
        f"  compile time   {whole + engine:.2f} s: tracing {whole - behind:.2f} s, "
        f"AOTAutograd and conversion {behind:.2f} s, engine {engine:.2f} s"
    ]


def environment() -> str:
    """What a bug report should say about this machine and this installation."""
    rows = [("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(name, version) for name in _PACKAGES if (version := _version(name)) is not None]
    rows += [
        ("system", platform.platform()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        ("vector units", torch.backends.cpu.get_cpu_capability()),
        ("cuda", _cuda()),
        ("torch_npu", real_package() or "not installed"),
        ("emulated npu", _emulation()),
    ]
    shown = sorted(k for k in os.environ if k.startswith(_VARIABLES))
    rows += [(name, os.environ[name]) for name in shown]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        named = []
    return named[0] if named else platform.processor() or platform.machine()


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "none"
    return f"{torch.version.cuda}, {torch.cuda.get_device_name()}"


def _emulation() -> str:
    reason = emulate.why_not()
    return f"no: {reason}" if reason is not None else f"possible, {emulate.DEVICES} devices"
