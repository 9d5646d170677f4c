"""How a model becomes native code on a CPU, each stage as text.

Run it: `python examples/native.py`. What it prints is explained, piece by piece, in
docs/cpu_engine.md.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified

import torchair
from torchair import ge
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import Nest, Store, access, at_axis, const, load, simplify
from torchair.codegen.loops import op as apply
from torchair.codegen.sizes import GuardSet
from torchair.codegen.text.writer import Machine
from torchair.configs.compiler_config import CompilerConfig
from torchair.engine.plan.records import Plan
from torchair.engine.session import TorchNpuGraph
from torchair.operators.core import FLOATS, Lowering, Op, Trait, add_row, same_as
from torchair.operators.formulas import Formula, div, mul, operator, with_attributes
from torchair.operators.loops import Lowered, LowerOp
from torchair.pipeline import NpuFxCompiler
from torchair.trace import Trace

# ---- models


class Block(nn.Module):
    """Words to vectors, a feed-forward block, scores in order."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * 8
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return torch.softmax(x, dim=-1).sort().values


class Picture(nn.Module):
    """A convolution as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


# ---- compiling, and looking at what was made


def compiled(
    model: Any, *, frozen: bool = False, dynamic: bool = False
) -> tuple[Any, list[TorchNpuGraph]]:
    """The model compiled as by `get_npu_backend()`; the list gets the engine's handle of it."""
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    sessions: list[TorchNpuGraph] = []

    def compile_graph(gm: Any, inputs: Any) -> Any:
        runner: Any = NpuFxCompiler(config, Trace())(gm, inputs)
        sessions.append(runner.runner.session)
        return runner

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compile_graph)

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=dynamic), sessions


