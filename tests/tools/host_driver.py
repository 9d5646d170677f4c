"""A stand-in for the CUDA driver on a machine without a GPU: graphs whose kernels are functions of
tensors in host memory, so that the path of a replay runs as it does on a GPU, up to the driver.

`HostDriver` has the functions of the driver that a replay calls, as ctypes has them. A node has one
argument for each piece of memory; what was set last is what a launch runs on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from host_memory import over_address
from torchair.capture import base, exchange
from torchair.capture.exchange import ExchangedRecording, Recorded
from torchair.codegen.cuda import graphs
from torchair.codegen.cuda.graphs import ExecutableGraph, Patch, RecordedNode

_EXEC = 0x1000
_CODE, _POINTER, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
OUT_OF_MEMORY = 2
_functions: list[Any] = []  # those of a driver are there as long as the process


class HostDriver:
    """The driver's functions. `run` is what a launch does with the words of all nodes; None where
    only the calls themselves matter."""

    def __init__(self, run: Callable[[list[list[int]]], None] | None = None) -> None:
        self.run = run
        self.live: dict[int, list[int]] = {}
        self.updates: list[int] = []  # nodes that were given new arguments
        self.launches: list[int] = []  # streams
        self.copies: list[tuple[int, int, int]] = []
        self.refuses: set[str] = set()
        self.errors: list[BaseException] = []
        plain, pointer = ctypes.c_uint64, _POINTER
        made = {
            "cuGraphExecKernelNodeSetParams_v2": ((_POINTER,) * 3, self._set),
            "cuGraphExecMemcpyNodeSetParams": ((_POINTER,) * 4, self._set_copy),
            "cuGraphExecMemsetNodeSetParams": ((_POINTER,) * 4, self._set_copy),
            "cuGraphLaunch": ((_POINTER, _POINTER), self._launch),
            "cuMemcpyDtoDAsync_v2": (
                (ctypes.c_uint64, ctypes.c_uint64, _SIZE, _POINTER),
                self._copy,
            ),
            "cuCtxGetCurrent": ((_POINTER,), lambda context: 0),
            "cuGraphInstantiateWithFlags": ((pointer, pointer, plain), self._made),
            "cuGraphExecDestroy": ((_POINTER,), lambda graph: 0),
            "cuGetErrorString": ((_CODE, _POINTER), lambda code, text: 0),
        }
        self._kept = {n: ctypes.CFUNCTYPE(_CODE, *kinds)(f) for n, (kinds, f) in made.items()}
        _functions.append(self._kept)
        for name, function in self._kept.items():
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            setattr(self, name, ctypes.CFUNCTYPE(_CODE)(address))  # without types of arguments

    def _made(self, place: int, graph: int, flags: int) -> int:
        ctypes.c_void_p.from_address(place).value = _EXEC
        return 0

    def _set(self, graph: int, node: int, params: int) -> int:
        assert graph == _EXEC
        self.updates.append(node)
        if "set" in self.refuses:
            return OUT_OF_MEMORY
        known = graphs._KernelParams.from_address(params)
        count = len(self.live[node])
        at = [known.arguments[k] or 0 for k in range(count)]
        self.live[node] = [ctypes.c_uint64.from_address(a).value for a in at]
        return 0

    def _set_copy(self, graph: int, node: int, params: int, context: int) -> int:
        assert graph == _EXEC
        self.updates.append(node)
        words = (ctypes.c_uint64 * len(self.live[node])).from_address(params)
        self.live[node] = list(words)
        return 0

    def _launch(self, graph: int, stream: int | None) -> int:
        assert graph == _EXEC
        self.launches.append(stream or 0)
        if "launch" in self.refuses:
            return OUT_OF_MEMORY
        try:
            if self.run is not None:
                self.run([self.live[n] for n in sorted(self.live)])
        except BaseException as e:  # a callback cannot raise
            self.errors.append(e)
        return 0

    def _copy(self, to: int, source: int, size: int, stream: int | None) -> int:
        self.copies.append((to, source, size))
        ctypes.memmove(to, source, size)
        return 0

    @contextmanager
    def installed(self) -> Any:
        """In the place of the real one."""
        with mock.patch.object(graphs, "driver", lambda: self):
            yield self


def kernel(handle: int, count: int) -> RecordedNode:
    """A node of a kernel with so many words as arguments."""
    buffer = (ctypes.c_uint64 * count)()
    base_of = ctypes.addressof(buffer)
    places = (ctypes.c_void_p * max(1, count))(*(base_of + 8 * k for k in range(count)))
    params = graphs._KernelParams()
    params.arguments = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
    return RecordedNode(handle, 0, (), [0] * count, buffer, params, places)


def executable(driver: HostDriver, pieces: int, nodes: int = 1) -> ExecutableGraph:
    """A graph with kernels that all take the addresses of all pieces."""
    made = [kernel(1 + n, pieces) for n in range(nodes)]
    driver.live = {n.handle: [0] * pieces for n in made}
    patches = [Patch(n, k, k, 0) for n in range(nodes) for k in range(pieces)]
    with driver.installed():
        found = ExecutableGraph(_EXEC, made, patches, pieces)
    found._enter = lambda: None
    return found


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor over memory at an address, like another one."""
    size = exchange.span(like)
    if not size:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    storage = over_address(address, torch.device("cpu"), size)
    return base.over(storage, like.dtype, like.shape, like.stride())


