"""Activations: gelu in its forms, gated halves of one dim, and both with quantised results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    Gradient,
    NpuOperators,
    known_type,
    like,
    refuse,
    wide,
    wrong,
)
from torchair.ascend.ops.norms import by_rows, empty_narrow, largest, narrow_type, narrowed

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_gelu: Any = torch.nn.functional.gelu
FAST = 1.702
"""The factor of the argument in the fast form of gelu."""


# ---- of each element ----


def fast_gelu(self: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    x = self.to(wide(self.dtype))
    return (x * torch.sigmoid(FAST * x)).to(self.dtype)


@OPERATORS.add(
    "npu_fast_gelu_backward(Tensor grad, Tensor self) -> Tensor",
    like(1),
    form=GeForm("FastGeluGrad", {"dy": "grad", "x": "self"}),
)
def fast_gelu_backward(grad: Tensor, self: Tensor) -> Tensor:
    """The gradient of `fast_gelu`."""
    x = self.to(wide(self.dtype))
    gate = torch.sigmoid(FAST * x)
    return (grad.to(x.dtype) * gate * (1 + FAST * x * (1 - gate))).to(self.dtype)


def _keep_first(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _fast_gradient(ctx: Any, grad: Tensor) -> Tensor:
    found: Tensor = torch.ops.npu.npu_fast_gelu_backward(grad, *ctx.saved_tensors)
    return found


for _name in ("npu_fast_gelu", "fast_gelu"):
    OPERATORS.add(
        f"{_name}(Tensor self) -> Tensor",
        like(0),
        Gradient(_keep_first, _fast_gradient),
        form=GeForm("FastGelu", {"x": "self"}),
    )(fast_gelu)


def _check_gelu(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise wrong("npu_gelu", "approximate", f"is {approximate!r}, known are 'none' and 'tanh'")


@OPERATORS.add(
    "npu_gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor",
    lambda grad, x, **options: like(0)(x),
    form=GeForm("GeluGradV2", {"dy": "grad_output", "x": "self"}),
)
def gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`."""
    _check_gelu(approximate)
    x = self.to(wide(self.dtype))
    found = torch.ops.aten.gelu_backward(grad_output.to(x.dtype), x, approximate=approximate)
    return found.to(self.dtype)


