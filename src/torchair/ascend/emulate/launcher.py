"""`torchair run`: execute a script as Python would, with an emulated NPU if there is no real one.

The script is the main module of the process. What it raises, and how it leaves, is its own affair:
nothing of ours shows in its traceback or changes its exit code.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import io
import os
import platform
import random
import runpy
import sys
from importlib import metadata
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchair.ascend import emulate
from torchair.ascend.emulate.state import STATE
from torchair.ascend.ops import real_package
from torchair.errors import CommandError
from torchair.process import processor
from torchair.torch_private.dynamo import loaded_utils
from torchair.versions import __version__

if TYPE_CHECKING:
    from torchair.explanation.api import Collector


def run_script(script: str, arguments: list[str]) -> int:
    """Execute a script without options of ours."""
    unset = dict.fromkeys(("devices", "seed", "dump", "timeline"))
    flags = dict.fromkeys(("explain", "module"), False)
    return run(argparse.Namespace(script=script, arguments=arguments, **unset, **flags))


def existing(script: str) -> Path:
    """The file of a script; CommandError if there is none."""
    path = Path(script)
    if not path.exists():
        raise CommandError(f"can't open file {script!r}: no such file")
    if path.is_dir():
        raise CommandError(f"can't open file {script!r}: it is a folder")
    return path


def run(options: argparse.Namespace) -> int:
    """Execute the script; the exit code is 0 if it comes to its end."""
    if not options.module:
        existing(options.script)
    _prepare(options)
    if not options.explain:
        _execute(options)
        return 0
    from torchair.explanation.api import Collector
    from torchair.runner import observed

    collector = Collector()
    try:
        with observed(collector):
            _execute(options)
    finally:
        print(explain(collector), file=sys.stderr)
    return 0


def _prepare(options: argparse.Namespace) -> None:
    """Everything that the script finds in place."""
    folders = {"TORCHAIR_DUMP": options.dump, "TORCHAIR_TIMELINE": options.timeline}
    for variable, folder in folders.items():
        if folder is not None:
            os.environ[variable] = os.path.abspath(folder)
    if emulate.install(options.devices):
        importlib.import_module("torch_npu")  # as torch loads the real one by itself
        _follow_processes()
    if options.seed is not None:
        random.seed(options.seed)
        torch.manual_seed(options.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(options.seed % 2**32)


def _execute(options: argparse.Namespace) -> None:
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            path = Path(options.script)
            if not sys.flags.safe_path:
                sys.path[0] = str(path.resolve().parent)
            with io.open_code(str(path.resolve())) as file:
                code = compile(file.read(), str(path), "exec")
            exec(code, _main_module(str(path)).__dict__)
    except BaseException as error:
        _show_own_frames_only(error)
        raise


_replaced: list[Any] = []  # the main module before, whose functions are still running


def _main_module(file: str) -> ModuleType:
    """A new main module. Classes of the script are pickled by that name, and it stays."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=builtins, __cached__=None)
    _replaced.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = module
    return module


def _show_own_frames_only(error: BaseException) -> None:
    """Let an error that ends the process be shown without the frames that started the script."""
    first = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while first is not None and "runpy" in first.tb_frame.f_code.co_filename:
        first = first.tb_next
    show = sys.excepthook

    def hook(
        kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        if value is error:
            show(kind, value.with_traceback(first), first)
        else:
            show(kind, value, traceback)

    sys.excepthook = hook


def _follow_processes() -> None:
    """Let processes that multiprocessing starts afresh have the device too."""
    command_line = spawn.get_command_line

    def with_device(**kwargs: Any) -> list[str]:
        command = list(command_line(**kwargs))
        at = command.index("-c") + 1
        install = f"import torchair.ascend.emulate; torchair.ascend.emulate.install({STATE.count})"
        command[at] = f"{install}; {command[at]}"
        return command

    spawn.get_command_line = with_device


# ---- what was compiled in a process (`--explain`), and what it runs on (`env`) ----


_PACKAGES = ("torch", "llvmlite", "numpy", "protobuf", "transformers")
_VARIABLES = ("TORCHAIR_", "TNG_", "TORCH_COMPILE", "TORCHDYNAMO_", "ASCEND_", "OMP_NUM_THREADS")


def explain(collector: Collector) -> str:
    """Graphs, breaks, fallbacks and compile time of this process so far, then all graphs that were
    seen, step by step."""
    utils = loaded_utils()
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
    lines += [f"    {n} x {reason.strip().splitlines()[0]}" for reason, n in breaks.items()]
    lines.append(f"  fallbacks      {sum(generic.values())} operators without a converter")
    lines += [f"    {count} x {name}" for name, count in sorted(generic.items())]
    return lines


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
    there, reason = torch.cuda.is_available(), emulate.why_not()
    chip = processor() or platform.processor() or platform.machine()
    rows = [("torchair", __version__)]
    rows += [("python", f"{platform.python_version()} ({sys.executable})")]
    rows += [(name, version) for name in _PACKAGES if (version := _version(name)) is not None]
    rows += [
        ("system", platform.platform()),
        ("processor", f"{chip}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"),
        ("vector units", torch.backends.cpu.get_cpu_capability()),
        ("cuda", f"{torch.version.cuda}, {torch.cuda.get_device_name()}" if there else "none"),
        ("torch_npu", real_package() or "not installed"),
        ("emulated npu", f"no: {reason}" if reason else f"possible, {emulate.DEVICES} devices"),
    ]
    shown = sorted(k for k in os.environ if k.startswith(_VARIABLES))
    rows += [(name, os.environ[name]) for name in shown]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
