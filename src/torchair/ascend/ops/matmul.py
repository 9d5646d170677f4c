"""Matrix products of quantised operands, and of groups of rows, each with a weight of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from torchair.ascend.ops import library
from torchair.ascend.ops.library import NpuOperators, refuse, refuse_given, wrong
from torchair.ascend.ops.operands import Factor, format_of_operand, product, scaled_values
from torchair.ops.quantised import (
    dequantized_weight,
    exact_product,
    finished,
    quant_matmul,
    scaled_total,
    unpacked_weight,
    weight_quant_matmul,
)

Tensor = torch.Tensor
OPERATORS = NpuOperators()


# ---- shared with grouped products ----


def columns(weight: Tensor, features: Any) -> Any:
    """Columns of a product with such a weight."""
    along_columns = weight.dtype == torch.int32 and bool(weight.shape[-2] == features)
    return weight.shape[-1] * library.INT4_IN_INT32 if along_columns else weight.shape[-1]


# ---- both operands quantised ----

RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int8)


def quant_matmul_type(output_dtype: int | torch.dtype | None) -> torch.dtype:
    """The type of the result of `npu_quant_matmul`."""
    code = torch.int8 if output_dtype is None else output_dtype
    return library.known_type("npu_quant_matmul", "output_dtype", code, RESULTS)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT4 = 296  # two to a byte


def _of_floats(x1: Any, types: dict[str, Any]) -> bool:
    """Whether operands are floats of four or eight bits."""
    return x1.dtype in _FLOAT8 or types.get("x1_dtype") is not None


def _float_product(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    types: dict[str, Any],
) -> Tensor:
    """A product of narrow floats: with scales of columns and rows, shared ones of blocks of
    features, or those of tiles that `group_sizes` tells."""
    name = "npu_quant_matmul"
    left = format_of_operand(name, "x1_dtype", x1, types.get("x1_dtype"))
    right = format_of_operand(name, "x2_dtype", x2, types.get("x2_dtype"))
    turned = types.get("x2_dtype") == _FLOAT4 and bool(x2.shape[-2] == x1.shape[-1])
    code = types.get("scale_dtype")
    if turned:  # packed along the features that are summed over
        b, columns_ = scaled_values(x2.transpose(-1, -2), right, scale.transpose(-3, -2), code, -1)
        b = b.transpose(-1, -2)
    else:
        b, columns_ = scaled_values(x2, right, scale, code, -2)
    a, of_rows = scaled_values(x1, left, rows, types.get("pertoken_scale_dtype"), -1)
    if types.get("group_sizes") and columns_ is not None:
        b, columns_ = _tiled(b, columns_), None
        a, of_rows = (a if of_rows is None else _tiled(a, of_rows)), None
    y = a @ b
    y = y if columns_ is None else y * columns_
    y = y if of_rows is None else y * of_rows.reshape(*of_rows.shape[: y.dim() - 1], 1)
    return y if bias is None else y + bias.to(y.dtype)


def _tiled(values: Tensor, scales: Tensor) -> Tensor:
    """A matrix times the scales of its tiles, all of one size but the last ones."""
    for dim in (-2, -1):
        size = -(-values.shape[dim] // scales.shape[dim])
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return values * scales


def _fake_quant_matmul(
    x1: Tensor, x2: Tensor, scale: Tensor, *, output_dtype: int | None = None, **others: Any
) -> Tensor:
    if others.get("x2_dtype") == _FLOAT4:
        turned = bool(x2.shape[-2] == x1.shape[-1])
        dims = [*x1.shape[:-1], x2.shape[-1] * (1 if turned else 2)]
        return x1.new_empty(dims, dtype=quant_matmul_type(output_dtype))
    features = x1.shape[-1] * (library.INT4_IN_INT32 if x1.dtype == torch.int32 else 1)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    dims = [*batch, x1.shape[-2], columns(x2, features)]
    return x1.new_empty(dims, dtype=quant_matmul_type(output_dtype))


@OPERATORS.add(
    "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
    "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
    "int? scale_dtype=None, SymInt[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
    _fake_quant_matmul,
)
def _quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    kind = quant_matmul_type(output_dtype)
    if _of_floats(x1, others):
        refuse_given("npu_quant_matmul", y_scale=others.get("y_scale"), offset=offset)
        return finished(_float_product(x1, x2, scale, pertoken_scale, bias, others), kind)
    refuse_given("npu_quant_matmul", **others)
    if offset is not None and kind != torch.int8:
        raise wrong("npu_quant_matmul", "offset", "belongs to a result of int8")
    return quant_matmul(x1, x2, scale, offset, bias, pertoken_scale, kind)


# ---- a quantised weight ----


def _fake_weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    *others: Any,
) -> Tensor:
    dtype = x.dtype if quant_scale is None else torch.int8
    return x.new_empty([*x.shape[:-1], columns(weight, x.shape[-1])], dtype=dtype)


@OPERATORS.add(
    "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, "
    "Tensor? antiquant_offset=None, Tensor? quant_scale=None, Tensor? quant_offset=None, "
    "Tensor? bias=None, int antiquant_group_size=0, int inner_precise=0, "
    "int? weight_dtype=None) -> Tensor",
    _fake_weight_quant_matmul,
)
def _weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    refuse_given("npu_weight_quant_batchmatmul", weight_dtype=weight_dtype)
    factors = (antiquant_scale, antiquant_offset, quant_scale, quant_offset, bias, group)
    return weight_quant_matmul(x, weight, *factors)


# ---- products of groups of rows, each with a weight of its own ----

NAME = "npu_grouped_matmul"
ALONE, ROWS, FEATURES = -1, 0, 2
"""Values of `group_type`: nothing is cut, the rows of `x` are, its features are."""

JOINED = (2, 3)
"""Values of `split_item` that give one result."""

ENDS, COUNTS, PAIRS = 0, 1, 2
"""Values of `group_list_type`: where groups end, how long they are, which one is how long."""

_SHARED = 3  # dims of one weight for all groups

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: torch.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}


def group_pieces(
    operator: str, group_list: Sequence[Any], list_type: int, length: int
) -> list[tuple[int, int, int]]:
    """Group, begin and end of each piece of so many rows."""
    if list_type not in (ENDS, COUNTS, PAIRS):
        raise wrong(operator, "group_list_type", f"is {list_type}, known are 0, 1 and 2")
    if list_type == PAIRS:
        groups = [int(g) for g, _ in group_list]
        given = [int(n) for _, n in group_list]
    else:
        given = [int(n) for n in group_list]
        groups = list(range(len(given)))
    ends = given if list_type == ENDS else list(accumulate(given))
    if ends and (ends[-1] > length or ends != sorted(ends) or ends[0] < 0):
        raise wrong(operator, "group_list", f"ends {ends} do not cut {length} rows")
    return [(g, a, b) for g, (a, b) in zip(groups, pairwise([0, *ends]), strict=True)]


@dataclass(frozen=True)
class Grouped:
    """A grouped product: its operands, each list with one tensor for all groups or one for each;
    an empty list is an operand that is not there."""

    x: Sequence[Tensor]
    weight: Sequence[Tensor]
    bias: Sequence[Tensor] = ()
    scale: Sequence[Tensor] = ()
    antiquant_scale: Sequence[Tensor] = ()
    antiquant_offset: Sequence[Tensor] = ()
    per_token_scale: Sequence[Tensor] = ()
    group_list: Sequence[Any] | None = None  # numbers, or pairs of them
    split_item: int = 0
    group_type: int = ALONE
    group_list_type: int = ENDS
    act_type: int = 0
    dtype: torch.dtype | None = None
    types: Mapping[str, Any] = field(default_factory=dict)  # numbers that name types of operands

    def run(self) -> list[Tensor]:
        """The results."""
        if self.act_type not in _ACTIVATIONS:
            raise refuse(NAME, "act_type", f"is {self.act_type}, known are {[*_ACTIVATIONS]}")
        if self.group_type == FEATURES:
            x, weight = self.x[0], self.weight[0]
            made = [exact_product(x[:, a:b], weight[a:b]) for _, a, b in self._pieces(x.shape[1])]
            return [finished(torch.stack(made), self.dtype or x.dtype)]
        parts = self._parts()
        if self.split_item not in JOINED:
            return parts
        return [parts[0] if len(parts) == 1 else torch.cat(parts)]

    def _parts(self) -> list[Tensor]:
        """Results of `x` one by one, cut into groups where there is one `x` for all."""
        if self.group_type == ALONE or len(self.x) > 1:
            return [self._product(x, g, self._tokens(g)) for g, x in enumerate(self.x)]
        if self.group_type != ROWS:
            raise refuse(NAME, "group_type", f"is {self.group_type}, known are -1, 0 and 2")
        x, pieces = self.x[0], self._pieces(self.x[0].shape[0])
        made = [self._product(x[a:b], g, self._tokens(0, a, b)) for g, a, b in pieces]
        if self.split_item not in JOINED:
            return made
        out = x.new_zeros((x.shape[0], made[0].shape[-1]), dtype=made[0].dtype)
        for part, (_, a, b) in zip(made, pieces, strict=True):
            out[a:b] = part
        return [out]

    def _pieces(self, length: int) -> list[tuple[int, int, int]]:
        """Group, begin and end of each piece."""
        if self.group_list is None:
            raise wrong(NAME, "group_list", "is needed to cut one x into groups")
        return group_pieces(NAME, self.group_list, self.group_list_type, length)

    def _tokens(self, place: int, begin: int = 0, end: int | None = None) -> Tensor | None:
        """Scales of the rows of one `x`."""
        if not self.per_token_scale:
            return None
        return self.per_token_scale[place][begin:end]

    def _product(self, x: Tensor, group: int, tokens: Tensor | None) -> Tensor:
        weight = self._of(self.weight, group)
        assert weight is not None
        if x.dtype in _FLOAT8 or self.types.get("x_dtype") is not None:
            return self._float_product(x, weight, group, tokens)
        weight = unpacked_weight(weight, x.shape[-1])
        factors = self._of(self.antiquant_scale, group)
        if factors is not None:
            weight = dequantized_weight(weight, factors, self._of(self.antiquant_offset, group))
        total, bias = exact_product(x, weight), self._of(self.bias, group)
        values = scaled_total(total, bias, self._of(self.scale, group), tokens)
        return finished(_ACTIVATIONS[self.act_type](values), self.dtype or x.dtype)

    def _float_product(
        self, x: Tensor, weight: Tensor, group: int, tokens: Tensor | None
    ) -> Tensor:
        """A product of narrow floats, with scales of columns and rows or shared ones of blocks."""
        scale = self._of(self.scale, group)
        rows = Factor.typed(x, tokens, self.types, "x_dtype", "per_token_scale_dtype")
        matrix = Factor.typed(weight, scale, self.types, "weight_dtype", "scale_dtype")
        y = product(NAME, rows, matrix)
        bias = self._of(self.bias, group)
        y = y if bias is None else y + bias.to(y.dtype)
        return finished(_ACTIVATIONS[self.act_type](y), self.dtype or torch.float32)

    def _of(self, tensors: Sequence[Tensor], group: int) -> Tensor | None:
        """What belongs to a group: a tensor of the list, or a part of the only one where one
        weight with a dim more holds those of all groups."""
        if not tensors:
            return None
        if len(tensors) > 1:
            return tensors[group]
        shared = len(self.weight) == 1 and self.weight[0].dim() == _SHARED
        return tensors[0][group] if shared else tensors[0]


# ---- the operator ----


def _grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Any = None,
    group_type: int | None = None,
    output_dtype: int | None = None,
    tuning_config: Any = None,
    **others: Any,
) -> list[Tensor]:
    known = [f.name for f in fields(Grouped) if others.get(f.name) is not None]
    given = {name: others.pop(name) for name in known}
    named = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
    types = {name: others.pop(name, None) for name in named}
    refuse_given(NAME, **others)
    _check_split(x, group_list, given.get("split_item", 0))
    ends = group_list.tolist() if isinstance(group_list, Tensor) else group_list
    kind, dtype = kind_of(group_type, x, group_list), result_type(x, output_dtype)
    how: dict[str, Any] = {"group_list": ends, "group_type": kind, "dtype": dtype, "types": types}
    return Grouped(x, weight, **how, **given).run()


def kind_of(group_type: int | None, x: Sequence[Any], group_list: Any) -> int:
    """The group type, which may be left out: then one `x` with a group list is cut by rows."""
    if group_type is not None:
        return group_type
    return ROWS if len(x) == 1 and group_list is not None else ALONE


def result_type(x: Sequence[Tensor], output_dtype: int | torch.dtype | None) -> torch.dtype:
    """The type of the results."""
    code = x[0].dtype if output_dtype is None else output_dtype
    return library.dtype_of(NAME, "output_dtype", code)


def _check_split(x: Sequence[Tensor], group_list: Any, split_item: int | None) -> None:
    """How large each result of one cut `x` is must be known before anything is computed."""
    if split_item not in JOINED and len(x) == 1 and isinstance(group_list, Tensor):
        raise refuse(NAME, "split_item", "one x and a tensor as group_list give one result: use 2")


def _fake(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Any = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    _check_split(x, group_list, split_item)
    dtype, kind = result_type(x, output_dtype), kind_of(group_type, x, group_list)
    if kind == FEATURES:
        count = group_list.shape[0] if isinstance(group_list, Tensor) else len(group_list)
        dims = [[count, x[0].shape[0], weight[0].shape[-1]]]
    else:
        dims = _row_dims(x, weight, group_list, split_item in JOINED, group_list_type)
    return [x[0].new_empty(d, dtype=dtype) for d in dims]


def _row_dims(
    x: Sequence[Tensor], weight: Sequence[Tensor], group_list: Any, joined: bool, list_type: Any
) -> list[list[Any]]:
    def width(g: int) -> Any:
        return columns(weight[min(g, len(weight) - 1)], x[min(g, len(x) - 1)].shape[-1])

    if joined:
        rows = sum((other.shape[0] for other in x[1:]), start=x[0].shape[0])
        return [[rows, *x[0].shape[1:-1], width(0)]]
    if len(x) > 1 or group_list is None:
        return [[*t.shape[:-1], width(g)] for g, t in enumerate(x)]
    counts = list(group_list)
    if list_type != COUNTS:
        counts = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    return [[n, width(g)] for g, n in enumerate(counts)]


_OPTIONS = (
    "Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, {groups} group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
    "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
    "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
    "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None"
)

for _name, _groups in ((NAME, "Tensor?"), (f"{NAME}.List", "SymInt[]?")):
    _given = _OPTIONS.format(groups=_groups)
    _schema = f"{_name}(Tensor[] x, Tensor[] weight, *, {_given}) -> Tensor[]"
    OPERATORS.add(_schema, _fake)(_grouped_matmul)
