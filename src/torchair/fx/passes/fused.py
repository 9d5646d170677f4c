"""Operators that stand beside each other and that one of the `npu` library can do: the norm of a
sum with the cast or quantisation of its result; in captured graphs also a batched product with the
transposes around it.

A pattern leaves nodes alone that lie on different streams, or whose results others need.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from torchair.configs.options import NPUGRAPH_EX
from torchair.fx.passes import values
from torchair.fx.passes.streams import mark_streams, on_one_stream
from torchair.log import debug_print, logger
from torchair.passes import NO_CONTEXT, FxContext

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TURNS = (aten.transpose.int, aten.permute.default)
_HALF = (torch.float16, torch.bfloat16)
_LAID_OUT = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_STEP = 16  # what sizes of a product must be multiples of
_SWAPPED = [1, 0, 2]


def _op(name: str) -> Any:
    """An operator of the library, None where it is not defined."""
    packet = getattr(torch.ops.npu, name, None)
    return None if packet is None else packet.default


class _NodeResults:
    """The results of a node, as far as they are read one by one."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        users = list(node.users)
        self.whole = all(u.target is operator.getitem for u in users)
        self.by_place: dict[Any, fx.Node] = {}
        for user in users:
            self.whole = self.whole and user.args[1] not in self.by_place
            self.by_place[user.args[1] if len(user.args) > 1 else None] = user


def _only_user(node: fx.Node | None) -> fx.Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 else None


def _through_view(node: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None]:
    """A view of a value, if one follows, and what reads it."""
    if node is not None and node.target in _VIEWS:
        return node, _only_user(node)
    return None, node


def _before(graph: fx.Graph, node: fx.Node, others: Sequence[Any]) -> bool:
    """Whether other nodes are computed before a node."""
    return all(other < node for other in others if isinstance(other, fx.Node))


class _FusedNorm:
    """Puts one call in the place of a norm and what follows it."""

    def __init__(self, graph: fx.Graph, norm: fx.Node) -> None:
        self.graph, self.norm = graph, norm
        self.x1, self.x2, self.gamma = norm.args[:3]
        self.epsilon: Any = norm.args[3] if len(norm.args) > 3 else 1e-6
        self.epsilon = norm.kwargs.get("epsilon", self.epsilon)
        self.results = _NodeResults(norm)
        self.y = self.results.by_place.get(0)
        self.y_value = None if self.y is None else values.tensor_of(self.y)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.norm):
            return values.add_call(self.graph, op, args, kwargs, like=self.norm)

    def result(self, made: fx.Node, place: int, old: fx.Node | None, dims: Any = None) -> None:
        """Readers of an old value get a result of the new call, in other dims if there was a
        view. Symbolic dims may be computed between the norm and the old value."""
        if old is None:
            return
        with self.graph.inserting_after(made):
            new = values.add_call(self.graph, operator.getitem, (made, place), like=self.norm)
        if dims is not None:
            with self.graph.inserting_before(old):
                new = values.add_call(self.graph, aten.view.default, (new, dims), like=self.norm)
        old.replace_all_uses_with(new)

    def clean(self, *nodes: fx.Node | None) -> None:
        """Take out what nothing reads any more, the last one first."""
        for node in (*nodes, *self.results.by_place.values(), self.norm):
            if node is not None and not node.users:
                self.graph.erase_node(node)


def _cast_of(node: fx.Node) -> bool:
    """Whether a node is a cast to float32 and nothing else."""
    if node.target is aten._to_copy.default:
        return node.kwargs == {"dtype": torch.float32}
    return node.target is _op("_npu_dtype_cast") and node.args[1:] in (
        (torch.float32,),
        (6,),
    )


