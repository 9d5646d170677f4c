"""Calls of fused norms, activations and rotary embeddings beside what they should give."""

from __future__ import annotations

from typing import Any

import torch

import npu_fused_references as ref
import npu_references as reference
from npu_cases import BF16, F16, HALF, Case, npu, randint, randn

Tensor = torch.Tensor
X1, X2, GAMMA = randn(2, 3, 16), randn(2, 3, 16, seed=1), randn(16)
BETA, SMOOTH = randn(16, seed=3), randn(16, seed=4).abs() + 0.5
S1, S2 = randn(16, seed=5).abs() / 20 + 0.01, randn(16, seed=6).abs() / 30 + 0.01
Z1 = randint(-5, 5, 16, dtype=torch.int32)


def _sum_norm(x1: Tensor, x2: Tensor, gamma: Tensor, eps: float = 1e-6) -> Any:
    total = x1 + x2
    return *reference.rms_norm(total, gamma, eps), total.double()


def _norm_quant(x1: Tensor, x2: Tensor, gamma: Tensor, beta: Any, *scales: Any) -> Any:
    y = ref.norm(x1 + x2, gamma, beta)
    made = [ref.rounded(y / s.double() + (0 if z is None else z)) for s, z in scales]
    return *made, *[torch.zeros(0)] * (2 - len(made)), (x1 + x2).double()


def _dynamic(x1: Tensor, x2: Tensor, gamma: Tensor, beta: Any, *smooths: Any) -> Any:
    y = ref.norm(x1 + x2, gamma, beta)
    made = [ref.row_quant(y if s is None else y * s.double()) for s in smooths]
    made += [(torch.zeros(0), torch.zeros(0))] * (2 - len(made))
    return made[0][0], made[1][0], (x1 + x2).double(), made[0][1], made[1][1]


def _updated_norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> Any:
    rstd = npu.npu_add_rms_norm_v2(x1, x2, gamma)
    return rstd, x1, x2


