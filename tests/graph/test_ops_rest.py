"""Operators on lists, random numbers, bags, sampling points, and what is left to torch."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torchair
from op_harness import check, convert, run
from torchair.convert import GraphConverter, registered
from torchair.convert.table import LEFT_OUT
from torchair.operators import infer, row_of
from torchair.operators.create import mix
from torchair.operators.foreach import UNARY
from torchair.serde import load, render, same_graph

aten = torch.ops.aten
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def types_of(conversion: Any) -> list[str]:
    return [n.type for n in conversion.graph.nodes if n.type not in ("Data", "Const", "NetOutput")]


# ---- lists of tensors


def members(dtype: torch.dtype, low: float = 0.25, high: float = 0.75) -> list[torch.Tensor]:
    """Three shapes, a 0-d one among them, with values that every function takes."""
    shapes = [(2, 3), (4,), ()]
    if dtype.is_floating_point:
        return [(torch.rand(s) * (high - low) + low).to(dtype) for s in shapes]
    return [torch.randint(1, 6, s).to(dtype) for s in shapes]


def listed(fn: Any, *lists: list[torch.Tensor], **options: Any) -> list[str]:
    """Check a function of lists by giving it all members as separate arguments."""
    ends = [sum(len(x) for x in lists[: i + 1]) for i in range(len(lists))]
    starts = [0, *ends[:-1]]

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(fn(*(list(tensors[a:b]) for a, b in zip(starts, ends, strict=True))))

    return types_of(check(flat, *(t for x in lists for t in x), **options))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("name", UNARY)
def test_list_functions(name, dtype):
    fn = getattr(torch, f"_foreach_{name}")
    assert listed(fn, members(dtype)) == [f"Foreach{name.capitalize()}"]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "pow"])
def test_two_lists(name, dtype):
    fn = getattr(torch, f"_foreach_{name}")
    stem = f"Foreach{name.capitalize()}"
    assert listed(fn, members(dtype), members(dtype)) == [f"{stem}List"]
    for number in (2, 0.3) if dtype.is_floating_point else (2, 0.3, 1000):
        assert listed(lambda x, n=number: fn(x, n), members(dtype)) == [f"{stem}Scalar"]
    for numbers in ([1, 2, 3], [0.1, 0.7, 1.3]):
        got = listed(lambda x, n=numbers: fn(x, n), members(dtype))
        assert got == [f"{stem}ScalarList"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_three_lists(name, dtype):
    fn = getattr(torch, f"_foreach_{name}")
    lists = [members(dtype) for _ in range(3)]
    stem = f"Foreach{name.capitalize()}"
    assert listed(lambda *x: fn(*x, value=0.3), *lists) == [f"{stem}Scalar"]
    assert listed(lambda *x: fn(*x, scalars=[0.1, 2.0, 0.7]), *lists) == [f"{stem}ScalarList"]
    flat = [*(t for x in lists for t in x), torch.tensor([0.1, 2.0, 0.7])]
    conversion = GraphConverter(*with_scalars(name, flat), infer).run(*flat)
    assert types_of(conversion) == [f"{stem}List"]
    for got, wanted in zip(run(conversion, flat), fn(*lists, flat[-1]), strict=True):
        torch.testing.assert_close(got, wanted)


def with_scalars(name: str, flat: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, str]:
    """The overload whose factors are a tensor; torch cannot trace it with fake tensors."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(10)]
    call = graph.call_function(
        getattr(aten, f"_foreach_{name}").Tensor, (nodes[:3], nodes[3:6], nodes[6:9], nodes[9])
    )
    call.meta["val"] = [torch.empty_like(t, device="meta") for t in flat[:3]]
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(3)]
    for item, meta in zip(items, call.meta["val"], strict=True):
        item.meta["val"] = meta
    graph.output(items)
    return torch.fx.GraphModule(torch.nn.Module(), graph), "g"


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_list_functions(dtype):
    x, y, w = (members(dtype) for _ in range(3))
    assert listed(lambda x, y: torch._foreach_add(x, y, alpha=0.3), x, y) == ["ForeachAddList"]
    assert listed(lambda x, y: torch._foreach_sub(x, y, alpha=3), x, y) == ["ForeachSubList"]
    assert listed(torch._foreach_lerp, x, y, w) == ["ForeachLerpList"]
    assert listed(lambda x, y: torch._foreach_lerp(x, y, 0.3), x, y) == ["ForeachLerpScalar"]
    for order in (1, 2, math.inf):
        assert listed(lambda x, o=order: torch._foreach_norm(x, o), x) == ["ForeachNorm"]
    assert listed(lambda x: torch._foreach_pow(2, x), x) == ["ForeachPowScalarAndTensor"]
    got = listed(lambda x: torch._foreach_pow(2.3, x), x)
    assert got == ["Cast", "Fill", "ForeachPowScalarAndTensor"] or dtype == torch.float64
    assert listed(lambda x: torch._foreach_clamp_min(x, 0.5), x) == ["ForeachMaximumScalar"]
    assert listed(torch._foreach_clamp_max, x, y) == ["ForeachMinimumList"]


