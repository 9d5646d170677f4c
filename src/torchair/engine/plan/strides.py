"""Questions about dims, strides and small contents that planning asks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.numbers import same
from torchair.engine.plan.strided import Strided
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact, Value
from torchair.ge.shapes import Sym, compile_dims, contiguous_strides, free_symbols
from torchair.operators import Order

HOST_SIZE = 64


class Formula:
    """Sizes that follow from the values of symbols, compiled once."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.names = sorted(free_symbols(sizes))
        self._compute = compile_dims(sizes, self.names)

    def __call__(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return self._compute(*[values[n] for n in self.names])


Meta = Any
"""What planning knows of a tensor: a torch tensor without data, or `Strided` where sizes vary."""


def meta_of(fact: Fact) -> torch.Tensor:
    dims: Any = fact.shape
    return torch.empty(dims, dtype=ge_to_torch(fact.dtype), device="meta")


def in_format(meta: Meta, memory_format: torch.memory_format) -> Meta:
    """The same dims with the strides of a memory format."""
    if not isinstance(meta, Strided):
        return torch.empty_like(meta, memory_format=memory_format)
    if memory_format != torch.channels_last:
        raise ValueError(f"no strides are known for {memory_format}")
    _, c, h, w = meta.shape
    return with_strides(meta, (c * w * h, 1, c * w, c))


def in_order(meta: Meta, order: Order) -> Meta:
    """The same dims without gaps, in an order of dims."""
    return with_strides(meta, order.strides(meta.shape))


def dense_strides(meta: Meta) -> tuple[int, ...]:
    return _row_major(meta.shape)


def _row_major(shape: Sequence[Any]) -> tuple[Any, ...]:
    return contiguous_strides(tuple(shape))


def is_dense(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether these strides give every element its own place, without gaps."""
    if all(same(s, d) for s, d in zip(strides, _row_major(shape), strict=True)):
        return True
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return 0 in shape
        expected *= size
    return True


def is_writable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements have places of their own, but for dims that only repeat (stride 0)."""
    extent = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride and stride < extent:
            return 0 in shape
        extent += stride * (size - 1)
    return True


def with_strides(meta: Meta, strides: Any) -> Meta:
    if isinstance(meta, Strided):
        return Strided(meta.shape, strides, meta.dtype)
    return torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device="meta")


def laid_out(meta: Meta, strides: Sequence[int] | None) -> Meta:
    """The same dims with these strides, if they leave no gaps."""
    fits = strides is not None and is_dense(meta.shape, strides)
    return with_strides(meta, strides) if fits else meta


def count_of(fact: Fact) -> int:
    return math.prod(fact.shape or ())  # type: ignore[arg-type]


def is_known(fact: Fact) -> bool:
    content = fact.content
    if content is None or isinstance(content, Sym):
        return False
    return not (isinstance(content, tuple) and any(isinstance(c, Sym) for c in content))


def symbols_of(inputs: Iterable[tuple[Value, Fact]]) -> dict[str, int]:
    """Values of the symbols that inputs declare, from their facts in one call."""
    found: dict[str, int] = {}
    for value, fact in inputs:
        declared, real = list(value.shape or ()), list(fact.shape or ())
        if value.content is not None and is_known(fact):
            declared += as_tuple(value.content)
            real += as_tuple(fact.content)
        for d, n in zip(declared, real, strict=False):
            if isinstance(d, Sym) and d.expr.is_Symbol:
                found[d.expr.name] = n  # type: ignore[assignment]
    return found


def as_tuple(content: Any) -> tuple[Any, ...]:
    """Numbers of a host value, a scalar counting as one."""
    return content if isinstance(content, tuple) else (content,)


def content_of(t: torch.Tensor) -> Any:
    if t.dim() > 1 or t.numel() > HOST_SIZE or t.dtype.is_complex or t.device.type != "cpu":
        return None
    return tuple(t.tolist()) if t.dim() else t.item()


def flat_slots(args: list[Any]) -> list[int]:
    """Slots of a step's arguments, lists opened, unfed ones left out."""
    return [s for a in args for s in (a if isinstance(a, list) else [a]) if s is not None]


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def shares(view: Meta, base: Meta) -> bool:
    if isinstance(view, Strided):
        return view.memory is base.memory
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata


def same_strides(meta: Meta, wanted: Sequence[int]) -> bool:
    """Strides agree wherever they matter: a dim of size 1 may have any."""
    if meta.numel() == 0:
        return True
    sizes = zip(meta.stride(), wanted, meta.shape, strict=True)
    return all(s == w or n == 1 for s, w, n in sizes)