NORMS = [
    Case(
        "gemma",
        npu.npu_gemma_rms_norm,
        (X1, GAMMA),
        lambda x, g: reference.rms_norm(x, g.double() + 1, 1e-6),
        generic=True,
    ),
    Case(
        "add_rms_norm_cast",
        lambda a, b, g: npu.npu_add_rms_norm_cast(a, b, g, 1e-5),
        (X1.to(BF16), X2.to(BF16), GAMMA.to(BF16)),
        lambda a, b, g: (lambda y, r, x: (y, y, r, x))(*_sum_norm(a, b, g, 1e-5)),
        rough=HALF,
    ),
    Case(
        "add_rms_norm_v2",
        _updated_norm,
        (X1, X2, GAMMA),
        lambda a, b, g: (lambda y, r, x: (r, y, x))(*_sum_norm(a, b, g)),
        generic=True,
    ),
    Case(
        "add_rms_norm_v2_functional",
        npu.npu_add_rms_norm_v2_functional,
        (X1, X2, GAMMA),
        lambda a, b, g: (lambda y, r, x: (r, y, x))(*_sum_norm(a, b, g)),
    ),
    Case(
        "add_rms_norm_quant",
        npu.npu_add_rms_norm_quant,
        (X1, X2, GAMMA, S1, Z1),
        lambda a, b, g, s, z: _norm_quant(a, b, g, None, (s, z)),
        generic=True,
    ),
    Case(
        "add_rms_norm_quant-both",
        lambda a, b, g, s, z, c, t: npu.npu_add_rms_norm_quant(a, b, g, s, z, c, t),
        (X1, X2, GAMMA, S1, Z1, BETA, S2),
        lambda a, b, g, s, z, c, t: _norm_quant(a, b, g, c, (s, z), (t, None)),
        generic=True,
    ),
    Case(
        "add_rms_norm_quant-times",
        lambda a, b, g, s: npu.npu_add_rms_norm_quant(a, b, g, s, None, div_mode=False),
        (X1, X2, GAMMA, S1 * 1000),
        lambda a, b, g, s: _norm_quant(a, b, g, None, (1 / s.double(), None)),
        generic=True,
    ),
    Case(
        "rms_norm_quant",
        npu.npu_rms_norm_quant,
        (X1, GAMMA, BETA, torch.tensor([25.0]), torch.tensor([3], dtype=torch.int8)),
        lambda x, g, b, s, o: ref.rounded(ref.norm(x, g, b) * 25 + 3),
        generic=True,
    ),
    Case(
        "add_rms_norm_dynamic_quant",
        npu.npu_add_rms_norm_dynamic_quant,
        (X1, X2, GAMMA),
        lambda a, b, g: _dynamic(a, b, g, None, None),
    ),
    Case(
        "add_rms_norm_dynamic_quant-zero-row",
        npu.npu_add_rms_norm_dynamic_quant,
        (torch.zeros(1, 16), torch.zeros(1, 16), GAMMA),
        lambda a, b, g: _dynamic(a, b, g, None, None),
    ),
    Case(
        "add_rms_norm_dynamic_quant-both",
        lambda a, b, g, s, t, c: npu.npu_add_rms_norm_dynamic_quant(
            a, b, g, smooth_scale1=s, smooth_scale2=t, beta=c
        ),
        (X1, X2, GAMMA, SMOOTH, S1, BETA),
        lambda a, b, g, s, t, c: _dynamic(a, b, g, c, s, t),
    ),
    Case(
        "add_rms_norm_dynamic_quant-mask",
        lambda a, b, g: npu.npu_add_rms_norm_dynamic_quant(a, b, g, output_mask=[True, True]),
        (X1, X2, GAMMA),
        lambda a, b, g: _dynamic(a, b, g, None, None, None),
    ),
    Case(
        "group_norm_silu",
        lambda x, w, b: npu.npu_group_norm_silu(x, w, b, 3, 1e-4),
        (randn(2, 6, 3, 4), randn(6), randn(6, seed=1)),
        lambda x, w, b: ref.group_norm_silu(x, w, b, 3, 1e-4),
    ),
    Case(
        "group_norm_silu-plain",
        lambda x: npu.npu_group_norm_silu(x, None, None, 2),
        (randn(1, 4, 5),),
        lambda x: ref.group_norm_silu(x, None, None, 2, 1e-5),
    ),
    Case(
        "add_layer_norm",
        lambda a, b, g, c: npu.npu_add_layer_norm(a, b, g, c, 1e-5, True),
        (X1, X2, GAMMA, BETA),
        lambda a, b, g, c: (*ref.layer_norm(a.double() + b, g, c, 1e-5), a.double() + b),
        generic=True,
    ),
    Case(
        "deep_norm",
        npu.npu_deep_norm,
        (X1, X2, BETA, GAMMA),
        lambda x, g, b, w: (lambda y, m, r: (m, r, y))(
            *ref.layer_norm(x.double() * 0.3 + g, w, b, 1e-6)
        ),
        generic=True,
    ),
    Case(
        "batch_norm_reduce",
        lambda x: npu.batch_norm_reduce(x, 1e-5),
        (randn(2, 3, 4, 5),),
        lambda x: (
            torch.stack([x[:, c].double().sum() for c in range(3)]),
            torch.stack([x[:, c].double().pow(2).sum() for c in range(3)]),
        ),
    ),
    Case(
        "batch_norm_gather",
        lambda x, s, q, m, v, n: (
            *npu.batch_norm_gather_stats_update(x, s, q, m, v, 0.25, 1e-3, n), m, v
        ),
        (
            randn(2, 3, 2, 2), randn(4, 3), randn(4, 3).square() + 4, randn(3),
            randn(3).abs(), torch.tensor([4.0, 5, 6, 4]),
        ),
        lambda x, s, q, m, v, n: _gathered(s, q, m, v, 19),
    ),
]  # fmt: skip


def _gathered(sums: Tensor, squares: Tensor, mean: Tensor, var: Tensor, count: int) -> Any:
    middle = sums.double().sum(0) / count
    spread = squares.double().sum(0) / count - middle**2
    running = mean.double() * 0.75 + middle * 0.25, var.double() * 0.75 + spread * 0.25
    return middle, 1 / (spread + 1e-3).sqrt(), *running


