"""Data type and format codes of the GE operator IR, and their relation to torch dtypes.

Imports torch only. Two numberings exist: the GE numbers here are used everywhere in the program
and in text dumps; the wire numbers live in `serde` alone.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

# ---- why an operator is not converted, or a node not made ----


class ConverterErrorMsg:
    """Sentences with places for names and counts, those of the original under its names, so that
    who knows them finds them. An error begins with such a sentence; what to do about it follows.
    """

    _GENERATED = "Failed to auto-generated converter for {target} to AscendIR: "
    _CONVERTED = "Failed to convert torch args to AscendIR args: "
    _INPUT = _CONVERTED + "The AscendIR {op_type} input name: {name}, param type: {param_type}"
    _LEGAL = "Please check the params definition of AscendIR {op_type}."

    NOT_OP_OVERLOAD = (
        f"{_GENERATED}{{target}} is not an instance of OpOverload and does not support "
        "auto-generate converter."
    )
    BUILTIN_OP = f"{_GENERATED}PyTorch built-in ops not support auto-generate converters."
    SCALAR_INPUT = (
        f"{_GENERATED}this op has scalar input: {{name}}, not support auto-generate converter."
    )
    GE_IR_NOT_REGISTERED = "No AscendIR {name} was found to be registered."
    TENSOR_INPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}the number of torch tensor inputs does not match the AscendIR {{ge_name}} "
        "inputs. torch tensor inputs: {tensor_inputs}, AscendIR inputs: {ge_inputs}."
    )
    NON_TENSOR_INPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}the number of torch non-tensor inputs greater than the AscendIR {{ge_name}} "
        "attrs. torch non-tensor inputs: {non_tensor_inputs}, AscendIR attrs: {ge_attrs}."
    )
    OUTPUTS_COUNT_MISMATCH = (
        f"{_GENERATED}the number of torch outputs does not match the AscendIR {{ge_name}} outputs. "
        "torch outputs count: {outputs_count}, AscendIR {ge_name} outputs: {ge_outputs_count}."
    )
    INPLACE_COUNT_MISMATCH = (
        f"{_GENERATED}the number of inplace inputs for torch does not match the AscendIR "
        "{ge_name} inplace. torch inplace count: {inplace_count}, AscendIR inplace count: "
        "{ge_inplace_count}."
    )
    ARGS_COUNT_MISMATCH = (
        f"{_CONVERTED}The AscendIR {{op_type}} expected {{expected}} args but got {{actual}}."
    )
    INPUT_TYPE_REQUIRED = f"{_INPUT}, type must be Tensor."
    INPUT_TYPE_DYNAMIC = f"{_INPUT}, type must be list or tuple."
    INPUT_TYPE_OPTIONAL = f"{_INPUT}, type must be Tensor or None."
    INPUT_TYPE_ILLEGAL = (
        f"{_INPUT} is not legal, param type must be in: [required, dynamic, optional]. {_LEGAL}"
    )
    ATTR_TYPE_ILLEGAL = (
        f"{_CONVERTED}The AscendIR {{op_type}} attr type: {{attr_type}}, name: {{name}} is not "
        f"legal, attr type must be in: {{all_attr_types}}. {_LEGAL}"
    )
    TORCH_TYPE_TO_GE_TYPE_UN_SUPPORT = "Unsupported convert torch type {dtype} to ge type"


class DataType(enum.IntEnum):
    """GE data type numbers, as printed in dumps and passed to converters: each is its number, in
    comparisons, as a key and as text."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_DUAL_SUB_INT8 = 14
    DT_DUAL_SUB_UINT8 = 15
    DT_COMPLEX64 = 16
    DT_COMPLEX128 = 17
    DT_QINT8 = 18
    DT_QINT16 = 19
    DT_QINT32 = 20
    DT_QUINT8 = 21
    DT_QUINT16 = 22
    DT_RESOURCE = 23
    DT_STRING_REF = 24
    DT_DUAL = 25
    DT_VARIANT = 26
    DT_BF16 = 27
    DT_UNDEFINED = 28
    DT_INT4 = 29
    DT_UINT1 = 30
    DT_INT2 = 31
    DT_UINT2 = 32
    DT_COMPLEX32 = 33
    DT_HIFLOAT8 = 34
    DT_FLOAT8_E5M2 = 35
    DT_FLOAT8_E4M3FN = 36
    DT_FLOAT8_E8M0 = 37
    DT_FLOAT6_E3M2 = 38
    DT_FLOAT6_E2M3 = 39
    DT_FLOAT4_E2M1 = 40
    DT_FLOAT4_E1M2 = 41
    DT_MAX = 42

    __repr__ = int.__repr__


