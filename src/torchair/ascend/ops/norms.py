"""Norms joined with what stands around them: additions, gates, casts and quantisation; sums for
batch norms over several processes."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops.activation import add_rms_norm, rms_norm
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    INT4_IN_INT32,
    NpuOperators,
    known_type,
    like,
    pack_int4,
    refuse,
    rounded,
    wide,
    wrong,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()

NARROW = (torch.int8, torch.quint4x2, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that norms and gates quantise to; four-bit integers are packed into int32."""
_FOUR_BITS = (-8, 7)


def narrow_type(operator: str, argument: str, code: int | torch.dtype | None) -> torch.dtype:
    """The type of quantised results, int8 if none is given."""
    return torch.int8 if code is None else known_type(operator, argument, code, NARROW)


def narrowed(x: Tensor, kind: torch.dtype) -> Tensor:
    """Values as the nearest ones of a narrow type."""
    if kind == torch.quint4x2:
        return pack_int4(x.round().clamp(*_FOUR_BITS))
    return rounded(x, kind)


def largest(kind: torch.dtype) -> float:
    """The largest value that a scale maps to."""
    if kind == torch.quint4x2:
        return float(_FOUR_BITS[1])
    return torch.finfo(kind).max if kind.is_floating_point else float(torch.iinfo(kind).max)