def _gradient(function: Any, grad: Tensor, x: Tensor) -> Tensor:
    x = x.double().requires_grad_()
    return torch.autograd.grad(function(x), x, grad.double())[0]


G = randn(3, 4, 10)
ROWS = randint(-40, 40, 6, 16, dtype=torch.int32)
SCALE = randn(16, seed=2).abs() / 10 + 0.02
COUNTS = torch.tensor([2, 1, 2])


def _dequant(
    x: Tensor, scale: Tensor, rows: Any = None, bias: Any = None, mode: int = 0, left: bool = False
) -> Tensor:
    whole = bias is not None and bias.dtype == torch.int32
    values = (x.double() + (bias.double() if whole else 0)) * scale.double()
    values = values if rows is None else values * rows.double().reshape(-1, 1)
    values = values if bias is None or whole else values + bias.double()
    if mode == 1:
        return ref.clipped(values[:, ::2], values[:, 1::2], 1.702, 7.0, 1.0)
    a, b = values[:, :8], values[:, 8:]
    a, b = (a, b) if left else (b, a)
    return ref.clipped(a, b, 1.5, 0.5, 2.0) if mode == 2 else ref.silu(a) * b


def _static(y: Tensor, scale: Any, offset: Any = 0) -> tuple[Tensor, Tensor]:
    return ref.rounded(y / scale + offset), torch.zeros(len(y))


