"""What a capture is made from and what it leaves: the one interface of all devices.

A `Substrate` captures a graph for one graph key into a `Recording`: a device graph bound to the
memory of a pool. Keys, limits and recapture are not its business; see `graph.py`.

By default a result belongs to the caller: it is copied out of the pool, so the next replay
changes nothing that is still held. With `share_results` it stays there. While an FX graph has one
captured graph then, or its keys do not share memory, the very same tensors are returned by every
call. With several keys over shared memory only the user holds results: those still alive are
returned again, others are made anew over the same memory.
"""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchair.configs.compiler_config import CaptureOptions
from torchair.engine.plan.records import extent
from torchair.engine.run.frozen import FrozenTensors
from torchair.errors import InputError
from torchair.torch_private.functions import foreach_copy, neg_view
from torchair.torch_private.tensors import empty_strided_cuda

if TYPE_CHECKING:
    from torchair.capture.entered import Enterable, ReplayEntry

Forward = Callable[..., Sequence[Any]]
"""The graph as a function of its arguments; it may update arguments and what it computed."""


@dataclass(frozen=True)
class ArgumentKinds:
    """Positions of the arguments of a graph by kind."""

    parameters: tuple[int, ...] = ()  # tensors that stay where they are: parameters and buffers
    users: tuple[int, ...] = ()  # tensors that are only read
    mutated: tuple[int, ...] = ()  # tensors that the graph updates


@dataclass(frozen=True)
class FixedResult:
    """A result that is not in the pool: None, a number, or a tensor that the graph holds."""

    value: Any


@dataclass(frozen=True)
class OfArgument:
    """A result that is a view of an argument of the call, or the argument itself."""

    make: Callable[[Sequence[Any]], torch.Tensor]


@dataclass(frozen=True)
class Pooled:
    """A tensor in the pool. Results with the same `group` share one storage object; equal ones are
    one tensor, so give `twin` a number of its own where they must be different objects."""

    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0  # in the storage, in elements
    twin: int = 0


ResultSource = FixedResult | OfArgument | Pooled


def pooled(tensor: torch.Tensor, group: int, twin: int) -> Pooled:
    """A tensor of a group, as a result."""
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return Pooled(group, tensor.dtype, shape, strides, offset, twin)


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Any, strides: Any, offset: int = 0
) -> torch.Tensor:
    """A tensor over the memory of a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def view_of(
    position: int, base: torch.Tensor, view: torch.Tensor
) -> Callable[[Sequence[Any]], torch.Tensor]:
    """A function that makes the view of an argument of a call that `view` is of `base`, which is
    the argument at that position."""
    shape, strides, dtype = tuple(view.shape), view.stride(), view.dtype
    size, base_size = view.element_size(), base.element_size()
    start = view.storage_offset() * size - base.storage_offset() * base_size
    same_type, conjugate = dtype is base.dtype, view.is_conj() != base.is_conj()
    negative = view.is_neg() != base.is_neg()

    def make(args: Sequence[Any]) -> torch.Tensor:
        tensor = args[position]
        offset = (tensor.storage_offset() * base_size + start) // size
        if same_type:
            made = tensor.as_strided(shape, strides, offset)
        else:
            made = over(tensor.untyped_storage(), dtype, shape, strides, offset)
        made = made.conj() if conjugate else made
        return neg_view(made) if negative else made

    return make


def misfit(
    index: int,
    got: torch.Tensor,
    expected: torch.Tensor,
    also: Literal["", "strides", "device"] = "",
    device: torch.device | None = None,
) -> InputError:
    """What is to be raised for an input that cannot stand for the one that was captured; `also`
    names what matters beside type and dims. What was expected may be a tensor without memory: then
    `device` is where it has to be."""

    def said(t: torch.Tensor, place: torch.device) -> str:
        more = {"strides": f" with strides {t.stride()}", "device": f" on {place}", "": ""}
        return f"{t.dtype} {list(t.shape)}{more[also]}"

    text = "an input does not fit the captured graph"
    wanted = said(expected, device or expected.device)
    return InputError(text, index=index, expected=wanted, got=said(got, got.device))


def brought(index: int, given: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Without private copies the tensor of the first call is what a graph reads: that one, with
    what is in the tensor of this call."""
    if given.dtype is not first.dtype or given.shape != first.shape:
        raise misfit(index, given, first)
    if given.data_ptr() != first.data_ptr():
        with torch.no_grad():
            first.copy_(given)
    return first


