"""What the results of an FX graph are: outputs of the GE graph, views of those or of arguments, and
what is no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from torchair import ge
from torchair.convert.aliases import creator, hint, order_of, sources, storage_key
from torchair.convert.scopes import Token
from torchair.ge.graph import Value
from torchair.ge.shapes import (
    Sym,
    contiguous_strides,
    equal_unless_empty,
    free_symbols,
    from_torch,
    is_static,
)
from torchair.ge.signature import (
    Computed,
    ComputedScalar,
    Fixed,
    InputView,
    Result,
    ResultView,
    SymbolResult,
)

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Results:
    """Collects the outputs of one GE graph."""

    def __init__(
        self,
        arguments: Mapping[fx.Node, int],
        symbols: Mapping[str, Any],
        meta: Callable[[fx.Node], Any],
        value: Callable[[fx.Node], Any],
        dims: Callable[[fx.Node, torch.Tensor], tuple[Any, ...]],
    ) -> None:
        """`meta` and `value` are what tracing and the GE graph have for a node."""
        self._arguments, self._symbols = arguments, symbols
        self._meta, self._value, self._dims = meta, value, dims
        self._outputs: dict[Value, tuple[int, Any]] = {}  # the alias group and FX node of each
        self._groups: dict[int, int] = {}
        self._values: dict[fx.Node, Value] = {}  # of nodes that are outputs

    @property
    def outputs(self) -> list[Value]:
        """Outputs of the GE graph, in order."""
        return list(self._outputs)

    def of(self, gm: fx.GraphModule, items: Iterable[Any]) -> list[Result]:
        """The results of a graph that returns these."""
        items = list(items)
        metas = [self._meta(i) for i in items if isinstance(i, fx.Node)]
        count = Counter(storage_key(m) for m in metas if isinstance(m, torch.Tensor))
        self._shared = {key for key, n in count.items() if n > 1}
        self._taken = self._taken_over(gm)
        return [self._result(item) for item in items]

    def _taken_over(self, gm: fx.GraphModule) -> set[int]:
        """Memory that an input takes over: AOTAutograd may make such a result anew as a view of
        the input, by the strides and offset it sees."""
        target = torch.ops.aten.copy_.default
        updates = gm.graph.find_nodes(op="call_function", target=target, sort=False)
        values = [u.args[1] for u in updates]
        return {storage_key(self._meta(v)) for v in values if isinstance(v, fx.Node)}

    def _result(self, item: Any) -> Result:
        if not isinstance(item, fx.Node):
            return Fixed(item)
        meta = self._meta(item)
        if isinstance(meta, SYMBOLS):
            return self._symbol(item)
        if not isinstance(meta, torch.Tensor):
            return Fixed(meta)
        found: Result | None = self._view_of_argument(item, meta)
        if found is None and (storage_key(meta) in self._shared or _overlaps(meta)):
            found = self._view_of_result(item, meta)
        return self._computed(item) if found is None else found

    def _computed(self, item: fx.Node) -> Result:
        value, meta = self._value(item), self._meta(item)
        if isinstance(value, Token):
            return Fixed(torch.empty(0))
        key = storage_key(meta)
        group = self._groups.setdefault(key, len(self._groups))
        value = self._values.get(item, value)
        if value in self._outputs and self._outputs[value][0] != group:
            value = ge.Clone(value)  # one value, but tensors of different memory
        self._values[item] = value
        first = self._outputs.setdefault(value, (group, item))
        dims = self._dims(item, meta)
        strides = tuple(from_torch(d) for d in meta.stride())
        if strides == contiguous_strides(tuple(from_torch(d) for d in meta.shape)):
            strides = contiguous_strides(dims)
        placed = key in self._shared or key in self._taken
        offset = from_torch(meta.storage_offset()) if placed else None
        index, same = self.outputs.index(value), first == (group, item)
        return Computed(index, dims, strides, group, same, offset, str(meta.device))

    def _symbol(self, item: fx.Node) -> Result:
        meta = self._meta(item)
        expr = from_torch(meta)
        if not isinstance(expr, Sym):
            return Fixed(expr)
        if free_symbols([expr]) <= self._symbols.keys():
            return SymbolResult(expr)
        value = self._value(item)
        self._outputs.setdefault(value, (-1, None))
        return ComputedScalar(self.outputs.index(value))

    # ---- views ----

    def _view_of_argument(self, item: fx.Node, meta: torch.Tensor) -> InputView | None:
        for source in sources(item, self._arguments, self._meta):
            base, arg = self._meta(source), self._arguments[source]
            layout = self._seen_from(base, meta)
            if layout is not None:
                cast = _cast_of_view(base.dtype, meta.dtype)
                return InputView(arg, *layout, same=item is source, cast=cast)
        return None

    def _view_of_result(self, item: fx.Node, meta: torch.Tensor) -> ResultView | None:
        """A result that shares memory with others, or within itself as windows do, as a view of
        what it is a part of."""
        owner = creator(item, self._meta)
        whole = self._meta(owner)
        if owner is item or not _may_be_base(whole, item, owner):
            return None
        layout = self._seen_from(whole, meta)
        base = None if layout is None else self._computed(owner)
        if layout is None or not isinstance(base, Computed):
            return None
        return ResultView(base, *layout, _cast_of_view(whole.dtype, meta.dtype), item.name)

    def _seen_from(
        self, base: torch.Tensor, meta: torch.Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any] | None:
        """Dims, strides and offset that make a view of its base; None where a size is not known
        before the graph has run."""
        dims, strides = (tuple(from_torch(d) for d in x) for x in (meta.shape, meta.stride()))
        begin = from_torch(base.storage_offset()) * base.dtype.itemsize // meta.dtype.itemsize
        offset = from_torch(meta.storage_offset()) - begin
        if not free_symbols([*dims, *strides, offset]) <= self._symbols.keys():
            return None
        return dims, strides, offset


def _may_be_base(whole: torch.Tensor, item: fx.Node, owner: fx.Node) -> bool:
    """Whether a view of what `owner` makes finds its elements there. Between them there may be
    gaps, as in what is scattered into a strided tensor; nothing but `as_strided` looks there."""
    if from_torch(whole.storage_offset()) != 0:
        return False
    walked: Any = item
    raw = False
    while walked is not owner:
        raw = raw or walked.target is torch.ops.aten.as_strided.default
        walked = walked.args[0]
    return _fills_memory(whole) if raw else _apart(whole)


def _fills_memory(meta: torch.Tensor) -> bool:
    """Whether a traced tensor is all of its memory, without gaps."""
    dims, strides = (tuple(from_torch(d) for d in x) for x in (meta.shape, meta.stride()))
    if is_static((*dims, *strides)):
        return bool(torch.ops.aten.is_non_overlapping_and_dense(meta))
    order = order_of(meta)
    if order is None:
        return False
    wanted = contiguous_strides([dims[d] for d in order])
    return all(equal_unless_empty(strides[d], w) for d, w in zip(order, wanted, strict=True))


def _apart(meta: torch.Tensor) -> bool:
    """Whether elements of a traced tensor have places of their own, whatever its sizes are."""
    dims, strides = (tuple(from_torch(d) for d in x) for x in (meta.shape, meta.stride()))
    order = order_of(meta)
    if is_static((*dims, *strides)) or order is None:
        return order is not None and not _overlaps(meta)
    step = strides[order[-1]] if order else 1
    wanted = contiguous_strides([dims[d] for d in order])
    return all(equal_unless_empty(strides[d], w * step) for d, w in zip(order, wanted, strict=True))


def _overlaps(meta: torch.Tensor) -> bool:
    """Whether elements of a traced tensor lie on each other, other than by repeating dims."""
    shape, strides = ([hint(d) for d in sizes] for sizes in (meta.shape, meta.stride()))
    if None in shape or None in strides or 0 in shape:
        return False
    extent = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _cast_of_view(source: torch.dtype, target: torch.dtype) -> str:
    """How memory of one type is seen as another."""
    if source == target:
        return ""
    if source.is_complex and source.to_real() == target:
        return "view_as_real"
    if target.is_complex and target.to_real() == source:
        return "view_as_complex"
    return str(target).removeprefix("torch.")
