"""Converters of the `npu` library: norms, gates, rotary embedding, routing to experts, writes into
caches."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.convert.registry import Decline, builtin
from torchair.ge.graph import Value
from torchair.ops.npu.activation import ROTARY_MODES


def _same_types(*operands: Value) -> None:
    if len({x.dtype for x in operands}) > 1:
        raise Decline("operands of different types")


# ---- root mean square norm ----


@builtin("npu.npu_rms_norm.default")
def rms_norm(self: Value, gamma: Value, epsilon: float = 1e-6) -> Any:
    _same_types(self, gamma)
    return ge.RmsNorm(self, gamma, epsilon=epsilon)


@builtin("npu.npu_rms_norm_backward.default")
def rms_norm_backward(dy: Value, self: Value, gamma: Value, rstd: Value) -> Any:
    """npu_rms_norm_backward(Tensor dy, Tensor self, Tensor gamma, Tensor rstd)"""
    return ge.RmsNormGrad(dy, self, rstd, gamma)


@builtin("npu.npu_add_rms_norm.default")
def add_rms_norm(x1: Value, x2: Value, gamma: Value, epsilon: float = 1e-6) -> Any:
    _same_types(x1, x2, gamma)
    return ge.AddRmsNorm(x1, x2, gamma, epsilon=epsilon)


# ---- swiglu ----


@builtin("npu.npu_swiglu.default")
def swiglu(self: Value, dim: int = -1) -> Any:
    return ge.SwiGlu(self, dim=dim)


@builtin("npu.npu_swiglu_backward.default")
def swiglu_backward(grad_output: Value, self: Value, dim: int = -1) -> Any:
    return ge.SwiGluGrad(grad_output, self, dim=dim)


# ---- rotary embedding ----


@builtin("npu.npu_rotary_mul.default")
def rotary_mul(
    self: Value, r1: Value, r2: Value, rotary_mode: str = "half", rotate: Value | None = None
) -> Any:
    _same_types(self, r1, r2)
    if rotary_mode == "half" and rotate is None:
        return ge.RotaryMul(self, r1, r2)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbedding(self, r1, r2, rotate, mode=mode)


@builtin("npu.npu_rotary_mul_backward.default")
def rotary_mul_backward(
    grad: Value, self: Value, r1: Value, r2: Value, rotary_mode: str = "half"
) -> Any:
    if rotary_mode == "half":
        return ge.RotaryMulGrad(self, r1, r2, grad)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbeddingGrad(grad, r1, r2, self, mode=mode)


# ---- formats: there is one only ----


@builtin("npu.npu_format_cast.default", "npu.npu_format_cast.Tensor")
def format_cast(self: Value, *others: Any) -> Any:
    return ge.Identity(self)


# ---- routing between tokens and experts ----


@builtin("npu.npu_moe_gating_top_k_softmax.default")
def gating_top_k_softmax(x: Value, finished: Value | None = None, k: int = 1) -> Any:
    return ge.MoeGatingTopKSoftmax(x, finished, k=k)


@builtin("npu.npu_moe_init_routing.default")
def init_routing(x: Value, row_idx: Value, expert_idx: Value, active_num: Any) -> Any:
    if isinstance(active_num, Value):
        raise Decline("a symbolic number of active tokens")
    return ge.MoeInitRouting(x, row_idx, expert_idx, active_num=active_num)


@builtin("npu.npu_moe_finalize_routing.default")
def finalize_routing(
    expanded_permuted_rows: Value, skip1: Value | None, skip2: Value | None, bias: Value | None,
    scales: Value | None, expanded_src_to_dst_row: Value, export_for_source_row: Value | None,
    drop_pad_mode: int | None = 0,
) -> Any:  # fmt: skip
    rows, places, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    optional = (skip1, skip2, bias, scales, export_for_source_row)
    if mode == 0 and all(x is not None for x in optional):
        return ge.MoeFinalizeRouting(
            rows, skip1, skip2, bias, scales, places, export_for_source_row
        )
    return ge.MoeFinalizeRoutingV2(rows, places, *optional, drop_pad_mode=mode)


# ---- writes at given positions: into a copy, or into an input of the graph itself ----

_VIEWS = ("Reshape", "Identity")


@builtin("npu.scatter_update.default")
def scatter_update(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return ge.Scatter(ge.Clone(data), indices, updates, reduce="update", axis=axis)


@builtin("npu.scatter_update_.default")
def scatter_update_in_place(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return _assigned(data, ge.Scatter(data, indices, updates, reduce="update", axis=axis))


@builtin("npu.npu_scatter_nd_update.default")
def scatter_nd_update(self: Value, indices: Value, updates: Value) -> Any:
    return ge.ScatterNdUpdate(ge.Clone(self), indices, updates)


@builtin("npu.npu_scatter_nd_update_.default")
def scatter_nd_update_in_place(self: Value, indices: Value, updates: Value) -> Any:
    return _assigned(self, ge.ScatterNdUpdate(self, indices, updates))


def _assigned(old: Value, new: Value) -> Value:
    """The new value, which also goes to the input that the old one is, or is a view of."""
    source = old
    while source.node.type in _VIEWS:
        source = source.node.values()[0]
    if source.node.type == "Data":
        whole = new if source.shape == new.shape else ge.Reshape(new, ge.Shape(source))
        ge.Assign(source, whole)
    return new
