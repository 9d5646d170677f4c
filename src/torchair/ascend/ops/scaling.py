"""Values scaled to narrow types and back: after a rotation, by groups, from sums of products; and
casts to types that torch does not have."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops import formats, mx
from torchair.ascend.ops.formats import E1M2, E2M1, E4M3, E5M2, HIFLOAT8, NumberFormat, format_of
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    INT4_IN_INT32,
    Gradient,
    NpuOperators,
    dtype_of,
    refuse,
    refuse_given,
    unpack_int4,
    wide,
    wrong,
)
from torchair.ascend.ops.quant import INT4, dynamic_quant, narrowed

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_INT4_LARGEST = 7.0


def _eighth(dims: Any) -> list[Any]:
    """Dims of int32 that hold eight values of four bits."""
    return [*dims[:-1], dims[-1] // INT4_IN_INT32]


# ---- the largest value beside the result ----

_FLOATS = (E5M2, E4M3, HIFLOAT8)


def _fake_max(
    x: Any, scale: Any, *, round_mode: str = "rint", dst_dtype: int = 291, group_list: Any = None
) -> Any:
    kind = format_of("npu_quant_max", "dst_dtype", dst_dtype, _FLOATS)
    groups = 1 if group_list is None else group_list.shape[0]
    return x.new_empty(x.shape, dtype=kind.stored), x.new_empty([groups])


@OPERATORS.add(
    'npu_quant_max(Tensor x, Tensor scale, *, str round_mode="rint", int dst_dtype=291, '
    "Tensor? group_list=None) -> (Tensor, Tensor)",
    _fake_max,
    form=GeForm("QuantMax", {"dst_type": "dst_dtype"}, ("dst_type",)),
)
def quant_max(
    x: Tensor,
    scale: Tensor,
    *,
    round_mode: str = "rint",
    dst_dtype: int = 291,
    group_list: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x / scale in eight bits, and the largest absolute value; for groups of rows, which end where
    `group_list` says, with a scale for each."""
    kind = format_of("npu_quant_max", "dst_dtype", dst_dtype, _FLOATS)
    formats.check_round("npu_quant_max", round_mode, kind)
    values = x.to(wide(x.dtype))
    if group_list is None:
        largest = values.abs().amax().reshape(1) if x.numel() else values.new_zeros(1)
        return formats.encode(values / scale.to(values.dtype), kind), largest.to(x.dtype)
    owner, largest = _owners(group_list, x.shape[0]), values.new_zeros(group_list.shape[0])
    per_row = values.abs().flatten(1).amax(1) if x.numel() else values.new_zeros(x.shape[0])
    largest = largest.scatter_reduce(0, owner, per_row, "amax")
    factor = scale.to(values.dtype)[owner].view(-1, *[1] * (x.dim() - 1))
    return formats.encode(values / factor, kind), largest.to(x.dtype)


def _owners(ends: Tensor, rows: int) -> Tensor:
    """The group of each row; rows behind the last end belong to the last one."""
    index = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends.to(torch.int64), index, right=True).clamp_(max=len(ends) - 1)


# ---- given scales, of groups of rows ----


def _fake_group_quant(
    x: Any, scale: Any, group_index: Any, *, offset: Any = None, dst_dtype: Any = None
) -> Any:
    if _group_type(dst_dtype) == INT4:
        return x.new_empty(_eighth(x.shape), dtype=torch.int32)
    return x.new_empty(x.shape, dtype=torch.int8)


def _group_type(dst_dtype: Any) -> torch.dtype:
    kind = torch.int8 if dst_dtype is None else dtype_of("npu_group_quant", "dst_dtype", dst_dtype)
    if kind not in (torch.int8, INT4):
        raise refuse("npu_group_quant", "dst_dtype", f"{kind} is none of int8, quint4x2")
    return kind


