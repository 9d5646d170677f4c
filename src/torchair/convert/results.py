"""What the results of an FX graph are: outputs of the GE graph, views of those or of arguments, and
what is no tensor. For that one must know whose memory a tensor is in."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from torchair import ge
from torchair.convert.air import Token
from torchair.fx.passes.memory import is_bent
from torchair.fx.passes.values import fake_result
from torchair.ge import shapes, signature
from torchair.ge.dtypes import torch_to_ge, type_of_meta
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import Sym, contiguous_strides, equal_unless_empty, free_symbols, from_torch
from torchair.ge.signature import (
    Computed,
    ComputedScalar,
    Fixed,
    GraphResult,
    InputView,
    Pending,
    ResultView,
)
from torchair.torch_private.aot import TracingContext
from torchair.torch_private.dispatch import OpOverload
from torchair.torch_private.fake import FakeTensor

# ---- whose memory a tensor is in ----

aten = torch.ops.aten
_READS = (aten.as_strided.default, aten.as_strided_scatter.default)


def storage_key(meta: torch.Tensor) -> int:
    """A number for the memory of a traced tensor."""
    return meta.untyped_storage()._cdata


def order_of(meta: torch.Tensor) -> list[int] | None:
    """Dims of a traced tensor from the outermost one in memory to the innermost, by the sizes it
    was traced with; None where those are data-dependent."""
    shape, strides = hints(meta)
    if None in shape or None in strides:
        return None
    return sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1))


def hints(meta: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Dims and strides as they were when they were traced, None where they are data-dependent."""
    shape, strides = (
        [d.node.hint if isinstance(d, torch.SymInt) else d for d in sizes]
        for sizes in (meta.shape, meta.stride())
    )
    return shape, strides


