"""Whole models on a GPU: ours in both modes against eager, a CUDA graph made by hand and inductor.

All contestants live in one process and take turns; the best window's median counts. Host time is
how long a call takes to return; calls come in bursts that do not fill the queue of launches. Device
time is how long the device takes for a burst that waits for it in the queue. Bytes a second are
those of parameters and buffers in that time. Of training steps, which fill that queue, the table
has the time from step to step. Memory is the peak of a call, with what a contestant keeps between
calls. Compile time is all of the first calls, beyond that of aot_eager, after each compiler has
compiled something else.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.progress import track

import torchair
from common import console, duration, synchronize, table, timed
from contestants import (
    EAGER,
    FLOOR,
    Contestant,
    Inputs,
    inductor,
    through_compile,
    torchair_backend,
)
from learners import RECIPES, Memory, Recipe, Trained, by_hand, prepared_step
from models import (
    BERT,
    CHAINS,
    LLAMA,
    RESNET,
    Bert,
    Chain,
    Llama,
    ResNet,
    bert_inputs,
    build,
    chain_inputs,
    llama_inputs,
    resnet_inputs,
)
from quantised import quantise
from workloads import WORKLOADS, Workload

COMPILE_GOAL = 2.0  # seconds beyond aot_eager
CYCLES = 2e9  # of the device in a second, rather too many


SLACK = 20.0  # microseconds that a call of ours may take beyond the quickest of all
THIRD = 1 / 3  # of inductor's compile time, that ours is to take at most
_LONG = {name: replace(LLAMA[name], context=1024) for name in ("1B", "8B")}


def _decode(config: Any) -> Inputs:
    return llama_inputs(config, 1, start=config.context // 2)


def _sentences(config: Any) -> Inputs:
    return bert_inputs(config, 8, 128)


def _image(config: Any) -> Inputs:
    return resnet_inputs(config, 1)


def _prompt(config: Any) -> Inputs:
    return llama_inputs(config, config.context)


def _prefill(tokens: int, attention: str = "causal") -> Workload:
    """A prompt that fills its cache, with causal attention or with a mask."""
    config = replace(LLAMA["1B"], context=tokens, attention=attention)
    return Workload(Llama, config, _prompt, torch.bfloat16)


@dataclass(frozen=True)
class Goal:
    """What we are to reach in device time: how much faster than the best rival, microseconds."""

    reach: float = 1.0
    most: float = float("inf")


_HALF = torch.bfloat16
MODELS = {
    "tiny MLP b1": (WORKLOADS["tiny MLP b1"], Goal(most=50)),
    "encoder b1 t128 bf16": (WORKLOADS["encoder b1 t128 bf16"], Goal()),
    "encoder b8 t128 bf16": (Workload(Bert, BERT["base"], _sentences, _HALF), Goal()),
    "ResNet-18 b1 bf16": (Workload(ResNet, RESNET["18"], _image, _HALF), Goal()),
    "Llama 1B decode b1 bf16": (Workload(Llama, _LONG["1B"], _decode, _HALF), Goal(1.5, 900)),
    "Llama 1B decode b16 bf16": (
        Workload(Llama, replace(_LONG["1B"], batch=16), _decode, _HALF), Goal()
    ),
    "Llama 8B decode b1 bf16": (Workload(Llama, _LONG["8B"], _decode, _HALF), Goal(1.25, 4200)),
    **{f"prefill Llama 1B t{t} bf16": (_prefill(t), Goal()) for t in (128, 512, 2048)},
    "prefill Llama 1B t512 masked bf16": (_prefill(512, "grouped"), Goal()),
    **{
        f"chain {name} bf16": (Workload(Chain, config, chain_inputs, _HALF), Goal())
        for name, config in CHAINS.items()
    },
}  # fmt: skip


@dataclass(frozen=True)
class Narrow:
    """A model of those above with weights of few bits, and how many times as fast it is to be."""

    like: str
    bits: int
    group: int  # integers with a scale of their own, 0: a row
    reach: float


NARROW = {
    "Llama 8B decode b1 int8": Narrow("Llama 8B decode b1 bf16", 8, 0, 1.6),
    "Llama 8B decode b1 int4": Narrow("Llama 8B decode b1 bf16", 4, 128, 2.5),
}


def captured_config(frozen: bool = False) -> torchair.CompilerConfig:
    """The mode reduce-overhead, with or without the promise that parameters never change."""
    config = torchair.CompilerConfig()
    with warnings.catch_warnings(action="ignore"):  # the mode has a newer name
        config.mode = "reduce-overhead"
    config.experimental_config.frozen_parameter = frozen
    return config


def captured_backend(frozen: bool = False) -> Any:
    """Our backend in that mode."""
    with warnings.catch_warnings(action="ignore"):  # it reminds of the promise
        return torchair.get_npu_backend(compiler_config=captured_config(frozen))


def invariant_backend() -> Any:
    """Our backend, whose results of a row do not depend on the batch."""
    config = torchair.CompilerConfig()
    config.numerics = "batch_invariant"
    with warnings.catch_warnings(action="ignore"):  # it reminds of frozen parameters
        return torchair.get_npu_backend(compiler_config=config)


def super_backend() -> Any:
    """Our backend, whose launches are one persistent kernel as far as they can be."""
    config = torchair.CompilerConfig()
    config.experimental_config.super_kernels = True
    with warnings.catch_warnings(action="ignore"):  # it reminds of frozen parameters
        return torchair.get_npu_backend(compiler_config=config)


CAPTURED = (
    Contestant("torchair replay", through_compile(captured_backend), ours=True, compiler=True),
    Contestant(
        "torchair replay frozen",
        through_compile(lambda: captured_backend(True)),
        ours=True,
        compiler=True,
    ),
)
OURS = (
    Contestant(
        "torchair max-autotune", through_compile(torchair_backend), ours=True, compiler=True
    ),
    Contestant(
        "torchair reduce-overhead", through_compile(captured_backend), ours=True, compiler=True
    ),
)


def graph_by_hand(model: torch.nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """What one writes without a compiler: warm up, capture, copy inputs and replay."""
    static = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*static)

    def call() -> Any:
        torch._foreach_copy_(static, list(inputs))
        graph.replay()
        return result

    return call


BY_HAND = Contestant("CUDA graph by hand", graph_by_hand)
PEERS = {
    "default": Contestant("inductor", inductor(), compiler=True),
    "overhead": Contestant(
        "inductor reduce-overhead", inductor(**{"triton.cudagraphs": True}), compiler=True
    ),
    "autotune": Contestant(
        "inductor max-autotune",
        inductor(
            **{"triton.cudagraphs": True, "max_autotune": True, "coordinate_descent_tuning": True}
        ),
        compiler=True,
    ),
    "invariant": Contestant(
        "torchair batch-invariant", through_compile(invariant_backend), compiler=True
    ),
    "super": Contestant("torchair super kernels", through_compile(super_backend), compiler=True),
}


@dataclass
class Figures:
    """Of one contestant on one model, in seconds."""

    call: Callable[[], Any]
    compile: float
    burst: int
    memory: int = 0
    wall: float = float("inf")
    host: float = float("inf")
    device: float = float("inf")

    def measure(self, times: int) -> None:
        """One turn."""
        self.wall = min(self.wall, statistics.median(timed(self.call) for _ in range(times)))
        self.host = min(self.host, statistics.median(self._host() for _ in range(times)))
        self.device = min(self.device, statistics.median(self._device() for _ in range(3)))

    def _host(self) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(self.burst):
            self.call()
        return (time.perf_counter() - start) / self.burst

    def _device(self) -> float:
        """The burst is queued while the device sleeps, so nothing waits for the host."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize()
        torch.cuda._sleep(int(CYCLES * (1.5 * self.host * self.burst + 1e-3)))
        start.record()
        for _ in range(self.burst):
            self.call()
        end.record()
        synchronize()
        return start.elapsed_time(end) * 1e-3 / self.burst


