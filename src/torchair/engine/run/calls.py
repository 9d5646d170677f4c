"""The calling convention of a graph: call arguments become graph inputs, graph outputs results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch

from torchair.engine.plan.planner import Layout
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.shapes import compile_dims
from torchair.ge.signature import (
    NO_OFFSET,
    Computed,
    ComputedScalar,
    Fixed,
    InputSource,
    InputView,
    Result,
    ResultView,
    SymbolResult,
    computed,
)


def input_reader(sources: Sequence[InputSource]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from call arguments to graph inputs."""
    if all(s.kind == "tensor" for s in sources):
        positions = [s.args[0] for s in sources]
        if not positions:
            return lambda args: ()
        if len(positions) == 1:
            only = positions[0]
            return lambda args: (args[only],)
        return itemgetter(*positions)
    readers = [_reader(s) for s in sources]
    return lambda args: [read(args) for read in readers]


def _reader(source: InputSource) -> Callable[[Sequence[Any]], Any]:
    if source.kind == "tensor":
        return itemgetter(source.args[0])
    dtype = ge_to_torch(source.dtype)
    if source.kind == "random":
        return lambda args: no_offsets(source.count)
    if source.kind == "scalar":
        position = source.args[0]
        return lambda args: torch.tensor(args[position], dtype=dtype)
    return lambda args: torch.tensor([args[a] for a in source.args], dtype=dtype)


@cache
def no_offsets(count: int) -> torch.Tensor:
    """What random operators get for offsets: they draw from torch's generators, as eager does."""
    return torch.full((count,), NO_OFFSET, dtype=torch.int64, device="cpu")


def layouts_of(results: Sequence[Result], count: int) -> list[Layout | None]:
    """What each output of a graph must look like in memory, where a result promises something."""
    layouts: list[Layout | None] = [None] * count
    for r in computed(results):
        if layouts[r.index] is None:
            layouts[r.index] = Layout(r.shape, r.strides, r.alias_group, r.offset)
    return layouts


def result_builder(
    results: Sequence[Result], symbols: dict[str, tuple[int, int | None]]
) -> Callable[[Sequence[torch.Tensor], Sequence[Any]], tuple[Any, ...]]:
    """A function from graph outputs and call arguments to the results of the FX graph."""
    if all(isinstance(r, Computed) and r.same for r in results):
        order = [r.index for r in results if isinstance(r, Computed)]
        if len(order) == 1:
            only = order[0]
            return lambda outputs, args: (outputs[only],)
        return lambda outputs, args: tuple([outputs[i] for i in order])
    names = list(symbols)
    sources = [symbols[n] for n in names]
    makers = [result_maker(r, names) for r in results]
    known = list(results)
    views = [(k, known.index(r)) for k, r in enumerate(known) if isinstance(r, ResultView)]
    again = [(k, first) for k, first in views if first != k]

    def build(outputs: Sequence[torch.Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        sizes = [args[a] if dim is None else args[a].shape[dim] for a, dim in sources]
        made = [make(outputs, args, sizes) for make in makers]
        for k, first in again:
            made[k] = made[first]
        return tuple(made)

    return build


def result_maker(result: Result, names: Sequence[str]) -> Callable[[Any, Any, Any], Any]:
    """A function from (outputs, arguments, sizes by `names`) to one result."""
    if isinstance(result, Fixed):
        fixed = result.value
        return lambda outputs, args, sizes: fixed
    if isinstance(result, Computed):
        index = result.index
        if result.same:
            return lambda outputs, args, sizes: outputs[index]
        return lambda outputs, args, sizes: torch.ops.aten.alias.default(outputs[index])
    if isinstance(result, ComputedScalar):
        index = result.index
        return lambda outputs, args, sizes: outputs[index].item()
    if isinstance(result, SymbolResult):
        value = compile_dims([result.expr], names)
        return lambda outputs, args, sizes: value(*sizes)[0]
    if isinstance(result, ResultView):
        index, view = result.base.index, viewer(result, names)
        return lambda outputs, args, sizes: view(outputs[index], sizes)
    arg = result.arg
    if result.same:
        return lambda outputs, args, sizes: args[arg]
    view = viewer(result, names)
    return lambda outputs, args, sizes: view(args[arg], sizes)


def viewer(
    result: InputView | ResultView, names: Sequence[str]
) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor]:
    """A function from (base, sizes by `names`) to a view of the base."""
    rank = len(result.shape)
    dims = compile_dims([*result.shape, *result.strides, result.offset], names)
    cast = getattr(torch, result.cast) if result.cast else None
    if isinstance(cast, torch.dtype):
        cast = partial(_same_memory, dtype=cast)

    def make(base: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        known = dims(*sizes)
        base = base if cast is None else cast(base)
        start = base.storage_offset() + known[-1]
        return torch.as_strided(base, known[:rank], known[rank : 2 * rank], start)

    return make


def _same_memory(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of another type that begins where `t` does."""
    start = t.storage_offset() * t.element_size() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), start, (0,), (1,))
