"""Matrix products fused with transposes, activations, additions and quantisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchair.ascend.ops import matmul
from torchair.ascend.ops.forms import GeForm
from torchair.ascend.ops.library import (
    Gradient,
    NpuOperators,
    dtype_of,
    like,
    refuse_given,
    rounded,
    wide,
    wrong,
)
from torchair.ascend.ops.operands import Factor, format_of_operand, product, scaled_values
from torchair.ops.quantised import exact_product, scale_values

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- operators that update their argument `self`, which GE calls y ----


def _updating(op_type: str, names: dict[str, str], **more: Any) -> GeForm:
    """The form of one in place."""
    return GeForm(op_type, names, assigned=("self",), results=("y",), product=True, **more)


def _copying(op_type: str, names: dict[str, str], **more: Any) -> GeForm:
    """The form of one that leaves its argument alone; declare it after the other."""
    return GeForm(op_type, names, copied=("self",), results=("y",), product=True, **more)


# ---- transposed operands and results ----

_PERMS: dict[str, list[int]] = {"perm_x1": [0, 1, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}


def _transposed_dims(x: Any, weight: Any, p1: Any, p2: Any, split: int, joined: bool) -> list[Any]:
    """Dims of a product of batches with the batch between rows and columns."""
    batch, rows = x.shape[p1[0]], x.shape[p1[1]]
    columns = weight.shape[p2[2]]
    if split > 1:
        return [split, rows, batch * columns // split]
    return [rows, 1, batch * columns] if joined else [rows, batch, columns]


def _fake_transposed(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    scale: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int | None = 1,
) -> Any:
    perms = perm_x1 or _PERMS["perm_x1"], perm_x2 or _PERMS["perm_x2"]
    dims = _transposed_dims(x, weight, *perms, batch_split_factor or 1, scale is not None)
    return x.new_empty(dims, dtype=x.dtype if scale is None else torch.int8)


def _check_perms(operator: str, **perms: tuple[Any, Sequence[list[int]]]) -> None:
    for name, (perm, known) in perms.items():
        if list(perm) not in known:
            raise wrong(operator, name, f"is {list(perm)}, known are {list(known)}")


@OPERATORS.add(
    "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, "
    "Tensor? scale=None, int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, "
    "int? batch_split_factor=1) -> Tensor",
    _fake_transposed,
    form=GeForm(
        "TransposeBatchMatMul",
        {"x1": "input", "x2": "weight"},
        fixed={"enable_hf32": False},
        product=True,
    ),
)
def transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """Products of batches, with the batch between rows and columns; in int8 if there are scales,
    and cut into `batch_split_factor` parts of the batch."""
    name, split = "npu_transpose_batchmatmul", batch_split_factor or 1
    refuse_given(name, bias=bias)
    p1, p2, py = (
        list(p or _PERMS[n])
        for n, p in (("perm_x1", perm_x1), ("perm_x2", perm_x2), ("perm_y", perm_y))
    )
    _check_perms(
        name,
        perm_x1=(p1, ([0, 1, 2], [1, 0, 2])),
        perm_x2=(p2, ([0, 1, 2], [0, 2, 1])),
        perm_y=(py, ([1, 0, 2],)),
    )
    kind = wide(input.dtype)
    y = (input.permute(p1).to(kind) @ weight.permute(p2).to(kind)).permute(py)
    if scale is not None:
        flat = y.flatten(1)
        return rounded(flat * scale_values(scale).reshape(-1), torch.int8).unsqueeze(1)
    if split > 1:
        if y.shape[1] % split:
            raise wrong(name, "batch_split_factor", f"{y.shape[1]} batches have no {split} parts")
        y = y.unflatten(1, (split, -1)).transpose(0, 1).flatten(2)
    return y.to(input.dtype).contiguous()


def _fake_quant_transposed(
    x1: Any,
    x2: Any,
    dtype: int,
    *,
    bias: Any = None,
    x1_scale: Any = None,
    x2_scale: Any = None,
    group_sizes: Any = None,
    perm_x1: Any = None,
    perm_x2: Any = None,
    perm_y: Any = None,
    batch_split_factor: int | None = 1,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> Any:
    perms = perm_x1 or [1, 0, 2], perm_x2 or [0, 1, 2]
    dims = _transposed_dims(x1, x2, *perms, batch_split_factor or 1, False)
    return x1.new_empty(dims, dtype=dtype_of("npu_transpose_quant_batchmatmul", "dtype", dtype))


@OPERATORS.add(
    "npu_transpose_quant_batchmatmul(Tensor x1, Tensor x2, int dtype, *, Tensor? bias=None, "
    "Tensor? x1_scale=None, Tensor? x2_scale=None, int[]? group_sizes=None, "
    "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1, "
    "int? x1_dtype=None, int? x2_dtype=None) -> Tensor",
    _fake_quant_transposed,
    form=GeForm(
        "TransposeQuantBatchMatMul", types=("dtype",), unused=("group_sizes",), product=True
    ),
)
def transpose_quant_batchmatmul(
    x1: Tensor,
    x2: Tensor,
    dtype: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> Tensor:
    """The same of float8 operands [m, b, k] and [b, k, n], with scales for rows and columns or
    shared ones of blocks of k."""
    name = "npu_transpose_quant_batchmatmul"
    refuse_given(name, bias=bias)
    p1, p2 = list(perm_x1 or (1, 0, 2)), list(perm_x2 or (0, 1, 2))
    _check_perms(
        name,
        perm_x1=(p1, ([1, 0, 2],)),
        perm_x2=(p2, ([0, 1, 2], [0, 2, 1])),
        perm_y=(list(perm_y or (1, 0, 2)), ([1, 0, 2],)),
        batch_split_factor=([batch_split_factor or 1], ([1],)),
    )
    kinds = (
        format_of_operand(name, "x1_dtype", x1, x1_dtype),
        format_of_operand(name, "x2_dtype", x2, x2_dtype),
    )
    a, rows = scaled_values(x1, kinds[0], x1_scale, None, 2)
    b, columns = scaled_values(x2, kinds[1], x2_scale, None, p2.index(1))
    y = (a.permute(p1) @ b.permute(p2)).permute(1, 0, 2)
    if columns is not None:
        y = y * columns
    if rows is not None:
        y = y * rows.reshape(-1, 1, 1)
    return y.to(dtype_of(name, "dtype", dtype)).contiguous()


# ---- a product and what follows ----


def _linear_gradient(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.t() @ x, grad.sum(0) if ctx.biased else None


def _keep_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


@OPERATORS.add(
    "npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    lambda x, weight, bias=None: x.new_empty([*x.shape[:-1], weight.shape[0]]),
    Gradient(_keep_linear, _linear_gradient),
)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    return F.linear(input, weight, bias)


_FUSED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "": lambda y, _: y,
    "16cast32": lambda y, _: y,
    "relu": lambda y, _: y.relu(),
    "gelu_erf": lambda y, _: F.gelu(y),
    "gelu_tanh": lambda y, _: F.gelu(y, approximate="tanh"),
    "add": lambda y, x3: y + x3,
    "mul": lambda y, x3: y * x3,
}


def _fake_fused(
    x1: Any, x2: Any, *, bias: Any = None, x3: Any = None, fused_op_type: str = ""
) -> Any:
    batch = x1.shape[:-2] if x1.dim() >= x2.dim() else x2.shape[:-2]
    return x1.new_empty([*batch, x1.shape[-2], x2.shape[-1]])


@OPERATORS.add(
    "npu_fused_matmul(Tensor x1, Tensor x2, *, Tensor? bias=None, Tensor? x3=None, "
    "str fused_op_type='') -> Tensor",
    _fake_fused,
    form=GeForm("FusedMatMul", fixed={"enable_hf32": False}, product=True),
)
def fused_matmul(
    x1: Tensor,
    x2: Tensor,
    *,
    bias: Tensor | None = None,
    x3: Tensor | None = None,
    fused_op_type: str = "",
) -> Tensor:
    """A product, a bias, and an operation on it: with `x3` for add and mul."""
    name = "npu_fused_matmul"
    if fused_op_type not in _FUSED:
        known = ", ".join(map(repr, _FUSED))
        raise wrong(name, "fused_op_type", f"{fused_op_type!r} is none of {known}")
    if (x3 is None) == (fused_op_type in ("add", "mul")):
        raise wrong(name, "x3", "belongs to the operations add and mul")
    kind = wide(x1.dtype)
    y = x1.to(kind) @ x2.to(kind)
    y = y if bias is None else y + bias.to(kind)
    return _FUSED[fused_op_type](y, None if x3 is None else x3.to(kind)).to(x1.dtype)


def add_lora(
    self: Tensor,
    x: Tensor,
    weight_b: Tensor,
    indices: Tensor,
    weight_a: Tensor | None = None,
    layer_idx: int = 0,
    scale: float = 1e-3,
    y_offset: int = 0,
    y_slice_size: int = -1,
) -> Tensor:
    """Row i plus scale * B(i) A(i) x(i), where A and B are the adapters that `indices` name; a
    number behind the last one is no adapter."""
    kind = wide(x.dtype)
    rows = x.to(kind)
    chosen, none = indices.to(torch.int64), indices.to(torch.int64) >= weight_b.shape[0]
    safe = chosen.clamp(0, weight_b.shape[0] - 1)
    if weight_a is not None:
        rows = torch.einsum("ik,ihk->ih", rows, weight_a[safe, layer_idx].to(kind))
    made = torch.einsum("ih,inh->in", rows, weight_b[safe, layer_idx].to(kind)) * scale
    made = made.masked_fill(none.unsqueeze(-1), 0)
    width = weight_b.shape[-2] if y_slice_size < 0 else y_slice_size
    out = self.to(kind).clone()
    out[:, y_offset : y_offset + width] += made
    return out.to(self.dtype)


_LORA = (
    "Tensor x, Tensor weight_b, Tensor indices, Tensor? weight_a=None, int layer_idx=0, "
    "float scale=1e-3, int y_offset=0, int y_slice_size=-1"
)
_LORA_NAMES = {"y": "self", "weightB": "weight_b", "weightA": "weight_a"}


@OPERATORS.add(
    f"npu_batch_gather_matmul_(Tensor(a!) self, {_LORA}) -> Tensor(a!)",
    lambda x, *rest: x,
    pure="npu_batch_gather_matmul",
    form=_updating("AddLora", _LORA_NAMES),
)
def _add_lora_in_place(self: Tensor, *rest: Any) -> Tensor:
    return self.copy_(add_lora(self, *rest))


OPERATORS.add(
    f"npu_batch_gather_matmul(Tensor self, {_LORA}) -> Tensor",
    like(0),
    form=_copying("AddLora", _LORA_NAMES),
)(add_lora)


@OPERATORS.add("_npu_matmul_add_fp32(Tensor x, Tensor dy, Tensor(a!) out) -> ()", lambda *x: None)
def _matmul_add(x: Tensor, dy: Tensor, out: Tensor) -> None:
    """out += x.T @ dy, in float32."""
    flat = (t.reshape(-1, t.shape[-1]).to(torch.float32) for t in (x, dy))
    a, b = flat
    out += (a.t() @ b).view(out.shape)


@OPERATORS.add(
    "npu_quant_matmul_reduce_sum(Tensor x1, Tensor x2, *, Tensor? x1_scale=None, "
    "Tensor? x2_scale=None) -> Tensor",
    lambda x1, x2, **scales: x1.new_empty([x1.shape[1], x2.shape[2]], dtype=torch.bfloat16),
)
def quant_matmul_reduce_sum(
    x1: Tensor, x2: Tensor, *, x1_scale: Tensor | None = None, x2_scale: Tensor | None = None
) -> Tensor:
    """The sum over a batch of int8 products, times scales of rows and columns."""
    name = "npu_quant_matmul_reduce_sum"
    if x1_scale is None or x2_scale is None:
        raise wrong(name, "x2_scale" if x1_scale is not None else "x1_scale", "is needed")
    y = exact_product(x1, x2) * x1_scale.unsqueeze(-1)
    return (y.sum(0) * x2_scale).to(torch.bfloat16)


# ---- quantised here, multiplied as integers ----


def _integers(
    operator: str, x: Tensor, x_scale: Tensor | None, smooth_scale: Tensor | None, mode: str | None
) -> tuple[Tensor, Tensor]:
    """Rows as int8, and the scale of each."""
    values = x.to(torch.float32)
    values = values if smooth_scale is None else values * smooth_scale.to(values.dtype)
    if mode not in ("pertoken", "pertensor"):
        raise wrong(operator, "quant_mode", f"{mode!r} is none of pertoken, pertensor")
    if mode == "pertensor" and x_scale is None:
        raise wrong(operator, "x_scale", "is needed where quant_mode is pertensor")
    if x_scale is None:
        scale = values.abs().amax(-1, keepdim=True) / 127
    else:
        scale = x_scale.to(torch.float32).reshape(-1, 1)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return rounded(values / safe, torch.int8), scale


_DEQUANT = (
    "Tensor? bias=None, Tensor? x_scale=None, Tensor? x_offset=None, Tensor? smooth_scale=None, "
    "str? quant_mode='pertoken'"
)


@OPERATORS.add(
    "npu_quant_matmul_dequant(Tensor x, Tensor quantized_weight, Tensor weight_scale, *, "
    f"{_DEQUANT}) -> Tensor",
    lambda x, w, scale, **others: x.new_empty([x.shape[0], scale.shape[0]]),
    form=GeForm("QuantMatmulDequant", {"x_quant_mode": "quant_mode"}, product=True),
)
def quant_matmul_dequant(
    x: Tensor,
    quantized_weight: Tensor,
    weight_scale: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_offset: Tensor | None = None,
    smooth_scale: Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> Tensor:
    """Rows quantised to int8, times an int8 weight [n, k], times the scales of both."""
    name = "npu_quant_matmul_dequant"
    refuse_given(name, x_offset=x_offset)
    rows, scale = _integers(name, x, x_scale, smooth_scale, quant_mode)
    y = exact_product(rows, quantized_weight.transpose(-1, -2))
    y = y if bias is None else y + bias.to(y.dtype)
    return (y * scale * scale_values(weight_scale)).to(x.dtype)


@OPERATORS.add(
    "npu_quant_grouped_matmul_dequant(Tensor x, Tensor quantized_weight, Tensor weight_scale, "
    f"Tensor group_list, *, {_DEQUANT}) -> Tensor",
    lambda x, w, scale, groups, **others: x.new_empty([x.shape[0], scale.shape[1]]),
    form=GeForm("QuantGroupedMatmulDequant", {"x_quant_mode": "quant_mode"}, product=True),
)
def quant_grouped_matmul_dequant(
    x: Tensor,
    quantized_weight: Tensor,
    weight_scale: Tensor,
    group_list: Tensor,
    *,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    x_offset: Tensor | None = None,
    smooth_scale: Tensor | None = None,
    quant_mode: str | None = "pertoken",
) -> Tensor:
    """The same for groups of rows, which end where `group_list` says."""
    name = "npu_quant_grouped_matmul_dequant"
    refuse_given(name, x_offset=x_offset)
    out = x.new_zeros((x.shape[0], weight_scale.shape[1]))
    for g, a, b in matmul.group_pieces(name, group_list.tolist(), matmul.ENDS, x.shape[0]):
        smooth = smooth_scale
        if smooth is not None and smooth.dim() > 1:
            smooth = smooth[g]
        given = x_scale
        if given is not None and given.numel() > 1:
            given = given.reshape(-1)[a:b] if quant_mode == "pertoken" else given[g : g + 1]
        rows, scale = _integers(name, x[a:b], given, smooth, quant_mode)
        y = exact_product(rows, quantized_weight[g].t())
        y = y if bias is None else y + bias[g].to(y.dtype)
        out[a:b] = (y * scale * scale_values(weight_scale[g])).to(x.dtype)
    return out


# ---- products added to what is there ----

_TYPES = (
    "int[]? group_sizes=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? x1_scale_dtype=None, int? x2_scale_dtype=None"
)


def _float_product(
    name: str, x1: Tensor, x2: Tensor, scales: tuple[Tensor | None, Tensor], types: dict[str, Any]
) -> Tensor:
    """x1.T @ x2 of float8 operands [k, m] and [k, n]."""
    left, right = scales
    if left is not None and left.dim() == 3:  # pairs of shared scales lie as the operand does
        left = left.transpose(0, 1)
    rows = Factor.typed(x1.t(), left, types, "x1_dtype", "x1_scale_dtype")
    return product(name, rows, Factor.typed(x2, right, types, "x2_dtype", "x2_scale_dtype"))


def add_quant_matmul(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    *,
    x1_scale: Tensor | None = None,
    **types: Any,
) -> Tensor:
    """self + x1.T @ x2 of float8 operands [k, m] and [k, n]."""
    name = "npu_add_quant_matmul"
    if x1.shape != (x2.shape[0], self.shape[0]):
        reason = f"is {list(x1.shape)}, a product {list(self.shape)} of {list(x2.shape)} wants "
        raise wrong(name, "x1", reason + f"[{x2.shape[0]}, {self.shape[0]}]")
    return self + _float_product(name, x1, x2, (x1_scale, x2_scale), types).to(self.dtype)


def add_quant_gmm(
    self: Tensor,
    x1: Tensor,
    x2: Tensor,
    x2_scale: Tensor,
    group_list: Tensor,
    *,
    x1_scale: Tensor | None = None,
    group_list_type: int | None = 0,
    **types: Any,
) -> Tensor:
    """self[g] + x1[:, g] @ x2[g] for groups of the features that are summed over: x1 is [m, k], x2
    [k, n]. Shared scales lie as `npu_grouped_dynamic_mx_quant` gives them."""
    name, out = "npu_add_quant_gmm", self.clone()
    numbers, length = group_list.tolist(), x2.shape[0]
    for g, a, b in matmul.group_pieces(name, numbers, group_list_type or 0, length):
        if b > a:
            left, right = (_group_scale(s, g, a, b) for s in (x1_scale, x2_scale))
            assert right is not None
            part = _float_product(name, x1[:, a:b].t(), x2[a:b], (left, right), types)
            out[g] += part.to(out.dtype)
    return out


def _group_scale(scale: Tensor | None, g: int, begin: int, end: int) -> Tensor | None:
    if scale is None:
        return None
    if scale.dim() == 3:  # pairs of shared scales
        first = begin // 64 + g
        return scale[first : first + -(-(end - begin) // 64)]
    return scale.reshape(-1)[g : g + 1] if scale.numel() > 1 else scale


def _accumulating(
    name: str, op_type: str, arguments: str, names: dict[str, str], add: Callable[..., Tensor]
) -> None:
    """A product added in place, and the operator that makes a new tensor instead."""
    unused = {"unused": ("group_sizes",)}

    @OPERATORS.add(
        f"{name}_(Tensor(a!) self, {arguments}) -> Tensor(a!)",
        lambda x, *rest, **more: x,
        pure=name,
        form=_updating(op_type, names, **unused),
    )
    def in_place(self: Tensor, *rest: Any, **more: Any) -> Tensor:
        return self.copy_(add(self, *rest, **more))

    form = _copying(op_type, names, **unused)
    OPERATORS.add(f"{name}(Tensor self, {arguments}) -> Tensor", like(0), form=form)(add)


_OPERANDS = "Tensor x1, Tensor x2, Tensor x2_scale, "
_accumulating(
    "npu_add_quant_matmul",
    "QuantBatchMatmulInplaceAdd",
    f"{_OPERANDS}*, Tensor? x1_scale=None, {_TYPES}",
    {"y": "self"},
    add_quant_matmul,
)
_accumulating(
    "npu_add_quant_gmm",
    "QuantGroupedMatmulInplaceAdd",
    f"{_OPERANDS}Tensor group_list, *, Tensor? x1_scale=None, int? group_list_type=0, {_TYPES}",
    {"y": "self", "scale1": "x1_scale", "scale2": "x2_scale"},
    add_quant_gmm,
)
