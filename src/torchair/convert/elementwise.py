"""Converters of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.operands import HALF, cast_result, direct, plain, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, INT_TYPES, DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
prims = torch.ops.prims
_COMPLEX = (DataType.DT_COMPLEX32, DataType.DT_COMPLEX64, DataType.DT_COMPLEX128)


def result_type(*operands: Any) -> int:
    """GE type in which torch compares or combines two operands, 0-d tensors weighing less."""
    first, second = (_stand_in(x) for x in operands)
    return torch_to_ge(torch.result_type(first, second))


def _stand_in(x: Any) -> Any:
    if not isinstance(x, Value):
        return x
    return torch.empty((1,) * x.rank, dtype=ge_to_torch(x.dtype), device="meta")


def factor(dtype: int, x: Any) -> Value:
    """A scale. Beside 16 bit tensors torch keeps a number in float32, so it is not rounded here."""
    if dtype not in HALF or isinstance(x, complex):
        return promote(dtype, x)
    if isinstance(x, Value):
        keep = x.shape == () and x.dtype not in HALF
        return promote(DataType.DT_FLOAT if keep else dtype, x)
    exact = torch.tensor(x, dtype=ge_to_torch(dtype)).item() == x
    return ge.Const(x, dtype=dtype if exact else DataType.DT_FLOAT)


# ---- arithmetic ----


@builtin(aten.add.Tensor, aten.add.Scalar)
def add(self: Any, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    self, other = promote(meta_outputs.dtype, self, other)
    if isinstance(alpha, Value) or alpha != 1:
        return ge.AxpyV2(self, other, factor(meta_outputs.dtype, alpha))
    return ge.Add(self, other)


@builtin(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Any, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    self, other = promote(dtype, self, other)
    if dtype in HALF and not isinstance(alpha, Value) and alpha != 1:
        return ge.AxpyV2(self, other, factor(dtype, -alpha))  # no rounding in between
    if isinstance(alpha, Value) or alpha != 1:
        other = ge.Mul(other, promote(dtype, alpha))
    return ge.Sub(self, other)


@builtin(aten.rsub.Scalar)
def rsub_scalar(self: Any, other: Any, alpha: Any = 1, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    return ge.Sxpy(*promote(dtype, other, self), factor(dtype, alpha))


@builtin(aten.rsub.Tensor)
def rsub(self: Any, other: Any, *, alpha: Any = 1, meta_outputs: TensorSpec) -> Value:
    return sub(other, self, alpha, meta_outputs=meta_outputs)


@builtin(aten.mul.Tensor)
def mul(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    if dtype in HALF and isinstance(other, (int, float)):
        return cast_result(ge.Muls(promote(dtype, self), value=other), dtype)
    return cast_result(mul_scalar(self, other, meta_outputs=meta_outputs), dtype)


@builtin(aten.mul.Scalar)
def mul_scalar(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    if dtype == DataType.DT_BOOL:
        as_numbers = promote(DataType.DT_UINT8, *promote(dtype, self, other))
        return ge.Cast(ge.Mul(*as_numbers), dst_type=dtype)
    return ge.Mul(promote(dtype, self), factor(dtype, other))


@builtin(aten.div.Tensor, aten.true_divide.Tensor, aten.div.Scalar)
def div(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    return ge.RealDiv(promote(dtype, self), factor(dtype, other))


@builtin(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(
    self: Any, other: Any, *, rounding_mode: str | None = None, meta_outputs: TensorSpec
) -> Value:
    if rounding_mode is None:
        return div(self, other, meta_outputs=meta_outputs)
    if rounding_mode == "floor":
        return floor_divide(self, other, meta_outputs=meta_outputs)
    dtype = meta_outputs.dtype
    operands = promote(dtype, self), factor(dtype, other)
    if dtype in (DataType.DT_FLOAT, DataType.DT_DOUBLE):
        return ge.Trunc(ge.RealDiv(*operands))
    return ge.TruncateDiv(*operands)  # integers stay exact, 16 bit quotients are not rounded up


@builtin(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    return ge.FloorDiv(promote(dtype, self), factor(dtype, other))


def _scaled(op_type: str) -> Callable[..., Value]:
    def convert(
        self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1, meta_outputs: TensorSpec
    ) -> Value:
        dtype = meta_outputs.dtype
        return builder(op_type)(*promote(dtype, self, tensor1, tensor2), factor(dtype, value))

    return convert


builtin(aten.addcmul.default)(_scaled("Addcmul"))
builtin(aten.addcdiv.default)(_scaled("Addcdiv"))


@builtin(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(self: Any, end: Any, weight: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    return ge.Lerp(*promote(dtype, self, end), factor(dtype, weight))


# Both operands in the type of the result, then one operator.
_BINARY: dict[Any, str] = {
    aten.atan2.default: "Atan2",
    aten.fmod.Scalar: "Mod",
    aten.fmod.Tensor: "Mod",
    aten.maximum.default: "Maximum",
    aten.pow.Scalar: "Pow",
    aten.pow.Tensor_Scalar: "Pow",
    aten.pow.Tensor_Tensor: "Pow",
    aten.remainder.Scalar: "FloorMod",
    aten.remainder.Scalar_Tensor: "FloorMod",
    aten.remainder.Tensor: "FloorMod",
    aten.xlogy.Scalar_Other: "Xlogy",
    aten.xlogy.Scalar_Self: "Xlogy",
    aten.xlogy.Tensor: "Xlogy",
    aten.bitwise_left_shift.Tensor: "LeftShift",
    aten.bitwise_left_shift.Tensor_Scalar: "LeftShift",
    aten.bitwise_right_shift.Tensor: "RightShift",
    aten.bitwise_right_shift.Tensor_Scalar: "RightShift",
    aten.__lshift__.Scalar: "LeftShift",
    aten.__lshift__.Tensor: "LeftShift",
    aten.__rshift__.Scalar: "RightShift",
    aten.__rshift__.Tensor: "RightShift",
    prims.add.default: "Add",
    prims.maximum.default: "Maximum",
    prims.minimum.default: "Minimum",
    prims.mul.default: "Mul",
}


def _binary(op_type: str) -> Callable[..., Value]:
    def convert(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
        return builder(op_type)(*promote(meta_outputs.dtype, self, other))

    return convert


for _target, _type in _BINARY.items():
    builtin(_target)(_binary(_type))


@builtin(aten.minimum.default)
def minimum(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    self, other = promote(dtype, self, other)
    if dtype == DataType.DT_BOOL:
        return ge.Mul(self, other)
    if dtype in (DataType.DT_UINT8, DataType.DT_INT16):
        return ge.Cast(ge.Minimum(*promote(DataType.DT_INT32, self, other)), dst_type=dtype)
    return ge.Minimum(self, other)


# ---- one operand ----

_UNARY: dict[Any, str] = {
    aten.acos.default: "Acos",
    aten.acosh.default: "Acosh",
    aten.asin.default: "Asin",
    aten.asinh.default: "Asinh",
    aten.atan.default: "Atan",
    aten.atanh.default: "Atanh",
    aten.cos.default: "Cos",
    aten.cosh.default: "Cosh",
    aten.erf.default: "Erf",
    aten.erfc.default: "Erfc",
    aten.erfinv.default: "Erfinv",
    aten.exp.default: "Exp",
    aten.expm1.default: "Expm1",
    aten.log.default: "Log",
    aten.log1p.default: "Log1p",
    aten.neg.default: "Neg",
    aten.reciprocal.default: "Reciprocal",
    aten.round.default: "Round",
    aten.rsqrt.default: "Rsqrt",
    aten.sgn.default: "Sign",
    aten.sign.default: "Sign",
    aten.sin.default: "Sin",
    aten.sinh.default: "Sinh",
    aten.sqrt.default: "Sqrt",
    aten.tan.default: "Tan",
    aten.trunc.default: "Trunc",
}
# The same, with the result cast to its type once more.
_ROUNDING: dict[Any, str] = {
    aten.ceil.default: "Ceil",
    aten.floor.default: "Floor",
}
_LOGARITHMS = {aten.log2.default: 2.0, aten.log10.default: 10.0}


def _unary(op_type: str, recast: bool = False, **attrs: Any) -> Callable[..., Value]:
    def convert(self: Any, *, meta_outputs: TensorSpec) -> Value:
        done = builder(op_type)(promote(meta_outputs.dtype, self), **attrs)
        return cast_result(done, meta_outputs.dtype) if recast else done

    return convert


for _target, _type in _UNARY.items():
    builtin(_target)(_unary(_type))
for _target, _type in _ROUNDING.items():
    builtin(_target)(_unary(_type, recast=True))
for _target, _base in _LOGARITHMS.items():
    builtin(_target)(_unary("Log", base=_base))


@builtin(aten.abs.default)
def absolute(self: Value, *, meta_outputs: TensorSpec) -> Value:
    if self.dtype in _COMPLEX:
        raise Decline("absolute value of a complex tensor")
    return self if self.dtype == DataType.DT_UINT8 else ge.Abs(self)


direct({aten.isnan.default: "IsNan", aten.isinf.default: "IsInf"})


@builtin(aten.nan_to_num.default)
def nan_to_num(self: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    plain(nan, posinf, neginf)
    if self.dtype in INT_TYPES or self.dtype == DataType.DT_BOOL:
        return ge.Identity(self)
    if self.dtype not in FLOAT_TYPES:
        raise Decline("complex tensor")
    limits = torch.finfo(ge_to_torch(self.dtype))
    return ge.NanToNum(
        self,
        nan=0.0 if nan is None else nan,
        posinf=limits.max if posinf is None else posinf,
        neginf=limits.min if neginf is None else neginf,
    )


# ---- bounds ----


def clip(dtype: int, self: Any, low: Any, high: Any) -> Value:
    """Values limited to low..high, a missing bound standing for the end of the type's range."""
    if dtype in FLOAT_TYPES:
        least, most = -math.inf, math.inf
    elif dtype == DataType.DT_BOOL:
        raise Decline("bounds of truth values")
    else:
        limits = torch.iinfo(ge_to_torch(dtype))
        least, most = limits.min, limits.max
    low, high = least if low is None else low, most if high is None else high
    return ge.ClipByValueV2(*promote(dtype, self, low, high))


