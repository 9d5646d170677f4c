"""Calls of a captured graph as one native call: a native guard compares arguments and writes their
addresses down, `native_replay.py` exchanges them and launches. What it refuses takes the usual path
(`AclGraph.call`), which does the same step by step.

An entry takes the lock of its graph, so it and the usual path take turns. It serves the stream of
the replay before, from threads that have used the driver, outside of recordings. All other calls
take the usual path, which orders streams and prepares threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from torchair.capture.native_replay import STREAM, NativeReplay
from torchair.engine.run.frozen import (
    BUSY,
    DictEntry,
    EqualValue,
    SameTensor,
    TensorLike,
    UncheckedTensor,
    counting_guard,
)

if TYPE_CHECKING:
    from torchair.capture.base import Copied

Guard = tuple[Callable[..., bool | None], Any]
"""A native guard and its table."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Enterable:
    """A captured graph that can be entered natively: its table, and what an entry needs. The first
    pieces of memory are those of the arguments `moving`, the last those of the arguments `fixed`;
    `parameters` are where they were."""

    replay: NativeReplay
    moving: Sequence[int]
    fixed: Sequence[int]
    parameters: Sequence[int]
    results: Sequence[int]
    """Pieces that new tensors stand for, which follow the arguments."""
    outputs: Copied
    makers: Sequence[Callable[[], torch.Tensor]]
    again: Callable[[], int | None]
    failures: list[int]

    @property
    def pieces(self) -> dict[int, int]:
        """The piece of each argument that has one."""
        first = len(self.replay.given) - len(self.fixed)
        known = {position: k for k, position in enumerate(self.moving)}
        return known | {position: first + k for k, position in enumerate(self.fixed)}

    def unchecked(self, count: int) -> list[UncheckedTensor]:
        """Records of results, behind so many arguments."""
        places = map(self.replay.place, self.results)
        return [UncheckedTensor(count + k, place) for k, place in enumerate(places)]

    def same_tensor(self, args: Sequence[Any], position: int, at: int) -> SameTensor:
        """A record of a parameter: that very tensor, among the arguments of a guard."""
        t = args[position]
        return SameTensor(at, id(t), t._cdata, t.data_ptr())

    def guard_of_call(
        self,
        args: Sequence[Any],
        positions: Sequence[int],
        records: Sequence[TensorLike | EqualValue],
        entries: Sequence[DictEntry],
    ) -> Guard | None:
        """A guard of the arguments of a call, as `records` describe them. `positions` tells for
        each argument of the graph which one it is; -1 for one that is where it was, as `entries`
        make sure."""
        targets: dict[int, int] = {}
        for i, piece in self.pieces.items():
            if positions[i] < 0:
                self.replay.given[piece] = args[i].data_ptr()
            elif positions[i] in targets:
                return None  # one argument for two
            else:
                targets[positions[i]] = self.replay.place(piece)
        known = [
            replace(r, target=targets.get(r.position, 0)) if isinstance(r, TensorLike) else r
            for r in records
        ]
        kept = [
            self.same_tensor(args, i, positions[i]) for i in self.parameters if positions[i] >= 0
        ]
        taken = self.unchecked(len(records))
        every = [*known, *kept, *taken]
        return counting_guard(len(records) + len(taken), every, entries, self.replay.task)


class ReplayEntry:
    """One native call, of the arguments of a graph."""

    def __init__(self, graph: Enterable, guard: Guard, lock: Any) -> None:
        """`guard` takes the arguments of the graph, or others where no result is made of them."""
        self.replay, self._makers = graph.replay, graph.makers
        self._finish = graph.outputs.finish
        self._enter, self._table = guard
        self._again, self._lock, self._failures = graph.again, lock, graph.failures
        self._stream, self._calls_seen = -1, 0
        self._only = graph.makers[0] if len(graph.makers) == 1 else None

    def __call__(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """Results for these arguments; None where the usual path must serve them."""
        with self._lock:
            stream = self._again()
            if stream is None:
                return None
            if stream != self._stream:
                self.replay.table[STREAM] = self._stream = stream
            made = [make() for make in self._makers] if self._only is None else [self._only()]
            done = self._enter(*args, *made)
            if done:
                return self._finish(made, args)
            if done is None:
                self._note_status()
            return None

    def _note_status(self) -> None:
        status = self.replay.take_status()
        self._table[BUSY] = 0
        if status < 0:
            self._failures.append(-status)

    @property
    def calls(self) -> int:
        """How many it has served."""
        return self.replay.served

    def used(self) -> bool:
        """Whether it has served any since this was asked."""
        before, self._calls_seen = self._calls_seen, self.calls
        return self._calls_seen > before

    def close(self) -> None:
        """The graph is not there any more."""
        self._enter, self._again = _never, _nowhere


def _never(*args: Any) -> bool:
    return False


def _nowhere() -> None:
    return None


def guard_of(graph: Enterable, args: Sequence[Any], numbers: Sequence[EqualValue]) -> Guard | None:
    """A guard of the arguments of a graph; None where native code must not read them."""
    records: list[Any] = [*numbers]
    for position, piece in graph.pieces.items():
        t = args[position]
        if type(t) not in _PLAIN:
            return None
        records.append(TensorLike(position, t, t.shape, t.stride(), graph.replay.place(piece)))
    records += [graph.same_tensor(args, i, i) for i in graph.parameters]
    taken = graph.unchecked(len(args))
    return counting_guard(len(args) + len(taken), [*records, *taken], (), graph.replay.task)
