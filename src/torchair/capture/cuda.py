"""Capture on CUDA and, with the same code, on an NPU: kernels are recorded into a device graph, and
a replay is one launch. Nothing here waits for the device once a graph is captured.

Memory. A recording takes all its memory from a pool, which an empty device graph keeps alive. When
keys share memory nothing of a finished recording stays allocated there, so the next one starts from
the same empty pool and takes the same blocks. Its results are storage objects over raw addresses.
Each holds on to the pool: a result that the user keeps is overwritten by the next replay of another
key, but its memory is never used for anything else. When keys do not share, results stay allocated.

Private copies of inputs are in the same pool, stay allocated and are shared by all its keys. So a
result of one call can be an input of the next, whatever the key: copying one input never overwrites
another.

On an NPU this has not been run yet.
"""

from __future__ import annotations

import gc
import importlib
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from torchair.capture import base, exchange
from torchair.capture.rehearsal import EngineWalk, GraphWalk, Rehearsal
from torchair.capture.updates import DeviceLists, Updates
from torchair.codegen.cuda.driver import DriverError, enter_context, has_context
from torchair.engine.plan.records import extent, picker
from torchair.engine.run.native import same_as
from torchair.errors import CaptureError, InputError
from torchair.fallbacks import Fallback, note
from torchair.flags import poisoning
from torchair.garbage import no_garbage_collection
from torchair.locks import RLock
from torchair.torch_private import cuda
from torchair.torch_private.functions import foreach_copy

if TYPE_CHECKING:
    from torchair.devices.base import GraphCall

Handle = tuple[int, int]
Feed = Callable[[Sequence[Any]], None]

_captures = RLock()
"""One capture at a time in a process: device runtimes allow no more."""


@dataclass(frozen=True)
class Accelerator:
    """Where a kind of device keeps graphs, pools and streams in torch."""

    kind: str
    module: Any  # torch.cuda or torch.npu
    new_graph: Callable[[], Any]
    bindings: Any  # the module of C functions
    new_open_graph: Callable[[], Any] | None = None  # whose nodes can be looked at
    shows_executable: bool = False  # of such a graph

    @classmethod
    def of(cls, kind: str) -> Accelerator:
        """The accelerator of devices of a kind."""
        if kind == "cuda":
            graph = torch.cuda.CUDAGraph
            opened = partial(graph, keep_graph=True) if hasattr(graph, "raw_cuda_graph") else None
            shows = hasattr(graph, "raw_cuda_graph_exec")
            return cls(kind, torch.cuda, graph, cuda.bindings, opened, shows)
        if kind == "npu":
            module = torch.get_device_module(kind)
            return cls(kind, module, module.NPUGraph, importlib.import_module("torch_npu")._C)
        raise NotImplementedError(f"graphs cannot be captured on devices of kind {kind!r}")

    def function(self, name: str) -> Callable[..., Any]:
        """A C function of this kind of device; one that does nothing where it has none."""
        return cuda.device_function(self.bindings, self.kind, name)

    def storage_at(self, address: int, device: torch.device, size: int) -> torch.UntypedStorage:
        """A storage object over memory that it does not own."""
        made: torch.UntypedStorage = cuda.make_storage(self.bindings)(address, device, size)
        return made

    def unchanged_generators(self, device: torch.device) -> AbstractContextManager[None]:
        """Random numbers drawn inside do not count."""
        return torch.random.fork_rng([device.index], device_type=self.kind)


@cache
def capture_stream(module: Any, device: torch.device) -> Any:
    """The stream of all captures on a device: allocators give the memory of a stream to that stream
    alone, so graphs captured on different ones could not share a pool."""
    with module.device(device):
        return module.Stream()


