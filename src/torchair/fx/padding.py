"""Products of training graphs with padded dims. A GPU reads matrices by 16 bytes: where rows begin
anywhere, as those of 50257 classes do, libraries have kernels only that are several times slower.

Operands get zeros, which their producers write along, and results are cut to what was asked for.
Predictions of classes stay padded up to their gradient: behind them is minus infinity, which has
no probability. It is done before the graph is split, so that the padded values are those that are
saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from torchair.log import debug_print
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.fake import detect_fake_mode

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Which argument is the first matrix."""
_TYPES = (torch.bfloat16, torch.float16)
_DEVICES = ("cuda",)
_BYTES = 16
_WORK = 1 << 29
"""Multiplications from which on a product gains more than the cuts and zeros cost."""
_LEAST = 64
"""Elements of each dim of such a product: one with few rows reads its weights only once."""
_CASTS = (aten.view.default, aten._unsafe_view.default, aten._to_copy.default)
"""What may be between a product and what reads its rows, or between a gradient and its product."""
_MARKS = (
    "partitioner_tag", "stack_trace", "nn_module_stack", "recompute", "ac_graph_id",
    "has_backward_hook",
)  # fmt: skip
"""What a new node takes over of the node that it is made for, checkpoints included."""
_ZEROS = "torchair_zeros_behind"
"""Marks a value whose last columns are zeros."""


def pad_products(joint: fx.GraphModule) -> int:
    """Change a joint graph: how many products were padded."""
    padding = _Padding(joint.graph)
    found = [n for n in joint.graph.nodes if n.target in _PRODUCTS]
    count = sum(map(padding.pad, found))
    if count:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    debug_print(3, f"torchair padded {count} of {len(found)} products")
    return count


def widened(x: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Predictions that come from a product as wide as it is to be, with minus infinity behind the
    classes, for a reader of rows; None where the product stays as it is. Other readers get a part
    of them."""
    padding = _Padding(x.graph)
    chain, product = _chain(x)
    if product.target not in _PRODUCTS or product.kwargs:
        return None
    count = _shape(product)[1]
    wide = padding.with_classes(product)
    if wide is None:
        return None
    cut = padding.new(product, aten.slice.Tensor, wide, 1, 0, count)
    product.replace_all_uses_with(cut)
    x.graph.erase_node(product)
    padding.trace_readers(cut, product.meta["val"])
    return padding.along(reader, chain, wide)


def narrowed(gradient: fx.Node, reader: fx.Node, count: int) -> fx.Node:
    """The first columns of a gradient, of which the others are zeros."""
    gradient.meta[_ZEROS] = True
    return _Padding(gradient.graph).new(reader, aten.slice.Tensor, gradient, 1, 0, count)


class _Padding:
    """The values of a graph with zeros behind them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, int, int], fx.Node] = {}
        """By value: with so many more rows and columns."""

    def pad(self, node: fx.Node) -> bool:
        """Put a padded product in the place of one, if that is worth it."""
        operands = _operands(node)
        if operands is None:
            return False
        bias, a, b, (rows, shared, columns) = operands
        given = [self._with_zeros(node, x, 0, columns) for x in bias]
        given += [self._padded(node, a, rows, shared), self._padded(node, b, shared, columns)]
        made = self.new(node, node.target, *given, **node.kwargs)
        for dim, missing in enumerate((rows, columns)):
            if missing:
                made = self.new(node, aten.slice.Tensor, made, dim, 0, _shape(node)[dim])
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        self.trace_readers(made, node.meta["val"])
        return True

    def with_classes(self, node: fx.Node) -> fx.Node | None:
        """A product whose further columns are minus infinity, beside it; None where it needs none.
        They are what is added to zeros."""
        operands = _operands(node)
        if operands is None or not operands[-1][2]:
            return None
        bias, a, b, (rows, shared, columns) = operands
        value = node.meta["val"]
        place = {"dtype": value.dtype, "device": value.device}
        added = bias[0] if bias else self.new(node, aten.full.default, [value.shape[1]], 0, **place)
        less = [0, columns], -float("inf")
        given = [self.new(node, aten.constant_pad_nd.default, added, *less)]
        given += [self._padded(node, a, rows, shared), self._padded(node, b, shared, columns)]
        made = self.new(node, aten.addmm.default, *given)
        return self.new(node, aten.slice.Tensor, made, 0, 0, value.shape[0]) if rows else made

    def along(self, reader: fx.Node, chain: list[fx.Node], source: fx.Node) -> fx.Node:
        """What a chain of casts makes of another source with more columns."""
        made = source
        for node in reversed(chain):
            given = node.args[1:]
            if node.target is not aten._to_copy.default:
                given = ([*_shape(node)[:-1], _shape(source)[-1]],)
            made = self.new(reader, node.target, made, *given, **node.kwargs)
        return made

    def _padded(self, reader: fx.Node, x: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix with zeros behind its rows and columns, before the first product that reads it.
        Those of a transposed one are put to what is transposed, which others read."""
        turns = []
        while x.target is aten.t.default and isinstance(x.args[0], fx.Node):
            turns.append(x)
            x, rows, columns = x.args[0], columns, rows
        made = self._with_zeros(reader, x, rows, columns)
        for _ in range(len(turns) % 2):
            made = self.new(reader, aten.t.default, made)
        return made

    def _with_zeros(self, reader: fx.Node, x: fx.Node, rows: int, columns: int) -> fx.Node:
        if not rows and not columns:
            return x
        key = x, rows, columns
        if key not in self.made:
            self.made[key] = self._known_zeros(reader, x, rows, columns)
            self._redirect_sums(x, self.made[key])
        return self.made[key]

    def _known_zeros(self, reader: fx.Node, x: fx.Node, rows: int, columns: int) -> fx.Node:
        """The same of a value that was cut from one with zeros, or else with new ones."""
        chain, cut = _chain(x)
        if cut.target is aten.slice.Tensor and not rows and isinstance(cut.args[0], fx.Node):
            wide = cut.args[0]
            if _ZEROS in wide.meta and _shape(wide)[-1] == _shape(x)[-1] + columns:
                return self.along(reader, chain, wide)
        behind = [0, columns, 0, rows] if _dims(x) == 2 else [0, columns]
        return self.new(reader, aten.constant_pad_nd.default, x, behind)

    def _redirect_sums(self, x: fx.Node, padded: fx.Node) -> None:
        """Later sums, such as gradients of a bias, read what was padded: the value before need not
        be stored."""
        late = [u for u in x.users if u.target is aten.sum.dim_IntList and padded < u]
        for reader in late:
            cut = padded
            for dim, size in enumerate(_shape(x)):
                if size != _shape(cut)[dim]:
                    cut = self.new(reader, aten.slice.Tensor, cut, dim, 0, size)
            reader.replace_input_with(x, cut)

    def trace_readers(self, cut: fx.Node, before: torch.Tensor) -> None:
        """Trace views of a value again, whose rows have gaps now: `before` they had none. What
        needs the strides that it was traced with gets a copy."""
        todo = [(cut, before)]
        for value, traced in todo:
            for reader in list(value.users):
                if reader.op == "output":
                    self._copy_for(reader, value, traced)
                elif _is_view(reader):
                    try:
                        made = _traced(reader.target, reader.args, reader.kwargs)
                    except Exception:  # a view that rows with gaps do not have
                        self._copy_for(reader, value, traced)
                    else:
                        todo.append((reader, reader.meta["val"]))
                        reader.meta["val"] = made

    def _copy_for(self, reader: fx.Node, value: fx.Node, traced: torch.Tensor) -> None:
        """A copy with the strides of what was traced."""
        order = sorted(range(traced.dim()), key=traced.stride, reverse=True)
        back = [order.index(d) for d in range(len(order))]
        made = self.new(reader, aten.permute.default, value, order)
        rows = {"memory_format": torch.contiguous_format}
        made = self.new(reader, aten.clone.default, made, **rows)
        reader.replace_input_with(value, self.new(reader, aten.permute.default, made, back))

    def new(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node before another one, in the part of the graph that this is in."""
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args, kwargs)
        marks = {k: before.meta[k] for k in _MARKS if k in before.meta}
        made.meta.update(marks, val=_traced(target, args, kwargs))
        return made