@OPERATORS.add(
    "npu_group_quant(Tensor x, Tensor scale, Tensor group_index, *, Tensor? offset=None, "
    "ScalarType? dst_dtype=None) -> Tensor",
    _fake_group_quant,
    form=GeForm("GroupQuant", {"dst_type": "dst_dtype"}, ("dst_type",)),
)
def group_quant(
    x: Tensor,
    scale: Tensor,
    group_index: Tensor,
    *,
    offset: Tensor | None = None,
    dst_dtype: Any = None,
) -> Tensor:
    """round(x * scale + offset) with the scales of the group that a row belongs to."""
    kind = _group_type(dst_dtype)
    if kind == INT4 and x.shape[-1] % INT4_IN_INT32:
        raise wrong("npu_group_quant", "x", f"{x.shape[-1]} four-bit integers do not fill int32")
    values = x.to(torch.float32) * scale.to(torch.float32)[_owners(group_index, x.shape[0])]
    return narrowed(values if offset is None else values + offset.to(values.dtype), kind)


# ---- after a rotation ----

_ROTATED = (E2M1, E5M2, E4M3)


def _rotated_type(dst_dtype: Any) -> tuple[torch.dtype | None, NumberFormat | None]:
    """The integer type of the result, or its float format."""
    if dst_dtype in (None, 1, 16, 258, 285):
        return (INT4 if dst_dtype in (16, 285) else torch.int8), None
    return None, format_of("npu_rotate_quant", "dst_dtype", dst_dtype, _ROTATED)


def _fake_rotate(x: Any, rotation: Any, *, dst_dtype: Any = None, **others: Any) -> Any:
    whole, kind = _rotated_type(dst_dtype)
    if kind is not None:
        dims = formats.stored_dims(kind, x.shape)
        scale = x.new_empty(mx.scale_dims(x.shape), dtype=torch.uint8)
        return x.new_empty(dims, dtype=kind.stored), scale
    scale = x.new_empty([x.shape[0]], dtype=torch.float32)
    if whole == INT4:
        return x.new_empty(_eighth(x.shape), dtype=torch.int32), scale
    return x.new_empty(x.shape, dtype=torch.int8), scale


