"""The processor we run on."""

from __future__ import annotations

from functools import cache

from torchair.codegen.text.machine import Machine


@cache
def host() -> Machine:
    """The machine we run on."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = llvm.get_host_cpu_features()
    arch = llvm.get_process_triple().partition("-")[0]
    return describe(llvm.get_host_cpu_name(), dict(found), found.flatten(), arch)


def describe(name: str, has: dict[str, bool], features: str, arch: str) -> Machine:
    """A Machine from LLVM's feature flags."""
    if arch in ("aarch64", "arm64"):
        return Machine(name, features, 128, 32, fma=True, arch="aarch64")
    if all(has.get(f) for f in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        pairs, bytes_ = (bool(has.get(f"avx512{kind}")) for kind in ("bf16", "vnni"))
        return Machine(name, features, 512, 32, pairs, bytes_, True)
    if has.get("avx2") and has.get("fma"):
        return Machine(name, features, 256, 16, fma=True)
    return Machine(name, features, 128, 16)