_Operands = tuple[list[fx.Node], fx.Node, fx.Node, tuple[int, int, int]]


def _operands(node: fx.Node) -> _Operands | None:
    """A bias, if any, the matrices, and what their rows, sums and columns lack; None where the
    product stays as it is."""
    at = _PRODUCTS[node.target]  # type: ignore[index]
    *bias, a, b = node.args[: at + 2]
    found = _missing(a, b)
    whole = (_shape(node)[1],)
    if found is None or any(not isinstance(x, fx.Node) or _shape(x) != whole for x in bias):
        return None
    if any(_wants_memory(reader) for reader in _views(node)):
        return None
    return bias, a, b, found  # type: ignore[return-value]


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Values in the memory of a node."""
    seen = {node}
    todo = [node]
    for value in todo:
        new = [user for user in value.users if user not in seen and _is_view(user)]
        seen.update(new)
        todo += new
        yield from new


def _wants_memory(view: fx.Node) -> bool:
    """Whether a view says how memory is laid out, or is a result of the graph that repeats
    elements: then what it is made of is to have the strides that were traced."""
    if view.target is aten.as_strided.default:
        return True
    value = view.meta["val"]
    result = any(user.op == "output" for user in view.users)
    return result and isinstance(value, torch.Tensor) and 0 in value.stride()


def _chain(x: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """Casts that keep rows whole, the last one first, and what they begin with."""
    chain: list[fx.Node] = []
    while x.target in _CASTS:
        source = x.args[0]
        assert isinstance(source, fx.Node)
        if _dims(source) == 0 or _dims(x) == 0 or _shape(source)[-1] != _shape(x)[-1]:
            break
        chain.append(x)
        x = source
    return chain, x


def _missing(a: Any, b: Any) -> tuple[int, int, int] | None:
    """What rows, sums and columns of a product lack to be read by 16 bytes; None where nothing
    does, or it is not worth it."""
    x, y = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (a, b))
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return None
    if x.device.type not in _DEVICES or x.dtype not in _TYPES or y.dtype != x.dtype:
        return None
    sizes = (*x.shape, y.shape[1])
    if not all(isinstance(n, int) and n >= _LEAST for n in sizes):
        return None
    if sizes[0] * sizes[1] * sizes[2] < _WORK:
        return None
    elements = _BYTES // x.dtype.itemsize
    rows, shared, columns = (-n % elements for n in sizes)
    x_turned, y_turned = (t.stride(0) == 1 for t in (x, y))
    # the result has rows one after the other, so that its columns count in any case
    found = rows * x_turned, shared * (y_turned or not x_turned), columns
    return found if any(found) else None


def _is_view(node: fx.Node) -> bool:
    """Whether a value is in the memory of another one, or one of several such."""
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_view(source)
    if node.target is aten._unsafe_view.default:
        return True
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return any(r.alias_info is not None for r in returns)


def _traced(target: Any, args: Any, kwargs: Any) -> Any:
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([a for a in given if isinstance(a, torch.Tensor)])
    if mode is None:
        return target(*given, **named)
    with mode:
        return target(*given, **named)


def _shape(node: fx.Node) -> Any:
    return node.meta["val"].shape


def _dims(node: fx.Node) -> int:
    return len(_shape(node))
