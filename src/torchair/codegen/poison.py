"""A switch for finding faults: memory is filled before each run, so that whatever reads what
nothing has written gets NaN, a strange number, or now true and now false."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchair.codegen.program import Allocation
from torchair.flags import poisoning

_NAN = 0xFF  # a number of such bytes is NaN in every float type
_STRANGE = 0xA5  # a large negative number in every signed type; 165


class Area(NamedTuple):
    """Bytes that hold elements of one type from step `first` on."""

    begin: int
    size: int
    first: int
    dtype: torch.dtype


def areas_of(
    allocations: Iterable[Allocation], place: Callable[[Allocation], tuple[int, int]] | None = None
) -> list[Area]:
    """What the arena of a plan holds; `place` gives (begin, bytes) where allocations do not."""
    areas = []
    for allocation in allocations:
        if allocation.kind == "arena":
            begin, size = (
                (allocation.offset, allocation.bytes) if place is None else place(allocation)
            )
            areas.append(Area(begin, size, allocation.first, allocation.meta.dtype))
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
