"""Converters of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import Direct, direct, of_aten
from torchair.convert.operands import HALF, cast_result, factor, plain, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.dtypes import FLOAT_TYPES, INT_TYPES, DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import TensorSpec, Value

aten = torch.ops.aten
prims = torch.ops.prims
_COMPLEX = (DataType.DT_COMPLEX32, DataType.DT_COMPLEX64, DataType.DT_COMPLEX128)


def result_type(*operands: Any) -> int:
    """GE type in which torch compares or combines two operands, 0-d tensors weighing less."""
    first, second = (_placeholder(x) for x in operands)
    return torch_to_ge(torch.result_type(first, second))


def _placeholder(x: Any) -> Any:
    if not isinstance(x, Value):
        return x
    return torch.empty((1,) * x.rank, dtype=ge_to_torch(x.dtype), device="meta")


# ---- arithmetic ----


@builtin(aten.add.Tensor, aten.add.Scalar)
def add(self: Any, other: Any, alpha: Any, meta_outputs: TensorSpec) -> Value:
    self, other = promote(meta_outputs.dtype, self, other)
    if isinstance(alpha, Value) or alpha != 1:
        return ge.AxpyV2(self, other, factor(meta_outputs.dtype, alpha))
    return ge.Add(self, other)


@builtin(aten.sub.Tensor, aten.sub.Scalar)
def sub(self: Any, other: Any, alpha: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    self, other = promote(dtype, self, other)
    if dtype in HALF and not isinstance(alpha, Value) and alpha != 1:
        return ge.AxpyV2(self, other, factor(dtype, -alpha))  # no rounding in between
    if isinstance(alpha, Value) or alpha != 1:
        other = ge.Mul(other, promote(dtype, alpha))
    return ge.Sub(self, other)


@builtin(aten.rsub.Tensor)
def rsub(self: Any, other: Any, alpha: Any, meta_outputs: TensorSpec) -> Value:
    return sub(other, self, alpha, meta_outputs=meta_outputs)


@builtin(aten.mul.Tensor)
def mul(self: Any, other: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    if dtype in HALF and isinstance(other, (int, float)):
        return cast_result(ge.Muls(promote(dtype, self), value=other), dtype)
    return cast_result(mul_scalar(self, other, meta_outputs=meta_outputs), dtype)


@builtin(aten.mul.Scalar)
def mul_scalar(self: Any, other: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    if dtype == DataType.DT_BOOL:
        as_numbers = promote(DataType.DT_UINT8, *promote(dtype, self, other))
        return ge.Cast(ge.Mul(*as_numbers), dst_type=dtype)
    return ge.Mul(promote(dtype, self), factor(dtype, other))


@builtin(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(
    self: Any, other: Any, rounding_mode: str | None = None, *, meta_outputs: TensorSpec
) -> Value:
    dtype = meta_outputs.dtype
    operands = promote(dtype, self), factor(dtype, other)
    if rounding_mode != "trunc":
        return ge.FloorDiv(*operands) if rounding_mode == "floor" else ge.RealDiv(*operands)
    if dtype in (DataType.DT_FLOAT, DataType.DT_DOUBLE):
        return ge.Trunc(ge.RealDiv(*operands))
    return ge.TruncateDiv(*operands)  # integers stay exact, 16 bit quotients are not rounded up


direct(
    {
        aten.addcdiv.default: Direct("Addcdiv", "self tensor1 tensor2 ~value", promoted=True),
        aten.addcmul.default: Direct("Addcmul", "self tensor1 tensor2 ~value", promoted=True),
        aten.rsub.Scalar: Direct("Sxpy", "other self ~alpha", promoted=True),
    }
)
direct(of_aten({"Lerp": "lerp.Scalar lerp.Tensor"}), inputs="self end ~weight", promoted=True)
direct(
    of_aten(
        {
            "FloorDiv": "floor_divide floor_divide.Scalar",
            "RealDiv": "div.Tensor true_divide.Tensor div.Scalar",
        }
    ),
    inputs="self ~other",
    promoted=True,
)

# Both operands in the type of the result, then one operator.
_BINARY = {
    "Atan2": "atan2",
    "FloorMod": "remainder.Scalar remainder.Scalar_Tensor remainder.Tensor",
    "LeftShift": "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar "
    "__lshift__.Scalar __lshift__.Tensor",
    "Maximum": "maximum",
    "Mod": "fmod.Scalar fmod.Tensor",
    "Pow": "pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor",
    "RightShift": "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar "
    "__rshift__.Scalar __rshift__.Tensor",
    "Xlogy": "xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor",
}
_PRIMS = {getattr(prims, n.lower()).default: n for n in ("Add", "Maximum", "Minimum", "Mul")}
direct(of_aten(_BINARY) | _PRIMS, inputs="*", promoted=True)


@builtin(aten.minimum.default)
def minimum(self: Any, other: Any, meta_outputs: TensorSpec) -> Value:
    dtype = meta_outputs.dtype
    self, other = promote(dtype, self, other)
    if dtype == DataType.DT_BOOL:
        return ge.Mul(self, other)
    if dtype in (DataType.DT_UINT8, DataType.DT_INT16):
        return ge.Cast(ge.Minimum(*promote(DataType.DT_INT32, self, other)), dst_type=dtype)
    return ge.Minimum(self, other)


# ---- one operand ----

_SAME_NAME = (
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Erf", "Erfc", "Erfinv",
    "Exp", "Expm1", "Log", "Log1p", "Neg", "Reciprocal", "Round", "Rsqrt", "Sin", "Sinh", "Sqrt",
    "Tan", "Trunc",
)  # fmt: skip

direct(of_aten({t: t.lower() for t in _SAME_NAME} | {"Sign": "sgn sign"}), promoted=True)
direct(of_aten({"Ceil": "ceil", "Floor": "floor"}), promoted=True, recast=True)
direct(
    {
        aten.isinf.default: "IsInf",
        aten.isnan.default: "IsNan",
        aten.log10.default: Direct("Log", promoted=True, fixed={"base": 10.0}),
        aten.log2.default: Direct("Log", promoted=True, fixed={"base": 2.0}),
    }
)


@builtin(aten.abs.default)
def absolute(self: Value) -> Value:
    if self.dtype in _COMPLEX:
        raise Decline("absolute value of a complex tensor")
    return self if self.dtype == DataType.DT_UINT8 else ge.Abs(self)


@builtin(aten.nan_to_num.default)
def nan_to_num(self: Value, nan: Any, posinf: Any, neginf: Any) -> Value:
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


@builtin(
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
    aten.clamp_max.default,
    aten.clamp_max.Tensor,
)
def clamp(self: Any, min: Any = None, max: Any = None, *, meta_outputs: TensorSpec) -> Value:
    """A missing bound stands for the end of the type's range."""
    dtype = meta_outputs.dtype
    if dtype in FLOAT_TYPES:
        least, most = -math.inf, math.inf
    elif dtype == DataType.DT_BOOL:
        raise Decline("bounds of truth values")
    else:
        limits = torch.iinfo(ge_to_torch(dtype))
        least, most = limits.min, limits.max
    bounds = least if min is None else min, most if max is None else max
    return ge.ClipByValueV2(*promote(dtype, self, *bounds))


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

