"""Where work leaves traces: pass timings, labels of profiles, the TORCH_COMPILE_DEBUG directory."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from torchair.flags import Flags
from torchair.log import (
    TorchairLogger,
    add_debug_file,
    follow_environment,
    logger,
    npugraph_ex_logger,
)
from torchair.process import world
from torchair.store import atomic_write
from torchair.structured import current_compile_id, stage, within
from torchair.torch_private import dynamo
from torchair.torch_private.logs import artifact_logger
from torchair.torch_private.profiler import is_profiling

T = TypeVar("T")


class Reports:
    """Writer of the report of a graph at a path; set by the package, which knows all layers."""

    writer: Callable[[str], Any] | None = None


reports = Reports()


class Stopwatch:
    """Calls the stages of a graph one after the other, and knows how long each took."""

    def __init__(self, graph: str) -> None:
        self._graph = graph
        self.microseconds: list[float] = []

    def __call__(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        with stage(name, self._graph):
            result = function(*arguments)
        self.microseconds.append((time.perf_counter() - start) * 1e6)
        return result


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool


@dataclass(frozen=True)
class Change(PassRecord):
    """What it made of a graph: the lines that differ, as in a unified difference."""

    kind: str  # of graph: "fx" or "ge"
    about: str  # what the pass says of itself
    lines: tuple[str, ...]


@dataclass
class Trace:
    """Records of one compilation, and its debug directory when that is switched on."""

    phase: str = "forward"
    directory: Path | None = None
    records: list[PassRecord] = field(default_factory=list)
    most: int | None = None  # passes that may run, to bisect for the wrong one
    changes: list[Change] | None = None  # what passes changed, if that is asked for

    def __post_init__(self) -> None:
        self._count = itertools.count()
        self._compile_id = current_compile_id()

    def within(self) -> AbstractContextManager[Any]:
        """A block that belongs to the compilation this trace was made in."""
        return within(self._compile_id)

    def write(self, what: str, kind: str, text: str) -> None:
        """One numbered file of this phase, `NNN_aot_<phase>_<what>.<kind>`."""
        if self.directory is None:
            return
        name = f"{next(self._count):03d}_aot_{self.phase}_{what}.{kind}"
        atomic_write(self.directory / self.phase / name, text.encode())

    def show_program(self, name: str, render: Callable[[], str]) -> None:
        """Show a generated program: in a file that only its owner may change, in our log at DEBUG,
        and with `TORCH_LOGS=output_code`."""
        torchs = artifact_logger("torch.torchair", "output_code")
        logs = [log for log in (logger, torchs) if log.isEnabledFor(logging.DEBUG)]
        if not logs and not self.writes:
            return
        text = render()
        if self.directory is not None:
            atomic_write(self.directory / self.phase / "output_code.py", text.encode(), mode=0o600)
        for log in logs:
            log.debug("Codegen for graph %s:\n%s", name, text)

    @property
    def full(self) -> bool:
        """Whether no further pass may run."""
        return self.most is not None and len(self.records) >= self.most

    @property
    def writes(self) -> bool:
        """Whether files are wanted at all."""
        return self.directory is not None


@dataclass
class FolderCounts:
    """The number of the latest folder of each kind, -1 before the first."""

    model_cnt: int = -1
    compile_fx_cnt: int = -1

    def next(self, kind: Literal["model", "compile"]) -> int:
        """The number of a new folder."""
        name = "model_cnt" if kind == "model" else "compile_fx_cnt"
        setattr(self, name, getattr(self, name) + 1)
        return int(getattr(self, name))


FOLDERS = {ours.name: FolderCounts() for ours in (logger, npugraph_ex_logger)}
"""What each surface has written, by the name of its logger."""
torchair_folders, npugraph_ex_folders = FOLDERS.values()


def model_directory(
    speaker: TorchairLogger = logger, kind: Literal["model", "compile"] = "model"
) -> Path | None:
    """A new `<kind>__<k>` folder in torch's debug directory, None when debugging is off."""
    return numbered_directory(speaker, kind) if Flags.read().compile_debug else None


def numbered_directory(
    speaker: TorchairLogger = logger, kind: Literal["model", "compile"] = "model"
) -> Path:
    """A new `<kind>__<k>` folder in torch's debug directory, whether debugging is on or not."""
    return debug_root(speaker) / f"{kind}__{FOLDERS[speaker.name].next(kind)}"


def debug_root(speaker: TorchairLogger = logger) -> Path:
    """The folder of torch's debug run directory that is named after a logger."""
    together = world()
    base = dynamo.get_debug_dir() + ("" if together is None else f"-rank_{together[1]}")
    return Path(base) / speaker.name


def label(name: str) -> AbstractContextManager[Any]:
    """A profiler label, free of cost when no profiler runs."""
    if is_profiling():
        return torch.autograd.profiler.record_function(name)
    return nullcontext()


def start_debug_log(speaker: TorchairLogger = logger) -> None:
    """Log as the environment asks for, and into `debug.log` too when debugging is on."""
    follow_environment()
    if Flags.read().compile_debug:
        root = debug_root(speaker)
        root.mkdir(parents=True, exist_ok=True)
        add_debug_file(str(root / "debug.log"), speaker)
