"""Checks that stop a run."""

from __future__ import annotations

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row


def _assert(op: Op) -> Kernel:
    message = op.attr("_message", "assertion failed")

    def run(condition: torch.Tensor, _data: list[torch.Tensor]) -> None:
        torch._assert_async(condition, message)

    return run


add_row("Assert", lambda op: [], _assert, Trait.SIDE_EFFECT)
