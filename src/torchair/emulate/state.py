"""What the emulated device remembers: how many devices there are, what each thread has chosen, and
the generators of random numbers.

One object for the process, because torch has one device type `npu` in a process and no second.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchair.emulate.profiles.recording import Marks, Rows
    from torchair.emulate.streams import DeviceTape


DEVICE_TYPE = "npu"
MOST_DEVICES = 64


class ThisThread(threading.local):
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
        self.rows: Rows | None = None  # where a profiler wants to know what runs
        self.marks: Marks | None = None  # where it wants to know what scripts mark
        self.here = ThisThread()

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


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists of lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for member in tree:
            yield from tensors_in(member)


def by_name(*things: Any) -> dict[str, Any]:
    """Functions and classes by their names, for `torch.npu`."""
    return {thing.__name__: thing for thing in things}


# ---- random numbers: the host's kernels and generators, so a seed gives the same numbers ----


_Base: Any = torch._C.Generator
_Meta: Any = type(_Base)
_FIRST_SEED = 67280421310721  # torch's own, before anyone has chosen one


class _AnyGenerator(_Meta):
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
        found: torch.device = self._npu or _Base.device.__get__(self)
        return found


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
    manual_seed, manual_seed_all, seed, seed_all, initial_seed, get_rng_state, get_rng_state_all,
    set_rng_state, set_rng_state_all,
)  # fmt: skip
"""Those of `torch.npu` for random numbers."""
