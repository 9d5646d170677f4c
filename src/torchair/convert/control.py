"""Converters of symbolic sizes, Python operators on them, and run-time checks.

Integers are INT64 scalars on the host. Floats are kept in double as Python has them, so that a
size computed through a division is exact.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from torchair import ge
from torchair.convert.operands import keep_alive, members, promote, size_of
from torchair.convert.registry import Decline, builtin
from torchair.ge import attrs as attr
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, DataType
from torchair.ge.graph import TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import Dim, Sym, from_torch

aten = torch.ops.aten
INT64, DOUBLE, BOOL = DataType.DT_INT64, DataType.DT_DOUBLE, DataType.DT_BOOL


def _exact(dtype: int) -> int:
    return DOUBLE if dtype in FLOAT_TYPES else dtype


def _common(numbers: Sequence[Any], _result: int) -> int:
    def is_float(x: Any) -> bool:
        return x.dtype in FLOAT_TYPES if isinstance(x, Value) else isinstance(x, float)

    return DOUBLE if any(is_float(x) for x in numbers) else INT64


_Type = Callable[[Sequence[Any], int], int]
"""In which type numbers are combined: by themselves and the type of the result."""

_NUMBERS: dict[_Type, dict[Any, str]] = {
    lambda _, result: _exact(result): {
        operator.add: "Add",
        operator.sub: "Sub",
        operator.mul: "Mul",
        operator.pow: "Pow",
        operator.floordiv: "FloorDiv",
        operator.truediv: "Div",
        operator.mod: "FloorMod",  # sign of the divisor, as in Python
        operator.lshift: "LeftShift",
        operator.rshift: "RightShift",
        torch.sym_max: "Maximum",
        torch.sym_min: "Minimum",
    },
    _common: {
        operator.eq: "Equal",
        operator.ne: "NotEqual",
        operator.gt: "Greater",
        operator.ge: "GreaterEqual",
        operator.lt: "Less",
        operator.le: "LessEqual",
    },
    lambda *_: BOOL: {operator.and_: "LogicalAnd", operator.or_: "LogicalOr"},
}


def _combined(op_type: str, wide: _Type) -> Callable[..., Value]:
    def convert(a: Any, b: Any, *, meta_outputs: TensorSpec) -> Value:
        return builder(op_type)(*promote(wide((a, b), meta_outputs.dtype), a, b))

    return convert


for _wide, _table in _NUMBERS.items():
    for _target, _type in _table.items():
        builtin(_target)(_combined(_type, _wide))
builtin(operator.neg)(lambda a: ge.Neg(a))
builtin(torch.sym_not)(lambda a: ge.LogicalNot(a))


def _rounded(op_type: str) -> Callable[..., Value]:
    """A whole number near a float; an integer stays what it is."""

    def convert(x: Value) -> Value:
        if x.dtype == INT64:
            return x
        return ge.Cast(builder(op_type)(promote(DOUBLE, x)), dst_type=INT64)

    return convert


_ROUND = {
    math.floor: "Floor",
    math.ceil: "Ceil",
    math.trunc: "Trunc",
    torch.sym_int: "Trunc",
    round: "Round",
}
for _rounding, _type in _ROUND.items():
    builtin(_rounding)(_rounded(_type))


@builtin(torch.sym_ite)
def sym_ite(b: Value, t: Any, f: Any, *, meta_outputs: TensorSpec) -> Value:
    return ge.SelectV2(b, *promote(_exact(meta_outputs.dtype), t, f))


@builtin(torch.sym_sum)
def sym_sum(args: Any) -> Value:
    return reduce(lambda a, b: ge.Add(*promote(INT64, a, b)), members(args))


_REAL: dict[str, Callable[..., Value]] = {
    "sym_float": lambda a: promote(DOUBLE, a),
    "sym_sqrt": lambda a: ge.Sqrt(promote(DOUBLE, a)),
    "sym_log2": lambda a: ge.Log(promote(DOUBLE, a), base=2.0),
}
for _name, _real in _REAL.items():
    builtin(getattr(torch, _name, None), getattr(torch, f"_{_name}", None))(_real)


# ---- sizes of tensors ----


@builtin(aten.sym_size, aten.sym_size.int)
def sym_size(self: Value, dim: int) -> Any:
    assert self.shape is not None
    known = self.shape[dim]
    return known if isinstance(known, int) else size_of(self, dim % self.rank)


@builtin(aten.sym_numel, aten.sym_numel.default)
def sym_numel(self: Value) -> Value:
    count = ge.ReduceProdD(ge.Shape(self, dtype=INT64), axes=[0])
    return ge.Cast(count, dst_type=INT64)


@builtin(aten.sym_stride, aten.sym_stride.int)
def sym_stride(self: Value, dim: int, meta_inputs: Any) -> Any:
    return value_of(from_torch(meta_inputs[0].stride(dim)))


@builtin(aten.sym_storage_offset, aten.sym_storage_offset.default)
def sym_storage_offset(self: Value, meta_inputs: Any) -> Any:
    return value_of(from_torch(meta_inputs[0].storage_offset()))


def value_of(dim: Dim) -> Any:
    """The value of an expression over the sizes of the graph's inputs, computed from those."""
    return dim if isinstance(dim, int) else _rebuild(dim.expr)


_EXPRESSIONS = {
    "Add": "Add", "Mul": "Mul", "Pow": "Pow", "FloorDiv": "FloorDiv", "CleanDiv": "FloorDiv",
    "Mod": "FloorMod", "PythonMod": "FloorMod", "Max": "Maximum", "Min": "Minimum",
}  # fmt: skip


def _rebuild(expr: Any) -> Any:
    if expr.is_Integer:
        return ge.Const(int(expr), dtype=INT64)
    if expr.is_Symbol:
        return _symbol_value(Sym(expr))
    op_type = _EXPRESSIONS.get(type(expr).__name__)
    if op_type is None:
        raise Decline(f"no operator for {expr}")
    return reduce(builder(op_type), [_rebuild(a) for a in expr.args])


def _symbol_value(symbol: Sym) -> Value:
    data = [node.outputs[0] for node in get_default_ge_graph().data]
    for value in data:
        if not value.shape and value.content == symbol:
            return value
    for value in data:
        for dim, size in enumerate(value.shape or ()):
            if size == symbol:
                return size_of(value, dim)
    raise Decline(f"the size {symbol} is not an input")


# ---- checks ----


@builtin(aten._assert_scalar.default, aten._assert_async.msg, aten._assert_async.default)
def assert_true(self: Any, assert_msg: str = "assertion failed") -> None:
    if not isinstance(self, Value):
        if not self:
            raise Decline("a check that always fails")
        return
    ge.Assert(self, [])
    keep_alive().attrs["_message"] = attr.Str(assert_msg)


@builtin(
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
def known_when_traced(*args: Any, **kwargs: Any) -> None:
    """Tracing has checked it, and guards see to it that calls obey."""
