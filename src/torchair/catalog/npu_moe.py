"""Routing of tokens to experts and back."""

from __future__ import annotations

from typing import Any

from torchair.catalog.core import Kernel, Op, add_row
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import dim_min
from torchair.ops.npu import moe

_INT32 = DataType.DT_INT32


def _gating_rule(op: Op) -> list[Fact]:
    dims = (*op.shape("x")[:-1], op.attr("k"))
    return [Fact(op.dtype("x"), dims), Fact(_INT32, dims), Fact(_INT32, dims)]


def _gating(op: Op) -> Kernel:
    k = op.attr("k")
    return lambda x, finished: moe.gating_top_k_softmax(x, finished, k)


def _init_rule(op: Op) -> list[Fact]:
    tokens, choices = op.shape("expert_idx")
    rows = dim_min(tokens, op.attr("active_num")) * choices
    places = Fact(_INT32, (tokens * choices,))
    return [Fact(op.dtype("x"), (rows, op.shape("x")[1])), places, places]


def _init(op: Op) -> Kernel:
    active = op.attr("active_num")
    return lambda x, rows, experts: moe.init_routing(x, rows, experts, active)


def _finalize_rule(op: Op) -> Fact:
    rows, width = op.shape("expanded_row_idx")[0], op.shape("expanded_x")[-1]
    choices = op.shape("scales")[1] if op.fed("scales") else 1
    return Fact(op.dtype("expanded_x"), (rows // choices, width))


def _finalize(x: Any, x1: Any, x2: Any, bias: Any, scales: Any, rows: Any, experts: Any) -> Any:
    return moe.finalize_routing(x, x1, x2, bias, scales, rows, experts)


def _finalize_v2(op: Op) -> Kernel:
    mode = op.attr("drop_pad_mode")

    def run(x: Any, rows: Any, x1: Any, x2: Any, bias: Any, scales: Any, experts: Any) -> Any:
        return moe.finalize_routing(x, x1, x2, bias, scales, rows, experts, mode)

    return run


add_row("MoeGatingTopKSoftmax", _gating_rule, _gating)
add_row("MoeInitRouting", _init_rule, _init)
add_row("MoeFinalizeRouting", _finalize_rule, lambda op: _finalize)
add_row("MoeFinalizeRoutingV2", _finalize_rule, _finalize_v2)
