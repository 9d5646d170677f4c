"""Graph keys: which of the captured graphs of an FX graph serves a call.

Every value of a number among the arguments and every dim that may vary is part of the key, and so
are the addresses of parameters. Looking a graph up compares plain tuples; the text of a key is made
for logs and on capture. Frozen parameters are left out of the text, as they hardly ever move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from torchair.capture.base import ArgumentKinds
from torchair.codegen.cpu.identity import KnownTensor, test_of
from torchair.codegen.cpu.target import cpu
from torchair.engine.plan.records import picker
from torchair.engine.run.frozen import EqualValue, FrozenTensors
from torchair.engine.run.native import same_as
from torchair.torch_private import tensors

CONSTANT = "no_updated_input"
Entries = tuple[tuple[int, bool], ...]
"""Arguments that tell calls apart: (position, whether it is a number and not a tensor)."""

Raw = tuple[Any, ...]

_FEW = 4  # tensors that Python compares as quickly as native code

_same_addresses: Any = tensors.same_addresses
"""Compares the addresses of many tensors in one call; torch has it where it has CUDA."""


def key_entries(
    gm: fx.GraphModule, ignored: frozenset[int] = frozenset(), on_device: bool = False
) -> Entries:
    """What of the arguments tells calls apart: numbers, unless `ignored` as host arguments that
    replays update; and tensors with a dim whose symbol no number gives. For a graph on a device a
    tensor of the host without dims is a number too: Dynamo makes those of floats."""
    values: list[Any] = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    numbers = [i for i, v in enumerate(values) if isinstance(v, torch.SymInt | torch.SymFloat)]
    given: set[Any] = {values[i].node.expr for i in numbers}
    entries = [(i, True) for i in numbers if i not in ignored]
    entries += [(i, True) for i, v in enumerate(values) if on_device and is_host_number(v)]
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            dims: list[Any] = [d for d in value.shape if isinstance(d, torch.SymInt)]
            symbols = {s for d in dims for s in d.node.expr.free_symbols}
            if symbols - given:
                entries.append((i, False))
                given |= symbols
    return tuple(sorted(entries))


def is_host_number(value: Any) -> bool:
    """Whether a tensor is a number on the host."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.dim()


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


class KeyMaker:
    """Keys of the calls of one FX graph."""

    def __init__(self, kinds: ArgumentKinds, entries: Entries, frozen: bool) -> None:
        self._entries = entries
        self._parameters, self._frozen = kinds.parameters, frozen
        self.raw: Callable[[Sequence[Any]], Raw] = self._reader(kinds.parameters)
        self.rest = self._reader(())  # the same without parameters

    def _reader(self, parameters: tuple[int, ...]) -> Callable[[Sequence[Any]], Raw]:
        numbers = [i for i, number in self._entries if number]
        tensors = [i for i, number in self._entries if not number]
        if not self._entries and not parameters:
            return lambda args: ()
        if not tensors and not parameters:
            return lambda args: tuple([_number(args[i]) for i in numbers])
        if not self._entries and len(parameters) > 1:
            pick = itemgetter(*parameters)
            return lambda args: tuple([p.data_ptr() for p in pick(args)])
        return lambda args: (
            *[_number(args[i]) for i in numbers],
            *[args[i].shape for i in tensors],
            *[args[i].data_ptr() for i in parameters],
        )

    def test(
        self, args: Sequence[Any], also: Sequence[int], frozen_tensors: FrozenTensors | None
    ) -> Callable[[Sequence[Any]], bool] | None:
        """A quick test whether a call that agrees in `rest` has the key of this one, the tensors
        `also` where they are now, and what is `frozen_tensors` as it is; None where there is
        none."""
        positions = [*self._parameters, *also]
        if not isinstance(args, list):
            return None
        if frozen_tensors is None and not positions:
            return lambda others: True
        pick = picker(also)
        still = (
            _at_the_same_places(args, positions)
            if frozen_tensors is None
            else _holding(args, frozen_tensors, pick)
        )
        if not also:
            return still
        alike = same_as(pick(args)).check
        return lambda others: still(others) and alike(*pick(others))

    def have_moved(self, args: Sequence[Any], before: Sequence[Any], raw: Raw) -> bool:
        """Whether a call differs from an earlier one in this only: parameters that were frozen,
        the very objects, have other memory."""
        key, count = self.raw(args), len(self._parameters)
        if not self._frozen or not count or key[:-count] != raw[:-count]:
            return False
        return all(args[i] is t for i, t in zip(self._parameters, before, strict=True))

    def parameters(self, args: Sequence[Any]) -> list[Any]:
        """The parameters of a call if they are frozen, to recognise them by."""
        return [args[i] for i in self._parameters] if self._frozen else []

    def numbers(self, args: Sequence[Any]) -> list[EqualValue] | None:
        """The numbers of a call, for native guards; None where one is a tensor."""
        found = [EqualValue(i, args[i]) for i, number in self._entries if number]
        return None if any(isinstance(s.value, torch.Tensor) for s in found) else found

    def text(self, args: Sequence[Any], full: bool = False) -> str:
        """The key of a call as it is logged; `full` tells models with frozen parameters apart."""
        shown = [_number(args[i]) if number else list(args[i].shape) for i, number in self._entries]
        key = str(shown) if shown else CONSTANT
        if self._parameters and (full or not self._frozen):
            key += str(hash(tuple(args[i].data_ptr() for i in self._parameters)))
        return key


def _at_the_same_places(
    args: Sequence[Any], positions: list[int]
) -> Callable[[Sequence[Any]], Any]:
    """A test that tensors are where they are now: torch's, or ours for the very same objects."""
    same, known = _same_addresses, set(positions)
    if same is not None:
        addresses = [a.data_ptr() if i in known else None for i, a in enumerate(args)]
        return lambda others: same(others, addresses, positions)
    pick = picker(positions)
    if len(positions) > _FEW and cpu().runs():
        tensors = [KnownTensor(i, args[i], args[i].data_ptr()) for i in positions]
        made = test_of(cpu().library, len(args), tensors)
        if made is not None:
            return made[0]
    places = list(map(torch.Tensor.data_ptr, pick(args)))
    return lambda others: list(map(torch.Tensor.data_ptr, pick(others))) == places


def _holding(
    args: Sequence[Any], frozen_tensors: FrozenTensors, pick: Any
) -> Callable[[Sequence[Any]], bool]:
    same, addresses = frozen_tensors.same, [t.data_ptr() for t in pick(args)]
    if not addresses:
        return same
    return lambda others: same(others) and [t.data_ptr() for t in pick(others)] == addresses
