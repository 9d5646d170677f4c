"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, fixed
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym, broadcast


def matmul_shape(a: Shape, b: Shape, swap_a: bool, swap_b: bool) -> Shape:
    """Dims of a (batched) matrix product, operands optionally transposed."""
    m, k = (a[-1], a[-2]) if swap_a else (a[-2], a[-1])
    k2, n = (b[-1], b[-2]) if swap_b else (b[-2], b[-1])
    if not isinstance(k, Sym) and not isinstance(k2, Sym) and k != k2:
        raise ValueError(f"inner sizes {k} and {k2} of a matrix product differ")
    batch: tuple[Dim, ...] = broadcast(a[:-2], b[:-2])
    return (*batch, m, n)


def _rule(swap1: str, swap2: str) -> Callable[[Op], Fact]:
    def rule(op: Op) -> Fact:
        dims = matmul_shape(op.shape("x1"), op.shape("x2"), op.attr(swap1), op.attr(swap2))
        return Fact(op.dtype("x1"), dims)

    return rule


def _kernel(swap1: str, swap2: str) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        flip1, flip2 = op.attr(swap1), op.attr(swap2)
        bias = op.get("bias")
        row = bias is None or len(bias.shape or ()) == 1
        flat = len(op.shape("x1")) == len(op.shape("x2")) == 2
        if flat and row and flip2 and not flip1:
            return _linear
        return _general(flip1, flip2)

    return make


def _linear(x1: Any, x2: Any, bias: Any = None, offset: Any = None, out: Any = None) -> Any:
    """The layout of nn.Linear has a call of its own, cheaper than a transpose and a product."""
    return torch._C._nn.linear(x1, x2, bias, out=out)  # type: ignore[call-arg]


def _general(flip1: bool, flip2: bool) -> Kernel:
    def run(x1: Any, x2: Any, bias: Any = None, offset: Any = None, out: Any = None) -> Any:
        a = x1.mT if flip1 else x1
        b = x2.mT if flip2 else x2
        if bias is None:
            return torch.matmul(a, b, out=out)
        if a.dim() == 2 and b.dim() == 2:
            return torch.addmm(bias, a, b, out=out)
        return torch.add(torch.matmul(a, b), bias, out=out)

    return run


for _type, _a, _b in (
    ("MatMul", "transpose_x1", "transpose_x2"),
    ("MatMulV2", "transpose_x1", "transpose_x2"),
    ("BatchMatMul", "adj_x1", "adj_x2"),
    ("BatchMatMulV2", "adj_x1", "adj_x2"),
):
    add_row(_type, _rule(_a, _b), _kernel(_a, _b), Trait.CONTRACTION, out=True)
add_row(
    "Dot", lambda op: Fact(op.dtype("input_x"), ()), fixed(torch.dot), Trait.CONTRACTION, out=True
)
