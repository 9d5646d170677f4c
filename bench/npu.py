"""What the emulated device costs: the same model on cpu tensors and on npu tensors, interleaved.

A compiled graph runs on the same engine either way; what is compared is the way in and out.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

import torchair
from common import console, duration, interleaved, table, warn_if_busy
from torchair import emulate
from workloads import chosen

MODES = ("eager", "max-autotune", "reduce-overhead")


def prepared(model: torch.nn.Module, inputs: tuple[Any, ...], mode: str) -> Callable[[], Any]:
    """A call of the model, its first call done."""
    fast: Any = model
    if mode != "eager":
        config = torchair.CompilerConfig()
        config.mode = mode
        backend = torchair.get_npu_backend(compiler_config=config)
        fast = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    fast(*inputs)
    return lambda: fast(*inputs)


def contest(name: str, mode: str, quick: bool) -> tuple[float, float]:
    """Seconds a call takes on cpu tensors and on npu tensors."""
    torch._dynamo.reset()
    model, inputs = chosen(name)[name].build()
    there = copy.deepcopy(model).npu(), tuple(x.npu() for x in inputs)
    with console.status(f"{name}: preparing {mode}"):
        calls = {"cpu": prepared(model, inputs, mode), "npu": prepared(*there, mode)}
    times = interleaved(calls, *((2, 0.03) if quick else (12, 0.2)))
    return times["cpu"], times["npu"]


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        metavar="NAME",
        default="Llama tiny decode",
        help="workloads whose name contains this",
    )
    parser.add_argument("--mode", choices=MODES, help="one mode, all if not given")
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    options = arguments()
    if not emulate.install():
        raise SystemExit(f"nothing is emulated here: {emulate.why_not()}")
    warn_if_busy()
    shown = table("cost of the emulated device", ["workload", "mode", "cpu", "npu", "npu / cpu"])
    for name in chosen(options.only):
        for mode in [options.mode] if options.mode else MODES:
            cpu, npu = contest(name, mode, options.quick)
            shown.add_row(name, mode, duration(cpu), duration(npu), f"{npu / cpu:.3f}")
    console.print(shown)


if __name__ == "__main__":
    main()
