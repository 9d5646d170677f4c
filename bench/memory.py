"""Peak resident memory of the BERT-base encoder, each way to run it in a process of its own.

Three figures: the libraries before there is a model, the peak of the whole run with building and
compiling, and the peak of calls once everything is warm. With --sizes the peak of an encoder and of
a convolutional net over so many different sizes instead. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from common import console, has_inductor, in_process, resident, table
from models import (
    BERT,
    RESNET,
    Bert,
    BertConfig,
    ResNet,
    bert_inputs,
    build,
)

LIMIT = 1.10  # of eager's peak, without packing
WAYS = ("eager", "aot_eager", "torchair", "torchair frozen")
CALLS = 5

OVER_SIZES = 1.3  # of inductor's peak over many sizes
SIZED_WAYS = ("eager", "inductor", "torchair", "torchair frozen")
NETS = ("encoder", "conv net")
SMALL = BertConfig(layers=4, dim=256, heads=4, ffn=1024, vocab=5000, positions=512)


def forget_peak() -> None:
    """The peak is counted from now on. What was freed goes back to the system first, as it would
    when another process needs it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def way(name: str, dynamic: bool = False) -> Callable[[torch.nn.Module], Any]:
    """From a model to what is called."""
    if name == "eager":
        return lambda model: model
    backend: Any = name
    if name.startswith("torchair"):
        from contestants import torchair_backend

        backend = torchair_backend(name.endswith("frozen"))
    whole = not dynamic  # at its limit of graphs for sizes Dynamo runs eagerly, and says so
    return lambda model: torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=whole)


@torch.no_grad()
def measure(name: str, preset: str) -> dict[str, float]:
    """The three figures of this process."""
    prepare = way(name)
    prepare(torch.nn.Linear(4, 4))(torch.zeros(1, 4))  # loads the libraries
    if name != "eager":
        torch._dynamo.reset()
    figures = {"libraries": resident("VmRSS")}
    config = BERT[preset]
    call, inputs = prepare(build(Bert, config)), bert_inputs(config, 1, min(128, config.positions))
    call(*inputs)
    call(*inputs)
    figures["whole run"] = resident("VmHWM")
    forget_peak()
    for _ in range(CALLS):
        call(*inputs)
    return {**figures, "steady": resident("VmHWM")}


def net_and_inputs(net: str) -> tuple[torch.nn.Module, Callable[[random.Random], Any]]:
    """A model, and what makes inputs of any size for it."""
    if net == "encoder":
        made = build(Bert, SMALL)
        return made, lambda pick: bert_inputs(SMALL, pick.randint(1, 4), pick.randint(2, 510))
    made = build(ResNet, RESNET["18"])
    return made, lambda pick: (torch.randn(1, 3, pick.randint(32, 320), pick.randint(32, 320)),)


@torch.no_grad()
def measure_sizes(name: str, net: str, count: int) -> dict[str, float]:
    """Peak memory of this process over many sizes, and when a tenth of them was seen."""
    model, inputs = net_and_inputs(net)
    call, pick = way(name, dynamic=True)(model), random.Random(0)
    figures = {}
    for k in range(count):
        call(*inputs(pick))
        if k == count // 10:
            figures["a tenth"] = resident("VmHWM")
    return {**figures, "all": resident("VmHWM")}


def compare_sizes(count: int) -> None:
    """Each net over many sizes: the table and the verdict."""
    ways = [w for w in SIZED_WAYS if w != "inductor" or has_inductor()]
    if "inductor" not in ways:
        console.print("inductor: not measured, there is no C++ compiler")
    base = "inductor" if "inductor" in ways else "eager"
    for net in NETS:
        given = ["--net", net, "--sizes", str(count)]
        each = track(ways, net, console=console, transient=True)
        found = {w: in_process(__file__, "--way", w, *given) for w in each}
        columns = ["", "after a tenth", "after all", "against eager", f"against {base}"]
        shown = table(f"peak resident memory of the {net} over {count} sizes, MiB", columns)
        for name, f in found.items():
            shares = [f"{f['all'] / found[peer]['all']:.2f}x" for peer in ("eager", base)]
            shown.add_row(name, f"{f['a tenth']:.0f}", f"{f['all']:.0f}", *shares)
        console.print(shown)
        share = found["torchair"]["all"] / found[base]["all"]
        word = "met" if share <= OVER_SIZES else "missed"
        console.print(f"{net}: {share:.2f} of {base}'s (at most {OVER_SIZES:.2f}: {word})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="base", choices=list(BERT), help="which encoder")
    parser.add_argument("--sizes", type=int, help="over so many sizes instead")
    parser.add_argument("--net", default=NETS[0], choices=NETS, help="of --sizes in this process")
    ways = sorted({*WAYS, *SIZED_WAYS})
    parser.add_argument("--way", choices=ways, help="measure this one in this process")
    options = parser.parse_args()
    if options.sizes and options.way:
        print(json.dumps(measure_sizes(options.way, options.net, options.sizes)))
        return
    if options.sizes:
        compare_sizes(options.sizes)
        return
    if options.way:
        print(json.dumps(measure(options.way, options.preset)))
        return
    each = track(WAYS, "measuring", console=console, transient=True)
    found = {name: in_process(__file__, "--way", name, "--preset", options.preset) for name in each}
    show(found, options.preset)


def show(found: dict[str, dict[str, float]], preset: str) -> None:
    """The table and the verdict. Libraries are loaded once in a process, however many models it
    has, so the model's share is what a way to run it answers for."""
    columns = ["", "libraries", "whole run", "steady", "against eager", "without libraries"]
    shown = table(f"peak resident memory of encoder {preset}, MiB", columns)
    base = found["eager"]
    whole = {k: f["steady"] / base["steady"] for k, f in found.items()}
    own = {
        k: (f["steady"] - f["libraries"]) / (base["steady"] - base["libraries"])
        for k, f in found.items()
    }
    for name, figures in found.items():
        cells = [f"{figures[k]:.0f}" for k in ("libraries", "whole run", "steady")]
        shown.add_row(name, *cells, f"{whole[name]:.2f}x", f"{own[name]:.2f}x")
    console.print(shown)
    for what, shares in (("the process", whole), ("the model, without libraries", own)):
        share = shares["torchair"]
        word = "met" if share <= LIMIT else "missed"
        console.print(f"{what}: {share:.2f} of eager's (at most {LIMIT:.2f}: {word})")


if __name__ == "__main__":
    main()
