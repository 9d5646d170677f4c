"""Strict numerics: which torch operators give eager's bits when generated code computes them.

An operator is in a table here if its result is rounded once, the same way on every processor: views
and copies, comparisons, selections, and the arithmetic that IEEE 754 rounds correctly. Any other
becomes a generic node, which calls torch's own kernel on operands laid out as in eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.sym_node import SymTypes

from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload

# Results that hold elements of their operands, moved or chosen.
_MOVES = """
    alias as_strided clone cat constant_pad_nd copy detach diagonal expand expand_as fill flip full
    full_like gather index_select lift_fresh_copy masked_fill movedim narrow new_full new_ones
    new_zeros ones ones_like permute repeat reshape roll scalar_tensor select select_scatter slice
    slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unfold unsqueeze
    view view_as view_copy where zero zeros zeros_like _reshape_alias _unsafe_view embedding
    arange as_strided_copy as_strided_scatter diagonal_scatter lift_fresh unflatten
    _efficientzerotensor
"""
# One correctly rounded operation, or none.
_ROUNDED_ONCE = """
    abs bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min eq floor ge gt
    isinf isnan le logical_and logical_not logical_or logical_xor lt maximum minimum ne neg relu
    round sign threshold_backward trunc
"""
# Likewise unless a scale is multiplied in (`alpha`), which torch's kernels may fuse.
_WITH_ALPHA = ("add", "sub")
_ARITHMETIC = ("mul", "div")
_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)

_exact = frozenset([*_MOVES.split(), *_ROUNDED_ONCE.split()])


def keeps_bits(node: fx.Node) -> bool:
    """Whether the converter of an operator may be used under strict numerics."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)  # sizes, `getitem`
    if target.namespace in ("_c10d_functional", "c10d_functional", "npu_define", "air"):
        return True  # communication: the library's own sums
    if isinstance(node.meta.get("val"), SymTypes):
        return True  # a size, which plans have to know
    if target._schema.is_mutable:
        return True  # the update of an argument, which a graph has to know of
    draws = torch.Tag.nondeterministic_seeded in target.tags
    if draws or target.namespace not in ("aten", "prims"):
        return False
    name = target._schema.name.partition("::")[2]
    if name in ("_to_copy", "convert_element_type"):
        return _casts_exactly(node)
    if name in _WITH_ALPHA:
        return _alpha(node) == 1 and _same_operands(node)
    if name in _ARITHMETIC:
        return _overload(target) in ("Tensor", "Scalar") and _same_operands(node)
    return name in _exact


def _overload(target: OpOverload) -> str:
    return target._overloadname


def _alpha(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)


def _dtype(x: Any) -> torch.dtype | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _same_operands(node: fx.Node) -> bool:
    """Whether all operands are tensors of the result's dtype. torch keeps a Python number, or a 0-d
    tensor, beside bfloat16 and float16 in float32, and promotes mixed operands in its own order."""
    wanted = _dtype(node)
    if wanted is None or wanted.is_complex:
        return False
    given = [_dtype(a) for a in node.args[:2]]
    numbers = [a for a, dtype in zip(node.args, given, strict=False) if dtype is None]
    if numbers and wanted not in _FLOATS:
        return False
    if wanted in _HALVES and any(
        isinstance(a, fx.Node) and a.meta["val"].dim() == 0 for a in node.args[:2]
    ):
        return False
    return all(dtype in (None, wanted) for dtype in given)


def _casts_exactly(node: fx.Node) -> bool:
    """Between floats, and from integers: other casts are undefined for values out of range."""
    before, after = _dtype(node.args[0]), _dtype(node)
    if before is None or after is None or before.is_complex or after.is_complex:
        return False
    floats = (*_FLOATS, *_HALVES)
    return before not in floats or after in floats