class Recording(abc.ABC):
    """A captured graph for one key. A call is `feed`, `replay`, `write_back`, `results`."""

    # arguments of which it has copies, another object after each change
    frozen_tensors: FrozenTensors | None = None
    by_operators = False  # whether a call is calls of torch operators

    @abc.abstractmethod
    def feed(self, args: Sequence[Any]) -> None:
        """Bring the arguments of a call to where the graph reads them."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Run the graph."""

    @abc.abstractmethod
    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """Results of the replay. `hold` matters where results are shared: the tensors themselves
        are kept for the next calls."""

    def release(self) -> None:  # noqa: B027  (most hold none)
        """Hold results no longer: from now on only the user does."""

    def call(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """One call of the graph."""
        self.feed(args)
        self.replay()
        self.write_back(args)
        return self.results(args, hold)

    def profiled(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """One call, in a way that a profiler sees its kernels."""
        return self.call(args, hold)

    def enterable(self) -> Enterable | None:
        """What native calls of the graph need; None where there are none."""
        return None

    def enter_by(self, entry: ReplayEntry) -> None:  # noqa: B027
        """Such calls come by this entry from now on, which ends with the graph."""

    def used(self) -> bool:
        """Whether such calls were served since this was asked."""
        return False

    def write_back(self, args: Sequence[Any]) -> None:  # noqa: B027  (most have nothing to do)
        """Bring updated arguments back to the caller's, where the graph has copies of its own."""

    def renew(self, args: Sequence[Any]) -> bool:
        """Bring such copies up to date; False where the graph must be captured anew."""
        return True

    def reset(self) -> None:
        """Give the memory back."""
        self.__dict__.clear()


@dataclass
class ToCapture:
    """What is to be captured."""

    name: str  # of the FX graph
    forward: Forward
    args: Sequence[Any]  # of the call that asks for it
    kinds: ArgumentKinds
    options: CaptureOptions


class Substrate(abc.ABC):
    """A way to capture on one kind of device, for one FX graph."""

    @abc.abstractmethod
    def capture(self, request: ToCapture) -> Recording:
        """Capture; nothing that the user can see is computed yet. CaptureError where it cannot."""

    def busy(self) -> bool:
        """Whether the caller is being captured himself: nothing can be captured meanwhile."""
        return False

    def limits(self) -> Any:
        """Limits of the current stream that a captured graph depends on."""
        return None

    def finish(self) -> None:  # noqa: B027  (a device that runs at once has nothing to wait for)
        """Wait for all work, before captured graphs are thrown away."""

    def trim(self) -> None:  # noqa: B027
        """Give unused memory back to the system."""


# ---- the lives of results in the memory of a pool ----


_ALIGNED = 16  # bytes; a multiple of the size of any element


class PooledRecording(Recording):
    """A recording whose replays leave results in the memory of a pool."""

    sources: list[ResultSource]  # one for each result of the graph, known after the first replay
    outputs: SharedResults | Copied

    def __init__(self, share_results: bool) -> None:
        self.outputs = SharedResults() if share_results else Copied()

    @abc.abstractmethod
    def storage(self, group: int) -> torch.UntypedStorage:
        """A storage object over the pool memory of a group of results; it keeps that alive."""

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        return self.outputs.take(self, args, hold)

    def release(self) -> None:
        self.outputs.release()


class Copied:
    """Results in memory of their own. Those that share memory in the graph share it here too."""

    def __init__(self, written: Collection[int] = ()) -> None:
        """Groups that are `written` by the graph itself to what `make` gives first, in the order of
        these: they are not copied."""
        self._written = list(written)
        self.reads_arguments = False  # for results that are views of them; known with `makers`
        self._make: list[Callable[[], torch.Tensor]] | None = None
        self._made: list[torch.Tensor] | None = None

    @property
    def made(self) -> bool:
        """Whether there is memory for the results of the next replay."""
        return self._made is not None

    def make(self, recording: PooledRecording) -> list[torch.Tensor]:
        """Memory for the results of a call, before it is replayed."""
        self._made = [make() for make in self.makers(recording)]
        return self._made

    def drop(self) -> None:
        """The next replay does not come."""
        self._made = None

    def take(self, recording: PooledRecording, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """Results of the call that has just run."""
        made = self._made if self._made is not None else self.make(recording)
        self._made = None
        return self.finish(made, args)

    def makers(self, recording: PooledRecording) -> list[Callable[[], torch.Tensor]]:
        """Functions that allocate what `finish` takes."""
        if self._make is None:
            self._prepare(recording)
        assert self._make is not None
        return self._make

    def finish(self, made: list[torch.Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        """Results of the call that has just run, in memory that was made for it."""
        if len(self._from) == 1:
            made[-1].copy_(self._from[0], non_blocking=True)
        elif self._from:
            foreach_copy(made[len(made) - len(self._from) :], self._from, True)
        if self._plain:
            return tuple(made)
        tensors = [read(made) for read in self._tensors]
        return tuple([read(tensors, args) for read in self._readers])

    def _prepare(self, recording: PooledRecording) -> None:
        """What is copied at each call, and how results are made of the copies."""
        pooled = list(dict.fromkeys(s for s in recording.sources if isinstance(s, Pooled)))
        groups: dict[int, list[Pooled]] = {group: [] for group in self._written}
        for source in pooled:
            groups.setdefault(source.group, []).append(source)
        self._from: list[torch.Tensor] = []
        self._make = []
        parts: dict[Pooled, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {}
        whole: list[ResultSource] = []
        for number, (group, members) in enumerate(groups.items()):
            storage, copied = recording.storage(group), group not in self._written
            only = members[0]
            like = torch.empty_strided(only.shape, only.strides, device="meta")
            alone = len(members) == 1 and torch.ops.aten.is_non_overlapping_and_dense(like)
            if alone and (copied or _fills(only, storage)):
                parts[only], begin, made = itemgetter(number), only.offset, only
                whole.append(only)
            else:
                begin, end = _span(members) if copied else (0, storage.nbytes())
                made = Pooled(group, torch.uint8, (end - begin,), (1,))
                parts |= {member: _part(number, member, begin) for member in members}
            self._make.append(_empty_like(made, storage.device))
            if copied:
                self._from.append(_tensor(storage, made, begin))
        self.reads_arguments = any(isinstance(s, OfArgument) for s in recording.sources)
        self._plain = list(recording.sources) == whole  # each result is what was made, in order
        self._tensors = [parts[source] for source in pooled]
        self._readers = [_reader(s, pooled) for s in recording.sources]

    def release(self) -> None:
        """Nothing is held."""


def _fills(source: Pooled, storage: torch.UntypedStorage) -> bool:
    """Whether a result is all of its storage."""
    return not source.offset and math.prod(source.shape) * source.dtype.itemsize == storage.nbytes()


def _reader(source: ResultSource, pooled: list[Pooled]) -> Callable[[Any, Any], Any]:
    """A function from the tensors made of copies and the arguments of a call to a result."""
    if isinstance(source, FixedResult):
        value = source.value
        return lambda tensors, args: value
    if isinstance(source, OfArgument):
        make = source.make
        return lambda tensors, args: make(args)
    number = pooled.index(source)
    return lambda tensors, args: tensors[number]


def _span(members: Sequence[Pooled]) -> tuple[int, int]:
    """First byte of what some results show of their storage, and the one after the last."""
    begins, ends = [], []
    for m in members:
        begins.append(m.offset * m.dtype.itemsize)
        ends.append((m.offset + extent(m.shape, m.strides)) * m.dtype.itemsize)
    return min(begins) // _ALIGNED * _ALIGNED, max(ends)


def _part(number: int, source: Pooled, begin: int) -> Callable[[Any], torch.Tensor]:
    offset = source.offset - begin // source.dtype.itemsize
    like = source.dtype, source.shape, source.strides, offset
    return lambda copies: over(copies[number].untyped_storage(), *like)


def _empty_like(source: Pooled, device: torch.device) -> Callable[[], torch.Tensor]:
    shape, strides, dtype = source.shape, source.strides, source.dtype
    fast_empty: Any = empty_strided_cuda
    if fast_empty is not None and device.type == "cuda" and torch.cuda.device_count() == 1:
        return partial(fast_empty, shape, strides, dtype)  # it knows the current device only
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _tensor(storage: torch.UntypedStorage, source: Pooled, offset: int) -> torch.Tensor:
    """A tensor that outlives the mode of the call."""
    with torch.inference_mode(False):
        return over(storage, source.dtype, source.shape, source.strides, offset)


class SharedResults:
    """Results in the memory of the pool, as the option `share_results` asks for them."""

    def __init__(self) -> None:
        self._results: tuple[Any, ...] | None = None
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}
        self._plain: bool | None = None
        self.rebuilt = 0  # times that tensors had to be made

    def take(self, recording: PooledRecording, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        """Results of the call that has just run; `hold` keeps the tensors for the next calls."""
        results = self._results
        if results is None:
            results = self._collect(recording)
            if hold:
                self._results = results
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
        sources: list[Any] = recording.sources
        known: dict[Pooled, torch.Tensor] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for k, ref in self._alive.items():
            if (tensor := ref()) is not None:
                known[sources[k]] = tensor
                storages[sources[k].group] = tensor.untyped_storage()
        alive = len(known)
        for k, source in enumerate(sources):
            if isinstance(source, Pooled) and source not in known:
                if source.group not in storages:
                    storages[source.group] = recording.storage(source.group)
                known[source] = _tensor(storages[source.group], source, source.offset)
                self._alive[k] = weakref.ref(known[source])
        self.rebuilt += len(known) > alive
        return tuple(s.value if isinstance(s, FixedResult) else known.get(s) for s in sources)

    def release(self) -> None:
        """Hold results no longer: from now on only the user does."""
        self._results = None
