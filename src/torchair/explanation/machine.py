"""What this machine can do: bytes and operations in a second, measured once and kept on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from torchair.codegen.kept import key_of, store
from torchair.log import logger

_SIDE = 256  # of the matrices that are multiplied
_FAR, _NEAR = 32 << 20, 256 << 10  # bytes that are copied: from memory, and from a cache
_REPEATS = 40  # the best counts: others may be busy with the machine


@dataclass(frozen=True)
class Rates:
    """The most that was seen, with as many threads as torch has."""

    bytes: float  # of memory, read and written in a second
    near: float  # the same, of a cache
    operations: float  # additions and multiplications of float32 in a second

    def least_seconds(self, moved: float, operations: float) -> float:
        """About how long the machine needs to move and compute so much."""
        rate = self.bytes if moved > 4 * _NEAR else self.near
        return max(moved / rate, operations / self.operations)

    def with_seen(self, moved: float, operations: float, seconds: float) -> Rates:
        """The same, or better where something that ran shows that the machine can do more."""
        far = moved > 4 * _NEAR
        shown = moved / seconds
        return self.or_better(
            Rates(shown if far else 0.0, 0.0 if far else shown, operations / seconds)
        )

    def or_better(self, other: Rates) -> Rates:
        """The better of both, figure by figure."""
        return Rates(
            max(self.bytes, other.bytes), max(self.near, other.near),
            max(self.operations, other.operations),
        )  # fmt: skip


def rates(device: str, shares: Callable[[Rates], float] = lambda made: 0.0) -> Rates:
    """Of a device, as `cpu` or `cuda:0`: measured once, and kept. `shares` tells the largest share
    of them that a kernel has; if that is more than all, the machine was busy when they were
    measured, and they are measured again."""
    threads = torch.get_num_threads()
    key = key_of("rates of a machine 1", _name(device), str(threads), torch.__version__)
    known = _kept(key)
    if known is not None and shares(known) <= 1:
        return known
    made = _measured(device)
    made = made if known is None else made.or_better(known)
    store().put(key, json.dumps(asdict(made)).encode())
    return made


def _kept(key: str) -> Rates | None:
    known = store().get(key)
    try:
        return None if known is None else Rates(**json.loads(known))
    except (ValueError, TypeError) as e:
        logger.warning("rates of this machine are measured again: %s", e)
        return None


def _name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if "model name" in line), "cpu").strip()
    except OSError:
        return "cpu"


def _measured(device: str) -> Rates:
    a = torch.ones(_SIDE, _SIDE, device=device)
    b, c = torch.ones_like(a), torch.empty_like(a)
    product = _best(lambda: torch.mm(a, b, out=c), device)
    return Rates(_copying(_FAR, device), _copying(_NEAR, device), 2 * _SIDE**3 / product)


def _copying(size: int, device: str) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: str) -> float:
    times = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
