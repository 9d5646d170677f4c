"""Tensors that a program relies on beyond one call: addresses that it has written down, contents
that it has copied. Whether they are still the same is one native comparison."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.cpu.driver import HITS, Known, Sample, test_address, test_of
from torchair.codegen.cpu.target import cpu

_SAMPLES = 16  # places of a copied tensor that are compared at each call
_uint = ctypes.c_uint32.from_address


class Held:
    """Tensors by their position among arguments.

    Writes that torch counts are found by the version of a tensor, all others (through `.data` or
    NumPy, or to a tensor of inference mode) by looking at a few places of it.
    """

    def __init__(
        self, tensors: Mapping[int, torch.Tensor], length: int, copied: Iterable[int] = ()
    ) -> None:
        """`length` is the number of arguments; contents of those at `copied` count as well."""
        self.tensors = dict(tensors)
        self._length = length
        self._known = {i: (t.data_ptr(), _version(t)) for i, t in self.tensors.items()}
        self._samples: dict[int, list[Sample]] = {}
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
        self._samples.update({i: _samples(self.tensors[i]) for i in new})
        known = [
            Known(i, t, self._known[i][0], self._known[i][1] if i in self.copied else -1)
            for i, t in self.tensors.items()
        ]
        samples = [s for found in self._samples.values() for s in found]
        made = test_of(cpu().library, self._length, known, samples)
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
        samples = [s for found in self._samples.values() for s in found]
        same = all(_uint(s.address).value == s.content for s in samples)
        self._hits += same
        return same

    def native(self, given: Sequence[Any]) -> tuple[int, Any, list[Any]] | None:
        """The test for native callers: its address, its table, and a list that holds these tensors
        where it looks for them; None where there is no native test."""
        if self._table is None or not self.same(given):
            return None
        return test_address(cpu().library), self._table, list(given)

    @property
    def hits(self) -> int:
        """How often the test passed, here or in tests made from this one."""
        return self._hits + (0 if self._table is None else self._table[HITS])

    def add_hits(self, count: int) -> None:
        """Take note of tests that passed elsewhere."""
        self._hits += count

    def is_over(self, other: Held) -> bool:
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


def _samples(tensor: torch.Tensor) -> list[Sample]:
    """A few places of a tensor, spread over it."""
    size, count = tensor.element_size(), tensor.numel()
    wanted = min(_SAMPLES, count)
    start = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * size
    found = []
    for k in range(wanted):
        number, offset = (2 * k + 1) * count // (2 * wanted), 0
        for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            number, index = divmod(number, n)
            offset += index * stride * size
        at = start + min(offset, last + size - 4)
        if at >= start:
            found.append(Sample(at, _uint(at).value))
    return found
