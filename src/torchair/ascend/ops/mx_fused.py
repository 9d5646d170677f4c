"""Gates and norms whose results are quantised by blocks with shared scales."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchair.ascend.ops import formats, mx
from torchair.ascend.ops.activation import rms_norm
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import NpuOperators, refuse, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()
PLAIN, CLIPPED = 0, 1
"""Values of `swiglu_mode`."""

_GATE = "npu_swiglu_mx_quant"


def _fake_gate(
    x: Any,
    *,
    group_index: Any = None,
    activate_dim: int = -1,
    axis: int = -1,
    dst_type: int = 296,
    round_mode: str = "rint",
    scale_alg: int = 0,
    **others: Any,
) -> Any:
    kind = mx.check_mx(_GATE, dst_type, round_mode, scale_alg)
    dims = list(x.shape)
    dims[activate_dim] = dims[activate_dim] // 2
    y = x.new_empty(formats.stored_dims(kind, dims), dtype=kind.stored)
    return y, x.new_empty(mx.scale_dims(dims, axis), dtype=torch.uint8)


def gated(
    x: Tensor, dim: int, left: bool, mode: int, limit: float, alpha: float, bias: float
) -> Tensor:
    """silu of one half times the other; clipped: of even features a and odd features b
    a * sigmoid(alpha * a) * (b + bias), both held at a limit."""
    if mode == PLAIN:
        first, second = x.chunk(2, dim)
        return F.silu(first) * second if left else F.silu(second) * first
    moved = x.movedim(dim, -1)
    a, b = moved[..., ::2].clamp(max=limit), moved[..., 1::2].clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).movedim(-1, dim)


@OPERATORS.add(
    f"{_GATE}(Tensor x, *, Tensor? group_index=None, int activate_dim=-1, "
    "bool activate_left=False, int swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, "
    "float glu_bias=1.0, int group_mode=0, int axis=-1, int dst_type=296, "
    'str round_mode="rint", int scale_alg=0, float max_dtype_value=0) -> (Tensor, Tensor)',
    _fake_gate,
    form=GeForm("SwigluMxQuant", types=("dst_type",)),
)
def swiglu_mx_quant(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    activate_dim: int = -1,
    activate_left: bool = False,
    swiglu_mode: int = PLAIN,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    group_mode: int = 0,
    axis: int = -1,
    dst_type: int = 296,
    round_mode: str = "rint",
    scale_alg: int = 0,
    max_dtype_value: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """A gate, quantised by blocks along a dim. With `group_index` (rows of each group) rows behind
    the last group are zeros."""
    kind = mx.check_mx(_GATE, dst_type, round_mode, scale_alg)
    if swiglu_mode not in (PLAIN, CLIPPED):
        raise wrong(_GATE, "swiglu_mode", f"is {swiglu_mode}; known are 0 and 1")
    if group_index is not None and axis not in (-1, x.dim() - 1):
        raise refuse(_GATE, "group_index", "is supported with blocks along the last dim only")
    if group_mode:
        raise refuse(_GATE, "group_mode", f"{group_mode} is not 0")
    how = activate_dim, activate_left, swiglu_mode, clamp_limit, glu_alpha, glu_bias
    values = gated(x.to(wide(x.dtype)), *how).to(x.dtype)
    if group_index is not None:
        rows = torch.arange(values.shape[0], device=x.device) < group_index.sum()
        rows = rows.view(-1, *[1] * (values.dim() - 1))
        values = torch.where(rows, values, torch.zeros_like(values))
    return mx.mx_quant(values, kind, axis, round_mode, scale_alg, max_dtype_value)


def _fake_norm(
    x: Any,
    gamma: Any,
    *,
    dst_type: int = 296,
    round_mode: str = "rint",
    scale_alg: int = 0,
    **others: Any,
) -> Any:
    kind = mx.check_mx("npu_rms_norm_dynamic_mx_quant", dst_type, round_mode, scale_alg)
    y = x.new_empty(formats.stored_dims(kind, x.shape), dtype=kind.stored)
    scales = x.new_empty(mx.scale_dims(x.shape), dtype=torch.uint8)
    dims = [*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()]
    return y, scales, x.new_empty(dims, dtype=torch.float32)


_OPTIONS = (
    "Tensor? beta=None, float epsilon=1e-06, int scale_alg=0, "
    'str round_mode="rint", int dst_type=296'
)


@OPERATORS.add(
    f"npu_rms_norm_dynamic_mx_quant(Tensor x, Tensor gamma, *, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_norm,
    form=GeForm("RmsNormDynamicMxQuant", types=("dst_type",), fixed={"output_rstd": True}),
)
def norm_mx_quant(
    x: Tensor,
    gamma: Tensor,
    *,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[Tensor, Tensor, Tensor]:
    """A root mean square norm, quantised along the last dim; and one over the root."""
    kind = mx.check_mx("npu_rms_norm_dynamic_mx_quant", dst_type, round_mode, scale_alg)
    normed, rstd = rms_norm(x.to(wide(x.dtype)), gamma, epsilon)
    normed = normed if beta is None else normed + beta.to(normed.dtype)
    return *mx.mx_quant(normed, kind, -1, round_mode, scale_alg), rstd.to(torch.float32)


def _fake_add_norm(x1: Any, x2: Any, gamma: Any, **options: Any) -> Any:
    y, scales, rstd = _fake_norm(x1, gamma, **options)
    return y, x1.new_empty(x1.shape), scales, rstd


@OPERATORS.add(
    f"npu_add_rms_norm_dynamic_mx_quant(Tensor x1, Tensor x2, Tensor gamma, *, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_add_norm,
    form=GeForm("AddRmsNormDynamicMxQuant", types=("dst_type",), fixed={"output_rstd": True}),
)
def _add_norm_mx_quant(
    x1: Tensor, x2: Tensor, gamma: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of a sum, which is the second result."""
    total = x1 + x2
    y, scales, rstd = norm_mx_quant(total, gamma, **options)
    return y, total, scales, rstd
