"""What of the inputs of a call its plan depends on, as one row of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.ge.graph import Value
from torchair.ge.shapes import is_static

_MANY = 4  # inputs that look alike and are equal: not by chance


@dataclass(frozen=True)
class InputPart:
    """What is read of one input."""

    index: int
    rank: int  # -1 if any is right
    dims: bool
    strides: bool
    numbers: int = 0  # elements of a host value whose content decides something
    scalar: bool = False
    kind: Any = None  # what the graph says of it: equal for inputs that look alike

    @property
    def width(self) -> int:
        """How many integers are read of one whose rank is known."""
        return self.rank * (self.dims + self.strides) + self.numbers


@dataclass(frozen=True)
class Told:
    """What was read of one input; None where nothing was."""

    dims: tuple[Any, ...] | None
    strides: tuple[Any, ...] | None
    content: Any


class Reader:
    """Reads inputs; `inputs` are the numbers of those it looks at."""

    def __init__(self, values: Sequence[tuple[int, Value, bool]], strides: bool) -> None:
        """`values` are inputs that may differ from call to call, and whether their content counts;
        `strides` says whether plans depend on those."""
        self._parts = [_part(i, v, steers, strides) for i, v, steers in values]
        self.inputs = [p.index for p in self._parts]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        row: list[int] = []
        for part in self._parts:
            x = inputs[part.index]
            if part.rank < 0:
                row.append(x.dim())
            if part.dims:
                row += x.shape
            if part.strides:
                row += x.stride()
            if part.numbers:
                row += x.reshape(-1).tolist()
        return tuple(row)

    def twins(self, row: Sequence[int]) -> dict[int, int]:
        """Places in a row that say the same as an earlier one: those of inputs that look alike, if
        they are many and equal throughout. So are the tensors of a cache, one pair a layer."""
        if any(part.rank < 0 for part in self._parts):
            return {}
        groups: dict[Any, list[tuple[int, int]]] = {}
        end = 0
        for part in self._parts:
            start, end = end, end + part.width
            if part.rank > 0 and not part.numbers:
                groups.setdefault(part.kind, []).append((start, end))
        found: dict[int, int] = {}
        for places in groups.values():
            first, last = places[0]
            if len(places) >= _MANY and len({tuple(row[a:b]) for a, b in places}) == 1:
                for start, end in places[1:]:
                    found.update(zip(range(start, end), range(first, last), strict=True))
        return found

    def told(self, row: Sequence[Any]) -> dict[int, Told]:
        """What a row says of each input."""
        rest = iter(row)
        found = {}
        for part in self._parts:
            dims = tuple([next(rest) for _ in range(part.rank)]) if part.dims else None
            strides = tuple([next(rest) for _ in range(part.rank)]) if part.strides else None
            numbers = tuple([next(rest) for _ in range(part.numbers)])
            content = (numbers[0] if part.scalar else numbers) if numbers else None
            found[part.index] = Told(dims, strides, content)
        return found


def _part(index: int, value: Value, steers: bool, strides: bool) -> InputPart:
    rank = -1 if value.shape is None else len(value.shape)
    numbers = len(value.content) if isinstance(value.content, tuple) else 1
    return InputPart(
        index, rank, not is_static(value.shape), strides and rank != 0, numbers if steers else 0,
        scalar=value.shape == (),
        kind=(value.dtype, tuple([d if isinstance(d, int) else None for d in value.shape or ()])),
    )  # fmt: skip
