"""Models of timm against eager: forward in both modes, with and without frozen parameters, or a
training step. The contestants take turns and the best window's median counts.

timm is installed without what it depends on (pip install --no-deps timm), see vision.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from common import console, duration, interleaved, ratio, table, warn_if_busy
from contestants import torchair_backend
from vision import MODELS, model_and_picture

Call = Callable[[], Any]


def forward(name: str) -> dict[str, Call]:
    """Ways to run a model once."""
    model, picture = model_and_picture(name)
    backends = {
        "ours": torchair_backend(),
        "ours, capture": "npugraph_ex",
        "ours, frozen": torchair_backend(frozen=True),
    }
    calls: dict[str, Call] = {"eager": lambda: model(picture)}
    for way, backend in backends.items():
        compiled = torch.compile(model, backend=backend, dynamic=False)
        calls[way] = lambda compiled=compiled: compiled(picture)
    return {way: _without_gradients(call) for way, call in calls.items()}


def _without_gradients(call: Call) -> Call:
    def quiet() -> None:
        with torch.no_grad():
            call()

    return quiet


def training(name: str) -> dict[str, Call]:
    """Ways to get all gradients of a model once, for two pictures."""
    model, picture = model_and_picture(name)
    model.train()
    pictures = picture.repeat(2, 1, 1, 1)
    compiled = torch.compile(model, backend=torchair_backend(), dynamic=False)

    def step(run: Any) -> Call:
        def call() -> None:
            model.zero_grad()
            run(pictures).square().mean().backward()

        return call

    return {"eager": step(model), "ours": step(compiled)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of models, or parts of them, by commas")
    parser.add_argument("--train", action="store_true", help="training steps instead of forward")
    parser.add_argument("--quick", action="store_true", help="few and short windows")
    options = parser.parse_args()
    parts = options.only.split(",")
    names = [name for name in MODELS if any(part in name for part in parts)]
    warn_if_busy()
    ways = training if options.train else forward
    windows = {"windows": 2, "seconds": 0.05} if options.quick else {}
    rows = []
    for k, name in enumerate(names):
        console.print(f"{name}, model {k + 1} of {len(names)}", style="dim")
        torch._dynamo.reset()
        rows.append((name, interleaved(ways(name), **windows)))
    what = "training step, two pictures" if options.train else "forward, one picture"
    others = [way for way in rows[0][1] if way != "eager"] if rows else []
    title = f"{what}; in brackets how many times faster than eager"
    shown = table(title, ["model", "pixels", "eager", *others])
    for name, times in rows:
        cells = [f"{duration(times[w])} ({ratio(times, w, 'eager')})" for w in others]
        shown.add_row(name, str(MODELS[name]), duration(times["eager"]), *cells)
    console.print(shown)


if __name__ == "__main__":
    main()
