"""Types of elements and the sizes of a kernel: the words all generators share."""

from __future__ import annotations

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


def register_type(dtype: str) -> str:
    """The type a value has while it is computed with: half types are widened."""
    return "f32" if dtype in ("bf16", "f16") else dtype


@dataclass(frozen=True)
class Word:
    """A number that is given at run time, in this word of the argument block."""

    index: int


Size = int | Word
"""A size or stride: part of the code, or an argument."""