def prepared(one: Contestant, model: torch.nn.Module, inputs: Inputs) -> Figures:
    """A contestant with its first calls behind it: inductor captures at the second."""
    synchronize()
    before, start = Memory.now(), time.perf_counter()
    call = one.prepare(model, inputs)
    for _ in range(3):
        call()
    synchronize()
    first = time.perf_counter() - start
    made = Figures(call, first - 4 * timed(call), burst=1 if one is EAGER else 8)
    weights = sum(t.untyped_storage().nbytes() for t in model.state_dict().values())
    made.memory = before.peak(call) + weights
    return made


def check(name: str, figures: Figures, expected: torch.Tensor) -> None:
    """What is fast and wrong does not count."""
    got = figures.call().float()
    error = ((got - expected).norm() / expected.norm()).item()
    assert error < 0.03, f"{name}: relative error {error:.3f}"


def on_device(workload: Workload) -> tuple[torch.nn.Module, Inputs]:
    """A model and its inputs."""
    with torch.device("cuda"):  # initialised there: a billion numbers take long on the host
        model = build(workload.kind, workload.config).to(workload.dtype)
    inputs = tuple(
        x.to("cuda", workload.dtype if x.is_floating_point() else None)
        for x in workload.inputs(workload.config)
    )
    return model, inputs


