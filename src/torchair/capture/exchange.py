"""Replays without copies: a captured graph reads arguments and writes results where they are, since
their addresses are exchanged before a launch (`codegen/cuda/graphs.py`).

While a graph is recorded, memory that nothing is computed in stands for arguments and results, in
each recording at other addresses than in the one before. What differs tells where addresses are. If
a graph cannot be understood that way, its replays copy, see `DeviceRecording`.

A call then compares addresses with those of the call before. Those that have moved are exchanged,
which changes future launches only: one that is under way has its own. An argument is copied to
memory of the graph all the same if it

- begins at an address that libraries may have another kernel for, or is laid out in another way;
- overlaps what the graph updates: the graph reads what it held before;
- is small and read by so many kernels that a copy takes less time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchair.capture import base
from torchair.capture.entered import Enterable, ReplayEntry
from torchair.capture.native_replay import (
    ALIGNED,
    FIXED,
    FREE,
    LOOKED_AT,
    CallArgument,
    NativeReplay,
)
from torchair.codegen.cuda.driver import DriverError
from torchair.codegen.cuda.graphs import ExecutableGraph, MovedMemory, RecordedNode, moved, nodes_of
from torchair.engine.plan.records import extent, picker
from torchair.engine.run.executor import once
from torchair.engine.run.frozen import reads_natively
from torchair.engine.run.native import same_as
from torchair.fallbacks import Fallback, note
from torchair.torch_private.functions import foreach_copy

if TYPE_CHECKING:
    from torchair.capture.accelerator import Accelerator, PoolOwner, StreamOrder
    from torchair.capture.device_recording import ResultForms

_SHIFT = 512 * 1025  # bytes between the two places of the first piece
_STEP = 512  # further apart are those of the next one: distances between pieces vary, too
_GAP = 4096  # bytes between pieces: the end of one is not the begin of the next
_PLACES = (0, 1, 1, 0, 0)  # of pieces in recordings; the first two suffice for most graphs

EXCHANGE = 1.2e-6
COPY = 6e-6
RATE = 2e12
"""Seconds that new arguments for one kernel take, seconds that a copy takes beside its bytes, and
bytes of copies a second: for arguments that have moved."""


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor."""
    return extent(tensor.shape, tensor.stride()) * tensor.element_size()


