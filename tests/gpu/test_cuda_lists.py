"""Operators on lists of tensors taken apart for GPUs: the same results, one kernel for each
parameter of an optimizer, updated in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from compiling import compiled
from cuda_tools import HOPPER
from torchair import ge
from torchair.codegen.cuda.target import CudaTarget
from torchair.engine.inspect.dry_run import dry_run
from torchair.engine.optimize.passes import GraphState
from torchair.engine.optimize.passes.lists import FEW, split_tensor_lists
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Value
from torchair.operators import infer, interpret

SHAPES = ((3, 4), (5,), ())
Lists = list[list[Value]]


def data(index: int, dims: Sequence[int], dtype: DataType) -> Value:
    return ge.Data(index=index, dtype=dtype, shape=list(dims), placement="NPU")


def number(x: float) -> Value:
    return ge.Const(x, dtype=DataType.DT_FLOAT)


def numbers(*x: float) -> Value:
    return ge.Const(list(x), dtype=DataType.DT_FLOAT)


FORMS: dict[str, Callable[[Lists], Any]] = {
    "add": lambda x: ge.ForeachAddList(*x[:2], number(1.0)),
    "add with a factor": lambda x: ge.ForeachAddList(*x[:2], number(-0.25)),
    "sub with a factor": lambda x: ge.ForeachSubList(*x[:2], number(3.0)),
    "mul": lambda x: ge.ForeachMulList(*x[:2]),
    "div": lambda x: ge.ForeachDivList(*x[:2]),
    "maximum": lambda x: ge.ForeachMaximumList(*x[:2]),
    "mul by a number": lambda x: ge.ForeachMulScalar(x[0], number(0.9)),
    "div by a number": lambda x: ge.ForeachDivScalar(x[0], number(0.7)),
    "add numbers": lambda x: ge.ForeachAddScalarList(x[0], numbers(1.0, 2.0, 3.0)),
    "power": lambda x: ge.ForeachPowScalar(ge.ForeachAbs(x[0]), number(1.5)),
    "power of a number": lambda x: ge.ForeachPowScalarAndTensor(number(0.9), x[0]),
    "addcmul": lambda x: ge.ForeachAddcmulScalar(*x, number(0.1)),
    "addcdiv": lambda x: ge.ForeachAddcdivScalar(*x, number(-0.5)),
    "addcdiv, numbers": lambda x: ge.ForeachAddcdivScalarList(*x, numbers(1.0, -1.0, 2.0)),
    "lerp": lambda x: ge.ForeachLerpScalar(*x[:2], number(0.3)),
    "lerp by lists": lambda x: ge.ForeachLerpList(*x),
    "unary": lambda x: ge.ForeachReciprocal(ge.ForeachSqrt(ge.ForeachAbs(x[0]))),
}


def graph_of(form: Callable[[Lists], Any], dtype: DataType) -> Graph:
    """A form, with as many other list operators as make it worth while."""
    with Graph("g", infer) as graph:
        lists = [[data(3 * k + i, s, dtype) for i, s in enumerate(SHAPES)] for k in range(3)]
        made = list(form(lists))
        for _ in range(FEW):
            made = list(ge.ForeachNeg(made))
        ge.NetOutput(made)
    return graph


def kinds(graph: Graph) -> list[str]:
    return [n.type for n in graph.nodes if n.type.startswith("Foreach")]


@pytest.mark.parametrize("dtype", [DataType.DT_FLOAT, DataType.DT_BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMS)
def test_members_alone(name: str, dtype: DataType) -> None:
    torch.manual_seed(0)
    kind = torch.float32 if dtype == DataType.DT_FLOAT else torch.bfloat16
    inputs = [torch.randn(s).to(kind) for _ in range(3) for s in SHAPES]
    graph = graph_of(FORMS[name], dtype)
    wanted = interpret(graph, inputs)
    split_tensor_lists(graph, GraphState(native=True, splits_lists=True))
    assert not kinds(graph)
    close = {"rtol": 3e-2, "atol": 3e-2} if kind is torch.bfloat16 else {}
    for got, w in zip(interpret(graph, inputs), wanted, strict=True):
        assert got.dtype == w.dtype
        torch.testing.assert_close(got, w, **close)


def test_few_operators_stay() -> None:
    """One launch for all members is better as long as nothing is fused."""
    with Graph("g", infer) as graph:
        x = [data(i, s, DataType.DT_FLOAT) for i, s in enumerate(SHAPES)]
        ge.NetOutput(list(ge.ForeachNeg(x)))
    split_tensor_lists(graph, GraphState(native=True, splits_lists=True))
    assert kinds(graph) == ["ForeachNeg"]
    split_tensor_lists(graph, GraphState(native=True, splits_lists=True, assigned={0: 0}))
    assert not kinds(graph)  # inputs that are updated would be copied


@pytest.mark.parametrize("dtype", [DataType.DT_DOUBLE, DataType.DT_INT32])
def test_other_types_stay(dtype: DataType) -> None:
    with Graph("g", infer) as graph:
        x = [data(i, s, dtype) for i, s in enumerate(SHAPES)]
        for _ in range(FEW + 1):
            x = list(ge.ForeachNeg(x))
        ge.NetOutput(x)
    split_tensor_lists(graph, GraphState(native=True, splits_lists=True))
    assert len(kinds(graph)) == FEW + 1


def test_on_the_host_they_stay() -> None:
    graph = graph_of(FORMS["mul"], DataType.DT_FLOAT)
    split_tensor_lists(graph, GraphState(native=True))
    assert len(kinds(graph)) == FEW + 1


def adam(count: int) -> tuple[Graph, dict[int, int]]:
    """What a compiled AdamW does to parameters, first and second moments."""
    with Graph("g", infer) as graph:
        lists = [
            [data(count * k + i, (64, 32), DataType.DT_FLOAT) for i in range(count)]
            for k in range(4)
        ]
        p, g, m, v = lists
        m = list(ge.ForeachLerpScalar(m, g, number(0.1)))
        v = list(ge.ForeachMulScalar(v, number(0.999)))
        v = list(ge.ForeachAddcmulScalar(v, g, g, number(0.001)))
        below = ge.ForeachAddScalar(ge.ForeachSqrt(v), number(1e-8))
        p = list(ge.ForeachAddcdivScalar(p, m, below, number(-0.01)))
        ge.NetOutput([*p, *m, *v])
    assigned = {k: k + (count if k >= count else 0) for k in range(3 * count)}
    return graph, assigned


def test_an_optimizer_is_one_kernel_for_each_parameter() -> None:
    """It reads four tensors and writes three of them in place."""
    graph, assigned = adam(5)
    target = CudaTarget(0, HOPPER)
    split_tensor_lists(
        graph, GraphState(native=True, splits_lists=target.splits_lists, assigned=assigned)
    )
    run = dry_run(graph, HOPPER, assigned)
    assert len(run.plan.steps) == 5 and len(run.launches) == 1
    assert not run.plan.write_backs and not run.plan.arena_size
    assert [a.kind for a in run.plan.allocations].count("tied") == 15


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 7)).cuda()
    nets = [net, copy.deepcopy(net)]
    optimizers = [OPTIMIZERS[name](n.parameters()) for n in nets]
    steps = [optimizers[0].step, compiled(optimizers[1].step, fullgraph=False)]
    x = torch.randn(32, 48, device="cuda")
    for _ in range(6):
        for net, optimizer, step in zip(nets, optimizers, steps, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
