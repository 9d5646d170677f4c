"""GmRunner, what AOTAutograd calls: the compiled graph with its profiler label and debug logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.log import logger
from torchair.trace import Trace, label


class GmRunner:
    """A compiled graph and the trace of its compilation."""

    def __init__(self, runner: Callable[..., Any], trace: Trace) -> None:
        self.runner = runner
        self.trace = trace
        self._run = getattr(runner, "entry", None) or (lambda args: runner(*args))

    def __call__(self, *args: Any) -> Any:
        return self.run(args)

    def run(self, args: Sequence[Any]) -> Any:
        """Run the graph on the arguments of one call."""
        if torch._C._is_torch_function_mode_enabled():
            # A default device is one: it is meant for tensors of the user, not for our memory.
            with torch._C.DisableTorchFunction():
                return self.run(args)
        if not _watched() and not logger.isEnabledFor(logging.DEBUG):
            return self._run(args)
        with label("npu_fx_compiler inference"):
            if not logger.isEnabledFor(logging.DEBUG):
                return self._run(args)
            _log_values("runtime inputs", "  input", args)
            results = self._run(args)
            _log_values("runtime outputs", "  output", results)
            return results


def _watched() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


def _log_values(head: str, word: str, values: Sequence[Any]) -> None:
    logger.debug(head)
    for i, x in enumerate(values):
        logger.debug("%s %s: %s", word, i, _summary(x))


def _summary(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__}({x})"
    return (
        f"Tensor(device={x.device}, size={list(x.shape)}, dtype={x.dtype}, "
        f"contiguous={x.is_contiguous()}, data_ptr={x.data_ptr():#x})"
    )
