"""Converters on the operators themselves, where the original keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class RegisteredConverter:
    """Stands on an operator for the converter that is registered for it, which is not loaded before
    somebody asks. Another one put in its place is used instead."""

    is_registered = True

    def __init__(self, op: Any) -> None:
        self._op = op

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        from torchair.convert import registry

        entry = registry.registered_for(self._op)
        assert entry is not None, f"{self._op} has no converter"
        return entry.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def put_on_operators() -> None:
    """Let operators of our own library show their converters."""
    op: Any = torch.ops.air.print.default
    if not hasattr(op, "_ge_converter"):
        op._ge_converter = RegisteredConverter(op)