def _keep_gelu(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.approximate = keyword_only_inputs["approximate"]


def _gelu_gradient(ctx: Any, grad: Tensor) -> Tensor:
    found: Tensor = torch.ops.npu.npu_gelu_backward(
        grad, *ctx.saved_tensors, approximate=ctx.approximate
    )
    return found


@OPERATORS.add(
    "npu_gelu(Tensor self, *, str approximate='none') -> Tensor",
    lambda x, **options: like(0)(x),
    Gradient(_keep_gelu, _gelu_gradient),
    form=GeForm("GeluV2", {"x": "self"}),
)
def gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution function at x, or its approximation with tanh."""
    _check_gelu(approximate)
    found: Tensor = _gelu(self, approximate=approximate)
    return found


def _silu(self: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return torch.nn.functional.silu(self)


def _silu_(self: Tensor) -> Tensor:
    return self.copy_(_silu(self))


OPERATORS.add("npu_silu(Tensor self) -> Tensor", like(0), form=GeForm("Swish", {"x": "self"}))(
    _silu
)
OPERATORS.add("npu_silu_(Tensor(a!) self) -> Tensor(a!)", lambda x: x, pure="npu_silu")(_silu_)


# ---- halves of one dim ----


def _halved(operator: str, x: Tensor, dim: int) -> list[Any]:
    if x.shape[dim] % 2:
        raise wrong(operator, "x", f"dim {dim} of size {x.shape[dim]} has no two halves")
    dims = list(x.shape)
    dims[dim] //= 2
    return dims


def _two_halves(x: Tensor, dim: int = -1, *rest: Any) -> tuple[Tensor, Tensor]:
    dims = _halved("npu_geglu", x, dim)
    return x.new_empty(dims), x.new_empty(dims)


@OPERATORS.add(
    "npu_geglu(Tensor self, int dim=-1, int approximate=1, bool activate_left=False) "
    "-> (Tensor, Tensor)",
    _two_halves,
    form=GeForm("GeGluV2", {"x": "self"}),
)
def geglu(
    self: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    """One half through gelu times the other one, and the gelu; the right half is activated, or the
    left one."""
    _halved("npu_geglu", self, dim)
    left, right = (half.to(wide(self.dtype)) for half in self.chunk(2, dim))
    chosen, other = (left, right) if activate_left else (right, left)
    gate = _gelu(chosen, approximate="tanh" if approximate else "none")
    return (gate * other).to(self.dtype), gate.to(self.dtype)


def clipped(glu: Tensor, linear: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
    """glu * sigmoid(alpha glu) * (linear + bias), both held at a limit."""
    glu, linear = glu.clamp(max=limit), linear.clamp(-limit, limit)
    return glu * torch.sigmoid(alpha * glu) * (linear + bias)


@OPERATORS.add(
    "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, "
    "float limit=7.0, float bias=1.0, bool interleaved=True) -> Tensor",
    lambda x, *, dim=-1, **options: x.new_empty(_halved("npu_clipped_swiglu", x, dim)),
    form=GeForm("ClippedSwiglu"),
)
def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """`clipped` of even and odd elements, or of halves, counted over all dims from `dim` on. Rows
    behind the groups are zero."""
    dims = _halved("npu_clipped_swiglu", x, dim)
    dim = dim % x.dim()
    rows, width = x.shape[:dim].numel(), x.shape[dim:].numel()
    values = x.reshape(rows, width).to(wide(x.dtype))
    glu, linear = (values[:, ::2], values[:, 1::2]) if interleaved else values.chunk(2, -1)
    y = clipped(glu, linear, alpha, limit, bias)
    if group_index is not None:
        used = torch.arange(rows, device=x.device) < group_index.sum()
        y = torch.where(used[:, None], y, 0.0)
    return y.to(x.dtype).reshape(dims)


# ---- with quantised results ----

_ROUNDING = {None: "rint"} | dict(enumerate(("rint", "round", "floor", "ceil", "trunc")))
SWIGLU, CLIPPED, CLIPPED_HALVES = range(3)
"""Values of `swiglu_mode`: silu of one half times the other; the clipped form of even and odd
elements; the clipped form of halves."""
STATIC, DYNAMIC = range(2)


def _groups(rows: Tensor, group_index: Tensor | None, counts: bool) -> tuple[Tensor, Tensor]:
    """The group of each row, and whether it is in one."""
    number = torch.arange(rows.shape[0], device=rows.device)
    if group_index is None:
        return torch.zeros_like(number), torch.ones_like(number, dtype=torch.bool)
    ends = group_index.to(torch.int64)
    ends = ends.cumsum(0) if counts else ends
    group = torch.searchsorted(ends, number, right=True)
    return group.clamp(max=torch.sym_max(ends.shape[0] - 1, 0)), group < ends.shape[0]


def _of_groups(x: Tensor, group: Tensor, kind: torch.dtype, numbers: bool = False) -> Tensor:
    """Scales of the group of each row. One dim is a row for all groups, or has one of the `numbers`
    for each group."""
    x = x.to(kind)
    if x.dim() == 1:
        x = x[:, None] if numbers else x[None]
    return x[group] if x.shape[0] > 1 else x


def _gate(x: Tensor, mode: int, left: bool, limits: Sequence[float] = (FAST, 7.0, 1.0)) -> Tensor:
    if mode == CLIPPED:
        return clipped(x[..., ::2], x[..., 1::2], *limits)
    first, second = x.chunk(2, -1)
    chosen, other = (first, second) if left else (second, first)
    if mode == CLIPPED_HALVES:
        return clipped(chosen, other, *limits)
    return torch.nn.functional.silu(chosen) * other


def _fake_gate_quant(x: Tensor, *, dst_type: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    kind = narrow_type("npu_dequant_swiglu_quant", "dst_type", dst_type)
    dims = _halved("npu_dequant_swiglu_quant", x, -1)
    return empty_narrow(x, dims, kind), x.new_empty(x.shape[:-1], dtype=torch.float32)


@OPERATORS.add(
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, "
    "Tensor? activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, "
    "Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False, "
    "int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, "
    "int swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0) "
    "-> (Tensor, Tensor)",
    _fake_gate_quant,
    form=GeForm(
        "DequantSwigluQuant",
        types=("dst_type",),
        words={"quant_mode": dict(enumerate(("static", "dynamic"))), "round_mode": _ROUNDING},
    ),
)
def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = FAST,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Integers as numbers, gated, and quantised; groups of rows have scales of their own. With
    given scales the second result is zero, otherwise it has the scale of each row. Rows behind the
    groups are zero."""
    name = "npu_dequant_swiglu_quant"
    if activate_dim not in (None, -1, x.dim() - 1):
        raise refuse(name, "activate_dim", f"is {activate_dim}, known is the last dim")
    if round_mode not in (None, 0):
        raise refuse(name, "round_mode", f"is {round_mode}, known is 0")
    if swiglu_mode not in (SWIGLU, CLIPPED, CLIPPED_HALVES):
        raise wrong(name, "swiglu_mode", f"is {swiglu_mode}, known are 0 to 2")
    kind, dims = narrow_type(name, "dst_type", dst_type), _halved(name, x, -1)
    rows = x.reshape(-1, x.shape[-1])
    group, used = _groups(rows, group_index, counts=True)
    values = _dequantised(rows, weight_scale, activation_scale, bias, group)
    y = _gate(values, swiglu_mode, activate_left, (glu_alpha, clamp_limit, glu_bias))
    found, scale = _quantised(y, quant_scale, quant_offset, group, quant_mode, kind)
    found = torch.where(used[:, None], found.to(torch.float32), 0.0).to(found.dtype)
    scale = torch.where(used, scale, 0.0).to(torch.float32)
    return found.reshape([*dims[:-1], found.shape[-1]]), scale.reshape(x.shape[:-1])


def _dequantised(
    rows: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    group: Tensor,
) -> Tensor:
    if rows.dtype != torch.int32:
        return rows.to(wide(rows.dtype))
    kind, whole = torch.float32, bias is not None and bias.dtype == torch.int32
    if bias is not None and whole:
        rows = rows + _of_groups(bias, group, torch.int32)
    values = rows.to(kind)
    if weight_scale is not None:
        values = values * _of_groups(weight_scale, group, kind)
    if activation_scale is not None:
        values = values * activation_scale.to(kind).reshape(-1, 1)
    if bias is not None and not whole:
        values = values + _of_groups(bias, group, kind)
    return values


def _quantised(
    y: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    group: Tensor,
    mode: int,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor]:
    numbers = mode == STATIC
    factors = None if scale is None else _of_groups(scale, group, y.dtype, numbers)
    if mode == DYNAMIC:
        return by_rows(y if factors is None else y * factors, kind)
    y = y if factors is None else y / factors
    y = y if offset is None else y + _of_groups(offset, group, y.dtype, numbers)
    return narrowed(y, kind), y.new_zeros(y.shape[0])


@OPERATORS.add(
    "npu_swiglu_quant(Tensor x, *, Tensor? smooth_scales=None, Tensor? offsets=None, "
    "Tensor? group_index=None, bool activate_left=False, int quant_mode=0, "
    "int group_list_type=0, ScalarType? dst_type=None) -> (Tensor, Tensor)",
    _fake_gate_quant,
)
def swiglu_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    offsets: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: torch.dtype | int | None = None,
) -> tuple[Tensor, Tensor]:
    """silu of one half times the other, times the smooth scales of its group of rows, plus offsets
    if the scales are given and not found for each row; quantised. The second result is what each
    row was multiplied with: the largest integer over the largest value."""
    kind, dims = narrow_type("npu_swiglu_quant", "dst_type", dst_type), _halved("", x, -1)
    rows = x.reshape(-1, x.shape[-1]).to(wide(x.dtype))
    group, _ = _groups(rows, group_index, counts=group_list_type == 1)
    y = _gate(rows, SWIGLU, activate_left)
    y = y if smooth_scales is None else y * _of_groups(smooth_scales, group, y.dtype, numbers=True)
    factors = y.new_zeros(y.shape[0])
    if quant_mode == DYNAMIC:
        factors = largest(kind) / y.abs().amax(-1)
        y = y * factors[:, None]
    elif offsets is not None:
        y = y + _of_groups(offsets, group, y.dtype, numbers=True)
    found = narrowed(y, kind).reshape([*dims[:-1], -1])
    return found, factors.to(torch.float32).reshape(x.shape[:-1])