@pytest.mark.parametrize("name", ["floor", "ceil", "round", "trunc", "frac"])
def test_rounding_of_lists(name):
    fn = getattr(torch, f"_foreach_{name}")
    floats = [torch.randn(3, 2) * 5, torch.tensor([-0.5, 0.5, 1.5]), torch.tensor(2.5)]
    assert listed(fn, floats) == ["Cast", "Fill", "ForeachRoundOffNumber"]
    whole = torch.tensor([3, -4])
    if name != "frac":  # torch has no fraction of integers
        assert listed(fn, [floats[0], whole, floats[1]])[-1] == "ForeachRoundOffNumber"
        assert listed(fn, [whole]) == []
    else:
        conversion = convert(lambda a, b: tuple(fn([a, b])), floats[0], whole)
        with pytest.raises(NotImplementedError, match="frac_cpu"):
            run(conversion, [floats[0], whole])


def test_lists_of_mixed_types_are_left_to_torch():
    def fn(a, b):
        return tuple(torch._foreach_add([a, b], 0.5))

    conversion = check(fn, torch.randn(2), torch.arange(3), generic=True)
    assert conversion.generic == {"aten._foreach_add.Scalar": 1}
    check(lambda x: tuple(torch._foreach_add([x], [True])), torch.tensor([True]), generic=True)


def test_lists_broadcast_and_take_other_sizes():
    def fn(a, b, c, d):
        return tuple(torch._foreach_mul([a, b], [c, d]))

    def make(n):
        return torch.randn(n, 3), torch.randn(n), torch.randn(1, 3), torch.randn(())

    check(fn, *make(4), dynamic=True, other_inputs=make(6))


def test_optimizer_step_runs_compiled():
    def step(params, grads, averages):
        averages = torch._foreach_lerp(averages, grads, 0.1)
        roots = torch._foreach_add(torch._foreach_sqrt(torch._foreach_abs(averages)), 1e-8)
        return torch._foreach_addcdiv(params, averages, roots, value=-0.01), averages

    lists = [[torch.randn(4, 3), torch.randn(5)] for _ in range(3)]
    fast = torch.compile(step, backend=torchair.get_npu_backend(), fullgraph=True)
    for got, wanted in zip(fast(*lists), step(*lists), strict=True):
        torch.testing.assert_close(got, wanted)


# ---- random numbers