def empty_narrow(x: Tensor, dims: Any, kind: torch.dtype) -> Tensor:
    """A quantised result without data."""
    if kind != torch.quint4x2:
        return x.new_empty(dims, dtype=kind)
    return x.new_empty([*dims[:-1], dims[-1] // INT4_IN_INT32], dtype=torch.int32)


def by_rows(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows over the largest of each, and these scales; a row of zeros has the scale 1."""
    scale = x.abs().amax(-1, keepdim=True) / largest(kind)
    scale = torch.where(scale > 0, scale, 1.0)
    return narrowed(x / scale, kind), scale.squeeze(-1)


def _statistic(x: Tensor, gamma: Tensor) -> Tensor:
    dims = [*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()]
    return x.new_empty(dims, dtype=wide(x.dtype))


# ---- root mean square norms ----


@OPERATORS.add(
    "npu_gemma_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    lambda x, gamma, *epsilon: (like(0)(x), _statistic(x, gamma)),
)
def gemma_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`rms_norm` with factors 1 + gamma."""
    return rms_norm(self, gamma.to(wide(self.dtype)) + 1, epsilon)


@OPERATORS.add(
    "npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda x1, x2, gamma, *epsilon: (
        x1.new_empty(x1.shape, dtype=wide(x1.dtype)),
        like(0)(x1),
        _statistic(x1, gamma),
        like(0)(x1),
    ),
    form=GeForm("AddRmsNormCast"),
)
def add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of a sum in float32 and in its own type, the inverse root, and the sum."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return y.to(rstd.dtype), y, rstd, total


@OPERATORS.add(
    "npu_add_rms_norm_v2(Tensor(a!) x1, Tensor(b!) x2, Tensor gamma, float epsilon=1e-06) "
    "-> Tensor",
    lambda x1, x2, gamma, *epsilon: _statistic(x1, gamma),
)
def add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The norm of the sum is written to `x1` and the sum to `x2`; returns the inverse root."""
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(total)
    return rstd


@OPERATORS.add(
    "npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x1, x2, gamma, *epsilon: (_statistic(x1, gamma), like(0)(x1), like(0)(x1)),
    form=GeForm("AddRmsNorm", copied=("x1", "x2"), results=("rstd", "y", "x")),
)
def _add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, total


# ---- root mean square norms, quantised ----


def _wide_norm(x: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float) -> Tensor:
    values = x.to(wide(x.dtype))
    y = rms_norm(values, gamma.to(values.dtype), epsilon)[0]
    return y if beta is None else y + beta.to(y.dtype)


def _fake_norm_quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, *given: Any, dst_type: int | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    kind = narrow_type("npu_add_rms_norm_quant", "dst_type", dst_type)
    second = given[3] if len(given) > 3 else None
    y = empty_narrow(x1, x1.shape, kind)
    return y, (y.new_empty(0) if second is None else y.new_empty(y.shape)), like(0)(x1)


@OPERATORS.add(
    "npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, "
    "Tensor? zero_points1, Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, "
    "int axis=-1, float epsilon=1e-06, bool div_mode=True, int? dst_type=None) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_norm_quant,
)
def add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a sum, quantised with one or two sets of scales, and the sum. Without second
    scales the second result is empty."""
    name = "npu_add_rms_norm_quant"
    if axis != -1:
        raise refuse(name, "axis", f"is {axis}, known is -1")
    kind, total = narrow_type(name, "dst_type", dst_type), x1 + x2
    y = _wide_norm(total, gamma, beta, epsilon)
    empty = y.new_empty(0, dtype=torch.int32 if kind == torch.quint4x2 else kind)
    made = [
        empty.clone() if scales is None else narrowed(_scaled(y, scales, zero, div_mode), kind)
        for scales, zero in ((scales1, zero_points1), (scales2, zero_points2))
    ]
    return made[0], made[1], total


def _scaled(x: Tensor, scales: Tensor, zero: Tensor | None, divides: bool) -> Tensor:
    factors = scales.to(x.dtype)
    values = x / factors if divides else x * factors
    return values if zero is None else values + zero.to(x.dtype)


@OPERATORS.add(
    "npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, "
    "float epsilon=1e-06, *, int? dst_dtype=None) -> Tensor",
    lambda x, *given, dst_dtype=None: empty_narrow(
        x, x.shape, narrow_type("npu_rms_norm_quant", "dst_dtype", dst_dtype)
    ),
)
def rms_norm_quant(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor,
    offset: Tensor,
    epsilon: float = 1e-6,
    *,
    dst_dtype: int | None = None,
) -> Tensor:
    """The norm times gamma plus beta, times a scale plus an offset, rounded."""
    kind = narrow_type("npu_rms_norm_quant", "dst_dtype", dst_dtype)
    y = _wide_norm(x, gamma.reshape(-1), beta.reshape(-1), epsilon)
    return narrowed(_scaled(y, scale, offset, divides=False), kind)


def dynamic_branches(smooth_scale1: Any, smooth_scale2: Any, output_mask: Any) -> tuple[bool, bool]:
    """Which of the two quantised results are wanted."""
    if not output_mask:
        return True, smooth_scale1 is not None and smooth_scale2 is not None
    if not any(output_mask):
        raise wrong("npu_add_rms_norm_dynamic_quant", "output_mask", "no result is wanted")
    return bool(output_mask[0]), bool(output_mask[1])


def _fake_dynamic(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Any = None,
    smooth_scale2: Any = None,
    output_mask: Any = None,
    y_dtype: int | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    kind = narrow_type("npu_add_rms_norm_dynamic_quant", "y_dtype", y_dtype)
    wanted = dynamic_branches(smooth_scale1, smooth_scale2, output_mask)
    full = empty_narrow(x1, x1.shape, kind)
    ys = [full.new_empty(full.shape if w else (0,)) for w in wanted]
    scales = [x1.new_empty(x1.shape[:-1] if w else (0,), dtype=torch.float32) for w in wanted]
    return *ys, like(0)(x1), *scales


@OPERATORS.add(
    "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, "
    "Tensor? smooth_scale1=None, Tensor? smooth_scale2=None, Tensor? beta=None, "
    "float epsilon=1e-6, bool[2]? output_mask=None, int? y_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_dynamic,
    form=GeForm("AddRmsNormDynamicQuant"),
)
def add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Any = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, ...]:
    """The norm of a sum, times smooth scales, quantised by rows in one or two forms; the sum; the
    scales. Results that are not wanted are empty."""
    kind = narrow_type("npu_add_rms_norm_dynamic_quant", "y_dtype", y_dtype)
    total = x1 + x2
    y = _wide_norm(total, gamma, beta, epsilon)
    empty = empty_narrow(y, (0,), kind), y.new_empty(0, dtype=torch.float32)
    made = [empty, empty]
    smooths = (smooth_scale1, smooth_scale2)
    for k, wanted in enumerate(dynamic_branches(*smooths, output_mask)):
        smooth = smooths[k]
        if wanted:
            values, scale = by_rows(y if smooth is None else y * smooth.to(y.dtype), kind)
            made[k] = values, scale.to(torch.float32)
    return made[0][0], made[1][0], total, made[0][1], made[1][1]


# ---- layer norms ----


def _layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The norm of values in the type of sums, their mean, and the inverse deviation."""
    dims = [*range(-gamma.dim(), 0)]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return centred * rstd * gamma.to(x.dtype) + beta.to(x.dtype), mean, rstd


@OPERATORS.add(
    "npu_add_layer_norm(Tensor x1, Tensor x2, Tensor gamma, Tensor beta, float epsilon=1e-05, "
    "bool additional_output=False) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x1, x2, gamma, *rest: (
        like(0)(x1),
        _statistic(x1, gamma),
        _statistic(x1, gamma),
        like(0)(x1),
    ),
)
def add_layer_norm(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer norm of a sum, mean, inverse deviation, and the sum, which is there whether or not
    the additional output is asked for."""
    total = x1.to(wide(x1.dtype)) + x2.to(wide(x1.dtype))
    y, mean, rstd = _layer_norm(total, gamma, beta, epsilon)
    return y.to(x1.dtype), mean, rstd, total.to(x1.dtype)


@OPERATORS.add(
    "npu_deep_norm(Tensor x, Tensor gx, Tensor beta, Tensor gamma, float alpha=0.3, "
    "float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    lambda x, gx, beta, gamma, *rest: (_statistic(x, gamma), _statistic(x, gamma), like(0)(x)),
)
def deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, inverse deviation and layer norm of alpha * x + gx."""
    total = x.to(wide(x.dtype)) * alpha + gx.to(wide(x.dtype))
    y, mean, rstd = _layer_norm(total, gamma, beta, epsilon)
    return mean, rstd, y.to(x.dtype)


# ---- group norm and gate ----


def _fake_group_norm(x: Tensor, weight: Any, bias: Any, group: int, *eps: float) -> Any:
    kind = x.dtype if weight is None or bias is None else weight.dtype
    statistics = [x.new_empty((x.shape[0], group), dtype=kind) for _ in range(2)]
    return like(0)(x), *statistics


@OPERATORS.add(
    "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, "
    "float eps=0.00001) -> (Tensor, Tensor, Tensor)",
    _fake_group_norm,
    form=GeForm(
        "GroupNormSilu", {"x": "input", "gamma": "weight", "beta": "bias", "num_groups": "group"}
    ),
)
def group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """silu of the group norm, the means of the groups, and their inverse deviations."""
    if input.shape[1] % group:
        reason = f"is {group}, which does not divide {input.shape[1]} channels"
        raise wrong("npu_group_norm_silu", "group", reason)
    kind = wide(input.dtype)
    groups = input.to(kind).reshape(input.shape[0], group, -1)
    mean = groups.mean(-1, keepdim=True)
    centred = groups - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = (centred * rstd).reshape(input.shape)
    channels = [1, input.shape[1], *[1] * (input.dim() - 2)]
    y = y if weight is None else y * weight.to(kind).view(channels)
    y = y if bias is None else y + bias.to(kind).view(channels)
    stored = input.dtype if weight is None or bias is None else weight.dtype
    statistics = mean.squeeze(-1).to(stored), rstd.squeeze(-1).to(stored)
    return torch.nn.functional.silu(y).to(input.dtype), *statistics


# ---- batch norms whose batch lies in several processes ----


@OPERATORS.add(
    "batch_norm_reduce(Tensor input, float eps) -> (Tensor, Tensor)",
    lambda x, eps: tuple(x.new_empty((x.shape[1],), dtype=wide(x.dtype)) for _ in range(2)),
    form=GeForm("BNTrainingReduce", {"x": "input"}, unused=("eps",)),
)
def batch_norm_reduce(input: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sums of the elements and of their squares, for each channel."""
    values = input.to(wide(input.dtype))
    others = [d for d in range(input.dim()) if d != 1]
    return values.sum(others), values.square().sum(others)


def _fake_gathered(input: Any, mean: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return mean.new_empty((mean.shape[-1],)), mean.new_empty((mean.shape[-1],))


def batch_norm_gather_stats_update(
    input: Any,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of all processes from the sums of each: `mean` are sums of
    elements, `invstd` sums of squares, one row for each process. Running statistics are updated in
    place, which the schema does not say; nothing of `input` is read."""
    kind = wide(mean.dtype)
    total = counts.to(kind).sum()
    middle = mean.to(kind).sum(0) / total
    variance = invstd.to(kind).sum(0) / total - middle.square()
    for running, new in ((running_mean, middle), (running_var, variance)):
        if running is not None:
            running.copy_(running.to(kind) * (1 - momentum) + new * momentum)
    return middle.to(mean.dtype), torch.rsqrt(variance + eps).to(mean.dtype)


OPERATORS.add(
    "batch_norm_gather_stats_update(Tensor input, Tensor mean, Tensor invstd, "
    "Tensor? running_mean, Tensor? running_var, float momentum, float eps, Tensor counts) "
    "-> (Tensor, Tensor)",
    _fake_gathered,
    form=GeForm(
        "SyncBatchNormGatherStats",
        {
            "total_sum": "mean",
            "total_square_sum": "invstd",
            "sample_count": "counts",
            "mean": "running_mean",
            "variance": "running_var",
        },
        unused=("input",),
        casts={"counts": "INT32"},
        assigned=("running_mean", "running_var"),
        results=("batch_mean", "batch_invstd"),
    ),
)(batch_norm_gather_stats_update)
