"""What a fresh process pays until its first result: start of Python, imports, model, compilation,
one call. Compilers start with an empty cache on disk, then again with what they left there.

Every figure is a process of its own, and nothing is subtracted. `import torch` is part of each. On
a busy machine the time of processors says more: that of the process and of compilers it started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# A measured process comes through here too: what it does not need is imported in functions.

STARTED = "TORCHAIR_BENCH_STARTED"
MODELS = ("two-layer MLP", "small BERT", "ResNet-18")
WAYS = ("eager", "aot_eager", "torchair", "inductor")
CACHES = {"torchair": "TORCHAIR_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}


def model_and_inputs(name: str) -> Any:
    """A model and the inputs of one call."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import models as m

    if name == "ResNet-18":
        resnet = m.RESNET["18"]
        return m.build(m.ResNet, resnet), m.resnet_inputs(resnet, 1)
    if name == "small BERT":
        bert = m.BertConfig(layers=4, dim=256, ffn=1024, vocab=30522, positions=512)
        return m.build(m.Bert, bert), m.bert_inputs(bert, 1, 128)
    mlp = m.MlpConfig(layers=2, dim=64)
    return m.build(m.Mlp, mlp), m.mlp_inputs(mlp)


def first_result(model: str, way: str) -> dict[str, float]:
    """Seconds since this process was started, and those of importing torch."""
    before = time.time()
    import torch

    imported = time.time() - before
    if way == "torchair":
        import torchair  # noqa: F401  registers the backend
    module, inputs = model_and_inputs(model)
    call = module if way == "eager" else torch.compile(module, backend=way, dynamic=False)
    with torch.no_grad():
        call(*inputs)
    return {"first": time.time() - float(os.environ[STARTED]), "torch": imported}


def process(model: str, way: str, folder: str) -> dict[str, float]:
    """The same in a new process; caches are in a folder."""
    environment = {
        **os.environ,
        STARTED: str(time.time()),
        "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its byte code
    }
    if way in CACHES:
        environment[CACHES[way]] = folder
    command = [sys.executable, __file__, "--model", model, "--way", way]
    spent = _processor_time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way} failed for {model}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "processor": _processor_time() - spent}


def _processor_time() -> float:
    """Of all processes that this one has waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(model: str, way: str, rounds: int) -> list[dict[str, float]]:
    """Least figures with an empty cache, and with a warm one where there is a cache."""
    runs = 2 if way in CACHES else 1
    found: list[list[dict[str, float]]] = [[] for _ in range(runs)]
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cold_", ignore_cleanup_errors=True) as folder:
            for mine in found:
                mine.append(process(model, way, folder))
    return [min(mine, key=lambda r: r["first"]) for mine in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="processes for each figure")
    parser.add_argument("--only", default="", help="part of the name of a model")
    parser.add_argument("--no-inductor", action="store_true", help="leave inductor out")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model and options.way:
        print(json.dumps(first_result(options.model, options.way)))
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """All figures, as a table."""
    from common import console, has_inductor, table

    skipped = {"inductor"} if options.no_inductor or not has_inductor() else set()
    names = [m for m in MODELS if options.only.lower() in m.lower()]
    ways = [w for w in WAYS if w not in skipped]
    columns = [c for w in ways for c in ([w, f"{w}, warm cache"] if w in CACHES else [w])]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    title = f"seconds from the start of a process to its first result (time of processors); {load}"
    shown, imports = table(title, ["model", *columns]), []
    for name in names:
        cells = []
        for way in ways:
            print(f"{name}: {way}", file=sys.stderr, flush=True)
            figures = measured(name, way, options.rounds)
            imports += [f["torch"] for f in figures]
            cells += [f"{f['first']:.1f} ({f['processor']:.1f})" for f in figures]
        shown.add_row(name, *cells)
    console.print(shown)
    console.print(f"of which importing torch: {min(imports):.2f} s at least")


if __name__ == "__main__":
    main()
