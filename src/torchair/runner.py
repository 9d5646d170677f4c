"""GmRunner, what AOTAutograd calls: a graph with its profiler label and debug logs; and
observers of compilations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.configs.compiler_config import CompilerConfig
from torchair.log import logger
from torchair.torch_private.dispatch import DisableTorchFunction, is_torch_function_mode_enabled
from torchair.torch_private.profiler import is_profiling
from torchair.trace import Trace, label, reports


class GmRunner:
    """What runs, and the trace of its compilation. Compiled graphs are runners themselves; others
    are wrapped into one."""

    trace: Trace
    enter: Any  # runs a list of arguments: a method of graphs, a function of a wrapper

    def __init__(self, runner: Any, trace: Trace) -> None:
        """`runner` is called with a list of arguments where it has an `entry`, else with them."""
        self._runner, self.trace = runner, trace
        self.enter = getattr(runner, "entry", None) or (lambda args: runner(*args))

    @property
    def runner(self) -> Any:
        """The graph behind it."""
        return self._runner

    def __call__(self, *args: Any) -> Any:
        return self.run(args)

    def run(self, args: Sequence[Any]) -> Any:
        """Run the graph on the arguments of one call."""
        if is_torch_function_mode_enabled():
            # A default device is one: it is meant for tensors of the user, not for our memory.
            with DisableTorchFunction():
                return self.run(args)
        if not is_profiling() and not logger.isEnabledFor(logging.DEBUG):
            return self.enter(args)
        with label("npu_fx_compiler inference"):
            if not logger.isEnabledFor(logging.DEBUG):
                return self.enter(args)
            _log_values("runtime inputs", "  input", args)
            results = self.enter(args)
            _log_values("runtime outputs", "  output", results)
            return results


def _log_values(title: str, word: str, values: Sequence[Any]) -> None:
    logger.debug(title)
    for i, x in enumerate(values):
        logger.debug("%s %s: %s", word, i, _summary(x))


def _summary(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__}({x})"
    return (
        f"Tensor(device={x.device}, size={list(x.shape)}, dtype={x.dtype}, "
        f"contiguous={x.is_contiguous()}, data_ptr={x.data_ptr():#x})"
    )


@dataclass(frozen=True)
class Compilation:
    """One graph that was compiled, for observers."""

    gm: fx.GraphModule  # as AOTAutograd made it
    inputs: Sequence[Any]  # that it was traced with
    config: CompilerConfig
    static: frozenset[int]  # arguments that are parameters
    phase: str  # "forward" or "backward"
    made: Callable[..., Any]  # what it was compiled to
    runner: GmRunner  # what runs it: the graph, or an observer around it


Observer = Callable[[Compilation], GmRunner]
"""Is called with each graph that is compiled, and gives what runs."""


class Observers:
    """Observers of compilations."""

    def __init__(self) -> None:
        self._observers: list[tuple[Observer, bool]] = []  # and whether they want changes of passes

    def of(self, report_path: str | None) -> tuple[list[Observer], bool]:
        """Observers of a graph, and whether changes of passes are kept for them."""
        found, keep = [o for o, _ in self._observers], any(wants for _, wants in self._observers)
        if report_path is None or reports.writer is None:
            return found, keep
        return [*found, reports.writer(report_path)], True

    @contextmanager
    def observed(self, observer: Observer, changes: bool = False) -> Iterator[None]:
        """Add an observer, which may see the `changes` of passes."""
        self._observers.append((observer, changes))
        try:
            yield
        finally:
            self._observers.remove((observer, changes))


compile_observers = Observers()
observed = compile_observers.observed
