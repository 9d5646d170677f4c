"""Printing from a graph. Text travels between nodes as bytes, since torch has no strings."""

from __future__ import annotations

import sys

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ops.print import message, tensor_text


def _text_rule(op: Op) -> Fact:
    """Only the values tell how long a text is."""
    return Fact(DataType.DT_STRING)


def _string_format(op: Op) -> Kernel:
    template, placeholder = op.attr("template"), op.attr("placeholder")
    size = op.attr("summarize")

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        text = message(template, placeholder, [tensor_text(t, size) for t in tensors])
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return run


def _print(op: Op) -> Kernel:
    stream = op.attr("output_stream")

    def run(text: torch.Tensor) -> None:
        print(bytes(text.tolist()).decode(), file=sys.stdout if stream == "stdout" else sys.stderr)

    return run


# No constant of a graph can hold text: RANDOM keeps StringFormat from being folded into one.
add_row("StringFormat", _text_rule, _string_format, Trait.RANDOM)
add_row("PrintV2", lambda op: [], _print, Trait.SIDE_EFFECT)
