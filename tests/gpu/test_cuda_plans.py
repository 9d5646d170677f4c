"""What plans for a GPU arrange around the calls of libraries: their order, branches, layouts, and
the functions that are approximate there. None of it needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cuda_graphs import data
from cuda_tools import HOPPER, made
from ptx_machine import Memory, launch
from torchair import ge
from torchair.codegen import program
from torchair.codegen.cpu.target import cpu
from torchair.codegen.cuda import run as cuda_run
from torchair.codegen.cuda.point import APPROXIMATE, rounded_at_once
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.loops import Access, Expr, Nest, Store, load, op
from torchair.codegen.program import AuxMemory
from torchair.engine.inspect.dry_run import DryRun, dry_run
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.forms import lay_out_filters
from torchair.engine.plan.forks import forks
from torchair.engine.plan.records import Plan
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer

CONVOLUTION: dict[str, Any] = {
    "strides": [1, 1, 1, 1], "pads": [1, 1, 1, 1], "dilations": [1, 1, 1, 1], "groups": 1,
    "data_format": "NCHW", "offset_x": 0,
}  # fmt: skip


def kinds(plan: Plan) -> list[str]:
    return ["+".join(n.type for n in (s.also or [s.node])) for s in plan.steps]


def groups(run: DryRun) -> list[list[str]]:
    """Steps that are run as one."""
    return [
        ["+".join(n.type for n in (s.also or [s.node])) for part in group for s in part.steps]
        for group in run.plan.groups
    ]


def attention_inputs(rows: int, dim: int) -> DryRun:
    """Products of one input, each with work of its own after it."""
    with Graph("g", infer) as graph:
        x, scale = data(0, rows, dim), data(1, dim)
        weights = [data(i, dim, dim) for i in range(2, 6)]
        h, _ = ge.RmsNorm(x, scale, epsilon=1e-5)
        a, b, c = (ge.MatMul(h, w, transpose_x2=True) for w in weights[:3])
        both = ge.MatMul(ge.Relu(a), ge.Neg(b), transpose_x2=True)
        ge.NetOutput([both, ge.MatMul(ge.Add(b, c), weights[3], transpose_x2=True)])
    return dry_run(graph, HOPPER)


def test_products_of_one_input_follow_one_another_and_are_branches() -> None:
    found = groups(attention_inputs(16, 256))
    assert found[1] == ["MatMul"] * 3
    assert sum(len(g) for g in found) == len(attention_inputs(16, 256).plan.steps)


def test_a_product_that_needs_another_is_no_branch_beside_it() -> None:
    with Graph("g", infer) as graph:
        x, first, second = data(0, 16, 64), data(1, 64, 64), data(2, 64, 64)
        h = ge.MatMul(x, first, transpose_x2=True)
        ge.NetOutput([ge.MatMul(h, second, transpose_x2=True)])
    assert groups(dry_run(graph, HOPPER)) == [["MatMul"], ["MatMul"]]


def test_large_products_are_no_branches() -> None:
    assert ["MatMul"] * 3 not in groups(attention_inputs(4096, 1024))


def test_on_the_cpu_nothing_is_a_branch() -> None:
    plan = attention_inputs(16, 256).plan
    assert max(map(len, forks(plan))) > 1
    plan.device, plan.target = "cpu", cpu()
    assert max(map(len, forks(plan))) == 1


def convolutions(dtype: DataType) -> DryRun:
    with Graph("g", infer) as graph:
        x, first, second = (
            data(i, *dims, dtype=dtype)
            for i, dims in enumerate(((1, 64, 9, 9), (64, 64, 3, 3), (64, 64, 3, 3)))
        )
        a = ge.Relu(ge.Conv2D(x, first, None, None, **CONVOLUTION))
        b = ge.Relu(ge.Add(ge.Conv2D(a, second, None, None, **CONVOLUTION), a))
        ge.NetOutput([ge.Conv2D(b, first, None, None, **CONVOLUTION)])
    lay_out_filters(graph, GraphState(channels_last=True))
    return dry_run(graph, HOPPER)


def test_convolutions_of_short_floats_have_channels_last() -> None:
    """Filters are moved once and first, side by side; what lies between convolutions is written as
    they want it."""
    run = convolutions(DataType.DT_BF16)
    plan = run.plan
    assert kinds(plan)[:3] == ["TensorMove", "TensorMove", "Conv2D"]
    assert kinds(plan).count("TensorMove") == 2
    made_here = [plan.place(o)[0].meta for s in plan.steps for o in s.outs]
    assert all(m.is_contiguous(memory_format=torch.channels_last) for m in made_here)
    assert len(run.launches[0]) == 2


def test_convolutions_of_float32_stay_as_they_are() -> None:
    assert "TensorMove" not in kinds(convolutions(DataType.DT_FLOAT).plan)


# ---- approximate functions


def of_each(name: str, stored: str) -> Nest:
    x = load(Access(0, "bf16", (1,)))
    return Nest((1 << 16,), (Store(Access(1, stored, (1,)), Expr(name, "f32", (x,))),))


TRUE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "gelu": lambda x: x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5)),
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", sorted(APPROXIMATE))
def test_results_of_bfloat16_are_right_for_all_values(name: str) -> None:
    """For each of the 65,536 numbers: the nearest one, or the next to it."""
    nest = of_each(name, "bf16")
    assert rounded_at_once(nest)
    kernel, how, _ = made(nest, 2, HOPPER)
    given = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    memory = Memory()
    bits = [given.view(torch.int16).numpy().view(np.uint16), np.zeros(1 << 16, np.uint16)]
    places = [memory.place(b) for b in bits]
    launch(kernel, how, HOPPER, memory, places)
    got = torch.from_numpy(memory.read(places[1], bits[1]).view(np.int16)).view(torch.bfloat16)
    exact = TRUE[name](given.double())
    if name in ("gelu", "silu"):  # x times 0, where torch's own kernels differ
        exact = torch.where(given == -math.inf, torch.nan, exact)
    wanted = exact.bfloat16()
    assert torch.equal(got.isnan(), wanted.isnan())
    fine = ~wanted.isnan()
    order = [
        torch.where(
            t.view(torch.int16) < 0, -32768 - t.view(torch.int16).int(), t.view(torch.int16).int()
        )
        for t in (got, wanted)
    ]
    apart = (order[0] - order[1]).abs()[fine]
    assert apart.max() <= 1
    assert (apart == 1).float().mean() < 0.01


def test_a_result_that_others_read_unrounded_is_not_approximate() -> None:
    x = load(Access(0, "bf16", (1,)))
    e = Expr("exp", "f32", (x,))
    nest = Nest((64,), (Store(Access(1, "bf16", (1,)), op("add", e, x)),))
    assert not rounded_at_once(nest)
    assert not rounded_at_once(of_each("exp", "f32"))


def test_calls_of_one_kernel_have_its_arguments_and_operands_of_their_own() -> None:
    with Graph("g", infer) as graph:
        x, first, second = data(0, 1, 64), data(1, 64, 64), data(2, 64, 64)
        h = ge.MatMul(x, first, transpose_x2=True)
        ge.NetOutput([ge.MatMul(h, second, transpose_x2=True)])
    one, two = dry_run(graph, HOPPER).plan.natives
    assert one.order is two.order and one.arguments is two.arguments
    assert one.operands[2] == two.operands[0] and one.operands[1] != two.operands[1]
    assert [a.of for a in one.arguments] == [0, 1, AuxMemory.SCRATCH, 2]
    for call in (one, two):
        a, b, c = call.operands
        assert call.addresses == [a, b, AuxMemory.SCRATCH, c]


class CountedCall:
    """In the place of a launch: there is no driver."""

    def __init__(self, *args: Any, early: bool, **_: Any) -> None:
        self.words, self.early = args[3], early


def test_binding_generates_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined kernels are generated by `schedule`, PTX is compiled by `build`."""
    target, plan = CudaTarget(0, HOPPER), attention_inputs(1, 256).plan
    done: list[str] = []
    generate = target.generate

    def generated(*args: Any) -> Any:
        done.append("generate")
        return generate(*args)

    monkeypatch.setattr(target, "generate", generated)
    monkeypatch.setattr(target.library, "add", lambda entries: done.append("compile") or {})
    monkeypatch.setattr(cuda_run, "KernelLaunch", CountedCall)
    target.schedule(plan)
    assert "compile" not in done
    done.clear()
    target.build(plan)
    assert set(done) == {"compile"}
    done.clear()
    for part in plan.native_parts:
        assert target.bind(part, program.Memory(plan, 0), 1)._calls
    assert not done


def test_all_launches_but_the_first_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before the first is not known, and may write what that loads at once."""
    run = attention_inputs(1, 256)
    target = CudaTarget(0, HOPPER)
    monkeypatch.setattr(cuda_run, "KernelLaunch", CountedCall)
    monkeypatch.setattr(target.library, "add", lambda entries: {})
    seen = [
        call.early for call in target.bind(run.plan.steps, program.Memory(run.plan, 0), 1)._calls
    ]
    assert seen == [False, *[True] * (len(run.launches) - 1)] and len(seen) > 1
