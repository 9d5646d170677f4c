"""The lives of results that a replay leaves in the memory of a pool.

By default a result belongs to whoever gets it: it is copied out of the pool, so the next replay
changes nothing that somebody holds. With `share_results` it stays there. While an FX graph has one
captured graph then, or its keys do not share memory, the very same tensors are returned by every
call. With several keys over shared memory nobody holds results but the user: those still alive are
returned again, others are made anew over the same memory.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from torchair.capture.base import Kept, OfArgument, Pooled, Recording, ResultSource

_ALIGNED = 16  # bytes; a multiple of the size of any element


class PooledRecording(Recording):
    """A recording whose replays leave results in the memory of a pool."""

    sources: list[ResultSource]  # one for each result of the graph, known after the first replay
    outputs: Shared | Copied

    def __init__(self, share_results: bool) -> None:
        self.outputs = Shared() if share_results else Copied()

    @abc.abstractmethod
    def storage(self, group: int) -> torch.UntypedStorage:
        """A storage object over the pool memory of a group of results; it keeps that alive."""

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        return self.outputs.take(self, args, hold)

    def release(self) -> None:
        self.outputs.release()


class Copied:
    """Results in memory of their own. Those that share memory in the graph share it here too."""

    def __init__(self) -> None:
        self._from: list[torch.Tensor] | None = None

    def take(
        self, recording: PooledRecording, args: Sequence[Any], hold: bool
    ) -> tuple[Any, ...]:
        """Results of the call that has just run."""
        if self._from is None:
            self._prepare(recording)
        copies = [make() for make in self._make]
        if len(copies) == 1:
            copies[0].copy_(self._from[0], non_blocking=True)  # type: ignore[index]
        elif copies:
            torch._foreach_copy_(copies, self._from, True)  # type: ignore[arg-type]
        tensors = [read(copies) for read in self._tensors]
        return tuple([read(tensors, args) for read in self._readers])

    def _prepare(self, recording: PooledRecording) -> None:
        """What is copied at each call, and how results are made of the copies."""
        pooled = list(dict.fromkeys(s for s in recording.sources if isinstance(s, Pooled)))
        groups: dict[int, list[Pooled]] = {}
        for source in pooled:
            groups.setdefault(source.group, []).append(source)
        self._from, self._make = [], []
        parts: dict[Pooled, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {}
        for number, (group, members) in enumerate(groups.items()):
            storage = recording.storage(group)
            if len(members) == 1 and _is_dense(members[0]):
                (only,) = members
                self._from.append(_tensor(storage, only, only.offset))
                self._make.append(_empty_like(only, storage.device))
                parts[only] = itemgetter(number)
                continue
            begin, end = _span(members)
            span = Pooled(group, torch.uint8, (end - begin,), (1,))
            self._from.append(_tensor(storage, span, begin))
            self._make.append(_empty_like(span, storage.device))
            for member in members:
                parts[member] = _part(number, member, begin)
        self._tensors = [parts[source] for source in pooled]
        self._readers = [_reader(s, pooled) for s in recording.sources]

    def release(self) -> None:
        """Nothing is held."""


def _reader(source: ResultSource, pooled: list[Pooled]) -> Callable[[Any, Any], Any]:
    """A function from the tensors made of copies and the arguments of a call to a result."""
    if isinstance(source, Kept):
        value = source.value
        return lambda tensors, args: value
    if isinstance(source, OfArgument):
        make = source.make
        return lambda tensors, args: make(args)
    number = pooled.index(source)
    return lambda tensors, args: tensors[number]


def _is_dense(source: Pooled) -> bool:
    like = torch.empty_strided(source.shape, source.strides, device="meta")
    return bool(torch.ops.aten.is_non_overlapping_and_dense(like))


def _span(members: Sequence[Pooled]) -> tuple[int, int]:
    """First byte of what some results show of their storage, and the one after the last."""
    begins, ends = [], []
    for m in members:
        last = sum((n - 1) * s for n, s in zip(m.shape, m.strides, strict=True))
        count = 0 if 0 in m.shape else last + 1
        begins.append(m.offset * m.dtype.itemsize)
        ends.append((m.offset + count) * m.dtype.itemsize)
    return min(begins) // _ALIGNED * _ALIGNED, max(ends)


def _part(number: int, source: Pooled, begin: int) -> Callable[[Any], torch.Tensor]:
    offset = source.offset - begin // source.dtype.itemsize
    return lambda copies: _placed(copies[number].untyped_storage(), source, offset)


def _empty_like(source: Pooled, device: torch.device) -> Callable[[], torch.Tensor]:
    shape, strides, dtype = source.shape, source.strides, source.dtype
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _placed(storage: torch.UntypedStorage, source: Pooled, offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=source.dtype, device=storage.device)
    return empty.set_(storage, offset, source.shape, source.strides)


def _tensor(storage: torch.UntypedStorage, source: Pooled, offset: int) -> torch.Tensor:
    """A tensor that outlives the mode of the call."""
    with torch.inference_mode(False):
        return _placed(storage, source, offset)


class Shared:
    """Results in the memory of the pool, as the option `share_results` asks for them."""

    def __init__(self) -> None:
        self._held: tuple[Any, ...] | None = None
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}
        self._plain: bool | None = None
        self.rebuilt = 0  # times that tensors had to be made

    def take(
        self, recording: PooledRecording, args: Sequence[Any], hold: bool
    ) -> tuple[Any, ...]:
        """Results of the call that has just run; `hold` keeps the tensors for the next calls."""
        results = self._held
        if results is None:
            results = self._collect(recording)
            if hold:
                self._held = results
        sources = recording.sources
        if self._plain is None:
            self._plain = not any(isinstance(s, OfArgument) for s in sources)
        if self._plain:
            return results
        return tuple(
            s.make(args) if isinstance(s, OfArgument) else r
            for s, r in zip(sources, results, strict=True)
        )

    def _collect(self, recording: PooledRecording) -> tuple[Any, ...]:
        """Live tensors again, dead ones anew; tensors of one group share a storage object."""
        sources = recording.sources
        found = {k: ref() for k, ref in self._alive.items()}
        live = {
            k: t for k, t in found.items() if t is not None and isinstance(sources[k], Pooled)
        }
        storages: dict[int, torch.UntypedStorage] = {}
        for k, tensor in live.items():
            storages[sources[k].group] = tensor.untyped_storage()  # type: ignore[union-attr]
        results: list[Any] = []
        known: dict[Pooled, torch.Tensor] = {sources[k]: t for k, t in live.items()}  # type: ignore[misc]
        made = False
        for k, source in enumerate(sources):
            if isinstance(source, Kept):
                results.append(source.value)
            elif isinstance(source, OfArgument):
                results.append(None)
            else:
                if source not in known:
                    if source.group not in storages:
                        storages[source.group] = recording.storage(source.group)
                    known[source] = _tensor(storages[source.group], source, source.offset)
                    self._alive[k] = weakref.ref(known[source])
                    made = True
                results.append(known[source])
        self.rebuilt += made
        return tuple(results)

    def release(self) -> None:
        """Hold results no longer: from now on only the user does."""
        self._held = None