def layout_of(meta: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dims and strides as the graph has them."""
    dims, strides = (tuple(from_torch(d) for d in sizes) for sizes in (meta.shape, meta.stride()))
    return dims, strides


def _in_order(meta: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory in the order of their indices."""
    if meta.layout is not torch.strided or meta.dim() < 2:
        return True
    dims, strides = layout_of(meta)
    wanted = contiguous_strides(dims)
    return all(n == 1 or s == w for n, s, w in zip(dims, strides, wanted, strict=True))


def spec_of(meta: Any) -> TensorSpec:
    """What a converter gets to know of a result that tracing saw."""
    if isinstance(meta, torch.Tensor):
        dims = tuple(from_torch(d) for d in meta.shape)
        return TensorSpec(
            torch_to_ge(meta.dtype), dims, meta.dtype, str(meta.device), _in_order(meta)
        )
    return TensorSpec(type_of_meta(meta), ())


def may_be(shape: Any, traced: Any) -> bool:
    """Whether inferred dims do not contradict traced ones; symbols may be anything."""
    if shape is None or len(shape) != len(traced):
        return shape is None
    pairs = zip(shape, traced, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def sources(
    node: fx.Node, args: Iterable[fx.Node], meta_of: Callable[[fx.Node], Any]
) -> list[fx.Node]:
    """Those of `args` that share memory with a node, the one that it was made from first: others
    may happen to share memory in the call that was traced."""

    def memory(n: fx.Node) -> int | None:
        meta = meta_of(n)
        return storage_key(meta) if isinstance(meta, torch.Tensor) else None

    own = memory(node)
    found = [a for a in args if memory(a) == own]
    made_from: Any = node
    while made_from not in found:
        made_from = made_from.args[0] if made_from.args else None
        if not isinstance(made_from, fx.Node) or memory(made_from) not in (own, None):
            return found
    return [made_from, *(a for a in found if a is not made_from)]


def creator(node: fx.Node, meta_of: Callable[[fx.Node], Any]) -> fx.Node:
    """The node that a node's memory was made by: the first one in the chain of views."""
    own, found, walked = storage_key(meta_of(node)), node, node
    while walked.args and isinstance(walked.args[0], fx.Node):
        walked = walked.args[0]
        meta = meta_of(walked)
        if isinstance(meta, torch.Tensor) and storage_key(meta) != own:
            break
        found = walked if isinstance(meta, torch.Tensor) else found
    return found


def join_views(gm: fx.GraphModule) -> None:
    """Let traced views lie in the memory of what they are views of. Torch puts nodes into a graph
    for the numbers of Python among its arguments, and their results have other memory. What
    `as_strided` reads of a view is read of the tensor that was computed: it counts in memory."""
    mended: set[fx.Node] = set()
    for node in gm.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and source in mended:
            node.meta["val"] = source.meta["val"][node.args[1]]
        elif is_view(node.target) and _is_elsewhere(node, source):
            mode = source.meta["val"].fake_mode
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs, mode)
            mended.add(node)
        if node.target is aten.as_strided.default:
            _read_where_computed(node)


def _read_where_computed(node: fx.Node) -> None:
    source: Any = node.args[0]
    owner, whole = creator(source, lambda n: n.meta.get("val")), source.meta["val"]
    if owner.op == "placeholder":
        return
    owner = _first_of_type(source, owner, whole.dtype)
    if owner is source:
        return
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if offset is None:
        with node.graph.inserting_before(node):
            offset = node.graph.call_function(aten.sym_storage_offset.default, (source,))
        offset.meta["val"] = whole.storage_offset()
    node.args, node.kwargs = (owner, *node.args[1:3], offset), {}


def _first_of_type(view: fx.Node, owner: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Of a tensor and the views that lead from it to another one, the first with elements of a
    type: those of a complex tensor are counted as pairs in its `view_as_real`."""
    first, node = view, view
    while node is not owner:
        node = node.args[0]  # type: ignore[assignment]
        made = node.meta.get("val")
        first = node if isinstance(made, torch.Tensor) and made.dtype == dtype else first
    return first


def return_views_of_arguments(gm: fx.GraphModule) -> None:
    """Results that are views of updated arguments are taken from these, in place. AOTAutograd makes
    such a result anew, and where sizes are symbols it does so by the strides and the offset of what
    the graph returns: a view of the new value, which lies in other memory than the argument."""
    known = getattr(TracingContext.try_get(), "fw_metadata", None)
    arguments = gm.graph.find_nodes(op="placeholder")
    if known is None or not any(isinstance(n.meta.get("val"), torch.SymInt) for n in arguments):
        return
    updates = _updates(gm)
    owners = {u.args[1]: u.args[0] for u in updates if u.args[0] in arguments}
    last = gm.graph.output_node()
    results: Any = list(last.args[0])  # type: ignore[arg-type]
    before = len(known.mutated_inp_runtime_indices)
    for k, info in enumerate(known.output_info if owners else (), before):
        if info.output_type.name == "alias_of_input" and isinstance(results[k], fx.Node):
            results[k] = _seen_in(results[k], owners, last)
    last.args = (results,)


def _updates(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.copy_.default, sort=False)


def _seen_in(result: fx.Node, owners: dict[Any, Any], before: fx.Node) -> fx.Node:
    """The same views, of the argument instead of the value that it takes over; the result itself
    where it is no chain of views."""
    chain: list[fx.Node] = []
    walked: Any = result
    while walked not in owners:
        if not isinstance(walked, fx.Node):
            return result
        if not is_view(walked.target) and walked.target is not operator.getitem:
            return result
        chain.append(walked)
        walked = walked.args[0]
    made = owners[walked]
    for node in reversed(chain):
        with before.graph.inserting_before(before):
            args = (made, *node.args[1:])
            view = before.graph.create_node("call_function", node.target, args, node.kwargs)
        target: Any = node.target
        value = fake_result(target, view.args, view.kwargs, walked.meta["val"].fake_mode)
        view.meta = {**node.meta, "val": value}
        made = view
    return made


def _is_elsewhere(node: fx.Node, source: Any) -> bool:
    """Whether a view was traced in other memory than its source."""
    base = source.meta.get("val") if isinstance(source, fx.Node) else None
    view = node.meta.get("val")
    if isinstance(view, (list, tuple)):
        view = view[0] if view else None
    if not isinstance(base, FakeTensor) or not isinstance(view, FakeTensor):
        return False
    return storage_key(base) != storage_key(view)


def is_view(target: Any) -> bool:
    """Whether an operator gives a view of its argument."""
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    kinds = [r.alias_info for r in returns]
    return len(kinds) == 1 and kinds[0] is not None and not kinds[0].is_write


def bases(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Arguments that are read and written by their memory alone, and nodes that are such an
    argument updated, each with the argument. AOTAutograd makes them where arguments share memory
    and are updated; their dims are not guarded."""
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _is_plain(node):
            found[node] = node
        elif node.target is aten.as_strided_scatter.default and node.args[0] in found:
            found[node] = found[node.args[0]]
    updated = {owner for node, owner in found.items() if node is not owner}
    for node, owner in found.items():
        if not all(_by_memory(user, node, found) for user in node.users):
            updated.discard(owner)
    return {node: owner for node, owner in found.items() if owner in updated}


def _is_plain(node: fx.Node) -> bool:
    meta = node.meta.get("val")
    if not isinstance(meta, torch.Tensor) or not all(isinstance(d, int) for d in meta.shape):
        return False
    return meta.dim() > 0 and meta.is_contiguous() and meta.storage_offset() == 0


def _by_memory(user: fx.Node, node: fx.Node, owners: dict[fx.Node, fx.Node]) -> bool:
    """Whether a user minds the memory of a node only, not its dims."""
    if user.op == "output":
        return True
    if user.target is aten.copy_.default:
        return [owners.get(a) for a in user.args[:2]] == [owners[node]] * 2  # type: ignore[arg-type]
    return user.target in _READS and user.args[0] is node


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

    def of(self, gm: fx.GraphModule, items: Iterable[Any]) -> list[GraphResult]:
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
        values = [u.args[1] for u in _updates(gm)]
        return {storage_key(self._meta(v)) for v in values if isinstance(v, fx.Node)}

    def _result(self, item: Any) -> GraphResult:
        if not isinstance(item, fx.Node):
            return Fixed(item)
        meta = self._meta(item)
        if isinstance(meta, SYMBOLS):
            return self._symbol(item)
        if not isinstance(meta, torch.Tensor):
            return Fixed(meta)
        found: GraphResult | None = self._view_of_argument(item, meta)
        shares = storage_key(meta) in self._shared or _overlaps(meta) or is_bent(meta)
        if found is None and shares:
            found = self._view_of_result(item, meta)
        return self._computed(item) if found is None else found

    def _computed(self, item: fx.Node) -> GraphResult:
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
        traced, strides = layout_of(meta)
        if strides == contiguous_strides(traced):
            strides = contiguous_strides(dims)
        placed = key in self._shared or key in self._taken
        offset = from_torch(meta.storage_offset()) if placed else None
        index, same = self.outputs.index(value), first == (group, item)
        return Computed(index, dims, strides, group, same, offset, str(meta.device))

    def _symbol(self, item: fx.Node) -> GraphResult:
        meta = self._meta(item)
        expr = from_torch(meta)
        if not isinstance(expr, Sym):
            return Fixed(expr)
        if free_symbols([expr]) <= self._symbols.keys():
            return signature.SymbolResult(expr)
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
                traced = _alone(item) if _repeats(base) or _repeats(meta) else None
                pending = _pending(base, meta)
                return InputView(arg, *layout, item is source, cast, pending, traced)
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
        cast = _cast_of_view(whole.dtype, meta.dtype)
        if not cast and aten.detach.default in _views_between(item, owner):
            cast = "detach"  # gradients of the base are not its own
        return ResultView(base, *layout, cast, item.name, _pending(whole, meta))

    def _seen_from(
        self, base: torch.Tensor, meta: torch.Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any] | None:
        """Dims, strides and offset that make a view of its base; None where a size is not known
        before the graph has run."""
        dims, strides = layout_of(meta)
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
    raw = aten.as_strided.default in _views_between(item, owner)
    return fills_memory(whole) if raw else order_of(whole) is not None and not _overlaps(whole)


def _views_between(item: fx.Node, owner: fx.Node) -> set[Any]:
    """What makes a view of what `owner` makes."""
    walked: Any = item
    found = set()
    while walked is not owner:
        found.add(walked.target)
        walked = walked.args[0]
    return found


def fills_memory(meta: torch.Tensor) -> bool:
    """Whether a traced tensor is all of its memory, without gaps."""
    dims, strides = layout_of(meta)
    if shapes.is_static((*dims, *strides)):
        return bool(torch.ops.aten.is_non_overlapping_and_dense(meta))
    order = order_of(meta)
    if order is None:
        return False
    wanted = contiguous_strides([dims[d] for d in order])
    return all(equal_unless_empty(strides[d], w) for d, w in zip(order, wanted, strict=True))


def _overlaps(meta: torch.Tensor) -> bool:
    """Whether elements of a traced tensor lie on each other, other than by repeating dims."""
    shape, strides = hints(meta)
    if None in shape or None in strides or 0 in shape:
        return False
    extent = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def _repeats(meta: torch.Tensor) -> bool:
    return any(step == 0 and size != 1 for size, step in zip(*hints(meta), strict=True))


def _alone(item: fx.Node) -> Callable[..., Any]:
    """What computes one node from all arguments of its graph."""
    needed, left = set(), [item]
    while left:
        if (node := left.pop()) not in needed:
            needed.add(node)
            left += node.all_input_nodes
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in item.graph.nodes:
        if node.op == "placeholder" or node in needed:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(made[item])
    return fx.GraphModule({}, graph).forward


def _pending(base: torch.Tensor, view: torch.Tensor) -> Pending:
    """What base and view leave to their readers, where that is not the same."""
    of_base, of_view = (
        " ".join(["conj"] * t.is_conj() + ["neg"] * t.is_neg()) for t in (base, view)
    )
    return signature.PLAIN if of_base == of_view else Pending(of_base, of_view)


def _cast_of_view(source: torch.dtype, target: torch.dtype) -> str:
    """How memory of one type is seen as another."""
    if source == target:
        return ""
    if source.is_complex and source.to_real() == target:
        return "view_as_real"
    if target.is_complex and target.to_real() == source:
        return "view_as_complex"
    return str(target).removeprefix("torch.")
