"""Operands of products with quantised values: what they stand for, whatever format they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchair.ascend.ops import formats, mx
from torchair.ascend.ops.formats import E2M1, E4M3, E5M2, HIFLOAT8, NumberFormat, format_of
from torchair.ascend.ops.library import unpack_int4, wide
from torchair.ops.quantised import scale_values

Tensor = torch.Tensor
E8M0_NUMBERS = (44, 293)
_KNOWN = (E4M3, E5M2, HIFLOAT8, E2M1)


def format_of_operand(
    operator: str, argument: str, x: Any, code: int | None
) -> NumberFormat | None:
    """The format that a type number names, or the type of the tensor does; None for integers and
    for floats that are no quantised values."""
    if code is not None:
        return format_of(operator, argument, code, _KNOWN)
    native = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
    return native.get(x.dtype)


def values_of(x: Tensor, kind: NumberFormat | None) -> Tensor:
    """Values in a type in which products are exact, or nearly so: float64 for integers."""
    if kind is not None:
        return formats.decode(x, kind)
    if x.dtype == torch.int32:
        return unpack_int4(x).to(torch.float64)
    return x.to(wide(x.dtype) if x.dtype.is_floating_point else torch.float64)


def is_shared(scale: Any, code: int | None) -> bool:
    """Whether scales are shared exponents of blocks."""
    return code in E8M0_NUMBERS or scale.dtype == torch.float8_e8m0fnu


def scaled_values(
    x: Tensor, kind: NumberFormat | None, scale: Tensor | None, scale_code: int | None, axis: int
) -> tuple[Tensor, Tensor | None]:
    """Values times the scales of blocks along a dim; or values, and scales that are still to be
    applied."""
    if scale is None:
        return values_of(x, kind), None
    if is_shared(scale, scale_code) and kind is not None:
        return mx.mx_values(x, scale, kind, axis), None
    return values_of(x, kind), scale_values(scale)


@dataclass(frozen=True)
class Factor:
    """One operand of a product: what is stored, its scales, and type numbers for both where the
    tensors do not say what they hold. `argument` is the one that gave the first number."""

    stored: Tensor
    scale: Tensor | None = None
    code: int | None = None
    scale_code: int | None = None
    argument: str = "x_dtype"

    @classmethod
    def typed(
        cls,
        stored: Tensor,
        scale: Tensor | None,
        types: Mapping[str, Any],
        argument: str,
        scale_argument: str,
    ) -> Factor:
        """The same, with the numbers that arguments of these names have."""
        return cls(stored, scale, types.get(argument), types.get(scale_argument), argument)

    def values(self, operator: str, axis: int) -> tuple[Tensor, Tensor | None]:
        """Values, and scales that are not shared ones of blocks along a dim."""
        kind = format_of_operand(operator, self.argument, self.stored, self.code)
        return scaled_values(self.stored, kind, self.scale, self.scale_code, axis)


def product(operator: str, x: Factor, weight: Factor) -> Tensor:
    """Rows times a weight, times the scales of rows and columns, or of everything; shared scales
    lie along the features that are summed over. Products of integers are exact."""
    a, rows = x.values(operator, -1)
    b, columns = weight.values(operator, -2)
    kind = torch.promote_types(a.dtype, b.dtype)
    y = a.to(kind) @ b.to(kind)
    y = y if columns is None else y * columns.reshape(-1).to(kind)
    return y if rows is None else y * rows.reshape(-1, 1).to(kind)
