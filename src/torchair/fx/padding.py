"""Products of training graphs with padded dims. A GPU reads matrices by 16 bytes: where rows begin
anywhere, as those of 50257 classes do, libraries have kernels only that are several times slower.

Operands get zeros, which their producers write along, and results are cut to what was asked for.
It is done before the graph is split, so that the padded values are those that are saved.
"""

from __future__ import annotations

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
_MARKS = ("partitioner_tag", "stack_trace", "nn_module_stack")


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


class _Padding:
    """The values of a graph with zeros behind them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, int, int], fx.Node] = {}
        """By value: with so many more rows and columns."""

    def pad(self, node: fx.Node) -> bool:
        """Put a padded product in the place of one, if that is worth it."""
        at = _PRODUCTS[node.target]  # type: ignore[index]
        *bias, a, b = node.args[: at + 2]
        found = _missing(a, b)
        if found is None or any(not isinstance(x, fx.Node) or _dims(x) != 1 for x in bias):
            return False
        rows, shared, columns = found
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        given = [self._with_zeros(node, x, 0, columns) for x in bias if isinstance(x, fx.Node)]
        given += [self._padded(node, a, rows, shared), self._padded(node, b, shared, columns)]
        made = self._new(node, node.target, *given, **node.kwargs)
        for dim, missing in enumerate((rows, columns)):
            if missing:
                made = self._new(node, aten.slice.Tensor, made, dim, 0, _shape(node)[dim])
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        self._trace_readers(made)
        return True

    def _padded(self, reader: fx.Node, x: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix with zeros behind its rows and columns, before the first product that reads it.
        Those of a transposed one are put to what is transposed, which others read."""
        turns = []
        while x.target is aten.t.default and isinstance(x.args[0], fx.Node):
            turns.append(x)
            x, rows, columns = x.args[0], columns, rows
        made = self._with_zeros(reader, x, rows, columns)
        for _ in range(len(turns) % 2):
            made = self._new(reader, aten.t.default, made)
        return made

    def _with_zeros(self, reader: fx.Node, x: fx.Node, rows: int, columns: int) -> fx.Node:
        if not rows and not columns:
            return x
        key = x, rows, columns
        if key not in self.made:
            behind = [0, columns, 0, rows] if _dims(x) == 2 else [0, columns]
            self.made[key] = self._new(reader, aten.constant_pad_nd.default, x, behind)
            self._redirect_sums(x, self.made[key])
        return self.made[key]

    def _redirect_sums(self, x: fx.Node, padded: fx.Node) -> None:
        """Later sums, such as gradients of a bias, read what was padded: the value before need not
        be stored."""
        late = [u for u in x.users if u.target is aten.sum.dim_IntList and padded < u]
        for reader in late:
            cut = padded
            for dim, size in enumerate(_shape(x)):
                if size != _shape(cut)[dim]:
                    cut = self._new(reader, aten.slice.Tensor, cut, dim, 0, size)
            reader.replace_input_with(x, cut)

    def _trace_readers(self, cut: fx.Node) -> None:
        """Trace views of a value again, whose rows have gaps now. What needs the strides that it
        was traced with gets a copy."""
        todo = [cut]
        for value in todo:
            for reader in list(value.users):
                if reader.op == "output" or reader.target is aten.as_strided.default:
                    self._copy_for(reader, value)
                elif _is_view(reader):
                    try:
                        reader.meta["val"] = _traced(reader.target, reader.args, reader.kwargs)
                        todo.append(reader)
                    except Exception:  # a view that rows with gaps do not have
                        self._copy_for(reader, value)

    def _copy_for(self, reader: fx.Node, value: fx.Node) -> None:
        made = {"memory_format": torch.contiguous_format}
        reader.replace_input_with(value, self._new(reader, aten.clone.default, value, **made))

    def _new(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node before another one, in the part of the graph that this is in."""
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args, kwargs)
        marks = {k: before.meta[k] for k in _MARKS if k in before.meta}
        made.meta.update(marks, val=_traced(target, args, kwargs))
        return made


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
    """Whether a value is in the memory of another one."""
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
