"""What tracing a model gives. Loads no tracer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from torchair.deploy.guards import Spec
from torchair.errors import TorchairError
from torchair.runner import GmRunner


class TraceError(TorchairError, RuntimeError):
    """A model cannot be traced without its data."""


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
    written: frozenset[int] = frozenset()
    """Arguments of the graph that a call updates: tensors of the model come first."""
    unread: frozenset[int] = frozenset()
    """Tensors of the model that the graph does not read, by their number."""
