"""Gears of inputs that are only described, as the original's options are made of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair.fx.gears import DimGears, merge, options_of


class ValueType(enum.Enum):
    """What an input of a graph is."""

    TENSOR = 0
    PARAMETER = 1
    BUFFER = 2
    STATIC_TENSOR = 3


@dataclass
class GeInputInfo:
    """The description of an input; `func` makes it from the arguments of a call."""

    value_type: ValueType
    func: Callable[..., Any] | None
    shape: Sequence[int]
    dim_gears: DimGears = field(default_factory=dict)
    device_type: str = "CPU"
    real_shape: Sequence[int] | None = None


def generate_dynamic_dims_option(
    named_inputs_info: Mapping[str, GeInputInfo], policy: str
) -> dict[str, str]:
    """The options that tell the engine about gears; none where no input has any."""
    infos = dict(sorted(named_inputs_info.items()))
    lists: list[Sequence[int]] = []
    for info in infos.values():
        for dim, gears in sorted(info.dim_gears.items()):
            assert info.shape[dim] == -1, "Set dim gear index shape must generalize -1."
            lists.append(gears)
    if not lists:
        return {}
    return options_of({name: info.shape for name, info in infos.items()}, merge(lists, policy))


def get_dim_gears(t: torch.Tensor) -> DimGears | None:
    """The gears that were set on a tensor."""
    return getattr(t, "dim_gears", None)
