"""What the emulated device remembers: how many devices there are, what each thread has chosen, the
generators of random numbers, and the memory in use.

One object for the process, because torch has one device type `npu` in a process and no second.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from torchair.locks import RLock
from torchair.torch_private.functions import neg_view
from torchair.torch_private.tensors import GeneratorBase, from_dlpack, to_dlpack

if TYPE_CHECKING:
    from torchair.ascend.emulate.profiles.memory import MemoryMoments
    from torchair.ascend.emulate.profiles.recording import Marks, TraceRows
    from torchair.ascend.emulate.streams import DeviceTape


DEVICE_TYPE = "npu"
MOST_DEVICES = 64


class ThreadState(threading.local):
    """What a thread has chosen: device, streams, and the graph it captures."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Any] = {}
        self.tape: DeviceTape | None = None


class DeviceState:
    """The devices of this process."""

    def __init__(self) -> None:
        self.count = 0  # zero until the device is installed
        self.stream_ids = itertools.count(1)
        self.rows: TraceRows | None = None  # where a profiler wants to know what runs
        self.marks: Marks | None = None  # where it wants to know what scripts mark
        self.memory: MemoryMoments | None = None  # where it wants to know of memory
        self.here = ThreadState()

    def index_of(self, device: Any = None) -> int:
        """The number of a device given as number, text or torch.device; None is the current one."""
        if device is None:
            return self.here.device
        if isinstance(device, int):
            return self.here.device if device < 0 else self.checked(device)
        found = torch.device(device)
        if found.type != DEVICE_TYPE:
            raise ValueError(f"expected an {DEVICE_TYPE} device, got {found}")
        return self.here.device if found.index is None else self.checked(found.index)

    def checked(self, index: int) -> int:
        """The number itself, RuntimeError if there is no such device."""
        if not 0 <= index < self.count:
            raise RuntimeError(
                f"invalid device {DEVICE_TYPE}:{index}: {self.count} emulated devices, "
                f"{DEVICE_TYPE}:0 to {DEVICE_TYPE}:{self.count - 1}; "
                "`torchair run --devices N` sets another number"
            )
        return index


STATE = DeviceState()


def by_name(*things: Any) -> dict[str, Any]:
    """Functions and classes by their names, for `torch.npu`."""
    return {thing.__name__: thing for thing in things}


# ---- random numbers: the host's kernels and generators, so a seed gives the same numbers ----


_Base: Any = GeneratorBase
_GeneratorMeta: Any = type(_Base)
_FIRST_SEED = 67280421310721  # torch's own, before one was chosen


class _AnyGenerator(_GeneratorMeta):
    """Takes generators that torch made itself for instances as well."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Base)


class Generator(_Base, metaclass=_AnyGenerator):
    """torch.Generator, which also takes the device npu."""

    _npu: torch.device | None

    def __new__(cls, device: Any = "cpu") -> Generator:
        wanted = torch.device(device)
        emulated = wanted.type == DEVICE_TYPE
        made: Generator = _Base.__new__(cls, "cpu" if emulated else wanted)
        made._npu = torch.device(DEVICE_TYPE, STATE.index_of(wanted)) if emulated else None
        return made

    @property
    def device(self) -> torch.device:
        """Where the numbers are wanted."""
        return self._npu or _Base.device.__get__(self)


GENERATORS: list[Generator] = []
"""The default generator of each device, filled when the device is installed."""


def make_generators() -> None:
    """Give each device its default generator."""
    for index in range(STATE.count):
        GENERATORS.append(Generator(torch.device(DEVICE_TYPE, index)))
        GENERATORS[-1].manual_seed(_FIRST_SEED)


# ---- the functions of torch.npu ----


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    GENERATORS[STATE.here.device].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in GENERATORS:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a number from the system."""
    GENERATORS[STATE.here.device].seed()


def seed_all() -> None:
    """Seed all generators with one number from the system."""
    GENERATORS[0].seed()
    manual_seed_all(GENERATORS[0].initial_seed())


