"""Which nodes become one kernel: reports of small models, and graphs that are hard to order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchair
from native_check import capture, check_units, oracle
from torchair import ge
from torchair.engine.session import TorchNpuGraph
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Graph, Value
from torchair.ge.shapes import symbol
from torchair.operators import infer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def report(fn: Callable[..., Any], *args: torch.Tensor, frozen: bool = False) -> list[str]:
    """How the nodes of a function were grouped; what it computes equals eager."""
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = frozen
    config.experimental_config.pattern_fusion_pass = False  # this is about the parts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the reminder of frozen_parameter
        backend = torchair.get_npu_backend(compiler_config=config)
    fast = torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad(), capture() as found:
        close = {"rtol": 2e-2, "atol": 2e-2} if args[0].dtype == torch.bfloat16 else {}
        torch.testing.assert_close(fast(*args), fn(*args), **close)
    (one,) = found
    one.check_units()
    return [" ".join(line.split()) for line in one.fusion.report().splitlines()]


# ---- what is said of small models ----


def test_rotary_embedding_is_one_loop() -> None:
    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    table = torch.randn(6, 8)
    assert report(rope, torch.randn(2, 4, 6, 8), table, table) == [
        "loops Mul Neg ConcatV2 Mul Add (nothing joined after it)",
    ]


def test_norm_of_root_mean_square_is_one_loop() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * wide.to(x.dtype)

    assert report(norm, torch.randn(2, 6, 16).bfloat16(), torch.randn(16).bfloat16()) == [
        "loops Cast Pow ReduceMean Add Rsqrt Mul Cast Mul (nothing joined after it)",
    ]


def test_attention_written_out() -> None:
    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask, float("-inf"))
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)

    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    assert report(attention, q, k, v, torch.ones(6, 6, dtype=torch.bool).tril()) == [
        "loops LogicalNot (nothing joined after it)",
        "matmul BatchMatMul (Mul reads it through a view that moves elements)",
        "loops Mul MaskedFill SoftmaxV2 (nothing joined after it)",
        "matmul BatchMatMul (TensorMove reads it through a view that moves elements)",
        "loops TensorMove (nothing joined after it)",
    ]


def test_products_take_in_what_comes_after() -> None:
    inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    assert report(lambda x: x + inner(x), torch.randn(2, 5, 16)) == [
        "matmul MatMulV2 Gelu (nothing joined after it)",
        "matmul MatMulV2 Add (nothing joined after it)",
    ]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.second(y) + y)


def test_frozen_convolutions_take_in_norm_and_activation() -> None:
    x = torch.randn(1, 3, 8, 8)
    assert report(Convolved().eval(), x, frozen=True) == [
        "conv Conv2D BNInfer Relu (nothing joined after it)",
        "conv Conv2D Add Relu (nothing joined after it)",
    ]


def test_convolutions_with_free_weights_are_torchs() -> None:
    assert report(Convolved().eval(), torch.randn(1, 3, 8, 8)) == [
        "torch Conv2D (its weights may change: frozen_parameter is off)",
        "loops BNInfer Relu (Add also needs what is computed from it elsewhere)",
        "torch Conv2D (its weights may change: frozen_parameter is off)",
        "loops Add Relu (nothing joined after it)",
    ]


def test_sums_over_other_dims_are_loops_of_their_own() -> None:
    norm = nn.LayerNorm(16)

    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x + y), (x + y).relu().sum(0)

    assert report(both, torch.randn(4, 16), torch.randn(4, 16)) == [
        "loops Add Relu LayerNormV4 (ReduceSum reduces other axes)",
        "loops ReduceSum (nothing joined after it)",
    ]


# ---- graphs written by hand ----


def check(
    build: Callable[..., Sequence[Value]],
    *inputs: torch.Tensor,
    dynamic: bool = False,
    frozen: Sequence[int] = (),
) -> list[str]:
    """Every unit of a graph and the graph as a whole give what its nodes give one by one. With
    `dynamic` equal sizes share a symbol."""
    with Graph("g", infer) as graph:
        values = []
        for i, t in enumerate(inputs):
            dims = [symbol(f"s{n}") if dynamic and n > 1 else n for n in t.shape]
            values.append(Data(index=i, dtype=torch_to_ge(t.dtype), shape=dims))
        NetOutput(build(*values))
    wanted = [oracle(graph, inputs)[v] for v in graph.output.values()]
    fusion = check_units(graph, inputs, {values[i]: inputs[i] for i in frozen}).fusion
    session = TorchNpuGraph("g")
    session.load(graph)
    torch.testing.assert_close(session.run(inputs), wanted)
    return [" ".join(n.type for n in u.nodes) for u in fusion.units]


def test_a_view_that_is_read_inside_and_outside() -> None:
    """The unit computes through the view, others read it from memory: neither waits for itself."""

    def build(x: Value) -> list[Value]:
        most = ge.ReduceMax(x, [1], keep_dims=True)
        flat = ge.Squeeze(most, axis=[1])
        return [ge.Mul(flat, ge.Tanh(most)), ge.Swish(flat), ge.Sub(x, flat)]

    check(build, torch.randn(5, 1))
    check(build, torch.randn(33, 1), dynamic=True)


def test_units_do_not_merge_around_a_view() -> None:
    """The node that would bring two units together reads one of them through memory."""

    def build(x: Value, y: Value) -> list[Value]:
        low = ge.Minimum(x, y)
        total = ge.Unsqueeze(ge.ReduceSum(low, [0]), axes=[0])
        same = ge.Transpose(low, [0, 1])
        return [ge.SelectV2(ge.NotEqual(x, y), total, same), ge.LogicalNot(ge.NotEqual(x, y))]

    check(build, torch.randn(6, 7), torch.randn(6, 7))


def test_merged_units_may_share_an_operand() -> None:
    def build(x: Value, y: Value) -> list[Value]:
        a, b = ge.Exp(x), ge.Tanh(y)
        c = ge.Add(a, b)
        return [ge.Mul(c, ge.ReduceMean(c, [-1], keep_dims=True)), ge.ReduceMax(a, [-1])]

    check(build, torch.randn(6, 70), torch.randn(6, 70))


@pytest.mark.parametrize("dynamic", (False, True))
def test_what_follows_a_product_runs_along_its_columns(dynamic: bool) -> None:
    """New dims behind the columns, or columns that became rows, do not join the product."""
    a, b = torch.randn(5, 7), torch.randn(7, 9)

    def product(x: Value, y: Value) -> Value:
        return ge.MatMulV2(x, y, None, None)

    for view in (
        lambda v: ge.Unsqueeze(v, axes=[2]),
        lambda v: ge.Unsqueeze(v, axes=[1]),
        lambda v: ge.Unsqueeze(v, axes=[0]),
        lambda v: ge.Transpose(v, [1, 0]),
    ):
        check(lambda x, y, view=view: [ge.Relu(view(product(x, y)))], a, b, dynamic=dynamic)
    column = torch.randn(7, 1)
    check(lambda x, y: [ge.Relu(ge.Squeeze(product(x, y), axis=[1]))], a, column)
    check(lambda x, y: [ge.Relu(ge.Squeeze(product(x, y), axis=[0]))], a[:1], b)


def test_what_follows_a_convolution_has_its_dims() -> None:
    x, w = torch.randn(2, 7, 3, 3), torch.randn(20, 7, 3, 3)

    def build(x: Value, w: Value) -> list[Value]:
        made = ge.Conv2D(
            x, w, None, None, strides=[1, 1, 1, 1], pads=[0, 0, 0, 0], data_format="NCHW"
        )
        return [ge.Relu(ge.Squeeze(made, axis=[2, 3]))]

    assert check(build, x, w, frozen=[1]) == ["Conv2D", "Relu"]


def test_asking_for_dims_does_not_keep_a_model_from_being_native() -> None:
    """Sizes that come from the dims of a computed value steer a view at the end."""

    def build(x: Value) -> list[Value]:
        y = ge.Mul(ge.Exp(x), x)
        rows, columns = (ge.Gather(ge.Shape(y), i) for i in (0, 1))
        return [ge.Relu(ge.Reshape(y, ge.Pack([columns, rows], axis=0, N=2)))]

    assert check(build, torch.randn(6, 10), dynamic=True) == ["Exp Mul", "Relu"]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_number_beside_short_floats(dtype: torch.dtype) -> None:
    """A float32 number without dims is taken as it is, as torch does."""

    def build(x: Value, n: Value) -> list[Value]:
        factor = ge.Const(2.8284271, dtype=torch_to_ge(torch.float32))
        return [ge.RealDiv(x, factor), ge.Mul(x, n), ge.Add(x, n)]

    made = check(build, torch.randn(4, 9).to(dtype), torch.tensor(1.2345678))
    assert sorted(made) == ["Mul", "RealDiv"]  # in a sum torch rounds the number first


# ---- updates ----


def test_an_update_of_what_repeats_in_memory() -> None:
    """The result has places of its own for elements that shared one."""
    data = torch.randn(8, 1).expand(8, 6)
    index, new = torch.randint(8, (2, 6)), torch.randn(2, 6)
    index[1] = (index[0] + 1) % 8
    check(lambda x, i, n: [ge.ScatterElements(x, i, n, axis=0)], data, index, new)


def test_an_update_that_reads_what_it_updates() -> None:
    """Rows of a tensor written over other rows of it: not in place."""

    def rotate(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x.index_copy_(0, at, x[:3].clone())
        return x * 2

    x, at = torch.arange(12.0).reshape(3, 4), torch.tensor([1, 2, 0])
    mine, theirs = x.clone(), x.clone()
    fast = torch.compile(rotate, backend=torchair.get_npu_backend(), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(fast(mine, at), rotate(theirs, at))
    assert torch.equal(mine, theirs)


REREADING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[:3] * 2 + 1,
    "all, in another order": lambda x: x.flip(0).sin(),
    "through a view": lambda x: (x.view(12)[::4].view(3, 1) + x).abs(),
    "through a transpose": lambda x: (x.t().exp() / 7)[:3].t().repeat(1, 2)[:, :4],
    "itself and something new": lambda x: torch.cat((-x[:, 2:], x[:, :2]), 1) * 3,
}


@pytest.mark.parametrize("name", REREADING)
def test_an_update_computes_what_it_writes_from_what_it_updates(name: str) -> None:
    def write(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x.index_copy_(0, at, REREADING[name](x))
        return x * 2

    x, at = torch.arange(12.0).reshape(3, 4) / 5, torch.tensor([1, 2, 0])
    mine, theirs = x.clone(), x.clone()
    fast = torch.compile(write, backend=torchair.get_npu_backend(), fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(mine, at), write(theirs, at))
            torch.testing.assert_close(mine, theirs)


def test_new_keys_are_turned_on_their_way_into_the_cache() -> None:
    def step(
        cache: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor
    ) -> None:
        first, second = x.chunk(2, -1)
        cache.index_copy_(1, at, x * cos + torch.cat((-second, first), -1) * sin)

    table = torch.randn(2, 8)
    made = (torch.zeros(4, 6, 8), torch.randn(4, 2, 8), table, table, torch.tensor([4, 1]))
    assert report(step, *made) == [
        "loops Mul Neg ConcatV2 Mul Add IndexPutV2 (it updates memory in place)",
    ]


def test_what_is_updated_is_made_before() -> None:
    check(
        lambda x, i, n: [ge.ScatterElements(ge.Exp(x), i, ge.Neg(n), axis=0)],
        torch.randn(4, 6),
        torch.tensor([[1, 2, 3, 0, 1, 2]]),
        torch.randn(1, 6),
    )


def test_joining_nothing() -> None:
    empty = torch.empty(2, 0)
    check(lambda x, y: [ge.Exp(ge.ConcatV2([x, y], 1, N=2)), ge.Exp(x)], empty, empty)


@pytest.mark.parametrize("columns", (1, 17, 33))
def test_products_write_nothing_behind_their_last_column(columns: int) -> None:
    a, b = torch.randn(4, 3, 5).bfloat16(), torch.randn(4, 5, columns).bfloat16()
    check(lambda x, y: [ge.BatchMatMulV2(x, y, None)], a, b)
