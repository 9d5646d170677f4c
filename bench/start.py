"""From process start to the first result of a Llama decode step: importing torch, loading weights,
and what is beyond. Ours cached and compiled, beside eager, inductor and AOTInductor.

Each figure is of a process of its own, the one of several that was soonest. Weights are mapped, and
the model is made without random numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# A measured process comes through here too: what it does not need is imported in functions.

STARTED = "TORCHAIR_BENCH_STARTED"
TARGET = 0.3
HEAVY = {
    "Dynamo": "torch._dynamo",
    "AOTAutograd": "torch._functorch.aot_autograd",
    "inductor": "torch._inductor",
    "sympy": "sympy",
}


@dataclass(frozen=True)
class Way:
    """A way to the first result."""

    what: str
    after: str = ""  # the way that leaves behind what this one finds, in a process before
    inductor: bool = False


WAYS = {
    "eager": Way("no compiler"),
    "cached": Way("cache_compile, file and kernels there", after="first"),
    "first": Way("cache_compile, nothing there"),
    "ours, kernels": Way("torch.compile, kernels on disk", after="ours"),
    "ours": Way("torch.compile, nothing on disk"),
    "inductor, warm": Way("torch.compile, its caches there", after="inductor", inductor=True),
    "inductor": Way("torch.compile, nothing cached", inductor=True),
    "AOTInductor": Way("its package, weights inside", after="AOTInductor, made", inductor=True),
    "AOTInductor, made": Way("exported, compiled, loaded", inductor=True),
}


def child(way: str, preset: str, folder: str) -> None:
    """One start: seconds of its parts, of processors beyond weights, and what was imported."""
    import torch

    imported = time.time()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from models import LLAMA, Llama, llama_inputs

    config = LLAMA[preset]
    inputs = llama_inputs(config)
    model = None if way == "AOTInductor" else _loaded(Llama, config, f"{folder}/weights.pt")
    before = set(sys.modules)
    ready, spent = time.time(), _processor_time()
    with torch.no_grad():
        _call_of(way, model, inputs, folder)(*inputs)
    figures = {
        "torch": imported - float(os.environ[STARTED]),
        "weights": ready - imported,
        "beyond": time.time() - ready,
        "processor": _processor_time() - spent,
        "loads": [name for name, m in HEAVY.items() if m in sys.modules and m not in before],
    }
    print(json.dumps(figures))


def _loaded(kind: Any, config: Any, weights: str) -> Any:
    """The model over a mapped file."""
    import torch

    kept = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
    for name in kept:
        setattr(torch.Tensor, name, lambda t, *args, **kwargs: t)
    model = kind(config).eval()  # on the device "meta", arithmetic would load Dynamo
    for name, method in kept.items():
        setattr(torch.Tensor, name, method)
    model.load_state_dict(torch.load(weights, mmap=True), assign=True)
    return model


def _processor_time() -> float:
    """Of this process, and of compilers that it has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def _call_of(way: str, model: Any, inputs: Any, folder: str) -> Callable[..., Any]:
    import torch

    if way == "eager":
        return model  # type: ignore[no-any-return]
    if way in ("cached", "first"):
        from torchair.inference import cache_compile

        return cache_compile(model.forward, dynamic=False, cache_dir=f"{folder}/methods")
    if way.startswith("AOTInductor"):
        package = f"{folder}/model.pt2"
        if model is not None:
            program = torch.export.export(model, inputs)
            torch._inductor.aoti_compile_and_package(program, package_path=package)
        return torch._inductor.aoti_load_package(package)
    if way.startswith("inductor"):
        return torch.compile(model, dynamic=False)  # type: ignore[no-any-return]
    import torchair  # noqa: F401  registers the backend

    return torch.compile(model, backend="torchair", dynamic=False)  # type: ignore[no-any-return]


def save(preset: str, path: Path) -> None:
    """Weights of the model, once."""
    import torch

    from models import LLAMA, Llama, build

    torch.save(build(Llama, LLAMA[preset]).state_dict(), path)


def started(way: str, preset: str, folder: Path) -> dict[str, Any]:
    """Run one process, whose caches are in a folder."""
    source = Path(__file__).resolve().parent.parent / "src"
    environment = {
        "PYTHONPATH": str(source),
        **os.environ,
        "TORCHAIR_CACHE_DIR": str(folder / "kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its byte code
        STARTED: str(time.time()),
    }
    command = [sys.executable, __file__, "--child", way, preset, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(way: str, preset: str, weights: Path, rounds: int, done: Any) -> dict[str, Any]:
    """The soonest of several starts; `done` is called after each process."""
    found = []
    with tempfile.TemporaryDirectory(dir=weights.parent) as folder:
        for k in range(rounds if not WAYS[way].after else 1):
            home = Path(folder) / str(k)
            home.mkdir()
            (home / "weights.pt").symlink_to(weights)
            if not WAYS[way].after:
                found.append(started(way, preset, home))
                done()
                continue
            started(WAYS[way].after, preset, home)
            done()
            for _ in range(rounds):
                found.append(started(way, preset, home))
                done()
    return min(found, key=lambda f: f["beyond"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--preset", default="100M", help="which Llama")
    parser.add_argument("--only", default="", help="ways with this in the name")
    parser.add_argument("--no-inductor", action="store_true", help="leave inductor out")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one process of each")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    if options.quick:
        options.preset, options.rounds, options.no_inductor = "tiny", 1, True
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """All figures, as a table."""
    from rich.progress import Progress

    from common import console, table, warn_if_busy

    warn_if_busy()
    skipped = options.no_inductor or shutil.which("g++") is None
    if skipped and not options.no_inductor:
        console.print("inductor and AOTInductor need g++, which is not here")
    ways = [w for w in WAYS if options.only in w and not (skipped and WAYS[w].inductor)]
    columns = ["way", "torch", "weights", "beyond", "of processors", "loads", "what"]
    shown = table("first result, seconds by the clock", columns)
    count = sum(options.rounds + bool(WAYS[w].after) for w in ways)
    verdict = ""
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as bar:
        weights, task = Path(folder) / "weights.pt", bar.add_task("starting", total=count)
        save(options.preset, weights)
        for way in ways:
            bar.update(task, description=way)
            step = partial(bar.advance, task)
            found = measured(way, options.preset, weights, options.rounds, step)
            parts = [f"{found[p]:.2f}" for p in ("torch", "weights", "beyond", "processor")]
            shown.add_row(way, *parts, " ".join(found["loads"]) or "-", WAYS[way].what)
            if way == "cached":
                met = "met" if found["beyond"] <= TARGET else "missed"
                verdict = f"cached: {found['beyond']:.2f} s (target {TARGET} s: {met})"
    console.print(shown)
    console.print(verdict)


if __name__ == "__main__":
    main()
