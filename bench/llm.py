"""A language model with weights of 32, 16, 8 and 4 bits: decode steps and prefill, ours against
eager and inductor, all of them taking turns in one process.

Weights are quantised with torchao, activations of quantised models are bfloat16. Inductor needs
g++. `direct` is `torchair.compile`: torch.compile takes parameters of torchao apart at each call.
`vs bf16` is what fewer bits bring: how many times faster our model is than ours in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch

import torchair
from common import console, duration, has_inductor, interleaved, ratio, table, warn_if_busy
from contestants import eager, inductor, through_compile, torchair_backend
from models import LLAMA, Llama, build, llama_inputs

GOALS = {"int8": 1.7, "int4": 2.8}  # times our bfloat16, in decode
TASKS = ("decode", "prefill")
OURS = ("ours", "direct")
PROMPT = 4  # a prompt takes this part of the context


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _int4() -> Any:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=128)


def _int4_symmetric() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(torch.int4, PerGroup(32))


def _dynamic() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


KINDS: dict[str, tuple[torch.dtype, Callable[[], Any] | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, _int8),
    "int4": (torch.bfloat16, _int4),
    "int4 g32": (torch.bfloat16, _int4_symmetric),
    "int8 x int8": (torch.bfloat16, _dynamic),
}


def model_of(preset: str, kind: str) -> torch.nn.Module:
    """A model with weights of a kind; the weights themselves are random."""
    dtype, config = KINDS[kind]
    model = build(Llama, LLAMA[preset]).to(dtype)
    if config is not None:
        from torchao.quantization import quantize_

        quantize_(model, config())
    return model


def direct(model: torch.nn.Module, inputs: Any) -> Callable[[], Any]:
    """The model compiled by us alone, called without Dynamo."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    call = torchair.compile(model, inputs, config=config)
    call(*inputs)
    return lambda: call(*inputs)


def ways(peers: bool) -> dict[str, Any]:
    """How a model is made ready, by contestant."""
    found = {"ours": through_compile(lambda: torchair_backend(frozen=True)), "direct": direct}
    if peers:
        found |= {"eager": eager}
        if has_inductor():
            found |= {"inductor": inductor(freezing=True)}
    return found


def measure(preset: str, task: str, kinds: list[str], peers: bool, quick: bool) -> None:
    """One table: a row for each kind of weights."""
    calls: dict[str, Callable[[], Any]] = {}
    prompt = LLAMA[preset].context // PROMPT
    inputs = llama_inputs(LLAMA[preset], *((1, prompt) if task == "decode" else (prompt, 0)))
    for kind in kinds:
        for name, prepare in ways(peers).items():
            try:
                calls[f"{kind} {name}"] = prepare(model_of(preset, kind), inputs)
            except Exception as e:  # a peer that cannot run a kind has no figure
                if name in OURS:
                    raise
                console.print(f"{kind}, {name}: {type(e).__name__}: {str(e).splitlines()[0]}")
    times = interleaved(calls, windows=2 if quick else 8, seconds=0.02 if quick else 0.12)
    columns = ["weights", "ours", "vs bf16", "vs eager", "vs inductor", "direct", "vs bf16"]
    shown = table(f"Llama {preset}, {task}", columns)
    for kind in kinds:
        ours = f"{kind} ours"
        peer = [ratio(times, ours, f"{kind} {name}") for name in ("eager", "inductor")]
        own = [(duration(times[f"{kind} {w}"]), _gain(times, kind, task, w)) for w in OURS]
        shown.add_row(kind, *own[0], *peer, *own[1])
    console.print(shown)
    calls.clear()
    gc.collect()


def _gain(times: dict[str, float], kind: str, task: str, way: str) -> str:
    gain = ratio(times, f"{kind} {way}", f"bfloat16 {way}")
    goal = GOALS.get(kind) if task == "decode" else None
    return gain if goal is None else f"{gain} (goal {goal}x)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="llm.py", description=__doc__)
    parser.add_argument("--preset", default="100M", choices=LLAMA)
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--only", choices=KINDS, action="append", help="only weights of this kind")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--quick", action="store_true", help="short windows")
    options = parser.parse_args()
    warn_if_busy()
    warnings.filterwarnings("ignore")
    with torch.no_grad():
        for task in [options.task] if options.task else TASKS:
            kinds = options.only or list(KINDS)
            measure(options.preset, task, kinds, not options.no_peers, options.quick)


if __name__ == "__main__":
    main()
