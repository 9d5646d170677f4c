"""Errors that are put into the compiler on purpose, and whether `torchair.verify` finds them and
blames the right part.

    python tests/tools/planted.py             all 40, then the 28 architectures, which have none
    python tests/tools/planted.py --only swi  those with this in their name
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchair
import torchair.ascend.rules
from torchair import ge
from torchair.capture import cpu as capture_cpu
from torchair.capture import graph as capture_graph
from torchair.capture import tape as capture_tape
from torchair.codegen.cpu.generators import GENERATORS
from torchair.codegen.loops import Expr
from torchair.codegen.requests import Attention, Pool, Product
from torchair.concrete import acl
from torchair.convert import registry
from torchair.engine.optimize.rules import PATTERNS, RULES
from torchair.operators import core, row_of
from torchair.operators.formulas import add as plus
from torchair.operators.formulas import mul
from torchair.operators.loops import Lowered
from torchair.verification.report import Author, Finding, Report

aten = torch.ops.aten

# ---- models


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x))).sigmoid()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(y))


class Spelled(nn.Module):
    """A block of a decoder in simple operators, which patterns fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(16, 32) / 4) for _ in range(2))
        self.down, self.scale = nn.Parameter(torch.randn(32, 16) / 6), nn.Parameter(torch.rand(16))
        self.shift = nn.Parameter(torch.randn(16))

    def rms(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.rms(x)
        halves = torch.cat((-h[..., 8:], h[..., :8]), -1)
        h = h * cos + halves * sin
        gate = h @ self.gate
        h = h + (gate * gate.sigmoid() * (h @ self.up)) @ self.down
        mean = h.mean(-1, keepdim=True)
        off = h - mean
        normal = off / torch.sqrt((off * off).mean(-1, keepdim=True) + 1e-5)
        h = normal * self.scale + self.shift
        return 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h * h * h)))


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return y.mean((2, 3)).log_softmax(-1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(19, 8), nn.Linear(16, 19, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids)
        scores = self.head(torch.cat((x, x.flip(1)), -1))
        return scores.softmax(-1), torch.where(scores > 0, scores, scores * 0.1)


def cached(cache: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    cache.mul_(0.5).index_copy_(1, at, x)
    scores = torch.einsum("bsd,btd->bst", x, cache)
    return scores.softmax(-1) @ cache, cache.amax(1)


def statistics(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = (x - y).abs() / (y.exp() + 1)
    return z.sum(-1), z.mean(0), (z - z.mean(1, keepdim=True)).square().sum(0), x.clamp(-1, 1) - z


def products(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    d = torch.mm(a, b.t()) + c
    return torch.bmm(d.unsqueeze(0), b.unsqueeze(0)) * 1.0, d.clone().tanh()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (Mlp, lambda: (torch.randn(6, 12),)),
    "encoder": (Encoder, lambda: (torch.randn(2, 7, 16),)),
    "spelled": (Spelled, lambda: (torch.randn(2, 5, 16), torch.rand(5, 16), torch.rand(5, 16))),
    "picture": (Picture, lambda: (torch.randn(2, 3, 8, 8),)),
    "words": (Words, lambda: (torch.randint(0, 19, (2, 6)),)),
    "cached": (
        lambda: cached,
        lambda: (torch.randn(2, 9, 4), torch.randn(2, 2, 4), torch.tensor([3, 5])),
    ),
    "statistics": (lambda: statistics, lambda: (torch.randn(5, 6), torch.randn(5, 6))),
    "products": (
        lambda: products, lambda: (torch.randn(4, 6), torch.randn(5, 6), torch.randn(5)),
    ),
}  # fmt: skip


# ---- errors


@dataclass(frozen=True)
class Plant:
    """One error: where it is, the model that meets it, and what the report must name."""

    stage: Author
    name: str
    model: str
    apply: Callable[[pytest.MonkeyPatch], None]
    options: dict[str, Any]


def converter(model: str, target: Any, change: Callable[..., Any]) -> Plant:
    """`change(fn, *args, **kwargs)` stands in for the converter `fn` of a target."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        entry = registry.find(target)
        assert entry is not None
        wrong = replace(entry, fn=lambda *args, **kwargs: change(entry.fn, *args, **kwargs))
        patch.setitem(registry._builtin, target, wrong)

    return Plant(Author.CONVERTER, str(target), model, apply, {})


def scaled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    made = fn(*args, **kwargs)
    if isinstance(made, list | tuple):
        return [ge.Mul(made[0], ge.Const(1.01)), *made[1:]]
    return ge.Mul(made, ge.Const(1.01))


def rule(model: str, name: str, change: Callable[[Any], Any] | None = None) -> Plant:
    """`change` stands between a rule and what it gives."""
    change = change or (lambda made: ge.Mul(made, ge.Const(1.01)))

    def apply(patch: pytest.MonkeyPatch) -> None:
        for found in [r for r in (*RULES, *PATTERNS) if r.name == name]:
            patch.setattr(found, "find", _changing(found.find, change))

    return Plant(Author.RULE, name, model, apply, {})


def _changing(find: Any, change: Callable[[Any], Any]) -> Any:
    def wrong(*args: Any) -> Any:
        build = find(*args)

        def changed() -> Any:
            made = build()
            if isinstance(made, list | tuple):
                return [change(made[0]), *made[1:]]
            return change(made)

        return None if build is None else changed

    return wrong


def lowered(model: str, op_type: str, change: Callable[[Expr], Expr]) -> Plant:
    """`change` stands between the rule of the loop IR and the elements of its first result."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        row = row_of(op_type)
        assert row is not None and row.loops is not None
        known = row.loops

        def wrong(node: Any) -> Any:
            made = known.rule(node)
            first = made[0] if isinstance(made, list | tuple) else made
            twisted = Lowered(first.shape, first.dtype, lambda place: change(first.at(place)))
            return [twisted, *made[1:]] if isinstance(made, list | tuple) else twisted

        patch.setitem(core._rows, op_type, replace(row, loops=replace(known, rule=wrong)))

    return Plant(Author.KERNEL, op_type, model, apply, {})


def generated(model: str, op_type: str, kind: type, change: Callable[[Any], Any]) -> Plant:
    """`change` makes another request of the one that a generator gets."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        generate = GENERATORS[kind]
        patch.setitem(GENERATORS, kind, lambda r, *rest: generate(change(r), *rest))

    return Plant(Author.KERNEL, op_type, model, apply, {})


def captured(
    name: str,
    model: str,
    place: Any,
    method: str,
    wrong: Callable[..., Any],
    tape: bool = False,
    shared: bool = False,
) -> Plant:
    """`wrong(method, self, *args)` stands in for a method of capture; `tape` is for graphs that are
    recorded call by call, `shared` for results in fixed memory."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        known = getattr(place, method)
        patch.setattr(place, method, lambda *args, **kwargs: wrong(known, *args, **kwargs))
        if tape:
            find = capture_graph.substrate_for
            patch.setattr(
                acl, "substrate_for", lambda args, engine, **rest: find(args, engine=None, **rest)
            )

    config = torchair.CompilerConfig()
    config.debug.aclgraph.share_results = shared
    return Plant(Author.REPLAY, name, model, apply, {"mode": "reduce-overhead", "config": config})


# ---- what is wrong in capture


def first_arguments(call: Any, self: Any, args: Any, hold: bool) -> Any:
    """Every replay reads the inputs of the first."""
    self.__dict__.setdefault("kept", [a.clone() if isinstance(a, Tensor) else a for a in args])
    given = [
        k if isinstance(k, Tensor) and k.dim() == 3 else a
        for a, k in zip(args, self.kept, strict=True)
    ]
    return call(self, given, hold)


def first_results(call: Any, self: Any, args: Any, hold: bool) -> Any:
    """Every replay gives the results of the first."""
    made = call(self, args, hold)
    return self.__dict__.setdefault("kept", [r.clone() for r in made])


def swapped(call: Any, self: Any, args: Any, hold: bool) -> Any:
    made = list(call(self, args, hold))
    return (made[1], made[0], *made[2:])


def run_twice(call: Any, self: Any, args: Any, hold: bool) -> Any:
    """As if a warm-up had been seen by the caller: updates are done twice."""
    call(self, args, hold)
    return call(self, args, hold)


def cut_short(call: Any, self: Any, args: Any, hold: bool) -> Any:
    """The last elements of a result were not written yet."""
    made = call(self, args, hold)
    made[0].view(-1)[-1] = 0
    return made


def without_feed(feed: Any, self: Any, args: Any) -> None:
    """Inputs are brought once only."""
    if "fed" not in self.__dict__:
        feed(self, args)
    self.fed = True


def feed_crossed(feed: Any, self: Any, args: Any) -> None:
    """The first two inputs are exchanged."""
    feed(self, [args[1], args[0], *args[2:]])


def not_replayed(replay: Any, self: Any) -> None:
    """Only the first replay runs."""
    if "ran" not in self.__dict__:
        replay(self)
        self.__dict__.pop("replay", None)
    self.ran = True


def half(request: Any) -> Any:
    """A product that leaves out the last terms of its sums."""
    return replace(request, matmul=replace(request.matmul, k=request.matmul.k - 1))


RECORDING = capture_cpu.EngineRecording
FIXED, TAPE = capture_cpu.FixedRecording, capture_tape.TapeRecording

PLANTS: tuple[Plant, ...] = (
    converter("mlp", aten.addmm.default, lambda fn, b, x, w, **k: fn(b, x, w, beta=2, **k)),
    converter("mlp", aten.gelu.default, lambda fn, x, **k: fn(x, approximate="tanh")),
    converter("mlp", aten.sigmoid.default, lambda fn, x, **k: ge.Tanh(x)),
    converter("encoder", aten.native_layer_norm.default,
              lambda fn, x, s, w, b, eps, **k: fn(x, s, w, b, 1e-2, **k)),
    converter("picture", aten.relu.default, lambda fn, x, **k: ge.LeakyRelu(x, negative_slope=0.2)),
    converter("picture", aten._log_softmax.default, scaled),
    converter("words", aten.where.self, lambda fn, c, a, b, **k: fn(c, b, a, **k)),
    converter("words", aten.cat.default, lambda fn, xs, dim=0, **k: fn(xs[::-1], dim, **k)),
    converter("statistics", aten.sub.Tensor, lambda fn, a, b, **k: fn(b, a, **k)),
    converter("statistics", aten.sum.dim_IntList, scaled),
    rule("spelled", "RmsNormFusion"),
    rule("spelled", "LayerNormFusion"),
    rule("spelled", "GeluFusion"),
    rule("spelled", "RotaryMulFusion"),
    rule("spelled", "SwishFusion"),
    rule("products", "TransposeIntoMatMulX2"),
    rule("products", "MultiplyByOne"),
    rule("products", "BiasIntoMatMul"),
    rule("mlp", "BiasIntoMatMulV2"),
    rule("encoder", "TransposeIntoMatMulV2X2"),
    lowered("mlp", "Gelu", lambda x: mul(x, 1.001)),
    lowered("picture", "Relu", lambda x: mul(x, 1.01)),
    lowered("encoder", "LayerNormV4", lambda x: plus(x, 0.001)),
    lowered("words", "SoftmaxV2", lambda x: mul(x, 0.999)),
    lowered("words", "SelectV2", lambda x: mul(x, 1.01)),
    lowered("statistics", "ReduceMean", lambda x: mul(x, 1.001)),
    lowered("statistics", "Exp", lambda x: mul(x, 1.0001)),
    generated("products", "MatMul", Product, half),
    generated("encoder", "Attention", Attention, lambda r: replace(r, scale=r.scale * 1.1)),
    generated("picture", "MaxPool", Pool, lambda r: replace(r, kind="avg")),
    captured("first arguments", "encoder", RECORDING, "call", first_arguments),
    captured("first results", "mlp", RECORDING, "call", first_results),
    captured("swapped", "words", RECORDING, "call", swapped),
    captured("run twice", "cached", RECORDING, "call", run_twice),
    captured("cut short", "picture", RECORDING, "call", cut_short),
    captured("not fed", "mlp", FIXED, "feed", without_feed, shared=True),
    captured("fed crosswise", "statistics", FIXED, "feed", feed_crossed, shared=True),
    captured("not replayed", "words", FIXED, "replay", not_replayed, shared=True),
    captured("tape not fed", "statistics", TAPE, "feed", without_feed, tape=True),
    captured("tape crosswise", "statistics", TAPE, "feed", feed_crossed, tape=True),
)  # fmt: skip


# ---- looking


def look(plant: Plant, folder: Path) -> Report:
    """The report on a model with an error planted."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, inputs = MODELS[plant.model]
    model = make()
    if isinstance(model, nn.Module):
        model.eval()
    with pytest.MonkeyPatch.context() as patch:
        plant.apply(patch)
        return torchair.verify(model, *inputs(), folder=folder, **plant.options)


def blamed_rightly(plant: Plant, finding: Finding) -> bool:
    """Whether a finding names the part that the error is in."""
    if finding.stage is not plant.stage:
        return False
    if plant.stage is Author.RULE:
        return finding.culprit.startswith(f"{plant.name} at ")
    return plant.stage is Author.REPLAY or plant.name in finding.culprit


def _all(only: str) -> int:
    plants = [p for p in PLANTS if only in p.name.lower()]
    found = right = 0
    for plant in plants:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = look(plant, Path(folder))
                findings = report.findings
            except Exception as e:
                print(f"FAILED {plant.stage.value:16s} {plant.name}: {e}")
                continue
        good = bool(findings) and blamed_rightly(plant, findings[0])
        found, right = found + bool(findings), right + good
        text = f"{findings[0].stage.value} {findings[0].culprit}" if findings else "nothing found"
        head = f"{'right' if good else 'WRONG'}  {plant.stage.value:16s} {plant.name:34s}"
        print(f"{head} {text} ({time.perf_counter() - begun:.1f} s)", flush=True)
        if findings and not good:
            print(f"       {findings[0]}")
        for note in (n for g in report.graphs for n in g.notes):
            print(f"       {note}")
    print(f"planted {len(plants)}, found {found}, blamed rightly {right}")
    return 0 if found == len(plants) and right >= len(plants) - 2 else 1


def _architectures(only: str) -> int:
    """Models without errors: none must be reported."""
    from architectures import CASES, FLOATS, MIXTRAL, MORE

    alarms = 0
    for name, case in (CASES | MORE | {"mixtral": MIXTRAL}).items():
        if only not in name:
            continue
        torch._dynamo.reset()
        inputs = case.arguments(2, 12, FLOATS[0])
        with tempfile.TemporaryDirectory() as folder:
            report = torchair.verify(case.build(FLOATS[0]), folder=folder, **inputs)
        alarms += len(report.findings)
        notes = [n for g in report.graphs for n in g.notes]
        print(f"{name}: {'right' if report else report} {notes or ''}", flush=True)
    print(f"{alarms} false alarms")
    return min(alarms, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--architectures", action="store_true", help="only models without errors")
    options = parser.parse_args(arguments)
    wrong = 0 if options.architectures else _all(options.only)
    if options.architectures or not options.only:
        wrong |= _architectures(options.only)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
