"""The lives of results.

While an FX graph has one captured graph, or its keys do not share memory, the very same tensors are
returned by every call and the next replay overwrites them. With several keys over shared memory
nobody holds results but the user: those still alive are returned again, others are made anew over
the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torchair.capture.base import Kept, OfArgument, Pooled, Recording


class Outputs:
    """Results of one captured graph."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._held: tuple[Any, ...] | None = None
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}
        self.rebuilt = 0  # times that tensors had to be made

    def take(self, args: Sequence[Any], hold: bool, copy: bool) -> tuple[Any, ...]:
        """Results of the call that has just run; `hold` keeps the tensors for the next calls,
        `copy` gives the user memory of his own."""
        results = self._held
        if results is None:
            results = self._collect()
            if hold:
                self._held = results
        if self._plain and not copy:
            return results
        sources = self._recording.sources
        return tuple(
            s.make(args) if isinstance(s, OfArgument)
            else r.clone() if copy and isinstance(r, torch.Tensor) else r
            for s, r in zip(sources, results, strict=True)
        )  # fmt: skip

    @property
    def _plain(self) -> bool:
        known = self.__dict__.get("_is_plain")
        if known is None:
            known = not any(isinstance(s, OfArgument) for s in self._recording.sources)
            self._is_plain = known
        return known

    def _collect(self) -> tuple[Any, ...]:
        """Live tensors again, dead ones anew; tensors of one group share a storage object."""
        sources = self._recording.sources
        live = {k: t for k, t in self._living().items() if isinstance(sources[k], Pooled)}
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
                    known[source] = self._build(source, storages)
                    self._alive[k] = weakref.ref(known[source])
                    made = True
                results.append(known[source])
        self.rebuilt += made
        return tuple(results)

    def _build(self, source: Pooled, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if source.group not in storages:
            storages[source.group] = self._recording.storage(source.group)
        storage = storages[source.group]
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=source.dtype, device=storage.device)
            return empty.set_(storage, source.offset, source.shape, source.strides)

    def _living(self) -> dict[int, torch.Tensor]:
        found = {k: ref() for k, ref in self._alive.items()}
        return {k: t for k, t in found.items() if t is not None}

    def release(self) -> None:
        """Hold results no longer: from now on only the user does."""
        self._held = None

    def living(self) -> list[torch.Tensor]:
        """Results of earlier calls that somebody still holds."""
        return list(self._living().values())
