"""Lowering of the parts of a group norm and of its gradient, against the torch kernels."""

from __future__ import annotations

import pytest
import torch

from lowering import OneNode, check

LAST = torch.channels_last


def reals(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 7), (2, 33, 4, 5), (1, 16, 9, 9), (2, 3, 2, 3, 5)])
@pytest.mark.parametrize("last", [False, True])
def test_moments(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    x = reals(*shape, dtype=dtype) + 3
    if last and len(shape) == 4:
        x = x.to(memory_format=LAST)
    check("Moments", x, axes=list(range(2, len(shape))))


def test_moments_far_from_zero() -> None:
    x = reals(2, 5, 16, 16) + 1e4
    squares = OneNode("Moments", x, axes=[2, 3]).run()[1].double()
    truth = x.double().var((2, 3), correction=0, keepdim=True) * 256
    assert ((squares - truth).abs() < 1e-5 * truth).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 1, 37), (3, 32, 1), (2, 2, 160)])
def test_numbers_of_groups(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    means, other = (reals(*shape, dtype=dtype, seed=k) for k in (0, 1))
    gamma = reals(1, *shape[1:], dtype=dtype, seed=2)
    check("GroupMoments", means, other.square(), gamma, points=20, epsilon=1e-5)
    rstd = reals(*shape[:2], 1, dtype=dtype, seed=3).abs() + 0.1
    check("GroupSums", means, other, rstd, gamma, points=20)
