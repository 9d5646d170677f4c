"""What the processor of this machine can do, in the words the generators use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Target:
    """A processor. `bits` is the width of a vector register that generators should use."""

    name: str  # as LLVM knows it
    features: str
    bits: int = 128
    registers: int = 16  # vector registers
    dot_bf16: bool = False  # pairs of bf16 multiplied and added in float32 (AVX-512 BF16)
    fma: bool = False
    arch: str = "x86_64"

    @property
    def lanes(self) -> int:
        """Float32 elements in a vector."""
        return self.bits // 32


@cache
def host() -> Target:
    """The machine we run on."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = llvm.get_host_cpu_features()
    arch = llvm.get_process_triple().partition("-")[0]
    return describe(llvm.get_host_cpu_name(), dict(found), found.flatten(), arch)


def describe(name: str, has: dict[str, bool], features: str, arch: str) -> Target:
    """A Target from LLVM's feature flags."""
    if arch in ("aarch64", "arm64"):
        return Target(name, features, 128, 32, fma=True, arch="aarch64")
    if all(has.get(f) for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        return Target(name, features, 512, 32, bool(has.get("avx512bf16")), True)
    if has.get("avx2") and has.get("fma"):
        return Target(name, features, 256, 16, fma=True)
    return Target(name, features, 128, 16)
