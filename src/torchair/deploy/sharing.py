"""Arguments that share memory with what a call updates: with each other, or with the model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from torchair.errors import InputError

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # dims and strides


class SharedMemory(InputError):
    """A call updates what two of its arguments, or an argument and the model, have in common."""

    of_model = False


def extent(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last."""
    spans = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (1 + spans) * t.element_size() if t.numel() else 0


class _Areas:
    """Memory that tensors lie in: areas that are apart, in order."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, length in sorted((t.data_ptr(), extent(t)) for t in tensors):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], start + length)
            elif length:
                self._starts.append(start)
                self._ends.append(start + length)

    def meet(self, start: int, length: int) -> bool:
        """Whether a piece of memory has a byte in common with one of them."""
        k = bisect_right(self._ends, start)
        return k < len(self._ends) and self._starts[k] < start + length


class Sharing:
    """What a call updates, with the tensors that the model has now."""

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], written: frozenset[int]
    ) -> None:
        """`written` are numbers of what is updated: tensors of the model, then arguments."""
        self.tensors = tensors
        self._names, self._written = names, written
        count = len(tensors)
        self._arguments = {k - count for k in written if k >= count}
        updated = _Areas(t for k, t in enumerate(tensors) if k in written)
        every = _Areas(tensors) if self._arguments else updated
        self._areas = updated, every  # for arguments that are read, for those that are updated

    def apart(self, addresses: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether arguments, in bytes, lie apart from what is updated. No says nothing yet: they
        may lie between its elements."""
        spans = []
        for k, (start, length) in enumerate(zip(addresses, lengths, strict=True)):
            written = k in self._arguments
            if self._areas[written].meet(start, length):
                return False
            spans.append((start, start + length, written))
        return len(spans) < 2 or not self._arguments or _lie_apart(spans)

    def problem(self, arguments: Mapping[str, torch.Tensor]) -> SharedMemory | None:
        """The first overlap of a call; None if there is none."""
        given = list(arguments.values())
        if self.apart([t.data_ptr() for t in given], [extent(t) for t in given]):
            return None
        count, names = len(self.tensors), [*self._names, *arguments]
        every = [*self.tensors, *given]
        spans = sorted((t.data_ptr(), extent(t), k) for k, t in enumerate(every))
        for n, (start, length, k) in enumerate(spans):
            for after, more, other in spans[n + 1 :]:
                if after >= start + length:
                    break
                matters = {k, other} & self._written and max(k, other) >= count
                if matters and more and _collide(every[k], every[other], after - start):
                    return self._told(names, *sorted((k, other)))
        return None

    def _told(self, names: Sequence[str], first: int, second: int) -> SharedMemory:
        if first >= len(self.tensors):
            return SharedMemory(
                f"the call updates its arguments, and {names[first]} and {names[second]} share "
                "memory", name=names[second],
                hint="pass a copy of one, or use torch.compile, which takes such calls",
            )  # fmt: skip
        updated = names[first if first in self._written else second]
        error = SharedMemory(
            f"the call updates {updated}, and the argument {names[second]} shares memory with "
            f"{names[first]} of the model", name=names[second], hint="pass a copy of it",
        )  # fmt: skip
        error.of_model = True
        return error


def _lie_apart(spans: list[tuple[int, int, bool]]) -> bool:
    """Whether no area that is written overlaps another: addresses of both ends, and if it is."""
    spans.sort()
    end = written_end = 0  # of those before
    for start, stop, written in spans:
        if start < (end if written else written_end):
            return False
        end = max(end, stop)
        written_end = max(written_end, stop) if written else written_end
    return True


def _collide(a: torch.Tensor, b: torch.Tensor, offset: int) -> bool:
    size = a.element_size()
    if b.element_size() != size or offset % size:
        return True
    first, second = ((tuple(t.shape), t.stride()) for t in (a, b))
    return _meet(first, second, offset // size)


@lru_cache(maxsize=256)
def _meet(a: Layout, b: Layout, offset: int) -> bool:
    """Whether layouts have a place in common, of which the second begins so many elements later.
    They may lie between each other as columns of a matrix do."""
    ends = (sum((n - 1) * s for n, s in zip(*x, strict=True)) for x in (a, b))
    taken = torch.zeros(1 + max(next(ends), offset + next(ends)), dtype=torch.bool)
    taken.as_strided(*a).fill_(True)
    return bool(taken.as_strided(*b, offset).any())
