"""Results of operators of the `npu` library, compared."""

from __future__ import annotations

from typing import Any

import torch


def copies(tensors: Any) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def assert_close(got: Any, expected: Any, rough: float, to_largest: bool = False) -> None:
    """With `to_largest` errors count against the largest result: those of sums that cancel out."""
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        if not isinstance(e, torch.Tensor):
            assert g == e
            continue
        assert g.shape == e.shape
        unit = max(1.0, float(e.double().abs().max())) if to_largest and e.numel() else 1.0
        torch.testing.assert_close(g.double(), e.double(), rtol=rough, atol=rough * unit)
