"""Where the time of one compiled call goes: Dynamo, AOTAutograd, our Python, native code.

Each layer is measured with the one below it replaced by nothing, or entered directly; the parts
are differences of these. Alone a part finds its data in the first cache, together they take it
from each other, so the whole is more than the sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified

import torchair
from common import console, interleaved, table, warn_if_busy
from contestants import torchair_backend
from inside import driver_of, layers_of
from workloads import WORKLOADS

Inputs = tuple[torch.Tensor, ...]


class PlusOne(torch.nn.Module):
    """The smallest model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _plus_one() -> tuple[torch.nn.Module, Inputs]:
    return PlusOne(), (torch.zeros(2, 2),)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Inputs]]] = {
    "x + 1 on 2 x 2": _plus_one,
    "tiny MLP b1, 64 parameters": WORKLOADS["tiny MLP b1"].build,
    "Llama tiny decode": WORKLOADS["Llama tiny decode"].build,
}


def empty_backend(result: torch.Tensor) -> Callable[..., Any]:
    """A backend whose graphs do nothing: what is left is Dynamo."""
    return lambda graph, examples: lambda *args: (result,)


def empty_aot_backend(result: torch.Tensor) -> Callable[..., Any]:
    """AOTAutograd as we use it, around a graph that does nothing."""

    def nothing(args: list[Any]) -> list[torch.Tensor]:
        return [result]

    nothing._boxed_call = True  # type: ignore[attr-defined]

    def backend(graph: Any, examples: Any) -> Any:
        return aot_module_simplified(
            graph,
            list(examples),
            fw_compiler=lambda *_: nothing,
            inference_compiler=lambda *_: nothing,
            keep_inference_input_mutations=True,
        )

    return backend


def depths(model: torch.nn.Module, inputs: Inputs, frozen: bool) -> dict[str, Callable[[], Any]]:
    """The call entered at every depth, from the outside to the native code."""
    result = model(*inputs)

    def compiled(backend: Any) -> Callable[[], Any]:
        made = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        made(*inputs)
        return lambda: made(*inputs)

    layers = layers_of(model, inputs, torchair_backend(frozen))
    boxed, session = layers.boxed, layers.session
    assert boxed is not None and session is not None
    calls = {
        "eager": lambda: model(*inputs),
        "all": compiled(torchair_backend(frozen)),
        "direct": direct(model, inputs, frozen),
        "dynamo": compiled(empty_backend(result)),
        "aot": compiled(empty_aot_backend(result)),
        "boxed": lambda: boxed(layers.arguments),
        "session": lambda: session.run(layers.inputs),
    }
    driver = driver_of(model, inputs, torchair_backend(frozen))
    if driver is not None:
        calls["driver"] = driver
    return calls


def direct(model: torch.nn.Module, inputs: Inputs, frozen: bool) -> Callable[[], Any]:
    """The call without Dynamo and AOTAutograd: torchair.compile."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    made = torchair.compile(model, inputs, config=config)
    for _ in range(3):  # the quick way is there from the third call on
        made(*inputs)
    return lambda: made(*inputs)


def split(times: dict[str, float]) -> dict[str, float]:
    """Seconds of each part."""
    native = times.get("driver", 0.0)
    engine = "checks, outputs, addresses" if native else "checks, steps of torch and native code"
    parts = {
        "Dynamo: guards and frame": times["dynamo"],
        "AOTAutograd: wrapper": times["aot"] - times["dynamo"],
        "ours: arguments and results": times["boxed"] - times["session"],
        f"ours: {engine}": times["session"] - native,
        "native code, with its entry": native,
    }
    return {name: seconds for name, seconds in parts.items() if seconds}


def show(name: str, times: dict[str, float]) -> None:
    """One table."""
    parts = split(times)
    parts["more together than alone"] = times["all"] - sum(parts.values())
    shown = table(f"one call of {name}", ["part", "us", "share"])
    for part, seconds in parts.items():
        shown.add_row(part, f"{seconds * 1e6:.1f}", f"{seconds / times['all']:.0%}")
    shown.add_section()
    whole = {
        "the whole call through torch.compile": times["all"],
        "the whole call through torchair.compile": times["direct"],
        "eager": times["eager"],
    }
    for part, seconds in whole.items():
        shown.add_row(part, f"{seconds * 1e6:.1f}", f"{seconds / times['all']:.0%}")
    console.print(shown)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows, small models")
    parser.add_argument("--frozen", action="store_true", help="with frozen_parameter")
    options = parser.parse_args()
    warn_if_busy()
    small = {name: build for name, build in MODELS.items() if "Llama" not in name}
    for name, build in (small if options.quick else MODELS).items():
        torch._dynamo.reset()
        with console.status(f"{name}: compiling"):
            calls = depths(*build(), options.frozen)
        show(name, interleaved(calls, *((4, 0.01) if options.quick else (20, 0.05))))


if __name__ == "__main__":
    main()
