"""Products of many rows on a GPU beside those of cuBLAS, by shapes: device time and TFLOP/s.

A layer is `F.linear`, alone or with bias and GELU in the epilogue of ours, against torch's two
calls. Its weights are read from memory where they are small enough to stay in a cache: copies take
turns. Each contestant is recorded into a CUDA graph; the graphs are replayed in turns, and the best
replay counts. "Ours" is our default form; with `--forms` tiles of other shapes compete too, those
that are predicted to be fastest. Shapes that `--limit` leaves no time for are named.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

from common import console, table
from gpu_attention import measured
from torchair.codegen.cuda.driver import KernelLaunch, available, library
from torchair.codegen.cuda.matmul import default_form, layout_of, matmul
from torchair.codegen.cuda.matmul.forms import MatmulForm, Sizes, candidates, predicted, wins
from torchair.codegen.cuda.run import entry_alone
from torchair.codegen.loops import Access, Expr, Nest, Store, load, op
from torchair.codegen.requests import MatMul, Product
from torchair.codegen.target import Declined, Generated

LARGE = [
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (512, 8192, 2048),
    (2048, 8192, 2048), (4096, 2048, 8192), (4096, 11008, 4096), (16384, 2048, 2048),
    (8192, 8192, 8192),
]  # fmt: skip
"""Rows, columns and elements of a sum."""
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Columns and elements of the sums of a Llama layer of 8B: queries, keys and values, the output of
attention, gate and up, and down."""
ROWS = (16, 64, 256, 1024)
CACHE = 128 << 20
"""Bytes that surely do not fit into the cache."""
wide = Console(width=150)
OPERANDS = {"a": 0, "b": 1, "out": 3, "bias": 4}  # words
Shape = tuple[int, int, int]
Call = Callable[[], Any]


def request_of(shape: Shape, layout: str, fused: bool) -> Product:
    """What is asked for: rows by columns, with operands as they lie in memory. "nt" is a layer,
    "nn" and "tn" are the products of its backward."""
    m, n, k = shape
    a = (0, 1, m) if layout[0] == "t" else (0, k, 1)
    b = (0, 1, k) if layout[1] == "t" else (0, n, 1)
    value = Expr("given", "f32", (), 0)
    if fused:
        bias = load(Access(OPERANDS["bias"], "bf16", (0, 1)))
        value = Expr("gelu", "f32", (op("add", value, bias),))
    store = Store(Access(OPERANDS["out"], "bf16", (n, 1)), value)
    return Product(MatMul("bf16", 1, m, n, k, a, b), Nest((m, n), (store,)))


class Operands:
    """Tensors of a product; several B where one would stay in a cache."""

    def __init__(self, shape: Shape, layout: str) -> None:
        m, n, k = self.shape = shape
        scale, options = k**-0.5, {"device": "cuda", "dtype": torch.bfloat16}
        a = torch.randn(m, k, **options)  # type: ignore[call-overload]
        self.a = a.t().contiguous().t() if layout[0] == "t" else a
        copies = max(1, min(8, math.ceil(CACHE / (n * k * 2)))) if m <= 1024 else 1
        made = torch.randn(n, k, **options).mul_(scale)  # type: ignore[call-overload]
        made = made.t() if layout[1] == "t" else made.t().contiguous()
        self.b = [made.clone() for _ in range(copies)]
        self.bias = torch.randn(n, **options)  # type: ignore[call-overload]
        self.out = torch.empty(m, n, **options)  # type: ignore[call-overload]

    def library(self, fused: bool) -> list[Call]:
        """Torch's call for each B."""
        if fused:
            return [lambda b=b: F.gelu(F.linear(self.a, b.t(), self.bias)) for b in self.b]
        return [lambda b=b: torch.mm(self.a, b, out=self.out) for b in self.b]

    def ours(self, made: Generated) -> list[Call]:
        """Our launch for each B."""
        launch, entry = made.launch, entry_alone(made)
        assert launch is not None
        blocks = launch.blocks(lambda word: 0)
        calls = []
        for b in self.b:
            words = {0: self.a, 1: b, 3: self.out, 4: self.bias}
            given_words = [blocks, *(words[w].data_ptr() for w in made.kernel.words)]
            size = (launch.shared, launch.cluster)
            call = KernelLaunch(library(0), entry, blocks, given_words, *size)
            calls.append(lambda call=call: call(torch.cuda.current_stream().cuda_stream))
        return calls

    def check(self, name: str, call: Call, fused: bool) -> None:
        """What is fast and wrong does not count."""
        self.out.zero_()
        got = call()
        got = self.out if got is None else got
        right = self.a[:256].float() @ self.b[0].float()
        right = F.gelu(right + self.bias.float()) if fused else right
        error = ((got[:256].float() - right).norm() / right.norm()).item()
        last = bool(got[-1].any())
        assert error < 0.01 and last, f"{name}: relative error {error}"


def forms_of(shape: Shape, layout: str, count: int) -> list[MatmulForm]:
    """Forms that compete, the default first."""
    machine, request = library(0).machine, request_of(shape, layout, False)
    asked, sizes = layout_of(request.matmul), Sizes(1, *shape)
    others = candidates(sizes, machine.multiprocessors, count + 1, layout=asked)
    return list(dict.fromkeys([default_form(request, machine), *others]))[: count + 1]


