"""Parts of a group norm and its gradient: sums over the points of each channel, and what of each
group follows from them. Numbers of groups have the dims [images, groups, channels of a group]."""

from __future__ import annotations

from typing import Any

import torch

from torchair.codegen.sizes import FLOATS
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import Op, TorchKernel, native
from torchair.operators.loops import Lowered, LowerOp, elementwise
from torchair.operators.norm import corrected_moments, inverse_root

_IN_GROUP = (2,)


def _wide(dtype: int) -> int:
    return dtype if dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT


def _group_size(o: Op, port: str) -> Any:
    """Elements of a group."""
    return o.attr("points") * o.shape(port)[2]


# ---- forward ----


def _moments_rule(op: Op) -> list[Fact]:
    axes = op.attr("axes")
    dims = tuple(1 if d in axes else n for d, n in enumerate(op.shape("x")))
    return [Fact(_wide(op.dtype("x")), dims)] * 2


def _moments_kernel(op: Op) -> TorchKernel:
    axes = op.attr("axes")

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = x.mean(axes, keepdim=True)
        return mean, (x - mean).square().sum(axes, keepdim=True)

    return run


@native(
    "Moments",
    _moments_rule,
    _moments_kernel,
    kind="reduce",
    domain="x",
    reduces=lambda op: tuple(op.attr("axes")),
    types=FLOATS,
)
def moments(o: LowerOp) -> list[Lowered]:
    """The mean over dims, and the sum of squared deviations from it."""
    results = corrected_moments(o, o.tensor("x"), tuple(o.attr("axes")))
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(results)]


def _groups_rule(op: Op) -> list[Fact]:
    dtype, dims = op.dtype("means"), op.shape("means")
    return [*[Fact(dtype, dims[:2])] * 2, *[Fact(dtype, dims)] * 2]


def _groups_kernel(op: Op) -> TorchKernel:
    points, eps, size = op.attr("points"), op.attr("epsilon"), _group_size(op, "means")

    def run(means: Any, squares: Any, gamma: Any) -> tuple[torch.Tensor, ...]:
        mean = means.mean(2, keepdim=True)
        between = (means - mean).square().sum(2, keepdim=True) * points
        rstd = ((squares.sum(2, keepdim=True) + between) / size + eps).rsqrt()
        shift = mean.expand(means.shape).clone()
        return mean.squeeze(2), rstd.squeeze(2), shift, rstd * gamma

    return run


@native(
    "GroupMoments",
    _groups_rule,
    _groups_kernel,
    kind="reduce",
    domain="means",
    reduces=lambda op: _IN_GROUP,
    types=FLOATS,
)
def group_moments(o: LowerOp) -> list[Lowered]:
    """From means of channels and squared deviations from them the mean of each group and one over
    the deviation; and for each channel what is to be taken off, and a factor."""
    means = o.tensor("means")
    mean, between = corrected_moments(o, means, _IN_GROUP)
    inside = o.reduce("sum", o.tensor("squares"), _IN_GROUP)
    points = float(o.attr("points"))
    whole = elementwise(lambda i, b: f.add(i, f.mul(b, points)), inside, between)
    variance = f.divided(whole, _group_size(o, "means"))
    rstd = elementwise(inverse_root(o.attr("epsilon")), variance)
    shift = elementwise(lambda m, _: m, mean, means)
    scale = elementwise(f.mul, rstd, o.tensor("gamma"))
    found = (*(f.dropped(t, _IN_GROUP) for t in (mean, rstd)), shift, scale)
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(found)]


# ---- backward ----


def _sums_rule(op: Op) -> list[Fact]:
    return [Fact(op.dtype("total"), op.shape("total"))] * 4


def _sums_kernel(op: Op) -> TorchKernel:
    size = _group_size(op, "total")

    def run(total: Any, along: Any, rstd: Any, gamma: Any) -> tuple[torch.Tensor, ...]:
        dgamma = along * rstd
        slope = (dgamma * gamma).sum(2, keepdim=True) / size * rstd * rstd
        level = (total * gamma).sum(2, keepdim=True) / size * rstd
        whole = total.shape
        return dgamma, rstd * gamma, slope.expand(whole).clone(), level.expand(whole).clone()

    return run


@native(
    "GroupSums",
    _sums_rule,
    _sums_kernel,
    kind="reduce",
    domain="total",
    reduces=lambda op: _IN_GROUP,
    types=FLOATS,
)
def group_sums(o: LowerOp) -> list[Lowered]:
    """From sums over the points of each channel, of the gradient and of its products with offsets
    from the mean: what an image adds to the gradient of gamma, and three numbers for each channel
    that the gradient of an element follows from."""
    total, rstd, gamma = (o.tensor(p) for p in ("total", "rstd", "gamma"))
    size = _group_size(o, "total")
    dgamma = elementwise(f.mul, o.tensor("along"), rstd)
    slope, level = (
        f.divided(o.reduce("sum", elementwise(f.mul, t, gamma), _IN_GROUP), size)
        for t in (dgamma, total)
    )
    level = elementwise(lambda n, r, _: f.mul(n, r), level, rstd, total)
    slope = elementwise(lambda n, r, _: f.mul(f.mul(n, r), r), slope, rstd, total)
    scale = elementwise(f.mul, rstd, gamma)
    found = (dgamma, elementwise(lambda s, _: s, scale, total), slope, level)
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(found)]
