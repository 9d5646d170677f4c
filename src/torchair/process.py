"""The process we run in: imports that are waited for, others that work with it, its garbage
collection, progress on its terminal. Imports nothing of torchair.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import get_ident
from types import ModuleType
from typing import Any, Self

from torchair.locks import Lock, in_child

# ---- doing something when a module is imported, without importing it


Hook = Callable[[ModuleType], None]


def when_imported(hooks: Mapping[str, Hook]) -> None:
    """Call each hook with its module: now if that is there, else when it has been imported."""
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
    waiting = {name: hook for name, hook in hooks.items() if name not in sys.modules}
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


class _AfterImport(MetaPathFinder, Loader):
    """Calls a function on a module when it has been imported, and steps aside."""

    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks
        self._loaders: dict[str, Loader] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._hooks or name in self._loaders:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        loader = self._loaders[name]
        module.__loader__ = loader
        assert module.__spec__ is not None
        module.__spec__.loader = loader
        loader.exec_module(module)
        self._hooks[name](module)


# ---- which of several processes this is, and what it runs on


def has_interpreter_lock() -> bool:
    """Whether one thread at a time runs Python code, as all of this package takes for granted."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def world() -> tuple[int, int] | None:
    """How many processes work together, and the number of this one; None where it is alone. Looked
    up, not imported: without torch.distributed there is only this one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size()), int(distributed.get_rank())


class LoadMeter:
    """Cores that other processes keep busy, from entering it on: what is timed meanwhile takes
    longer than it has to. 0 where the system does not tell."""

    def __enter__(self) -> Self:
        self._begun = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        began, ended = self._begun, self._now()
        seconds = ended[0] - began[0]
        if began[1] is not None and ended[1] is not None and seconds > 0:
            mine = ended[2] - began[2]
            self.others = max((ended[1] - began[1] - mine) / seconds, 0.0)

    def __init__(self) -> None:
        self.others = 0.0

    def _now(self) -> tuple[float, float | None, float]:
        """The time, seconds that all cores were busy, and those of this process."""
        return time.perf_counter(), _busy_seconds(), time.process_time()


def _busy_seconds() -> float | None:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            words = file.readline().split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *rest = (int(word) for word in words[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def processor() -> str | None:
    """What the system calls the processor, None where it does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        return None
    return names[0] if names else None


# ---- work during which no garbage is collected


_lock = Lock()
_inside: list[int] = []  # threads
_was_enabled = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Compiling makes many objects that live, and a collection in its midst looks at all that
    Dynamo made before. During a capture one may destroy objects of the device, which is an error
    there. Several threads may be inside; the last one to leave switches collection on."""
    global _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside.append(get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(get_ident())
            if not _inside and _was_enabled:
                gc.enable()


@in_child
def _leave_others() -> None:
    """The other threads that were inside do not exist any more."""
    if _inside:
        _inside[:] = [thread for thread in _inside if thread == get_ident()]
        if not _inside and _was_enabled:
            gc.enable()


# ---- a line about work that takes longer than two seconds, on a terminal


_PATIENCE = 2.0  # seconds


class Steps:
    """Shows on a terminal which step of some work is being done, once that has taken a while; of
    so many steps in `total`, how many are done and how long the rest will take."""

    def __init__(self, title: str, total: int | None = None, show: bool | None = None) -> None:
        """`show` is for terminals, unless told otherwise."""
        self._title, self._total = title, total
        self._show = sys.stderr.isatty() if show is None else show
        self._begun = time.perf_counter()
        self._shown: Any = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def next(self, what: str) -> None:
        """The next step begins."""
        self.count += 1
        if not self._show or time.perf_counter() - self._begun < _PATIENCE:
            return
        if self._shown is None:
            self._shown = self._started()
        step = f"step {self.count}, " if self._total is None else ""
        text = f"{self._title}: {step}{what}"
        self._shown.update(self._shown.task_ids[0], completed=self.count - 1, description=text)

    def _started(self) -> Any:
        from rich import progress
        from rich.console import Console

        rest = (progress.BarColumn(), progress.TimeRemainingColumn())
        columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"))
        shown = progress.Progress(
            *columns, *(rest if self._total else ()), console=Console(stderr=True), transient=True
        )
        shown.add_task(self._title, total=self._total)
        shown.start()
        return shown

    def __exit__(self, *_error: Any) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