_GELU_TYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _gelu_type(dst_type: int | None) -> torch.dtype:
    code = torch.int8 if dst_type is None else dst_type
    return known_type("npu_gelu_quant", "dst_type", code, _GELU_TYPES)


def _fake_gelu_quant(
    x: Tensor, *, quant_mode: str = "dynamic", dst_type: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    scales = x.shape[:-1] if quant_mode == "dynamic" else (0,)
    return x.new_empty(x.shape, dtype=_gelu_type(dst_type)), x.new_empty(
        scales, dtype=torch.float32
    )


@OPERATORS.add(
    "npu_gelu_quant(Tensor self, *, Tensor? input_scale=None, Tensor? input_offset=None, "
    "str approximate='none', str quant_mode='dynamic', int? dst_type=None, "
    "str round_mode='rint') -> (Tensor, Tensor)",
    _fake_gelu_quant,
    form=GeForm("GeluQuant", {"x": "self"}, types=("dst_type",)),
)
def gelu_quant(
    self: Tensor,
    *,
    input_scale: Tensor | None = None,
    input_offset: Tensor | None = None,
    approximate: str = "none",
    quant_mode: str = "dynamic",
    dst_type: int | None = None,
    round_mode: str = "rint",
) -> tuple[Tensor, Tensor]:
    """gelu, times scales: rounded with an offset (static), or over the largest of each row, whose
    scales are the second result (dynamic)."""
    name = "npu_gelu_quant"
    if quant_mode not in ("static", "dynamic"):
        raise wrong(name, "quant_mode", f"is {quant_mode!r}, known are 'static' and 'dynamic'")
    if quant_mode == "static" and input_scale is None:
        raise wrong(name, "input_scale", "is needed if the mode is 'static'")
    if round_mode != "rint":
        raise refuse(name, "round_mode", f"is {round_mode!r}, known is 'rint'")
    _check_gelu(approximate)
    kind = _gelu_type(dst_type)
    y = _gelu(self.to(wide(self.dtype)), approximate=approximate)
    y = y if input_scale is None else y * input_scale.to(y.dtype)
    if quant_mode == "dynamic":
        found, scales = by_rows(y, kind)
        return found, scales.to(torch.float32)
    y = y if input_offset is None else y + input_offset.to(y.dtype)
    return narrowed(y, kind), y.new_empty(0, dtype=torch.float32)
