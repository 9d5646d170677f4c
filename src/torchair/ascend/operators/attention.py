"""Attention with lengths, pages and sparse modes, and the routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ascend.ops import rows as routing
from torchair.ascend.ops.attend import request_dims
from torchair.ascend.ops.fusion_attention import (
    FusionCall,
    fusion_attention,
    fusion_attention_grad,
    result_dims,
)
from torchair.ascend.ops.infer_attention import InferCall
from torchair.ascend.ops.infer_operators import fused_request, prompt_request, step_request
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import dim_min
from torchair.operators import core
from torchair.operators.attention import wide_type
from torchair.operators.core import Op, TorchKernel, add_row, call

_LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")
_PACKED = DataType.DT_INT32  # the type that holds eight four-bit integers


# ---- inference ----


def _value(op: Op) -> Fact:
    facts = op.list("value") if isinstance(op.node.inputs["value"], list) else [op["value"]]
    if len(facts) != 1:
        raise ValueError(f"{op.node}: one tensor of values is supported, got {len(facts)}")
    return facts[0]


def infer_facts(op: Op) -> tuple[Fact, Fact]:
    """What an operator for inference gives: the result, and the sums if it has them."""
    value = _value(op)
    dims, sums = request_dims(
        op.attr("input_layout"),
        op.shape("query"),
        value.shape or (),
        op.attr("num_heads"),
        op.attr("num_key_value_heads"),
        op.node.inputs.get("block_table") is not None,
        value.dtype == _PACKED,
    )
    query = op.dtype("query")
    result = Fact(DataType.DT_INT8 if op.fed("quant_scale2") else query, dims)
    summed = op.attr("softmax_lse_flag", False)
    return result, Fact(wide_type(query), sums) if summed else Fact(DataType.DT_FLOAT, (1,))


def infer_kernel(op: Op, request: Callable[[dict[str, Any]], InferCall]) -> TorchKernel:
    """The torch kernel of an operator for inference. Lengths arrive as tensors."""
    proto, ports = op.node.prototype, list(op.node.inputs)
    assert proto is not None
    attrs = {spec.name: op.attr(spec.name) for spec in proto.attrs}

    def run(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(attrs, **dict(zip(ports, tensors, strict=True)))
        for port in ("key", "value"):
            named[port] = named[port][0] if isinstance(named[port], list) else named[port]
        for port in _LENGTHS:
            named[port] = numbers(named.get(port))
        return request(named).run()

    return run


def numbers(tensor: Any) -> list[int] | None:
    """Numbers that an operator takes from the host, out of the tensor that a graph has."""
    return None if tensor is None else tensor.reshape(-1).tolist()


def _first(request: Callable[[dict[str, Any]], InferCall]) -> Callable[[Op], TorchKernel]:
    def make(op: Op) -> TorchKernel:
        kernel = infer_kernel(op, request)
        return lambda *tensors: kernel(*tensors)[0]

    return make


add_row("PromptFlashAttention", lambda op: infer_facts(op)[0], _first(prompt_request))
add_row("IncreFlashAttention", lambda op: infer_facts(op)[0], _first(step_request))
add_row(
    "FusedInferAttentionScore",
    infer_facts,
    lambda op: infer_kernel(op, fused_request),
    extension=True,
)


# ---- training ----


def _training_rule(op: Op) -> list[Fact]:
    dims, saved = result_dims(
        op.shape("query"),
        op.shape("key"),
        op.shape("value"),
        op.attr("head_num"),
        op.attr("input_layout"),
    )
    dtype = op.dtype("query")
    statistic = Fact(wide_type(dtype), saved)
    return [statistic, statistic, Fact(dtype, (0,)), Fact(dtype, dims)]


def _call(op: Op, named: dict[str, Any], shift: str) -> FusionCall:
    for port in ("drop_mask", "padding_mask", "q_start_idx", "kv_start_idx"):
        if named[port] is not None:
            raise ValueError(f"{op.node}: input {port!r} is not supported")
    if op.attr("keep_prob") != 1.0:
        raise ValueError(f"{op.node}: dropout (keep_prob {op.attr('keep_prob')}) is not supported")
    names = ("head_num", "input_layout", "pre_tockens", "next_tockens", "sparse_mode")
    ends = ("prefix", "actual_seq_qlen", "actual_seq_kvlen")
    given: dict[str, Any] = {name: numbers(named[name]) for name in ends}
    given |= {name: op.attr(name) for name in names} | {"scale": op.attr("scale_value")}
    given |= {name: named[name] for name in ("query", "key", "value", "atten_mask")}
    return FusionCall(pse=named[shift], **given)


def _named(function: Callable[[Op, dict[str, Any]], Any]) -> Callable[[Op], TorchKernel]:
    """A kernel that gets its tensors by the names of their ports."""
    return lambda op: lambda *given: function(op, dict(zip(op.node.inputs, given, strict=True)))


def _training(op: Op, named: dict[str, Any]) -> Any:
    out, *statistics = fusion_attention(_call(op, named, "real_shift"))
    return *statistics, out


def _training_grad_rule(op: Op) -> list[Fact]:
    shift = op.get("pse_shift")
    last = Fact(op.dtype("query"), (0,)) if shift is None else Fact(shift.dtype, shift.shape)
    return [*core.like("query", "key", "value")(op), last]


def _training_grad(op: Op, named: dict[str, Any]) -> Any:
    saved = named["softmax_max"], named["softmax_sum"]
    return fusion_attention_grad(_call(op, named, "pse_shift"), named["dy"], *saved)


add_row("FlashAttentionScore", _training_rule, _named(_training))
add_row("FlashAttentionScoreGrad", _training_grad_rule, _named(_training_grad))


# ---- routing of tokens to experts and back ----

_INT32 = DataType.DT_INT32


def _gating_rule(op: Op) -> list[Fact]:
    dims = (*op.shape("x")[:-1], op.attr("k"))
    return [Fact(op.dtype("x"), dims), Fact(_INT32, dims), Fact(_INT32, dims)]


def _init_rule(op: Op) -> list[Fact]:
    tokens, choices = op.shape("expert_idx")
    rows = dim_min(tokens, op.attr("active_num")) * choices
    places = Fact(_INT32, (tokens * choices,))
    return [Fact(op.dtype("x"), (rows, op.shape("x")[1])), places, places]


add_row("MoeGatingTopKSoftmax", _gating_rule, call(routing.gating_top_k_softmax, "k"))
add_row("MoeInitRouting", _init_rule, call(routing.init_routing, "active_num"))
