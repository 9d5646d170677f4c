"""Random numbers: one generator for each device, and `torch.Generator(device="npu")`.

A generator of the device is one of the host that says it is on the device; the kernels are the
host's, so the same seed gives the same numbers on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torchair.emulate.state import DEVICE_TYPE, STATE

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
