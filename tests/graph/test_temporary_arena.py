"""Programs that have their arena only while they run, here on the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchair
from compiling import compiled
from torchair.engine.run import temporary_arena
from torchair.engine.run.native import NativeProgram, ProgramPool
from torchair.engine.run.temporary_arena import MOVES, TemporaryArenaProgram


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TemporaryArenaProgram]]:
    """Programs that were made, all of them of this kind."""
    found: list[TemporaryArenaProgram] = []
    first = TemporaryArenaProgram.__init__

    def init(self: TemporaryArenaProgram, *args: object) -> None:
        found.append(self)
        first(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TemporaryArenaProgram, "__init__", init)
    monkeypatch.setattr(
        TemporaryArenaProgram, "suits", staticmethod(lambda plan: plan.arena_size > 0)
    )
    monkeypatch.setattr(NativeProgram, "suits", staticmethod(lambda plan: False))
    torch._dynamo.reset()
    yield found


def work(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With values in the arena that kernels and torch read."""
    h = torch.relu(x @ w)
    return torch.cumsum(h * 2, 0) @ w, h.sort(0)[0] + 1


@torch.no_grad()
def test_nothing_is_held_between_calls(made: list[TemporaryArenaProgram]) -> None:
    call = compiled(work)
    for seed in range(4):
        torch.manual_seed(seed)
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        for got, wanted in zip(call(x, w), work(x, w), strict=True):
            torch.testing.assert_close(got, wanted)
        assert made and all(program._memory is None for program in made)


@torch.no_grad()
def test_an_arena_in_another_place(
    made: list[TemporaryArenaProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is bound to it, and keeps it in the end."""
    taken: list[torch.Tensor] = []

    def allocated(self: TemporaryArenaProgram) -> torch.Tensor:
        taken.append(torch.empty(self.plan.arena_size, dtype=torch.uint8))
        for old in taken[:-1]:
            old.fill_(255)  # belongs to others by now
        return taken[-1]

    monkeypatch.setattr(temporary_arena.TemporaryArenaProgram, "_allocated", allocated)
    call = compiled(work)
    for seed in range(MOVES + 4):
        torch.manual_seed(seed)
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        for got, wanted in zip(call(x, w), work(x, w), strict=True):
            torch.testing.assert_close(got, wanted)
    (program,) = made
    assert program.moves == MOVES + 1 and program._memory is taken[-1]


class Layers(torch.nn.Module):
    """Layers with an operator of torch in each, so that a program has many parts."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        linear = (torch.nn.Linear(width, width) for _ in range(count))
        self.layers = torch.nn.ModuleList(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cumsum(torch.tanh(layer(x)), 0) / len(x)
        return x


def test_a_backward_lets_go_of_what_it_has_read(
    made: list[TemporaryArenaProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its parts what the forward has saved ends, and gradients begin: never are all there
    at once."""
    model, x = Layers(6, 96), torch.randn(128, 96)
    static = sum(p.nbytes for p in model.parameters())
    most: dict[TemporaryArenaProgram, list[int]] = {}
    schedule_allocations = TemporaryArenaProgram._schedule_allocations

    def watched(self: TemporaryArenaProgram) -> None:
        schedule_allocations(self)
        kinds = {a.slot: a.kind for a in self.plan.allocations}

        def bytes_now(registers: list[Any]) -> int:
            held = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for slot, t in enumerate(registers)
                if t is not None and kinds.get(slot) in ("input", "fresh")
            }
            return sum(held.values())

        def after(run: Any, registers: list[Any]) -> None:
            run(registers)
            most.setdefault(self, []).append(bytes_now(registers))

        self._runs = [partial(after, run) for run in self._runs]

    monkeypatch.setattr(TemporaryArenaProgram, "_schedule_allocations", watched)
    call = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for _ in range(3):
        got = torch.autograd.grad(call(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    _, backward = made
    saved = sum(a.size for a in backward.plan.allocations if a.kind == "input")
    gradients = sum(a.size for a in backward.plan.allocations if a.kind == "fresh")
    assert gradients == static and saved > static + 8 * x.nbytes
    assert max(most[backward]) <= saved < 0.9 * (saved + gradients)
    assert most[backward][-1] <= gradients + static  # what the caller holds


def test_a_backward_that_is_called_twice_keeps_what_was_saved(
    made: list[TemporaryArenaProgram],
) -> None:
    model, x = Layers(2, 16), torch.randn(32, 16)
    call = torch.compile(model, backend=torchair.get_npu_backend(), dynamic=False)
    loss, wanted = call(x).square().sum(), model(x).square().sum()
    parameters = list(model.parameters())
    for again in (True, False):
        got = torch.autograd.grad(loss, parameters, retain_graph=again)
        eager = torch.autograd.grad(wanted, parameters, retain_graph=again)
        torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-3)
    assert len(made) == 2


def test_what_a_user_records_has_a_program_of_its_own() -> None:
    """Two recordings may be replayed at once, and beside calls."""
    used: list[object] = []

    class Made:
        def run(self, inputs: Any) -> list[torch.Tensor]:
            used.append(self)
            return []

    current = SimpleNamespace(stream_id=3)
    streams = SimpleNamespace(can_record=True, recording=False, current=current)
    pool = ProgramPool(SimpleNamespace(streams=streams, arena_size=0), lambda plan: Made())  # type: ignore[arg-type]
    for streams.recording in (False, True, True, False, True):
        pool.run([])
    assert used[0] is used[3] and len(set(map(id, used))) == 4
