"""No stale weights: a write that torch does not count is found within so many calls, or told."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchair
from torchair.codegen.cpu.identity import hash_function
from torchair.codegen.cpu.target import cpu
from torchair.engine.run.contents import CALLS_PER_THREAD, Contents
from torchair.engine.run.frozen import FrozenTensors

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Quantised(nn.Module):
    """Packed without being asked for."""

    def __init__(self) -> None:
        super().__init__()
        integers = torch.randint(-128, 128, (32, 32), dtype=torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(32) / 32, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scales


KINDS: dict[str, Callable[[], nn.Module]] = {"frozen": lambda: nn.Linear(32, 32), "int8": Quantised}


def config(kind: str, mode: str = "max-autotune") -> torchair.CompilerConfig:
    made = torchair.CompilerConfig()
    made.mode = mode
    made.experimental_config.frozen_parameter = kind == "frozen"
    return made


def dynamo(model: nn.Module, kind: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config(kind)))


def captured(model: nn.Module, kind: str) -> Any:
    torch._dynamo.reset()
    made = torchair.get_npu_backend(compiler_config=config(kind, "npugraph_ex"))
    return torch.compile(model, backend=made)


def direct(model: nn.Module, kind: str) -> Any:
    return torchair.compile(model, X, config=config(kind))


WAYS = {"dynamo": dynamo, "captured": captured, "direct": direct}


def ready(kind: str, way: str) -> tuple[nn.Module, Any]:
    model = KINDS[kind]().eval()
    with warnings.catch_warnings(action="ignore"):  # a reminder of what frozen means
        fast = WAYS[way](model, kind)
        for _ in range(4):
            fast(X)
    return model, fast


def is_right(model: nn.Module, fast: Any) -> bool:
    return torch.allclose(fast(X), model(X), rtol=1e-4, atol=1e-5)


def calls_until_right(model: nn.Module, fast: Any) -> int:
    """How many calls were wrong; as many as the documentation allows, at most."""
    most = CALLS_PER_THREAD * torch.get_num_threads()
    return next((n for n in range(most + 1) if is_right(model, fast)), most + 1)


def write(model: nn.Module, chance: random.Random) -> None:
    """One element, so that no counter and hardly a sample shows it."""
    flat = model.weight.detach().numpy().reshape(-1)  # type: ignore[union-attr, operator]
    place = chance.randrange(flat.size)
    flat[place] = 5 if flat[place] < 0 else -7


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_single_element_is_found_in_time(kind: str, way: str) -> None:
    model, fast = ready(kind, way)
    chance = random.Random(f"{kind} {way}")
    for _ in range(6):
        write(model, chance)
        assert calls_until_right(model, fast) <= CALLS_PER_THREAD
        assert all(is_right(model, fast) for _ in range(3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_who_says_so_has_it_at_once(kind: str, way: str) -> None:
    model, fast = ready(kind, way)
    chance = random.Random(f"{kind} {way}")
    for told in (model, fast, model.weight, [{"a": model}], lambda: fast(model)):
        write(model, chance)
        assert torchair.weights_changed(told) >= 1
        assert all(is_right(model, fast) for _ in range(3))
    assert torchair.weights_changed(nn.Linear(3, 3)) == 0 == torchair.weights_changed(None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_another_process_writes(kind: str, way: str) -> None:
    model, fast = ready(kind, way)
    model.share_memory()
    assert is_right(model, fast)  # the tensors have moved
    numbers = model.weight.detach().numpy()
    pid = os.fork()
    if pid == 0:
        numbers[7, 11] = 99
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and numbers[7, 11] == 99
    assert calls_until_right(model, fast) <= CALLS_PER_THREAD


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_inference_mode(kind: str) -> None:
    with torch.inference_mode():
        model, fast = ready(kind, "dynamo")
        model.weight[3, 5] = 77  # torch does not count this
        assert calls_until_right(model, fast) <= CALLS_PER_THREAD


def test_every_byte_counts() -> None:
    look, memory = hash_function(cpu().library), bytearray(range(256)) * 4
    view = torch.frombuffer(memory, dtype=torch.uint8)
    for size in (1, 3, 63, 64, 65, 255, 256, 300, 700):
        before = look(view.data_ptr(), size)
        for place in range(size):
            view[place] ^= 16
            assert look(view.data_ptr(), size) != before
            view[place] ^= 16
        assert look(view.data_ptr(), size) == before


_BASE = torch.randn(9, 40, 24, generator=torch.Generator().manual_seed(1))
TENSORS = {
    "dense": _BASE, "turned": _BASE.permute(2, 0, 1), "gaps": _BASE[:, ::3, 2:11],
    "a column": _BASE[3, :, 4], "repeated": _BASE[0].expand(5, 40, 24), "one": _BASE[0, 0, :1],
    "bytes": _BASE.to(torch.int8)[0, 0, :7], "halves": _BASE.bfloat16()[1:],
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("native", [True, False])
def test_any_place_of_any_tensor(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHAIR_LAYOUT_PROBES", "1" if native else "0")
    tensor, other, chance = TENSORS[name].clone(), torch.randn(100), random.Random(name)
    if tensor.stride() != TENSORS[name].stride():  # a clone has no gaps
        tensor = TENSORS[name].as_strided(TENSORS[name].shape, TENSORS[name].stride())
    elements = [[chance.randrange(n) for n in tensor.shape] for _ in range(5)]
    for place in elements:
        held = FrozenTensors({0: tensor, 1: other}, 2, copied=[0, 1])
        assert held.contents is not None
        calls = held.contents.calls
        assert calls <= CALLS_PER_THREAD * torch.get_num_threads()
        assert all(held.same([tensor, other]) for _ in range(2 * calls + 3))
        tensor.data[tuple(place)] += 3
        assert not all(held.same([tensor, other]) for _ in range(calls))
        assert not held.same([tensor, other])  # and it stays so


def test_what_lies_between_does_not_count() -> None:
    base = torch.zeros(10, 8)
    contents = Contents()
    contents.add([base[:, :4]])
    base.data[:, 4:] = 1
    assert contents.unchanged()
    base.data[9, 3] = 1
    assert not contents.unchanged()


def test_what_changed_before_others_came_stays_changed() -> None:
    a, b = torch.zeros(300), torch.zeros(3)
    contents = Contents()
    contents.add([a])
    a.data[123] = 1
    contents.add([b])
    assert not contents.look()
