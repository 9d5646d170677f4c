"""Whole models on the CPU: ours against eager, inductor in its modes, ONNX Runtime and OpenVINO.

The contestants take turns in one process and the best window's median counts. Cold compile time is
what the first call takes longer than the second, less what it does with backend `aot_eager`; all
caches are empty. Inductor needs g++ and up to a minute for each model and mode.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common import console, duration, interleaved, ratio, table, timed, warn_if_busy
from contestants import EAGER, FLOOR, OURS, PEERS, Contestant, torchair_backend
from inside import driver_of, forget_kernels
from torchair.codegen.kernel_cache import caching
from workloads import WORKLOADS, Workload, chosen

NARROWER = {
    "avx2": ({"TORCHAIR_CPU": "x86-64-v3", "ATEN_CPU_CAPABILITY": "avx2"}, 256),
}
"""Environment of torch and of ours, and bits of vectors for inductor."""
COMPILE_TARGET = 1.0  # seconds beyond aot_eager
NATIVE_TARGET = 8e-6  # seconds of native code in the tiny MLP


@dataclass
class Outcome:
    """What one workload gave: seconds by contestant, and words where there is no number."""

    workload: Workload
    times: dict[str, float] = field(default_factory=dict)
    compiling: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    native: float | None = None

    def rival(self, peers: Sequence[Contestant]) -> str | None:
        """The fastest of the others, None if none was measured but eager."""
        others = [p.name for p in peers if p.compiler or not self.workload.compiled]
        names = [n for n in others if n in self.times]
        return min([*names, EAGER.name], key=self.times.__getitem__) if names else None

    def ours(self) -> str:
        """The faster of our two ways."""
        return min((o.name for o in OURS), key=self.times.__getitem__)


def cold(contestant: Contestant, model: Any, inputs: Any) -> tuple[Callable[[], Any], float]:
    """The prepared model, and the seconds that took with our kernels forgotten, less those of
    the call that is a part of it."""
    forget_kernels()
    start = time.perf_counter()
    with caching(False):
        call = contestant.prepare(model, inputs)
    first = time.perf_counter() - start
    return call, first - timed(call)


def compile_times(model: Any, inputs: Any, rounds: int) -> dict[str, float]:
    """Least seconds of a first call, from a Dynamo that knows nothing; torch is given a chance to
    load what it needs for this model before."""
    best: dict[str, float] = {}
    cold(FLOOR, model, inputs)
    for _ in range(rounds):
        for contestant in (FLOOR, *OURS):
            torch._dynamo.reset()
            _, seconds = cold(contestant, model, inputs)
            best[contestant.name] = min(best.get(contestant.name, seconds), seconds)
    torch._dynamo.reset()
    return best


def wrong(got: Any, expected: torch.Tensor) -> str:
    """Why a result is not eager's; empty if it is, up to rounding."""
    if not isinstance(got, torch.Tensor):
        return ""  # of another runtime, in a type of its own
    limit = 1e-3 if expected.dtype == torch.float32 else 6e-2
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return "" if error < limit else f"wrong by {error:.1e}"


def contest(name: str, peers: Sequence[Contestant], quick: bool) -> Outcome:
    """Prepare everyone on one workload, then measure."""
    outcome = Outcome(WORKLOADS[name])
    model, inputs = outcome.workload.build()
    expected = model(*inputs)
    with console.status(f"{name}: compiling with aot_eager and torchair"):
        least = compile_times(model, inputs, 1 if quick else 2)
    calls = {}
    for contestant in (EAGER, *peers, *OURS):
        call = _prepare(contestant, model, inputs, name, outcome, least)
        if call is not None:
            outcome.notes[contestant.name] = wrong(call(), expected)
            calls[contestant.name] = call
    outcome.times = interleaved(calls, *((4, 0.03) if quick else (10, 0.2)))
    if outcome.workload.compiled:
        outcome.native = native_part(model, inputs, quick)
    torch._dynamo.reset()
    return outcome


def _prepare(
    contestant: Contestant, model: Any, inputs: Any, name: str, outcome: Outcome, least: Any
) -> Callable[[], Any] | None:
    """The contestant ready to run, None with a note where it cannot."""
    if contestant.missing:
        outcome.notes[contestant.name] = contestant.missing
        return None
    try:
        with console.status(f"{name}: preparing {contestant.name}"):
            call, seconds = cold(contestant, model, inputs)
    except Exception as e:  # a rival that cannot do this model must not end the contest
        if contestant.ours:
            raise
        outcome.notes[contestant.name] = f"fails: {type(e).__name__}"
        console.print(f"{name}: {contestant.name} fails: {str(e)[:300]}", style="red", markup=False)
        return None
    if contestant is not EAGER:
        floor = least[FLOOR.name] if contestant.compiler else 0.0
        outcome.compiling[contestant.name] = (
            min(seconds, least.get(contestant.name, seconds)) - floor
        )
        console.print(f"{name}: {contestant.name} took {seconds:.1f} s", style="dim")
    return call