def initial_seed() -> int:
    """The seed of the current device."""
    return GENERATORS[STATE.here.device].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of a device's generator, as bytes on the host."""
    return GENERATORS[STATE.index_of(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all generators."""
    return [generator.get_state() for generator in GENERATORS]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Put a generator back into a state it had."""
    GENERATORS[STATE.index_of(device)].set_state(new_state.cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Put all generators back."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


FUNCTIONS = by_name(
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    initial_seed,
    get_rng_state,
    get_rng_state_all,
    set_rng_state,
    set_rng_state_all,
)
"""Those of `torch.npu` for random numbers."""


# ---- memory: the same bytes as a tensor of the host and as one of the device. A DLPack capsule
# carries the device of a tensor as a field. Rewritten between export and import, the field makes
# torch hand out a tensor on another device over the same memory, which owns its share of it as any
# other tensor does.


_HOST = 1  # kDLCPU
_DEVICE = 12  # kDLExtDev, which torch reads as PrivateUse1
_NAME = b"dltensor"
_FIELD = ctypes.sizeof(ctypes.c_void_p)  # a DLTensor begins with its data pointer

_export, _import = to_dlpack, from_dlpack
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_word = ctypes.c_int64.from_address


def as_npu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor of the host as one on `npu:<index>`, over the same memory."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"the emulated npu has no tensors of layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    capsule = _export(tensor)
    _word(_pointer(capsule, _NAME) + _FIELD).value = _DEVICE | index << 32
    made: torch.Tensor = _import(capsule)
    METERS[index].watch(made.untyped_storage())
    return made


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on an emulated device as one of the host, over the same memory.

    It owns a share of the tensor, not of the memory: it is good until the tensor gets other memory
    (`set_`, `.data = ...`). What is kept longer than a call is made with `kept_on_cpu`.
    """
    if tensor.is_conj():
        return as_cpu(tensor.conj()).conj()
    if tensor.is_neg():
        return neg_view(as_cpu(neg_view(tensor)))
    capsule = _export(tensor)
    _word(_pointer(capsule, _NAME) + _FIELD).value = _HOST
    return _import(capsule)


def kept_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same, good for as long as it lives."""
    return as_cpu(tensor.detach())


class _Life(weakref.ref[torch.UntypedStorage]):
    """A piece of memory that is counted as long as it lives."""

    __slots__ = ("size",)
    size: int


class Meter:
    """Bytes of one device. What is freed stays reserved, as with an allocator that keeps it."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.allocated = 0
        self.most_allocated = 0
        self.reserved = 0
        self.most_reserved = 0
        self.allocations = 0
        self.frees = 0
        self._lives: dict[int, _Life] = {}
        self._lock = RLock()  # memory may be freed while some is being counted

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Count a piece of memory until it is freed."""
        life = _Life(storage, self._freed)
        life.size = storage.nbytes()
        with self._lock:
            self._lives[id(life)] = life
            self.allocations += 1
            self.allocated += life.size
            if self.allocated > self.most_allocated:
                self.most_allocated = self.allocated
            if self.allocated > self.reserved:
                self.reserved = self.allocated
                self.most_reserved = max(self.most_reserved, self.reserved)
            if STATE.memory is not None:
                STATE.memory.note(self, id(life), life.size)

    def _freed(self, life: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(life, _Life)
        with self._lock:
            del self._lives[id(life)]
            self.frees += 1
            self.allocated -= life.size
            if STATE.memory is not None:
                STATE.memory.note(self, id(life), -life.size)


METERS: list[Meter] = []
"""One for each device, filled when the device is installed."""


def _meter(device: Any) -> Meter:
    return METERS[STATE.index_of(device)]


_FIGURES = (
    ("memory_allocated", "allocated", "Bytes of living tensors."),
    ("max_memory_allocated", "most_allocated", "The most bytes that were in use at a time."),
    ("memory_reserved", "reserved", "Bytes in use, or freed since and not given back."),
    ("max_memory_reserved", "most_reserved", "The most bytes that were reserved at a time."),
)


def _figure(name: str, field: str, about: str) -> Callable[..., int]:
    def figure(device: Any = None) -> int:
        return int(getattr(_meter(device), field))

    figure.__name__, figure.__doc__ = name, about
    return figure


def reset_peak_memory_stats(device: Any = None) -> None:
    """Measure peaks from now on."""
    meter = _meter(device)
    meter.most_allocated, meter.most_reserved = meter.allocated, meter.reserved


def empty_cache() -> None:
    """Give reserved memory back that is not in use."""
    for meter in METERS:
        meter.reserved = meter.allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes free and bytes in all: those of the host."""
    STATE.index_of(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The figures by name, as far as they exist here."""
    meter = _meter(device)
    return OrderedDict(
        {
            "active_bytes.all.current": meter.allocated,
            "active_bytes.all.peak": meter.most_allocated,
            "allocated_bytes.all.current": meter.allocated,
            "allocated_bytes.all.peak": meter.most_allocated,
            "allocation.all.allocated": meter.allocations,
            "allocation.all.current": meter.allocations - meter.frees,
            "allocation.all.freed": meter.frees,
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "reserved_bytes.all.current": meter.reserved,
            "reserved_bytes.all.peak": meter.most_reserved,
        }
    )


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The figures as a table."""
    stats = memory_stats(device)
    width = max(map(len, stats))
    return "\n".join(f"{name:{width}} {value:>16,}" for name, value in stats.items())


STATISTICS = by_name(
    *(_figure(*row) for row in _FIGURES),
    reset_peak_memory_stats,
    empty_cache,
    mem_get_info,
    memory_stats,
    memory_summary,
)
"""Those of `torch.npu` for memory."""
