"""NVIDIA's driver, by ctypes: PTX becomes machine code here, and kernels are launched.

The driver is the one that torch has loaded; functions run in torch's context and on its streams.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from torchair.codegen import kernel_cache
from torchair.codegen.cuda.jit import TENSOR_MAP, Entry, Gpu, gpu, module_text, ptx
from torchair.codegen.llvm import version
from torchair.codegen.sizes import BYTES, Element
from torchair.codegen.target import TensorTile
from torchair.locks import Lock

_REGISTERS, _LOCAL, _DYNAMIC_SHARED = 4, 3, 8  # numbers of function attributes
_TOGETHER, _CLUSTER, _EARLY = 2, 4, 6  # numbers of launch attributes
_PTX = 1  # number of a kind of input of the linker
_THREADS = 8


class DriverError(RuntimeError):
    """What the driver said."""


@cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")


def available() -> str | None:
    """Why no kernel can be launched on this machine, None if one can."""
    try:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        _driver()
    except OSError as e:
        return str(e)
    return None


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'').decode()} ({code})")


class _Thread(threading.local):
    """What is known of the calling thread."""

    has_context = False


_thread = _Thread()


def enter_context() -> None:
    """Give the calling thread a context of the driver if it has none. The runtime that torch calls
    does so by itself; of the driver's functions some end the process without one."""
    if _thread.has_context:
        return
    found, device = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(found)), "the context of a thread")
    if not found:
        index = torch.cuda.current_device()
        _check(_driver().cuDeviceGet(ctypes.byref(device), index), "a device")
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(found), device), "a context")
        _check(_driver().cuCtxSetCurrent(found), "the context of a thread")
    _thread.has_context = True


def has_context() -> bool:
    """Whether the calling thread was given one."""
    return _thread.has_context


class TooFewFit(DriverError):
    """Of the blocks that wait for each other so many fit in a multiprocessor, and not all."""

    def __init__(self, entry: Entry, fits: int) -> None:
        text = f"{entry.name}: {fits} of {entry.resident} blocks fit in a multiprocessor"
        super().__init__(text)
        self.fits = fits


class GpuLibrary:
    """Kernels of one GPU. A text is compiled once."""

    def __init__(self, index: int, machine: Gpu | None = None) -> None:
        self.index = index
        self.machine = machine or gpu(index)
        self.provided: dict[str, str] = {}
        """PTX that a package brought, by the name of an entry: LLVM is not asked for it."""
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._errors: dict[str, Exception] = {}
        self._lock = Lock()
        self.seconds = 0.0

    def __contains__(self, entry: Entry) -> bool:
        return entry.name in self._functions

    def add(self, entries: Sequence[Entry]) -> dict[str, Exception]:
        """Compile those that are new, several at a time; errors by the name of the entry."""
        with self._lock:
            new = [e for e in {e.name: e for e in entries}.values() if e not in self]
            new = [e for e in new if e.name not in self._errors]
            if new:
                start, store = time.perf_counter(), kernel_cache.in_use()
                with torch.cuda.device(self.index), ThreadPoolExecutor(_THREADS) as pool:
                    torch.cuda.current_stream()  # there is a context from now on
                    list(pool.map(lambda e: self._add(e, store), new))
                self.seconds += time.perf_counter() - start
            return {e.name: self._errors[e.name] for e in entries if e.name in self._errors}

    def _add(self, entry: Entry, store: kernel_cache.KernelStore | None) -> None:
        try:
            with torch.cuda.device(self.index):
                torch.cuda.current_stream().query()  # the context is this thread's now
                given = self.provided.get(entry.name)
                code = image(entry, self.machine, self.device, store, given)
                function = _loaded(code, entry.name)
                if entry.together:
                    check_room(function, entry)
                self._functions[entry.name] = function
        except (ImportError, RuntimeError, ValueError) as e:
            self._errors[entry.name] = e

    @property
    def driver(self) -> str:
        """The version of the assembler of machine code."""
        return _driver_version()

    @property
    def device(self) -> str:
        """What machine code is for; PTX may be for chips before it."""
        found = torch.cuda.get_device_properties(self.index)
        return f"{found.name} {found.major}.{found.minor}"

    def function(self, entry: Entry) -> ctypes.c_void_p:
        """What a launch takes."""
        if entry not in self:
            errors = self.add([entry])
            if errors:
                raise errors[entry.name]
        return self._functions[entry.name]

    def registers(self, entry: Entry) -> tuple[int, int]:
        """Registers of a thread, and bytes of memory where they did not suffice."""
        found = ctypes.c_int()
        numbers = []
        for attribute in (_REGISTERS, _LOCAL):
            function = self.function(entry)
            _check(
                _driver().cuFuncGetAttribute(ctypes.byref(found), attribute, function), entry.name
            )
            numbers.append(found.value)
        return numbers[0], numbers[1]


