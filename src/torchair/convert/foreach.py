"""Converters of operators on lists of tensors, as tables.

Numbers become Const of the lists' type. Beside 16 bit tensors torch keeps them in float32, so
they are not rounded to 16 bits here; lists of mixed types are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.create import typed
from torchair.convert.direct import direct
from torchair.convert.operands import factor
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, INT_TYPES, DataType, ge_to_torch
from torchair.ge.graph import Value
from torchair.operators.foreach import FORMS, OVERLOADS, ROUNDING, TERNARY

aten = torch.ops.aten
ValueList = list[Value]
FLOAT = DataType.DT_FLOAT
_ALIASES = {"_foreach_clamp_min": "Maximum", "_foreach_clamp_max": "Minimum"}
_OWN = ("ForeachNorm", "ForeachPowScalarAndTensor")  # converted below


def _type(*lists: ValueList) -> int:
    types = {x.dtype for members in lists for x in members}
    if len(types) != 1:
        raise Decline("lists of mixed types")
    dtype = types.pop()
    if dtype not in FLOAT_TYPES | INT_TYPES:
        raise Decline("neither a list of floats nor of integers")
    return dtype


def _number(dtype: int, x: Any) -> Value:
    """A number beside tensors of a type, so that the result is what torch makes of it."""
    if isinstance(x, (Value, complex)):
        raise Decline("a symbolic or complex number")
    if dtype in FLOAT_TYPES:
        return factor(dtype, x) if dtype != DataType.DT_BF16 else ge.Const(x, dtype=FLOAT)
    if isinstance(x, float):
        return ge.Const(x, dtype=FLOAT)
    bounds = torch.iinfo(ge_to_torch(dtype))
    return ge.Const(x, dtype=dtype if bounds.min <= x <= bounds.max else DataType.DT_INT64)


def _numbers(dtype: int, values: Any) -> Value:
    """A list of numbers: integers stay integers."""
    if isinstance(values, Value) or any(isinstance(x, (Value, complex)) for x in values):
        raise Decline("a symbolic or complex number")
    if all(isinstance(x, int) for x in values):
        return ge.Const(list(values), dtype=DataType.DT_INT64)
    if dtype not in FLOAT_TYPES and not all(isinstance(x, float) for x in values):
        raise Decline("integers beside floats promote each member in its own way")
    return ge.Const(list(values), dtype=dtype if dtype == DataType.DT_DOUBLE else FLOAT)


def _and_numbers(op_type: str, count: int, default: Any = None) -> Callable[..., Any]:
    """A converter to an operator on so many lists and a number or a list of numbers, `default`
    where that may be left out."""

    def convert(*args: Any, **named: Any) -> Any:
        lists, (x, *_) = args[:count], [*args[count:], *named.values(), default]
        as_values = _numbers if isinstance(x, (list, tuple)) else _number
        return builder(op_type)(*lists, as_values(_type(*lists), x))

    return convert


def _register() -> None:
    table = {overload: t for t, overload in OVERLOADS.items() if t not in _OWN}
    for alias, name in _ALIASES.items():
        for form in FORMS:
            table[getattr(getattr(aten, alias), form)] = f"Foreach{name}{form}"
    for overload, op_type in table.items():
        arguments = overload._schema.arguments
        numbers = [a for a in arguments if "number" in str(a.type)]
        if numbers:
            default = numbers[0].default_value
            builtin(overload)(_and_numbers(op_type, len(arguments) - 1, default))
        else:
            direct({overload: op_type})
    for mode, name in ROUNDING.items():
        builtin(getattr(aten, f"_foreach_{name}").default)(_rounded(mode))
    for name in TERNARY:
        direct({getattr(aten, f"_foreach_{name}").Tensor: f"Foreach{name.capitalize()}List"})


@builtin(aten._foreach_norm.Scalar)
def norm(self: ValueList, ord: Any, dtype: Any) -> Any:
    if dtype is not None:
        raise Decline("a norm computed in another type")
    return ge.ForeachNorm(self, _number(_type(self), ord))


@builtin(aten._foreach_pow.ScalarAndTensor)
def pow_of_number(self: Any, exponent: ValueList) -> Any:
    dtype = _type(exponent)
    if not isinstance(self, float):
        return ge.ForeachPowScalarAndTensor(_number(dtype, self), exponent)
    base = typed(self, dtype if dtype == DataType.DT_DOUBLE else FLOAT)
    return ge.ForeachPowScalarAndTensor(ge.Fill([1], base), exponent)


# ---- rounding: integers are whole already ----


def _rounded(mode: int) -> Callable[..., Any]:
    def convert(self: ValueList) -> Sequence[Value]:
        if any(x.dtype not in FLOAT_TYPES | INT_TYPES for x in self):
            raise Decline("neither floats nor integers")
        floats = [x for x in self if x.dtype in FLOAT_TYPES]
        if not floats:
            return [_whole(mode, x) for x in self]
        code = ge.Fill([1], typed(mode, DataType.DT_INT8))
        rounded = iter(ge.ForeachRoundOffNumber(floats, code))
        return [next(rounded) if x.dtype in FLOAT_TYPES else _whole(mode, x) for x in self]

    return convert


def _whole(mode: int, x: Value) -> Value:
    return ge.ZerosLike(x) if ROUNDING[mode] == "frac" else x


_register()
