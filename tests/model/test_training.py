"""Training: whole steps in one compiled function, compiled autograd, checkpoints, default devices.

What eager computes is the reference; what `aot_eager` cannot do may fail here in the same words.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchair
from generic_nodes import collect_generic_nodes
from native_check import capture
from tolerance import assert_close
from torchair.fx import tracing

BACKENDS = ("torchair", "npugraph_ex")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)
    torch._dynamo.reset()


class Mlp(nn.Sequential):
    """A model with its input and optimizer, in float32 or as its copy in float64."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.x = torch.randn(3, 8)
        self.optimizer: Any = None

    def ready(self, dtype: torch.dtype = torch.float32) -> Mlp:
        model = copy.deepcopy(self).to(dtype)
        model.x = self.x.to(dtype)
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def trained(model: Mlp, step: Callable[[], Tensor]) -> list[Tensor]:
    """Losses of three steps and the weights after them."""
    losses = [step() for _ in range(3)]
    return [*losses, *(p.detach() for p in model.parameters())]


def assert_trains_like_eager(make: Callable[[Mlp], Callable[[], Tensor]]) -> None:
    """`make` gives the compiled step of a model."""
    first = Mlp()
    eager, wide, mine = first.ready(), first.ready(torch.float64), first.ready()
    got = trained(mine, make(mine))
    assert_close(got, trained(eager, eager.step), trained(wide, wide.step))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_training_step_is_one_compiled_function(backend):
    assert_trains_like_eager(lambda model: torch.compile(model.step, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamo_never_looks_into_the_engine(backend):
    seen: list[str] = []
    model = Mlp().ready()
    step = torch.compile(model.step, backend=backend)
    start = torch._dynamo.convert_frame.compile_frame

    def watched(code: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(code.co_filename)
        return start(code, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.convert_frame, "compile_frame", watched)
        step()
    assert seen and not [f for f in seen if "torchair" in f or "llvmlite" in f]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd(backend):
    def make(model: Mlp) -> Callable[[], Tensor]:
        forward = torch.compile(model, backend=backend)
        model[0].weight.register_hook(lambda g: g * 1.0)
        whole = torch.compile(backend=backend, fullgraph=True)

        def step() -> Tensor:
            model.optimizer.zero_grad()
            with torch._dynamo.compiled_autograd._enable(whole):
                loss = forward(model.x).square().mean()
                loss.backward()
            model.optimizer.step()
            return loss.detach()

        return step

    assert_trains_like_eager(make)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_cleared_inside_a_graph(backend):
    model = Mlp().ready()

    @torch.compile(backend=backend)
    def cleared(x: Tensor) -> Tensor:
        model.optimizer.zero_grad(set_to_none=False)
        return x + 1

    model(model.x).sum().backward()
    torch.testing.assert_close(cleared(model.x), model.x + 1)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_is_refused_in_the_words_of_torch(backend):
    x = torch.randn(3, 4, requires_grad=True)

    def refusal(backend):
        y = torch.compile(lambda x: x.exp().sum(), backend=backend)(x)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            g.sum().backward()
        return str(caught.value)

    assert refusal(backend) == refusal("aot_eager")


# ---- default devices ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_on_meta_gives_meta_results(backend):
    torch.set_default_device("meta")
    model = nn.Linear(8, 4)
    result = torch.compile(lambda x: model(x).relu(), backend=backend)(torch.empty(3, 8))
    assert (result.device.type, result.shape) == ("meta", (3, 4))
    result.sum().backward()
    assert model.weight.grad.device.type == "meta"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_device_is_not_for_the_memory_of_the_engine(backend):
    model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = model(x).cumsum(0)
    torch.set_default_device("meta")
    compiled = torch.compile(lambda x: model(x).cumsum(0), backend=backend)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)


# ---- checkpoints ----


def test_attention_that_is_computed_again_is_native():
    def block(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q).sin()

    def loss(q: Tensor) -> Tensor:
        return checkpoint(block, q, use_reentrant=False).square().sum()

    eager = torch.randn(1, 2, 8, 16)
    mine, wide = eager.clone(), eager.double()
    with capture() as found:
        one = torch.compile(loss, backend=torchair.get_npu_backend())(mine.requires_grad_())
        one.backward()
    two, three = loss(eager.requires_grad_()), loss(wide.requires_grad_())
    two.backward(), three.backward()
    assert_close([one, mine.grad], [two, eager.grad], [three, wide.grad])
    kinds = [{u.kind for u in graph.fusion.units} for graph in found]
    assert len(kinds) == 2 and all("attention" in k for k in kinds)


def test_dropout_that_is_computed_again_is_the_same():
    def loss(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False).sum()

    x = torch.ones(64, requires_grad=True)
    total = torch.compile(loss, backend=torchair.get_npu_backend())(x)
    total.backward()
    torch.testing.assert_close(x.grad.sum(), total.detach())


# ---- the backward of a loss in the same call


class WithLoss(nn.Module):
    """Results of a model, and a loss; a buffer that training updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x)) * scale
        return y, y.square().mean()


def with_loss(mode: str, loss: int) -> Any:
    config = torchair.CompilerConfig()
    config.mode = mode
    config.experimental_config.aot_config_enable_joint_graph = True
    config.experimental_config.aot_config_output_loss_index = loss
    return torchair.get_npu_backend(compiler_config=config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_a_call_runs_the_backward_of_its_loss(mode):
    mine = WithLoss()
    theirs, exact = copy.deepcopy(mine), copy.deepcopy(mine).double()
    call = torch.compile(mine, backend=with_loss(mode, 1), fullgraph=True)
    scales = [torch.ones(4, dtype=d, requires_grad=True) for d in (torch.float32,) * 2]
    scales.append(torch.ones(4, dtype=torch.float64, requires_grad=True))
    for n in (5, 5, 7):
        x = torch.randn(n, 6)
        results = call(x, scales[0])
        eager, reference = theirs(x, scales[1]), exact(x.double(), scales[2])
        eager[1].backward()
        reference[1].backward()
        assert not any(r.requires_grad for r in results)
        assert_close(results, [r.detach() for r in eager], [r.detach() for r in reference])
    found = [
        [*(p.grad for p in m.parameters()), s.grad, m.norm.running_mean]
        for m, s in zip((mine, theirs, exact), scales, strict=True)
    ]
    assert_close(*found)


def test_a_loss_that_is_not_there():
    call = torch.compile(lambda x: x * 2, backend=with_loss("max-autotune", 3))
    with pytest.raises(IndexError, match="output_loss_index is 3, but the graph has 1 results"):
        call(torch.ones(2, requires_grad=True))


# ---- convolutions, which torch computes ----


class Mixer(nn.Module):
    """A block of a ConvNeXt: the layer norm runs over channels, so that images have them last."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.gelu(self.mix(y)).square().mean()

    def gradients(self, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        self.zero_grad()
        x = x.clone().requires_grad_()
        loss = run(x)
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in self.parameters())]


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_convolutions(dynamic: bool) -> None:
    model = Mixer()
    wide = copy.deepcopy(model).double()
    run = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=dynamic)
    with capture() as found:
        for batch in (2, 3) if dynamic else (2,):
            x = torch.randn(batch, 8, 6, 5)
            mine = model.gradients(run, x)
            assert_close(mine, model.gradients(model, x), wide.gradients(wide, x.double()))
    backward = [n.type for n in found[-1].graph.nodes]
    assert backward.count("ConvGradients") == (2 if dynamic else 1)  # the other is of products
    assert not any("Backprop" in t for t in backward)


