"""Functional calls -> calls that overwrite an argument whose old content is not needed any more.

One analysis serves both passes. The value of a node may take the memory of an argument if nothing
reads that memory later; or if the graph itself copies the value there later, in which case nothing
may read it up to that copy, and the copy goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx

from torchair.fx.forms import VIEW_OF_SCATTER, in_place_form
from torchair.fx.passes import values
from torchair.fx.passes.memory import StoragePlace, Storages, is_bent, place_of
from torchair.fx.passes.streams import IssueOrder
from torchair.log import logger
from torchair.torch_private.dispatch import OpOverload

aten = torch.ops.aten
_COPY = aten.copy_.default


# Sentences of the original, which scripts look for.
_CHECKED = "[multi_stream_single_reinplace]Current node: %s, type: %s check no multi stream users "
_ONE_STREAM = _CHECKED + (
    "success for reinplace. The users of the mutated input node did not have multiple streams."
)
_SEVERAL_STREAMS = _CHECKED + (
    "failed for reinplace. The users of the mutated input node have multiple streams. All the "
    "users are %s."
)


class Reinplacer:
    """Rewrites the nodes of one graph. `inputs` and `others` say whether memory of the graph's
    inputs and of computed values may be overwritten; `by_events`, whether a value that several
    streams use may be if events order them."""

    def __init__(self, graph: fx.Graph, *, inputs: bool, others: bool, by_events: bool) -> None:
        self.graph = graph
        self.memory = Storages(graph)
        self.order = IssueOrder.of(graph)
        self._inputs, self._others, self._by_events = inputs, others, by_events
        self._gone: set[fx.Node] = set()

    # ---- rewriting

    def run(self, also: Callable[[Reinplacer, fx.Node], None]) -> None:
        """Try all nodes, the last one first: what a value is copied into in the end is known when
        the nodes come that compute it. `also` tries what is no plain operator."""
        for node in reversed(list(self.graph.nodes)):
            if node in self._gone or node.op != "call_function":
                continue
            if node.target in VIEW_OF_SCATTER:
                self._attempt(self._scatter, node)
            elif isinstance(node.target, OpOverload) and in_place_form(node.target):
                self._attempt(self._operator, node)
            else:
                self._attempt(partial(also, self), node)

    def _attempt(self, rewrite: Callable[[fx.Node], None], node: fx.Node) -> None:
        try:
            rewrite(node)
        except values.NotApplicable as reason:
            logger.debug("reinplace failed: %s is not computed in place: %s", node, reason)

    def _operator(self, node: fx.Node) -> None:
        """`foo(a, ...)` -> `foo_(a, ...)`"""
        into = node.args[0] if node.args else None
        self.take(self.check(node, into, node), into, node)
        node.target = in_place_form(node.target)  # type: ignore[assignment]

    def _scatter(self, node: fx.Node) -> None:
        """`scatter(base, src, ...)` -> `copy_(view(base, ...), src)`"""
        if "src" in node.kwargs:
            raise values.NotApplicable("its source is not in its place")
        base, source, *where = node.args
        self.take(self.check(node, base, node), base, node)
        with self.graph.inserting_before(node):
            view = values.add_call(
                self.graph, VIEW_OF_SCATTER[node.target], (base, *where), node.kwargs, like=node
            )
            value = view.meta["val"]
            copy = values.add_call(self.graph, _COPY, (view, source), like=node, value=value)
        for made in (view, copy):
            self.memory.learn(made)
            self.order.place(made, node)
        self.replace(node, base)

    def take(self, copies: Iterable[fx.Node], into: Any, result: fx.Node | None) -> None:
        """The result is in the memory of `into` from now on, and copies of it to there go."""
        if result is not None:
            self.memory.move(result, into)
        for copy in copies:
            target = copy.args[0]
            self.replace(copy, target)
            self._drop_views(target)

    def replace(self, node: fx.Node, by: Any) -> None:
        """Take a node out of the graph."""
        node.replace_all_uses_with(by)
        self._drop(node)

    def _drop(self, node: fx.Node) -> None:
        self.memory.forget(node)
        self.graph.erase_node(node)
        self._gone.add(node)

    def _drop_views(self, node: Any) -> None:
        while isinstance(node, fx.Node) and not node.users and values.reads_nothing(node):
            base = node.args[0]
            self._drop(node)
            node = base

    # ---- the rules

    def check(
        self, node: fx.Node, into: Any, result: fx.Node | None, *, anywhere: bool = False
    ) -> list[fx.Node]:
        """The copies that go if `node` computes `result` in the memory of `into`; No if it cannot.
        `anywhere` allows inputs and computed values alike."""
        old = values.tensor_of(into)
        if old is None or old.layout != torch.strided or is_bent(old):
            raise values.NotApplicable("there is no tensor to overwrite")
        storage, place = values.storage_of(old), place_of(old)
        self._check_owner(storage, anywhere)
        if place.overlaps_itself():
            raise values.NotApplicable(f"elements of {into} share memory")
        if sum(storage in self.memory.of(a) for a in values.arguments_of(node)) > 1:
            raise values.NotApplicable(f"{into} and another argument share memory")
        new = self._check_result(node, old, result)
        copies = self._own_copies(node, old, result)
        if storage not in self.memory.inputs:
            _check_views([into, *(a for copy in copies for a in copy.args[:2])] if copies else [])
        areas = {c: place_of(c.args[0].meta["val"]).area for c in copies}  # type: ignore[union-attr]
        cover = min((c for c in copies if areas[c] == place.area), default=None)
        if cover is None and storage in self.memory.inputs:
            raise values.NotApplicable(f"{into} is an input of the graph and keeps its content")
        users = [] if new is None else [u for u, _ in self.memory.uses(new) if u not in copies]
        last = max(users, default=None)
        for user, by in self.memory.uses(storage):
            if user > node and user not in copies and not _is_apart(user, by, place, old.dtype):
                self._check_use(user, by, cover, last)
        if new is not None:
            self._check_new_memory(new, storage, old, cover, copies)
        self._check_streams(node, storage, copies)
        return copies

    def _check_owner(self, storage: int, anywhere: bool) -> None:
        if storage in self.memory.constants:
            raise values.NotApplicable("it would write to a constant")
        allowed = self._inputs if storage in self.memory.inputs else self._others
        if not allowed and not anywhere:
            raise values.NotApplicable("this pass does not write to such memory")

    def _check_result(self, node: fx.Node, old: torch.Tensor, result: fx.Node | None) -> int | None:
        """The storage of the result: memory of its own, laid out like what it shall overwrite."""
        if result is None:
            return None
        new = values.tensor_of(result)
        if new is None or new.dtype != old.dtype or new.device != old.device:
            raise values.NotApplicable("the result has another type or device")
        if values.dims(new.shape) != values.dims(old.shape):
            raise values.NotApplicable("the result has another shape")
        if any(values.storage_of(new) in self.memory.of(a) for a in values.arguments_of(node)):
            raise values.NotApplicable("the result is a view already")
        only_copied = all(_copies(user, result) for user in result.users)
        if values.dims(new.stride()) != values.dims(old.stride()) and not only_copied:
            raise values.NotApplicable("the result has other strides")
        if not self.memory.is_plain(values.storage_of(new)):
            raise values.NotApplicable("the result is seen as something else")
        return values.storage_of(new)

    def _own_copies(
        self, node: fx.Node, old: torch.Tensor, result: fx.Node | None
    ) -> list[fx.Node]:
        """Copies of the result, or of a part of it, to where it would be then anyway."""
        if result is None:
            return []
        new, found = result.meta["val"], []
        at, start = place_of(old), place_of(new)
        for member in self.memory.members(values.storage_of(new)):
            value = values.tensor_of(member)
            for user in member.users:
                if value is None or not _copies(user, member):
                    continue
                place = at if member is result else _shifted(place_of(value), start, at)
                target = values.tensor_of(user.args[0])
                if target is not None and _is_at(target, place, old):
                    found.append(user)
        return sorted(found)

    def _check_use(
        self, user: fx.Node, by: fx.Node, cover: fx.Node | None, last: fx.Node | None
    ) -> None:
        """A later use of the memory: it must come when the new value is there in either case, and
        must not change the new value while that is in use."""
        if cover is None or user < cover:
            raise values.NotApplicable(f"{user} needs the old content")
        if last is not None and user < last and by in values.written_by(user):
            raise values.NotApplicable(f"{user} writes to the same memory before {last} reads it")

    def _check_new_memory(
        self,
        new: int,
        storage: int,
        old: torch.Tensor,
        cover: fx.Node | None,
        copies: list[fx.Node],
    ) -> None:
        """What the new value was apart from: results of the graph, and writes after its copy."""
        memory = self.memory
        if memory.is_returned(new):
            if storage in memory.inputs or memory.is_returned(storage):
                raise values.NotApplicable("results of the graph would share memory")
            if not memory.fills_its_storage(old):
                raise values.NotApplicable(
                    "a result of the graph would be a part of something larger"
                )
        if cover is None:
            return
        for user, by in memory.uses(new):
            if user > cover and user not in copies and by in values.written_by(user):
                raise values.NotApplicable(f"{user} changes the value after it was copied")

    def _check_streams(self, node: fx.Node, storage: int, copies: Iterable[fx.Node]) -> None:
        users = {user for user, _ in self.memory.uses(storage)} - {node, *copies}
        if len({self.order.stream(user) for user in users | {node}}) == 1:
            logger.debug(_ONE_STREAM, node.name, node.target)
            return
        problem = None if self._by_events else "several streams use it"
        for user in users if self._by_events else ():
            ordered = (user, node) if user < node else (node, user)
            if not self.order.before(*ordered):
                problem = f"{user} is on another stream and may run at the same time"
        if problem is not None:
            logger.debug(_SEVERAL_STREAMS, node.name, node.target, sorted(map(str, users)))
            raise values.NotApplicable(problem)


def _copies(user: fx.Node, node: fx.Node) -> bool:
    return user.target is _COPY and user.args[1] is node and user.args[0] is not node


def _check_views(nodes: Iterable[Any]) -> None:
    """A `reshape` of a computed value may turn out to be a copy: whether it can be a view depends
    on strides, and tracing has been wrong about those."""
    for node in nodes:
        while isinstance(node, fx.Node) and values.reads_nothing(node):
            if node.target is aten.reshape.default:
                raise values.NotApplicable(f"{node} may have memory of its own")
            node = node.args[0]


def _is_apart(user: fx.Node, by: fx.Node, place: StoragePlace, dtype: torch.dtype) -> bool:
    """Whether a call is known to leave a place in the storage of its argument alone."""
    value = values.tensor_of(by)
    if value is None or value.dtype.itemsize != dtype.itemsize:
        return False  # places are counted in elements
    return "as_strided" not in str(user.target) and place_of(value).apart(place)


def _shifted(place: StoragePlace, start: StoragePlace, to: StoragePlace) -> StoragePlace:
    return StoragePlace(place.shape, place.strides, place.offset - start.offset + to.offset)


def _is_at(tensor: torch.Tensor, place: StoragePlace, like: torch.Tensor) -> bool:
    if values.storage_of(tensor) != values.storage_of(like) or tensor.dtype != like.dtype:
        return False
    return not is_bent(tensor) and place_of(tensor).same(place)