class PoolOwner:
    """A pool, as long as its memory is used."""

    def __init__(
        self, accelerator: Accelerator, device: torch.device, stream: Any, handle: Handle | None
    ) -> None:
        self.handle: Handle = handle or accelerator.module.graph_pool_handle()
        self.device = device
        self._accelerator = accelerator
        self._stream = stream
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._keeper = accelerator.new_graph()
        self._broken: list[Any] = []
        accelerator.module.synchronize()
        accelerator.module.empty_cache()  # forgets what a pool of that handle was before
        with warnings.catch_warnings(action="ignore"):  # that the graph is empty
            self.record(self._keeper, "thread_local", lambda: None)

    def record(self, graph: Any, error_mode: str, body: Callable[[], Any]) -> Any:
        """Capture what `body` does into a graph whose memory is here, and return its result. A
        failure leaves stream, allocator and generators as they were."""
        clear_workspaces = self._accelerator.function("clearCublasWorkspaces")
        with self._accelerator.module.stream(self._stream), no_garbage_collection():
            clear_workspaces()  # so that recorded products have theirs in the pool
            try:
                graph.capture_begin(pool=self.handle, capture_error_mode=error_mode)
                result = body()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
            finally:
                clear_workspaces()
            return result

    def _abandon(self, graph: Any) -> None:
        """End a capture that failed.

        The runtime may have ended it already, and then torch leaves its allocator and its
        generators as if it went on: the first is told, the second learn it from an empty capture.
        """
        try:
            with self._accelerator.module.stream(self._stream):  # it may have failed on another
                graph.capture_end()
            graph.reset()
        except RuntimeError:
            self._broken.append(graph)  # torch may still refer to it
            with suppress(RuntimeError):
                self._accelerator.function("endAllocateToPool")(self.device.index, self.handle)
                self._accelerator.function("releasePool")(self.device.index, self.handle)
            with suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                self._repair_generators()

    def _repair_generators(self) -> None:
        """Capture nothing, in a pool of its own: that of the failed capture is in no good state."""
        module, graph = self._accelerator.module, self._accelerator.new_graph()
        with module.stream(self._stream):
            graph.capture_begin(pool=module.graph_pool_handle(), capture_error_mode="thread_local")
            graph.capture_end()

    def input_like(self, position: int, example: torch.Tensor) -> torch.Tensor:
        """Memory for private copies of an argument, in the layout of the example."""
        size = extent(example.shape, example.stride()) * example.element_size()
        known = self._inputs.get(position)
        if known is None or known.nbytes() < size:
            grown = size if known is None else max(size, 2 * known.nbytes())
            known = torch.UntypedStorage(grown, device=self.device)
            self._inputs[position] = known
        with torch.inference_mode(False):
            return base.over(known, example.dtype, example.shape, example.stride())

    def result_at(self, address: int, size: int) -> torch.UntypedStorage:
        """A storage object over some of the pool, which it keeps alive."""
        made = self._accelerator.storage_at(address, self.device, size)
        made._memory = self  # type: ignore[attr-defined]
        return made


