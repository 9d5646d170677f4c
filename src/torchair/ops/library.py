"""Definition of `torch.ops.air.*` and the Python functions over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_lib = torch.library.Library("air", "FRAGMENT")
_SIDE_EFFECTS = ("scope_enter", "scope_exit", "wait")

for _schema in (
    "scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()",
    "scope_exit(bool need_execute=False) -> ()",
    "record(*, Device? device=None) -> Tensor",
    "wait(Tensor[] x) -> ()",
):
    _lib.define(_schema)


def _nothing(*args: object, **kwargs: object) -> None:
    """Scopes and waits order graph nodes; eager execution is in order already."""


def _token(*, device: torch.device | None = None) -> torch.Tensor:
    return torch.empty(0, device=device)


for _name in _SIDE_EFFECTS:
    _lib.impl(_name, _nothing, "CompositeExplicitAutograd")
_lib.impl("record", _token, "CompositeExplicitAutograd")


def mark_side_effects() -> None:
    """Tell torch.fx that scopes and waits must survive dead-code elimination."""
    from torch.fx.node import has_side_effect

    for name in _SIDE_EFFECTS:
        has_side_effect(getattr(torch.ops.air, name).default)
    has_side_effect(torch.ops.air.record.default)


def record() -> torch.Tensor:
    """A mark after what was issued so far on the current stream, for `wait`."""
    return torch.ops.air.record()


def wait(tensors: Sequence[torch.Tensor]) -> None:
    """Let what follows on the current stream start after the given marks or tensors."""
    if not tensors:
        raise ValueError("wait needs at least one tensor")
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"wait takes tensors, got {type(t).__name__}")
    torch.ops.air.wait(list(tensors))
