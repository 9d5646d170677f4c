"""From process start to the first result of a Llama decode step, beyond importing torch and loading
weights: what a cached method costs, beside compiling ours and inductor's, cold and warm.

Each figure is of a process of its own, the least of several.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import console, table

HERE = Path(__file__).resolve().parent
TARGET = 0.3
WAYS = {
    "cached": "torchair.inference.cache_compile, file and kernels there",
    "first": "the same, nothing there",
    "ours": "torch.compile, backend torchair, no kernels on disk",
    "ours, kernels": "torch.compile, backend torchair, kernels on disk",
    "inductor": "torch.compile, inductor, nothing cached",
    "inductor, warm": "torch.compile, inductor, its caches there",
}


def child(way: str, preset: str, weights: str, folder: str) -> None:
    """One start: seconds of wall and processor time, and what was imported."""
    import torch

    from models import LLAMA, Llama, llama_inputs

    config = LLAMA[preset]
    with torch.device("meta"):
        model = Llama(config).eval()
    model.load_state_dict(torch.load(weights, mmap=True), assign=True)
    inputs = llama_inputs(config)
    before = set(sys.modules)
    start, spent = time.perf_counter(), time.process_time()
    with torch.no_grad():
        _call_of(way, model, folder)(*inputs)
    wall, cpu = time.perf_counter() - start, time.process_time() - spent
    heavy = ("torch._dynamo", "torch._functorch.aot_autograd", "sympy")
    print(json.dumps([wall, cpu, [m for m in heavy if m in sys.modules and m not in before]]))


def _call_of(way: str, model: Any, folder: str) -> Callable[..., Any]:
    import torch

    if way in ("cached", "first"):
        from torchair.inference import cache_compile

        return cache_compile(model.forward, dynamic=False, cache_dir=folder)
    backend = "inductor" if way.startswith("inductor") else "torchair"
    return torch.compile(model, backend=backend, dynamic=False)  # type: ignore[no-any-return]


def save(preset: str, path: str) -> None:
    """Weights of the model, once."""
    import torch

    from models import LLAMA, Llama, build

    torch.save(build(Llama, LLAMA[preset]).state_dict(), path)


def started(way: str, preset: str, weights: str, folder: str) -> tuple[float, float, list[str]]:
    """Run one process."""
    environment = {
        **os.environ,
        "TORCHAIR_CACHE_DIR": f"{folder}/kernels",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCHAIR_KERNEL_CACHE": "0" if way == "ours" else "1",
    }
    command = [sys.executable, __file__, "--child", way, preset, weights, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    wall, cpu, heavy = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu, heavy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--preset", default="100M", help="which Llama")
    parser.add_argument("--only", default="", help="ways with this in the name")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    ways = [w for w in WAYS if options.only in w]
    if shutil.which("g++") is None:
        ways = [w for w in ways if not w.startswith("inductor")]
        console.print("inductor needs g++, which is not here")
    shown = table("first result, seconds", ["way", "wall", "processor", "loads", "what"])
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.pt"
        save(options.preset, weights)
        for number, way in enumerate(ways):  # names of ways have blanks, which g++ does not take
            cold = way in ("first", "inductor")
            if not cold:
                started(way, options.preset, weights, f"{folder}/{number}")
            found = [
                started(
                    way,
                    options.preset,
                    weights,
                    f"{folder}/{number}_{k}" if cold else f"{folder}/{number}",
                )
                for k in range(options.rounds)
            ]
            wall, cpu, heavy = min(found)
            shown.add_row(way, f"{wall:.2f}", f"{cpu:.2f}", " ".join(heavy) or "-", WAYS[way])
            if way == "cached":
                verdict = "met" if wall <= TARGET else "missed"
                console.print(f"cached: {wall:.2f} s (target {TARGET} s: {verdict})")
    console.print(shown)


if __name__ == "__main__":
    main()
