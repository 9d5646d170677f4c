"""Where our part of compilation goes, by stage, for a Llama-style decoder of 32 layers.

The AOT graph is captured once; then our stages run alone. Sizes of tensors do not matter here.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch._functorch.aot_autograd import aot_module_simplified

from common import console, table
from inside import forget_kernels
from models import Llama, LlamaConfig, build, llama_inputs
from torchair.codegen.kernel_cache import caching
from torchair.concrete import GeConcreteGraph
from torchair.configs.compiler_config import CompilerConfig, Settings
from torchair.convert import GraphConverter
from torchair.devices import device_of
from torchair.fx.passes import FX_KIND, FX_PASSES
from torchair.operators import infer
from torchair.passes import FxContext, PassRunner
from torchair.trace import Trace

TARGET = 1.5


def capture(layers: int) -> tuple[Any, list[Any]]:
    """The AOT graph and its example inputs."""
    kept: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        kept.append((copy.deepcopy(gm), list(inputs)))
        return gm.forward

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            gm, inputs, fw_compiler=keep, keep_inference_input_mutations=True
        )

    config = LlamaConfig(layers=layers, dim=64, heads=8, kv_heads=4, head_dim=8, ffn=128)
    with torch.no_grad():
        compiled = torch.compile(build(Llama, config), backend=backend, dynamic=False)
        compiled(*llama_inputs(config, 1, start=3))
    return kept[0]


def stages(gm: Any, inputs: list[Any]) -> dict[str, float]:
    """Seconds of every stage, once through."""
    config = CompilerConfig()
    settings, trace, times = Settings.of(config), Trace(), {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        times[name] = time.perf_counter() - start
        return result

    runner = PassRunner(FX_KIND, settings, trace)
    timed("FX passes", lambda: runner.run(FX_PASSES, gm, FxContext(inputs, config)))
    conversion = timed("FX to GE", lambda: GraphConverter(gm, "graph_1", infer).run(*inputs))
    graph = GeConcreteGraph(conversion, settings, device_of(inputs))
    timed("GE passes", lambda: graph.optimize_graph_without_runtime(*inputs, observer=trace))
    arguments = [_filled(x) for x in inputs]
    timed("engine: rules, order, fusion", graph.compile)
    forget_kernels()
    with caching(False):
        timed("first call: plan, native code", lambda: graph(*arguments))
    times["nodes"] = len(gm.graph.nodes)
    return times


def _filled(x: Any) -> Any:
    """An argument for a traced one."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.zeros(x.shape, dtype=x.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="of the decoder")
    parser.add_argument("--rounds", type=int, default=5, help="the medians are of as many")
    options = parser.parse_args()
    console.print("capturing the graph", style="dim")
    gm, inputs = capture(options.layers)
    steps = track(range(options.rounds), "converting", console=console, transient=True)
    rounds = [stages(copy.deepcopy(gm), inputs) for _ in steps]
    shown = table(
        f"{options.layers}-layer Llama-style graph, {rounds[0]['nodes']:.0f} FX nodes",
        ["stage", "ms"],
    )
    medians = {k: statistics.median(r[k] for r in rounds) for k in rounds[0] if k != "nodes"}
    for name, seconds in medians.items():
        shown.add_row(name, f"{seconds * 1e3:.0f}")
    shown.add_row("all", f"{sum(medians.values()) * 1e3:.0f}")
    console.print(shown)
    verdict = "met" if medians["FX to GE"] < TARGET else "missed"
    console.print(f"FX to GE: {medians['FX to GE']:.2f} s (target under {TARGET} s: {verdict})")


if __name__ == "__main__":
    main()