def draw(fn: Any, *inputs: Any, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    """Results under a seed; the same ones again under the same seed, others without it."""
    conversion = convert(fn, *inputs, **options)
    assert not conversion.generic, conversion.generic
    torch.manual_seed(seed)
    first, other = run(conversion, list(inputs)), run(conversion, list(inputs))
    torch.manual_seed(seed)
    again = run(conversion, list(inputs))
    expected = fn(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b, c, e in zip(first, again, other, expected, strict=True):
        assert torch.equal(a, b) and (a.dtype, a.shape) == (e.dtype, e.shape)
        assert a.numel() < 20 or not torch.equal(a, c)
    return first


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_and_normal_numbers(dtype):
    x = torch.empty(100, 200, dtype=dtype)
    for fn in (lambda x: torch.rand(100, 200, dtype=dtype), torch.rand_like):
        (u,) = draw(fn, x)
        assert u.min() >= 0 and u.max() <= 1
        assert abs(u.double().mean() - 0.5) < 0.01 and abs(u.double().var() - 1 / 12) < 0.01
    for fn in (lambda x: torch.randn(100, 200, dtype=dtype), torch.randn_like):
        (n,) = draw(fn, x)
        assert abs(n.double().mean()) < 0.03 and abs(n.double().var() - 1) < 0.03
    (v,) = draw(lambda x: aten.uniform.default(x, -2.0, 6.0), x)
    assert v.min() >= -2 and v.max() <= 6 and abs(v.double().mean() - 2) < 0.1
    (w,) = draw(lambda x: aten.normal_functional.default(x, 5.0, 0.5), x)
    assert abs(w.double().mean() - 5) < 0.05 and abs(w.double().std() - 0.5) < 0.02


def test_uniform_stays_in_a_narrow_range():
    (x,) = draw(lambda x: aten.uniform.default(x, 1000.0, 1000.25), torch.empty(10000))
    assert x.min() >= 1000 and x.max() <= 1000.25
    assert draw(aten.uniform.default, torch.empty(3))[0].max() < 1


def test_two_draws_of_one_graph_differ():
    a, b = draw(lambda x: (torch.rand(50), torch.rand(50)), torch.empty(1))
    assert not torch.equal(a, b)


def test_a_draw_of_which_only_the_dims_are_read_is_made():
    """What is drawn after it is what eager draws."""

    def fn(x):
        return torch.rand_like(torch.rand_like(x))

    x, results = torch.empty(5), []
    for call in (fn, torch.compile(fn, backend=torchair.get_npu_backend())):
        torch.manual_seed(3)
        results.append((call(x), torch.rand(2)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_seeds_and_offsets_are_mixed_well():
    seeds = {mix(s, o) & 0xFFFFFFFF for s in range(60) for o in range(60)}
    assert len(seeds) == 3600 and mix(-1, 2**62) < 2**64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_integers(dtype):
    x = torch.empty(40, 50, dtype=dtype)
    cases = [
        (lambda x: torch.randint(7, (40, 50), dtype=dtype), 0, 6),
        (lambda x: torch.randint(3, 7, (40, 50), dtype=dtype), 3, 6),
        (lambda x: torch.randint_like(x, 7), 0, 6),
        (lambda x: torch.randint_like(x, 3, 7), 3, 6),
    ]
    for fn, low, high in cases:
        (got,) = draw(fn, x)
        assert got.min() == low and got.max() == high
        counts = torch.stack([(got == v).sum() for v in range(low, high + 1)])
        assert counts.min() > 0.8 * 2000 / (high - low + 1)


def test_integers_beyond_float32_and_truths():
    (got,) = draw(lambda x: torch.randint(2**40, (1000,)), torch.empty(1))
    assert got.max() > 2**38 and got.max() < 2**40 and (got % 2 == 1).sum() > 400
    (flags,) = draw(lambda x: torch.randint(2, (1000,), dtype=torch.bool), torch.empty(1))
    assert 400 < flags.sum() < 600


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_permutations(dtype):
    (got,) = draw(lambda x: torch.randperm(50, dtype=dtype), torch.empty(1))
    assert got.sort().values.tolist() == list(range(50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_draws_by_probability(dtype):
    p = torch.tensor([0.0, 0.25, 1.0], dtype=dtype).expand(5000, 3).contiguous()
    for fn in (torch.bernoulli, lambda p: aten.bernoulli.Tensor(torch.empty_like(p), p)):
        (got,) = draw(fn, p)
        assert got[:, 0].sum() == 0 and got[:, 2].sum() == 5000
        assert abs(got[:, 1].double().mean() - 0.25) < 0.02
    for chance in (0.0, 0.3, 1.0):
        (got,) = run(convert(lambda p: aten.bernoulli.p(p, chance), p), [p])  # noqa: B023
        assert abs(got.double().mean() - chance) < 0.02
    (got,) = draw(lambda x: aten.bernoulli.p(x, 0.3), torch.zeros(5000, dtype=torch.int64))
    assert abs(got.double().mean() - 0.3) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_multinomial(dtype):
    p = torch.tensor([[0.0, 0.1, 0.3, 0.6], [1.0, 1.0, 0.0, 2.0]], dtype=dtype)
    (got,) = draw(lambda p: torch.multinomial(p, 4000, True), p)
    rates = torch.stack([(got == i).double().mean(1) for i in range(4)], 1)
    torch.testing.assert_close(rates, p.double() / p.double().sum(1, True), atol=0.03, rtol=0)
    (few,) = draw(lambda p: torch.multinomial(p, 3), p)  # without replacement
    assert all(len(set(row)) == 3 for row in few.tolist())
    assert 0 not in few[0] and 2 not in few[1]
    (one,) = draw(lambda p: torch.multinomial(p[0], 2), p)
    assert one.shape == (2,)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout(p, dtype):
    x = torch.randn(100, 100, dtype=dtype)
    y, mask = run(convert(lambda x: aten.native_dropout(x, p, True), x), [x])
    assert mask.dtype == torch.bool and abs(mask.double().mean() - (1 - p)) < 0.02
    scale = 0.0 if p == 1 else 1 / (1 - p)
    assert torch.equal(y, x.mul(mask).mul(scale)) and y.dtype == dtype
    conversion = convert(lambda x: aten.native_dropout(x, p, None), x)
    assert "StatelessDropOutGenMask" in types_of(conversion)
    check(lambda x: aten.native_dropout(x, p, False), x)
    check(lambda g, m: aten.native_dropout_backward(g, m, scale), torch.randn_like(x), mask)


def test_sizes_of_random_tensors_may_be_symbolic():
    def fn(x):
        n = x.shape[0]
        return (
            torch.rand(n, 3),
            torch.randn_like(x),
            torch.randint(n, (n,)),
            torch.randperm(n),
            *aten.native_dropout(x, 0.5, True),
            torch.bernoulli(x.sigmoid()),
        )

    conversion = convert(fn, torch.randn(4, 3), dynamic=True)
    assert not conversion.generic
    for n in (4, 9):
        got = run(conversion, [torch.randn(n, 3)])
        assert [tuple(g.shape) for g in got] == [(n, 3), (n, 3), (n,), (n,), *[(n, 3)] * 3]
        assert got[3].sort().values.tolist() == list(range(n)) and got[2].max() < n


def test_a_generator_of_its_own_is_left_to_torch():
    source = torch.Generator()
    traced = make_fx(lambda x: torch.ops.aten.randn.generator([3], generator=None) + x)(
        torch.zeros(3)
    )
    (node,) = [n for n in traced.graph.nodes if n.target == aten.randn.generator]
    assert not GraphConverter(traced, "g", infer).run(torch.zeros(3)).generic
    node.kwargs = {**node.kwargs, "generator": source}
    conversion = GraphConverter(traced, "g", infer).run(torch.zeros(3))
    assert conversion.generic == {"aten.randn.generator": 1}
    assert [s.kind for s in conversion.signature.inputs] == ["tensor"]
    source.manual_seed(5)
    (got,) = run(conversion, [torch.zeros(3)])
    assert torch.equal(got, torch.randn(3, generator=torch.Generator().manual_seed(5)))


def test_random_text():
    """The offsets are one input whose size is that of all draws, at the place of the first."""

    def fn(x):
        return torch.randperm(4), aten.native_dropout(x, 0.25, True)[0]

    torch.manual_seed(1234)
    conversion = convert(fn, torch.randn(2, 3))
    text = render(conversion.graph, "py", original=True).decode()
    lines = [line for line in text.splitlines() if " = ge." in line]
    head = "[unpack_generator_offsets_0, unpack_generator_offsets_1] = ge.Unpack("
    assert [line for line in lines if not line.startswith(head)] == [
        'x_1_0 = ge.Data(index=0, dtype=0, shape=[2, 3], placement="CPU", node_name="x_1")',
        'offset_list_0 = ge.Data(index=1, dtype=9, shape=[2], placement="CPU", '
        'node_name="offset_list")',
        "StatelessRandperm_0 = ge.StatelessRandperm(ge.Const(4, dtype=9), "
        "ge.Const(1234, dtype=9), unpack_generator_offsets_0, layout=1, dtype=9, "
        'node_name="StatelessRandperm")',
        'Shape_0 = ge.Shape(x_1_0, node_name="Shape")',
        "ConcatV2_0 = ge.ConcatV2([ge.Const(0, dtype=9), unpack_generator_offsets_1], 0, N=2, "
        'node_name="ConcatV2")',
        "StatelessDropOutGenMask_0 = ge.StatelessDropOutGenMask(Shape_0, "
        "ge.Const(0.75, dtype=11), ge.Const(1234, dtype=9), ge.Const(0, dtype=9), ConcatV2_0, "
        'node_name="StatelessDropOutGenMask")',
        "DropOutDoMask_0 = ge.DropOutDoMask(x_1_0, StatelessDropOutGenMask_0, "
        'ge.Const(0.75, dtype=11), node_name="DropOutDoMask")',
        "_ = ge.NetOutput([StatelessRandperm_0, DropOutDoMask_0], dependencies=[])",
    ]
    assert same_graph(load(text), conversion.graph)
    source = conversion.signature.inputs[-1]
    assert (source.kind, source.count, source.args) == ("random", 2, ())


def test_no_offsets_without_random_operators():
    conversion = convert(lambda x: F.dropout(x, 0.5, False) + 1, torch.randn(3))
    assert [s.kind for s in conversion.signature.inputs] == ["tensor"]


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_with_dropout(dynamic):
    torch.manual_seed(0)
    model = Noisy()
    fast = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=dynamic, fullgraph=True)
    x = torch.randn(32, 64, requires_grad=True)
    torch.manual_seed(3)
    y = fast(x)
    kept = y != 0
    assert 0.4 < kept.double().mean() < 0.6
    torch.testing.assert_close(y, model.linear(x) * kept * 2)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, (kept * 2.0) @ model.linear.weight)
    assert not torch.equal(fast(x), y)
    torch.manual_seed(3)
    assert torch.equal(fast(x), y)
    fast.eval()
    torch.testing.assert_close(fast(x), model.linear(x))


def test_checkpointed_dropout_is_replayed_in_backward():
    """Recomputation saves and restores the state of torch's generator, in generic nodes."""
    model = Noisy()
    fast = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False),
        backend=torchair.get_npu_backend(),
        fullgraph=True,
    )
    x = torch.randn(32, 64, requires_grad=True)
    for _ in range(2):
        y = fast(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, ((y != 0) * 2.0) @ model.linear.weight)


# ---- bags of embeddings, sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode, dtype):
    weight = torch.randn(10, 4, dtype=dtype)
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 8])
    code = ("sum", "mean", "max").index(mode)
    for options in ((False, -1), (False, 2), (True, -1)):

        def fn(w, i, o):
            return aten._embedding_bag(w, i, o, False, code, False, None, *options)  # noqa: B023

        assert types_of(check(fn, weight, indices, offsets)) == ["EmbeddingBag"]
    pair = (torch.tensor([1, 2, 4]), torch.tensor([0, 1]))
    first = lambda w, i, o: F.embedding_bag(i, w, o, mode=mode)  # noqa: E731
    check(first, weight, indices, offsets, dynamic=True, other_inputs=(weight, *pair))
    if mode == "sum":
        weights = torch.randn(8, dtype=dtype)
        check(
            lambda w, i, o, s: F.embedding_bag(i, w, o, mode=mode, per_sample_weights=s),
            weight,
            indices,
            offsets,
            weights,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag_trains_and_infers(mode, last, dtype):
    bag = torch.nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=last, dtype=dtype)
    fast = torch.compile(bag, backend=torchair.get_npu_backend(), fullgraph=True)
    indices, offsets = torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 3, 3, 5])
    offsets = offsets if last else offsets[:-1].clone()
    got, wanted = fast(indices, offsets), bag(indices, offsets)
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(y.square().sum(), bag.weight)[0] for y in (got, wanted)]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        torch.testing.assert_close(fast(indices, offsets), wanted)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_sampling_in_planes(mode, padding, align):
    for dtype in FLOATS:
        x, grid = torch.randn(2, 3, 5, 4, dtype=dtype), torch.rand(2, 6, 7, 2).to(dtype) * 2.4 - 1.2
        assert types_of(
            check(lambda x, g: aten.grid_sampler_2d(x, g, mode, padding, align), x, grid)
        ) == ["GridSampler2D"]
    x, grid, grad = torch.randn(2, 3, 5, 4), torch.rand(2, 6, 7, 2), torch.randn(2, 3, 6, 7)
    assert types_of(
        check(
            lambda d, x, g: aten.grid_sampler_2d_backward(
                d, x, g, mode, padding, align, [True, True]
            ),
            grad,
            x,
            grid,
        )
    ) == ["GridSampler2DGrad"]