def test_torch_gets_images_as_eager_lays_them_out() -> None:
    """Rows that were normalised lie together, and so do the channels of what is made of them."""
    model = Mixer()
    with capture() as found:
        torch.compile(model, backend=torchair.get_npu_backend())(torch.randn(1, 8, 6, 5))
    plan = found[0].session.last_plan()
    assert plan is not None
    made = [plan.place(s.outs[0])[0].meta for s in plan.steps if s.node.type == "Conv2D"]
    last = torch.channels_last
    assert [m.is_contiguous(memory_format=last) for m in made] == [False, True]


def test_gradients_of_float64_keep_all_digits():
    """Of attention: sums of exponentials, and a scale that follows from a size."""
    torch.manual_seed(0)
    even = torch.randn(2, 3, 4, 6, dtype=torch.float64)  # torch's fused attention, and its parts
    for x in (even, even[..., ::2]):
        got = []
        for backend in ("eager", "torchair"):
            torch._dynamo.reset()
            asked = x.detach().requires_grad_()
            call = torch.compile(attend, backend=backend, dynamic=True)
            call(asked).square().sum().backward()
            got.append(asked.grad)
        torch.testing.assert_close(*got, rtol=1e-13, atol=1e-13)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("backend", ("torchair", "npugraph_ex"))