class Placeholders:
    """Memory for pieces while a graph is recorded: each has two places."""

    def __init__(
        self, accelerator: Accelerator, device: torch.device, sizes: Sequence[int]
    ) -> None:
        self._accelerator, self._device, self.sizes = accelerator, device, list(sizes)
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += -(-(size + _GAP) // 512) * 512
        shifts = [_SHIFT + _STEP * k for k in range(len(starts))]
        size = end + _SHIFT + _STEP * len(starts) + 512
        self._block = torch.empty(size, dtype=torch.uint8, device=device)
        base_address = -(-self._block.data_ptr() // 512) * 512
        first = [base_address + start for start in starts]
        self._places = first, [at + far for at, far in zip(first, shifts, strict=True)]

    def storage(self, number: int, place: int) -> torch.UntypedStorage:
        """The memory of a piece at one of its places, as a storage of its own."""
        address = self._places[place][number]
        return self._accelerator.storage_at(address, self._device, self.sizes[number])

    def pieces(self, place: int) -> list[MovedMemory]:
        """Where pieces are when they are not at this place, and at this place."""
        known = self._places[1 - place], self._places[place], self.sizes
        return [MovedMemory(*piece) for piece in zip(*known, strict=True)]

    def number_at(self, address: int, place: int) -> int | None:
        """The piece that begins at an address when all are at a place."""
        here = self._places[place]
        return here.index(address) if address in here else None


@dataclass
class Recorded:
    """A graph that was recorded twice, ready to run."""

    graph: Any  # of torch; its nodes are what is updated
    run: ExecutableGraph
    found: ResultForms
    sizes: list[int]  # of pieces: first those of arguments, then those of results
    groups: dict[int, int]  # for each group of results that is a piece, which one


def recorded(
    record: Callable[[int], tuple[Any, ResultForms]],
    placeholders: Placeholders,
    arguments: int,
    draws: bool = False,
) -> Recorded:
    """Record until it is known where addresses of pieces are; DriverError where that does not come
    out. `record` is told at which of their places pieces are; the first pieces are `arguments`. A
    graph that `draws` random numbers is launched by torch."""
    known: tuple[list[list[RecordedNode]], list[list[RecordedNode]]] = [], []  # by place
    why = "nothing was recorded"  # text: an exception would hold this frame, and so all pieces
    for place in _PLACES:
        graph, found = record(place)
        raw = graph.raw_cuda_graph()
        nodes = nodes_of(raw)
        if known[1 - place]:
            try:
                patches = moved(nodes, known[1 - place], placeholders.pieces(place), known[place])
            except DriverError as e:
                why = str(e)
            else:
                by_torch = graph if draws else None
                run = ExecutableGraph(raw, nodes, patches, len(placeholders.sizes), by_torch)
                _check_readers(run, placeholders.sizes)
                numbers = [placeholders.number_at(address, place) for address, _ in found.places]
                groups = {g: n for g, n in enumerate(numbers) if n is not None and n >= arguments}
                return Recorded(graph, run, found, placeholders.sizes, groups)
        known[place].append(nodes)
        del found, graph  # their memory is that of the next recording
    raise DriverError(why)


class UnseenPieces(DriverError):
    """No argument of a kernel is an address in these pieces, whose numbers are `pieces`."""

    def __init__(self, pieces: list[int]) -> None:
        super().__init__(f"no argument of a kernel is an address in piece {pieces[0]}")
        self.pieces = pieces


def _check_readers(run: ExecutableGraph, sizes: Sequence[int]) -> None:
    """Make sure that each piece is used: a kernel may find one in memory that it is given, in a
    table of addresses, and then no argument shows it."""
    unseen = [k for k, size in enumerate(sizes) if size and not run.readers(k)]
    if unseen:
        raise UnseenPieces(unseen)


_address = torch.Tensor.data_ptr


class ExchangedRecording(base.PooledRecording):
    """A device graph whose arguments and results are the caller's."""

    outputs: base.Copied

    def __init__(
        self,
        made: Recorded,
        memory: PoolOwner,
        order: StreamOrder,
        request: base.ToCapture,
        moving: Sequence[int],
        checks: Sequence[Callable[[Sequence[Any]], None]],
        again: Callable[[Sequence[Any]], base.Recording],
        faults: Sequence[torch.Tensor] | None = (),
    ) -> None:
        """`moving` are the arguments that the first pieces are; `checks` come before a launch;
        `again` captures with copies, for the case that the driver refuses an exchange. `faults` are
        words that are zero where the checks find nothing, None if these do more."""
        super().__init__(False)
        self.outputs = base.Copied(made.groups)
        self.sources, self._places = made.found.sources, made.found.places
        self._made, self._memory, self._order = made, memory, order
        self._checks, self._again, self._name = list(checks), again, request.name
        self._storages = None if request.options.reuse else made.found.storages
        frozen = request.kinds.parameters if request.options.frozen_parameter else ()
        self._read = [*made.found.constants, *(request.args[i] for i in frozen)]  # come what may
        examples = [request.args[i] for i in moving]
        self._moving, self._pick = list(moving), picker(moving)
        self._alike = same_as(examples).check if examples else None
        self._outlines = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in examples
        ]
        self._device = memory.device
        updated = [request.args[i] for i in request.kinds.mutated]
        self._kinds, self._faults = request.kinds, faults
        self._updated = [(t.data_ptr(), t.data_ptr() + span(t)) for t in updated]
        self._private: dict[int, torch.Tensor] = {}
        self._always = {k for k in range(len(examples)) if self._copy_wins(k)}
        self._copied: list[int] = []  # arguments that calls like the last one copy
        self._seen: list[int] = []  # addresses of arguments in the last call,
        count, places = len(made.sizes), [t.data_ptr() for t in updated]
        self._bound = (ctypes.c_int64 * (count + len(updated)))(*[0] * count, *places)
        """Addresses of all pieces in the graph; behind them those of what it updates."""
        self._entries: list[ReplayEntry] = []
        self._failures: list[int] = []  # of these
        self._stream = 0
        self._instead: base.Recording | None = None
        self._hold_unused()

    @property
    def private(self) -> int:
        """How many arguments calls like the last one copy."""
        return len(self._copied)

    def _copy_wins(self, k: int) -> bool:
        """Whether a copy takes less time than new arguments for all kernels that read a piece."""
        return self._made.run.readers(k) * EXCHANGE > COPY + self._made.sizes[k] / RATE

    def _hold_unused(self) -> None:
        """What a plan makes as a result and no caller gets is in memory of the graph."""
        results = range(len(self._moving), len(self._made.sizes))
        unused = [n for n in results if n not in self._made.groups.values()]
        made = {n: torch.UntypedStorage(self._made.sizes[n], device=self._device) for n in unused}
        self._unused = made
        self._exchange([(n, storage.data_ptr()) for n, storage in made.items()])

    # ---- one call ----

    def feed(self, args: Sequence[Any]) -> None:
        self._stream = self._order.enter()
        for check in self._checks:
            check(args)
        if self._instead is not None:
            return self._instead.feed(args)
        sources = self._pick(args)
        odd: list[int] = []
        if self._alike is not None and not self._alike(*sources):
            odd = self._checked(args)
        addresses = list(map(_address, sources))
        try:
            if self._failures:
                self._forget()
            if odd or self._entries or addresses != self._seen:
                self._bind(addresses, odd)
            self._bind_results()
        except DriverError as e:
            return self._give_up(e, args)
        if self._copied:
            with torch.no_grad():
                self._copy(sources)

    def _checked(self, args: Sequence[Any]) -> list[int]:
        """Arguments that are laid out in another way than the graph reads them. Another type or
        size is an error."""
        odd = []
        for k, (position, like) in enumerate(zip(self._moving, self._outlines, strict=True)):
            given = args[position]
            kind = (given.dtype, given.shape, given.device)
            if kind != (like.dtype, like.shape, self._device):
                raise base.misfit(position, given, like, "device", self._device)
            if given.stride() != like.stride() or given.is_conj() or given.is_neg():
                odd.append(k)
        return odd

    def _bind(self, addresses: list[int], odd: Sequence[int]) -> None:
        """Let the graph read arguments at these addresses, or copies of them."""
        self._seen = []  # until all is done: there may be no memory for a copy
        must = (k for k, address in enumerate(addresses) if self._must_copy(k, address))
        self._copied = sorted({*self._always, *odd, *must})
        wanted = dict(enumerate(addresses)) | {k: _address(self._copy_of(k)) for k in self._copied}
        self._exchange(list(wanted.items()))
        if not odd:
            self._seen = addresses

    def _must_copy(self, k: int, address: int) -> bool:
        end = address + self._made.sizes[k]
        return bool(address % ALIGNED) or any(
            address < high and low < end for low, high in self._updated
        )

    def _copy_of(self, k: int) -> torch.Tensor:
        """Memory of the graph for an argument."""
        if k not in self._private:
            self._private[k] = self._memory.input_like(self._moving[k], self._outlines[k])
        return self._private[k]

    def _bind_results(self) -> None:
        """Let the graph write results to memory that is made now."""
        made = self.outputs.make(self)
        pieces = self._made.groups.values()
        self._exchange([(n, _address(t)) for n, t in zip(pieces, made, strict=False)])

    def _exchange(self, wanted: Sequence[tuple[int, int]]) -> None:
        bound = self._bound
        changed = [(piece, address) for piece, address in wanted if bound[piece] != address]
        if changed:
            self._made.run.exchange(changed)
            for piece, address in changed:
                bound[piece] = address

    def _copy(self, sources: Sequence[torch.Tensor]) -> None:
        targets = [self._copy_of(k) for k in self._copied]
        given = [sources[k] for k in self._copied]
        foreach_copy(
            [once(t, t) for t in targets],
            [once(s, t) for s, t in zip(given, targets, strict=True)],
            True,
        )

    def _give_up(self, error: DriverError, args: Sequence[Any]) -> None:
        """The driver refuses new addresses: from now on another capture serves, with copies. Should
        that fail, it is unknown which kernels have the new ones."""
        self._forget()
        self._close()
        note(Fallback.REPLAY_COPIES, f"{self._name} copies arguments and results", error)
        self.outputs.drop()
        self._instead = self._again(args)
        self._instead.feed(args)

    def _forget(self) -> None:
        """It is unknown which addresses are in the graph, but for those that stay."""
        self._seen = []
        self._failures.clear()
        for piece in {*range(len(self._made.sizes))} - self._unused.keys():
            self._bound[piece] = 0

    # ---- the same as one native call ----

    def enterable(self) -> Enterable | None:
        graph = self._made.run.table()
        enters = self._instead is None and self._faults is not None and reads_natively()
        if graph is None or not enters:
            return None
        count, fixed = len(self._moving), self._kinds.mutated
        pieces = [CallArgument(size, FREE) for size in self._made.sizes]
        for k, size in enumerate(self._made.sizes[:count]):
            copy = _address(self._copy_of(k)) if k in self._always else 0
            pieces[k] = CallArgument(size, FREE if copy else LOOKED_AT, copy)
        pieces += [CallArgument(0, FIXED) for _ in fixed]
        faults = [(_address(t), t.numel()) for t in self._faults or ()]
        replay = NativeReplay(graph, pieces, self._bound, self._updated, faults, self._made.run)
        results, makers = list(self._made.groups.values()), self.outputs.makers(self)
        arguments = (self._moving, fixed, self._kinds.parameters)
        again, failures = self._order.again, self._failures
        return Enterable(replay, *arguments, results, self.outputs, makers, again, failures)

    def enter_by(self, entry: ReplayEntry) -> None:
        self._close()  # another one: there is none for each thread
        self._entries = [entry]

    def used(self) -> bool:
        return any([entry.used() for entry in self._entries])

    def _close(self) -> None:
        for entry in self._entries:
            entry.close()
        self._entries = []

    def replay(self) -> None:
        if self._instead is not None:
            return self._instead.replay()
        if not self.outputs.made:  # handed out after the last replay
            self._bind_results()
        self._order.on_device(self._made.run.launch, self._stream)

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        if self._instead is not None:
            return self._instead.results(args, hold)
        return super().results(args, hold)

    def storage(self, group: int) -> torch.UntypedStorage:
        if self._storages is not None:
            return self._storages[group]
        return self._memory.result_at(*self._places[group])

    def reset(self) -> None:
        if self._instead is not None:
            self._instead.reset()
        self._close()
        super().reset()