@cache
def library(index: int) -> GpuLibrary:
    """The kernels that this process has for a GPU."""
    return GpuLibrary(index)


def image(
    entry: Entry,
    gpu: Gpu,
    device: str,
    store: kernel_cache.KernelStore | None,
    given: str | None = None,
) -> bytes:
    """What the driver loads: machine code, kept for this driver, or PTX, kept for any, or `given`
    by a package."""
    if store is None:
        return _text(given or ptx([entry], gpu))
    maker = "a package" if given is not None else version()
    made_from = (maker, gpu.name, gpu.features, given or module_text([entry]))
    key = kernel_cache.key_of("cubin", _driver_version(), device, *made_from)
    code = None if entry.needs_own_chip else store.get(key)
    if code is not None:
        return code
    plain = kernel_cache.key_of("ptx", *made_from)
    text = store.get(plain) if given is None else _text(given)
    if text is None:
        text = _text(ptx([entry], gpu))
        store.put(plain, text)
    if entry.needs_own_chip:
        # The linker takes it for a part of a program: warpgroups could not hand each other
        # registers, and the tensor cores would wait after every instruction. The driver itself
        # does neither, and has a cache of its own.
        return text
    try:
        code = _linked(text, entry.name)
    except (DriverError, AttributeError):  # the driver makes what it can of the text, at each start
        return text
    store.put(key, code)
    return code


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


@cache
def _driver_version() -> str:
    found = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(found)), "version of the driver")
    return str(found.value)


def _linked(text: bytes, name: str) -> bytes:
    """Machine code from PTX, for the device of the current context."""
    state, code, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    driver = _driver()
    _check(driver.cuLinkCreate_v2(0, None, None, ctypes.byref(state)), name)
    try:
        length = ctypes.c_size_t(len(text))
        given = (state, _PTX, text, length, name.encode(), 0, None, None)
        _check(driver.cuLinkAddData_v2(*given), name)
        _check(driver.cuLinkComplete(state, ctypes.byref(code), ctypes.byref(size)), name)
        return ctypes.string_at(code, size.value)
    finally:
        driver.cuLinkDestroy(state)


def _loaded(code: bytes, name: str) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadDataEx(ctypes.byref(module), code, 0, None, None), name)
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    return function


def check_room(function: ctypes.c_void_p, entry: Entry) -> None:
    """Make sure that as many blocks as wait for each other fit in a multiprocessor: a launch of
    more is refused, which is too late for another kernel."""
    found, asked = ctypes.c_int(), ctypes.c_size_t(entry.shared)
    if entry.shared:
        given = (function, _DYNAMIC_SHARED, entry.shared)
        _check(_driver().cuFuncSetAttribute(*given), entry.name)
    count = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
    _check(count(ctypes.byref(found), function, entry.block, asked), entry.name)
    if found.value < entry.resident:
        raise TooFewFit(entry, found.value)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_ubyte * 64)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


# ---- tensors as the copy engine is told of them ----


_KINDS: dict[Element, int] = {"f32": 7, "bf16": 9, "f16": 6, "u8": 0}
_SWIZZLED, _LARGE_LINES = 3, 3  # rows of 128 bytes; L2 is filled by 256 bytes
_WHOLE = 16  # bytes that addresses and strides are multiples of


