"""The generic node: any torch operator without a converter, called as torch would call it, and
operators that change their arguments, as torch makes them functional (`auto_functionalized_v2`).

`TorchCall` keeps the operator's name and its plain arguments as JSON, so it can be written to a
file and read back; targets that have no name (higher-order operators) live in `graph.objects`.

What is changed arrives as a list of bases, and an argument may be a view of one. A base is copied,
the view is taken from the copy, and the operator's update of it is put back into the copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torchair import ge
from torchair.convert.automatic import automatic_entry
from torchair.convert.control import value_of
from torchair.convert.operands import sizes
from torchair.convert.registry import Decline, Registration, builtin, find
from torchair.convert.results import hints, order_of
from torchair.ge.build import builder
from torchair.ge.graph import Fact, Node, TensorSpec, Value, get_default_ge_graph
from torchair.ge.shapes import contiguous_strides, from_torch
from torchair.log import logger
from torchair.torch_private.dispatch import HigherOrderOperator, OpOverload
from torchair.torch_private.higher_order import (
    AsStridedViewInfo,
    SliceViewInfo,
    auto_functionalized_v2,
    get_mutable_args,
    read_view_information_from_args,
)
from torchair.torch_private.pytree import tree_leaves


@dataclass(frozen=True)
class Scalar:
    """A value of the graph that the operator takes as a Python number (a symbolic size)."""

    value: Value


@dataclass(frozen=True)
class Opaque:
    """A value of the graph that is the handle of an object, which the operator takes."""

    value: Value


_NAMED = (torch.dtype, torch.memory_format, torch.layout)


Metas = Mapping[Value, torch.Tensor]
"""Values of the graph as tracing saw them."""


def torch_call(
    target: Any, args: Any, kwargs: Any, results: int, metas: Metas, exact: bool = False
) -> Node:
    """One generic node with the given number of outputs; tensors anywhere in the arguments, which
    it is to get in the layouts of `metas`, with `exact` also with their gaps."""
    graph = get_default_ge_graph()
    inputs: list[Value] = []
    text = _arguments(args, kwargs, inputs, metas, exact)
    outputs = builder("TorchCall")(inputs, target=_name(target), arguments=text, size_of_y=results)
    return outputs[0].node if outputs else graph.nodes[-1]


def torch_update(
    target: Any, args: Any, kwargs: Any, changed: Value, metas: Metas, fresh: bool
) -> Value:
    """The new value of the one tensor that an operator changes; it has no other results. What was
    in a `fresh` one is not defined."""
    inputs: list[Value] = [changed]
    text = _arguments(args, kwargs, inputs, metas)
    made: Value = builder("TorchUpdate")(
        changed, inputs[1:], target=_name(target), arguments=text, fresh=fresh
    )
    return made


def _arguments(
    args: Any, kwargs: Any, inputs: list[Value], metas: Metas, exact: bool = False
) -> str:
    """Arguments of a generic node as JSON; tensors among them are added to `inputs`."""
    encoded = {"args": _encode(list(args), inputs), "kwargs": _encode(dict(kwargs), inputs)}
    layout = _with_gaps if exact else _layout
    layouts = [layout(metas[v]) if v in metas else None for v in inputs]
    if any(n is None or n["dims"] or not n["dense"] for n in layouts):
        encoded["layouts"] = layouts
    return json.dumps(encoded)


def _layout(meta: torch.Tensor) -> dict[str, Any] | None:
    """The order of a tensor's dims in memory, by the sizes that it was traced with."""
    order = order_of(meta)
    if order is None:
        return None
    shape, strides = hints(meta)
    step, dense = 1, True
    for d in reversed(order):
        dense = dense and (shape[d] == 1 or strides[d] == step)
        step *= max(1, shape[d])
    plain = dense and all(
        shape[d] == 1 or strides[d] == wanted
        for d, wanted in enumerate(contiguous_strides(tuple(shape)))
    )
    return {"dims": [] if plain else order, "dense": dense}


