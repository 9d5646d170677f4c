"""What of the inputs of a call its plan depends on, as one row of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.ge.graph import Value
from torchair.ge.shapes import is_static


@dataclass(frozen=True)
class Part:
    """What is read of one input."""

    index: int
    rank: int  # -1 if any is right
    dims: bool
    strides: bool
    numbers: int = 0  # elements of a host value whose content decides something
    scalar: bool = False


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


def _part(index: int, value: Value, steers: bool, strides: bool) -> Part:
    rank = -1 if value.shape is None else len(value.shape)
    numbers = len(value.content) if isinstance(value.content, tuple) else 1
    return Part(
        index, rank, not is_static(value.shape), strides and rank != 0, numbers if steers else 0,
        scalar=value.shape == (),
    )  # fmt: skip
