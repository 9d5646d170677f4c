"""Lists of numbers that operators take from the host, such as sequence lengths, and that replays of
one captured graph read anew. So such numbers need not tell captured graphs apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from torchair.errors import CaptureError
from torchair.fx.source import fx_text, origin_of
from torchair.torch_private import pytree
from torchair.torch_private.dispatch import OpOverload, TorchDispatchMode

ListElement = tuple[Literal["index", "fixed"], int]
ListRule = tuple[ListElement, ...]
"""How to make a list for a call, one entry for each element: `("index", argument)` is the argument
at that position, `("fixed", number)` a constant."""


@dataclass(frozen=True)
class Updatable:
    """An operator with parameters that replays update: lists of integers."""

    parameters: tuple[str, ...]
    capture: Callable[..., Any] | None = None  # the same with device tensors in place of the lists


_ATTENTION = {
    "npu.npu_fused_infer_attention_score": (
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "actual_shared_prefix_len",
    ),
    "npu.npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
UPDATABLE: dict[str, Updatable] = {
    f"{name}.{form}": Updatable(lists)
    for name, lists in _ATTENTION.items()
    for form in ("default", "out")
} | {
    "atb._npu_paged_attention.default": Updatable(("context_lens",)),
    "atb._npu_paged_attention_splitfuse.default": Updatable(("context_lens", "seq_len")),
}
"""Operators by name. Those that the environment does not have occur in no graph."""


def register_updatable(
    op: OpOverload, parameters: Sequence[str], capture: Callable[..., Any] | None = None
) -> None:
    """Let replays update lists of integers that `op` takes.

    On the CPU each replay calls `op` with fresh lists. A device records what kernels read from its
    memory, so there `capture` is called instead: it takes the arguments of `op` by name, with an
    int64 tensor on the device in place of each list. Without it a list is part of the graph key.
    """
    known = {a.name: str(a.type) for a in op._schema.arguments}
    for name in parameters:
        if "List[int]" not in known.get(name, ""):
            raise ValueError(f"{op} has no list of integers named {name!r}: {op._schema}")
    UPDATABLE[str(op)] = Updatable(tuple(parameters), capture)


@dataclass(frozen=True)
class Site:
    """A node whose lists are updated: the rule, by number, for each of them. A node whose lists
    are all constant has none."""

    node: str
    op: str
    rules: Mapping[str, int]


@dataclass(frozen=True)
class Updates:
    """What is to be updated in one FX graph. Equal rules of several nodes are one."""

    sites: tuple[Site, ...] = ()
    rules: tuple[ListRule, ...] = ()
    ignored: frozenset[int] = field(default=frozenset())
    """Numbers among the arguments that only updated lists use, so that no key needs them."""

    def values(self, args: Sequence[Any]) -> list[list[int]]:
        """The lists for a call, one for each rule."""
        return [[args[n] if kind == "index" else n for kind, n in rule] for rule in self.rules]

    def parameters(self) -> dict[str, tuple[str, list[str]]]:
        """For each node its operator and the parameters to update, as plain values."""
        return {site.node: (site.op, list(site.rules)) for site in self.sites}

    def rulers(self) -> dict[str, dict[str, list[ListElement]]]:
        """For each node the rules of its parameters, as plain values."""
        return {
            site.node: {name: list(self.rules[rule]) for name, rule in site.rules.items()}
            for site in self.sites
        }

    @staticmethod
    def from_literals(
        parameters: Mapping[str, tuple[str, Sequence[str]]],
        rulers: Mapping[str, Mapping[str, Sequence[ListElement]]],
    ) -> Updates:
        """What `parameters` and `rulers` stand for."""
        numbers: dict[ListRule, int] = {}
        sites = tuple(
            Site(node, op, {name: _numbered(rulers[node][name], numbers) for name in names})
            for node, (op, names) in parameters.items()
        )
        return Updates(sites, tuple(numbers))


class SitesInOrder:
    """Hands out the sites of each operator in the order of its calls."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._waiting: dict[str, list[Site]] = {}
        for site in sites:
            self._waiting.setdefault(site.op, []).append(site)

    def take(self, op: Any) -> Mapping[str, int]:
        """The rules for the next call of an operator; none if it takes no lists that vary."""
        sites = self._waiting.get(str(op)) if self._waiting else None
        if sites is None:
            return {}
        if not sites:
            raise CaptureError(f"{op} is called more often than its graph says")
        return sites.pop(0).rules

    def finish(self) -> None:
        """Make sure that all sites were met."""
        left = [site.node for sites in self._waiting.values() for site in sites]
        if left:
            raise CaptureError(f"operators that are to be updated were not called: {left}")