def _with_gaps(meta: torch.Tensor) -> dict[str, Any] | None:
    """The same; a layout with gaps as its strides, since torch's kernels order sums by them.
    Strides that vary, or that let elements share memory, are left out."""
    layout, strides = _layout(meta), meta.stride()
    if layout is None or layout["dense"] or not all(type(s) is int for s in strides):
        return layout
    inner_extent = 0  # that all dims further inside need
    for d in reversed(layout["dims"]):
        if strides[d] <= inner_extent:
            return layout
        inner_extent += strides[d] * (meta.shape[d] - 1)
    return {**layout, "strides": list(strides)}


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return target.name()
    name = target.name() if isinstance(target, HigherOrderOperator) else ""
    if getattr(torch.ops.higher_order, name or "none", None) is target:
        return f"higher_order::{name}"
    objects = get_default_ge_graph().objects
    key = f"object:{len(objects)}:{target}"
    objects[key] = target
    return key


def _encode(x: Any, inputs: list[Value]) -> Any:
    if isinstance(x, (Value, Scalar, Opaque)):
        value = x if isinstance(x, Value) else x.value
        if value not in inputs:
            inputs.append(value)
        kind = {Scalar: "scalar", Opaque: "opaque"}.get(type(x), "tensor")
        return {kind: inputs.index(value)}
    if isinstance(x, (list, tuple)):
        members = [_encode(v, inputs) for v in x]
        return members if isinstance(x, list) else {"tuple": members}
    if isinstance(x, dict):
        return {"dict": [[k, _encode(v, inputs)] for k, v in x.items()]}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    if isinstance(x, _NAMED):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if isinstance(x, OpOverload):
        return {"op": x.name()}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    return _object(x)


def _object(x: Any) -> Any:
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Decline(f"symbolic value {x} is not a value of the graph")
    graph = get_default_ge_graph()
    key = f"object:{len(graph.objects)}:{type(x).__name__}"
    graph.objects[key] = x
    return {"object": key}


# ---- operators that change their arguments ----

