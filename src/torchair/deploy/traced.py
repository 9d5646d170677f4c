"""What tracing a model gives, and where a model keeps its tensors. Loads no tracer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchair.deploy.guards import Spec
from torchair.errors import TorchairError
from torchair.runner import GmRunner


class TraceError(TorchairError, RuntimeError):
    """A model cannot be traced without its data."""


@dataclass(frozen=True)
class Home:
    """A parameter or buffer: the dict that holds it, its key there, its full name."""

    place: dict[str, Any]
    key: str
    name: str

    def read(self) -> torch.Tensor:
        """What is there now."""
        return self.place[self.key]


@dataclass
class Traced:
    """A compiled graph with what its calls must be."""

    runner: GmRunner | None
    """The graph itself, where nothing is left to do around it."""
    wrapped: Callable[..., Any]
    """The graph with AOTAutograd's wrapper around it."""
    specs: list[Spec]
    conditions: list[str]
    tensors: list[int]
    """The arguments that are tensors; the others are constants."""
    result: pytree.TreeSpec = None  # type: ignore[assignment]
    constants: dict[int, Any] = field(default_factory=dict)
    """Leaves of the result that are no tensors."""
    updates: bool = False
    """Whether a call writes to its arguments."""


def modules_of(target: Any) -> list[torch.nn.Module]:
    """The modules whose parameters a callable uses: itself, that of a bound method, those in
    closures of a function."""
    while isinstance(target, partial):
        target = target.func
    if isinstance(target, torch.nn.Module):
        return [target]
    owner = getattr(target, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return [owner]
    cells = getattr(target, "__closure__", None) or ()
    held = [c.cell_contents for c in cells if _is_filled(c)]
    names = getattr(getattr(target, "__code__", None), "co_names", ())
    known = getattr(target, "__globals__", {})
    held += [known[n] for n in names if n in known]
    return [m for m in held if isinstance(m, torch.nn.Module)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def homes_of(modules: Sequence[torch.nn.Module]) -> list[list[Home]]:
    """Where all parameters and buffers are: for each tensor all its places."""
    found: dict[int, list[Home]] = {}
    seen: set[tuple[int, str]] = set()
    for root in modules:
        for prefix, module in root.named_modules():
            for place in (module._parameters, module._buffers):
                for key, tensor in place.items():
                    if tensor is None or (id(place), key) in seen:
                        continue
                    seen.add((id(place), key))
                    home = Home(place, key, f"{prefix}.{key}" if prefix else key)
                    found.setdefault(id(tensor), []).append(home)
    return list(found.values())
