"""Channels last in training graphs: what the forward saves, strides of results and gradients, and
which graphs stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchair
from tolerance import assert_close
from torchair.fx import layouts, tracing
from torchair.fx.layouts import carry_channels_last
from torchair.operators import contraction
from training_blocks import LAST, Block, check_steps, gradients


class Pools(nn.Module):
    """Pools, a transposed convolution, sums over images, and a view that counts in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mix, self.norm = Block(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, 2), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.mix(F.max_pool2d(self.block(x), 3, 2, 1))))
        flat = F.adaptive_avg_pool2d(y, 2).flatten(1)
        return self.head(flat) + self.up(y).mean((2, 3)).sum(1, keepdim=True)


class Dense(nn.Module):
    """Concatenations, a depthwise convolution, a larger image and a permuted result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 8, 3, padding=1)
        self.norm, self.each = nn.BatchNorm2d(19), nn.Conv2d(19, 19, 3, padding=1, groups=19)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, self.a(x)], 1)
        y = self.each(F.silu(self.norm(torch.cat([y, self.b(F.relu(y))], 1))))
        return F.interpolate(y, scale_factor=2).permute(0, 2, 3, 1) * y.sum(1, keepdim=True).mean()


class Points(nn.Module):
    """Filters of single points, with and without bias, around a depthwise and a grouped filter."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 24, 1, bias=False)
        self.each = nn.Conv2d(24, 24, 5, padding=2, groups=24)
        self.some = nn.Conv2d(24, 24, 3, stride=2, groups=3)
        self.gate, self.back = nn.Conv2d(24, 24, 1), nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.some(F.silu(self.each(F.relu(self.wide(x)))))
        return self.back(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())


class Groups(nn.Module):
    """Group norms of one channel, of several, and of all, in front of activations and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(n, 24) for n in (24, 8, 1))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.norms
        x = self.first(x)
        y = x + self.second(F.silu(b(F.silu(a(x)))))
        return c(y) + F.group_norm(y, 4)


class Heavy(nn.Module):
    """A filter that is larger than what it is for, between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)
        self.heavy, self.last = nn.Conv2d(64, 520, 3, 2), nn.Conv2d(520, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.heavy(F.relu(self.norm(self.first(x))))))


