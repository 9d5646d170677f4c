"""What a row of the model tables is: a builder with random weights, and inputs of two sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A model with random weights. `inputs(0)` is the size that a static graph sees, `inputs(1)` a
    second one for dynamic graphs. `needs_grad`: the forward itself differentiates."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    needs_grad: bool = False


def image(n: int, channels: int = 3, side: int = 32) -> Tensor:
    """Pictures; the second size is a larger batch."""
    return torch.randn(2 + n, channels, side, side)


def ids(n: int, length: int = 8, vocabulary: int = 50) -> Tensor:
    """Tokens; the second size is a larger batch."""
    return torch.randint(1, vocabulary, (2 + n, length))


class Method(nn.Module):
    """A model whose forward is another method of it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.name)(*args, **kwargs)
