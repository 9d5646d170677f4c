"""Converter of `air.print`: the text of the tensors, then a node that prints it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair import ge
from torchair.convert.control import value_of
from torchair.convert.registry import builtin
from torchair.ge import attrs as attr
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Value, get_default_ge_graph
from torchair.ge.shapes import from_torch
from torchair.ops.print import detail_text, message


@builtin(torch.ops.air.print.default)
def print_tensors(
    tensors: Sequence[Value],
    msg_format: str,
    placeholder: str,
    summarize_size: int,
    tensor_detail: bool,
    *,
    meta_inputs: Any,
) -> None:
    shown: list[Value] = []
    texts: list[str] = []
    for value, meta in zip(tensors, meta_inputs[0], strict=True):
        shown.append(_printable(value))
        texts.append(placeholder)
        if tensor_detail:
            sizes = [from_torch(d) for d in meta.shape]
            shown += [value_of(d) for d in sizes if not isinstance(d, int)]
            dims = ", ".join(str(d) if isinstance(d, int) else placeholder for d in sizes)
            texts[-1] = detail_text(placeholder, dims, meta.dtype)
    text = ge.StringFormat(
        shown,
        template=message(msg_format, placeholder, texts),
        placeholder=placeholder,
        summarize=summarize_size,
    )
    text.node.attrs["_kernel"] = attr.Str("extend")
    ge.PrintV2(text, output_stream="stdout")
    graph = get_default_ge_graph()
    graph.keep_alive.append(graph.nodes[-1])


def _printable(value: Value) -> Value:
    if value.dtype != DataType.DT_BF16:
        return value
    return ge.Cast(value, dst_type=DataType.DT_FLOAT)