class TensorMap:
    """A tensor as the copy engine is told of it, for the address where it was last."""

    def __init__(self, tile: TensorTile, number: Callable[[int], int], index: int) -> None:
        self._tile, self._index, self._at = tile, index, -1
        self._dims, strides = tile.numbers(number)
        size = BYTES[tile.dtype]
        self._empty = 0 in self._dims  # nothing is ever read then
        self._strides = [n * size for n in strides]
        last = zip(self._dims[1:], self._strides, strict=True)
        self._bytes = self._dims[0] * size + sum((n - 1) * far for n, far in last)
        self._room = (ctypes.c_ubyte * (TENSOR_MAP + 64))()
        self.address = -(-ctypes.addressof(self._room) // 64) * 64
        self._copy: torch.Tensor | None = None

    def move(self, address: int, stream: int) -> None:
        """The tensor is at this address in the next launch. One that the copy engine cannot read
        there is copied."""
        if self._empty or (address == self._at and not address % _WHOLE):
            return
        self._at = address
        if address % _WHOLE:
            address = self._copied(address, stream)
        self._encode(address)

    def _copied(self, address: int, stream: int) -> int:
        if self._copy is None:
            device = torch.device("cuda", self._index)
            self._copy = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        there = self._copy.data_ptr()
        given = (ctypes.c_uint64(there), ctypes.c_uint64(address), ctypes.c_size_t(self._bytes))
        code = _driver().cuMemcpyDtoDAsync_v2(*given, ctypes.c_void_p(stream))
        _check(code, "copy of an operand")
        return there

    def _encode(self, address: int) -> None:
        tile, rank = self._tile, len(self._dims)
        code = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            _KINDS[tile.dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*self._dims),
            (ctypes.c_uint64 * max(1, rank - 1))(*self._strides),
            (ctypes.c_uint32 * rank)(*tile.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,  # no interleaving
            _SWIZZLED,
            _LARGE_LINES,
            0,  # zeros outside
        )
        _check(code, f"tensor of {self._dims} elements with strides of {self._strides} bytes")


class KernelLaunch:
    """A launch with its arguments, which can be changed between calls: `words`."""

    def __init__(
        self,
        library: GpuLibrary,
        entry: Entry,
        blocks: int,
        words: Sequence[int],
        shared: int = 0,
        cluster: int = 1,
        early: bool = False,
        together: bool = False,
        number: Callable[[int], int] = lambda word: 0,
    ) -> None:
        """`together`: all blocks are to be resident at once, or the launch fails. `number` tells
        the sizes in words, for tensors that the copy engine reads."""
        self.name = entry.name
        self._function = library.function(entry)
        if shared:  # with that of the kernel itself it may be more than a block has
            given = (self._function, _DYNAMIC_SHARED, shared)
            _check(_driver().cuFuncSetAttribute(*given), entry.name)
        self.words = (ctypes.c_int64 * len(words))(*words)
        base = ctypes.addressof(self.words)
        self.maps = self._tensors(library, entry, number)
        """Tensors behind the words, and the position of the address of each."""
        places = [base + 8 * k for k in range(len(words))] + [m.address for _, m in self.maps]
        self._arguments = (ctypes.c_void_p * len(places))(*places)
        attributes = []
        if cluster > 1:
            attributes.append((_CLUSTER, struct.pack("III", cluster, 1, 1)))
        if together:
            attributes.append((_TOGETHER, struct.pack("I", 1)))
        if early:
            attributes.append((_EARLY, struct.pack("I", 1)))
        self._attributes = (_Attribute * max(1, len(attributes)))()
        for made, (kind, value) in zip(self._attributes, attributes, strict=False):
            made.id = kind
            made.value[: len(value)] = value
        self._config = _Config(
            blocks,
            1,
            1,
            entry.block,
            1,
            1,
            shared,
            None,
            ctypes.cast(self._attributes, ctypes.c_void_p),
            len(attributes),
        )
        self._launch = _driver().cuLaunchKernelEx
        self._given = (ctypes.byref(self._config), self._function, self._arguments, None)

    def _tensors(
        self, library: GpuLibrary, entry: Entry, number: Callable[[int], int]
    ) -> list[tuple[int, TensorMap]]:
        (first, *others) = entry.kernels
        assert not any(k.tensors for k in others), "kernels with tensors stand alone"
        positions = {word: 1 + k for k, word in enumerate(first.words)}
        return [(positions[t.word], TensorMap(t, number, library.index)) for t in first.tensors]

    def __call__(self, stream: int) -> None:
        for position, tensor in self.maps:
            tensor.move(self.words[position], stream)
        self._config.stream = stream
        code = self._launch(*self._given)
        if code:
            _check(code, self.name)


# ---- for other modules that call the driver


def driver() -> Any:
    """The driver's functions."""
    return _driver()


def check(code: int, what: str) -> None:
    """Raise what the driver says of a failure."""
    _check(code, what)
