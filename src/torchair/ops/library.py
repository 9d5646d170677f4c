"""Definition of `torch.ops.air.*` and the Python functions over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import has_side_effect

from torchair.ops import streams

_lib = torch.library.Library("air", "FRAGMENT")


def while_tracing(*args: object, **kwargs: object) -> None:
    """A graph that is traced has no streams to order yet."""


def define_effect(schema: str, kernel: Callable[..., Any]) -> None:
    """Define an operator of the `air` library that is called for its effect alone, which dead code
    elimination must not remove."""
    _lib.define(schema)
    name, _, arguments = schema.partition("(")
    _lib.impl(name, kernel, "CompositeExplicitAutograd")
    if "Tensor" in arguments:
        _lib.impl(name, while_tracing, "Meta")
    has_side_effect(getattr(torch.ops.air, name).default)


define_effect(
    "scope_enter(str[] keys, str[] values, bool need_execute=False) -> ()", streams.enter_scope
)
define_effect("scope_exit(bool need_execute=False) -> ()", streams.exit_scope)
define_effect("wait(Tensor[] x) -> ()", streams.wait_for_marks)

_lib.define("record(*, Device? device=None) -> Tensor")
_lib.impl("record", streams.record_mark, "CompositeExplicitAutograd")


# ---- order by data: `wait_tensor` gives its first argument back, after the second is there


def _graphs_only(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(
        "npu_wait_tensor orders operators of a graph in the mode max-autotune; it has no meaning "
        "in eager code or in a captured graph"
    )


def _same(self: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """The very object, so that tracing sees later uses of `self` as uses of the result."""
    return self


_lib.define("wait_tensor(Tensor self, Tensor dependency) -> Tensor")
_lib.impl("wait_tensor", _graphs_only, "CompositeExplicitAutograd")
_lib.impl("wait_tensor", _same, "Meta")


def mark_side_effects() -> None:
    """Tell torch.fx that a mark must survive dead-code elimination, read or not."""
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