@builtin(aten.clamp.default, aten.clamp.Tensor)
def clamp(self: Any, min: Any = None, max: Any = None, *, meta_outputs: TensorSpec) -> Value:
    return clip(meta_outputs.dtype, self, min, max)


@builtin(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(self: Any, min: Any, *, meta_outputs: TensorSpec) -> Value:
    return clip(meta_outputs.dtype, self, min, None)


@builtin(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(self: Any, max: Any, *, meta_outputs: TensorSpec) -> Value:
    return clip(meta_outputs.dtype, self, None, max)


# ---- comparison, logic, bits, selection ----

# Truth values are compared as FLOAT where the order matters.
_COMPARE: dict[str, tuple[bool, tuple[Any, ...]]] = {
    "Equal": (False, (aten.eq.Tensor, aten.eq.Scalar)),
    "NotEqual": (False, (aten.ne.Tensor, aten.ne.Scalar)),
    "Greater": (True, (aten.gt.Tensor, aten.gt.Scalar)),
    "GreaterEqual": (True, (aten.ge.Tensor, aten.ge.Scalar)),
    "Less": (True, (aten.lt.Tensor, aten.lt.Scalar, aten.less.Tensor, prims.lt.default)),
    "LessEqual": (True, (aten.le.Tensor, aten.le.Scalar, prims.le.default)),
}


def _compare(op_type: str, ordered: bool) -> Callable[..., Value]:
    def convert(self: Any, other: Any) -> Value:
        dtype = result_type(self, other)
        if ordered and dtype == DataType.DT_BOOL:
            dtype = DataType.DT_FLOAT
        return builder(op_type)(*promote(dtype, self, other))

    return convert


for _type, (_ordered, _targets) in _COMPARE.items():
    builtin(*_targets)(_compare(_type, _ordered))

_LOGIC = {
    aten.logical_and.default: "LogicalAnd",
    aten.logical_or.default: "LogicalOr",
    aten.logical_xor.default: "NotEqual",
}
# (on integers, on truth values)
_BITS = {
    aten.bitwise_and: ("BitwiseAnd", "LogicalAnd"),
    aten.bitwise_or: ("BitwiseOr", "LogicalOr"),
    aten.bitwise_xor: ("BitwiseXor", "NotEqual"),
}


def _logic(op_type: str) -> Callable[..., Value]:
    def convert(self: Any, other: Any) -> Value:
        return builder(op_type)(*promote(DataType.DT_BOOL, self, other))

    return convert


def _bits(on_integers: str, on_truth: str) -> Callable[..., Value]:
    def convert(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
        dtype = meta_outputs.dtype
        op_type = on_truth if dtype == DataType.DT_BOOL else on_integers
        return builder(op_type)(*promote(dtype, self, other))

    return convert


for _target, _type in _LOGIC.items():
    builtin(_target)(_logic(_type))
for _target, _pair in _BITS.items():
    builtin(_target.Tensor, _target.Scalar, _target.Scalar_Tensor)(_bits(*_pair))


@builtin(aten.logical_not.default)
def logical_not(self: Value, *, meta_outputs: TensorSpec) -> Value:
    return cast_result(ge.LogicalNot(promote(DataType.DT_BOOL, self)), meta_outputs.dtype)


@builtin(aten.bitwise_not.default)
def bitwise_not(self: Value) -> Value:
    return ge.LogicalNot(self) if self.dtype == DataType.DT_BOOL else ge.Invert(self)


@builtin(aten.where.self)
def where(condition: Value, self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
    condition = promote(DataType.DT_BOOL, condition)
    return ge.SelectV2(condition, *promote(meta_outputs.dtype, self, other))


@builtin(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(self: Value, mask: Value, value: Any, *, meta_outputs: TensorSpec) -> Value:
    mask = promote(DataType.DT_BOOL, mask)
    return ge.MaskedFill(self, mask, promote(meta_outputs.dtype, value))
