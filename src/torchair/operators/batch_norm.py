"""Batch normalisation in training in parts, for processors on which all threads together sum up the
channels: statistics or sums first, then a map over elements that fuses with what is around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.codegen.loops import Expr, Index
from torchair.codegen.sizes import FLOATS
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import Op, TorchKernel, native, same_as
from torchair.operators.loops import Lowered, LowerOp, elementwise
from torchair.operators.norm import but_channels, by_channel, corrected, inverse_root

_FLOAT = DataType.DT_FLOAT


def _channels(op: Op, port: str) -> tuple[Any, ...]:
    return (op.shape(port)[1],)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the type that torch's kernels compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _shaped(x: torch.Tensor, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Vectors over channels as tensors that are broadcast against data."""
    dims = [1, -1, *[1] * (x.dim() - 2)]
    return [_wide(v).reshape(dims) for v in vectors]


def _around(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


# ---- forward ----


def _statistics_rule(op: Op) -> list[Fact]:
    return [Fact(_FLOAT, _channels(op, "x"))] * 4


def _statistics_kernel(op: Op) -> TorchKernel:
    eps = op.attr("epsilon")

    def run(x: Any, weight: Any) -> tuple[torch.Tensor, ...]:
        variance, mean = torch.var_mean(_wide(x), _around(x), correction=0)
        rstd = (variance + eps).rsqrt()
        n = x.numel() // x.shape[1]
        unbiased = variance * (n / (n - 1) if n > 1 else float("nan"))
        return mean, rstd, _wide(weight) * rstd, unbiased

    return run


def _middle(x: Lowered) -> Lowered:
    """A number near the mean of each channel: the median of three elements. Deviations from it are
    summed up, and their squares, in one pass; by how much it misses the mean costs digits of the
    variance, and of three elements two would have to be far off."""

    def element(place: Sequence[Index]) -> Expr:
        def at(part: Any) -> Expr:
            return x.at([place[d] if d == 1 else part(n) for d, n in enumerate(x.shape)])

        first = at(lambda n: Index())
        between, last = at(lambda n: Index((), n // 2)), at(lambda n: Index((), n - 1))
        low, high = f.least(first, between), f.most(first, between)
        return f.most(low, f.least(high, last))

    return Lowered([n if d == 1 else 1 for d, n in enumerate(x.shape)], x.dtype, element)


@native(
    "BatchNormStatistics",
    _statistics_rule,
    _statistics_kernel,
    kind="reduce",
    domain="x",
    reduces=but_channels,
    ends=True,
    types=FLOATS,
)
def batch_norm_statistics(o: LowerOp) -> list[Lowered]:
    """Of each channel the mean, one over the deviation, this times the weight, and the variance
    that the running one follows."""
    x, axes = o.tensor("x"), but_channels(o)
    n, near = f.count(x, axes), _middle(x)
    offsets = elementwise(f.sub, x, near)
    total = o.reduce("sum", offsets, axes)
    squares = o.reduce("sum", elementwise(f.square, offsets), axes)
    left = f.divided(total, n)
    excess = elementwise(f.mul, total, left)
    deviations = corrected(squares, excess)
    mean = elementwise(f.add, near, left)
    rstd = elementwise(inverse_root(o.attr("epsilon")), f.divided(deviations, n))
    scale = elementwise(f.mul, rstd, by_channel(o.tensor("weight"), x.rank))
    variance = f.divided(deviations, n - 1)
    return [f.typed(f.dropped(t, axes), "f32") for t in (mean, rstd, scale, variance)]


def _scaled(x: Any, *vectors: Any) -> torch.Tensor:
    mean, scale, bias = _shaped(x, vectors)
    return ((_wide(x) - mean) * scale + bias).to(x.dtype)


@native("BatchNormScale", same_as("x"), lambda op: _scaled, types=FLOATS)
def batch_norm_scale(o: LowerOp) -> Lowered:
    """Elements less the mean of their channel, times its scale, plus its bias."""
    x = o.tensor("x")
    vectors = (by_channel(o.tensor(p), x.rank) for p in ("mean", "scale", "bias"))

    def element(e: Expr, mean: Expr, scale: Expr, bias: Expr) -> Expr:
        return f.add(f.mul(f.sub(e, mean), scale), bias)

    return f.typed(elementwise(element, x, *vectors), o.out_dtype())


# ---- backward ----


def _sums_rule(op: Op) -> list[Fact]:
    dims = _channels(op, "x")
    return [*[Fact(op.dtype("weight"), dims)] * 2, *[Fact(_FLOAT, dims)] * 3]


def _sums_kernel(op: Op) -> TorchKernel:
    def run(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> tuple[torch.Tensor, ...]:
        middle, root = _shaped(x, (mean, rstd))
        grad, axes, n = _wide(dy), _around(x), x.numel() // x.shape[1]
        total, along = grad.sum(axes), (grad * ((_wide(x) - middle) * root)).sum(axes)
        rstd = _wide(rstd)
        scale = _wide(weight) * rstd
        slope, level = scale * rstd * (along / n), scale * (total / n)
        return along.to(weight.dtype), total.to(weight.dtype), scale, slope, level

    return run


@native(
    "BatchNormSums",
    _sums_rule,
    _sums_kernel,
    kind="reduce",
    domain="dy",
    reduces=lambda op: but_channels(op, "dy"),
    ends=True,
    types=FLOATS,
)
def batch_norm_sums(o: LowerOp) -> list[Lowered]:
    """Gradients of weight and bias, and three numbers for each channel that the gradient of an
    element follows from."""
    dy, x, axes = o.tensor("dy"), o.tensor("x"), but_channels(o)
    weight, mean, rstd = (by_channel(o.tensor(p), x.rank) for p in ("weight", "mean", "rstd"))
    n = f.count(x, axes)
    total = o.reduce("sum", dy, axes)
    offsets = elementwise(f.mul, dy, elementwise(f.sub, x, mean))
    along = elementwise(f.mul, o.reduce("sum", offsets, axes), rstd)
    scale = elementwise(f.mul, weight, rstd)
    slope = elementwise(f.mul, elementwise(f.mul, scale, rstd), f.divided(along, n))
    level = elementwise(f.mul, scale, f.divided(total, n))
    found = (f.dropped(t, axes) for t in (along, total, scale, slope, level))
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(found)]


def _gradient(dy: Any, x: Any, *vectors: Any) -> torch.Tensor:
    mean, scale, slope, level = _shaped(x, vectors)
    return (_wide(dy) * scale - (_wide(x) - mean) * slope - level).to(x.dtype)


@native("BatchNormInputGrad", same_as("x"), lambda op: _gradient, types=FLOATS)
def batch_norm_input_grad(o: LowerOp) -> Lowered:
    """The gradient of the elements, which is a map once the sums are known."""
    dy, x = o.tensor("dy"), o.tensor("x")
    ports = ("mean", "scale", "slope", "level")
    vectors = (by_channel(o.tensor(p), x.rank) for p in ports)

    def element(g: Expr, e: Expr, mean: Expr, scale: Expr, slope: Expr, level: Expr) -> Expr:
        return f.sub(f.sub(f.mul(g, scale), f.mul(f.sub(e, mean), slope)), level)

    return f.typed(elementwise(element, dy, x, *vectors), o.out_dtype())
