"""Kernels of the device that are not the boxed one: memory, copies, and a few that torch asks for.

The ones in `METADATA` only look at dims and storages: the CPU's own kernel takes tensors of the
device as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torchair.ascend.emulate.boxed import HOST_KEYS, Boxed, boxed
from torchair.ascend.emulate.state import GENERATORS, STATE, as_cpu, as_npu, kept_on_cpu
from torchair.torch_private.dispatch import all_operator_names, has_kernel

HostKernel = Callable[..., Any]
aten = torch.ops.aten

METADATA = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "is_set_to",
)

_set = aten.set_.source_Storage_storage_offset
_as_strided = aten.as_strided.default
_to_copy = aten._to_copy.default


def overload(name: str, library: str = "aten") -> Any:
    """An operator by the name that `torch.library` gives it."""
    base, _, variant = name.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), variant or "default")


def metadata_kernel(name: str) -> HostKernel:
    """The CPU's own kernel, called with tensors of the device."""
    operator = overload(name)
    return lambda *args, **kwargs: operator.redispatch(HOST_KEYS, *args, **kwargs)


# ---- memory ----


def _new(tensor: Tensor, device: Any) -> Tensor:
    tape = STATE.here.tape
    if tape is not None:
        tape.made(tensor)
    return as_npu(tensor, STATE.index_of(device))


def _maker(make: HostKernel) -> HostKernel:
    """Memory as torch makes it on the host, for the device."""

    def kernel(
        *dims: Sequence[int],
        dtype: Any = None,
        device: Any = None,
        memory_format: Any = None,
        **_: Any,
    ) -> Tensor:
        kind = {} if memory_format is None else {"memory_format": memory_format}
        return _new(make(*dims, dtype=dtype, device="cpu", **kind), device)

    return kernel


def resize_(self: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    """Other dims; memory that is too small is replaced by some that is not."""
    kind = {} if memory_format is None else {"memory_format": memory_format}
    strides = torch.empty(size, dtype=self.dtype, device="meta", **kind).stride()
    storage, offset, wanted = self.untyped_storage(), self.storage_offset(), prod(size)
    has = storage.nbytes() // self.element_size()
    if wanted + offset > has:
        larger = torch.empty(offset + wanted, dtype=self.dtype)
        larger[:has].copy_(as_cpu(_as_strided.redispatch(HOST_KEYS, self, [has], [1], 0)))
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


def to_copy(self: Tensor, *, pin_memory: Any = None, **options: Any) -> Tensor:
    """As torch's own; there is no pinned memory to copy into."""
    return _to_copy.redispatch(HOST_KEYS, self, **options)


def local_scalar_dense(self: Tensor) -> Any:
    """The number in a tensor."""
    if STATE.here.tape is not None:
        raise RuntimeError("a value cannot be read while a graph is being captured")
    return as_cpu(self).item()


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


OWN: dict[str, HostKernel] = {
    "empty.memory_format": _maker(torch.empty),
    "empty_strided": _maker(torch.empty_strided),
    "_efficientzerotensor": _maker(torch.zeros),  # with memory: without there is none to alias
    "resize_": resize_, "set_": set_, "copy_": copy_, "_to_copy": to_copy,
    "_copy_from": lambda self, dst, non_blocking=False: copy_(dst, self),
    "_copy_from_and_resize": lambda self, dst: copy_(dst.resize_(self.shape), self),
    "_local_scalar_dense": local_scalar_dense,
    "record_stream": lambda self, s: None,  # memory is never given to another stream under way
    "native_dropout": native_dropout,
}  # fmt: skip


# ---- fused cells of LSTM and GRU, written with tensors of the device ----


Optional = Tensor | None


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """New hidden state, new cell state, and the four gates for the backward."""
    i, f, c, o = _sum(_sum(input_gates + hidden_gates, input_bias), hidden_bias).chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


def lstm_cell_backward(
    grad_hy: Optional, grad_cy: Optional, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Optional, Optional, Optional]:
    """Gradients of the gates, of the old cell state, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, c, o = workspace.chunk(4, 1)
    bent = cy.tanh()
    hidden = grad_hy if grad_hy is not None else torch.zeros_like(bent)
    cell = _sum(hidden * o * (1 - bent * bent), grad_cy)
    parts = [
        cell * c * i * (1 - i),
        cell * cx * f * (1 - f),
        cell * i * (1 - c * c),
        hidden * bent * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Optional = None,
    hidden_bias: Optional = None,
) -> tuple[Tensor, Tensor]:
    """New hidden state, and what the backward needs."""
    a = _sum(input_gates, input_bias).chunk(3, 1)
    b = _sum(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
    new = (a[2] + reset * b[2]).tanh()
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, b[2]], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Optional, Optional]:
    """Gradients of both gates, of the old hidden state, and of both biases."""
    reset, update, new, hx, hidden = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden * reset * (1 - reset)
    of_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * update, *biases


def _sum(x: Tensor, y: Optional) -> Tensor:
    return x if y is None else x + y


CELLS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}


KEY = "PrivateUse1"
_has_kernel = has_kernel

# Torch would look for a kernel of the device's own behind these.
_COMPOSITE_TOO = ("convolution", "_convolution", "convolution_backward")


def register_kernels() -> list[Library]:
    """The kernels of the device, registered for as long as these libraries live."""
    aten, everything = Library("aten", "IMPL", KEY), Library("_", "IMPL")
    collectives = Library("c10d", "IMPL", KEY)
    own: dict[str, HostKernel] = {**OWN, **CELLS, **{n: metadata_kernel(n) for n in METADATA}}
    for name, kernel in own.items():
        aten.impl(name, kernel)
    # For operators that have no kernel here, such as those of a user's library.
    everything.fallback(lambda operator, *a, **k: boxed(operator)(*a, **k), KEY)
    for name in _with_cpu_kernel():
        if name not in own:
            aten.impl(name, _lazy("aten", name))
    with warnings.catch_warnings(action="ignore"):  # torch's own kernels want a real device
        for name in _named("c10d::"):
            if _has_kernel(f"c10d::{name}", "CPU"):
                collectives.impl(name, _lazy("c10d", name), allow_override=True)
    return [aten, everything, collectives]


def _lazy(library: str, name: str) -> HostKernel:
    """The boxed kernel of an operator, made when it is first called."""
    made: list[Boxed] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(boxed(overload(name, library)))
        return made[0](*args, **kwargs)

    return kernel


def _with_cpu_kernel() -> list[str]:
    """Names of aten operators whose CPU kernel serves, short of those with `out=`, which are
    called rarely: the fallback is good enough for them."""
    return [
        name
        for name in _named("aten::")
        if not name.endswith("out")
        and (name in _COMPOSITE_TOO or _has_kernel(f"aten::{name}", "CPU"))
        and not _has_kernel(f"aten::{name}", KEY)
    ]


def _named(prefix: str) -> list[str]:
    names = all_operator_names()
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
