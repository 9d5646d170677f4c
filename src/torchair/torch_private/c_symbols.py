"""Symbols of torch's libraries that native code calls: the shims of AOTInductor, whose ABI is
stable, and C++ functions by their mangled names. Without them arguments are tested in Python."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

from torchair.torch_private.table import Names, PrivateName, Without

_CPU, _CORE = "torch_cpu", "c10"
_FILES = {"Linux": "lib{}.so", "Darwin": "lib{}.dylib", "Windows": "{}.dll"}
"""Names of library files by system. Compilers for Windows mangle names of C++ in another way: such
symbols are missing there."""


class PrivateSymbol(PrivateName):
    """A symbol of a library."""

    def found(self) -> Any:
        """The object; ImportError, AttributeError or OSError without it."""
        library, _, symbol = self.path.partition(":")
        return _library(library)[symbol]


def _symbol(library: str, name: str) -> PrivateSymbol:
    return PrivateSymbol(f"{library}:{name}", Without.OPTIONAL, "tests of arguments in native code")


SYMBOLS = {
    "address.of": _symbol(_CPU, "aoti_torch_get_data_ptr"),
    "type.of": _symbol(_CPU, "aoti_torch_get_dtype"),
    "index.of": _symbol(_CPU, "aoti_torch_get_device_index"),
    "rank.of": _symbol(_CPU, "aoti_torch_get_dim"),
    "sizes.of": _symbol(_CPU, "aoti_torch_get_sizes"),
    "strides.of": _symbol(_CPU, "aoti_torch_get_strides"),
    "count.threads": _symbol(_CPU, "_ZN2at15get_num_threadsEv"),
    "version.of": _symbol(_CPU, "_ZNK2at10TensorBase8_versionEv"),
    "needs.grad": _symbol(_CORE, "_ZNK3c1010TensorImpl13requires_gradEv"),
    "grad.mode": _symbol(_CORE, "_ZN3c108GradMode10is_enabledEv"),
}
NAMES = Names(__name__, SYMBOLS)


def dtype_code(name: str) -> int | None:
    """Torch's number of a type; None where no function tells it."""
    function = getattr(_library(_CPU), f"aoti_torch_dtype_{name}", None)
    return None if function is None else int(function())


@cache
def _library(name: str) -> ctypes.CDLL:
    import torch

    file = _FILES.get(platform.system(), _FILES["Linux"]).format(name)
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file))
