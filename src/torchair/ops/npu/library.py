"""How operators of the `npu` library are declared as data and handed to torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

DEVICES = ("CPU", "CUDA")
"""Dispatch keys the kernels are for. An emulated device calls the CPU kernel on aliases."""


@dataclass(frozen=True)
class Gradient:
    """The backward formula of an operator: what to keep of a call, and what to make of it."""

    keep: Callable[..., None]
    backward: Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator: schema, kernel over torch functions, results on tensors without data.

    `gradient` is there where the real operator has one. `pure` is the operator that an in-place
    one becomes when a graph is made functional: the same arguments, a new tensor as result.
    """

    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    gradient: Gradient | None = None
    pure: str | None = None

    @property
    def name(self) -> str:
        """Name with the overload behind a dot, if it has one."""
        return self.schema.partition("(")[0]


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("npu", "FRAGMENT")


def exists(name: str) -> bool:
    """Whether torch knows an operator of the library, whoever defined it."""
    base, _, overload = name.partition(".")
    known = torch._C._jit_get_schemas_for_operator(f"npu::{base}")
    return any(schema.overload_name == overload for schema in known)


def define_missing(operators: Iterable[Operator]) -> None:
    """Define the operators that torch does not know yet."""
    for operator in operators:
        if not exists(operator.name):
            _define(operator)


def _define(operator: Operator) -> None:
    library, full = _library(), f"npu::{operator.name}"
    library.define(operator.schema)
    for device in DEVICES:
        library.impl(operator.name, operator.kernel, device)
    torch.library.register_fake(full, operator.fake, lib=library)
    if operator.gradient is not None:
        keep, backward = operator.gradient.keep, operator.gradient.backward
        torch.library.register_autograd(full, backward, setup_context=keep, lib=library)
    if operator.pure is not None:
        library.impl(operator.name, _made_functional(operator.pure), "Functionalize")


def _made_functional(pure: str) -> Callable[..., torch.Tensor]:
    """The in-place operator for tensors that record updates: the pure one, then a replacement."""

    def run(first: Any, *rest: Any, **options: Any) -> torch.Tensor:
        arguments = [_plain(a) for a in (first, *rest)]
        options = {k: _plain(v) for k, v in options.items()}
        functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(functionalize):
            new = getattr(torch.ops.npu, pure)(*arguments, **options)
        torch._functionalize_replace(first, new)
        torch._functionalize_commit_update(first)
        torch._functionalize_sync(first)
        return first

    return run


def _plain(x: Any) -> Any:
    """What a tensor that records updates stands for now."""
    if not isinstance(x, torch.Tensor) or not torch._is_functional_tensor(x):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x)
