"""Editions of a session: the same graph with the weights of another model packed.

Freezing holds for tensors, not for a graph. A call with other tensors gets an edition of its own,
after a write to frozen tensors they are packed again, and tensors that are written to in nearly
every call are no longer frozen.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

from torchair.engine.run.held import Held

_PATIENCE = 4  # times that weights may change without having been used twice in between
_OURS = 2  # references to a tensor that nobody else has: in `Held`, and as an argument


class Edition(Protocol):
    """A session with weights packed, `held` being what it relies on; None with nothing packed."""

    name: str
    held: Held | None

    def another(self) -> Any:
        """The same graph, without weights so far."""

    def take(self, inputs: Sequence[Any], frozen: bool) -> None:
        """Begin anew with the weights among these inputs, packed if they are to be `frozen`."""

    def repack(self, inputs: Sequence[Any]) -> None:
        """Pack the weights again, which are where they were."""


E = TypeVar("E", bound=Edition)


class Editions(Generic[E]):
    """All editions of one session."""

    def __init__(self, first: E) -> None:
        assert first.held is not None
        self._first = self.current = first
        self._all: list[E] = [first]
        self._place = min(first.held.tensors)  # of the tensor that editions are looked up by
        self._strain = 0  # changes in a row that hardly a call came between
        self._lock = RLock()
        self._index()

    def _index(self) -> None:
        self._by_tensor: dict[int, list[E]] = {}
        for edition in self._all:
            if edition.held is not None:
                key = id(edition.held.tensors[self._place])
                self._by_tensor.setdefault(key, []).append(edition)

    def __iter__(self) -> Iterator[E]:
        return iter(list(self._all))

    def of(self, inputs: Sequence[Any]) -> E:
        """The edition for a call."""
        current = self.current
        if current.held is None or current.held.same(inputs):
            return current
        with self._lock:
            if self.current.held is not None:  # else given up while this call waited
                self.current = self._find(inputs)
                self._index()
            return self.current

    def _find(self, inputs: Sequence[Any]) -> E:
        for edition in self._by_tensor.get(id(inputs[self._place]), ()):
            if edition.held is not None and edition.held.same(inputs):
                return edition
        for edition in self._all:
            assert edition.held is not None
            if edition.held.has_memory(inputs):
                return self._changed(edition, inputs, moved=False)
            if edition.held.has_objects(inputs):
                return self._changed(edition, inputs, moved=True)
        for edition in self._all:
            if _is_orphan(edition):
                return self._changed(edition, inputs, moved=True)
        made: E = self._first.another()
        made.take(inputs, True)
        self._all.append(made)
        return made

    def _changed(self, edition: E, inputs: Sequence[Any], moved: bool) -> E:
        """An edition whose weights have other contents, or are others."""
        assert edition.held is not None
        self._strain = 0 if edition.held.hits > 1 else self._strain + 1
        if self._strain >= _PATIENCE:
            warnings.warn(
                f"{self._first.name}: parameters that are packed (frozen_parameter is on, or they "
                "are quantised) change in nearly every call; from now on they are not packed",
                UserWarning,
                stacklevel=6,
            )
            edition = self._first
            self._all = [edition]
            edition.take(inputs, False)
        elif moved:
            edition.take(inputs, True)
        else:
            edition.repack(inputs)
        return edition


def _is_orphan(edition: Edition) -> bool:
    """Whether nobody but us has some tensor of an edition any more: its model is gone."""
    tensors = edition.held.tensors if edition.held is not None else {}
    return any(sys.getrefcount(tensors[i]) <= _OURS for i in tensors)
