"""Operators that stand for several, made by the patterns of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, broadcast_rule
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact

aten = torch.ops.aten


# ---- a sum and its root mean square norm ----


def _add_rms_norm_rule(op: Op) -> list[Fact]:
    """Norm, inverse root, and the sum."""
    shape, count = op.shape("x1"), len(op.shape("gamma"))
    dims = (*shape[: len(shape) - count], *[1] * count)
    wide = DataType.DT_DOUBLE if op.dtype("x1") == DataType.DT_DOUBLE else DataType.DT_FLOAT
    total = Fact(op.dtype("x1"), shape)
    return [total, Fact(wide, dims), total]


def _add_rms_norm(op: Op) -> Kernel:
    eps = op.attr("epsilon")

    def run(x1: Any, x2: Any, gamma: Any) -> tuple[torch.Tensor, ...]:
        x = x1 + x2
        return (*aten._fused_rms_norm(x, gamma.shape, gamma, eps), x)

    return run


add_row("AddRmsNorm", _add_rms_norm_rule, _add_rms_norm)


# ---- halves of one axis ----


def _halves(x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    return x.chunk(2, dim)


def _swiglu_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    dims[op.attr("dim")] = dims[op.attr("dim")] // 2
    return Fact(op.dtype("x"), tuple(dims))


def _swiglu(op: Op) -> Kernel:
    dim = op.attr("dim")

    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        gate, value = _halves(x, dim)
        return torch.mul(torch.nn.functional.silu(gate), value, out=out)

    return run


def _rotary(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, out: Any = None) -> torch.Tensor:
    first, second = _halves(x, -1)
    turned = torch.cat((-second, first), -1)
    return torch.add(x * r1, turned * r2, out=out)


add_row("SwiGlu", _swiglu_rule, _swiglu, out=True)
add_row("RotaryMul", broadcast_rule, lambda op: _rotary, out=True)


# ---- a product between transposes ----


def _permuted(dims: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [dims[k] for k in order] if order else list(dims)


def _transposed_product_rule(op: Op) -> Fact:
    batch, m, _ = _permuted(op.shape("x1"), op.attr("perm_x1"))
    n = _permuted(op.shape("x2"), op.attr("perm_x2"))[2]
    return Fact(op.dtype("x1"), tuple(_permuted((batch, m, n), op.attr("perm_y"))))


def _transposed_product(op: Op) -> Kernel:
    orders = [list(op.attr(f"perm_{p}") or range(3)) for p in ("x1", "x2", "y")]

    def run(x1: Any, x2: Any, bias: Any = None, scale: Any = None) -> torch.Tensor:
        if bias is not None or scale is not None:
            raise ValueError("bias and scale are not supported")
        return torch.bmm(x1.permute(orders[0]), x2.permute(orders[1])).permute(orders[2])

    return run


add_row("TransposeBatchMatMul", _transposed_product_rule, _transposed_product, Trait.CONTRACTION)
