"""Products fused with a collective. The group is given by its name, as `get_hccl_comm_name` gives
it; with one rank nothing is sent. Sums over ranks are made in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchair.ascend.ops.forms import GeForm, OperatorCall
from torchair.ascend.ops.library import (
    NpuOperators,
    dtype_of,
    refuse,
    refuse_given,
    wide,
    wrong,
)
from torchair.ascend.ops.matmul import columns
from torchair.ascend.ops.operands import Factor, product
from torchair.ops.collectives import named_group
from torchair.ops.quantised import (
    dequantized_weight,
    exact_product,
    scale_values,
    unpacked_weight,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}


# ---- collectives ----


def ranks(hcom: str, world_size: int | None = None) -> int:
    """How many ranks a group has."""
    if world_size is not None and world_size <= 1:
        return 1
    return dist.get_world_size(named_group(hcom)) if dist.is_initialized() else 1


def reduced(x: Tensor, hcom: str, operator: str, reduce_op: str, world: int) -> Tensor:
    """The sum of all ranks, or another reduction."""
    if reduce_op not in _REDUCTIONS:
        raise wrong(operator, "reduce_op", f"{reduce_op!r} is none of {', '.join(_REDUCTIONS)}")
    if world > 1:
        x = x.contiguous()
        dist.all_reduce(x, _REDUCTIONS[reduce_op], group=named_group(hcom))
    return x


def gathered(x: Tensor, hcom: str, world: int) -> Tensor:
    """Rows of all ranks. Bytes are sent: gloo does not know all types."""
    if world <= 1:
        return x
    flat = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    out = flat.new_empty((world * x.shape[0], *flat.shape[1:]))
    dist.all_gather_into_tensor(out, flat, group=named_group(hcom))
    return out.view(x.dtype)


def exchanged(
    x: Tensor,
    hcom: str,
    world: int,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> Tensor:
    """Rows sent to each rank and got from each; equal parts if no counts are given."""
    if world <= 1:
        return x
    flat = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
    rows = x.shape[0] if received is None else sum(received)
    out = flat.new_empty((rows, *flat.shape[1:]))
    came, went = (None if c is None else list(c) for c in (received, sent))
    dist.all_to_all_single(out, flat, came, went, group=named_group(hcom))
    return out.view(x.dtype)


def own_part(x: Tensor, hcom: str, world: int) -> Tensor:
    """The rows of this rank."""
    if world <= 1:
        return x
    return x.chunk(world)[dist.get_rank(named_group(hcom))].contiguous()


# ---- products of plain and of quantised operands ----


def _product(
    name: str,
    x1: Tensor,
    x2: Tensor,
    x1_scale: Tensor | None,
    x2_scale: Tensor | None,
    types: dict[str, Any],
) -> Tensor:
    weight = unpacked_weight(x2, x1.shape[-1]) if x1.dtype != torch.uint8 else x2
    left = Factor.typed(x1, x1_scale, types, "x1_dtype", "x1_scale_dtype")
    right = Factor.typed(weight, x2_scale, types, "x2_dtype", "x2_scale_dtype")
    return product(name, left, right)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _type(operator: str, x: Any, scale: Any, code: Any, plain: torch.dtype) -> torch.dtype:
    """The type of a result: a given one, or that of operands that are not quantised."""
    if code is not None:
        return dtype_of(operator, "y_dtype", code)
    return x.dtype if scale is None else plain


# ---- sums over all ranks ----

_SUM = "npu_mm_all_reduce_base"


def _sum_type(x1: Any, scale: Any, y_dtype: Any) -> torch.dtype:
    half = torch.bfloat16 if scale is not None and scale.dtype == torch.bfloat16 else torch.float16
    return _type(_SUM, x1, scale, y_dtype, half)


@OPERATORS.add(
    f"{_SUM}(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, "
    "Tensor? dequant_scale=None, Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, "
    "Tensor? comm_quant_scale_2=None, int antiquant_group_size=0, int comm_turn=0, "
    "int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0, "
    "str? comm_mode=None) -> Tensor",
    lambda x1, x2, hcom, *, dequant_scale=None, y_dtype=None, **others: x1.new_empty(
        [*x1.shape[:-1], columns(x2, x1.shape[-1])], dtype=_sum_type(x1, dequant_scale, y_dtype)
    ),
    form=GeForm(
        "MatmulAllReduce",
        {"group": "hcom"},
        ("y_dtype",),
        collective=True,
        product=True,
        unused=("comm_mode", "group_sizes"),
    ),
)
def mm_all_reduce(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    x3: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    comm_quant_scale_1: Tensor | None = None,
    comm_quant_scale_2: Tensor | None = None,
    antiquant_group_size: int = 0,
    y_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    """A product summed over all ranks, plus `x3`. Operands may be quantised, or the weight alone;
    what a device quantises on the way is sent as it is."""
    types = {
        "x1_dtype": others.get("x1_dtype"),
        "x2_dtype": others.get("x2_dtype"),
        "x1_scale_dtype": others.get("pertoken_scale_dtype"),
        "x2_scale_dtype": others.get("dequant_scale_dtype"),
    }
    weight, dtype = x2, _sum_type(x1, dequant_scale, y_dtype)
    if antiquant_scale is not None:
        plain, kind = unpacked_weight(x2, x1.shape[-1]), wide(x1.dtype)
        weight = dequantized_weight(
            plain, antiquant_scale, antiquant_offset, antiquant_group_size, kind
        )
        y = _biased(x1.to(kind) @ weight, bias)
    elif bias is not None and not bias.dtype.is_floating_point:
        assert dequant_scale is not None
        y = (exact_product(x1, x2) + bias) * scale_values(dequant_scale)
        y = y if pertoken_scale is None else y * pertoken_scale.reshape(-1, 1)
    else:
        y = _biased(_product(_SUM, x1, x2, pertoken_scale, dequant_scale, types), bias)
    y = reduced(y.to(torch.float32), hcom, _SUM, reduce_op, ranks(hcom))
    return (y if x3 is None else y + x3.to(y.dtype)).to(dtype)


# ---- sums, of which each rank has its rows ----


def _scattered(
    name: str,
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    reduce_op: str,
    bias: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    dtype: torch.dtype,
    types: dict[str, Any],
) -> Tensor:
    world = ranks(hcom, world_size)
    if x1.shape[0] % world:
        raise wrong(name, "self", f"{x1.shape[0]} rows have no {world} equal parts")
    y = _biased(_product(name, x1, x2, *scales, types), bias).to(torch.float32)
    return own_part(reduced(y, hcom, name, reduce_op, world), hcom, world).to(dtype)


def _scatter_rows(x: Any, world_size: int) -> Any:
    return x.shape[0] // max(world_size, 1)


@OPERATORS.add(
    "npu_mm_reduce_scatter_base(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "str reduce_op='sum', Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, "
    "int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> Tensor",
    lambda x, x2, hcom, world, *, x2_scale=None, output_dtype=None, **others: x.new_empty(
        [_scatter_rows(x, world), x2.shape[1]],
        dtype=_type("npu_mm_reduce_scatter_base", x, x2_scale, output_dtype, torch.bfloat16),
    ),
    form=GeForm(
        "MatmulReduceScatter",
        {"x1": "self", "group": "hcom", "rank_size": "world_size"},
        collective=True,
        product=True,
        unused=("comm_mode",),
    ),
)
def mm_reduce_scatter(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    comm_turn: int = 0,
    output_dtype: Any = None,
    comm_mode: str | None = None,
) -> Tensor:
    """A product summed over all ranks, and the rows of it that belong to this one."""
    name = "npu_mm_reduce_scatter_base"
    dtype = _type(name, self, x2_scale, output_dtype, torch.bfloat16)
    scales = x1_scale, x2_scale
    return _scattered(name, self, x2, hcom, world_size, reduce_op, bias, scales, dtype, {})


_TYPES = (
    "int[]? group_sizes=None, bool amax_output=False, int? y_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? x1_scale_dtype=None, int? x2_scale_dtype=None, "
    "str? comm_mode=None"
)


@OPERATORS.add(
    "npu_quant_mm_reduce_scatter(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "str reduce_op='sum', Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, "
    f"Tensor? quant_scale=None, int block_size=0, int comm_turn=0, {_TYPES}) -> (Tensor, Tensor)",
    lambda x, x2, hcom, world, *, y_dtype=None, **others: (
        x.new_empty(
            [_scatter_rows(x, world), x2.shape[1]],
            dtype=_type("npu_quant_mm_reduce_scatter", x, None, y_dtype, x.dtype),
        ),
        x.new_empty([0], dtype=torch.float32),
    ),
    form=GeForm(
        "MatmulReduceScatterV2",
        {"x1": "self", "group": "hcom", "rank_size": "world_size", "is_amax_out": "amax_output"},
        ("y_dtype",),
        collective=True,
        product=True,
        unused=("comm_mode", "group_sizes"),
    ),
)
def quant_mm_reduce_scatter(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    quant_scale: Tensor | None = None,
    y_dtype: int | None = None,
    **types: Any,
) -> tuple[Tensor, Tensor]:
    """The same of quantised operands; the second result is empty."""
    name = "npu_quant_mm_reduce_scatter"
    refuse_given(name, quant_scale=quant_scale)
    dtype, scales = _type(name, self, None, y_dtype, self.dtype), (x1_scale, x2_scale)
    y = _scattered(name, self, x2, hcom, world_size, reduce_op, bias, scales, dtype, types)
    return y, y.new_empty(0, dtype=torch.float32)


# ---- rows of all ranks, times a weight ----


def _gather_dims(x: Any, x2: Any, world_size: int, shown: bool) -> tuple[list[Any], list[Any]]:
    rows = x.shape[0] * max(world_size, 1)
    return [rows, x2.shape[1]], [rows, x.shape[1]] if shown else [0]


@OPERATORS.add(
    "npu_all_gather_base_mm(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, "
    "bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, "
    "str? comm_mode=None) -> (Tensor, Tensor)",
    lambda x, x2, hcom, world, *, x2_scale=None, output_dtype=None, gather_output=True, **others: (
        x.new_empty(
            _gather_dims(x, x2, world, True)[0],
            dtype=_type("npu_all_gather_base_mm", x, x2_scale, output_dtype, torch.bfloat16),
        ),
        x.new_empty(_gather_dims(x, x2, world, gather_output)[1]),
    ),
    form=GeForm(
        "AllGatherMatmul",
        {
            "x1": "self",
            "group": "hcom",
            "rank_size": "world_size",
            "is_gather_out": "gather_output",
        },
        collective=True,
        product=True,
        unused=("comm_mode",),
    ),
)
def all_gather_mm(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    output_dtype: Any = None,
    comm_mode: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of all ranks times a weight, and these rows."""
    name = "npu_all_gather_base_mm"
    dtype = _type(name, self, x2_scale, output_dtype, torch.bfloat16)
    how = bias, (x1_scale, x2_scale), gather_index, gather_output, dtype
    return _gathered_product(name, self, x2, hcom, world_size, *how, {})


