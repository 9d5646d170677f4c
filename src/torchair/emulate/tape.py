"""A captured graph: operators that ran on aliases, with where their results are.

While a tape runs, operators are carried out as ever, so that dims and memory are known; at the end
everything that was there before the capture has its old content again. A replay runs the operators
on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchair.emulate.state import STATE


@dataclass(frozen=True)
class TapedCall:
    """One call of an operator, or of a compiled graph."""

    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]  # results in memory of their own


class Tape:
    """What one capture has seen."""

    def __init__(self) -> None:
        self.entries: list[TapedCall] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # memory made by the graph, by address
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def made(self, tensor: torch.Tensor) -> None:
        """Memory that came into being during the capture: its content needs no saving."""
        storage = tensor.untyped_storage()
        self._own[storage.data_ptr()] = storage

    def run(self, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry an operator out on tensors of the host, and note it."""
        written = list(_written(operator._schema, args, kwargs))
        result = self.call(operator, args, kwargs, written)
        if not written and not self.entries[-1].results:
            self.entries.pop()  # a view: the memory is there already
        return result

    def call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
    ) -> Any:
        """Carry a function out, and note it; `written` are the arguments that it updates."""
        for tensor in written:
            self._save(tensor)
        result = function(*args, **kwargs)
        fresh = _fresh(result, args, kwargs)
        for tensor in fresh:
            self.made(tensor)
        self.entries.append(TapedCall(function, list(args), dict(kwargs), fresh))
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._own and address not in self._before:
            self._before[address] = (storage, storage.clone())

    def finish(self) -> None:
        """End the capture: nothing has happened to memory that was there before."""
        for storage, content in reversed(self._before.values()):  # pieces may overlap
            storage.copy_(content)
        self._before.clear()

    def replay(self) -> None:
        """Run what was noted."""
        rows = STATE.rows
        for entry in self.entries:
            if rows is not None and isinstance(entry.call, torch._ops.OpOverload):
                name = entry.call._schema.name
                result = rows.timed(name, entry.call, entry.args, entry.kwargs)
            else:  # a compiled graph shows its steps itself
                result = entry.call(*entry.args, **entry.kwargs)
            if entry.results:
                fresh = _fresh(result, entry.args, entry.kwargs)
                for kept, new in zip(entry.results, fresh, strict=True):
                    kept.copy_(new)


def _written(schema: Any, args: list[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Arguments that an operator updates."""
    for k, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[k] if k < len(args) else kwargs.get(argument.name))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for member in tree:
            yield from _tensors(member)


def _fresh(result: Any, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Results in memory of their own."""
    given = list(_tensors([args, list(kwargs.values())]))
    shares = torch._C._is_alias_of  # type: ignore[attr-defined]
    return [t for t in _tensors(result) if not any(t is g or shares(t, g) for g in given)]