GATES = [
    *(
        Case(name, getattr(npu, name), (randn(4, 9) * 3,), ref.fast_gelu, rough=1e-5)
        for name in ("npu_fast_gelu", "fast_gelu")
    ),
    Case(
        "fast_gelu_backward",
        npu.npu_fast_gelu_backward,
        (randn(4, 9, seed=1), randn(4, 9)),
        lambda g, x: _gradient(ref.fast_gelu, g, x),
    ),
    *(
        Case(
            f"gelu-{way}",
            lambda x, way=way: npu.npu_gelu(x, approximate=way),
            (randn(4, 9),),
            lambda x, way=way: ref.gelu(x, way == "tanh"),
        )
        for way in ("none", "tanh")
    ),
    Case(
        "gelu_backward",
        lambda g, x: npu.npu_gelu_backward(g, x, approximate="tanh"),
        (randn(4, 9, seed=1), randn(4, 9)),
        lambda g, x: _gradient(lambda v: ref.gelu(v, True), g, x),
    ),
    Case("silu", npu.npu_silu, (randn(4, 9),), lambda x: ref.silu(x.double())),
    Case(
        "geglu",
        npu.npu_geglu,
        (G,),
        lambda x: (ref.gelu(x[..., 5:], True) * x[..., :5], ref.gelu(x[..., 5:], True)),
    ),
    Case(
        "geglu-left",
        lambda x: npu.npu_geglu(x, 1, 0, True),
        (G,),
        lambda x: (ref.gelu(x[:, :2], False) * x[:, 2:], ref.gelu(x[:, :2], False)),
    ),
    Case(
        "clipped_swiglu",
        lambda x, g: npu.npu_clipped_swiglu(x, group_index=g, alpha=0.7, limit=1.0, bias=1.2),
        (randn(6, 8) * 2, torch.tensor([1, 0, 3])),
        lambda x, g: torch.cat(
            [ref.clipped(x[:4, ::2], x[:4, 1::2], 0.7, 1.0, 1.2), torch.zeros(2, 4)]
        ),
    ),
    Case(
        "clipped_swiglu-halves",
        lambda x: npu.npu_clipped_swiglu(x, dim=1, interleaved=False),
        (randn(2, 4, 3),),
        lambda x: ref.clipped(x[:, :2], x[:, 2:], 1.702, 7.0, 1.0),
    ),
    Case(
        "clipped_swiglu-none-used",
        lambda x, g: npu.npu_clipped_swiglu(x, group_index=g),
        (randn(2, 8), torch.tensor([0])),
        lambda x, g: torch.zeros(2, 4),
    ),
    Case(
        "dequant_swiglu_quant",
        lambda x, w, a, b: npu.npu_dequant_swiglu_quant(
            x, weight_scale=w, activation_scale=a, bias=b, quant_mode=1
        ),
        (ROWS, SCALE[None], randn(6, 1).abs(), randint(-9, 9, 16, dtype=torch.int32)),
        lambda x, w, a, b: ref.row_quant(_dequant(x, w, a, b)),
    ),
    Case(
        "dequant_swiglu_quant-float-bias",
        lambda x, w, b, q: npu.npu_dequant_swiglu_quant(
            x, weight_scale=w, bias=b, quant_scale=q, quant_offset=q, activate_left=True
        ),
        (ROWS, SCALE[None], randn(16), torch.tensor([0.25])),
        lambda x, w, b, q: _static(_dequant(x, w, None, b, left=True), 0.25, 0.25),
    ),
    Case(
        "dequant_swiglu_quant-groups",
        lambda x, w, a, q, g: npu.npu_dequant_swiglu_quant(
            x,
            weight_scale=w,
            activation_scale=a,
            quant_scale=q,
            group_index=g,
            quant_mode=1,
            swiglu_mode=1,
        ),
        (
            ROWS,
            randn(3, 16).abs() / 9,
            randn(6, 1).abs(),
            randn(3, 8).abs() + 0.1,
            COUNTS,
        ),
        lambda x, w, a, q, g: ref.in_groups(
            [2, 1, 2],
            lambda k, r: ref.row_quant(_dequant(x[r], w[k], a[r], mode=1) * q[k].double()),
            6,
        ),
    ),
    Case(
        "dequant_swiglu_quant-static-groups",
        lambda x, w, q, o, g: npu.npu_dequant_swiglu_quant(
            x,
            weight_scale=w,
            quant_scale=q,
            quant_offset=o,
            group_index=g,
            swiglu_mode=2,
            glu_alpha=1.5,
            clamp_limit=0.5,
            glu_bias=2.0,
        ),
        (ROWS, randn(3, 16).abs() / 9, randn(3).abs() + 0.1, randn(3), COUNTS),
        lambda x, w, q, o, g: ref.in_groups(
            [2, 1, 2],
            lambda k, r: _static(_dequant(x[r], w[k], mode=2), q[k].double(), o[k].double()),
            6,
        ),
    ),
    Case(
        "dequant_swiglu_quant-floats",
        lambda x: npu.npu_dequant_swiglu_quant(x, quant_mode=1),
        (randn(2, 3, 16, dtype=BF16),),
        lambda x: ref.row_quant(ref.silu(x.double()[..., 8:]) * x.double()[..., :8]),
        rough=1e-4,
    ),
    Case(
        "swiglu_quant",
        lambda x, s, o, g: npu.npu_swiglu_quant(x, smooth_scales=s, offsets=o, group_index=g),
        (randn(5, 16), randn(2, 8).abs() * 20, randn(2, 8), torch.tensor([2, 5])),
        lambda x, s, o, g: ref.in_groups(
            [2, 3],
            lambda k, r: _static(
                ref.silu(x[r, 8:].double()) * x[r, :8], 1 / s[k].double(), o[k].double()
            ),
            5,
        ),
        generic=True,
    ),
    Case(
        "swiglu_quant-dynamic",
        lambda x, s: npu.npu_swiglu_quant(x, smooth_scales=s, quant_mode=1, activate_left=True),
        (randn(5, 16), randn(1, 8).abs()),
        lambda x, s: (lambda y, scale: (y, 1 / scale))(
            *ref.row_quant(ref.silu(x[:, :8].double()) * x[:, 8:] * s.double())
        ),
        generic=True,
    ),
    Case(
        "gelu_quant",
        lambda x, s: npu.npu_gelu_quant(x, input_scale=s),
        (randn(3, 16), SMOOTH),
        lambda x, s: ref.row_quant(ref.gelu(x, False) * s.double()),
    ),
    Case(
        "gelu_quant-static",
        lambda x, s, o: npu.npu_gelu_quant(
            x, input_scale=s, input_offset=o, approximate="tanh", quant_mode="static"
        )[0],
        (randn(3, 16), SMOOTH * 40, BETA),
        lambda x, s, o: ref.rounded(ref.gelu(x, True) * s.double() + o.double()),
    ),
]