def native_part(model: Any, inputs: Any, quick: bool) -> float | None:
    """Seconds of the generated code alone."""
    drive = driver_of(model, inputs, torchair_backend(True))
    if drive is None:
        return None
    return interleaved({"native": drive}, *((4, 0.03) if quick else (10, 0.05)))["native"]


def show(name: str, outcome: Outcome, peers: Sequence[Contestant]) -> None:
    """The table of one workload."""
    columns = ["", "time", *(f"{o.name} is" for o in OURS), "cold compile", "note"]
    shown = table(f"{name}, {torch.get_num_threads()} threads", columns)
    for contestant in (EAGER, *peers, *OURS):
        key = contestant.name
        time_of, first = outcome.times.get(key), outcome.compiling.get(key)
        shown.add_row(
            key,
            "-" if time_of is None else duration(time_of),
            *("-" if time_of is None else ratio(outcome.times, o.name, key) for o in OURS),
            "-" if first is None else f"{first:+.2f} s",
            outcome.notes.get(key, ""),
        )
    console.print(shown)
    if outcome.workload.compiled:
        native = "not all native" if outcome.native is None else duration(outcome.native)
        reach = verdict(outcome.native is not None and outcome.native < NATIVE_TARGET)
        console.print(f"native part alone: {native} (under {duration(NATIVE_TARGET)}: {reach})")


def verdict(reached: bool) -> str:
    """A word for a target."""
    return "met" if reached else "missed"


def summary(outcomes: Mapping[str, Outcome], peers: Sequence[Contestant]) -> None:
    """One line for each workload: the best of ours against everybody."""
    rivals = [p for p in peers if not p.missing]
    shown = table(
        "the best of ours: how many times faster, and seconds of cold compile beyond aot_eager",
        ["", "time", "eager", *map(_short, rivals), "best rival", "to reach", "compile"],
    )
    shown.columns[0].no_wrap = True
    for name, outcome in outcomes.items():
        ours, rival, times = outcome.ours(), outcome.rival(peers), outcome.times
        reach = outcome.workload.reach
        gain = times[rival] / times[ours] if rival else None
        worst = max(outcome.compiling[o.name] for o in OURS)
        shown.add_row(
            name,
            duration(times[ours]),
            *(ratio(times, ours, p.name) if p.name in times else "-" for p in (EAGER, *rivals)),
            "-" if gain is None else f"{gain:.2f}x",
            f"{reach:.2f}x" + ("" if gain is None else f" {verdict(gain >= reach)}"),
            f"{worst:+.2f} {verdict(worst < COMPILE_TARGET)}",
        )
    console.print(shown)


def _short(peer: Contestant) -> str:
    return next(key for key, p in PEERS.items() if p is peer)


def warm_up(peers: Sequence[Contestant]) -> None:
    """Load everything that is loaded once in a process, and say how long that takes."""
    for contestant in (FLOOR, *(p for p in peers if p.compiler and not p.missing), OURS[0]):
        torch._dynamo.reset()
        with console.status(f"loading {contestant.name}"):
            _, seconds = cold(contestant, torch.nn.Linear(4, 4), (torch.zeros(1, 4),))
        console.print(f"first use of {contestant.name}: {seconds:.1f} s", style="dim")


def narrowed(isa: str) -> None:
    """Let everyone use narrower vectors: in this process, or in one that replaces it, since torch
    has chosen when it is loaded. oneDNN, which computes eager's products, is told as well."""
    variables, bits = NARROWER[isa]
    variables = {**variables, "ONEDNN_MAX_CPU_ISA": isa.upper()}
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch._inductor.config as inductor

    inductor.cpp.simdlen = bits


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="workloads whose name contains this")
    parser.add_argument("--no-inductor", action="store_true", help="it takes minutes to compile")
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help=f"whom to race, of {','.join(PEERS)}"
    )
    parser.add_argument(
        "--isa", choices=list(NARROWER), help="vectors as of a processor that has no more than this"
    )
    options = parser.parse_args()
    unknown = set(filter(None, options.peers.split(","))) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {sorted(unknown)}, there are {list(PEERS)}")
    return options


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    options = arguments()
    if options.isa:
        narrowed(options.isa)
    peers = [PEERS[k] for k in options.peers.split(",") if k]
    if options.no_inductor:
        peers = [p for p in peers if not p.compiler]
    warn_if_busy()
    warm_up(peers)
    outcomes = {}
    names = list(chosen(options.only))
    for k, name in enumerate(names):
        console.rule(f"{k + 1} of {len(names)}: {name}")
        outcomes[name] = contest(name, peers, options.quick)
        show(name, outcomes[name], peers)
        gc.collect()
    summary(outcomes, peers)


if __name__ == "__main__":
    main()
