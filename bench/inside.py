"""Looks into the engine, for benchmarks only: what a compiled call is made of, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from torchair.codegen.cpu.target import cpu
from torchair.engine.session import TorchNpuGraph

_old_code: list[Any] = []


def kernels() -> int:
    """Kernels that this process has compiled."""
    return len(cpu().library._addresses)


def forget_kernels() -> None:
    """From now on kernels are compiled as in a new process; what is bound keeps its code."""
    _old_code.append(cpu())
    cpu.cache_clear()


def driver_of(
    model: Any, inputs: Sequence[torch.Tensor], backend: Any
) -> Callable[[], None] | None:
    """The native code of a compiled model alone, None where torch does a part of the work.

    It runs on the memory of the model's only call, which is kept; so the model is compiled for
    this and never called again.
    """
    drive = cpu().driver()
    programs: list[int] = []

    def watched(program: int) -> None:
        programs.append(program)
        drive(program)

    seen = mock.Mock(side_effect=TorchNpuGraph.run, name="run")
    with (
        mock.patch.object(cpu(), "driver", lambda: watched),
        mock.patch.object(TorchNpuGraph, "run", lambda *args: seen(*args)),
    ):
        compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        result = compiled(*inputs)
    session = seen.call_args.args[0]
    plan = session.last_plan()
    if plan is None or len(programs) != 1 or any(s.kind != "native" for s in plan.steps):
        return None
    keep = compiled, result, session
    return lambda keep=keep: drive(programs[0])
