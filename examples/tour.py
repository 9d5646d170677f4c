"""One small model through every stage of the compiler, each stage as text.

Run it: `python examples/tour.py`. What it prints is explained, piece by piece, in docs/tour.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified

from torchair.codegen.program import Allocation
from torchair.configs.compiler_config import CompilerConfig
from torchair.engine.plan.records import Plan
from torchair.operators import infer
from torchair.pipeline import NpuFxCompiler
from torchair.runner import GmRunner
from torchair.serde import canonical_text, load, same_graph
from torchair.trace import PassRecord, Trace


class Block(nn.Module):
    """Two linear layers, a residual, a slice that does nothing, and a counter updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        h = torch.relu(self.up(x[:]))
        return x + self.down(h)


def compiled(model: nn.Module, folder: Path, *, dynamic: bool) -> tuple[Any, list[GmRunner]]:
    """The model compiled as by `get_npu_backend()`; keeps hold of what runs, and of its files."""
    config = CompilerConfig()
    config.debug.graph_dump.type = "py"  # the form of the GE graphs in the trace files
    config.debug.graph_dump.path = str(folder)
    runners: list[GmRunner] = []

    def compile_graph(gm: Any, inputs: Any) -> GmRunner:
        runners.append(NpuFxCompiler(config, Trace("forward", folder))(gm, inputs))
        return runners[-1]

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            gm, inputs, fw_compiler=compile_graph, keep_inference_input_mutations=True
        )

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=dynamic), runners


def show(title: str, text: str = "") -> None:
    print(f"\n== {title}\n")
    if text:
        print(text.rstrip("\n"))


def body(text: str) -> str:
    """A py dump without its import lines."""
    return text.split("\n\n", 1)[1]


def show_passes(records: list[PassRecord]) -> None:
    for r in records:
        change = f"{r.nodes_before} -> {r.nodes_after} nodes" if r.changed else "-"
        print(f"  {r.name:40s} {change}")


def show_steps(plan: Plan) -> None:
    print(f"{'step':6s}{'kind':8s}{'node':18s}{'reads':14s}writes")
    for i, step in enumerate(plan.steps):
        reads = " ".join("-" if a is None else str(a) for a in step.args)
        writes = " ".join(str(o) for o in step.outs)
        print(f"{i:<6d}{step.kind:8s}{step.node.name:18s}{reads:14s}{writes}")


def show_memory(plan: Plan) -> None:
    print(f"{'slot':6s}{'kind':8s}{'dims':10s}{'bytes':7s}{'steps':7s}where")
    for r in plan.allocations:
        dims = str(list(r.meta.shape))
        steps = f"{r.first}-{r.last}"
        print(f"{r.slot:<6d}{r.kind:8s}{dims:10s}{r.size:<7d}{steps:7s}{place(r)}")
    print(f"arena {plan.arena_size} bytes; the most alive at one step is {plan.arena_floor}")


def place(allocation: Allocation) -> str:
    """Where a piece of memory is, in words."""
    return {
        "input": "the caller's tensor",
        "const": "kept with the plan",
        "arena": f"arena + {allocation.offset}",
        "fresh": "allocated in each call, leaves as a result",
        "tied": f"the memory of slot {allocation.tied_to}",
        "torch": "whatever the kernel returns",
    }[allocation.kind]


def static_tour(folder: Path) -> None:
    """Everything, for inputs of one size."""
    model = Block().eval()
    call, runners = compiled(model, folder, dynamic=False)
    x = torch.randn(2, 4)
    with torch.no_grad():
        got = call(x)
        assert torch.allclose(got, x + model.down(torch.relu(model.up(x))), atol=1e-6)
    assert model.calls.item() == 1
    (runner,) = runners
    graph: Any = runner.runner

    def written(what: str) -> str:
        (file,) = (folder / "forward").glob(f"*_aot_forward_{what}.*")
        return file.read_text()

    show("1 the FX graph that AOTAutograd hands over", written("graph"))
    show("2 passes over FX and GE graphs before the first call")
    show_passes(runner.trace.records)
    show("3 the FX graph after optimize_noop_ops", written("graph_after_optimize_noop_ops"))
    show("4 the original GE graph", body(written("original_ge_graph")))
    show("5 the end of the GE graph after the GE passes")
    print(written("optimized_ge_graph").rstrip("\n").rpartition("\n")[2])
    show("6 engine passes at the first call")
    show_passes(graph.session.trace.records)
    optimized = canonical_text(graph.session.graph)
    show("7 the optimized GE graph: what runs", body(optimized))
    (dumped,) = folder.glob("dynamo_optimized_graph_*.py")
    print(f"the same as the graph_dump file: {dumped.read_text() == optimized}")
    print(f"read back equal: {not same_graph(load(optimized, infer), graph.session.graph)}")
    plan = graph.session.last_plan()
    show("8 the plan: steps")
    show_steps(plan)
    show("9 the plan: memory")
    show_memory(plan)


def dynamic_tour(folder: Path) -> None:
    """The same model for any batch: one graph, one plan for each set of sizes."""
    call, runners = compiled(Block().eval(), folder, dynamic=True)
    show("10 the same model with dynamic=True")
    for batch in (2, 5, 2):
        with torch.no_grad():
            call(torch.randn(batch, 4))
        session: Any = runners[0].runner.session  # type: ignore[attr-defined]
        known = session.summary()
        print(f"batch {batch}: {known.plans} plans, arena {known.arena_bytes} bytes")
    data = [line for line in canonical_text(session.graph).splitlines() if "ge.Data" in line]
    print(f"graphs compiled: {len(runners)}")
    print(next(line for line in data if "-1" in line))


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        static_tour(Path(folder, "static"))
        dynamic_tour(Path(folder, "dynamic"))


if __name__ == "__main__":
    main()