class HostPool:
    """In the place of a `PoolOwner`."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.inputs: dict[int, torch.Tensor] = {}

    def input_like(self, position: int, like: torch.Tensor) -> torch.Tensor:
        if position not in self.inputs:
            self.inputs[position] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return self.inputs[position]

    def result_at(self, address: int, size: int) -> torch.UntypedStorage:
        return over_address(address, self.device, size)


class HostOrder:
    """In the place of a `StreamOrder`: the current stream is a number that tests set."""

    def __init__(self) -> None:
        self.current, self.capturing, self.entered, self.here = 0, False, 0, True
        self._last: int | None = None

    def enter(self) -> int:
        self.entered += 1
        self._last = self.current
        return self.current

    def again(self) -> int | None:
        """As of a `StreamOrder`."""
        same = self.current == self._last and self.here and not self.capturing
        return self.current if same else None

    def on_device(self, launch: Callable[[int], None], stream: int) -> None:
        launch(stream)


class Plain(base.Recording):
    """In the place of a recording that copies arguments and results."""

    def __init__(self, forward: base.Forward) -> None:
        self._forward, self._args = forward, list[Any]()

    def feed(self, args: Sequence[Any]) -> None:
        self._args = list(args)

    def replay(self) -> None:
        self._made = self._forward(*self._args)

    def results(self, args: Sequence[Any], hold: bool) -> tuple[Any, ...]:
        return tuple(self._made)


@dataclass
class HostSubstrate:
    """Captures an FX graph as one kernel, which runs the graph. Makes recordings as those of a GPU:
    whose arguments and results are where the caller has them."""

    order: Any
    nodes: int = 1  # kernels, all of which take all addresses
    computes: bool = True
    faults: tuple[torch.Tensor, ...] = ()
    driver: Any = None  # of the latest capture
    made: Any = None
    copied: int = 0  # captures with copies, after the driver has refused

    def capture(self, request: base.ToCapture) -> base.Recording:
        moving = [i for i in request.kinds.users if request.args[i].dim()]
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in request.args]
        owners = {a.data_ptr(): i for i, a in enumerate(given) if isinstance(a, torch.Tensor)}
        returned = list(request.forward(*given))
        owned = [owners.get(r.untyped_storage().data_ptr()) for r in returned]
        results = [r.clone() for r, i in zip(returned, owned, strict=True) if i is None]
        samples = [request.args[i] for i in moving]
        sizes = [exchange.span(t) for t in (*samples, *results)]
        self.driver = HostDriver()
        run = executable(self.driver, len(sizes), self.nodes)
        new = iter([base.pooled(r, k, k) for k, r in enumerate(results)])
        sources = [
            next(new) if i is None else base.OfArgument(base.view_of(i, given[i], r))
            for r, i in zip(returned, owned, strict=True)
        ]
        places = [(r.data_ptr(), r.untyped_storage().nbytes()) for r in results]
        found: Any = SimpleNamespace(sources=sources, places=places, constants=[], storages=[])
        groups = {k: len(moving) + k for k in range(len(results))}
        made = Recorded(None, run, found, sizes, groups)
        kept = [None if i in moving else a for i, a in enumerate(request.args)]
        shapes = [t.detach().to("meta") for t in samples]

        def compute(words: list[list[int]]) -> None:
            args = list(kept)
            for i, like, address in zip(moving, shapes, words[0], strict=False):
                args[i] = at(address, like)
            made = [r for r, i in zip(request.forward(*args), owned, strict=True) if i is None]
            for result, address, wanted in zip(made, words[0][len(moving) :], results, strict=True):
                at(address, wanted).copy_(result)

        self.driver.run = compute if self.computes else None

        def again(args: Sequence[Any]) -> Any:
            self.copied += 1
            return Plain(request.forward)

        def check(args: Sequence[Any]) -> None:
            for words in self.faults:
                if words.count_nonzero():
                    words.zero_()
                    raise IndexError("a bad index")

        memory: Any = HostPool()
        self.made = ExchangedRecording(
            made, memory, self.order, request, moving, [check], again, self.faults
        )
        return self.made

    def busy(self) -> bool:
        return bool(self.order.capturing)

    def limits(self) -> Any:
        return None

    def finish(self) -> None:
        pass

    def trim(self) -> None:
        pass


@dataclass
class Host:
    """A machine without a GPU on which captured graphs are those of one: all of a process."""

    order: HostOrder
    substrates: list[HostSubstrate]

    @property
    def driver(self) -> HostDriver:
        """That of the latest capture."""
        found: HostDriver = self.substrates[-1].driver
        return found

    @property
    def served(self) -> int:
        """Calls that entries of the graphs that there are have served."""
        entries = [e for s in self.substrates for e in getattr(s.made, "_entries", [])]
        return sum(entry.calls for entry in entries)


def host(monkeypatch: Any, **options: Any) -> Host:
    """Have graphs captured here as on a GPU from now on."""
    order, substrates = HostOrder(), list[HostSubstrate]()

    def find(*args: Any, **keywords: Any) -> HostSubstrate:
        substrates.append(HostSubstrate(order, **options))
        return substrates[-1]

    monkeypatch.setattr("torchair.capture.graph.substrate_for", find)
    monkeypatch.setattr("torchair.codegen.cuda.driver._driver", lambda: substrates[-1].driver)
    return Host(order, substrates)


def aligned(*dims: int, shift: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that begins at a multiple of 256 bytes, or so many elements behind."""
    size = torch.Size(dims).numel() * dtype.itemsize
    memory = np.empty(size + 1024, np.uint8)
    begin = -memory.ctypes.data % 256 + shift * dtype.itemsize
    made = torch.from_numpy(memory[begin : begin + size]).view(dtype).view(dims)
    return made.copy_(torch.randn(dims))