@pytest.mark.parametrize(
    "make", [Block, lambda: Block(groups=4), Pools, Dense, Points, Groups, Heavy]
)
@pytest.mark.parametrize("last", [False, True])
def test_values_and_strides_are_those_of_eager(make: Callable[[], nn.Module], last: bool) -> None:
    torch.manual_seed(0)
    check_steps(make(), torch.randn(3, 3, 13, 11), last)


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: F.dropout(h, 0.5),
        lambda h: F.dropout2d(h, 0.5),
        lambda h: F.rrelu(h, training=True),
        lambda h: h * torch.rand_like(h),
        lambda h: torch.bernoulli(h.sigmoid()) * h,
    ],
    ids=["dropout", "dropout2d", "rrelu", "rand_like", "bernoulli"],
)
def test_random_numbers_are_those_of_eager(draw: Callable[[Tensor], Tensor]) -> None:
    """They are drawn in the order of memory."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(draw(self.a(x)))

    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(3, 3, 13, 11)
    run = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
    torch.manual_seed(1)
    eager = model(x)
    torch.manual_seed(1)
    assert_close(run(x), eager, eager.double())


def split(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[fx.GraphModule]:
    """Forward and backward graph of a training step."""
    found: list[fx.GraphModule] = []
    whole = tracing.min_cut_partition

    def cut(*args: Any, **more: Any) -> Any:
        found.extend(whole(*args, **more))
        return tuple(found[-2:])

    monkeypatch.setattr(tracing, "min_cut_partition", cut)
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.numerics = options.pop("numerics", "default")
    run = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), **options)
    run(x).sum().backward()
    return found


def copies(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)


def images(graph: fx.GraphModule) -> list[Tensor]:
    """What a graph is called with that has four dims, filters of one place aside."""
    given = (n.meta["val"] for n in graph.graph.find_nodes(op="placeholder"))
    return [t for t in given if isinstance(t, Tensor) and t.dim() == 4 and t.shape[2] > 1]


def test_what_is_saved_has_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = split(Block(), torch.randn(4, 3, 8, 8), monkeypatch)
    assert len(copies(forward)) == 3  # the image and two filters: the third is of single places
    assert not copies(backward)
    saved = images(backward)
    assert len(saved) > 5
    tangent = [t.is_contiguous(memory_format=LAST) for t in saved].count(False)
    assert tangent == 1  # the gradient of the result comes as the result is


def called(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=target))


def test_filters_of_single_points_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = split(Points(), torch.randn(4, 3, 8, 8), monkeypatch)
    aten = torch.ops.aten
    assert len(called(forward, aten.convolution.default)) == 2
    assert len(called(forward, aten.mm.default)) == 1
    assert len(called(forward, aten.addmm.default)) == 2
    assert len(called(backward, aten.convolution_backward.default)) == 2
    assert (
        len(called(backward, aten.mm.default)) == 5
    )  # two each, but for the gradient of the input


def test_heavy_filters_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = split(Heavy(), torch.randn(4, 3, 9, 9), monkeypatch)
    aten = torch.ops.aten
    _, heavy, _ = called(forward, aten.convolution.default)
    assert all(n.meta["val"].is_contiguous() for n in heavy.args[:2])
    _, heavy, _ = called(backward, aten.convolution_backward.default)
    assert all(n.meta["val"].is_contiguous() for n in heavy.args[:3])


def test_points_are_worth_laying_out_a_heavy_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = split(Heavy(), torch.randn(16, 3, 21, 21), monkeypatch)
    heavy = called(forward, torch.ops.aten.convolution.default)[1]
    assert all(n.meta["val"].is_contiguous(memory_format=LAST) for n in heavy.args[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_depthwise_gradients_are_computed_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, backward = split(Points().to(dtype), torch.randn(4, 3, 8, 8, dtype=dtype), monkeypatch)
    some, each = called(backward, torch.ops.aten.convolution_backward.default)
    assert {n.meta["val"].dtype for n in some.args[:3]} == {dtype}
    assert {n.meta["val"].dtype for n in each.args[:3]} == {torch.float32}


@pytest.mark.parametrize("make", [Points, Dense, Groups])
def test_gradients_in_bfloat16(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().bfloat16()
    x = torch.randn(3, 3, 13, 11, dtype=torch.bfloat16)
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    run = torch.compile(mine, backend=torchair.get_npu_backend(), dynamic=False)
    got, eager = gradients(mine, run, x), gradients(model, model, x)
    assert_close(got, eager, gradients(wide, wide, x.double()))
    assert [t.dtype for t in got] == [t.dtype for t in eager]


def test_running_statistics_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their new values are written where the old ones were, and the backward reads neither."""
    model = nn.Sequential(nn.Conv2d(3, 7, 1), nn.BatchNorm2d(7))
    _, backward = split(model, torch.randn(4, 3, 8, 8), monkeypatch)
    vectors = [n for n in backward.graph.find_nodes(op="placeholder") if _dims(n) == (7,)]
    assert len(vectors) == 3  # the weight, the mean and one over the deviation of the batch


def _dims(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


@pytest.mark.parametrize(
    "model, x, options",
    [
        (Block(), torch.randn(1, 3, 8, 8), {}),
        (Block(), torch.randn(4, 3, 8, 8), {"numerics": "strict"}),
        (Block(), torch.randn(4, 3, 8, 8), {"dynamic": True}),
        (Block().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64), {}),
        (nn.Conv2d(8, 8, 3, groups=8), torch.randn(4, 8, 8, 8), {}),
        (nn.Conv1d(8, 8, 3), torch.randn(4, 8, 8), {}),
        (nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), {}),
    ],
    ids=["batch 1", "strict", "dynamic", "float64", "depthwise", "1d", "none"],
)
def test_graphs_that_stay_as_they_are(
    model: nn.Module, x: Tensor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = split(model, x, monkeypatch, **options)
    assert len(graphs) == 2
    assert not any(copies(g) for g in graphs)


def test_strict_numerics_keep_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 3, 9, 9)
    mine = copy.deepcopy(model)
    config = torchair.CompilerConfig()
    config.numerics = "strict"
    run = torch.compile(mine, backend=torchair.get_npu_backend(compiler_config=config))
    for got, eager in zip(gradients(mine, run, x), gradients(model, model, x), strict=True):
        assert torch.equal(got, eager)