def narrow_contest(name: str, narrow: Narrow, contestants: list[Contestant], quick: bool) -> None:
    """Measure our modes on a model with weights of few bits, against the same one in bfloat16."""
    workload = MODELS[narrow.like][0]
    devices: dict[str, dict[str, float]] = {}
    for kind, bits in (("bf16", 0), (name, narrow.bits)):
        torch._dynamo.reset()
        model, inputs = on_device(workload)
        if bits:
            quantise(model, bits, narrow.group)
        figures = {one.name: prepared(one, model, inputs) for one in contestants}
        expected = model(*inputs).float()
        for key, one_of_them in figures.items():
            check(key, one_of_them, expected)
            for _ in range(3 if quick else 10):
                one_of_them.measure(5 if quick else 15)
        weights = sum(
            t.numel() * (bits if t.dtype == torch.int8 else 8 * t.element_size()) // 8
            for t in model.state_dict().values()
        )
        show(kind, figures, 0.0, set(), weights)
        devices[kind] = {key: f.device for key, f in figures.items()}
        del model, figures, one_of_them
        gc.collect()
        torch.cuda.empty_cache()
    for key, device in devices[name].items():
        verdict(f"{key}: times our bfloat16", devices["bf16"][key] / device, narrow.reach, False)


def contest(
    name: str, workload: Workload, goal: Goal, contestants: list[Contestant], quick: bool
) -> None:
    """Measure all contestants on one model and print."""
    torch._dynamo.reset()
    model, inputs = on_device(workload)
    figures = {}
    for one in [FLOOR, *contestants]:
        with console.status(f"{name}: preparing {one.name}"):
            figures[one.name] = prepared(one, model, inputs)
    expected = model(*inputs).float()
    for key, one_of_them in figures.items():
        check(key, one_of_them, expected)
    floor = figures.pop(FLOOR.name).compile
    for _ in track(range(3 if quick else 10), name, console=console, transient=True):
        for one_of_them in figures.values():
            one_of_them.measure(5 if quick else 15)
    compilers = {c.name for c in contestants if c.compiler}
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    show(name, figures, floor, compilers, weights)
    judge(figures, floor, {c.name for c in contestants if c.ours}, goal)


def show(
    name: str, figures: dict[str, Figures], floor: float, compilers: set[str], weights: int
) -> None:
    """One row for each contestant."""
    columns = ["", "waited for", "host", "device", "TB/s", "memory", "compile beyond aot_eager"]
    shown = table(name, columns)
    for key, f in figures.items():
        compiling = duration(max(0.0, f.compile - floor)) if key in compilers else ""
        rate, times = f"{weights / f.device / 1e12:.2f}", (f.wall, f.host, f.device)
        shown.add_row(key, *map(duration, times), rate, gigabytes(f.memory), compiling)
    console.print(shown)


def gigabytes(count: int) -> str:
    """Bytes, to be read."""
    return f"{count / 1e9:.2f} GB"


@torch.enable_grad()
def training_contest(name: str, recipe: Recipe, contestants: list[Contestant], quick: bool) -> None:
    """Let all contestants train, each a model of its own, and print."""
    torch._dynamo.reset()
    steps, figures = dict[str, Trained](), dict[str, Figures]()
    for one in [FLOOR, *contestants]:
        with console.status(f"{name}: preparing {one.name}"):
            gc.collect()
            synchronize()
            before, start = Memory.now(), time.perf_counter()
            trained = prepared_step(EAGER if one is BY_HAND else one, recipe)
            if one is BY_HAND:
                trained = by_hand(trained)
            synchronize()
            first = time.perf_counter() - start
            once = timed(trained.step)
            made = Figures(trained.step, first - len(trained.losses) * once, burst=1)
            made.memory, steps[one.name], figures[one.name] = (
                before.peak(trained.step), trained, made
            )  # fmt: skip
    check_losses(steps)
    floor = figures.pop(FLOOR.name).compile
    del steps, trained, made
    for _ in track(range(3 if quick else 10), name, console=console, transient=True):
        for f in figures.values():
            f.wall = min(f.wall, statistics.median(timed(f.call, 5) for _ in range(3)))
    compilers = {c.name for c in contestants if c.compiler}
    ours = {c.name for c in contestants if c.ours}
    show_steps(name, figures, floor, compilers, ours)
    judge_steps(figures, floor, ours)


def show_steps(
    name: str, figures: dict[str, Figures], floor: float, compilers: set[str], ours: set[str]
) -> None:
    """One row for each contestant."""
    best = min(figures[key].wall for key in ours)
    shown = table(name, ["", "a step", "memory", "compile beyond aot_eager", "ours is"])
    for key, f in figures.items():
        compiling = duration(max(0.0, f.compile - floor)) if key in compilers else ""
        ahead = f"{f.wall / best:.2f}x as fast"
        shown.add_row(key, duration(f.wall), gigabytes(f.memory), compiling, ahead)
    console.print(shown)


