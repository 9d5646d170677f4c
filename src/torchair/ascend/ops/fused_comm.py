"""Products fused with a collective. Sums over ranks are made in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.ascend.ops.forms import Arguments, GeForm
from torchair.ascend.ops.library import NpuOperators, dtype_of, refuse, refuse_given, wide, wrong
from torchair.ascend.ops.matmul import columns
from torchair.ascend.ops.operands import Factor, product
from torchair.ascend.ops.ranks import (
    columns_to_rows,
    gathered,
    own_part,
    ranks,
    reduced,
    rows_to_columns,
)
from torchair.ops.quantised import (
    dequantized_weight,
    exact_product,
    scale_values,
    unpacked_weight,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- products of plain and of quantised operands ----


def _form(
    ge_type: str, names: dict[str, str], types: Sequence[str] = (), unused: Sequence[str] = ()
) -> GeForm:
    """The GE operator of a product with a collective."""
    return GeForm(ge_type, names, types, collective=True, product=True, unused=unused)


def _product(
    name: str,
    x1: Tensor,
    x2: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    types: dict[str, Any],
) -> Tensor:
    """A product of two factors, of which either may have scales, and a bias. `types` has the
    formats of factors and scales that are not those of their tensors."""
    weight = unpacked_weight(x2, x1.shape[-1]) if x1.dtype != torch.uint8 else x2
    left = Factor.typed(x1, scales[0], types, "x1_dtype", "x1_scale_dtype")
    right = Factor.typed(weight, scales[1], types, "x2_dtype", "x2_scale_dtype")
    return _biased(product(name, left, right), bias)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _type(operator: str, x: Any, scale: Any, code: Any, plain: torch.dtype) -> torch.dtype:
    """The type of a result: a given one, or that of operands that are not quantised."""
    if code is not None:
        return dtype_of(operator, "y_dtype", code)
    return x.dtype if scale is None else plain


# ---- sums over all ranks ----

_SUM = "npu_mm_all_reduce_base"


def _sum_type(a: Arguments) -> torch.dtype:
    scale = a.dequant_scale
    half = torch.bfloat16 if scale is not None and scale.dtype == torch.bfloat16 else torch.float16
    return _type(_SUM, a.x1, scale, a.y_dtype, half)


def _fake_sum(a: Arguments) -> Any:
    return a.x1.new_empty([*a.x1.shape[:-1], columns(a.x2, a.x1.shape[-1])], dtype=_sum_type(a))


@OPERATORS.add_by_record(
    f"{_SUM}(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, "
    "Tensor? dequant_scale=None, Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, "
    "Tensor? comm_quant_scale_2=None, int antiquant_group_size=0, int comm_turn=0, "
    "int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0, "
    "str? comm_mode=None) -> Tensor",
    _fake_sum,
    _form("MatmulAllReduce", {"group": "hcom"}, ("y_dtype",), ("comm_mode", "group_sizes")),
)
def mm_all_reduce(a: Arguments) -> Tensor:
    """A product summed over all ranks, plus `x3`. Operands may be quantised, or the weight alone;
    what a device quantises on the way is sent as it is."""
    y = reduced(_local_sum(a).to(torch.float32), a.hcom, _SUM, a.reduce_op, ranks(a.hcom))
    return (y if a.x3 is None else y + a.x3.to(y.dtype)).to(_sum_type(a))


def _local_sum(a: Arguments) -> Tensor:
    """The product of this rank."""
    if a.antiquant_scale is not None:
        plain, kind = unpacked_weight(a.x2, a.x1.shape[-1]), wide(a.x1.dtype)
        weight = dequantized_weight(
            plain, a.antiquant_scale, a.antiquant_offset, a.antiquant_group_size, kind
        )
        return _biased(a.x1.to(kind) @ weight, a.bias)
    if a.bias is not None and not a.bias.dtype.is_floating_point:
        assert a.dequant_scale is not None
        y = (exact_product(a.x1, a.x2) + a.bias) * scale_values(a.dequant_scale)
        return y if a.pertoken_scale is None else y * a.pertoken_scale.reshape(-1, 1)
    types = {
        "x1_dtype": a.x1_dtype,
        "x2_dtype": a.x2_dtype,
        "x1_scale_dtype": a.pertoken_scale_dtype,
        "x2_scale_dtype": a.dequant_scale_dtype,
    }
    return _product(_SUM, a.x1, a.x2, (a.pertoken_scale, a.dequant_scale), a.bias, types)


# ---- sums, of which each rank has its rows; rows of all ranks, times a weight ----

_TYPES = (
    "int[]? group_sizes=None, bool amax_output=False, int? y_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? x1_scale_dtype=None, int? x2_scale_dtype=None, "
    "str? comm_mode=None"
)
_NAMES = {"x1": "self", "group": "hcom", "rank_size": "world_size"}


def _plain_type(name: str, a: Arguments) -> torch.dtype:
    return _type(name, a.self, a.x2_scale, a.output_dtype, torch.bfloat16)


def _quant_type(name: str, a: Arguments) -> torch.dtype:
    return _type(name, a.self, None, a.y_dtype, a.self.dtype)


def _nothing(a: Arguments) -> Any:
    """The result for largest absolute values, which is always empty."""
    return a.self.new_empty([0], dtype=torch.float32)


def _scatter_rows(x: Any, world_size: int) -> Any:
    return x.shape[0] // max(world_size, 1)


def _fake_scattered(a: Arguments, dtype: torch.dtype) -> Any:
    return a.self.new_empty([_scatter_rows(a.self, a.world_size), a.x2.shape[1]], dtype=dtype)


def _scattered(name: str, a: Arguments, dtype: torch.dtype, types: dict[str, Any]) -> Tensor:
    world = ranks(a.hcom, a.world_size)
    if a.self.shape[0] % world:
        raise wrong(name, "self", f"{a.self.shape[0]} rows have no {world} equal parts")
    y = _product(name, a.self, a.x2, (a.x1_scale, a.x2_scale), a.bias, types).to(torch.float32)
    return own_part(reduced(y, a.hcom, name, a.reduce_op, world), a.hcom, world).to(dtype)


_SCATTER, _QUANT_SCATTER = "npu_mm_reduce_scatter_base", "npu_quant_mm_reduce_scatter"


@OPERATORS.add_by_record(
    f"{_SCATTER}(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "str reduce_op='sum', Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, "
    "int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> Tensor",
    lambda a: _fake_scattered(a, _plain_type(_SCATTER, a)),
    _form("MatmulReduceScatter", _NAMES, unused=("comm_mode",)),
)
def mm_reduce_scatter(a: Arguments) -> Tensor:
    """A product summed over all ranks, and the rows of it that belong to this one."""
    return _scattered(_SCATTER, a, _plain_type(_SCATTER, a), {})


@OPERATORS.add_by_record(
    f"{_QUANT_SCATTER}(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "str reduce_op='sum', Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, "
    f"Tensor? quant_scale=None, int block_size=0, int comm_turn=0, {_TYPES}) -> (Tensor, Tensor)",
    lambda a: (_fake_scattered(a, _quant_type(_QUANT_SCATTER, a)), _nothing(a)),
    _form(
        "MatmulReduceScatterV2",
        {**_NAMES, "is_amax_out": "amax_output"},
        ("y_dtype",),
        ("comm_mode", "group_sizes"),
    ),
)
def quant_mm_reduce_scatter(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same of quantised operands; the second result is empty."""
    refuse_given(_QUANT_SCATTER, quant_scale=a.quant_scale)
    y = _scattered(_QUANT_SCATTER, a, _quant_type(_QUANT_SCATTER, a), vars(a))
    return y, _nothing(a)


