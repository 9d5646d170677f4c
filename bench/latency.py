"""Latency of whole models: ours against eager and inductor, interleaved in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import torchair
from common import console, has_inductor, interleaved, ratio, table
from models import (
    BERT,
    LLAMA,
    MLP,
    RESNET,
    Bert,
    Llama,
    Mlp,
    ResNet,
    bert_inputs,
    build,
    llama_inputs,
    mlp_inputs,
    resnet_inputs,
)

Workload = Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]


def _mlp() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    config = MLP["16 layers"]
    return build(Mlp, config), mlp_inputs(config, batch=1)


def _bert() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    config = BERT["base"]
    return build(Bert, config), bert_inputs(config, 1, 128)


def _llama() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    config = LLAMA["100M"]
    return build(Llama, config), llama_inputs(config, 1, start=100)


def _resnet() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    config = RESNET["18"]
    return build(ResNet, config), resnet_inputs(config, 1)


WORKLOADS: dict[str, Workload] = {
    "MLP 16 layers b1": _mlp,
    "BERT base b1 t128": _bert,
    "Llama 100M decode": _llama,
    "ResNet-18 b1": _resnet,
}


def measure(name: str, device: str, dtype: torch.dtype, inductor: bool) -> dict[str, float]:
    """Seconds per call of every contestant on one workload."""
    model, inputs = WORKLOADS[name]()
    model = model.to(device, dtype)
    inputs = tuple(
        x.to(device, dtype if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x
        for x in inputs
    )
    contestants = {"eager": model, "torchair": _compiled(model, torchair.get_npu_backend())}
    if inductor:
        contestants["inductor"] = _compiled(model, "inductor")
    with torch.no_grad():
        for run in contestants.values():
            run(*inputs)
        return interleaved({k: lambda f=f: f(*inputs) for k, f in contestants.items()})


def _compiled(model: torch.nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a workload's name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--no-inductor", action="store_true", help="it takes minutes to compile")
    options = parser.parse_args()
    inductor = has_inductor() and not options.no_inductor
    columns = ["workload", "eager us", "inductor us", "torchair us", "vs eager", "vs inductor"]
    shown = table(f"latency on {options.device}, {options.dtype}", columns)
    for name in WORKLOADS:
        if options.only and options.only.lower() not in name.lower():
            continue
        console.print(f"{name}: compiling", style="dim")
        torch._dynamo.reset()
        times = measure(name, options.device, getattr(torch, options.dtype), inductor)
        cells = [f"{times[k] * 1e6:.0f}" if k in times else "-"
                 for k in ("eager", "inductor", "torchair")]  # fmt: skip
        wins = [ratio(times, "torchair", k) for k in ("eager", "inductor")]
        shown.add_row(name, *cells, *wins)
    console.print(shown)


if __name__ == "__main__":
    main()