def find_updates(gm: fx.GraphModule, on_device: bool = False) -> Updates:
    """Lists that replays of a graph update. On a device only operators with a form for capture."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    positions = {node: i for i, node in enumerate(placeholders)}
    numbers: dict[ListRule, int] = {}
    sites, uses = [], dict.fromkeys(placeholders, 0)
    for node in gm.graph.nodes:
        entry = UPDATABLE.get(str(node.target)) if node.op == "call_function" else None
        if entry is None or (on_device and entry.capture is None):
            continue
        given = dict(_arguments(node, entry.parameters))
        rules = {name: _rule(node, name, value, positions) for name, value in given.items()}
        varying = [n for rule in rules.values() for kind, n in rule if kind == "index"]
        for n in varying:
            uses[placeholders[n]] += 1
        chosen = {name: _numbered(r, numbers) for name, r in rules.items()} if varying else {}
        sites.append(Site(node.name, str(node.target), chosen))
    sizes = _size_symbols(placeholders)
    ignored = [i for node, i in positions.items() if _is_ignored(node, uses[node], sizes)]
    return Updates(tuple(sites), tuple(numbers), frozenset(ignored))


def _numbered(rule: Sequence[ListElement], numbers: dict[ListRule, int]) -> int:
    return numbers.setdefault(tuple((kind, n) for kind, n in rule), len(numbers))


def _arguments(node: fx.Node, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Arguments of a node by name, but those left out, and tensors: replays read these anyway."""
    assert isinstance(node.target, OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        is_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
        if argument.name in names and value is not None and not is_tensor:
            yield argument.name, value


def _rule(node: fx.Node, name: str, value: Any, positions: Mapping[fx.Node, int]) -> ListRule:
    if not isinstance(value, (list, tuple)):
        raise _error(node, name, f"must be a list, not {value!r}")
    rule: list[ListElement] = []
    for v in value:
        if isinstance(v, int):
            rule.append(("fixed", v))
        elif v in positions and not isinstance(v.meta.get("val"), torch.Tensor):
            rule.append(("index", positions[v]))
        else:
            raise _error(node, name, f"holds {v!r}, neither a number nor an argument of the graph")
    return tuple(rule)


def _error(node: fx.Node, name: str, reason: str) -> RuntimeError:
    origin = origin_of(node)
    where = "" if origin is None else f"\n  called from: {origin.line}"
    return RuntimeError(
        f"the parameter {name!r} of {node.target} cannot be updated between replays: it {reason}"
        f"\n  node: {fx_text(node)}{where}"
    )


def _size_symbols(placeholders: Sequence[fx.Node]) -> set[Any]:
    """Symbols in the dims of tensors: a number that is also a size belongs to the key."""
    values = [node.meta.get("val") for node in placeholders]
    dims = [d for v in values if isinstance(v, torch.Tensor) for d in (*v.shape, *v.stride())]
    return {s for d in dims if isinstance(d, torch.SymInt) for s in d.node.expr.free_symbols}


def _is_ignored(node: fx.Node, uses: int, sizes: set[Any]) -> bool:
    value = node.meta.get("val")
    if not uses or not isinstance(value, torch.SymInt) or value.node.expr.free_symbols & sizes:
        return False
    every = [x for user in node.users for x in pytree.tree_leaves((user.args, user.kwargs))]
    return sum(x is node for x in every) == uses


# ---- lists on a device ----

_SLOTS = 4  # calls that may be under way while the host prepares the next


class DeviceLists:
    """The lists of a graph in device memory. Captured kernels read `tensors`, one for each rule;
    `fill` brings the values of a call there in one copy, in order with what the stream does."""

    def __init__(self, updates: Updates, device: torch.device) -> None:
        self._updates = updates
        sizes = [len(rule) for rule in updates.rules]
        self._there = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.tensors = list(self._there.split(sizes)) if sizes else []
        cuda = device.type == "cuda"
        here = torch.zeros(_SLOTS, sum(sizes), dtype=torch.int64, pin_memory=cuda)
        self._here = list(here.unbind())
        self._copied = [torch.cuda.Event() for _ in self._here] if cuda else []
        self._turn = 0

    def fill(self, args: Sequence[Any]) -> None:
        """Bring the lists for a call to the device."""
        if not self.tensors:
            return
        turn = self._turn = (self._turn + 1) % _SLOTS
        if self._copied:
            self._copied[turn].synchronize()  # the copy of some calls ago has read its numbers
        self._here[turn].numpy()[:] = [n for value in self._updates.values(args) for n in value]
        self._there.copy_(self._here[turn], non_blocking=True)
        if self._copied:
            self._copied[turn].record()

    def forms(self) -> CaptureForms:
        """What makes a graph read these lists while it is captured."""
        return CaptureForms(self._updates, self.tensors)


class CaptureForms(TorchDispatchMode):
    """Calls the capture forms of updated operators in their place."""

    supports_higher_order_operators = True

    def __init__(self, updates: Updates, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._sites = SitesInOrder(updates.sites)
        self._tensors = tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rules = self._sites.take(func)
        if not rules:
            return func(*args, **kwargs)
        form = UPDATABLE[str(func)].capture
        if form is None:
            raise CaptureError(
                f"{func} has no form for capture",
                hint="give register_updatable a function that takes tensors in place of the lists",
            )
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return form(**given | {name: self._tensors[rule] for name, rule in rules.items()})