@OPERATORS.add(
    "npu_rotate_quant(Tensor x, Tensor rotation, *, Tensor? alpha=None, int? dst_dtype=None, "
    'int? axis=-1, str? round_mode="rint", int? scale_alg=0, float? dst_type_max=0.0, '
    "bool? transpose_y=False) -> (Tensor, Tensor)",
    _fake_rotate,
    form=GeForm("RotateQuant", {"y_dtype": "dst_dtype"}, ("y_dtype",), fixed={"alpha": 0.0}),
)
def rotate_quant(
    x: Tensor,
    rotation: Tensor,
    *,
    alpha: Tensor | None = None,
    dst_dtype: int | None = None,
    axis: int | None = -1,
    round_mode: str | None = "rint",
    scale_alg: int | None = 0,
    dst_type_max: float | None = 0.0,
    transpose_y: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Pieces of each row times a rotation, in the type of x, then quantised: to integers with a
    scale for each row, or to blocks with shared scales."""
    name = "npu_rotate_quant"
    refuse_given(name, alpha=alpha)
    if transpose_y or axis not in (None, -1, x.dim() - 1):
        argument = "transpose_y" if transpose_y else "axis"
        raise refuse(name, argument, "only the last dim, as it is, is supported")
    size = rotation.shape[-1]
    if x.shape[-1] % size:
        raise wrong(name, "rotation", f"{x.shape[-1]} features have no pieces of {size}")
    pieces = x.to(torch.float32).unflatten(-1, (-1, size))
    turned = (
        torch.einsum(
            "...pk,pkn->...pn" if rotation.dim() == 3 else "...pk,kn->...pn",
            pieces,
            rotation.to(torch.float32),
        )
        .flatten(-2)
        .to(x.dtype)
    )
    whole, kind = _rotated_type(dst_dtype)
    if kind is not None:
        mx.check_mx(name, dst_dtype, round_mode or "rint", scale_alg)
        how = round_mode or "rint", scale_alg or 0, dst_type_max or 0.0
        return mx.mx_quant(turned, kind, -1, *how)
    assert whole is not None
    y, scale, _ = dynamic_quant(turned, dtype=whole, largest=dst_type_max or 0.0)
    return y, scale


def _fake_kronecker(
    x: Any,
    p1: Any,
    p2: Any,
    clip: float | None = None,
    dst_dtype: int | None = None,
    most: float | None = None,
) -> Any:
    if dst_dtype == 296:
        rows = x.new_empty([x.shape[0], x.shape[1] * x.shape[2]], dtype=torch.uint8)
        dims, scales = formats.stored_dims(E2M1, rows.shape), mx.scale_dims(rows.shape)
        return x.new_empty(dims, dtype=torch.uint8), x.new_empty(scales, dtype=torch.uint8)
    y = x.new_empty(_eighth(x.shape), dtype=torch.int32)
    return y, x.new_empty([x.shape[0]], dtype=torch.float32)


@OPERATORS.add(
    "npu_kronecker_quant(Tensor x, Tensor kronecker_p1, Tensor kronecker_p2, "
    "float? clip_ratio=None, int? dst_dtype=None, float? dst_type_max=None) "
    "-> (Tensor out, Tensor quant_scale)",
    _fake_kronecker,
    form=GeForm("FlatQuant", types=("dst_dtype",)),
)
def kronecker_quant(
    x: Tensor,
    kronecker_p1: Tensor,
    kronecker_p2: Tensor,
    clip_ratio: float | None = None,
    dst_dtype: int | None = None,
    dst_type_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """p1 @ x @ p2 for each matrix, as four-bit integers with one scale for each, or as float4 with
    shared scales."""
    name, clip = "npu_kronecker_quant", 1.0 if clip_ratio is None else clip_ratio
    if dst_dtype not in (None, 3, 259, 296):
        raise refuse(name, "dst_dtype", f"type number {dst_dtype} is none of int32, float4_e2m1")
    values = x.to(torch.float32)
    turned = kronecker_p1.to(torch.float32) @ (values @ kronecker_p2.to(torch.float32))
    if dst_dtype == 296:
        limit = dst_type_max or 0.0
        return mx.mx_quant(turned.flatten(1), E2M1, -1, "rint", mx.CHOSEN if limit else 0, limit)
    if x.shape[-1] % INT4_IN_INT32:
        raise wrong(name, "x", f"{x.shape[-1]} four-bit integers do not fill int32")
    scale = turned.abs().amax((-2, -1)) / (_INT4_LARGEST * clip)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return narrowed(turned / safe[:, None, None], INT4), scale


# ---- back to wide types ----


def _fake_anti(
    x: Any,
    scale: Any,
    *,
    offset: Any = None,
    dst_dtype: int | None = None,
    src_dtype: int | None = None,
) -> Any:
    dims = list(x.shape)
    if x.dtype == torch.int32:
        dims[-1] = dims[-1] * INT4_IN_INT32
    code = torch.float16 if dst_dtype is None else dst_dtype
    return x.new_empty(dims, dtype=dtype_of("npu_anti_quant", "dst_dtype", code))


@OPERATORS.add(
    "npu_anti_quant(Tensor x, Tensor scale, *, Tensor? offset=None, int? dst_dtype=None, "
    "int? src_dtype=None) -> Tensor",
    _fake_anti,
    form=GeForm(
        "AscendAntiQuantV2",
        {"dst_type": "dst_dtype"},
        ("dst_type",),
        fixed={"sqrt_mode": False},
        unused=("src_dtype",),
    ),
)
def anti_quant(
    x: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    dst_dtype: int | None = None,
    src_dtype: int | None = None,
) -> Tensor:
    """(x + offset) * scale of int8, four-bit integers in int32, float8, and HiFloat8 in bytes."""
    if x.dtype == torch.int32:
        values = unpack_int4(x).to(torch.float32)
    elif x.dtype == torch.uint8:
        values = formats.decode(x, HIFLOAT8)
    else:
        values = x.to(torch.float32)
    values = values if offset is None else values + offset.to(torch.float32)
    code = torch.float16 if dst_dtype is None else dst_dtype
    made = values * scale.to(torch.float32)
    return made.to(dtype_of("npu_anti_quant", "dst_dtype", code))


@OPERATORS.add(
    "npu_dequant_bias(Tensor x, Tensor weight_scale, Tensor? activation_scale, Tensor? bias, *, "
    "ScalarType? output_dtype=None) -> Tensor",
    lambda x, w, a, b, output_dtype=None: x.new_empty(
        x.shape, dtype=dtype_of("npu_dequant_bias", "output_dtype", output_dtype or torch.float16)
    ),
    form=GeForm(
        "DequantBias",
        {"activate_scale": "activation_scale"},
        ("output_dtype",),
        defaults={"output_dtype": torch.float16},
    ),
)
def dequant_bias(
    x: Tensor,
    weight_scale: Tensor,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    *,
    output_dtype: Any = None,
) -> Tensor:
    """Whole sums times scales of columns and rows; a bias of integers is added before that, another
    one after it."""
    dtype = dtype_of("npu_dequant_bias", "output_dtype", output_dtype or torch.float16)
    values = x.to(torch.float64)
    whole = bias is not None and not bias.dtype.is_floating_point
    if bias is not None and whole:
        values = values + bias.to(values.dtype)
    values = values * weight_scale.to(values.dtype)
    if activation_scale is not None:
        values = values * activation_scale.to(values.dtype).reshape(-1, 1)
    if bias is not None and not whole:
        values = values + bias.to(values.dtype)
    return values.to(dtype)


# ---- casts ----

_CAST = {285: INT4, 290: HIFLOAT8, 296: E2M1, 297: E1M2}
"""Types of torch_npu that torch has not, by number."""


def _fake_cast(self: Any, dtype: Any, input_dtype: int | None = None) -> Any:
    dims = list(self.shape)
    source, target = _CAST.get(input_dtype or 0), _CAST.get(dtype)
    if isinstance(source, NumberFormat):
        dims[-1] = dims[-1] * source.packed
    if isinstance(target, NumberFormat):
        return self.new_empty(formats.stored_dims(target, dims), dtype=torch.uint8)
    if target == INT4:
        return self.new_empty([*dims[:-1], dims[-1] // 2], dtype=torch.uint8)
    return self.new_empty(dims, dtype=dtype_of("npu_dtype_cast", "dtype", dtype))


def _cast_back(ctx: Any, grad: Tensor) -> Any:
    return grad.to(ctx.kind), *[None] * (ctx.arguments - 1)


def _keep_type(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.kind, ctx.arguments = inputs[0].dtype, len(inputs)


@OPERATORS.add(
    "npu_dtype_cast(Tensor self, int dtype, int? input_dtype=None) -> Tensor",
    _fake_cast,
    Gradient(_keep_type, _cast_back),
)
def dtype_cast(self: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """Values in another type; from and to types that torch does not have in bytes."""
    source, target = _CAST.get(input_dtype or 0), _CAST.get(dtype)
    values = formats.decode(self, source) if isinstance(source, NumberFormat) else self
    if isinstance(target, NumberFormat):
        if values.shape[-1] % target.packed:
            raise wrong("npu_dtype_cast", "self", "values of four bits do not fill bytes")
        mode = "round" if target is HIFLOAT8 else "rint"
        return formats.encode(values.to(torch.float32), target, mode)
    if target == INT4:
        pairs = values.round().clamp(-8, 7).to(torch.int32).unflatten(-1, (-1, 2)) & 15
        return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    return values.to(dtype_of("npu_dtype_cast", "dtype", dtype), copy=True)


@OPERATORS.add(
    "npu_dtype_cast_backward(Tensor grad, ScalarType dtype, int? grad_dtype=None, "
    "int? input_dtype=None) -> Tensor",
    lambda grad, dtype, grad_dtype=None, input_dtype=None: _fake_cast(
        grad, dtype if input_dtype is None else input_dtype, grad_dtype
    ),
)
def _dtype_cast_backward(
    grad: Tensor, dtype: Any, grad_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    return dtype_cast(grad, dtype if input_dtype is None else input_dtype, grad_dtype)


for _name in ("_npu_dtype_cast", "_npu_dtype_cast_backward"):
    _argument = "grad" if _name.endswith("backward") else "self"
    OPERATORS.add(
        f"{_name}(Tensor {_argument}, ScalarType dtype) -> Tensor",
        lambda x, dtype: x.new_empty(x.shape, dtype=dtype_of("_npu_dtype_cast", "dtype", dtype)),
        Gradient(_keep_type, _cast_back) if _argument == "self" else None,
    )(lambda x, dtype: x.to(dtype_of("_npu_dtype_cast", "dtype", dtype), copy=True))