def generated(request: Product, form: MatmulForm) -> Generated:
    """A kernel."""
    kernel, launch = matmul(request, library(0).machine, form=form)
    return Generated(kernel, launch=launch)


def kernels(shape: Shape, layout: str, forms: list[MatmulForm]) -> dict[bool, dict[str, Generated]]:
    """Kernels of a shape, without and with an epilogue, compiled side by side."""
    found: dict[bool, dict[str, Generated]] = {}
    for fused in (False, True) if layout == "nt" else (False,):
        made = found[fused] = {}
        for form in forms:
            try:
                made[str(form)] = generated(request_of(shape, layout, fused), form)
            except Declined as e:
                console.print(f"{shape}, {form}: {e}")
    errors = library(0).add([entry_alone(k) for made in found.values() for k in made.values()])
    for name, error in errors.items():
        console.print(f"{name}: {error}")
    return found


def contest(shape: Shape, layout: str, fused: bool, made: dict[str, Generated]) -> dict[str, float]:
    """Seconds of each contestant."""
    operands = Operands(shape, layout)
    calls = {"library": operands.library(fused)}
    calls |= {name: operands.ours(kernel) for name, kernel in made.items()}
    for name, each in calls.items():
        operands.check(name, each[0], fused)
    rounds = {name: lambda each=each: [call() for call in each] for name, each in calls.items()}
    found = measured(rounds, rounds=5)
    return {name: t / len(operands.b) for name, t in found.items()}


def rows(shapes: list[Shape], layout: str, count: int, end: float) -> Iterator[dict[str, Any]]:
    """What was measured for each shape, up to a time."""
    multiprocessors = library(0).machine.multiprocessors
    for shape in track(shapes, f"layout {layout}", console=console, transient=True):
        if time.monotonic() > end:
            console.print(f"no time was left for {shape}, {layout}")
            continue
        forms = forms_of(shape, layout, count)
        cycles = {str(f): predicted(f, Sizes(1, *shape), multiprocessors) for f in forms}
        for fused, made in kernels(shape, layout, forms).items():
            times = contest(shape, layout, fused, made)
            yield {
                "shape": shape, "layout": layout, "fused": fused, "library": times.pop("library"),
                "ours": times, "cycles": cycles, "default": str(forms[0]),
                "served": wins(1, *shape, multiprocessors),
            }  # fmt: skip


def report(found: list[dict[str, Any]], title: str) -> None:
    """A table, and geometric means."""
    columns = ["rows x columns x sum", "library us", "ours us", "to the library", "form"]
    shown = table(title, [*columns, "fastest us", "to the library", "fastest form", "served"])
    ratios, best_ratios = [], []
    for row in found:
        shape, times = row["shape"], row["ours"]
        mine, fastest = times[row["default"]], min(times, key=times.__getitem__)
        ratios.append(row["library"] / mine)
        best_ratios.append(row["library"] / times[fastest])
        shown.add_row(
            " x ".join(map(str, shape)), f"{row['library'] * 1e6:.1f}", f"{mine * 1e6:.1f}",
            f"{ratios[-1]:.2f}", row["default"], f"{times[fastest] * 1e6:.1f}",
            f"{best_ratios[-1]:.2f}", fastest, "yes" if row["served"] else "no",
        )  # fmt: skip
    wide.print(shown)
    mean, best = (math.exp(sum(map(math.log, x)) / len(x)) for x in (ratios, best_ratios))
    console.print(f"  geometric mean {mean:.3f} of the library, of the fastest forms {best:.3f}")
    for row in found:
        forms = sorted(row["ours"].items(), key=lambda item: item[1])
        if len(forms) > 1:
            each = ", ".join(f"{name} {t * 1e6:.1f}" for name, t in forms)
            wide.print(f"  {' x '.join(map(str, row['shape']))}: {each}", highlight=False)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", type=int, default=0, help="how many other forms compete")
    parser.add_argument("--layout", nargs="+", choices=("nt", "nn", "tn"), default=["nt"])
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds to measure in")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    args = parser.parse_args()
    missing = available()
    if missing:
        console.print(f"Products are measured on a GPU, and there is none: {missing}.")
        return
    layers = [(m, n, k) for m in ROWS for n, k in LAYER]
    everything, end = [], time.monotonic() + args.limit
    for layout in args.layout:
        shapes = [LARGE[0], *layers, *LARGE[1:]] if layout == "nt" else LARGE
        found = []
        for row in rows(shapes[::4] if args.quick else shapes, layout, args.forms, end):
            found.append(row)
            if args.json:  # a run that is stopped has what it has measured
                args.json.write_text(json.dumps(everything + found))
        for fused in sorted({row["fused"] for row in found}):
            mine = [row for row in found if row["fused"] == fused]
            report(mine, f"bfloat16, {layout}, {'bias and GELU' if fused else 'plain'}")
        everything += found


if __name__ == "__main__":
    main()
