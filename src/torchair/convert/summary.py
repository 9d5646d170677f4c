"""Which operators a graph calls and what becomes of them, as rows of a CSV file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any

import torch
from torch import fx

from torchair.convert.registry import Registration, find
from torchair.convert.table import target_name

HEAD = ("target", "kind", "status", "calls", "inputs", "outputs")


def summary_csv(gm: fx.GraphModule) -> bytes:
    """One row per distinct target, most frequent first."""
    calls: dict[Any, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            calls.setdefault(node.target, []).append(node)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(HEAD)
    for target, nodes in sorted(calls.items(), key=lambda item: -len(item[1])):
        inputs = _statistics([", ".join(_value(a) for a in n.args) for n in nodes])
        outputs = _statistics([_value(n) for n in nodes])
        row = (target_name(target), _kind(target), status(find(target)), len(nodes))
        writer.writerow([*row, inputs, outputs])
    return text.getvalue().encode("utf-8-sig")


def status(entry: Registration | None) -> str:
    """Whether a converter exists and takes every argument."""
    if entry is None:
        return "unregistered"
    return "partially supported" if "Decline" in entry.fn.__code__.co_names else "supported"


def _kind(target: Any) -> str:
    return target.namespace if isinstance(target, torch._ops.OpOverload) else "builtin"


def _statistics(texts: list[str]) -> str:
    return "\n".join(f"{count}x: {text}" for text, count in Counter(texts).most_common())


def _value(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in x) + "]"
    meta = x.meta.get("val") if isinstance(x, fx.Node) else x
    if isinstance(meta, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in meta) + "]"
    if isinstance(meta, torch.Tensor):
        dims = ", ".join(str(d) for d in meta.shape)
        return f"{str(meta.dtype).removeprefix('torch.')}({dims})"
    return str(meta)
