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
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchair.capture import base, exchange
from torchair.capture.accelerator import (
    Accelerator,
    Handle,
    PoolOwner,
    StreamOrder,
    capture_stream,
)
from torchair.capture.device_recording import DeviceRecording, Inputs, ResultForms
from torchair.capture.rehearsal import EngineWalk, GraphWalk, Rehearsal
from torchair.capture.updates import DeviceLists, Updates
from torchair.codegen.cuda.driver import DriverError
from torchair.errors import CaptureError, InputError
from torchair.fallbacks import Fallback, note
from torchair.flags import poisoning
from torchair.garbage import no_garbage_collection
from torchair.locks import RLock

if TYPE_CHECKING:
    from torchair.devices.base import GraphCall

_captures = RLock()
"""One capture at a time in a process: device runtimes allow no more."""


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
