"""The calling convention of generated kernels, and the words all generators share.

A kernel is a native function `void kernel(i64 tid, i64 nt, ptr words)`. Each of `nt` threads calls
it, and it does the share of thread `tid`. `words` is an array of 64-bit words: first the addresses
of its operands, then the sizes and strides that are not known when the code is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

STORAGE = {
    "f32": "float", "f64": "double", "bf16": "bfloat", "f16": "half", "bool": "i8",
    "u8": "i8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64",
}  # fmt: skip
"""LLVM type of an element in memory, by the name of its type here."""

BYTES = {
    "f32": 4, "f64": 8, "bf16": 2, "f16": 2, "bool": 1,
    "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
}  # fmt: skip

FLOATS = frozenset({"f32", "f64", "bf16", "f16"})


@dataclass(frozen=True)
class Word:
    """A number that is given at run time, in this word of the argument block."""

    index: int


Size = int | Word
"""A size or stride: part of the code, or an argument."""


@dataclass(frozen=True)
class Kernel:
    """The code of one kernel: function definitions, of which `entry` follows the convention.

    Two kernels with the same text are the same kernel; `entry` is derived from the text.
    """

    entry: str
    text: str
    declarations: frozenset[str]

    @classmethod
    def of(cls, label: str, body: Callable[[str], str] | str, declared: Iterable[str]) -> Kernel:
        """A kernel from text in which `@ENTRY` stands for the name, which becomes unique."""
        text = body if isinstance(body, str) else body("ENTRY")
        mark = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        entry = f"{label}_{mark}"
        return cls(entry, text.replace("@ENTRY", f"@{entry}"), frozenset(declared))