aten = torch.ops.aten
FUNCTIONALIZED = auto_functionalized_v2


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor that the operator changes: its argument, the place in a list, the view it is."""

    name: str
    position: int | None
    info: Any
    view: Value
    reshaped: bool  # the view is the whole base with other dims


AddOperator = Callable[["UpdatingCall"], tuple[list[Any], list[Value]]]
"""Adds the operator itself: its results, and the new value of each changed tensor."""


@builtin(FUNCTIONALIZED)
def functionalized(op: Any, *, meta_outputs: Any, meta_keywords: Any, **kwargs: Any) -> list[Any]:
    """auto_functionalized_v2(op, **arguments, _all_bases) -> (*results, *bases)"""
    entry = find(op) or automatic_entry(op)
    if entry is None:
        raise Decline(f"{op} has no converter")
    update = UpdatingCall(op, kwargs, meta_keywords)
    specs = meta_outputs[: len(meta_outputs) - len(update.bases)]
    return update.run(lambda u: _by_converter(u, entry, specs))


def generic_update(
    op: Any, kwargs: dict[str, Any], traced: Mapping[str, Any], metas: Metas, fresh: bool
) -> list[Any]:
    """The same for an operator without a converter: torch makes the copies itself. `fresh` says
    that what was in the bases is not defined."""
    made = UpdatingCall(op, dict(kwargs), traced, copy=False)
    return made.run(lambda update: _by_torch(update, metas, fresh))


class UpdatingCall:
    """One call of an operator that changes some of its arguments."""

    def __init__(
        self, op: Any, kwargs: dict[str, Any], traced: Mapping[str, Any], copy: bool = True
    ) -> None:
        """`traced` are the same arguments as tracing saw them."""
        if not isinstance(op, OpOverload):
            raise Decline(f"{op} is a higher-order operator")
        names, types = get_mutable_args(op)
        if any(f"_{name}_dtype" in kwargs for name in names):
            raise Decline(f"{op} only writes to its arguments")
        self.op = op
        self.metas: Sequence[torch.Tensor] = traced["_all_bases"]
        self.bases: list[Value] = kwargs.pop("_all_bases")
        seen = read_view_information_from_args(names, types, dict(traced), self.metas)
        infos = read_view_information_from_args(names, types, kwargs, self.bases)
        self.arguments = {**kwargs, **dict.fromkeys(names)}
        self.copies = [ge.Clone(b) for b in self.bases] if copy else list(self.bases)
        self.changed: list[ChangedTensor] = []
        for name, info in infos.items():
            self._take_views(name, info, seen[name])

    def _take_views(self, name: str, info: Any, seen: Any) -> None:
        """The arguments that are changed, out of the copies."""
        if info is None:
            return
        several = isinstance(info, list)
        pairs = zip(info, seen, strict=True) if several else [(info, seen)]
        members = [
            None if i is None else self._changed(name, k if several else None, i, s)
            for k, (i, s) in enumerate(pairs)
        ]
        self.changed += [m for m in members if m is not None]
        values = [None if m is None else m.view for m in members]
        self.arguments[name] = values if several else values[0]

    def _changed(self, name: str, position: int | None, info: Any, seen: Any) -> ChangedTensor:
        if _is_reshaped(seen, self.metas[info.base_index]):
            view: Value = ge.Reshape(self.copies[info.base_index], info.size)
            return ChangedTensor(name, position, info, view, True)
        return ChangedTensor(name, position, info, self._view(info), False)

    def _view(self, info: Any) -> Value:
        base, meta = self.copies[info.base_index], self.metas[info.base_index]
        if isinstance(info, SliceViewInfo):
            return _call(aten.slice.Tensor, base, info.dim, info.start, info.end)
        if isinstance(info, AsStridedViewInfo):
            layout = (info.size, info.stride, info.storage_offset)
            return _call(aten.as_strided.default, base, *layout, metas=[meta])
        return base

    def run(self, inner: AddOperator) -> list[Any]:
        """Results of the operator, or None for an operator without any, then the new bases."""
        results, news = inner(self)
        for changed, new in zip(self.changed, news, strict=True):
            new.learn(Fact(changed.view.dtype, changed.view.shape))
            index = changed.info.base_index
            self.copies[index] = self._put_back(changed, new)
        if any(r.alias_info is not None for r in self.op._schema.returns):
            results = [news[0]]  # what an in-place operator returns is its argument
        return [*(results or [None]), *self.copies]

    def _put_back(self, changed: ChangedTensor, new: Value) -> Value:
        info = changed.info
        base, meta = self.copies[info.base_index], self.metas[info.base_index]
        if changed.reshaped:
            whole: Value = ge.Reshape(new, sizes([value_of(from_torch(d)) for d in meta.shape]))
            return whole
        if isinstance(info, SliceViewInfo):
            bounds = (info.dim, info.start, info.end)
            return _call(aten.slice_scatter.default, base, new, *bounds)
        if not isinstance(info, AsStridedViewInfo):
            return new
        if not meta.is_contiguous():
            raise Decline("a view of a tensor that is not contiguous is changed")
        own = sizes([value_of(d) for d in contiguous_strides(new.shape or ())])
        offset = sizes([info.storage_offset])
        copied = ge.ViewCopy(base, info.size, info.stride, offset, new, info.size, own, [0])
        assert isinstance(copied, Value)
        return copied


def _is_reshaped(info: Any, base: torch.Tensor) -> bool:
    """Whether a view is the whole base, row after row, with other dims."""
    if not isinstance(info, AsStridedViewInfo) or not base.is_contiguous():
        return False
    dims, strides = ([from_torch(d) for d in numbers] for numbers in (info.size, info.stride))
    same = prod(dims) == prod(from_torch(d) for d in base.shape)
    return same and info.storage_offset == 0 and contiguous_strides(tuple(dims)) == tuple(strides)


def _call(target: Any, *args: Any, metas: Any = None) -> Value:
    """What the converter of a torch operator makes of these arguments."""
    entry = find(target)
    assert entry is not None
    kwargs: dict[str, Any] = {"meta_inputs": metas} if "meta_inputs" in entry.wants else {}
    if "meta_outputs" in entry.wants:
        kwargs["meta_outputs"] = TensorSpec(args[0].dtype, None)
    value: Value = entry.fn(*args, **kwargs)
    return value


# ---- the operator itself ----


def _only_updates(update: UpdatingCall) -> bool:
    """Whether all that an operator does is to change one tensor, which nothing else reads."""
    if len(update.changed) != 1 or update.changed[0].position is not None:
        return False
    others = [v for name, v in update.arguments.items() if name != update.changed[0].name]
    read = any(leaf is update.changed[0].view for leaf in tree_leaves(others))
    return not read and all(r.alias_info is not None for r in update.op._schema.returns)


def _in_schema_order(update: UpdatingCall) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the operator by position, and by name those that are."""
    args, kwargs = [], {}
    for a in update.op._schema.arguments:
        if a.kwarg_only:
            kwargs[a.name] = update.arguments[a.name]
        else:
            args.append(update.arguments[a.name])
    return args, kwargs


