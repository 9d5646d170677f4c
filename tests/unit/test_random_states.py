"""Gradients of attention get the random state where they read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchair.operators import generic

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class State:
    """Stands for a tensor of one number."""

    device: torch.device
    number: int
    dtype: torch.dtype = torch.int64
    shape: tuple[int, ...] = ()

    def cpu(self) -> State:
        return State(CPU, self.number)

    def item(self) -> int:
        return self.number


@dataclass
class Query:
    """Stands for a tensor."""

    device: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("left", [CPU, CUDA], ids=str)
def test_states_are_where_they_are_read(
    left: torch.device, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU in a capture, on the host elsewhere, wherever the forward has left them."""

    def full(shape: Any, value: int, *, dtype: torch.dtype, device: torch.device) -> State:
        return State(device, value, dtype, shape)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(torch, "full", full)
    call = generic._with_state_on_host(lambda *args: args, (1, 2))
    _, *states = call(Query(CUDA), State(left, 7), State(left, 9))
    assert states == [State(CUDA if captured else CPU, n) for n in (7, 9)]


def test_on_a_cpu_nothing_is_asked() -> None:
    seed, offset = torch.tensor(7), torch.tensor(9)
    given = (torch.ones(3), seed, offset)
    assert generic._with_state_on_host(lambda *args: args, (1, 2))(*given) == given


@pytest.mark.parametrize("name", generic._RANDOM_STATES)
def test_places_are_those_of_the_schema(name: str) -> None:
    schema = generic._overload(f"{name}.default")._schema
    found = [k for k, a in enumerate(schema.arguments) if a.name.startswith("philox")]
    assert tuple(found) == generic._RANDOM_STATES[name]
