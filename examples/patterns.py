"""Patterns: several operators that become one, built in and of your own.

Run it: `python examples/patterns.py`. docs/patterns.md explains what it prints.
"""

from __future__ import annotations

import os

os.environ["TORCHAIR_DEBUG"] = "3"

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import torch

import torchair


def told(model: Callable[..., Any], *args: torch.Tensor) -> None:
    """Compile a model, compare it with eager, print what patterns said."""
    torch._dynamo.reset()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.no_grad():
        compiled = torch.compile(model, backend=torchair.get_npu_backend())
        torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-4)
    print(*(x for x in said.getvalue().splitlines() if x.startswith("torchair pattern")), sep="\n")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return torch.softmax(scores, -1) @ v


def almost_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * x))


def sine_cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.cos(y)


def as_sines(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x + y) + torch.sin(x - y)) / 2


def main() -> None:
    heads = [torch.randn(2, 4, 64, 16) for _ in range(3)]
    told(attention, *heads, torch.zeros(64, 64))
    told(almost_gelu, torch.randn(8))
    torchair.register_replacement(sine_cosine, as_sines, [torch.randn(2), torch.randn(2)])
    told(lambda x, y: sine_cosine(x, y) + 1, torch.randn(8), torch.randn(8))


if __name__ == "__main__":
    main()
