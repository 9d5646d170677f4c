"""A language model with weights of 32, 16, 8 and 4 bits: decode steps and prefill, ours against
eager, inductor and llama.cpp, all of them taking turns in one process.

Weights are quantised with torchao, activations of quantised models are bfloat16. `ours` is
torch.compile, which is compared with eager and inductor; `direct` is `torchair.compile`, without
the guards of Dynamo, which is compared with llama.cpp. Inductor needs g++, llama.cpp `make llama-
cpp`: it runs the same weights as Q8_0 and Q4_0, and rounds activations to eight bits. `vs bf16` is
what fewer bits bring: how many times faster our model is than ours in bfloat16. Peers that cannot
be made ready in time are left out.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ggml
import torchair
from common import (
    NOT_MEASURED,
    console,
    duration,
    has_inductor,
    interleaved,
    ratio,
    table,
    warn_if_busy,
)
from contestants import Prepare, eager, inductor, through_compile, torchair_backend
from models import LLAMA, Llama, build, llama_inputs

GOALS = {"int8": 1.7, "int4": 2.8}  # times our bfloat16, in decode
GOALS_AND_BASE = ("bfloat16", *GOALS)
TASKS = ("decode", "prefill")
OURS = ("ours", "direct")
COLUMNS = [
    "weights",
    "ours",
    "vs bf16",
    "vs eager",
    "vs inductor",
    "direct",
    "vs bf16",
    "vs llama.cpp",
]
ALIKE = 0.95  # cosine of logits that differ by the rounding of weights of four bits
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


class Contest:
    """Calls that take turns, of one preset and one task."""

    def __init__(self, preset: str, task: str, kinds: list[str], until: float) -> None:
        self.preset, self.task, self.kinds, self._until = preset, task, kinds, until
        self.config = LLAMA[preset]
        self.prompt = self.config.context // PROMPT
        self.calls: dict[str, Callable[[], Any]] = {}
        sizes = (1, self.prompt) if task == "decode" else (self.prompt, 0)
        self.inputs = llama_inputs(self.config, *sizes)
        self._models = {kind: model_of(preset, kind) for kind in kinds}

    def enter(self, name: str, prepare: Prepare) -> None:
        """One way to run the model, for all kinds of weights."""
        for kind, model in self._models.items():
            if name not in OURS and time.perf_counter() > self._until:
                console.print(f"{kind}, {name}: left out, the time is up")
                continue
            try:
                self.calls[f"{kind} {name}"] = prepare(model, self.inputs)
            except Exception as e:  # a peer that cannot run a kind has no figure
                if name in OURS:
                    raise
                console.print(f"{kind}, {name}: {type(e).__name__}: {str(e).splitlines()[0]}")

    def enter_llama_cpp(self, folder: Path) -> None:
        """llama.cpp with the formats that some of our kinds correspond to. Files stay in a folder,
        for the next task."""
        loaded: dict[str, ggml.Runner] = {}
        for kind in self.kinds:
            form = ggml.TYPES.get(kind)
            if form is None or time.perf_counter() > self._until:
                continue
            if form not in loaded:
                path = folder / f"{form}.gguf"
                if not path.exists():
                    ggml.write(path, build(Llama, self.config), self.config, form)
                loaded[form] = ggml.Runner(path, self.config)
            tokens, start = self.inputs[0], int(self.inputs[1][0])
            if start:
                loaded[form].call(*llama_inputs(self.config, start)[:1], 0)()
            call = self.calls[f"{kind} llama.cpp"] = loaded[form].call(tokens, start)
            if not start:
                self._compare(kind, loaded[form].logits(call))

    def _compare(self, kind: str, logits: torch.Tensor) -> None:
        """Whether llama.cpp computes what we do; in a decode step our cache is empty."""
        ours = self.calls[f"{kind} direct"]().flatten().float()
        alike = float(torch.nn.functional.cosine_similarity(ours, logits, dim=0))
        if alike < ALIKE:
            raise AssertionError(f"{kind}: llama.cpp has other results, cosine {alike:.3f} to ours")

    def show(self, quick: bool) -> None:
        """Measure, and print one table with a row for each kind."""
        times = interleaved(self.calls, windows=3 if quick else 8, seconds=0.04 if quick else 0.12)
        threads = torch.get_num_threads()
        shown = table(f"Llama {self.preset}, {self.task}, {threads} threads", COLUMNS)
        for kind in self.kinds:
            own = [(_time(times, f"{kind} {w}"), self._gain(times, kind, w)) for w in OURS]
            peers = [ratio(times, f"{kind} ours", f"{kind} {p}") for p in ("eager", "inductor")]
            native = ratio(times, f"{kind} direct", f"{kind} llama.cpp")
            cells = (*own[0], *peers, *own[1], native)
            shown.add_row(kind, *("" if c == NOT_MEASURED else c for c in cells))
        console.print(shown)

    def _gain(self, times: dict[str, float], kind: str, way: str) -> str:
        gain = ratio(times, f"{kind} {way}", f"bfloat16 {way}")
        goal = GOALS.get(kind) if self.task == "decode" else None
        return gain if goal is None or gain == NOT_MEASURED else f"{gain} (goal {goal}x)"


def _time(times: dict[str, float], name: str) -> str:
    return duration(times[name]) if name in times else NOT_MEASURED


def measure(options: argparse.Namespace, task: str, folder: Path, seconds: float) -> None:
    """One table."""
    kinds = options.only or list(GOALS_AND_BASE if options.quick else KINDS)
    contest = Contest(options.preset, task, kinds, time.perf_counter() + seconds)
    contest.enter("direct", direct)
    if not options.direct:
        contest.enter("ours", through_compile(lambda: torchair_backend(frozen=True)))
    if not options.no_peers:
        if not ggml.missing():
            contest.enter_llama_cpp(folder)
        if not options.direct:
            contest.enter("eager", eager)
            if has_inductor() and not options.quick:
                contest.enter("inductor", inductor(freezing=True))
    contest.show(options.quick)


def main() -> None:
    parser = argparse.ArgumentParser(prog="llm.py", description=__doc__)
    parser.add_argument("--preset", default="100M", choices=LLAMA)
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--only", choices=KINDS, action="append", help="only weights of this kind")
    less = "only calls without Dynamo, and llama.cpp: fewer copies of a large model"
    parser.add_argument("--direct", action="store_true", help=less)
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    short = "bfloat16, int8 and int4, short windows, no inductor"
    parser.add_argument("--quick", action="store_true", help=short)
    limit = "after so many no peer is made ready any more; measuring takes another one"
    parser.add_argument("--minutes", type=float, default=4.0, help=limit)
    options = parser.parse_args()
    warn_if_busy()
    warnings.filterwarnings("ignore")
    if ggml.missing() and not options.no_peers:
        console.print(f"llama.cpp is left out, {ggml.missing()}")
    tasks = [options.task] if options.task else TASKS
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            measure(options, task, Path(folder), 60 * options.minutes / len(tasks))
            gc.collect()


if __name__ == "__main__":
    main()
