"""What a replay costs on the CPU: our part of a call above the bare kernels, and a small model
against eager, inductor and our other mode, interleaved."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchair
from common import console, duration, has_inductor, interleaved, ratio, table, warn_if_busy
from contestants import EAGER, OURS, PEERS
from gpu import CAPTURED, captured_config
from workloads import WORKLOADS

GOAL = 3e-6  # seconds of a call that are ours
SMALL = ((2, 2), (64, 64))


def parts_of_a_call(*shape: int) -> dict[str, Callable[[], Any]]:
    """A graph of one addition, entered where AOTAutograd does and where the kernels begin."""
    x, y = torch.randn(shape), torch.randn(shape)
    traced = make_fx(lambda a, b: (a + b,), tracing_mode="fake")(x, y)
    call = torchair.get_compiler(captured_config())(traced, [x, y]).run
    args = [x, y]
    call(args)
    graph = call.__self__.runner.graph
    (captured,) = graph.captured.values()
    return {
        "eager": lambda: torch.add(x, y),
        "AclConcreteGraph.run": lambda: graph.call(args),
        "bare kernels": captured.recording.replay,
    }


def show_parts(quick: bool) -> None:
    """The cost of a call that is neither kernel nor Dynamo."""
    shown = table(
        "one addition, without Dynamo and AOTAutograd",
        ["size", "eager", "our call", "kernels alone", "ours", "goal 3 us"],
    )
    for shape in SMALL:
        calls = parts_of_a_call(*shape)
        times = interleaved(calls, *((2, 0.02) if quick else (20, 0.05)))
        ours = times["AclConcreteGraph.run"] - times["bare kernels"]
        verdict = "met" if ours <= GOAL else "missed"
        cells = [duration(t) for t in times.values()]
        shown.add_row(" x ".join(map(str, shape)), *cells, duration(ours), verdict)
    console.print(shown)


def show_model(quick: bool, inductor: bool) -> None:
    """A small model through torch.compile."""
    torch._dynamo.reset()
    contestants = [EAGER, *([PEERS["default"]] if inductor else []), *OURS, *CAPTURED]
    model, inputs = WORKLOADS["tiny MLP b1"].build()
    calls = {}
    for one in contestants:
        with console.status(f"preparing {one.name}"):
            calls[one.name] = one.prepare(model, inputs)
    times = interleaved(calls, *((2, 0.02) if quick else (16, 0.08)))
    against = [c.name for c in contestants if not c.ours]
    shown = table(
        "tiny MLP, one row, through torch.compile",
        ["", "a call", *(f"against {a}" for a in against)],
    )
    for one in contestants:
        shown.add_row(
            one.name, duration(times[one.name]), *(ratio(times, one.name, a) for a in against)
        )
    console.print(shown)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    parser.add_argument("--no-inductor", action="store_true", help="it takes long to compile")
    options = parser.parse_args()
    warn_if_busy()
    show_parts(options.quick)
    show_model(options.quick, has_inductor() and not options.no_inductor)


if __name__ == "__main__":
    main()