def checked(call: Any, model: Any, *inputs: torch.Tensor) -> None:
    """Call both, compare."""
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(call(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@contextmanager
def fusion_report() -> Iterator[list[str]]:
    """What TORCHAIR_DEBUG=3 says about fusion while a model is called for the first time."""
    lines: list[str] = []
    os.environ["TORCHAIR_DEBUG"] = "3"
    try:
        with redirect_stdout(io.StringIO()) as said:
            yield lines
    finally:
        del os.environ["TORCHAIR_DEBUG"]
    lines += [line for line in said.getvalue().splitlines() if not line.startswith("torchair ")]


def show(title: str, *lines: str) -> None:
    print(f"\n== {title}\n")
    print("\n".join(lines))


def steps_of(plan: Plan) -> list[str]:
    lines = [f"{'step':6s}{'kind':8s}{'nodes':28s}{'reads':12s}{'writes':8s}work"]
    for i, step in enumerate(plan.steps):
        nodes = " ".join(n.type for n in step.also or [step.node])
        reads = " ".join(str(s) for s in step.args)
        writes = " ".join(str(s) for s in step.outs)
        work = f"{step.code.work:.1f} us" if step.native else "-"
        lines.append(f"{i:<6d}{step.kind:8s}{nodes:28s}{reads:12s}{writes:8s}{work}")
    return lines


def last_plan(session: TorchNpuGraph) -> Plan:
    plan = session.last_plan()
    assert plan is not None
    return plan


def packed_bytes(plan: Plan) -> int:
    """Bytes of constants that were laid out anew for kernels."""
    natives = [s.native for s in plan.steps if s.native is not None]
    packed = [t for n in natives for t in n.packed.values()]
    return sum(t.numel() * t.element_size() for t in packed)


def fusion_and_steps() -> None:
    model, tokens = Block().eval(), torch.arange(32).reshape(2, 16)
    call, sessions = compiled(model)
    with fusion_report() as lines:
        checked(call, model, tokens)
    show("1 units", *lines)
    show("2 steps", *steps_of(last_plan(sessions[0])))


def frozen_weights() -> None:
    model, image = Picture().eval(), torch.randn(1, 32, 8, 8)
    for frozen in (False, True):
        call, sessions = compiled(model, frozen=frozen)
        with fusion_report() as lines:
            checked(call, model, image)
        lines.append(f"packed: {packed_bytes(last_plan(sessions[0]))} bytes")
        show(f"3 a convolution, frozen_parameter = {frozen}", *lines)


# ---- the loop IR


def scaled_relu() -> Nest:
    """y[i, j] = max(x[i, j], 0) * 2 over contiguous matrices of 2 x 4 elements."""
    here = (at_axis(0), at_axis(1))
    x = load(access(0, "f32", (4, 1), here, axes=2))
    y = apply("mul", apply("max", x, const(0.0, "f32")), const(2.0, "f32"))
    return Nest((2, 4), (Store(access(1, "f32", (4, 1), here, axes=2), y),))


def loop_ir() -> None:
    nest = scaled_relu()
    show("4 a nest", str(nest))
    simple = simplify(nest)
    show("5 the same, simplified", str(simple))
    narrow = Machine("generic", "", bits=128)
    kernel = print_nest(simple, narrow, "scaled_relu")
    text = kernel.text.replace(kernel.entry, "scaled_relu").rstrip()
    show("6 its LLVM text for vectors of 128 bits", text)


# ---- sizes that vary


def numbers() -> None:
    guards = GuardSet()
    rows, row = guards.variable(5), guards.variable(64)  # the sizes of the first plan
    total = rows * row  # a generator computes with them,
    whole = row % 16 == 0  # decides something,
    word = guards.word(total, first=64)  # and passes one to the kernel
    words = guards.recipe()  # for the sizes of others, None where the decision would be different
    show(
        "7 Numbers",
        f"5 rows of 64: {total!r} elements in {word}, whole vectors: {whole}",
        f"9 rows of 32: words {words([9, 32])}",
        f"9 rows of 30: words {words([9, 30])}",
    )


def many_sizes() -> None:
    model = Block().eval()
    call, sessions = compiled(model, dynamic=True)
    lines: list[str] = []
    known: set[str] = set()
    for batch, length in ((2, 16), (3, 7), (5, 40), (2, 16)):
        checked(call, model, torch.randint(100, (batch, length)))
        steps, plans = last_plan(sessions[0]).steps, sessions[0].summary().plans
        kernels = {s.native.kernel.entry for s in steps if s.native is not None}
        new = len(kernels - known)
        lines.append(f"{batch} x {length:2d}: plans {plans}, kernels {len(kernels)}, new {new}")
        known |= kernels
    show("8 one graph, several sizes", *lines)


# ---- an operator of one's own


@torch.library.custom_op("example::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, bound: float) -> torch.Tensor:
    """A value that never leaves the bounds: bound * tanh(x / bound)."""
    return bound * torch.tanh(x / bound)


@soft_clip.register_fake
def _(x: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.empty_like(x)


@torchair.register_fx_node_ge_converter(torch.ops.example.soft_clip.default)
def convert_soft_clip(x: ge.Tensor, bound: float) -> ge.Tensor:
    """soft_clip(Tensor x, float bound) -> Tensor"""
    bounds = {"bound": ge.attr.Float(bound)}
    return ge.custom_op("SoftClip", inputs={"x": x}, outputs=["y"], attrs=bounds)


def soft_clip_kernel(op: Op) -> Any:
    bound = op.attr("bound")
    return lambda x, out=None: torch.mul(torch.tanh(x / bound), bound, out=out)


add_row("SoftClip", same_as("x"), soft_clip_kernel, Trait.ELEMENTWISE, out=True)

tanh = operator("tanh")


def soft_clip_formula(o: LowerOp) -> Formula:
    bound = o.attr("bound")
    return lambda x: mul(tanh(div(x, bound)), bound)


def enter(loops: Lowering) -> None:
    row = (same_as("x"), soft_clip_kernel, Trait.ELEMENTWISE)
    add_row("SoftClip", *row, out=True, loops=loops, types=FLOATS, instead=True)


def clipped(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(soft_clip(x + 1, 2.0))


def lowering_rule() -> None:
    x = torch.randn(4, 64)
    with fusion_report() as before:
        checked(compiled(clipped)[0], clipped, x)
    show("9 an operator without a rule", *before)
    enter(Lowering(with_attributes(soft_clip_formula)))
    with fusion_report() as after:
        checked(compiled(clipped)[0], clipped, x)
    show("10 with a rule", *after)


# ---- when something goes wrong


def broken_rule(o: LowerOp) -> Lowered:
    raise ValueError("this rule has a fault")


def faults() -> None:
    enter(Lowering(broken_rule))
    with warnings.catch_warnings(record=True) as said, redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        compiled(clipped)[0](torch.randn(4, 64))
    told = (str(w.message).partition(". ")[0] for w in said)
    show("11 a rule that fails", *(text for text in told if "native" in text))

    call, _ = compiled(Block().eval())
    try:
        call(torch.full((2, 16), 100))  # there are 100 words, counted from 0
    except RuntimeError as error:
        lines = str(error).splitlines()[:2]
        show("12 an index out of range", *(re.sub(r"\s*\^+", "", line) for line in lines))


def main() -> None:
    torch.manual_seed(0)
    fusion_and_steps()
    frozen_weights()
    loop_ir()
    numbers()
    many_sizes()
    lowering_rule()
    faults()
    print("\nall results were equal to eager")


if __name__ == "__main__":
    main()