def test_operators_that_count_in_memory_read_what_was_traced() -> None:
    """`as_strided` means other elements with other strides."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w).as_strided((2, 4), (4, 1), 3) * 2

    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    joint = fx.experimental.proxy_tensor.make_fx(forward, tracing_mode="fake")(x, w)
    carry_channels_last(joint)
    joint.recompile()
    assert copies(joint)
    torch.testing.assert_close(joint(x, w), forward(x, w))


@pytest.mark.parametrize(
    ("channels", "groups", "dtype", "allowed", "reason"),
    [
        (128, 1, torch.float32, True, None),
        (128, 128, torch.float32, True, None),
        (128, 1, torch.float32, False, "most of the work"),
        (64, 1, torch.float32, True, "few channels"),
        (64, 64, torch.float32, True, "few channels"),
        (64, 1, torch.bfloat16, False, None),
        (64, 1, torch.float16, True, None),
    ],
)
def test_float32_on_a_gpu(
    channels: int,
    groups: int,
    dtype: torch.dtype,
    allowed: bool,
    reason: str | None,
) -> None:
    """Channels last are TF32 there, and eager's channels first are not where there are few."""

    def forward(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, w, padding=1, groups=groups), u)

    shapes = (8, channels, 16, 16), (channels, channels // groups, 3, 3), (48, channels, 1, 1)
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        joint = fx.experimental.proxy_tensor.make_fx(forward)(*given)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        said = layouts._declines(called(joint, torch.ops.aten.convolution.default))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("numerics", ["default", "strict", "batch_invariant"])
def test_large_filters_over_few_points_are_products(
    numerics: str, stride: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    seen: list[torch.Size] = []
    real = torch.ops.aten.im2col

    def im2col(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.shape)
        return real(x, *rest)

    names = {n: getattr(torch.ops.aten, n) for n in ("convolution_backward", "col2im")}
    monkeypatch.setattr(contraction, "aten", SimpleNamespace(im2col=im2col, **names))
    model = nn.Conv2d(96, 640, 3, stride, padding=1).to(dtype)
    x = torch.randn(2, 96, 3, 2, dtype=dtype)
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    config = torchair.CompilerConfig()
    config.numerics = numerics
    backend = torchair.get_npu_backend(compiler_config=config)
    run = torch.compile(mine, backend=backend, dynamic=False)
    got, eager = gradients(mine, run, x), gradients(model, model, x)
    assert_close(got, eager, gradients(wide, wide, x.double()))
    assert [t.stride() for t in got] == [t.stride() for t in eager]
    products = 1 if stride == 1 else 2  # over twelve points the gradients alone
    assert seen == ([x.shape] * products if numerics == "default" else [])


def test_what_is_infinite_stays_where_it_is() -> None:
    """A product with zeros would spread it over the image."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(64, 512, 3, padding=1), torch.randn(2, 64, 4, 3)
    x[0, 5, 0, 0] = float("inf")
    run = torch.compile(copy.deepcopy(model), backend=torchair.get_npu_backend(), dynamic=False)
    assert torch.equal(run(x).isfinite(), model(x).isfinite())


class Regions(nn.Module):
    """Images, and regions of them, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.regions = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, regions: Tensor) -> Tensor:
        return self.images(x).sum() + self.regions(regions).sum()


def test_no_images_beside_others() -> None:
    torch._dynamo.reset()
    plain, model = (Regions() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    x, regions = torch.randn(2, 3, 8, 8), torch.randn(0, 3, 5, 5)
    plain(x, regions).backward()
    torch.compile(model, backend="torchair")(x, regions).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
