"""Functions that generated code computes, over float64 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

Array = np.ndarray


def of_torch(name: str) -> Callable[..., Array]:
    """A function of torch over float64 arrays."""
    function = getattr(torch, name)
    return lambda *args: function(*(torch.from_numpy(a) for a in args)).numpy()


def silu(x: Array) -> Array:
    return x * of_torch("sigmoid")(x)


def gelu(x: Array) -> Array:
    return x * 0.5 * of_torch("erfc")(-x / math.sqrt(2.0))


TORCH_NAMES = (
    "exp", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "erfc",
    "atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "rsqrt", "sqrt",
    "floor", "ceil", "trunc", "round", "erfinv",
)  # fmt: skip


UNARY: dict[str, Callable[[Array], Array]] = {name: of_torch(name) for name in TORCH_NAMES} | {
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "silu": silu,
    "gelu": gelu,
}


BINARY: dict[str, tuple[Callable[[Array, Array], Array], float]] = {
    "pow": (np.power, 0.6),
    "atan2": (np.arctan2, 0.6),
    "fmod": (np.fmod, 0.0),
}