class Format(enum.Enum):
    """Memory formats a tensor description may carry."""

    FORMAT_UNDEFINED = -1
    FORMAT_NCHW = 0
    FORMAT_NHWC = 1
    FORMAT_ND = 2
    FORMAT_NC1HWC0 = 3
    FORMAT_FRACTAL_Z = 4
    FORMAT_NC1HWC0_C04 = 12
    FORMAT_HWCN = 16
    FORMAT_NDHWC = 27
    FORMAT_FRACTAL_NZ = 29
    FORMAT_NCDHW = 30
    FORMAT_NDC1HWC0 = 32
    FORMAT_FRACTAL_Z_3D = 33
    FORMAT_NC = 35
    FORMAT_NCL = 47
    FORMAT_FRACTAL_NZ_C0_16 = 50
    FORMAT_FRACTAL_NZ_C0_2 = 52
    FORMAT_FRACTAL_NZ_C0_4 = 53
    FORMAT_FRACTAL_NZ_C0_8 = 54


class Placement(enum.IntEnum):
    """Where a graph finds an input, as the attribute `_input_placements` tells it."""

    UNDEFINED = -1
    HOST = 0
    DEVICE = 1


class ExecutorType(enum.IntEnum):
    """What a graph is meant to run on, as the attribute `_executor_type` tells it."""

    CPU = 0
    NPU = 1


_SAME_NAME = (
    "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "float8_e5m2",
    "float8_e4m3fn",
)  # fmt: skip
_TORCH_TO_GE: dict[torch.dtype, DataType] = {
    torch.float32: DataType.DT_FLOAT,
    torch.bfloat16: DataType.DT_BF16,
    torch.float64: DataType.DT_DOUBLE,
    torch.quint4x2: DataType.DT_INT4,
    torch.float8_e8m0fnu: DataType.DT_FLOAT8_E8M0,
    **{getattr(torch, name): DataType[f"DT_{name.upper()}"] for name in _SAME_NAME},
}
_GE_TO_TORCH: dict[int, torch.dtype] = {
    **{ge: t for t, ge in _TORCH_TO_GE.items()},
    DataType.DT_HIFLOAT8: torch.uint8,
    DataType.DT_FLOAT4_E2M1: torch.uint8,
    DataType.DT_FLOAT4_E1M2: torch.uint8,
}

_KNOWN = frozenset(DataType)

FLOAT_TYPES: frozenset[int] = frozenset(
    {DataType.DT_FLOAT, DataType.DT_FLOAT16, DataType.DT_BF16, DataType.DT_DOUBLE}
)
HALF_TYPES: frozenset[int] = frozenset({DataType.DT_FLOAT16, DataType.DT_BF16})
INT_TYPES: frozenset[int] = frozenset(
    DataType[f"DT_{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64)
)


def torch_to_ge(dtype: torch.dtype) -> DataType:
    """GE type of a torch dtype; RuntimeError when GE has none."""
    try:
        return _TORCH_TO_GE[dtype]
    except KeyError:
        reason = ConverterErrorMsg.TORCH_TYPE_TO_GE_TYPE_UN_SUPPORT
        raise RuntimeError(reason.format(dtype=dtype)) from None


def ge_to_torch(code: int) -> torch.dtype:
    """Torch dtype that holds values of a GE type; RuntimeError when torch has none."""
    try:
        return _GE_TO_TORCH[code]
    except KeyError:
        raise RuntimeError(f"{dtype_name(code)} has no torch dtype") from None


def holds(code: int, dtype: torch.dtype) -> bool:
    """Whether values of a GE type are held in tensors of this dtype."""
    return _GE_TO_TORCH.get(code) == dtype


def dtype_name(code: int) -> str:
    """Printable name of a GE type number, also of one that GE does not have."""
    return DataType(code).name if code in _KNOWN else f"DT_{code}?"


def type_of_meta(value: Any) -> DataType:
    """GE type of a fake tensor, a symbolic scalar or a Python scalar."""
    if isinstance(value, torch.Tensor):
        return torch_to_ge(value.dtype)
    if isinstance(value, (bool, torch.SymBool)):
        return DataType.DT_BOOL
    if isinstance(value, (int, torch.SymInt)):
        return DataType.DT_INT64
    if isinstance(value, (float, torch.SymFloat)):
        return DataType.DT_FLOAT
    raise RuntimeError(f"no GE data type for a {type(value).__name__}")
