"""Gates of a process that has native code: one call that compares all arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchair.codegen.cpu.gate import (
    ANY,
    Entry,
    Same,
    Task,
    TensorLike,
    TensorTaken,
    gate,
)
from torchair.codegen.cpu.target import cpu

__all__ = ["ANY", "Entry", "Same", "Task", "TensorLike", "TensorTaken", "native_gate"]


def native_gate(
    length: int,
    records: Sequence[TensorLike | TensorTaken | Same],
    entries: Sequence[Entry] = (),
    task: Task | None = None,
) -> Callable[..., bool | None] | None:
    """A function of `length` arguments that tells whether they are as recorded; None without native
    code."""
    if cpu().available() is not None:
        return None
    made = gate(cpu().library, length, records, entries, task)
    return None if made is None else made[0]
