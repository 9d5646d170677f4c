"""Prints, as JSON, which files of torchair take part in compiling and calling a Linear, each with
the number of its functions that run.

Counted are functions that run between the first call of
`torch.compile(nn.Linear(16, 16), backend="torchair")` under `no_grad` and the end of the second.
Functions that run because a module is being imported do not count: bodies, decorators and
registrations are not on the way of the Linear. Neither do records without functions of their own.
With the argument `cuda`, those that plan the graph of such a Linear for a GPU and write its PTX.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

import torchair

HOME = f"{Path(torchair.__file__).parent}/"


def importing(frame: FrameType | None) -> bool:
    """Whether a frame was entered by the import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def functions_called(work: Callable[[], object]) -> dict[str, int]:
    """How many functions of each file run, by path below the package."""
    found: dict[str, set[CodeType]] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOME):
            return
        known = found.get(code.co_filename, ())
        if code not in known and not importing(frame):
            found.setdefault(code.co_filename, set()).add(code)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {path.removeprefix(HOME): len(codes) for path, codes in sorted(found.items())}


def on_cpu() -> dict[str, int]:
    """Files of two calls."""
    compiled = torch.compile(torch.nn.Linear(16, 16), backend="torchair")
    x = torch.randn(4, 16)

    def work() -> None:
        with torch.no_grad():
            compiled(x)
            compiled(x)

    return functions_called(work)


def on_cuda() -> dict[str, int]:
    """Files that plan a Linear of 1024 features and one row for a GPU, and write its text."""
    from torchair.codegen.cuda.jit import describe
    from torchair.engine.inspect.dry_run import dry_run
    from torchair.pipeline import NpuFxCompiler

    made: Any = []

    def compiler(gm: Any, inputs: Any) -> Any:
        made.append(NpuFxCompiler()(gm, inputs))
        return made[0]

    layer = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(layer, backend=aot_autograd(fw_compiler=compiler))(
            torch.randn(1, 1024, dtype=torch.bfloat16)
        )
    session = made[0].runner.session
    for node in session.graph.nodes:  # as if the model were on a GPU
        for value in node.outputs:
            value.device_type = "NPU"

    def work() -> None:
        run = dry_run(session.graph, describe((9, 0), 132), session.loaded.state.assigned)
        assert len(run.launches) == 1 and run.ptx(run.launches[0])

    return functions_called(work)


if __name__ == "__main__":
    print(json.dumps(on_cuda() if sys.argv[1:] == ["cuda"] else on_cpu()))