def _with_cast(join: _FusedNorm) -> bool:
    """npu_add_rms_norm, then a cast to float32 -> npu_add_rms_norm_cast"""
    op = _op("npu_add_rms_norm_cast")
    if op is None or join.y is None or join.y_value is None or join.y_value.dtype not in _HALF:
        return False
    for user in list(join.y.users):
        view, cast = _through_view(user)
        if cast is None or not _cast_of(cast) or not _alone(join.norm, view, cast):
            continue
        made = join.call(op, join.x1, join.x2, join.gamma, join.epsilon)
        dims = None if view is None else view.args[1]
        join.result(made, 0, cast, dims)
        join.clean(cast, view)
        for place, old in ((1, 0), (2, 1), (3, 2)):
            join.result(made, place, join.results.by_place.get(old))
        join.clean()
        return True
    return False


def _with_dynamic_quant(join: _FusedNorm) -> bool:
    """npu_add_rms_norm, then npu_dynamic_quant -> npu_add_rms_norm_dynamic_quant"""
    op = _op("npu_add_rms_norm_dynamic_quant")
    view, quant = _through_view(_only_user(join.y))
    if op is None or quant is None or quant.target is not _op("npu_dynamic_quant"):
        return False
    smooth = quant.kwargs.get("smooth_scales")
    others = {n: v for n, v in quant.kwargs.items() if n != "smooth_scales"}
    plain = others.get("quant_mode", "pertoken") == "pertoken" and not any(
        others.get(name) is not None for name in ("group_index", "dst_type", "dst_type_max")
    )
    results = _NodeResults(quant)
    if not plain or not results.whole or 1 in join.results.by_place:
        return False
    if not _before(join.graph, join.norm, [smooth]) or not _alone(join.norm, view, quant):
        return False
    made = join.call(
        op,
        join.x1,
        join.x2,
        join.gamma,
        smooth_scale1=smooth,
        epsilon=join.epsilon,
        output_mask=[True, False],
    )
    dims: Any = None if view is None else list(view.args[1])  # type: ignore[arg-type]
    join.result(made, 0, results.by_place.get(0), dims)
    join.result(made, 3, results.by_place.get(1), None if dims is None else dims[:-1])
    join.result(made, 2, join.results.by_place.get(2))
    join.clean(*results.by_place.values(), quant, view)
    return True


def _with_quant(join: _FusedNorm) -> bool:
    """npu_add_rms_norm, then npu_quantize -> npu_add_rms_norm_quant"""
    op = _op("npu_add_rms_norm_quant")
    quant = _only_user(join.y)
    if op is None or quant is None or quant.target is not _op("npu_quantize"):
        return False
    _, scales, zero, dtype, axis, divides = (*quant.args, *(1, True)[len(quant.args) - 4 :])[:6]
    dims = None if join.y_value is None else join.y_value.dim()
    shapes = [values.tensor_of(x) for x in (scales, join.gamma)]
    if any(x is None for x in shapes) or shapes[0].shape != shapes[1].shape:  # type: ignore[union-attr]
        return False
    if dtype not in (torch.qint8, torch.int8, 1, 12) or axis not in (-1, (dims or 0) - 1):
        return False
    if 1 in join.results.by_place or not _before(join.graph, join.norm, [scales, zero]):
        return False
    if quant.kwargs or not _alone(join.norm, quant):
        return False
    made = join.call(
        op, join.x1, join.x2, join.gamma, scales, zero, epsilon=join.epsilon, div_mode=divides
    )
    join.result(made, 0, quant)
    join.result(made, 2, join.results.by_place.get(2))
    join.clean(quant)
    return True


_EVERYWHERE = (_with_dynamic_quant, _with_cast)
_CAPTURED = (_with_quant,)
_TURNED_PRODUCT = "transpose_batchmatmul"


def _name(pattern: Callable[[_FusedNorm], bool]) -> str:
    return f"add_rms_norm{pattern.__name__}"


PATTERNS = (*map(_name, (*_EVERYWHERE, *_CAPTURED)), _TURNED_PRODUCT)
"""Names of all patterns."""


def _alone(*nodes: fx.Node | None) -> bool:
    """Whether all nodes are on one stream."""
    return on_one_stream(SimpleNamespace(nodes=[n for n in nodes if n is not None]))


# ---- batched products with swapped dims around them ----