def _gathered_product(
    name: str,
    x: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    gather_index: int,
    shown: bool,
    dtype: torch.dtype,
    types: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    if gather_index:
        raise refuse(name, "gather_index", f"{gather_index} is not 0")
    world = ranks(hcom, world_size)
    rows, left = gathered(x, hcom, world), scales[0]
    if left is not None and left.numel() > 1:
        left = gathered(left, hcom, world)
    y = _biased(_product(name, rows, x2, left, scales[1], types), bias)
    return y.to(dtype), rows.clone() if shown else x.new_empty(0)


@OPERATORS.add(
    "npu_all_gather_quant_mm(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, Tensor? quant_scale=None, "
    "int block_size=0, int gather_index=0, bool gather_output=True, int comm_turn=0, "
    f"{_TYPES}) -> (Tensor, Tensor, Tensor)",
    lambda x, x2, hcom, world, *, y_dtype=None, gather_output=True, **others: (
        x.new_empty(
            _gather_dims(x, x2, world, True)[0],
            dtype=_type("npu_all_gather_quant_mm", x, None, y_dtype, x.dtype),
        ),
        x.new_empty(_gather_dims(x, x2, world, gather_output)[1]),
        x.new_empty([0], dtype=torch.float32),
    ),
    form=GeForm(
        "AllGatherMatmulV2",
        {
            "x1": "self",
            "group": "hcom",
            "rank_size": "world_size",
            "is_gather_out": "gather_output",
            "is_amax_out": "amax_output",
        },
        ("y_dtype",),
        collective=True,
        product=True,
        unused=("group_sizes",),
    ),
)
def all_gather_quant_mm(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    quant_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    y_dtype: int | None = None,
    **types: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of quantised operands; the third result is empty."""
    name = "npu_all_gather_quant_mm"
    refuse_given(name, quant_scale=quant_scale)
    dtype = _type(name, self, None, y_dtype, self.dtype)
    how = bias, (x1_scale, x2_scale), gather_index, gather_output, dtype
    made = _gathered_product(name, self, x2, hcom, world_size, *how, types)
    return *made, self.new_empty(0, dtype=torch.float32)


# ---- rows for columns ----


def columns_to_rows(y: Tensor, hcom: str, world: int) -> Tensor:
    """Part r of the columns goes to rank r; rows of all ranks lie one after the other."""
    if world <= 1:
        return y
    parts = y.unflatten(-1, (world, -1)).transpose(0, 1).contiguous()
    return exchanged(parts, hcom, world).flatten(0, 1)


def rows_to_columns(x: Tensor, hcom: str, world: int) -> Tensor:
    """Part r of the rows goes to rank r; columns of all ranks lie one after the other."""
    if world <= 1:
        return x
    parts = exchanged(x.unflatten(0, (world, -1)).contiguous(), hcom, world)
    return parts.transpose(0, 1).flatten(1).contiguous()


def _check_axes(name: str, axes: Sequence[int] | None, known: list[int]) -> None:
    if axes is not None and list(axes) != known:
        raise wrong(name, "all2all_axes", f"is {list(axes)}, known is {known}")


_QUANT = (
    "Tensor? x1_scale=None, Tensor? x2_scale=None, Tensor? common_scale=None, "
    "Tensor? x1_offset=None, Tensor? x2_offset=None, int? x1_quant_mode=None, "
    "int? x2_quant_mode=None, int? common_quant_mode=None, int[]? group_sizes=None, "
    "int[]? all2all_axes=None, int? comm_quant_dtype=None, "
)
_QUANT_TYPES = (
    "int? x1_dtype=None, int? x2_dtype=None, int? x1_scale_dtype=None, "
    "int? x2_scale_dtype=None, int? output_scale_dtype=None, int? comm_scale_dtype=None, "
    "int? y_dtype=None, str? comm_mode=None"
)
_UNUSED = (
    "comm_mode",
    "group_sizes",
    "x1_quant_mode",
    "x2_quant_mode",
    "comm_quant_dtype",
    "output_scale_dtype",
    "comm_scale_dtype",
)
_NAMES = {
    "group": "hcom",
    "alltoall_out_flag": "all2all_out_flag",
    "comm_scale": "common_scale",
    "comm_quant_mode": "common_quant_mode",
}


def _result_type(x1: Any, x1_dtype: int | None, y_dtype: int | None) -> torch.dtype:
    """The type of a product: that of plain operands, float32 of quantised ones."""
    if y_dtype is not None:
        return dtype_of("npu_all_to_all_quant_matmul", "y_dtype", y_dtype)
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return x1.dtype if x1_dtype is None and x1.dtype in plain else torch.float32


def _no_more(name: str, given: dict[str, Any]) -> None:
    unknown = ("common_scale", "x1_offset", "x2_offset")
    refuse_given(name, **{n: given.get(n) for n in unknown})


def _by_name(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of all arguments by name, from one that gets them as they were given."""
    names = [a.name for a in OperatorCall(schema).arguments]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: function(**dict(zip(names, args, strict=False)) | more)

    return wrap


_TO_ROWS = (
    "npu_quant_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, "
    f"Tensor? bias=None, {_QUANT}{_QUANT_TYPES}) -> Tensor"
)


@_by_name(_TO_ROWS)
def _fake_to_rows(
    x1: Any,
    x2: Any,
    hcom: str,
    world_size: int,
    x1_dtype: int | None = None,
    y_dtype: int | None = None,
    **others: Any,
) -> Any:
    world = max(world_size, 1)
    dims = [x1.shape[0] * world, x2.shape[1] // world]
    return x1.new_empty(dims, dtype=_result_type(x1, x1_dtype, y_dtype))


@OPERATORS.add(
    _TO_ROWS,
    _fake_to_rows,
    form=GeForm(
        "MatmulAlltoAll", _NAMES, ("y_dtype",), collective=True, product=True, unused=_UNUSED
    ),
)
@_by_name(_TO_ROWS)
def matmul_all_to_all(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
    y_dtype: int | None = None,
    **types: Any,
) -> Tensor:
    """A product whose columns go to the ranks, which have rows of all then."""
    name = "npu_matmul_all_to_all"
    _no_more(name, types)
    _check_axes(name, all2all_axes, [-1, -2])
    y = _biased(_product(name, x1, x2, x1_scale, x2_scale, types), bias)
    y = y.to(_result_type(x1, types.get("x1_dtype"), y_dtype))
    return columns_to_rows(y, hcom, ranks(hcom, world_size))


OPERATORS.add(
    "npu_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, "
    "int[]? all2all_axes=None, str? comm_mode=None) -> Tensor",
    lambda x1, x2, hcom, world, *others: _fake_to_rows(x1, x2, hcom, world),
    form=GeForm("MatmulAlltoAll", _NAMES, collective=True, product=True, unused=_UNUSED),
)(
    lambda x1, x2, hcom, world, bias=None, axes=None, mode=None: matmul_all_to_all(
        x1, x2, hcom, world, bias, all2all_axes=axes
    )
)


def _fake_to_columns(
    x1: Any,
    x2: Any,
    hcom: str,
    world_size: int,
    *,
    all2all_out_flag: bool = True,
    x1_dtype: int | None = None,
    y_dtype: int | None = None,
    **others: Any,
) -> Any:
    world = max(world_size, 1)
    rows, width = x1.shape[0] // world, x1.shape[1] * world
    y = x1.new_empty([rows, x2.shape[1]], dtype=_result_type(x1, x1_dtype, y_dtype))
    return y, x1.new_empty([rows, width] if all2all_out_flag else [0])


@OPERATORS.add(
    "npu_all_to_all_quant_matmul(Tensor x1, Tensor x2, str hcom, int world_size, *, "
    f"bool all2all_out_flag=True, Tensor? bias=None, {_QUANT}int? x1_quant_dtype=None, "
    f"{_QUANT_TYPES}) -> (Tensor, Tensor)",
    _fake_to_columns,
    form=GeForm(
        "AlltoAllMatmul",
        _NAMES,
        ("y_dtype",),
        collective=True,
        product=True,
        unused=(*_UNUSED, "x1_quant_dtype"),
    ),
)
def all_to_all_matmul(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    all2all_out_flag: bool = True,
    bias: Tensor | None = None,
    x1_scale: Tensor | None = None,
    x2_scale: Tensor | None = None,
    all2all_axes: Sequence[int] | None = None,
    y_dtype: int | None = None,
    **types: Any,
) -> tuple[Tensor, Tensor]:
    """Rows that go to the ranks, which have columns of all then, times a weight; and these rows. A
    scale of rows is that of the rows that arrive."""
    name = "npu_all_to_all_matmul"
    _no_more(name, types)
    _check_axes(name, all2all_axes, [-2, -1])
    whole = rows_to_columns(x1, hcom, ranks(hcom, world_size))
    y = _biased(_product(name, whole, x2, x1_scale, x2_scale, types), bias)
    shown = whole.clone() if all2all_out_flag else x1.new_empty(0)
    return y.to(_result_type(x1, types.get("x1_dtype"), y_dtype)), shown


OPERATORS.add(
    "npu_all_to_all_matmul(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, "
    "int[]? all2all_axes=None, bool all2all_out_flag=True, str? comm_mode=None) "
    "-> (Tensor, Tensor)",
    lambda x1, x2, hcom, world, bias=None, axes=None, shown=True, mode=None: _fake_to_columns(
        x1, x2, hcom, world, all2all_out_flag=shown
    ),
    form=GeForm("AlltoAllMatmul", _NAMES, collective=True, product=True, unused=_UNUSED),
)(
    lambda x1, x2, hcom, world, bias=None, axes=None, shown=True, mode=None: all_to_all_matmul(
        x1, x2, hcom, world, bias=bias, all2all_axes=axes, all2all_out_flag=shown
    )
)


# ---- quantised sums ----


def _quant_type(code: Any) -> torch.dtype:
    return dtype_of("npu_quant_all_reduce", "output_dtype", 15 if code is None else code)


def _dequantised(name: str, x: Tensor, scales: Tensor, types: dict[str, Any]) -> Tensor:
    """Values times scales: of rows, of blocks of a row, or shared ones of 32 values."""
    operand = Factor(x, scales, types.get("x_dtype"), types.get("scales_dtype"))
    values, factor = operand.values(name, -1)
    if factor is None:
        return values.to(torch.float32)
    factor = factor.reshape(*x.shape[:-1], -1)
    size = -(-values.shape[-1] // factor.shape[-1])
    wide_factor = factor.repeat_interleave(size, -1)[..., : values.shape[-1]]
    return values.to(torch.float32) * wide_factor


_SUMS = "str? reduce_op='sum', int? output_dtype=None, int? x_dtype=None, int? scales_dtype=None"


@OPERATORS.add(
    "npu_quant_all_reduce(Tensor x, Tensor scales, str hcom, int world_size, *, "
    f"{_SUMS}) -> Tensor",
    lambda x, scales, hcom, world, *, output_dtype=None, **others: x.new_empty(
        x.shape, dtype=_quant_type(output_dtype)
    ),
    form=GeForm("QuantAllReduce", {"group": "hcom"}, ("output_dtype",), collective=True),
)
def quant_all_reduce(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str | None = "sum",
    output_dtype: int | None = None,
    **types: Any,
) -> Tensor:
    """The sum over all ranks of quantised values."""
    name = "npu_quant_all_reduce"
    values = _dequantised(name, x, scales, types)
    world = ranks(hcom, world_size)
    return reduced(values, hcom, name, reduce_op or "sum", world).to(_quant_type(output_dtype))


@OPERATORS.add(
    "npu_quant_reduce_scatter(Tensor x, Tensor scales, str hcom, int world_size, *, "
    f"{_SUMS}) -> Tensor",
    lambda x, scales, hcom, world, *, output_dtype=None, **others: x.new_empty(
        [_scatter_rows(x, int(world)), *x.shape[1:]], dtype=_quant_type(output_dtype)
    ),
    form=GeForm("QuantReduceScatter", {"group": "hcom"}, ("output_dtype",), collective=True),
)
def quant_reduce_scatter(
    x: Tensor,
    scales: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str | None = "sum",
    output_dtype: int | None = None,
    **types: Any,
) -> Tensor:
    """The same, and the rows of it that belong to this rank."""
    name, world = "npu_quant_reduce_scatter", ranks(hcom, int(world_size))
    values = _dequantised(name, x, scales, types)
    whole = reduced(values, hcom, name, reduce_op or "sum", world)
    return own_part(whole, hcom, world).to(_quant_type(output_dtype))
