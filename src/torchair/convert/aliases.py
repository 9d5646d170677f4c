"""Whose memory a tensor of an FX graph is in: views of arguments, and arguments that stand for the
memory of several."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

aten = torch.ops.aten
_READS = (aten.as_strided.default, aten.as_strided_scatter.default)


def storage_key(meta: torch.Tensor) -> int:
    """A number for the memory of a traced tensor."""
    return meta.untyped_storage()._cdata


def order_of(meta: torch.Tensor) -> list[int] | None:
    """Dims of a traced tensor from the outermost one in memory to the innermost, by the sizes it
    was traced with; None where only the data tell those."""
    shape, strides = ([hint(d) for d in sizes] for sizes in (meta.shape, meta.stride()))
    if None in shape or None in strides:
        return None
    return sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1))


def hint(size: Any) -> Any:
    """A size as it was when it was traced, None if only the data tell."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


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
    for the numbers of Python among its arguments, and their results have other memory."""
    mended: set[fx.Node] = set()
    for node in gm.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and source in mended:
            node.meta["val"] = source.meta["val"][node.args[1]]
        elif _is_view(node.target) and _is_elsewhere(node, source):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with source.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            mended.add(node)


def _is_elsewhere(node: fx.Node, source: Any) -> bool:
    """Whether a view was traced in other memory than its source."""
    base = source.meta.get("val") if isinstance(source, fx.Node) else None
    view = node.meta.get("val")
    if isinstance(view, (list, tuple)):
        view = view[0] if view else None
    if not isinstance(base, FakeTensor) or not isinstance(view, FakeTensor):
        return False
    return storage_key(base) != storage_key(view)


def _is_view(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    kinds = [r.alias_info for r in returns]
    return len(kinds) == 1 and kinds[0] is not None and not kinds[0].is_write


def bases(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Arguments that are read and written by their memory alone, and nodes that are such an
    argument updated, each with the argument. AOTAutograd makes them where arguments share memory
    and are updated; nobody guards their dims."""
    found: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _is_plain(node):
            owner: Any = node
        elif node.target is aten.as_strided_scatter.default:
            owner = found.get(node.args[0])
        else:
            owner = None
        if owner is not None:
            found[node] = owner
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
