"""LLVM, as `llvmlite` brings it along: which versions we take, and modules made from text.

Text is written in the form of the oldest LLVM that we take. Newer ones upgrade it while they parse:
masked loads and stores with their alignment as an operand, byte products over 32-bit lanes, notes
on GPU kernels as metadata.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torchair.versions import LLVMLITE, release


@cache
def binding() -> Any:
    """`llvmlite.binding`; an ImportError if it is missing or too old."""
    import llvmlite

    oldest = LLVMLITE.oldest  # the first whose LLVM (20) takes our text
    if release(llvmlite.__version__) < release(oldest):
        raise ImportError(
            f"llvmlite {llvmlite.__version__} is too old for native code: torchair needs "
            f"llvmlite {oldest} or newer (pip install 'llvmlite>={oldest}')"
        )
    import llvmlite.binding

    return llvmlite.binding


def version() -> str:
    """Who generates code."""
    import llvmlite

    return f"{llvmlite.__version__} {binding().llvm_version_info}"


def parse(text: str) -> Any:
    """A module that LLVM has verified; a RuntimeError says what is wrong with the text.

    Generating code from a module that breaks LLVM's rules ends the process in an assertion, and so
    does linking a function that is nowhere. So nothing reaches a code generator unverified. The
    context is llvmlite's own, which lives as long as the process: one that the garbage collector
    frees before its module ends the process as well. llvmlite lets one thread in at a time, numba's
    included.
    """
    module = binding().parse_assembly(text)
    module.verify()
    unknown = [f.name for f in module.functions if _unknown(f)]
    if unknown:
        raise RuntimeError(f"LLVM of llvmlite {version()} does not know {', '.join(unknown)}")
    return module


def _unknown(function: Any) -> bool:
    """Whether a function is declared as an intrinsic and is none: LLVM gives attributes to those
    that it knows."""
    intrinsic = function.is_declaration and function.name.startswith("llvm.")
    return intrinsic and next(iter(function.attributes), None) is None


def address(function: Any) -> int:
    """Where a function of a library is: the value of a symbol for native code."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
