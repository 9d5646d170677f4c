"""frozen_parameter: packed weights are those of the tensors of the call, as they are now."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchair
from torchair.engine.run.frozen import FrozenTensors

MODES = ("max-autotune", "reduce-overhead")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    """A packed weight, a bias, and weights that are read where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.relu(self.linear(x)))


class Convolved(nn.Module):
    """Weights with a normalisation folded in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean = torch.randn(4)
        self.norm.running_var = torch.rand(4) + 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


KINDS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "linear": (Block, X),
    "conv": (Convolved, IMAGE),
}


def backend(mode: str = "max-autotune") -> Any:
    config = torchair.CompilerConfig()
    config.mode = mode
    config.experimental_config.frozen_parameter = True
    with warnings.catch_warnings(action="ignore"):  # it reminds of the promise
        return torchair.get_npu_backend(compiler_config=config)


def check(call: Any, model: nn.Module, x: torch.Tensor) -> None:
    torch.testing.assert_close(call(x).clone(), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_models_of_one_class_have_weights_of_their_own(kind: str, mode: str) -> None:
    make, x = KINDS[kind]
    models, shared = [make().eval() for _ in range(3)], backend(mode)
    calls = [torch.compile(m, backend=shared) for m in models]
    for k in (0, 1, 0, 2, 2, 1, 0):
        check(calls[k], models[k], x)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_blocks_compiled_one_by_one_share_code_and_not_weights(mode: str) -> None:
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*[Block() for _ in range(4)]).eval()
    wanted, shared = model(X), backend(mode)
    for block in model:
        block.compile(backend=shared)
    for _ in range(3):
        torch.testing.assert_close(model(X), wanted, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _weights(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([_weights(model)], lr=0.1)
    _weights(model).grad = torch.randn_like(_weights(model))
    optimizer.step()


def _swap(model: nn.Module) -> None:
    _weights(model).grad = None
    torch.utils.swap_tensors(_weights(model), nn.Parameter(torch.randn_like(_weights(model))))


def _set(model: nn.Module, value: torch.Tensor) -> None:
    _weights(model).data = value


def _by_numpy(model: nn.Module) -> None:
    numbers = _weights(model).detach().numpy()
    numbers *= 2


def _statistics(model: nn.Module) -> None:
    norm = model.norm
    (norm.running_mean if isinstance(norm, nn.BatchNorm2d) else norm.bias).add_(1)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "add_": lambda m: _weights(m).add_(1),
    "copy_": lambda m: _weights(m).copy_(torch.randn_like(_weights(m))),
    "one element": lambda m: _weights(m).view(-1)[5].add_(3),
    "of a view": lambda m: _weights(m).detach()[:8].mul_(2),
    "data.mul_": lambda m: _weights(m).data.mul_(2),
    "data =": lambda m: _set(m, torch.randn_like(_weights(m))),
    "load_state_dict": lambda m: m.load_state_dict(
        {k: v + 1 if v.is_floating_point() else v for k, v in m.state_dict().items()}
    ),
    "assign": lambda m: m.load_state_dict(copy.deepcopy(type(m)().state_dict()), assign=True),
    "optimizer": _step,
    "swap_tensors": _swap,
    "numpy": _by_numpy,
    "what is not the weight": _statistics,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.filterwarnings("error:.*change in nearly every call")
def test_changes_are_seen(kind: str, mode: str) -> None:
    make, x = KINDS[kind]
    model, other, shared = make().eval(), make().eval(), backend(mode)
    call, unchanged = (torch.compile(m, backend=shared) for m in (model, other))
    for name, change in CHANGES.items():
        for _ in range(3):
            check(call, model, x)
        check(unchanged, other, x)
        before = model(x)
        change(model)
        assert not torch.equal(model(x), before), name
        check(call, model, x)
    check(unchanged, other, x)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_inference_mode(mode: str) -> None:
    with torch.inference_mode():
        model = Block().eval()
        call = torch.compile(model, backend=backend(mode))
        check(call, model, X)
        model.linear.weight.mul_(3)  # torch does not count this
        check(call, model, X)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_change_all_the_time_are_not_packed(mode: str) -> None:
    model = Block().eval()
    call = torch.compile(model, backend=backend(mode))
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(10):
            model.linear.weight.add_(0.1)
            check(call, model, X)
    assert len([w for w in found if "change in nearly every call" in str(w.message)]) == 1


@torch.no_grad()
def test_models_that_are_gone_leave_no_weights() -> None:
    fast = torch.compile(lambda m, x: m(x), backend=backend())
    lives = []
    for _ in range(4):
        model = Block().eval()
        for _ in range(3):
            check(lambda x, m=model: fast(m, x), model, X)
        lives.append(weakref.ref(model.linear.weight.untyped_storage()))
        del model
    gc.collect()
    assert [life() is not None for life in lives[:-1]] == [False] * 3


@pytest.mark.parametrize("native", (True, False))
def test_what_is_held(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("torchair.engine.run.frozen.test_of", lambda *args: None)
    a, b = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3))
    half = torch.randn(1, dtype=torch.float16)
    args = [torch.ones(2), a, 7, b, half]
    held = FrozenTensors({1: a, 3: b, 4: half}, 5, copied=[1, 4])
    assert held.same(args) and held.same(tuple(args)) and held.hits == 2
    assert not held.same(args[:4]) and not held.same([args[0], b, 7, a, half])
    alias = a.detach()
    assert not held.same([args[0], alias, 7, b, half])
    assert held.has_memory([args[0], alias, 7, b, half]) and not held.has_objects([0, alias, 7, b])
    with torch.no_grad():
        b.add_(1)  # its contents were not copied
        assert held.same(args)
        half.add_(1)
        assert not held.same(args)
    b.data = torch.randn(3)
    assert not FrozenTensors({1: a, 3: b}, 5).has_memory(
        [*args[:3], alias]
    ) and not held.has_memory(args)
    assert held.has_objects(args)


def test_samples_are_inside_of_a_tensor() -> None:
    base = torch.randn(7, 9, 5)
    shapes: list[torch.Tensor] = [base[1:, 2:7:2], base.mT[3], base[0, 0, :1], base[:0]]
    for tensor, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        view = tensor.to(dtype) if dtype is torch.bfloat16 else tensor
        held = FrozenTensors({0: view}, 1, copied=[0])
        assert held.same([view])
        if view.numel():
            view.data.mul_(1.5)
            assert not held.same([view])


def test_memory_that_the_host_cannot_read_is_held_by_its_version() -> None:
    far = torch.randn(4, 5, device="meta")
    held = FrozenTensors({0: far}, 1, copied=[0])
    assert held.same([far])
    far.add_(1)
    assert not held.same([far])


class Positions(nn.Module):
    """A table of which a call takes what is beyond its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[len(x) - 1 :].sum(0) + x.sum(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_weight_that_begins_where_a_size_says(mode: str) -> None:
    model = Positions()
    call = torch.compile(model, backend=backend(mode), dynamic=True)
    for n in (2, 3, 4, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(call(x), model(x))