def _by_converter(
    update: UpdatingCall, entry: Registration, specs: list[TensorSpec]
) -> tuple[list[Any], list[Value]]:
    graph = get_default_ge_graph()
    args, kwargs = _in_schema_order(update)
    if "meta_outputs" in entry.wants:
        known = [s for s in specs if s is not None]
        kwargs["meta_outputs"] = known[0] if len(known) == 1 else known
    before = len(graph)
    out = entry.fn(*args, **kwargs)
    made = set(graph.newest(len(graph) - before))
    news = [_updated(update, c, made) for c in update.changed]
    if isinstance(out, (list, tuple)):
        return list(out), news
    return [] if out is None else [out], news


def _updated(update: UpdatingCall, changed: ChangedTensor, made: set[Any]) -> Value:
    """The output that is the new value of an input: it has the same name. A converter may let
    several operators update it, one after the other."""
    latest = changed.view
    while (following := _following(latest, made)) is not None:
        latest = following
    if latest is not changed.view:
        return latest
    reason = f"{update.op}: its GE operator has no output named like the input for {changed.name!r}"
    logger.warning("%s, so torch's kernel is used", reason)
    raise Decline(reason)


def _following(value: Value, made: set[Any]) -> Value | None:
    for node, port, position in value.uses:
        name = port if position is None else f"{port}{position}"
        if node in made:
            for output in node.outputs:
                if output.port == name:
                    return output
    return None


def _by_torch(update: UpdatingCall, metas: Metas, fresh: bool) -> tuple[list[Any], list[Value]]:
    if _only_updates(update):
        args, kwargs = _in_schema_order(update)
        view = update.changed[0].view
        return [], [torch_update(update.op, args, kwargs, view, metas, fresh)]
    names, _ = get_mutable_args(update.op)
    kwargs = {k: v for k, v in update.arguments.items() if k not in names}
    for name in names:
        given = update.arguments[name]
        if isinstance(given, list):
            kwargs[f"_{name}_length"] = len(given)
            for k, value in enumerate(given):
                kwargs[f"_{name}_{k}_base_index"] = None if value is None else 0
        else:
            kwargs[f"_{name}_base_index"] = None if given is None else 0
    for index, c in enumerate(update.changed):
        place = c.name if c.position is None else f"{c.name}_{c.position}"
        kwargs[f"_{place}_base_index"] = index
    kwargs["_all_bases"] = [c.view for c in update.changed]
    returns = len(update.op._schema.returns)
    count = max(1, returns) + len(update.changed)
    node = torch_call(FUNCTIONALIZED, (update.op,), kwargs, count, metas)
    split = len(node.outputs) - len(update.changed)
    return node.outputs[:split] if returns else [], node.outputs[split:]
