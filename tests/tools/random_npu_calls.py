"""Calls of `npu` operators with random sizes and types: inputs in the notation of
`random_recipe_table.py`, an expression, and how it must be run. Eager judges them, as it does what
patterns join."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F

from npu_cases import Case, npu
from random_graphs import Noise
from random_recipes import INPUT, SIZES, TYPES

HALF = 2e-2  # how far results may be off, for eager rounds between operators
GRAPHS: dict[str, Any] = {"mode": "max-autotune", "native": True, "dynamic": False, "frozen": False}
_PROLOG = (
    "x=s[4,24] dq=s[24,12] uq=s[12,30] uk=s[3,6,16] kr=s[24,20] gq=s[12] gk=s[16] "
    "a=s[4,4] c=s[4,4] kc=s[1,4,1,16] rc=s[1,4,1,4]"
)
_CACHED = "kv=h[A,1,1,48] g={} c=h[A,1,1,16] s=h[A,1,1,16] k=h[3,4,1,16] v=h[3,4,1,32]"
_EXPERTS = "torch.zeros(x.shape[0] // s.shape[1], s.shape[1], dtype=torch.int32)"
_ROUTED = "npu.npu_moe_finalize_routing(x, None, None, None, s, torch.arange(x.shape[0]).int(), "

CALLS: tuple[tuple[Any, ...], ...] = (
    # caches
    (
        _CACHED.format("s[32]"),
        "npu.npu_kv_rmsnorm_rope_cache(kv, g, c, s, torch.arange(kv.shape[0]), k, v, "
        "cache_mode='PA', is_output_kv=True)",
        GRAPHS,
    ),
    (
        _CACHED.format("h[32]"),
        "npu.npu_kv_rmsnorm_rope_cache(kv, g, c, s, torch.arange(kv.shape[0]), k, v, "
        "cache_mode='PA', is_output_kv=True)",
        GRAPHS | {"dynamic": True},
    ),
    (
        _CACHED.format("h[32]"),
        "npu.npu_kv_rmsnorm_rope_cache(kv, g, c, s, torch.arange(kv.shape[0])[:, None], k, v, "
        "cache_mode='PA', is_output_kv=True)",
        GRAPHS,
    ),
    (
        _PROLOG + " i=i[4]",
        "npu.npu_mla_prolog_v3_functional(x, dq, uq, uk, kr, gq, gk, a, c, kc, rc, "
        "cache_index=i.argsort())[:2]",
        GRAPHS,
    ),
    # products and gates
    ("x=h[A,4,16] w=s[4,16,B]", "npu.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2])", GRAPHS),
    (
        "x=n[A,32] w=u[16,32] s=s[16]",
        "npu.npu_quant_matmul(x, w.t().view(torch.int8), s.abs(), output_dtype=torch.bfloat16)",
        GRAPHS,
    ),
    (
        "x=H[A,16] w=H[B,16]",
        "npu.npu_grouped_matmul([x], [w.view(torch.int16).t().view(torch.float16)], split_item=0)",
        GRAPHS,
    ),
    (
        "x=j[A,16] w=s[16] q=s[1]",
        "npu.npu_dequant_swiglu_quant(x, weight_scale=w.abs(), quant_scale=q.abs() + 1)",
        GRAPHS,
    ),
    (
        "x=j[A,16] w=s[16]",
        "npu.npu_dequant_swiglu_quant(x, weight_scale=w.abs(), quant_mode=1, "
        "dst_type=torch.float8_e4m3fn)[1]",
        GRAPHS,
    ),
    (
        "x=j[A,16] w=s[2,16]",
        "npu.npu_dequant_swiglu_quant(x, weight_scale=w.abs(), quant_mode=1)",
        GRAPHS,
    ),
    (
        "x=j[A,B,16] w=s[16] a=s[A,B,1]",
        "npu.npu_dequant_swiglu_quant(x, weight_scale=w.abs(), activation_scale=a.abs(), "
        "quant_mode=1, activate_left=True)",
        GRAPHS,
    ),
    # quantised rows
    (
        "x=h[A,B,16] y=h[A,B,16] g=h[16] s=h[16]",
        "npu.npu_add_rms_norm_dynamic_quant(x, y, g, smooth_scale1=s.abs() + 1, "
        "smooth_scale2=s.abs() + 2)",
        GRAPHS,
    ),
    (
        "x=h[A,4,8] y=h[A,4,8] g=h[4,8]",
        "npu.npu_add_rms_norm_dynamic_quant(x, y, g)[:1]",
        GRAPHS,
    ),
    # experts
    ("x=s[12,8] s=s[6,2]", _ROUTED + "None)", GRAPHS | {"dynamic": True}),
    ("x=s[12,8] s=s[6,2]", _ROUTED + f"{_EXPERTS}, 1)", GRAPHS),
    ("x=f[12,8] s=d[6,2]", _ROUTED + "None)", GRAPHS),
    ("x=d[12,8] s=d[6,2]", _ROUTED + "None)", GRAPHS),
)


def drawn(seed: int, number: int) -> tuple[Case, dict[str, Any]]:
    """A call of this number with tensors of random sizes, and how it must be run."""
    inputs, text, *settings = CALLS[number % len(CALLS)]
    pick = random.Random(f"call {seed}")
    types = {letter: pick.choice(found) for letter, found in TYPES.items()}
    sizes = dict(zip("ABCDE", pick.choices(SIZES, k=5), strict=True))
    names, tensors = [], []
    for name, letter, dims in INPUT.findall(inputs):
        shape = [int(sizes.get(d, d)) for d in dims.split(",") if d]
        names.append(name)
        tensors.append(Noise(pick.getrandbits(32)).content(types[letter], shape))
    known = {"torch": torch, "F": F, "npu": npu}
    call = eval(f"lambda {', '.join(names)}: {text}", known)
    case = Case(f"drawn-{number % len(CALLS)}", call, tuple(tensors), call, rough=HALF)
    return case, settings[0] if settings else {}
