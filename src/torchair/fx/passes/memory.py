"""Which nodes of a graph share memory, by the storages of fake results, and the forms of operators
that write into memory they are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from torchair.fx.passes.values import dims, reads_nothing, storage_of, tensor_of, tensors_of
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
        for tensor in tensors_of(node.meta.get("val")):
            self._seen.append(tensor)
            self._members.setdefault(storage_of(tensor), {})[node] = None

    def forget(self, node: fx.Node) -> None:
        """The node is about to leave the graph, or to get another value."""
        for storage in self.of(node):
            self._members[storage].pop(node, None)

    def of(self, node: fx.Node) -> set[int]:
        """The storages of the value of a node."""
        return {storage_of(t) for t in tensors_of(node.meta.get("val"))}

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
        values = [t for n in nodes for t in tensors_of(n.meta["val"]) if storage_of(t) == storage]
        counts = any("as_strided" in str(n.target) for n in nodes if n.op == "call_function")
        bent = any(is_bent(t) for t in values)
        return not counts and not bent and len({t.dtype for t in values}) == 1

    def fills_its_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all there is in its storage."""
        offset, steps = place_of(tensor).area
        if offset != 0 or len(steps) > 1 or any(stride != 1 for _, stride in steps):
            return False
        room, needed = dims(
            [tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()]
        )
        return room == needed

    def move(self, node: fx.Node, into: fx.Node) -> None:
        """The value of a node is from now on in the memory of another one, and so are all values
        that share its memory. Both have the same shape and type."""
        old, new = tensor_of(node), tensor_of(into)
        assert old is not None and new is not None
        storage = storage_of(old)
        for member in self.members(storage):
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


# ---- forms of operators: in place, and `out=`


aten = torch.ops.aten
Operator = torch._ops.OpOverload

VIEW_OF_SCATTER: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""`scatter(base, src, ...)` is a copy of `base` in which `view(base, ...)` is `src`."""

_NOT_AT_ONCE = ("_c10d_functional",)  # starts its work and returns: others must not be in between


@cache
def in_place_form(op: Operator) -> Operator | None:
    """`foo_` for `foo`, if it takes the same arguments and gives the first one back."""
    schema = op._schema
    if op.namespace in _NOT_AT_ONCE or schema.is_mutable or len(schema.returns) != 1:
        return None
    if not schema.arguments or schema.arguments[0].alias_info is not None:
        return None  # nothing to write to, or a view
    packet = getattr(getattr(torch.ops, op.namespace), f"{op._opname}_", None)
    if packet is None:
        return None
    forms = [getattr(packet, name) for name in packet.overloads()]
    fitting = [form for form in forms if _is_in_place_form(schema, form._schema)]
    return fitting[0] if len(fitting) == 1 else None


def _is_in_place_form(plain: Any, form: Any) -> bool:
    if _signature(plain.arguments) != _signature(form.arguments) or len(form.returns) != 1:
        return False
    first, *rest = (a.alias_info for a in form.arguments)
    back = form.returns[0].alias_info
    writes = first is not None and first.is_write and all(a is None for a in rest)
    return writes and back is not None and back.is_write


def _signature(arguments: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments]


@dataclass(frozen=True)
class OutForm:
    """An overload that writes its result into an argument."""

    op: Operator
    argument: str


@cache
def out_form(op: Operator, device: str) -> OutForm | None:
    """The overload of an operator that differs only in writing into a tensor it is given, if it
    has a kernel for a kind of device."""
    schema = op._schema
    if schema.is_mutable or len(schema.returns) != 1:
        return None
    for name in op.overloadpacket.overloads():
        form = getattr(op.overloadpacket, name)
        given = [a for a in form._schema.arguments if a.is_out]
        others = [a for a in form._schema.arguments if not a.is_out]
        if len(given) != 1 or _signature(others) != _signature(schema.arguments):
            continue
        if _runs_on(form, device):
            return OutForm(form, given[0].name)
    return None


def _runs_on(op: Operator, device: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device, "PrivateUse1")
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key)


@dataclass(frozen=True)
class ManyInPlace:
    """An operator that updates several arguments; its functional twin gives the new values as its
    last results, in the order of the arguments."""

    op: Operator
    written: tuple[int, ...]
    first_new: int  # the first result of the twin that is a new value


MANY_IN_PLACE = {
    ("npu", "npu_kv_rmsnorm_rope_cache_v2"): (5, 6),
    ("npu", "npu_mla_prolog_v3"): (9, 10),
    ("npu", "npu_add_rms_norm_v2"): (0, 1),
}
"""Library and name of such operators, and the arguments that they update."""


def many_in_place_forms() -> dict[Any, ManyInPlace]:
    """Functional twin: the operator that updates in place, for those that are installed."""
    found = {}
    for (library, name), written in MANY_IN_PLACE.items():
        plain = getattr(getattr(torch.ops, library), f"{name}_functional", None)
        form = getattr(getattr(torch.ops, library), name, None)
        if plain is None or form is None:
            continue
        results, own = len(plain.default._schema.returns), len(form.default._schema.returns)
        if results == own + len(written):
            found[plain.default] = ManyInPlace(form.default, written, own)
    return found
