"""Operators that make tensors from sizes and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, like_first
from torchair.catalog.elementwise import number
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim


def _fill_rule(op: Op) -> Fact:
    return Fact(op.dtype("value"), tuple(op.ints("dims")))


def _fill(op: Op) -> Kernel:
    dims = op.ints("dims")

    def run(value: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.empty(dims, dtype=value.dtype, device=value.device) if out is None else out
        return made.fill_(value.reshape(()))

    return run


add_row("Fill", _fill_rule, _fill, host=("dims",), out=True)


def _like(value: int) -> Callable[[Op], Kernel]:
    def run(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full_like(x, value) if out is None else out.fill_(value)

    return lambda _op: run


add_row("ZerosLike", like_first, _like(0), Trait.ELEMENTWISE, out=True)
add_row("OnesLike", like_first, _like(1), Trait.ELEMENTWISE, out=True)


def _empty_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), tuple(op.ints("shape")))


def _empty(op: Op) -> Kernel:
    dims, dtype, init = op.ints("shape"), ge_to_torch(op.attr("dtype")), op.attr("init")

    def run(out: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.empty(dims, dtype=dtype) if out is None else out
        return made.zero_() if init else made

    return run


add_row("Empty", _empty_rule, _empty, host=("shape",), out=True)


def _eye_rule(op: Op) -> Fact:
    rows, columns = op.attr("num_rows"), op.attr("num_columns")
    return Fact(op.attr("dtype"), (*op.attr("batch_shape"), rows, columns or rows))


def _eye(op: Op) -> Kernel:
    fact = _eye_rule(op)
    dims: Any = fact.shape
    dtype = ge_to_torch(fact.dtype)
    return lambda: torch.eye(*dims[-2:], dtype=dtype).repeat(*dims[:-2], 1, 1).reshape(dims)


add_row("Eye", _eye_rule, _eye)


# ---- ranges ----


def _bounds(op: Op) -> tuple[Any, Any, Any]:
    """Start, limit and step: numbers of constants, else host integers."""
    known = {p: number(op, p) for p in ("start", "limit", "delta")}
    start, limit, delta = (op.int(p) if n is None else n for p, n in known.items())
    return start, limit, delta


def _count(start: Any, limit: Any, delta: Any) -> Dim:
    if any(isinstance(n, float) for n in (start, limit, delta)):
        return math.ceil((limit - start) / delta)
    if delta == 1:
        return limit - start
    return start - limit if delta == -1 else -((start - limit) // delta)


def _range_type(op: Op) -> int:
    types = {op.dtype(p) for p in ("start", "limit", "delta")}
    return DataType.DT_INT64 if len(types) > 1 else types.pop()


def _range_rule(op: Op) -> Fact:
    return Fact(_range_type(op), (_count(*_bounds(op)),))


def _range(op: Op) -> Kernel:
    bounds, dtype = _bounds(op), ge_to_torch(_range_type(op))
    return lambda out=None: torch.arange(*bounds, dtype=dtype, out=out)


add_row("Range", _range_rule, _range, host=("start", "limit", "delta"), out=True)


def _linspace_rule(op: Op) -> Fact:
    return Fact(op.dtype("start"), (op.int("num"),))


def _linspace(op: Op) -> Kernel:
    count, dtype = op.int("num"), op.torch_dtype("start")

    def run(start: torch.Tensor, stop: torch.Tensor, out: Any = None) -> torch.Tensor:
        return torch.linspace(start.item(), stop.item(), count, dtype=dtype, out=out)

    return run


add_row("LinSpace", _linspace_rule, _linspace, host=("num",), out=True)


# ---- triangles: what stays depends on the place, so these are not elementwise ----


def _triangle(fn: Callable[..., torch.Tensor]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        diagonal = op.attr("diagonal")
        return lambda x, out=None: fn(x, diagonal, out=out)

    return make


add_row("Tril", like_first, _triangle(torch.tril), out=True)
add_row("Triu", like_first, _triangle(torch.triu), out=True)
