"""What a processor can do, in the words the generators use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A processor. `bits` is the width of a vector register that generators should use."""

    name: str  # as LLVM knows it
    features: str
    bits: int = 128
    registers: int = 16  # vector registers
    dot_bf16: bool = False  # pairs of bf16 multiplied and added in float32 (AVX-512 BF16)
    dot_i8: bool = False  # four bytes multiplied and added in int32 (AVX-512 VNNI)
    fma: bool = False
    arch: str = "x86_64"

    @property
    def lanes(self) -> int:
        """Float32 elements in a vector."""
        return self.bits // 32

    @property
    def has_bf16(self) -> bool:
        """Whether conversions to bfloat16 are instructions that our text may ask for."""
        return False