def _swapped(node: Any) -> Any:
    """What a node exchanges the first two of three dims of; None if it does something else."""
    if not isinstance(node, fx.Node) or node.target not in _TURNS:
        return None
    if node.target is aten.permute.default:
        return node.args[0] if list(node.args[1]) == _SWAPPED else None  # type: ignore[arg-type]
    value = values.tensor_of(node)
    three = value is not None and value.dim() == len(_SWAPPED)
    return node.args[0] if three and {d % 3 for d in node.args[1:]} == {0, 1} else None  # type: ignore[operator]


def _layout_is_seen(node: fx.Node) -> bool:
    """Whether a result may have strides that follow from those of a node: all but products and
    contiguous copies may pass them on."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            dense = user.kwargs.get("memory_format") is torch.contiguous_format
            if user not in seen and user.target not in _LAID_OUT and not dense:
                seen.add(user)
                todo.append(user)
    return False


def _join_product(graph: fx.Graph, last: fx.Node) -> bool:
    """transpose(bmm(x or transpose(x), weight)) -> npu_transpose_batchmatmul, which lays its result
    out in another way: no other node may read it"""
    op, product = _op("npu_transpose_batchmatmul"), _swapped(last)
    if op is None or product is None or product.target is not aten.bmm.default:
        return False
    if _only_user(product) is not last or _layout_is_seen(last):
        return False
    first, weight = product.args
    inner = _swapped(first)
    found = values.tensor_of(weight)
    if (
        found is None
        or found.dtype not in (*_HALF, torch.float32)
        or not _alone(product, last, *([first] if inner is not None else []))
    ):
        return False
    if any(not isinstance(n, int) or n % _STEP for n in found.shape[1:]):
        logger.debug("K or N alignment check failed for npu_transpose_batchmatmul")
        return False
    source = first if inner is None else inner
    perm = [0, 1, 2] if inner is None else _SWAPPED
    with graph.inserting_before(last):
        made = values.add_call(
            graph, op, (source, weight), {"perm_x1": perm, "perm_y": _SWAPPED}, like=last
        )
    last.replace_all_uses_with(made)
    for node in (last, product, first if inner is not None else None):
        if node is not None and not node.users:
            graph.erase_node(node)
    return True


# ---- the pass ----

_Attempt = tuple[str, fx.Node, Callable[[], bool]]


def _with(pattern: Callable[[_FusedNorm], bool], graph: fx.Graph, norm: fx.Node) -> bool:
    return pattern(_FusedNorm(graph, norm))


def _attempts(graph: fx.Graph, captured: bool) -> list[_Attempt]:
    """Patterns by name, where each may end, and what tries it there."""
    norm, found = _op("npu_add_rms_norm"), list[_Attempt]()
    if norm is not None:
        for node in graph.find_nodes(op="call_function", target=norm):
            for pattern in (*_EVERYWHERE, *(_CAPTURED if captured else ())):
                attempt = partial(_with, pattern, graph, node)
                found.append((_name(pattern), node, attempt))
    if captured and graph.find_nodes(op="call_function", target=aten.bmm.default):
        for target in _TURNS:
            for node in graph.find_nodes(op="call_function", target=target):
                attempt = partial(_join_product, graph, node)
                found.append((_TURNED_PRODUCT, node, attempt))
    return found


def join_npu_operators(gm: fx.GraphModule, context: FxContext = NO_CONTEXT) -> None:
    """Put one operator in the place of several."""
    if _attempts(gm.graph, _is_captured(context)):
        _join(gm, context)


def _is_captured(context: FxContext) -> bool:
    mode = str(getattr(getattr(context.config, "mode", None), "value", None))
    return mode in ("reduce-overhead", NPUGRAPH_EX)


@values.cautious
def _join(gm: fx.GraphModule, context: FxContext = NO_CONTEXT) -> None:
    mark_streams(gm.graph)
    values.ensure_values(gm)
    gone = set[fx.Node]()
    for name, node, attempt in _attempts(gm.graph, _is_captured(context)):
        if node not in gone and attempt():
            gone.add(node)
            debug_print(3, f"torchair pattern {name} replaced {node.name}")
            logger.debug("pattern %s replaced %s", name, node.name)
