"""State captured across calls: frozen weights and the guards that detect when they change. A guard
is one native comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.cpu.identity import HITS, KnownTensor, contents_address, test_of
from torchair.codegen.cpu.layouts import refusal
from torchair.codegen.cpu.native_guard import (
    ANY,
    BUSY,
    DictEntry,
    EqualValue,
    SameTensor,
    Task,
    TensorLike,
    UncheckedTensor,
    native_guard,
)
from torchair.codegen.cpu.target import cpu
from torchair.engine.run.contents import Contents

__all__ = [
    "ANY",
    "BUSY",
    "DictEntry",
    "FrozenTensors",
    "EqualValue",
    "Task",
    "SameTensor",
    "TensorLike",
    "UncheckedTensor",
    "argument_guard",
]


class FrozenTensors:
    """Tensors by their position among arguments.

    Writes that torch counts are found by the version of a tensor, all others by its contents, if
    it is in memory that the host can read.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        length: int,
        copied: Iterable[int] = (),
        contents: Contents | None = None,
    ) -> None:
        """`length` is the number of arguments; contents of those at `copied` count as well, given
        as `contents` where another one looks at the same: what one finds, both know."""
        self.tensors = dict(tensors)
        self._length = length
        self._known = {i: (t.data_ptr(), _version(t)) for i, t in self.tensors.items()}
        self.contents = contents
        self._shared = contents is not None
        self._table: Any = None
        self._hits = 0  # that the table does not count
        self.same: Callable[[Sequence[Any]], Any] = self._compared
        self.copied: frozenset[int] = frozenset()
        self.note_copies(copied)

    def note_copies(self, positions: Iterable[int]) -> None:
        """From now on the contents of these count too, as they were when this was made."""
        new = frozenset(positions) - self.copied
        if not new and self._table is not None:
            return
        self.copied |= new
        if new and not self._shared:
            self.contents = self.contents or Contents()
            self.contents.add([self.tensors[i] for i in new])
        known = [
            KnownTensor(i, t, self._known[i][0], self._known[i][1] if i in self.copied else -1)
            for i, t in self.tensors.items()
        ]
        made = test_of(cpu().library, self._length, known, self.contents)
        if made is not None:
            self._hits = self.hits
            self.same, self._table = made

    def _compared(self, given: Sequence[Any]) -> bool:
        """The same without native code."""
        if len(given) != self._length:
            return False
        for i, tensor in self.tensors.items():
            address, version = self._known[i]
            if given[i] is not tensor or tensor.data_ptr() != address:
                return False
            if i in self.copied and _version(tensor) != version:
                return False
        same = self.contents is None or self.contents.look()
        self._hits += same
        return same

    def same_tensors(self, given: Sequence[Any]) -> list[SameTensor] | None:
        """These tensors for native guards; None where there is no native test, and where others are
        given."""
        if self._table is None or not self.same(given):
            return None
        return [
            SameTensor(i, id(t), t._cdata, address, version if i in self.copied else -1)
            for i, t in self.tensors.items()
            for address, version in (self._known[i],)
        ]

    @property
    def contents_test(self) -> tuple[int, int]:
        """The test of their contents for native guards: its address, and the words it reads."""
        if self.contents is None:
            return 0, 0
        return contents_address(cpu().library), self.contents.address

    @property
    def hits(self) -> int:
        """How often the test passed, here or in tests made from this one."""
        return self._hits + (0 if self._table is None else self._table[HITS])

    def add_hits(self, count: int) -> None:
        """Take note of tests that passed elsewhere."""
        self._hits += count

    def is_over(self, other: FrozenTensors) -> bool:
        """Whether these tensors lie in the same memory as others."""
        return {i: known[0] for i, known in self._known.items()} == {
            i: known[0] for i, known in other._known.items()
        }

    def has_objects(self, given: Sequence[Any]) -> bool:
        """Whether these are the very objects, wherever their memory is."""
        return all(given[i] is t for i, t in self.tensors.items())

    def has_memory(self, given: Sequence[Any]) -> bool:
        """Whether these are tensors over the same memory."""
        return all(given[i].data_ptr() == address for i, (address, _) in self._known.items())


def _version(tensor: torch.Tensor) -> int:
    """How often torch has written to a tensor, -1 where it does not count."""
    return -1 if tensor.is_inference() else tensor._version


# ---- guards ----


def reads_natively() -> bool:
    """Whether native code reads the objects of this process. Else there is no callback: a graph
    runs without such guards too."""
    return cpu().runs() and refusal() is None


def argument_guard(
    length: int,
    records: Sequence[TensorLike | UncheckedTensor | SameTensor | EqualValue],
    entries: Sequence[DictEntry] = (),
    task: Task | None = None,
) -> Callable[..., bool | None] | None:
    """A function of `length` arguments that tells whether they are as recorded; None without native
    code."""
    made = counting_guard(length, records, entries, task)
    return None if made is None else made[0]


def counting_guard(
    length: int,
    records: Sequence[TensorLike | UncheckedTensor | SameTensor | EqualValue],
    entries: Sequence[DictEntry] = (),
    task: Task | None = None,
) -> tuple[Callable[..., bool | None], Any] | None:
    """The same, and the table whose first word counts the calls that passed."""
    return native_guard(cpu().library, length, records, entries, task) if cpu().runs() else None
