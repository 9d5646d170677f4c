"""Converters of the `npu` library: norms, gates, rotary embedding, routing to experts, caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchair import ge
from torchair.ascend.ops.activation import ROTARY_MODES
from torchair.convert.direct import Direct, direct
from torchair.convert.operands import alike, keep_alive
from torchair.convert.registry import Decline, builtin
from torchair.ge.graph import Value

direct(
    {
        "npu.npu_format_cast.default": "Identity",  # there is one format only
        "npu.npu_format_cast.Tensor": Direct("Identity", "self"),
        "npu.npu_add_rms_norm.default": Direct("AddRmsNorm", "", "epsilon", alike=True),
        "npu.npu_moe_gating_top_k_softmax.default": Direct("MoeGatingTopKSoftmax", "", "k"),
        "npu.npu_moe_init_routing.default": Direct("MoeInitRouting", "", "active_num"),
        "npu.npu_rms_norm.default": Direct("RmsNorm", "", "epsilon", alike=True),
        "npu.npu_rms_norm_backward.default": Direct("RmsNormGrad", "dy self rstd gamma"),
        "npu.npu_swiglu.default": Direct("SwiGlu", "self", "dim"),
        "npu.npu_swiglu_backward.default": Direct("SwiGluGrad", "", "dim"),
    }
)


# ---- rotary embedding ----


@builtin("npu.npu_rotary_mul.default")
def rotary_mul(self: Value, r1: Value, r2: Value, rotary_mode: str, rotate: Value | None) -> Any:
    alike(self, r1, r2)
    if rotary_mode == "half" and rotate is None:
        return ge.RotaryMul(self, r1, r2)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbedding(self, r1, r2, rotate, mode=mode)


@builtin("npu.npu_rotary_mul_backward.default")
def rotary_mul_backward(grad: Value, self: Value, r1: Value, r2: Value, rotary_mode: str) -> Any:
    if rotary_mode == "half":
        return ge.RotaryMulGrad(self, r1, r2, grad)
    mode = ROTARY_MODES.index(rotary_mode)
    return ge.RotaryPositionEmbeddingGrad(grad, r1, r2, self, mode=mode)


@builtin("npu.npu_moe_finalize_routing.default")
def finalize_routing(
    expanded_permuted_rows: Value,
    skip1: Value | None,
    skip2: Value | None,
    bias: Value | None,
    scales: Value | None,
    expanded_src_to_dst_row: Value,
    export_for_source_row: Value | None,
    drop_pad_mode: int | None,
) -> Any:
    rows, places, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    optional = (skip1, skip2, bias, scales, export_for_source_row)
    if mode == 0 and all(x is not None for x in optional):
        return ge.MoeFinalizeRouting(
            rows, skip1, skip2, bias, scales, places, export_for_source_row
        )
    return ge.MoeFinalizeRoutingV2(rows, places, *optional, drop_pad_mode=mode)


# ---- hints, and lists of caches ----


@builtin("npu.npu_prefetch.default")
def prefetch(self: Value, dependency: Value | None, max_size: int, offset: int) -> None:
    if dependency is None:
        raise Decline("a prefetch without a dependency")
    ge.Cmo(self, max_size=max_size, offset=offset)
    keep_alive().after(dependency.node)


@builtin("npu.npu_scatter_list.default")
def scatter_list(
    self: Sequence[Value],
    indices: Value,
    updates: Value,
    mask: Value | None,
    reduce: str,
    axis: int,
) -> Any:
    copies = [ge.TensorMove(var) for var in self]
    return ge.ScatterList(
        copies, indices, updates, mask, reduce=reduce, axis=axis, size_of_var=len(copies)
    )


@builtin("npu.npu_gather_backward.default")
def gather_backward(grad: Value, self_size: Any, dim: int, index: Value, sparse_grad: bool) -> Any:
    if sparse_grad:
        raise Decline("a sparse gradient")
    zeros = ge.Fill(self_size, ge.Const(0, dtype=grad.dtype))
    return ge.ScatterElements(zeros, index, grad, axis=dim, reduction="add")


# ---- writes at given positions: into a copy, or into an input of the graph itself ----

_VIEWS = ("Reshape", "Identity")


@builtin("npu.scatter_update.default")
def scatter_update(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return ge.Scatter(ge.Clone(data), indices, updates, reduce="update", axis=axis)


@builtin("npu.scatter_update_.default")
def scatter_update_in_place(data: Value, indices: Value, updates: Value, axis: int) -> Any:
    return assigned(data, ge.Scatter(data, indices, updates, reduce="update", axis=axis))


@builtin("npu.npu_scatter_nd_update.default")
def scatter_nd_update(self: Value, indices: Value, updates: Value) -> Any:
    return ge.ScatterNdUpdate(ge.Clone(self), indices, updates)


@builtin("npu.npu_scatter_nd_update_.default")
def scatter_nd_update_in_place(self: Value, indices: Value, updates: Value) -> Any:
    return assigned(self, ge.ScatterNdUpdate(self, indices, updates))


def assigned(old: Value, new: Value) -> Value:
    """The new value, which also goes to the input that the old one is, or is a view of."""
    source = old
    while source.node.type in _VIEWS:
        source = source.node.values()[0]
    if source.node.type == "Data":
        whole = new if source.shape == new.shape else ge.Reshape(new, ge.Shape(source))
        ge.Assign(source, whole)
    return new
