"""Operators that take functions, and what functionalisation makes of others."""

from __future__ import annotations

from torchair.torch_private.table import Names, required

NAMES = Names(
    __name__,
    {
        "AsStridedViewInfo": required(
            "torch._higher_order_ops.auto_functionalize:AsStridedViewInfo",
            "operators that write to arguments",
        ),
        "SliceViewInfo": required(
            "torch._higher_order_ops.auto_functionalize:SliceViewInfo",
            "operators that write to arguments",
        ),
        "auto_functionalized_v2": required(
            "torch._higher_order_ops.auto_functionalize:auto_functionalized_v2",
            "operators that write to arguments",
        ),
        "get_mutable_args": required(
            "torch._higher_order_ops.auto_functionalize:get_mutable_args",
            "operators that write to arguments",
        ),
        "read_view_information_from_args": required(
            "torch._higher_order_ops.auto_functionalize:read_view_information_from_args",
            "operators that write to arguments",
        ),
        "with_effects": required(
            "torch._higher_order_ops.effects:with_effects", "operators with effects"
        ),
    },
)

__getattr__ = NAMES.find