@pytest.mark.parametrize("mode", [0, 1])
def test_sampling_in_space(mode):
    x, grid = torch.randn(2, 3, 5, 4, 3), torch.rand(2, 6, 7, 2, 3)
    grad = torch.randn(2, 3, 6, 7, 2)
    check(lambda x, g: aten.grid_sampler_3d(x, g, mode, 1, False), x, grid)
    check(
        lambda d, x, g: aten.grid_sampler_3d_backward(d, x, g, mode, 1, False, [True, True]),
        grad,
        x,
        grid,
    )


def test_sampling_trains_with_other_sizes():
    fast = torch.compile(
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        backend=torchair.get_npu_backend(),
        dynamic=True,
        fullgraph=True,
    )
    for n in (2, 3):
        x, grid = torch.randn(n, 3, 5, 4 + n), torch.rand(n, 6, 7, 2)
        x.requires_grad_()
        wanted = F.grid_sample(x, grid, align_corners=False)
        got = fast(x, grid)
        torch.testing.assert_close(got, wanted)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted)]
        torch.testing.assert_close(*grads)


# ---- what is left out


def test_what_is_left_out_has_no_converter():
    names = {str(t) for t in registered()}
    assert not names & set(LEFT_OUT) and all(LEFT_OUT.values())


def test_fourier_transforms_run_in_torch():
    conversion = check(
        lambda x: torch.view_as_real(torch.fft.ifft(torch.fft.fft2(x), norm="ortho")),
        torch.randn(3, 8, 4, dtype=torch.complex64),
        generic=True,
    )
    assert conversion.generic["aten._fft_c2c.default"] == 2


def test_every_type_made_here_has_a_row():
    for op_type in ("ForeachNorm", "StatelessBernoulli", "HcomAllReduce", "EmbeddingBag"):
        assert row_of(op_type) is not None
