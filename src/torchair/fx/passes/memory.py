"""Which nodes of a graph share memory, by the storages of fake results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchair.fx.forms import tensors_in
from torchair.fx.passes.values import dims, reads_nothing, storage_of, tensor_of
from torchair.ge.shapes import Dim, contiguous_strides


@dataclass(frozen=True)
class StoragePlace:
    """Where the elements of a tensor are in its storage."""

    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim

    @property
    def steps(self) -> tuple[tuple[Dim, Dim], ...]:
        """Sizes and strides that matter: those of dims with more than one element."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple((size, stride) for size, stride in pairs if size != 1)

    @property
    def area(self) -> tuple[Dim, tuple[tuple[Dim, Dim], ...]]:
        """The set of elements, whatever their order: dims by stride, joined where they can be."""
        steps: list[Any] = list(self.steps)
        if all(isinstance(d, int) for step in steps for d in step):
            steps.sort(key=lambda step: -step[1])
        joined: list[tuple[Dim, Dim]] = []
        for size, stride in steps:
            if joined and joined[-1][1] == size * stride:
                size, stride = joined.pop()[0] * size, stride
            joined.append((size, stride))
        return self.offset, tuple(joined)

    def same(self, other: StoragePlace) -> bool:
        """Whether two tensors of one storage are the same elements in the same order."""
        return (self.shape, self.steps, self.offset) == (other.shape, other.steps, other.offset)

    def apart(self, other: StoragePlace) -> bool:
        """Whether two tensors of one storage are known to have no element in common."""
        mine, others = self._extent(), other._extent()
        if mine is None or others is None:
            return False
        return mine[1] <= others[0] or others[1] <= mine[0]

    def overlaps_itself(self) -> bool:
        """Whether several elements may be in one place."""
        if any(stride == 0 for _, stride in self.steps):
            return True
        if not all(isinstance(d, int) for step in self.steps for d in step):
            return self.strides != contiguous_strides(self.shape)
        steps: Any = self.steps
        needed = 1
        for size, stride in sorted(steps, key=lambda step: step[1]):
            if stride < needed:
                return True
            needed += (size - 1) * stride
        return False

    def _extent(self) -> tuple[int, int] | None:
        numbers: Any = (*self.shape, *self.strides, self.offset)
        if not all(isinstance(d, int) for d in numbers):
            return None
        first: Any = self.offset
        if 0 in self.shape:
            return first, first
        pairs: Any = zip(self.shape, self.strides, strict=True)
        return first, first + 1 + sum((size - 1) * stride for size, stride in pairs)


def place_of(tensor: torch.Tensor) -> StoragePlace:
    """Where a fake tensor is in its storage."""
    (offset,) = dims([tensor.storage_offset()])
    return StoragePlace(dims(tensor.shape), dims(tensor.stride()), offset)


def is_bent(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows its memory with another sign: such a view is no plain one."""
    return tensor.is_conj() or tensor.is_neg()


class Storages:
    """The storages of a graph and the nodes whose values are in each."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._members: dict[int, dict[fx.Node, None]] = {}
        self._seen: list[torch.Tensor] = []  # alive, so that no other storage gets their identity
        self.inputs: set[int] = set()
        self.constants: set[int] = set()
        for node in graph.nodes:
            self.learn(node)
            if node.op in ("placeholder", "get_attr"):
                known = self.inputs if node.op == "placeholder" else self.constants
                known.update(self.of(node))

    def learn(self, node: fx.Node) -> None:
        """Take note of the value of a node."""
        for tensor in tensors_in(node.meta.get("val")):
            self._seen.append(tensor)
            self._members.setdefault(storage_of(tensor), {})[node] = None

    def forget(self, node: fx.Node) -> None:
        """The node is about to leave the graph, or to get another value."""
        for storage in self.of(node):
            self._members[storage].pop(node, None)

    def of(self, node: fx.Node) -> set[int]:
        """The storages of the value of a node."""
        return {storage_of(t) for t in tensors_in(node.meta.get("val"))}

    def members(self, storage: int) -> list[fx.Node]:
        """The nodes whose value is in a storage."""
        return list(self._members.get(storage, ()))

    def uses(self, storage: int) -> Iterator[tuple[fx.Node, fx.Node]]:
        """All pairs of a node that touches what a storage holds and the argument it does it by."""
        for member in self.members(storage):
            for user in member.users:
                if not reads_nothing(user):
                    yield user, member

    def is_returned(self, storage: int) -> bool:
        """Whether a result of the graph is in a storage."""
        results = set(self._graph.output_node().all_input_nodes)
        return not results.isdisjoint(self._members.get(storage, ()))

    def is_plain(self, storage: int) -> bool:
        """Whether all values in a storage show it as it is, in one type, and are made by counting
        from the start of other tensors and not of the storage."""
        nodes = self.members(storage)
        values = [t for n in nodes for t in tensors_in(n.meta["val"]) if storage_of(t) == storage]
        counts = any("as_strided" in str(n.target) for n in nodes if n.op == "call_function")
        bent = any(is_bent(t) for t in values)
        return not counts and not bent and len({t.dtype for t in values}) == 1

    def fills_its_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all there is in its storage."""
        offset, steps = place_of(tensor).area
        if offset != 0 or len(steps) > 1 or any(stride != 1 for _, stride in steps):
            return False
        capacity, needed = dims(
            [tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()]
        )
        return capacity == needed

    def move(self, node: fx.Node, into: fx.Node) -> None:
        """The value of a node is from now on in the memory of another one, and so are all values
        that share its memory. Both have the same shape and type."""
        old, new = tensor_of(node), tensor_of(into)
        assert old is not None and new is not None
        for member in self.members(storage_of(old)):
            moved = _moved(member.meta["val"], old, new)
            self.forget(member)
            member.meta["val"] = moved
            self.learn(member)


def _moved(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """A value that is in the memory of `old`, in that of `new`."""
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(member, old, new) for member in value)
    if not isinstance(value, torch.Tensor) or storage_of(value) != storage_of(old):
        return value
    if place_of(value) == place_of(old):
        return new
    offset = value.storage_offset() - old.storage_offset() + new.storage_offset()
    with new.fake_mode:  # type: ignore[attr-defined]
        return torch.as_strided(new, value.shape, value.stride(), offset)