def judge_steps(figures: dict[str, Figures], floor: float, ours: set[str]) -> None:
    """The faster of our modes against the best rival, memory and compile time against inductor."""
    mine = min((figures[key] for key in ours), key=lambda f: f.wall)
    rivals = {key: f for key, f in figures.items() if key not in ours}
    best = min(rivals, key=lambda key: rivals[key].wall)
    verdict(f"times as fast as {best}", rivals[best].wall / mine.wall, 1.0, False)
    if (peer := figures.get(PEERS["default"].name)) is not None:
        verdict("memory in parts of inductor's", mine.memory / peer.memory, 1.05)
    judge_compiling("our faster mode", mine, rivals, floor)


def judge_compiling(key: str, mine: Figures, rivals: dict[str, Figures], floor: float) -> None:
    """Compile time against that of inductor's quickest mode."""
    names = {peer.name for peer in PEERS.values()}
    taken = [f.compile - floor for name, f in rivals.items() if name in names]
    if taken:
        verdict(f"{key}: seconds of compiling", mine.compile - floor, THIRD * min(taken))


def check_losses(steps: dict[str, Trained]) -> None:
    """Everyone learns as eager does, up to rounding; each draws a dropout of its own."""
    expected = steps[EAGER.name].losses
    for key, trained in steps.items():
        pairs = zip(trained.losses, expected, strict=True)
        worst = max(abs(got - right) / abs(right) for got, right in pairs)
        assert worst < 0.03, f"{key}: losses {trained.losses}, eager has {expected}"


def judge(figures: dict[str, Figures], floor: float, ours: set[str], goal: Goal) -> None:
    """Each of our modes against the best rival and against the goals."""
    rivals = {key: f for key, f in figures.items() if key not in ours}
    best = min(rivals, key=lambda key: rivals[key].device)
    quickest = min(f.wall for f in rivals.values())
    for key in sorted(ours):
        mine, ahead = figures[key], rivals[best].device / figures[key].device
        verdict(f"{key}: times as fast as {best}", ahead, goal.reach, False)
        verdict(f"{key}: microseconds that are waited for", mine.wall * 1e6, quickest * 1e6 + SLACK)
        judge_compiling(key, mine, rivals, floor)
        if goal.most != float("inf"):
            verdict(f"{key}: microseconds", mine.device * 1e6, goal.most)
        verdict(f"{key}: seconds of compiling", mine.compile - floor, COMPILE_GOAL)


def verdict(what: str, got: float, goal: float, at_most: bool = True) -> None:
    """Whether a goal is met."""
    met = got <= goal if at_most else got >= goal
    word, style = ("met", "green") if met else ("missed", "red")
    bound = "at most" if at_most else "at least"
    console.print(f"  {what}: {got:.2f}, {bound} {goal:.2f}: {word}", style=style)


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", metavar="NAMES", default="", help="rows whose name has one of these, by commas"
    )
    parser.add_argument(
        "--peers",
        default="default,overhead",
        metavar="LIST",
        help=f"modes of inductor and of ours, by commas, of {', '.join(PEERS)}; autotune compiles "
        "for minutes",
    )
    parser.add_argument("--quick", action="store_true", help="few turns: figures are rough")
    parser.add_argument("--list", action="store_true", help="names of all rows")
    return parser.parse_args()


def rows(only: str, peers: list[Contestant], quick: bool) -> dict[str, Callable[[], None]]:
    """What is to be measured, by name."""
    everyone = [EAGER, BY_HAND, *peers, *OURS]
    narrows = [*OURS, *(p for p in peers if p is PEERS["super"])]  # who has kernels for few bits
    found: dict[str, Callable[[], None]] = {}
    for name, (workload, goal) in MODELS.items():
        found[name] = partial(contest, name, workload, goal, everyone, quick)
    for name, narrow in NARROW.items():
        found[name] = partial(narrow_contest, name, narrow, narrows, quick)
    for name, recipe in RECIPES.items():
        found[name] = partial(training_contest, name, recipe, everyone, quick)
    words = only.lower().split(",")
    return {name: run for name, run in found.items() if any(w in name.lower() for w in words)}


def warm_up(contestants: list[Contestant]) -> None:
    """Imports, pools of processes, libraries."""
    first = torch.nn.Linear(8, 8).cuda()
    for one in contestants:
        with console.status(f"warming {one.name} up"):
            one.prepare(first, (torch.ones(2, 8, device="cuda"),))()


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    options = arguments()
    peers = [PEERS[name] for name in options.peers.split(",") if name]
    todo = rows(options.only, peers, options.quick)
    if options.list:
        print(*todo, sep="\n")
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a CUDA device")
    warm_up([FLOOR, EAGER, BY_HAND, *peers, *OURS])
    failed = []
    for k, (name, run) in enumerate(todo.items()):
        console.rule(f"{k + 1} of {len(todo)}: {name}")
        try:
            run()
        except Exception:  # the other rows are worth their time
            console.print_exception(max_frames=6)
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