COS, SIN = randn(2, 3, 1, 8), randn(2, 3, 1, 8, seed=1)
CACHE = randn(9, 12)


def _each_head(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    return reference.rotary(x, cos, sin, mode)


def _embedded(p: Tensor, q: Tensor, k: Tensor, c: Tensor, neox: bool) -> Any:
    torch.ops.atb._npu_rotary_embedding(p, q, k, 16, c, neox)
    return q, k


MROPE = (
    ("plain", torch.tensor([0, 8, 3]), None, "half", "default"),
    ("sections", torch.tensor([[0, 8, 3], [1, 2, 3], [5, 5, 0]]), [1, 3, 2], "half", "default"),
    ("by-turns", torch.tensor([[0, 8, 3], [1, 2, 3], [5, 5, 0]]), [3, 1, 2], "interleaved",
     "interleave"),
    ("one-token", torch.tensor([[4], [1], [5], [7]]), [1, 2, 1, 2], "half", "default"),
)  # fmt: skip
ROPES = [
    *(
        Case(
            f"apply_rotary-{layout}-{mode}",
            lambda q, k, c, s, layout=layout, mode=mode: npu.npu_apply_rotary_pos_emb(
                q, k, c, s, layout, mode
            ),
            tuple(
                t.transpose(*swap).contiguous()
                for t in (randn(2, 3, 4, 8), randn(2, 3, 1, 8, seed=5), COS, SIN)
            ),
            lambda q, k, c, s, mode=mode: (
                reference.rotary(q, c, s, mode),
                reference.rotary(k, c, s, mode),
            ),
        )
        for layout, mode, swap in (
            ("BSND", "half", (0, 0)),
            ("BNSD", "quarter", (1, 2)),
            ("SBND", "interleave", (0, 1)),
        )
    ),
    Case(
        "apply_rotary-TND",
        lambda q, k, c, s: npu.npu_apply_rotary_pos_emb(q, k, c, s, "TND"),
        (randn(3, 4, 8, dtype=F16), randn(3, 2, 8, dtype=F16), COS[0].half(), SIN[0].half()),
        lambda q, k, c, s: (reference.rotary(q, c, s, "half"), reference.rotary(k, c, s, "half")),
        rough=5e-3,
    ),
    Case(
        "interleave_rope",
        npu.npu_interleave_rope,
        (randn(2, 3, 5, 8), randn(2, 1, 5, 8), randn(2, 1, 1, 8)),
        ref.interleave_rope,
    ),
    *(
        Case(
            f"mrope-{name}",
            lambda p, q, k, c, s=sections, r=rotary, m=cached: npu.npu_mrope(
                p, q, k, c, 16, mrope_section=s, rotary_mode=r, cache_mode=m
            ),
            (positions, randn(positions.shape[-1], 32), randn(positions.shape[-1], 16), CACHE),
            lambda p, q, k, c, s=sections, r=rotary, m=cached: tuple(
                ref.mrope(p, x, c, 16, s, r != "half", m != "default") for x in (q, k)
            ),
            generic=True,
        )
        for name, positions, sections, rotary, cached in MROPE
    ),
    *(
        Case(
            f"rotary_embedding-{neox}",
            lambda p, q, k, c, neox=neox: _embedded(p, q, k, c, neox),
            (torch.tensor([0, 8, 3]), randn(3, 32), randn(3, 1, 16), CACHE),
            lambda p, q, k, c, neox=neox: (
                ref.mrope(p, q, c, 16, (), not neox, False),
                ref.mrope(p, k[:, 0], c, 16, (), not neox, False)[:, None],
            ),
            generic=True,
        )
        for neox in (True, False)
    ),
]

CASES = [*NORMS, *GATES, *ROPES]
