"""The main job on one page: compile a small Llama-style decoder, check it, look at it, time it."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import torchair
from models import Llama, LlamaConfig, build, llama_inputs

console = Console(width=110)
CONFIG = LlamaConfig(layers=2, dim=128, heads=8, kv_heads=4, head_dim=16, ffn=256, vocab=512)
STEPS = 8


def compiled(model: torch.nn.Module, dumps: Path) -> Any:
    """The model in max-autotune mode, leaving its graphs in `dumps`."""
    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    config.debug.graph_dump.type = "py"
    config.debug.graph_dump.path = str(dumps)
    return torch.compile(
        model,
        backend=torchair.get_npu_backend(compiler_config=config),
        dynamic=False,
        fullgraph=True,
    )


def decode(model: Any, steps: int) -> list[torch.Tensor]:
    """Logits of some decode steps; the model's cache grows with each."""
    return [model(*llama_inputs(CONFIG, 1, start=i)) for i in range(steps)]


def time_both(eager: Any, fast: Any, windows: int = 10, calls: int = 20) -> tuple[float, float]:
    """Microseconds per decode step: the two take turns, the best window's median counts."""
    inputs = llama_inputs(CONFIG, 1, start=STEPS)
    best = [float("inf"), float("inf")]
    for _ in range(windows):
        for i, model in enumerate((eager, fast)):
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                model(*inputs)
                times.append(time.perf_counter() - start)
            best[i] = min(best[i], statistics.median(times) * 1e6)
    return best[0], best[1]


@torch.no_grad()
def main() -> None:
    dumps = Path(tempfile.mkdtemp(prefix="torchair_demo_"))
    model = build(Llama, CONFIG)
    eager = copy.deepcopy(model)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling a Llama-style decoder with KV cache", total=None)
        fast = compiled(model, dumps)
        start = time.perf_counter()
        got = decode(fast, 1)
        seconds = time.perf_counter() - start
        progress.update(task, description=f"{STEPS} decode steps, eager beside compiled")
        got += [fast(*llama_inputs(CONFIG, 1, start=i)) for i in range(1, STEPS)]
        expected = decode(eager, STEPS)
        progress.update(task, description="timing")
        times = time_both(eager, fast)
    worst = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    torch.testing.assert_close(got, expected)
    console.print(
        f"compiled in {seconds:.1f} s, {STEPS} steps agree with eager, "
        f"largest difference {worst:.1e}"
    )
    console.print("graphs, as Python programs that rebuild them:")
    for path in sorted(dumps.iterdir()):
        console.print(f"  {path}", soft_wrap=True)
    table = Table(title="one decode step", title_justify="left")
    for name in ("", "microseconds", "against eager"):
        table.add_column(name, justify="right")
    table.add_row("eager", f"{times[0]:.0f}", "1.00x")
    table.add_row("compiled", f"{times[1]:.0f}", f"{times[0] / times[1]:.2f}x")
    console.print(table)


if __name__ == "__main__":
    main()