def _fake_gathered(a: Arguments, dtype: torch.dtype) -> tuple[Any, Any]:
    rows = a.self.shape[0] * max(a.world_size, 1)
    shown = [rows, a.self.shape[1]] if a.gather_output else [0]
    return a.self.new_empty([rows, a.x2.shape[1]], dtype=dtype), a.self.new_empty(shown)


def _gathered_product(
    name: str, a: Arguments, dtype: torch.dtype, types: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if a.gather_index:
        raise refuse(name, "gather_index", f"{a.gather_index} is not 0")
    world = ranks(a.hcom, a.world_size)
    rows, left = gathered(a.self, a.hcom, world), a.x1_scale
    if left is not None and left.numel() > 1:
        left = gathered(left, a.hcom, world)
    y = _product(name, rows, a.x2, (left, a.x2_scale), a.bias, types)
    return y.to(dtype), rows.clone() if a.gather_output else a.self.new_empty(0)


_GATHER, _QUANT_GATHER = "npu_all_gather_base_mm", "npu_all_gather_quant_mm"
_GATHER_NAMES = {**_NAMES, "is_gather_out": "gather_output"}


@OPERATORS.add_by_record(
    f"{_GATHER}(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, "
    "bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, "
    "str? comm_mode=None) -> (Tensor, Tensor)",
    lambda a: _fake_gathered(a, _plain_type(_GATHER, a)),
    _form("AllGatherMatmul", _GATHER_NAMES, unused=("comm_mode",)),
)
def all_gather_mm(a: Arguments) -> tuple[Tensor, Tensor]:
    """Rows of all ranks times a weight, and these rows."""
    return _gathered_product(_GATHER, a, _plain_type(_GATHER, a), {})


@OPERATORS.add_by_record(
    f"{_QUANT_GATHER}(Tensor self, Tensor x2, str hcom, int world_size, *, "
    "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, Tensor? quant_scale=None, "
    "int block_size=0, int gather_index=0, bool gather_output=True, int comm_turn=0, "
    f"{_TYPES}) -> (Tensor, Tensor, Tensor)",
    lambda a: (*_fake_gathered(a, _quant_type(_QUANT_GATHER, a)), _nothing(a)),
    _form(
        "AllGatherMatmulV2",
        {**_GATHER_NAMES, "is_amax_out": "amax_output"},
        ("y_dtype",),
        ("group_sizes",),
    ),
)
def all_gather_quant_mm(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """The same of quantised operands; the third result is empty."""
    refuse_given(_QUANT_GATHER, quant_scale=a.quant_scale)
    made = _gathered_product(_QUANT_GATHER, a, _quant_type(_QUANT_GATHER, a), vars(a))
    return *made, _nothing(a)


# ---- rows for columns ----

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
_EXCHANGE_NAMES = {
    "group": "hcom",
    "alltoall_out_flag": "all2all_out_flag",
    "comm_scale": "common_scale",
    "comm_quant_mode": "common_quant_mode",
}
_REFUSED = ("common_scale", "x1_offset", "x2_offset")


def _result_type(a: Arguments) -> torch.dtype:
    """The type of a product: that of plain operands, float32 of quantised ones."""
    given = vars(a)  # operators of plain operands name no types
    if given.get("y_dtype") is not None:
        return dtype_of("npu_all_to_all_quant_matmul", "y_dtype", a.y_dtype)
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    named = given.get("x1_dtype") is not None
    return torch.float32 if named or a.x1.dtype not in plain else a.x1.dtype


def _exchange_product(name: str, a: Arguments, x1: Tensor) -> Tensor:
    """The product before rows are sent, or after."""
    given = vars(a)
    scales = given.get("x1_scale"), given.get("x2_scale")
    return _product(name, x1, a.x2, scales, a.bias, given).to(_result_type(a))


def _check_exchange(name: str, a: Arguments, axes: list[int]) -> None:
    refuse_given(name, **{n: vars(a).get(n) for n in _REFUSED})
    if a.all2all_axes is not None and list(a.all2all_axes) != axes:
        raise wrong(name, "all2all_axes", f"is {list(a.all2all_axes)}, known is {axes}")


def _fake_to_rows(a: Arguments) -> Any:
    world = max(a.world_size, 1)
    dims = [a.x1.shape[0] * world, a.x2.shape[1] // world]
    return a.x1.new_empty(dims, dtype=_result_type(a))


@OPERATORS.add_by_record(
    "npu_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, "
    "int[]? all2all_axes=None, str? comm_mode=None) -> Tensor",
    _fake_to_rows,
    _form("MatmulAlltoAll", _EXCHANGE_NAMES, unused=_UNUSED),
)
@OPERATORS.add_by_record(
    "npu_quant_matmul_all_to_all(Tensor x1, Tensor x2, str hcom, int world_size, "
    f"Tensor? bias=None, {_QUANT}{_QUANT_TYPES}) -> Tensor",
    _fake_to_rows,
    _form("MatmulAlltoAll", _EXCHANGE_NAMES, ("y_dtype",), _UNUSED),
)
def matmul_all_to_all(a: Arguments) -> Tensor:
    """A product whose columns go to the ranks, which have rows of all then."""
    name = "npu_matmul_all_to_all"
    _check_exchange(name, a, [-1, -2])
    return columns_to_rows(_exchange_product(name, a, a.x1), a.hcom, ranks(a.hcom, a.world_size))


def _fake_to_columns(a: Arguments) -> Any:
    world = max(a.world_size, 1)
    rows, width = a.x1.shape[0] // world, a.x1.shape[1] * world
    y = a.x1.new_empty([rows, a.x2.shape[1]], dtype=_result_type(a))
    return y, a.x1.new_empty([rows, width] if a.all2all_out_flag else [0])


@OPERATORS.add_by_record(
    "npu_all_to_all_matmul(Tensor x1, Tensor x2, str hcom, int world_size, Tensor? bias=None, "
    "int[]? all2all_axes=None, bool all2all_out_flag=True, str? comm_mode=None) "
    "-> (Tensor, Tensor)",
    _fake_to_columns,
    _form("AlltoAllMatmul", _EXCHANGE_NAMES, unused=_UNUSED),
)
@OPERATORS.add_by_record(
    "npu_all_to_all_quant_matmul(Tensor x1, Tensor x2, str hcom, int world_size, *, "
    f"bool all2all_out_flag=True, Tensor? bias=None, {_QUANT}int? x1_quant_dtype=None, "
    f"{_QUANT_TYPES}) -> (Tensor, Tensor)",
    _fake_to_columns,
    _form("AlltoAllMatmul", _EXCHANGE_NAMES, ("y_dtype",), (*_UNUSED, "x1_quant_dtype")),
)
def all_to_all_matmul(a: Arguments) -> tuple[Tensor, Tensor]:
    """Rows that go to the ranks, which have columns of all then, times a weight; and these rows. A
    scale of rows is that of the rows that arrive."""
    name = "npu_all_to_all_matmul"
    _check_exchange(name, a, [-2, -1])
    whole = rows_to_columns(a.x1, a.hcom, ranks(a.hcom, a.world_size))
    shown = whole.clone() if a.all2all_out_flag else a.x1.new_empty(0)
    return _exchange_product(name, a, whole), shown


# ---- quantised sums ----

_SUM_ARGUMENTS = (
    "(Tensor x, Tensor scales, str hcom, int world_size, *, str? reduce_op='sum', "
    "int? output_dtype=None, int? x_dtype=None, int? scales_dtype=None) -> Tensor"
)


def _sum_form(ge_type: str) -> GeForm:
    return GeForm(ge_type, {"group": "hcom"}, ("output_dtype",), collective=True)


def _sum_ranks(a: Arguments) -> int:
    return ranks(a.hcom, int(a.world_size))  # GE has a string for it


def _output_type(a: Arguments) -> torch.dtype:
    code = 15 if a.output_dtype is None else a.output_dtype
    return dtype_of("npu_quant_all_reduce", "output_dtype", code)


def _quantised_sum(name: str, a: Arguments) -> Tensor:
    """The sum over all ranks of values times scales: of rows, of blocks of a row, or shared ones of
    32 values."""
    values, factor = Factor(a.x, a.scales, a.x_dtype, a.scales_dtype).values(name, -1)
    values = values.to(torch.float32)
    if factor is not None:
        factor = factor.reshape(*a.x.shape[:-1], -1)
        size = -(-values.shape[-1] // factor.shape[-1])
        values = values * factor.repeat_interleave(size, -1)[..., : values.shape[-1]]
    return reduced(values, a.hcom, name, a.reduce_op or "sum", _sum_ranks(a))


@OPERATORS.add_by_record(
    f"npu_quant_all_reduce{_SUM_ARGUMENTS}",
    lambda a: a.x.new_empty(a.x.shape, dtype=_output_type(a)),
    _sum_form("QuantAllReduce"),
)
def quant_all_reduce(a: Arguments) -> Tensor:
    """The sum over all ranks of quantised values."""
    return _quantised_sum("npu_quant_all_reduce", a).to(_output_type(a))


@OPERATORS.add_by_record(
    f"npu_quant_reduce_scatter{_SUM_ARGUMENTS}",
    lambda a: a.x.new_empty(
        [_scatter_rows(a.x, int(a.world_size)), *a.x.shape[1:]], dtype=_output_type(a)
    ),
    _sum_form("QuantReduceScatter"),
)
def quant_reduce_scatter(a: Arguments) -> Tensor:
    """The same, and the rows of it that belong to this rank."""
    whole = _quantised_sum("npu_quant_reduce_scatter", a)
    return own_part(whole, a.hcom, _sum_ranks(a)).to(_output_type(a))
