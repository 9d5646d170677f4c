"""Memory that programs are bound to: pieces of it, tensors in it or allocated for each call, blocks
that the user hands in; and a switch for finding faults, which fills it before each run, so that
whatever reads what nothing has written gets NaN, a strange number, or now true and now false."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch

from torchair.engine.plan.memory import aligned
from torchair.engine.plan.records import Plan, Root
from torchair.errors import InputError
from torchair.flags import poisoning
from torchair.log import native_logger

Place = Callable[[int, int], torch.Tensor | None]
"""Memory, as bytes, for a slot of a plan or for its `ARENA`."""

ARENA = -1

_quick_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
"""Torch's own short cut to `empty_strided`, without the parsing of arguments."""


@dataclass
class Memory:
    """Where the slots of a program are."""

    plan: Plan
    arena: int
    constants: dict[int, torch.Tensor]
    scratch: Callable[[int], torch.Tensor] | None = None  # gives so many bytes for this call


def aligned_bytes(size: int) -> torch.Tensor:
    """Memory that begins at a cache line."""
    made = torch.empty(size + 64, dtype=torch.uint8)
    return made[-made.data_ptr() % 64 :]


def laid_out(memory: torch.Tensor, dtype: torch.dtype, shape: Any, strides: Any) -> torch.Tensor:
    """Bytes as a tensor."""
    with torch.inference_mode(False):
        start = memory.storage_offset() // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start, shape, strides)


Allocate = Callable[[Any, Any], Callable[[], torch.Tensor]]


def allocator(root: Root) -> Allocate:
    """From dims and strides to a function that makes the tensor of a root anew for every call,
    because it leaves the graph."""
    dtype, device = root.meta.dtype, torch.device(root.device)
    make = partial(torch.empty_strided, dtype=dtype, device=device)
    if poisoning():
        return lambda shape, strides: made_poisoned(partial(make, shape, strides))
    if device.type == "cpu" and _quick_empty is not None:
        return lambda shape, strides: partial(_quick_empty, shape, strides, dtype)
    return lambda shape, strides: partial(make, shape, strides)


# ---- poison ----

_NAN = 0xFF  # a number of such bytes is NaN in every float type
_STRANGE = 0xA5  # a large negative number in every signed type; 165


class Area(NamedTuple):
    """Bytes that hold elements of one type from step `first` on."""

    begin: int
    size: int
    first: int
    dtype: torch.dtype


def areas_of(plan: Plan, place: Callable[[Root], tuple[int, int]] | None = None) -> list[Area]:
    """What the arena of a plan holds; `place` gives (begin, bytes) where the plan does not."""
    areas = []
    for root in plan.roots:
        if root.kind == "arena":
            begin, size = (root.offset, root.bytes) if place is None else place(root)
            areas.append(Area(begin, size, root.first, root.meta.dtype))
    return areas


def pattern(size: int, areas: Iterable[Area]) -> torch.Tensor:
    """Bytes for memory of which these are the areas: what comes first decides where they overlap,
    the rest is NaN."""
    made = torch.full((size,), _NAN, dtype=torch.uint8)
    for area in sorted(areas, key=lambda a: -a.first):
        _fill(made[area.begin : area.begin + area.size], area.dtype)
    return made


def _fill(bytes: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.bool:  # other bytes than 0 and 1 are no values of the type
        bytes.fill_(0)[::2] = 1
    else:
        bytes.fill_(_NAN if dtype.is_floating_point or dtype.is_complex else _STRANGE)


def poisoned(
    run: Callable[..., Any], memory: torch.Tensor, areas: Sequence[Area] = ()
) -> Callable[..., Any]:
    """The same function, which finds the bytes of `memory` filled at each call."""
    if not poisoning():
        return run
    with torch.inference_mode():
        wanted = pattern(len(memory), areas).to(memory.device)

    def filled(*args: Any) -> Any:
        with torch.inference_mode():  # where tensors of all modes may be written
            memory.copy_(wanted)
        return run(*args)

    return filled


def made_poisoned(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same function, whose tensors are filled, with what lies between their elements."""

    def filled() -> torch.Tensor:
        made = make()
        bytes = torch.empty(0, dtype=torch.uint8, device=made.device)
        _fill(bytes.set_(made.untyped_storage()), made.dtype)
        return made

    return filled


# ---- memory that the user hands in ----


class GivenMemory:
    """Blocks of bytes that belong to the user. Calls that use them run one at a time."""

    def __init__(self) -> None:
        self.feature: torch.Tensor | None = None
        self.lock = RLock()
        self._constants: torch.Tensor | None = None
        self._used = 0
        self._moved: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def take_feature(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for intermediates from now on."""
        self.feature = _bytes(block, size, device, "intermediates")

    def take_constants(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for the constants of plans that are made from now on."""
        self._constants = _bytes(block, size, device, "constants")
        self._used, self._moved = 0, {}

    def place(self, slot: int, size: int) -> torch.Tensor | None:
        """Memory for a program, as its plan asks for it."""
        if slot != ARENA or self.feature is None or size > self.feature.numel():
            return None
        return self.feature[:size]

    def move_constants(self, plan: Plan) -> None:
        """Put the constants of a plan into the block, as far as there is room."""
        if self._constants is None:
            return
        for slot, t in plan.constants.items():
            plan.constants[slot] = self._at_home(t)

    def _at_home(self, t: torch.Tensor) -> torch.Tensor:
        key = (t.data_ptr(), t.dtype, t.shape)
        found = self._moved.get(key)
        assert self._constants is not None
        if found is not None or str(t.device.type) != str(self._constants.device.type):
            return t if found is None else found
        size = aligned(t.numel() * t.element_size())
        if not t.is_contiguous() or self._used + size > self._constants.numel():
            native_logger.info("a constant of %s bytes stays outside of the block given", size)
            return t
        place = self._constants[self._used : self._used + size]
        self._used += size
        moved = laid_out(place, t.dtype, t.shape, t.stride()).copy_(t)
        self._moved[key] = self._moved[(moved.data_ptr(), t.dtype, t.shape)] = moved
        return moved


def constant_bytes(plan: Plan) -> int:
    """Bytes that a block for the constants of a plan must have."""
    distinct = {(t.data_ptr(), t.dtype, t.shape): t for t in plan.constants.values()}
    return sum(aligned(t.numel() * t.element_size()) for t in distinct.values())


def _bytes(block: torch.Tensor, size: int, device: str, use: str) -> torch.Tensor:
    """A block as bytes that begin at a cache line; InputError if it is not large enough."""
    wanted = torch.device(device)
    if not isinstance(block, torch.Tensor) or not block.is_contiguous():
        raise InputError(f"memory for {use} is a contiguous tensor", got=type(block).__name__)
    if block.device.type != wanted.type:
        raise InputError(
            f"memory for {use} is on another device", expected=device, got=str(block.device)
        )
    whole = block.detach().view(-1).view(torch.uint8)
    whole = whole[-whole.data_ptr() % 64 :]
    if whole.numel() < size:
        raise InputError(
            f"memory for {use} is too small",
            expected=f"{size} bytes after the first address that 64 divides",
            got=f"{whole.numel()} bytes",
            hint="summary() tells the sizes; ask for 64 bytes more to be sure of the begin",
        )
    return whole
