"""Where our part of compilation goes, by stage, for a 32-layer Llama-style decoder.

The AOT graph is captured once; then our stages run alone. Sizes of tensors do not matter here.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch._functorch.aot_autograd import aot_module_simplified

from common import console, table
from models import Llama, LlamaConfig, build, llama_inputs
from torchair.catalog import infer
from torchair.concrete import GeConcreteGraph
from torchair.configs.compiler_config import CompilerConfig
from torchair.configs.settings import Settings
from torchair.convert import GraphConverter
from torchair.devices import device_of
from torchair.fx.passes import FX_KIND, FX_PASSES
from torchair.passes import PassRunner
from torchair.trace import Trace

TARGET = 1.5
CONFIG = LlamaConfig(layers=32, dim=64, heads=8, kv_heads=4, head_dim=8, ffn=128)


def capture() -> tuple[Any, list[Any]]:
    """The AOT graph and its example inputs."""
    kept: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        kept.append((copy.deepcopy(gm), list(inputs)))
        return gm.forward

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            gm, inputs, fw_compiler=keep, keep_inference_input_mutations=True
        )

    with torch.no_grad():
        compiled = torch.compile(build(Llama, CONFIG), backend=backend, dynamic=False)
        compiled(*llama_inputs(CONFIG, 1, start=3))
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
    timed("FX passes", lambda: runner.run(FX_PASSES, gm, inputs, config))
    conversion = timed("FX to GE", lambda: GraphConverter(gm, "graph_1", infer).run(*inputs))
    graph = GeConcreteGraph(conversion, settings, device_of(inputs))
    timed("GE passes", lambda: graph.optimize_graph_without_runtime(trace))
    timed("engine: rules, order, plan", graph.compile)
    times["nodes"] = len(gm.graph.nodes)
    return times


def main() -> None:
    console.print("capturing the graph", style="dim")
    gm, inputs = capture()
    rounds = [stages(copy.deepcopy(gm), inputs) for _ in track(range(5), "converting")]
    shown = table(
        f"32-layer Llama-style graph, {rounds[0]['nodes']:.0f} FX nodes", ["stage", "ms"]
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
