"""`from torch_npu.contrib import transfer_to_npu`: a script written for CUDA uses the device npu.

From the import on, for the whole process: `torch.cuda` answers with `torch.npu`, a device named
`cuda` means `npu` wherever torch takes one, and groups named `nccl` are of `hccl`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchair.ascend.emulate.state import DEVICE_TYPE, Generator
from torchair.torch_private import accelerator

_CUDA = "cuda"
# Functions that take a device beside torch's own list of constructors.
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    torch: (
        "empty_like", "full_like", "load", "ones_like", "rand_like", "randint_like", "randn_like",
        "zeros_like",
    ),
    torch.Tensor: ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to"),
    torch.nn.Module: ("to", "to_empty"),
    torch.amp.autocast_mode.autocast: ("__init__",),
    torch.amp.GradScaler: ("__init__",),
    accelerator.DeviceContext: ("__init__",),
    Generator: ("__new__",),
}  # fmt: skip
# Names of torch.cuda that are not those of torch.npu.
_OTHER_NAMES = {"CUDAGraph": "NPUGraph"}
_ASKED = ("_is_in_bad_fork", "_lazy_init")  # private ones that torch asks before it does anything


def redirect() -> None:
    """Let CUDA mean NPU from now on. A second call changes nothing."""
    if getattr(torch.cuda, "is_available", None) is torch.npu.is_available:  # type: ignore[attr-defined]
        return
    _redirect_module()
    _redirect_methods()
    for constructor in accelerator.device_constructors():
        _redirect_function(torch, constructor.__name__)
    for owner, names in _FUNCTIONS.items():
        for name in names:
            _redirect_function(owner, name)
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _with_hccl(getattr(dist, name)))
    dist.is_nccl_available = dist.is_hccl_available  # type: ignore[attr-defined]


def _redirect_module() -> None:
    """Give `torch.cuda` what `torch.npu` has."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    shared = [n for n in vars(npu) if hasattr(torch.cuda, n) and (n[0] != "_" or n in _ASKED)]
    for theirs, ours in {**{n: n for n in shared if n != "amp"}, **_OTHER_NAMES}.items():
        setattr(torch.cuda, theirs, getattr(npu, ours))
    for name, file in (("autocast", "autocast_mode"), ("GradScaler", "grad_scaler")):
        for module in ("torch.cuda.amp", f"torch.cuda.amp.{file}"):
            if module in sys.modules:
                setattr(sys.modules[module], name, getattr(npu.amp, name))


def _redirect_methods() -> None:
    for owner in (torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.TypedStorage):
        owner.cuda = owner.npu  # type: ignore[union-attr, method-assign]
    torch.Tensor.is_cuda = property(  # type: ignore[assignment]
        lambda self: self.device.type == DEVICE_TYPE
    )


def _redirect_function(owner: Any, name: str) -> None:
    function: Any = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*[_here(a) for a in args], **{k: _here(v) for k, v in kwargs.items()})

    setattr(owner, name, staticmethod(call) if name == "__new__" else call)


def _here(argument: Any) -> Any:
    """An argument, with a device of CUDA made one of the emulation."""
    if isinstance(argument, str):
        named = argument == _CUDA or argument.startswith(f"{_CUDA}:")
        return argument.replace(_CUDA, DEVICE_TYPE, 1) if named else argument
    if isinstance(argument, torch.device) and argument.type == _CUDA:
        return torch.device(DEVICE_TYPE, argument.index)
    return argument


def _with_hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    def named(argument: Any) -> Any:
        return argument.replace("nccl", "hccl") if isinstance(argument, str) else argument

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: named(v) if k == "backend" else _here(v) for k, v in kwargs.items()}
        return function(*(args and (named(args[0]), *args[1:])), **kwargs)

    return call