_TRUTHS = of_aten(
    {"LogicalAnd": "logical_and", "LogicalOr": "logical_or", "NotEqual": "logical_xor"}
)
direct(_TRUTHS, inputs="self:BOOL other:BOOL")
direct({aten.logical_not.default: Direct("LogicalNot", "self:BOOL", recast=True)})
direct({aten.where.self: Direct("SelectV2", "condition:BOOL self other", promoted=True)})
_FILLED = of_aten({"MaskedFill": "masked_fill.Scalar masked_fill.Tensor"})
direct(_FILLED, inputs="self mask:BOOL value", promoted=True)

# (on integers, on truth values)
_BITS = {
    aten.bitwise_and: ("BitwiseAnd", "LogicalAnd"),
    aten.bitwise_or: ("BitwiseOr", "LogicalOr"),
    aten.bitwise_xor: ("BitwiseXor", "NotEqual"),
}


def _bits(on_integers: str, on_truth: str) -> Callable[..., Value]:
    def convert(self: Any, other: Any, *, meta_outputs: TensorSpec) -> Value:
        dtype = meta_outputs.dtype
        op_type = on_truth if dtype == DataType.DT_BOOL else on_integers
        return builder(op_type)(*promote(dtype, self, other))

    return convert


for _target, _pair in _BITS.items():
    builtin(_target.Tensor, _target.Scalar, _target.Scalar_Tensor)(_bits(*_pair))


@builtin(aten.bitwise_not.default)
def bitwise_not(self: Value) -> Value:
    return ge.LogicalNot(self) if self.dtype == DataType.DT_BOOL else ge.Invert(self)
