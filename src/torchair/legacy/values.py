"""Values as the original's captured graphs hold them: loosely, or as bare memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class WeakRef:
    """A tensor that is not kept alive, or any other value, which is. Called, it gives the value, or
    None where the tensor is gone."""

    def __init__(self, value: Any) -> None:
        self.swap_weakref(value)

    def swap_weakref(self, value: Any) -> None:
        """Refer to another value from now on."""
        loosely = isinstance(value, torch.Tensor)
        self._get: Callable[[], Any] = weakref.ref(value) if loosely else lambda: value

    def __call__(self) -> Any:
        return self._get()


class LazyMessage:
    """A text for the log that is made when a line is written, and only then."""

    def __init__(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._make, self._args, self._kwargs = make, args, kwargs

    def __str__(self) -> str:
        return str(self._make(*self._args, **self._kwargs))


def reconstruct_args_kwargs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments whose tensors, also those in lists, are others over the same memory, which they do
    not keep alive."""
    return [_bare(a) for a in args], {name: _bare(a) for name, a in kwargs.items()}


def _bare(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_over_memory(v) if isinstance(v, torch.Tensor) else v for v in value]
    return _over_memory(value) if isinstance(value, torch.Tensor) else value


def _over_memory(t: torch.Tensor) -> torch.Tensor:
    memory = t.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), t.device, memory.nbytes()
    )
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    return made.set_(storage, t.storage_offset(), t.shape, t.stride())
