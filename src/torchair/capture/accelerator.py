"""What captures need of a kind of device: torch's functions for it, a pool of memory, and the order
of replays on streams."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from torchair.capture import base
from torchair.codegen.cuda.driver import enter_context, has_context
from torchair.engine.plan.records import extent
from torchair.garbage import no_garbage_collection
from torchair.torch_private import cuda

Handle = tuple[int, int]


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
        use functions of the driver, its device is the current one, and nothing is recorded."""
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
