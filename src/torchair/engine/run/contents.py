"""Contents of tensors that were copied, as packed weights are: are they still what they were?

Writes that torch counts are found by version counters, elsewhere. For all others (through `.data`
or NumPy, by another process, to tensors of inference mode) each call looks at a few places of each
tensor and at one slice of all, so that any change is found within so many calls.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any
from weakref import WeakSet

import torch

from torchair.codegen.cpu.identity import CONTENTS, contents_test, hash_function
from torchair.codegen.cpu.target import cpu
from torchair.engine.plan.records import extent

CALLS_PER_THREAD = 1024
"""Calls within which all contents are looked at, for each thread that torch has: one thread reads
the slice, and all of them read the weights. So it is less than a hundredth of their work."""

_LINE = 64  # bytes that a slice has at least
_SAMPLES = 4  # places of a tensor that are looked at in each call, at most
_SAMPLED = 2048  # bytes for each of them: many small tensors would cost more than their products
_MOST_RUNS = 1 << 14  # pieces of a tensor with gaps; one with more is looked at by samples only
_UNREADABLE = ("cuda", "meta")  # devices whose addresses mean nothing to the host
_uint = ctypes.c_uint32.from_address


class Contents:
    """Contents of tensors, as they were when they were added."""

    def __init__(self) -> None:
        self.words: Any = (ctypes.c_int64 * len(CONTENTS))()
        self._tensors: list[torch.Tensor] = []
        self._spans: list[tuple[int, int]] = []  # memory of these, by its ends
        self._hash = hash_function(cpu().library)
        self._look = contents_test(cpu().library)
        _living.add(self)

    @property
    def address(self) -> int:
        """Where native tests find the words about it."""
        return ctypes.addressof(self.words)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at these as well. Whatever has changed by now stays so."""
        if not self.unchanged():
            self.note_change()
        new = list(tensors)
        self._tensors += new
        self._spans += [_span(t) for t in new]
        readable = [t for t in self._tensors if t.device.type not in _UNREADABLE and t.numel()]
        self._put("samples", [word for t in readable for word in _samples(t)], 2)
        runs = [run for t in readable for run in _runs(t)]
        calls = CALLS_PER_THREAD * torch.get_num_threads()
        even = max(calls - len(runs), calls // 2)  # each run may end in a slice that is not full
        most = _LINE * math.ceil(sum(size for _, size in runs) / even / _LINE) or _LINE
        slices = [piece for start, size in runs for piece in _pieces(start, size, most)]
        words = [w for at, size in slices for w in (at, size, self._hash(at, size))]
        self._put("slices", words, 3)
        self._set("cursor", 0)
        self._set("turn", math.ceil(len(slices) / calls))

    def _put(self, name: str, words: list[int], record: int) -> None:
        table = (ctypes.c_int64 * len(words))(*words)
        setattr(self, f"_{name}", table)
        self._set(name, len(words) // record)
        self._set(f"{name}.at", ctypes.addressof(table))

    def _set(self, name: str, word: int) -> None:
        self.words[CONTENTS.index(name)] = word

    def __getitem__(self, name: str) -> int:
        return int(self.words[CONTENTS.index(name)])

    def look(self) -> bool:
        """Look at the next slice; whether nothing has changed, as far as that shows. After a change
        it is the same slice again: the answer stays."""
        return bool(self._look(self.address))

    def unchanged(self) -> bool:
        """Look at all slices."""
        rounds = math.ceil(self["slices"] / (self["turn"] or 1))
        return all(self.look() for _ in range(max(rounds, 1)))

    @property
    def calls(self) -> int:
        """Within how many calls a change is found; 0 where nothing can be looked at."""
        return math.ceil(self["slices"] / self["turn"]) if self["turn"] else 0

    def note_change(self) -> None:
        """The user says that they have changed."""
        self._set("stale", 1)

    def overlaps(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether some of it lies in this memory."""
        return any(a < end and start < b for start, end in spans for a, b in self._spans)


_living: WeakSet[Contents] = WeakSet()


def note_changes(tensors: Iterable[torch.Tensor]) -> int:
    """These tensors have changed: whatever holds copies of them makes new ones. How many do."""
    spans = [_span(t) for t in tensors]
    found = [c for c in list(_living) if c.overlaps(spans)]
    for contents in found:
        contents.note_change()
    return len(found)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr() if tensor.device.type != "meta" else 0
    return start, start + extent(tensor.shape, tensor.stride()) * tensor.element_size()


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The pieces of memory that a tensor fills, as address and bytes."""
    both = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((stride, n) for stride, n in both if stride and n > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    if math.prod(n for _, n in dims) > _MOST_RUNS:
        return
    size, start = tensor.element_size(), tensor.data_ptr()
    for index in product(*(range(n) for _, n in dims)):
        offset = sum(i * stride for i, (stride, _) in zip(index, dims, strict=True))
        yield start + offset * size, length * size


def _pieces(start: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    for at in range(0, size, most):
        yield start + at, min(most, size - at)


def _samples(tensor: torch.Tensor) -> Iterator[int]:
    """A few places of a tensor, spread over it: addresses, each with the four bytes that are there.
    None of a tensor of fewer bytes."""
    size, count = tensor.element_size(), tensor.numel()
    wanted = min(_SAMPLES, count, math.ceil(count * size / _SAMPLED))
    start = tensor.data_ptr()
    end = extent(tensor.shape, tensor.stride()) * size
    for k in range(wanted):
        number, offset = (2 * k + 1) * count // (2 * wanted), 0
        for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            number, index = divmod(number, n)
            offset += index * stride * size
        at = start + min(offset, end - 4)
        if at >= start:
            yield at
            yield _uint(at).value
