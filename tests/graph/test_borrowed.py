"""Programs that have their arena only while they run, here on the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiling import compiled
from torchair.engine.run import borrowed
from torchair.engine.run.borrowed import MOVES, BorrowingProgram
from torchair.engine.run.native import NativeProgram, ProgramPool


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BorrowingProgram]]:
    """Programs that were made, all of them of this kind."""
    found: list[BorrowingProgram] = []
    first = BorrowingProgram.__init__

    def init(self: BorrowingProgram, *args: object) -> None:
        found.append(self)
        first(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BorrowingProgram, "__init__", init)
    monkeypatch.setattr(BorrowingProgram, "suits", staticmethod(lambda plan: plan.arena_size > 0))
    monkeypatch.setattr(NativeProgram, "suits", staticmethod(lambda plan: False))
    torch._dynamo.reset()
    yield found


def work(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With values in the arena that kernels and torch read."""
    h = torch.relu(x @ w)
    return torch.cumsum(h * 2, 0) @ w, h.sort(0)[0] + 1


@torch.no_grad()
def test_nothing_is_held_between_calls(made: list[BorrowingProgram]) -> None:
    call = compiled(work)
    for seed in range(4):
        torch.manual_seed(seed)
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        for got, wanted in zip(call(x, w), work(x, w), strict=True):
            torch.testing.assert_close(got, wanted)
        assert made and all(program._memory is None for program in made)


@torch.no_grad()
def test_an_arena_in_another_place(
    made: list[BorrowingProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is bound to it, and keeps it in the end."""
    taken: list[torch.Tensor] = []

    def allocated(self: BorrowingProgram) -> torch.Tensor:
        taken.append(torch.empty(self.plan.arena_size, dtype=torch.uint8))
        for old in taken[:-1]:
            old.fill_(255)  # belongs to others by now
        return taken[-1]

    monkeypatch.setattr(borrowed.BorrowingProgram, "_allocated", allocated)
    call = compiled(work)
    for seed in range(MOVES + 4):
        torch.manual_seed(seed)
        x, w = torch.randn(16, 16), torch.randn(16, 16)
        for got, wanted in zip(call(x, w), work(x, w), strict=True):
            torch.testing.assert_close(got, wanted)
    (program,) = made
    assert program.moves == MOVES + 1 and program._memory is taken[-1]


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
