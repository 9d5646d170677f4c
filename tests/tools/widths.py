"""Vector widths that kernels of the CPU are tested in, on one processor, and types of elements."""

from __future__ import annotations

from dataclasses import replace

import torch

from torchair.codegen.cpu.jit import Library, host

TYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
}
ROUNDING = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11, "f64": 0.0}
_HOST = host()
_BYTES = _HOST.dot_i8 and _HOST.arch == "x86_64"  # elsewhere instructions have one width
MACHINES = {
    512: _HOST,  # as wide as it is
    256: replace(_HOST, bits=256, registers=16, dot_bf16=False, dot_i8=_BYTES),
    128: replace(_HOST, bits=128, registers=16, dot_bf16=False, dot_i8=_BYTES, fma=False),
}
LIBRARIES = {bits: Library(machine) for bits, machine in MACHINES.items()}