def test_parts_of_a_detached_result_have_no_gradients(backend: str) -> None:
    def fn(x):
        y = torch.softmax(x, 0)
        return y.detach()[1:], y, y.detach().unfold(0, 2, 2)

    x = torch.randn(6, 4, requires_grad=True)
    results = torch.compile(fn, backend=backend)(x)
    assert [r.requires_grad for r in results] == [False, True, False]
    assert len({r.untyped_storage().data_ptr() for r in results}) == 1


@pytest.mark.parametrize("backend", ("torchair", "npugraph_ex"))
def test_gradients_of_parts_of_an_argument_that_repeats(backend: str) -> None:
    def fn(x, n):
        part = x[:n]
        return part, part * 2

    def slopes(call):
        x = torch.empty_strided((4, 5, 3), (3, 0, 1)).requires_grad_()  # no view of a tensor
        results = call(x, 2)
        weights = [torch.arange(r.numel()).float().view(r.shape) for r in results]
        return torch.autograd.grad(results, x, weights)[0]

    call = torch.compile(fn, backend=backend, dynamic=True)
    assert torch.equal(slopes(call), slopes(fn))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_computes_cheap_values_again(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(x: Tensor) -> Tensor:
        return ((x * 2 + 1).relu() * x.abs()).square().sum()

    def saved() -> int:
        torch._dynamo.reset()
        found = torch.compile(loss, backend=backend)(x)
        (mine,) = torch.autograd.grad(found, x, retain_graph=True)
        torch.testing.assert_close(mine, *torch.autograd.grad(loss(x), x))
        return sum(t.numel() for t in found.grad_fn.saved_tensors)

    x = torch.randn(40, 33, requires_grad=True)
    elsewhere = saved()
    monkeypatch.setattr(tracing, "_is_on", lambda joint, device: device == "npu")
    assert elsewhere < saved()


@pytest.mark.parametrize("backend", ["torchair", "npugraph_ex"])
def test_a_number_that_no_gradient_has_as_a_size(backend: str) -> None:
    """The backward gets it beside what was saved, and lets go of all of them."""

    def shifted(x: Tensor, n: int, scale: float) -> tuple[Tensor, ...]:
        y = torch.atan2(x, x.abs() + 1)
        z = y.roll(n, 0)
        return z.squeeze(1), z, y * scale

    torch._dynamo.reset()
    compiled = torch.compile(shifted, backend=backend)
    for n, scale in ((1, 2.0), (2, 3.0), (3, 0.5)):
        x = torch.randn(5, 1, requires_grad=True)
        got, expected = (
            torch.autograd.grad([y.sum() for y in call(x, n, scale)], x)
            for call in (compiled, shifted)
        )
        torch.testing.assert_close(got, expected)


def test_an_optimizer_needs_no_kernels_of_torch() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(7, 5), nn.Linear(7, 5)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1).step for m in models]
    steps[1] = torch.compile(steps[1], backend="torchair")
    with collect_generic_nodes() as generic:
        for _ in range(3):
            for model, step in zip(models, steps, strict=True):
                for k, p in enumerate(model.parameters()):
                    p.grad = torch.full_like(p, 0.1 + k)
                step()
    assert not generic
    for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(mine, theirs)