class DeviceSubstrate(base.Substrate):
    """Captures of one FX graph on one device.

    Before the first capture by a thread the graph runs once on the side stream, see `rehearsal.py`:
    libraries that it uses are then initialised, which they cannot do during a capture.
    """

    def __init__(
        self,
        device: torch.device,
        pool: Handle | None,
        updates: Updates,
        graph: GraphCall | None = None,
    ) -> None:
        """With `graph` the engine's program of it is recorded, not the FX graph."""
        self._accelerator = Accelerator.of(device.type)
        self._module = self._accelerator.module
        index = self._module.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = capture_stream(self._module, self._device)
        self._handle = pool
        self._lists = DeviceLists(updates, self._device) if updates.rules else None
        self.pool: PoolOwner | None = None
        self._walk: GraphWalk | EngineWalk | None = None if graph is None else EngineWalk(graph)
        self._rehearsed = threading.local()  # each thread has handles of libraries of its own
        self._drew = False  # whether a rehearsal left torch's generator in another state
        self._order = StreamOrder(self._accelerator, self._device)

    def capture(self, request: base.ToCapture) -> base.Recording:
        self._check(request)
        walk = self._walk = self._walk or GraphWalk(request.forward)
        generators = self._accelerator.unchanged_generators(self._device)
        quiet = no_garbage_collection()
        with _captures, quiet, self._module.device(self._device), torch.no_grad(), generators:
            try:
                walk.prepare(request.args)
                if not hasattr(self._rehearsed, "by"):
                    self._rehearse(walk, request)
                    self._rehearsed.by = request.name
                self._module.synchronize()
                self._module.empty_cache()  # during a capture it cannot make room
                return self._record(walk, request)
            except InputError:
                raise  # the call is at fault, not the graph
            except Exception as e:
                raise walk.error(request.name, e) from e

    def _check(self, request: base.ToCapture) -> None:
        """Errors that no node is to blame for."""
        if self.busy():
            raise CaptureError(
                f"{request.name} cannot be captured: its caller is being captured",
                hint="call the compiled function once before",
            )
        devices = {a.device for a in request.args if isinstance(a, torch.Tensor)}
        others = {d for d in devices if d.type != "cpu"} - {self._device}
        if others:
            raise CaptureError(
                f"{request.name} cannot be captured: it is on {self._device}, and some of its "
                f"arguments are on {', '.join(sorted(map(str, others)))}"
            )

    def _rehearse(self, walk: GraphWalk | EngineWalk, request: base.ToCapture) -> None:
        stream, caller = self._stream, self._module.current_stream()
        args = request.args
        rehearsal = Rehearsal(args)
        if isinstance(walk, EngineWalk):  # generated kernels update arguments unseen
            rehearsal.keep([args[i] for i in walk.updated])
        stream.wait_stream(caller)
        state = self._module.get_rng_state(self._device)
        try:
            with self._module.stream(stream):
                try:
                    with rehearsal:
                        walk(args)
                finally:
                    rehearsal.restore()
        finally:
            caller.wait_stream(stream)
        self._drew |= not torch.equal(state, self._module.get_rng_state(self._device))

    def _record(self, walk: GraphWalk | EngineWalk, request: base.ToCapture) -> base.Recording:
        if isinstance(walk, EngineWalk) and self._can_exchange(walk, request.options):
            try:
                return self._record_exchanging(walk, request)
            except (DriverError, AttributeError) as e:  # of a driver without these functions
                note(Fallback.REPLAY_COPIES, f"{request.name} copies arguments and results", e)
        return self._record_once(walk, request)

    def _record_exchanging(self, walk: EngineWalk, request: base.ToCapture) -> base.Recording:
        """A recording of moving arguments. Those that no kernel shows an address of are copied: one
        may find it in memory, or reads nothing, as attention without dropout of a random state."""
        moving = self._moving(request)
        try:
            return self._record_twice(walk, request, moving)
        except exchange.UnseenPieces as e:
            if max(e.pieces) >= len(moving):
                raise  # a result
            unseen = {moving[k] for k in e.pieces}
        return self._record_twice(walk, request, [i for i in moving if i not in unseen])

    def _can_exchange(self, walk: EngineWalk, options: base.CaptureOptions) -> bool:
        """Whether addresses may be exchanged in a graph: results must be new in each call, as the
        graph would read arguments that are earlier results while it overwrites them."""
        known = self._accelerator
        if known.new_open_graph is None or (self._draws(walk) and not known.shows_executable):
            return False
        wanted = options.clone_input and not options.share_results and not poisoning()
        return wanted and self._lists is None

    def _draws(self, walk: EngineWalk) -> bool:
        """Whether a graph takes numbers from torch's generator, which torch's own replay alone
        advances. What operators of other libraries do a rehearsal tells."""
        return self._drew or walk.draws

    def _record_twice(
        self, walk: EngineWalk, request: base.ToCapture, moving: Sequence[int]
    ) -> base.Recording:
        """A recording that reads the arguments `moving` and writes results where the caller has
        them. Of other arguments it reads copies."""
        memory = self._memory_for(request.options)
        copied = [i for i in self._moving(request) if i not in moving]
        copies = {i: memory.input_like(i, request.args[i]) for i in copied}
        slots = list(walk.fresh)
        sizes = [*(exchange.span(request.args[i]) for i in moving), *walk.fresh.values()]
        placeholders = exchange.Placeholders(self._accelerator, self._device, sizes)
        first = len(moving)

        def record(place: int) -> tuple[Any, ResultForms]:
            given = [copies.get(i, a) for i, a in enumerate(request.args)]
            for k, i in enumerate(moving):
                like, storage = request.args[i], placeholders.storage(k, place)
                with torch.inference_mode(False):
                    given[i] = base.over(storage, like.dtype, like.shape, like.stride())

            def memory_of(slot: int, size: int) -> torch.Tensor | None:
                if slot not in walk.fresh:
                    return None
                storage = placeholders.storage(first + slots.index(slot), place)
                with torch.inference_mode(False):
                    return base.over(storage, torch.uint8, (storage.nbytes(),), (1,))

            graph = self._accelerator.new_open_graph()  # type: ignore[misc]
            results = memory.record(
                graph, request.options.error_mode, lambda: _resolved(walk(given, memory_of))
            )
            return graph, ResultForms(given, walk.constants(), results)

        made = exchange.recorded(record, placeholders, first, self._draws(walk))
        bare = replace(request, args=())  # without what belongs to the caller

        def again(args: Sequence[Any]) -> base.Recording:
            with _captures, no_garbage_collection(), torch.no_grad():
                return self._record_once(walk, replace(bare, args=args))

        before = walk.checks()
        if copied:
            feed = Inputs(copied, list(copies.values()), request).feed
            before.append(torch.no_grad()(feed))
        faults = None if copied else walk.faults()
        return exchange.ExchangedRecording(
            made, memory, self._order, request, moving, before, again, faults
        )

    def _moving(self, request: base.ToCapture) -> list[int]:
        """Arguments on the device that may be elsewhere in each call."""
        return [i for i in request.kinds.users if request.args[i].device == self._device]

    def _record_once(self, walk: GraphWalk | EngineWalk, request: base.ToCapture) -> base.Recording:
        """A recording that reads copies of arguments, and whose results are copied."""
        memory = self._memory_for(request.options)
        graph = self._accelerator.new_graph()
        given = list(request.args)
        moving = self._moving(request)

        def body() -> list[Any]:
            if request.options.clone_input:
                for i in moving:
                    given[i] = memory.input_like(i, given[i])
            with self._lists.forms() if self._lists is not None else nullcontext():
                return _resolved(walk(given))

        results = memory.record(graph, request.options.error_mode, body)
        found = ResultForms(given, walk.constants(), results)
        inputs = Inputs(moving, [given[i] for i in moving], request)
        feeds = [inputs.feed] if self._lists is None else [inputs.feed, self._lists.fill]
        if isinstance(walk, EngineWalk):
            feeds += walk.checks()
        return DeviceRecording(graph, memory, self._order, feeds, found, request)

    def _memory_for(self, options: base.CaptureOptions) -> PoolOwner:
        """The pool of the FX graph, or one for this capture alone where keys do not share."""
        alone = not options.reuse and self._handle is None
        if self.pool is None or alone:
            self.pool = PoolOwner(self._accelerator, self._device, self._stream, self._handle)
        return self.pool

    def busy(self) -> bool:
        return bool(self._module.is_current_stream_capturing())

    def limits(self) -> Any:
        read = getattr(self._module, "get_stream_limit", None)
        return None if read is None else read(self._module.current_stream(self._device))

    def finish(self) -> None:
        self._module.synchronize(self._device)

    def trim(self) -> None:
        self.pool = None  # results that are still held keep theirs
        gc.collect()
        self._module.empty_cache()


