"""Which operator gets which kernel of the device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.library import Library

from torchair.emulate.boxed import Boxed, boxed
from torchair.emulate.cells import CELLS
from torchair.emulate.kernels import METADATA, OWN, Kernel, metadata_kernel, overload

KEY = "PrivateUse1"

# Torch would look for a kernel of the device's own behind these.
_COMPOSITE_TOO = ("convolution", "_convolution", "convolution_backward")


class Kernels:
    """The kernels of the device. They are registered for as long as this object lives."""

    def __init__(self) -> None:
        self._aten = Library("aten", "IMPL", KEY)
        self._all = Library("_", "IMPL")
        self._boxed: dict[Any, Boxed] = {}
        own: dict[str, Kernel] = {**OWN, **CELLS, **{n: metadata_kernel(n) for n in METADATA}}
        for name, kernel in own.items():
            self._aten.impl(name, kernel)
        self._all.fallback(self._any_operator, KEY)
        for name in self._with_cpu_kernel():
            if name not in own:
                self._aten.impl(name, self._lazy("aten", name))
        self._collectives = Library("c10d", "IMPL", KEY)
        with warnings.catch_warnings(action="ignore"):  # torch's own kernels want a real device
            for name in _named("c10d::"):
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "CPU"):
                    self._collectives.impl(name, self._lazy("c10d", name), allow_override=True)

    def _any_operator(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """For operators that have no kernel here, such as those of a user's library."""
        kernel = self._boxed.get(operator)
        if kernel is None:
            kernel = self._boxed[operator] = boxed(operator)
        return kernel(*args, **kwargs)

    def _lazy(self, library: str, name: str) -> Kernel:
        """The boxed kernel of an operator, made when it is first called."""
        made: list[Boxed] = []

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not made:
                made.append(boxed(overload(name, library)))
            return made[0](*args, **kwargs)

        return kernel

    def _with_cpu_kernel(self) -> list[str]:
        """Names of aten operators whose CPU kernel serves, short of those with `out=`, which
        nobody calls often: the fallback is good enough for them."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [
            name
            for name in _named("aten::")
            if not name.endswith("out")
            and (name in _COMPOSITE_TOO or has(f"aten::{name}", "CPU"))
            and not has(f"aten::{name}", KEY)
        ]


def _named(prefix: str) -> list[str]:
    """Names of all operators of a library, without its name."""
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
