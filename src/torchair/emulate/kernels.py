"""Kernels of the device that are not the boxed one: memory, copies, and a few that torch asks for.

The ones in `METADATA` only look at dims and storages: the CPU's own kernel takes tensors of the
device as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchair.emulate.boxed import HOST_KEYS
from torchair.emulate.generators import GENERATORS
from torchair.emulate.memory import as_cpu, as_npu, kept_on_cpu
from torchair.emulate.state import STATE

Tensor = torch.Tensor
Kernel = Callable[..., Any]
aten = torch.ops.aten

METADATA = (
    "as_strided", "view", "view.dtype", "_reshape_alias", "unfold", "view_as_real",
    "view_as_complex", "set_.source_Storage", "set_.source_Storage_storage_offset",
    "set_.source_Tensor", "is_set_to",
)  # fmt: skip

_set = aten.set_.source_Storage_storage_offset
_as_strided = aten.as_strided.default
_to_copy = aten._to_copy.default


def overload(name: str, library: str = "aten") -> Any:
    """An operator by the name that `torch.library` gives it."""
    base, _, variant = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), variant or "default")


def metadata_kernel(name: str) -> Kernel:
    """The CPU's own kernel, called with tensors of the device."""
    operator = overload(name)
    return lambda *args, **kwargs: operator.redispatch(HOST_KEYS, *args, **kwargs)


# ---- memory ----


def _new(tensor: Tensor, device: Any) -> Tensor:
    tape = STATE.here.tape
    if tape is not None:
        tape.made(tensor)
    return as_npu(tensor, STATE.index_of(device))


def empty(
    size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """Memory that holds anything."""
    kind = {} if memory_format is None else {"memory_format": memory_format}
    return _new(torch.empty(size, dtype=dtype, device="cpu", **kind), device)


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, layout: Any = None,
    device: Any = None, pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """Memory that holds anything, in a given layout."""
    return _new(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def zero_tensor(
    size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """`_efficientzerotensor`, with memory: one without would have none to alias."""
    return _new(torch.zeros(size, dtype=dtype, device="cpu"), device)


def resize_(self: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    """Other dims; memory that is too small is replaced by some that is not."""
    kind = {} if memory_format is None else {"memory_format": memory_format}
    strides = torch.empty(size, dtype=self.dtype, device="meta", **kind).stride()
    storage, offset, wanted = self.untyped_storage(), self.storage_offset(), prod(size)
    has = storage.nbytes() // self.element_size()
    if wanted + offset <= has:
        _set.redispatch(HOST_KEYS, self, storage, offset, size, strides)
        return self
    larger = torch.empty(offset + wanted, dtype=self.dtype)
    old = as_cpu(_as_strided.redispatch(HOST_KEYS, self, [has], [1], 0))
    larger[:has].copy_(old)
    storage = _new(larger, self.device).untyped_storage()
    _set.redispatch(HOST_KEYS, self, storage, offset, size, strides)
    return self


def set_(self: Tensor) -> Tensor:
    """No memory at all."""
    storage = _new(torch.empty(0, dtype=self.dtype), self.device).untyped_storage()
    _set.redispatch(HOST_KEYS, self, storage, 0, [0], [1])
    return self


# ---- copies ----


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Between device and host, and on the device."""
    if self is src:
        return self
    tape = STATE.here.tape
    alias = as_cpu if tape is None else kept_on_cpu
    target, source = (t if t.is_cpu else alias(t) for t in (self, src))
    if tape is None:
        target.copy_(source)
    else:
        tape.run(aten.copy_.default, [target, source], {})
    return self


def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_` with its arguments exchanged."""
    return copy_(dst, self)


def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    """`copy_from` into something that gets the right dims first."""
    return copy_(dst.resize_(self.shape), self)


def to_copy(self: Tensor, *, pin_memory: Any = None, **options: Any) -> Tensor:
    """As torch's own; there is no pinned memory to copy into."""
    made: Tensor = _to_copy.redispatch(HOST_KEYS, self, **options)
    return made


def local_scalar_dense(self: Tensor) -> Any:
    """The number in a tensor."""
    if STATE.here.tape is not None:
        raise RuntimeError("a value cannot be read while a graph is being captured")
    return as_cpu(self).item()


def record_stream(self: Tensor, s: Any) -> None:
    """Nothing: memory is never given to another stream while work is under way."""


# ---- random numbers without a generator among the arguments ----


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Drawn from the device's generator; the CPU kernel would take the host's."""
    x = as_cpu(input)
    generator = GENERATORS[input.get_device()]
    if train is False or p == 0:
        pair = x.clone(), torch.ones_like(x, dtype=torch.bool)
    else:
        kept = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
        pair = x * kept * (0.0 if p == 1 else 1 / (1 - p)), kept.to(torch.bool)
    return _new(pair[0], input.device), _new(pair[1], input.device)


OWN: dict[str, Kernel] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_efficientzerotensor": zero_tensor,
    "resize_": resize_,
    "set_": set_,
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "_local_scalar_dense": local_scalar_dense,
    "record_stream": record_stream,
    "native_dropout": native_dropout,
}