def _resolved(results: Sequence[Any]) -> list[Any]:
    """Results whose data are what they look like."""
    return [r.resolve_conj().resolve_neg() if torch.is_tensor(r) else r for r in results]


class StreamOrder:
    """Lets replays follow each other when callers change the stream: they share memory."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._module = accelerator.module
        self._current = accelerator.function("getCurrentRawStream")
        self._index_of_current = accelerator.function("getDevice")
        self._device = device
        self._last: int | None = None
        self._stream: Any = None
        self._by_driver = accelerator.kind == "cuda"
        self._is_recorded = accelerator.function("isCurrentStreamCapturing")

    def enter(self) -> int:
        """Work of the current stream now comes after all replays before. Gives that stream as the
        driver knows it, of which this thread may use functions from now on."""
        if self._by_driver:
            enter_context()
        current: int = self._current(self._device.index)
        if current != self._last:
            self._switch(current)
        return current

    def again(self) -> int | None:
        """That stream where nothing is to be prepared: replays came to it before, this thread may
        use functions of the driver, its device is the current one, and nobody records."""
        if not has_context() or self._index_of_current() != self._device.index:
            return None
        current: int = self._current(self._device.index)
        return None if current != self._last or self._is_recorded() else current

    def on_device(self, launch: Callable[[int], None], stream: int) -> None:
        """Launch on a stream of this device: the default streams of all have one number."""
        if self._index_of_current() == self._device.index:
            return launch(stream)
        with self._module.device(self._device):
            launch(stream)

    def _switch(self, current: int) -> None:
        if self._module.is_current_stream_capturing():
            return  # nothing runs now, and the next replay comes after the last one that ran
        stream = self._module.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._last, self._stream = current, stream


class ResultForms:
    """What is known of the results of a capture, while they are alive."""

    def __init__(
        self, given: Sequence[Any], constants: list[torch.Tensor], results: Sequence[Any]
    ) -> None:
        """`given` is what the graph ran on."""
        self.given, self.constants = given, constants
        self.sources: list[base.ResultSource] = []
        self.storages: list[torch.UntypedStorage] = []
        self.places: list[tuple[int, int]] = []  # address and size by group
        self._positions: dict[int, int] = {}
        for i, value in enumerate(given):
            if isinstance(value, torch.Tensor):
                self._positions.setdefault(value.untyped_storage().data_ptr(), i)
        self._groups: dict[int, int] = {}
        self._twins: dict[int, int] = {}
        self._constants = {t.untyped_storage().data_ptr() for t in constants}
        for result in results:
            self.sources.append(self._source(result))

    def _source(self, result: Any) -> base.ResultSource:
        if not isinstance(result, torch.Tensor):
            return base.FixedResult(result)
        address = result.untyped_storage().data_ptr()
        if address in self._positions and result.numel():
            position = self._positions[address]
            whole = self.given[position]
            same = _layout(result) == _layout(whole)
            view = base.view_of(position, whole, result)
            return base.OfArgument(itemgetter(position) if same else view)
        if result.device.type == "cpu":
            return base.OfArgument(lambda args: result.clone())
        if not result.numel():
            return base.FixedResult(result.new_empty_strided(result.shape, result.stride()))
        if address in self._constants:
            return base.FixedResult(result)
        return self._pooled(result, address)

    def _pooled(self, result: torch.Tensor, address: int) -> base.Pooled:
        group = self._groups.setdefault(address, len(self.places))
        if group == len(self.places):
            storage = result.untyped_storage()
            self.storages.append(storage)
            self.places.append((address, storage.nbytes()))
        return base.pooled(result, group, self._twins.setdefault(id(result), len(self.sources)))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class Inputs:
    """Brings arguments to where a graph reads them."""

    def __init__(
        self, positions: list[int], targets: list[torch.Tensor], request: base.ToCapture
    ) -> None:
        examples = [request.args[i] for i in positions]
        self._positions, self._targets = positions, targets
        self._pick = picker(positions)
        self._check = same_as(examples).check if examples else None
        self._whole = all(torch.ops.aten.is_non_overlapping_and_dense(t) for t in targets)
        self._flat = [_flattened(t) for t in targets]
        self._addresses = [] if request.options.clone_input else [t.data_ptr() for t in targets]
        self.feed = self._chosen(request.options.clone_input)

    def _chosen(self, private: bool) -> Callable[[Sequence[Any]], None]:
        if not self._positions:
            return lambda args: None
        if not private:
            return self._where_moved
        if not self._whole:
            return self._spans
        return self._one if len(self._positions) == 1 else self._all

    def _one(self, args: Sequence[Any]) -> None:
        source = args[self._positions[0]]
        if not self._check(source):  # type: ignore[misc]
            self._checked(args)
        self._targets[0].copy_(source, non_blocking=True)

    def _all(self, args: Sequence[Any]) -> None:
        sources = self._pick(args)
        if not self._check(*sources):  # type: ignore[misc]
            self._checked(args)
        foreach_copy(self._targets, sources, True)

    def _spans(self, args: Sequence[Any]) -> None:
        """Some arguments have gaps or repeat elements: all that they span is copied."""
        sources = self._pick(args)
        if self._check(*sources):  # type: ignore[misc]
            foreach_copy(self._flat, [_flattened(s) for s in sources], True)
            return
        self._checked(args)
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def _where_moved(self, args: Sequence[Any]) -> None:
        """Without private copies the tensors of the first call are what the graph reads."""
        for position, address, target in zip(
            self._positions, self._addresses, self._targets, strict=True
        ):
            source = args[position]
            if source.data_ptr() != address:
                target.copy_(source, non_blocking=True)

    def _checked(self, args: Sequence[Any]) -> None:
        """Other strides or other bits of autograd do no harm, another type or size does."""
        for position, target in zip(self._positions, self._targets, strict=True):
            given = args[position]
            kind = (given.dtype, given.shape, given.device)
            if kind != (target.dtype, target.shape, target.device):
                raise base.misfit(position, given, target, "device")


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,))


class DeviceRecording(base.PooledRecording):
    """A device graph, what it reads and where its results are."""

    def __init__(
        self,
        graph: Any,
        memory: PoolOwner,
        order: StreamOrder,
        feeds: list[Feed],
        results: ResultForms,
        request: base.ToCapture,
    ) -> None:
        super().__init__(request.options.share_results)
        self._graph = graph
        self._memory = memory
        self._storages = None if request.options.reuse else results.storages
        frozen = request.kinds.parameters if request.options.frozen_parameter else ()
        self._read = [*results.constants, *(request.args[i] for i in frozen)]  # come what may
        self._places = results.places
        self._enter, self._feeds, self._launch = order.enter, feeds, graph.replay
        self.sources = results.sources

    def feed(self, args: Sequence[Any]) -> None:
        self._enter()
        if torch.is_grad_enabled():  # copies are not part of a backward graph
            with torch.no_grad():
                return self._bring(args)
        self._bring(args)

    def _bring(self, args: Sequence[Any]) -> None:
        for feed in self._feeds:
            feed(args)

    def replay(self) -> None:
        self._launch()

    def storage(self, group: int) -> torch.UntypedStorage:
        if self._storages is not None:
            return self._storages[group]
        return self._memory.result_at(*self._places[group])

    def reset(self) -> None:
        self._graph.reset()
        super().reset()
