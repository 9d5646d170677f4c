"""Calls of fused products and of what scales values, beside what they should give."""

from __future__ import annotations

import math
from typing import Any

import torch

import npu_expert_references as experts
import npu_format_references as formats
import npu_references as reference
from npu_cases import BF16, F16, HALF, Case, npu, randint, randn
from npu_mx_cases import E2M1, E4M3, E5M2, HIF8, as_bytes, unpaired

Tensor = torch.Tensor
product = reference.product


def _silu(v: Tensor) -> Tensor:
    return v / (1 + torch.exp(-v))


def _mx(x: Tensor, name: str, axis: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, scales, and what they stand for."""
    codes, scales = formats.mx(x, name, axis)
    plain = unpaired(codes, name).movedim(axis, -1)
    values = formats.mx_product(plain, scales.movedim(axis % x.dim(), -2), name).movedim(-1, axis)
    return codes.to(torch.uint8), scales.to(torch.uint8), values


# ---- products and transposes ----

_A, _B = randn(3, 5, 8), randn(3, 8, 6)


def _swapped(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([product(x, y) for x, y in zip(a, b, strict=True)], 1)


TRANSPOSED = [
    Case("transpose_batchmatmul", npu.npu_transpose_batchmatmul, (_A, _B), _swapped),
    Case(
        "transpose_batchmatmul-perms",
        lambda a, b: npu.npu_transpose_batchmatmul(
            a, b, perm_x1=[1, 0, 2], perm_x2=[0, 2, 1], perm_y=[1, 0, 2]
        ),
        (_A.transpose(0, 1).contiguous().to(BF16), _B.transpose(1, 2).contiguous().to(BF16)),
        lambda a, b: _swapped(a.transpose(0, 1), b.transpose(1, 2)),
        rough=0.05,
    ),
    Case(
        "transpose_batchmatmul-split",
        lambda a, b: npu.npu_transpose_batchmatmul(a, b, batch_split_factor=2),
        (randn(4, 5, 8), randn(4, 8, 6)),
        lambda a, b: torch.stack(
            [_swapped(a[:2], b[:2]).reshape(5, 12), _swapped(a[2:], b[2:]).reshape(5, 12)]
        ),
    ),
    Case(
        "transpose_batchmatmul-int8",
        lambda a, b, s: npu.npu_transpose_batchmatmul(
            a, b, scale=npu.npu_trans_quant_param(s)
        ),
        (_A.to(F16), _B.to(F16), torch.full((18,), 8.0)),
        lambda a, b, s: (_swapped(a, b).reshape(5, 1, 18) * 8).round().clamp(-128, 127),
        rough=1,  # a half may go either way
    ),
    Case(
        "transpose_quant_batchmatmul",
        lambda a, b, r, c: npu.npu_transpose_quant_batchmatmul(
            a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), torch.bfloat16, x1_scale=r,
            x2_scale=c, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2],
        ),
        (
            randn(5, 3, 8).to(torch.float8_e4m3fn).view(torch.uint8),
            randn(3, 8, 6).to(torch.float8_e4m3fn).view(torch.uint8), randn(5), randn(6),
        ),
        lambda a, b, r, c: _swapped(
            a.view(torch.float8_e4m3fn).double().transpose(0, 1),
            b.view(torch.float8_e4m3fn).double(),
        ) * r.double()[:, None, None] * c.double(),
        rough=HALF,
    ),
]  # fmt: skip


# ---- a product and what follows ----


def _lora(y: Tensor, x: Tensor, b: Tensor, i: Tensor, a: Tensor) -> Tensor:
    out = y.double().clone()
    for row, k in enumerate(i.tolist()):
        if k < len(b):
            out[row, 2:8] += 0.5 * b[k, 1].double() @ (a[k, 1].double() @ x[row].double())
    return out


def _lora_call(y: Tensor, x: Tensor, b: Tensor, i: Tensor, a: Tensor) -> Tensor:
    return npu.npu_batch_gather_matmul(y, x, b, i, a, 1, 0.5, 2, 6)


LORA = (
    randn(4, 10), randn(4, 5), randn(2, 2, 6, 3), torch.tensor([1, 0, 2, 1], dtype=torch.int32),
    randn(2, 2, 3, 5),
)  # fmt: skip

FUSED = [
    Case(
        "linear",
        npu.npu_linear,
        (randn(4, 8), randn(6, 8), randn(6)),
        lambda x, w, b: product(x, w.t()) + b.double(),
    ),
    *(
        Case(
            f"fused_matmul-{op}",
            lambda a, b, c, d, op=op: npu.npu_fused_matmul(
                a,
                b,
                bias=c if "gelu" not in op else None,
                x3=d if op in ("add", "mul") else None,
                fused_op_type=op,
            ),
            (randn(2, 5, 8), randn(8, 6), randn(6), randn(2, 5, 6)),
            lambda a, b, c, d, op=op: _fused(op)(
                product(a, b) + (0 if "gelu" in op else c.double()), d.double()
            ),
        )
        for op in ("relu", "gelu_erf", "add", "mul")
    ),
    Case("batch_gather_matmul", _lora_call, LORA, _lora),
    Case(
        "quant_matmul_reduce_sum",
        lambda a, b, s, t: npu.npu_quant_matmul_reduce_sum(a, b, x1_scale=s, x2_scale=t),
        (randint(-9, 9, 3, 4, 8), randint(-9, 9, 3, 8, 6), randn(3, 4), randn(6, dtype=BF16)),
        lambda a, b, s, t: (product(a, b) * s.double()[..., None]).sum(0) * t.double(),
        rough=HALF,
    ),
]


def _fused(op: str) -> Any:
    return {
        "relu": lambda y, d: y.clamp(min=0),
        "gelu_erf": lambda y, d: y * 0.5 * (1 + torch.erf(y / math.sqrt(2))),
        "add": lambda y, d: y + d,
        "mul": lambda y, d: y * d,
    }[op]


# ---- quantised on the way ----

_W8, _S8 = randint(-128, 128, 6, 16), randn(6).abs() / 100


def _dequant(x: Tensor, w: Tensor, s: Tensor, smooth: Tensor | None = None) -> Tensor:
    rows, scale = experts.int8_rows(x if smooth is None else x.double() * smooth.double())
    return product(rows, w.t()) * scale[:, None] * s.double()


DEQUANT = [
    Case(
        "quant_matmul_dequant",
        lambda x, w, s, m: npu.npu_quant_matmul_dequant(x, w, s, smooth_scale=m),
        (randn(4, 16, dtype=F16), _W8, _S8, randn(16, dtype=F16).abs() + 0.5),
        _dequant,
        rough=0.01,
    ),
    Case(
        "quant_matmul_dequant-static",
        lambda x, w, s, b: npu.npu_quant_matmul_dequant(
            x, w, s, x_scale=torch.full((1,), 0.05), bias=b, quant_mode="pertensor"
        ),
        (randn(4, 16, dtype=F16), _W8, _S8, randint(-99, 99, 6, dtype=torch.int32)),
        lambda x, w, s, b: (
            (
                product((x.float() / torch.full((1,), 0.05)).round().clamp(-128, 127), w.t())
                + b.double()
            )
            * 0.05
            * s.double()
        ),
        rough=0.01,
    ),
    Case(
        "quant_grouped_matmul_dequant",
        npu.npu_quant_grouped_matmul_dequant,
        (
            randn(5, 16, dtype=F16),
            randint(-128, 128, 3, 6, 16),
            randn(3, 6).abs() / 100,
            torch.tensor([2, 2, 5]),
        ),
        lambda x, w, s, g: torch.cat([_dequant(x[:2], w[0], s[0]), _dequant(x[2:], w[2], s[2])]),
        rough=0.01,
    ),
]

_K = 70
_XM, _XS, _XV = _mx(randn(_K, 5), "e4m3", 0)
_WM, _WS, _WV = _mx(randn(_K, 6, seed=1), "e4m3", 0)


def _grouped_mx(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups that end at 3, 3 and 70, with scales as the grouped quantiser lays them out."""
    parts = [_mx(x[:3], "e5m2", 0), _mx(x[3:], "e5m2", 0)]
    scales = torch.zeros(4, x.shape[1], 2, dtype=torch.uint8)
    scales[0:1], scales[2:4] = parts[0][1], parts[1][1]
    return torch.cat([p[0] for p in parts]), scales, torch.cat([p[2] for p in parts])


_G1, _G1S, _G1V = _grouped_mx(randn(_K, 5))
_G2, _G2S, _G2V = _grouped_mx(randn(_K, 6, seed=1))


def add_quant_matmul(y: Tensor, a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return npu.npu_add_quant_matmul(
        y,
        a.view(torch.float8_e4m3fn),
        b.view(torch.float8_e4m3fn),
        t.view(torch.float8_e8m0fnu),
        x1_scale=s.view(torch.float8_e8m0fnu),
    )


ADDED = [
    Case(
        "add_quant_matmul",
        add_quant_matmul,
        (randn(5, 6), _XM, _WM, _XS, _WS),
        lambda y, a, b, s, t: y.double() + product(_XV.t(), _WV),
    ),
    Case(
        "add_quant_matmul-hifloat8",
        lambda y, a, b: npu.npu_add_quant_matmul(
            y,
            a,
            b,
            torch.full((1,), 0.5),
            x1_scale=torch.full((1,), 2.0),
            x1_dtype=HIF8,
            x2_dtype=HIF8,
        ),
        (
            randn(2, 3),
            torch.full((4, 2), 0x08, dtype=torch.uint8),
            torch.full((4, 3), 0x0C, dtype=torch.uint8),
        ),
        lambda y, a, b: y.double() + 4 * 1.0 * 1.5,
    ),
    Case(
        "add_quant_gmm",
        lambda y, a, b, s, t, g: npu.npu_add_quant_gmm(
            y,
            a.view(torch.float8_e5m2).t(),
            b.view(torch.float8_e5m2),
            t,
            g,
            x1_scale=s,
            x1_scale_dtype=293,
            x2_scale_dtype=293,
        ),
        (randn(3, 5, 6), _G1, _G2, _G1S, _G2S, torch.tensor([3, 3, 70])),
        lambda y, a, b, s, t, g: (
            y.double()
            + torch.stack(
                [
                    product(_G1V[:3].t(), _G2V[:3]),
                    torch.zeros(5, 6),
                    product(_G1V[3:].t(), _G2V[3:]),
                ]
            )
        ),
    ),
]


# ---- the same in place ----


def _added_in_place(y: Tensor, a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
    kinds = torch.float8_e4m3fn, torch.float8_e8m0fnu
    return npu.npu_add_quant_matmul_(
        y, a.view(kinds[0]), b.view(kinds[0]), t.view(kinds[1]), x1_scale=s.view(kinds[1])
    )


def _lora_in_place(y: Tensor, x: Tensor, b: Tensor, i: Tensor, a: Tensor) -> Tensor:
    return npu.npu_batch_gather_matmul_(y, x, b, i, a, 1, 0.5, 2, 6)


def _groups_in_place(y: Tensor, a: Tensor, b: Tensor, s: Tensor, t: Tensor, g: Tensor) -> Tensor:
    return npu.npu_add_quant_gmm_(
        y,
        a.view(torch.float8_e5m2).t(),
        b.view(torch.float8_e5m2),
        t.view(torch.float8_e8m0fnu),
        g,
        x1_scale=s.view(torch.float8_e8m0fnu),
    )


UPDATES = {
    "add_quant_matmul": _added_in_place,
    "add_quant_gmm": _groups_in_place,
    "batch_gather_matmul": _lora_in_place,
}
IN_PLACE = [
    Case(
        f"{case.name}_",
        lambda y, *rest, fn=UPDATES[case.name]: fn(y.clone(), *rest),
        case.inputs,
        case.expected,
    )
    for case in [*ADDED, *FUSED]
    if case.name in UPDATES
]


# ---- groups of rows ----

_GROUPS = torch.tensor([2, 2, 5])
_X, _W = randint(-128, 128, 7, 16), randint(-128, 128, 3, 16, 8)
_WSC, _XSC = randn(3, 8).abs() / 1000, randn(7).abs() / 10 + 0.01


def _experts(x: Tensor, w: Tensor, ws: Tensor, xs: Tensor) -> Tensor:
    parts = [
        product(x[a:b], w[g]) * ws[g].double() * xs[a:b].double()[:, None]
        for g, (a, b) in enumerate(((0, 2), (2, 2), (2, 5)))
    ]
    return torch.cat(parts)


def _swiglu_quant(values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    gate, value = values.chunk(2, -1)
    y, scale = experts.int8_rows(_silu(gate) * value)
    rest = rows - len(y)
    return torch.cat([y, torch.zeros(rest, y.shape[1])]), torch.cat([scale, torch.zeros(rest)])


def _packed(values: Tensor) -> Tensor:
    return npu.npu_convert_weight_to_int4pack(values.reshape(-1, values.shape[-1])).view(
        *values.shape[:-1], -1
    )


_W4 = randint(-8, 8, 3, 16, 16, dtype=torch.int32)
_MXX, _MXXS, _MXXV = _mx(randn(5, 64), "e4m3")
_MXW = [_mx(randn(64, 8, seed=g), "e4m3", 0) for g in range(3)]


def _mx_experts() -> Tensor:
    bounds = ((0, 0, 2), (1, 2, 2), (2, 2, 5))
    return torch.cat([product(_MXXV[a:b], _MXW[g][2]) for g, a, b in bounds])


GROUPED = [
    Case(
        "grouped_matmul_swiglu_quant",
        lambda x, w, g, s, t: npu.npu_grouped_matmul_swiglu_quant(x, w, g, s, t)[:2],
        (_X, _W, _GROUPS, _WSC, _XSC),
        lambda x, w, g, s, t: _swiglu_quant(_experts(x, w, s, t), 7),
        generic=True,
    ),
    Case(
        "grouped_matmul_swiglu_quant_v2",
        lambda x, w, s, t, g: npu.npu_grouped_matmul_swiglu_quant_v2(
            x, [w], [s], t, g, group_list_type=1
        ),
        (_X, _W, _WSC, _XSC, torch.tensor([2, 0, 3])),
        lambda x, w, s, t, g: _swiglu_quant(_experts(x, w, s, t), 7),
    ),
    Case(
        "grouped_matmul_swiglu_quant_v2-int4",
        lambda x, w, s, t, g: npu.npu_grouped_matmul_swiglu_quant_v2(x, [w], [s], t, g),
        (_X, _packed(_W4), randn(3, 16).abs() / 100, _XSC, _GROUPS),
        lambda x, w, s, t, g: _swiglu_quant(_experts(x, _W4, s, t), 7),
    ),
    Case(
        "grouped_matmul_swiglu_quant_v2-mx",
        lambda x, w, s, t, g: as_bytes(
            npu.npu_grouped_matmul_swiglu_quant_v2(
                x.view(torch.float8_e4m3fn),
                [w.view(torch.float8_e4m3fn)],
                [s],
                t,
                g,
                quant_dtype=torch.float8_e4m3fn,
                x_scale_dtype=293,
                weight_scale_dtype=293,
            )
        )[1],
        (
            _MXX,
            torch.stack([w[0] for w in _MXW]),
            torch.stack([w[1] for w in _MXW]),
            _MXXS,
            _GROUPS,
        ),
        lambda x, w, s, t, g: formats.mx(
            _silu(_mx_experts()[:, :4]) * _mx_experts()[:, 4:], "e4m3"
        )[1],
        rough=0,
    ),
    Case(
        "grouped_matmul_finalize_routing",
        lambda x, w, g, s, t, shared, logit, index: npu.npu_grouped_matmul_finalize_routing(
            x,
            w,
            g,
            scale=s,
            pertoken_scale=t,
            shared_input=shared,
            logit=logit,
            row_index=index,
            shared_input_weight=0.5,
            shared_input_offset=1,
            output_bs=4,
        ),
        (
            _X,
            _W,
            torch.tensor([2, 0, 3]),
            _WSC,
            _XSC,
            randn(2, 8, dtype=BF16),
            randn(7).abs(),
            torch.tensor([3, 0, 1, 0, 3, 2, 2]),
        ),
        lambda x, w, g, s, t, shared, logit, index: _finalized(x, w, s, t, shared, logit, index),
    ),
    Case(
        "ffn",
        lambda x, v, w, b: npu.npu_ffn(x, v, w, "swiglu", bias1=b),
        (randn(2, 3, 8), randn(8, 12), randn(6, 4), randn(12)),
        lambda x, v, w, b: _ffn(x, v, w, b),
    ),
    Case(
        "ffn-experts",
        lambda x, v, w, b, c: npu.npu_ffn(
            x, v, w, "relu", expert_tokens=[2, 0, 3], bias1=b, bias2=c
        ),
        (randn(5, 8), randn(3, 8, 6), randn(3, 6, 4), randn(3, 6), randn(3, 4)),
        lambda x, v, w, b, c: torch.cat(
            [
                product((product(x[i:j], v[g]) + b[g].double()).clamp(min=0), w[g]) + c[g].double()
                for g, i, j in ((0, 0, 2), (2, 2, 5))
            ]
        ),
    ),
    Case(
        "ffn-int8",
        lambda x, v, w, s, d, e: npu.npu_ffn(
            x, v, w, "relu", scale=s, deq_scale1=d, deq_scale2=e, output_dtype=torch.bfloat16
        ),
        (
            randint(-9, 9, 5, 8),
            randint(-9, 9, 8, 6),
            randint(-9, 9, 6, 4),
            torch.tensor([4.0]),
            randn(6).abs() / 10,
            randn(4).abs(),
        ),
        lambda x, v, w, s, d, e: (
            product(((product(x, v) * d.double()).clamp(min=0) * 4).round().clamp(-128, 127), w)
            * e.double()
        ),
        rough=HALF,
    ),
]


def _finalized(
    x: Tensor, w: Tensor, s: Tensor, t: Tensor, shared: Tensor, logit: Tensor, index: Tensor
) -> Tensor:
    out = torch.zeros(4, 8, dtype=torch.float64)
    out[1:3] += 0.5 * shared.double()
    for row, place, weight in zip(_experts(x, w, s, t), index, logit, strict=False):
        out[place] += row * weight.double()
    return out


def _ffn(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    gate, value = (product(x, v) + b.double()).chunk(2, -1)
    return product(_silu(gate) * value, w)


# ---- operands of narrow floats ----

_A8 = _mx(randn(5, 70), "e4m3")
_B8 = _mx(randn(70, 6, seed=1), "e5m2", 0)
_A4 = _mx(randn(5, 64), "e2m1")
_B4 = _mx(randn(6, 64, seed=1), "e2m1")


def _f8(x: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return x.view(kind)


def _of_tiles(scale: Tensor) -> Tensor:
    return scale.double().repeat_interleave(4, 0).repeat_interleave(4, 1)


FLOATS = [
    Case(
        "quant_matmul-mx",
        lambda a, b, s, t: npu.npu_quant_matmul(
            _f8(a),
            _f8(b, torch.float8_e5m2),
            t,
            pertoken_scale=s,
            scale_dtype=293,
            pertoken_scale_dtype=293,
            group_sizes=[1, 1, 32],
            output_dtype=torch.float32,
        ),
        (_A8[0], _B8[0], _A8[1], _B8[1]),
        lambda a, b, s, t: product(_A8[2], _B8[2]),
        generic=True,
    ),
    Case(
        "quant_matmul-float4",
        lambda a, b, s, t: npu.npu_quant_matmul(
            a,
            b.t(),
            t.transpose(0, 1),
            pertoken_scale=s,
            scale_dtype=293,
            pertoken_scale_dtype=293,
            x1_dtype=E2M1,
            x2_dtype=E2M1,
            output_dtype=torch.float32,
        ),
        (_A4[0], _B4[0], _A4[1], _B4[1]),
        lambda a, b, s, t: product(_A4[2], _B4[2].t()),
        generic=True,
    ),
    Case(
        "quant_matmul-float8",
        lambda a, b, s, t, c: npu.npu_quant_matmul(
            _f8(a), _f8(b), t, pertoken_scale=s, bias=c, output_dtype=torch.bfloat16
        ),
        (_A8[0], _mx(randn(70, 6), "e4m3", 0)[0], randn(5), randn(6) / 100, randn(6)),
        lambda a, b, s, t, c: (
            product(_f8(a).double(), _f8(b).double()) * s.double()[:, None] * t.double()
            + c.double()
        ),
        rough=0.05,
    ),
    Case(
        "quant_matmul-tiles",
        lambda a, b, s, t: npu.npu_quant_matmul(
            _f8(a),
            _f8(b),
            t,
            pertoken_scale=s,
            group_sizes=[1, 4, 4],
            output_dtype=torch.float32,
        ),
        (_A8[0][:, :8].contiguous(), _A8[0].t()[:8, :4].contiguous(), randn(5, 2), randn(2, 1)),
        lambda a, b, s, t: product(
            _f8(a).double() * s.double().repeat_interleave(4, 1), _f8(b).double() * _of_tiles(t)
        ),
        generic=True,
    ),
    Case(
        "quant_matmul-hifloat8",
        lambda a, b, s: npu.npu_quant_matmul(
            a, b, s, x1_dtype=HIF8, x2_dtype=HIF8, output_dtype=torch.float32
        ),
        (
            torch.full((2, 4), 0x0C, dtype=torch.uint8),
            torch.full((4, 3), 0x08, dtype=torch.uint8),
            torch.tensor([1.0, 2.0, 3.0]),
        ),
        lambda a, b, s: (6 * s.double()).expand(2, 3),
        generic=True,
    ),
    Case(
        "grouped_matmul-mx",
        lambda x, w, s, t, g: npu.npu_grouped_matmul(
            [_f8(x)],
            [_f8(w)],
            scale=[s],
            per_token_scale=[t],
            group_list=g,
            group_type=0,
            split_item=3,
            scale_dtype=293,
            per_token_scale_dtype=293,
            output_dtype=torch.float32,
        ),
        (
            _MXX,
            torch.stack([w[0] for w in _MXW]),
            torch.stack([w[1] for w in _MXW]),
            _MXXS,
            _GROUPS,
        ),
        lambda x, w, s, t, g: _mx_experts(),
        generic=True,
    ),
]


# ---- values scaled to narrow types and back ----


def _rows_packed(y: Tensor) -> Tensor:
    """Integers of four bits, eight in an int32."""
    words = (y.long() % 16).unflatten(-1, (-1, 8))
    total = sum(words[..., k] << 4 * k for k in range(8))
    return torch.where(total >= 2**31, total - 2**32, total)


def _quotient(x: Tensor, scale: Tensor, limit: int) -> Tensor:
    return (x.float() / scale.float()).round().clamp(-limit - 1, limit)


def _turned(x: Tensor, r: Tensor) -> Tensor:
    parts = [product(x[:, k : k + len(r)], r) for k in range(0, x.shape[1], len(r))]
    return torch.cat(parts, 1).to(x.dtype).float()


def _kronecker(x: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    turned = product(p.expand(len(x), -1, -1), product(x, q))
    scale = turned.abs().amax((1, 2)) / 7 / 0.5
    return _rows_packed((turned / scale[:, None, None]).round().clamp(-8, 7)), scale


_ROTATION = torch.tensor([[0.5, 0.5], [0.5, -0.5]]).repeat(4, 4).to(BF16)

SCALED = [
    Case(
        "quant_max",
        lambda x, s: as_bytes(npu.npu_quant_max(x, s, dst_dtype=E4M3)),
        (randn(4, 6, dtype=F16), torch.tensor([0.5])),
        lambda x, s: (
            torch.tensor([[formats.nearest_code(v / 0.5, "e4m3") for v in r] for r in x.tolist()]),
            x.double().abs().max().reshape(1),
        ),
    ),
    Case(
        "quant_max-groups",
        lambda x, s, g: as_bytes(npu.npu_quant_max(x, s, dst_dtype=E5M2, group_list=g)),
        (randn(4, 6), torch.tensor([0.5, 2.0, 4.0]), torch.tensor([1, 1, 4])),
        lambda x, s, g: (
            torch.tensor(
                [
                    [formats.nearest_code(v / f, "e5m2") for v in r]
                    for r, f in zip(x.tolist(), (0.5, 4, 4, 4), strict=True)
                ]
            ),
            torch.stack([x[0].abs().max(), torch.tensor(0.0), x[1:].abs().max()]),
        ),
        generic=True,
    ),
    Case(
        "group_quant",
        lambda x, s, g, o: npu.npu_group_quant(x, s, g, offset=o),
        (randn(4, 8), randn(3, 8) * 30, torch.tensor([1, 1, 4]), torch.tensor([2.0])),
        lambda x, s, g, o: (x * s[[0, 2, 2, 2]] + 2).round().clamp(-128, 127),
    ),
    Case(
        "group_quant-int4",
        lambda x, s, g: npu.npu_group_quant(x, s, g, dst_dtype=torch.quint4x2),
        (randn(4, 8), randn(2, 8) * 5, torch.tensor([1, 4], dtype=torch.int32)),
        lambda x, s, g: _rows_packed((x * s[[0, 1, 1, 1]]).round().clamp(-8, 7)),
    ),
    Case(
        "rotate_quant",
        npu.npu_rotate_quant,
        (randn(4, 16, dtype=BF16), _ROTATION),
        lambda x, r: experts.int8_rows(_turned(x, r)),
    ),
    Case(
        "rotate_quant-mx",
        lambda x, r: npu.npu_rotate_quant(x, r, dst_dtype=E2M1),
        (randn(4, 64, dtype=BF16), _ROTATION),
        lambda x, r: formats.mx(_turned(x, r), "e2m1"),
        rough=0,
    ),
    Case(
        "kronecker_quant",
        lambda x, p, q: npu.npu_kronecker_quant(x, p, q, 0.5),
        (randn(3, 4, 8), randn(4, 4), randn(8, 8)),
        _kronecker,
    ),
    Case(
        "anti_quant",
        lambda x, s, o: npu.npu_anti_quant(x, s, offset=o, dst_dtype=torch.bfloat16),
        (randint(-128, 128, 4, 6), randn(6), randn(6, seed=1)),
        lambda x, s, o: (x.double() + o.double()) * s.double(),
        rough=HALF,
    ),
    Case(
        "anti_quant-int4",
        lambda x, s: npu.npu_anti_quant(x, s, src_dtype=torch.quint4x2),
        (_packed(_W4[0]), torch.tensor([0.5])),
        lambda x, s: _W4[0].double() * 0.5,
    ),
    Case(
        "anti_quant-hifloat8",
        lambda x, s: npu.npu_anti_quant(x, s, src_dtype=HIF8),
        (torch.arange(96, dtype=torch.uint8).view(4, 24), torch.tensor([0.5])),
        lambda x, s: torch.tensor([formats.hifloat8_values()[b] / 2 for b in range(96)]).view(
            4, 24
        ),
        rough=1e-3,
    ),
    Case(
        "dequant_bias",
        lambda x, w, a, b: npu.npu_dequant_bias(x, w, a, b, output_dtype=torch.bfloat16),
        (
            randint(-999, 999, 4, 6, dtype=torch.int32),
            randn(6),
            randn(4).abs(),
            randint(-99, 99, 6, dtype=torch.int32),
        ),
        lambda x, w, a, b: (x.double() + b.double()) * w.double() * a.double()[:, None],
        rough=HALF,
    ),
    Case(
        "dequant_bias-float",
        lambda x, w, b: npu.npu_dequant_bias(x, w, None, b),
        (randint(-99, 99, 4, 6, dtype=torch.int32), randn(6), randn(6, seed=1)),
        lambda x, w, b: x.double() * w.double() + b.double(),
        rough=0.1,
    ),
    *(
        Case(
            f"dtype_cast-{name}",
            lambda x, code=code: npu.npu_dtype_cast(npu.npu_dtype_cast(x, code), 6, code),
            (randn(3, 8) * 2,),
            lambda x, cast=cast: torch.tensor([[cast(v) for v in r] for r in x.tolist()]),
            generic=True,
        )
        for name, code, cast in (
            ("hifloat8", HIF8, lambda v: formats.hifloat8_values()[formats.nearest_hifloat8(v)]),
            (
                "float4",
                E2M1,
                lambda v: math.copysign(
                    formats.float_values("e2m1")[formats.nearest_code(v, "e2m1") % 8], v
                ),
            ),
        )
    ),
    Case(
        "dtype_cast",
        lambda x: (
            npu.npu_dtype_cast(x, torch.float16),
            npu._npu_dtype_cast(x, torch.bfloat16),
            npu.npu_dtype_cast_backward(x, torch.float64),
            npu._npu_dtype_cast_backward(x, torch.int32),
        ),
        (randn(3, 4) * 9,),
        lambda x: (x.half(), x.bfloat16(), x.double(), x.int()),
        rough=0,
    ),
]


# ---- gates and norms with blocks ----


def _normed(x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    y, rstd = reference.rms_norm(x, gamma, 1e-6)
    return (y + beta.double()).float(), rstd


BLOCKS = [
    Case(
        f"swiglu_mx_quant-{left}",
        lambda x, left=left: npu.npu_swiglu_mx_quant(x, activate_left=left),
        (randn(4, 128, dtype=BF16),),
        lambda x, left=left: formats.mx(
            (
                _silu(x.double()[:, :64]) * x.double()[:, 64:]
                if left
                else _silu(x.double()[:, 64:]) * x.double()[:, :64]
            ).to(BF16),
            "e2m1",
        ),
        rough=0,
    )
    for left in (False, True)
] + [
    Case(
        "swiglu_mx_quant-clipped",
        lambda x, g: as_bytes(
            npu.npu_swiglu_mx_quant(x, swiglu_mode=1, dst_type=E4M3, group_index=g)
        ),
        (randn(4, 64, dtype=BF16) * 5, torch.tensor([1, 2])),
        lambda x, g: formats.mx(_clipped(x), "e4m3"),
        rough=0,
    ),
    Case(
        "rms_norm_dynamic_mx_quant",
        lambda x, g, b: as_bytes(npu.npu_rms_norm_dynamic_mx_quant(x, g, beta=b, dst_type=E5M2)),
        (randn(3, 64, dtype=BF16), randn(64), randn(64, seed=1)),
        lambda x, g, b: (*formats.mx(_normed(x, g, b)[0], "e5m2"), _normed(x, g, b)[1]),
    ),
    Case(
        "add_rms_norm_dynamic_mx_quant",
        lambda x, y, g: npu.npu_add_rms_norm_dynamic_mx_quant(x, y, g),
        (randn(3, 64, dtype=BF16), randn(3, 64, dtype=BF16, seed=1), randn(64)),
        lambda x, y, g: _add_normed(x + y, g),
    ),
]


def _clipped(x: Tensor) -> Tensor:
    out = torch.zeros(4, 32, dtype=torch.float64)
    for i, row in enumerate(x.double().tolist()[:3]):
        for k in range(32):
            a, b = min(row[2 * k], 7.0), min(max(row[2 * k + 1], -7.0), 7.0)
            out[i, k] = a / (1 + math.exp(-1.702 * a)) * (b + 1)
    return out.to(BF16)


def _add_normed(x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    y, rstd = reference.rms_norm(x, gamma, 1e-6)
    codes, scales = formats.mx(y.float(), "e2m1")
    return codes, x.double(), scales, rstd


# ---- the next token ----

_LOGITS = randn(4, 20)
_Q = randn(4, 20, seed=1).abs() + 0.1


def _drawn(logits: Tensor, q: Tensor | None) -> Tensor:
    weights = torch.softmax(logits, -1)
    return (weights if q is None else weights / (q.double() + 1e-8)).argmax(-1)


SAMPLING = [
    Case(
        f"top_k_top_p-{name}",
        lambda x, p, k, name=name: npu.npu_top_k_top_p(
            x, p if "p" in name else None, k if "k" in name else None
        ),
        (_LOGITS, torch.tensor([0.9, 0.1, 1.0, 0.5]), torch.tensor([5, 1, 20, 8])),
        lambda x, p, k, name=name: experts.top_k_top_p(
            x, k if "k" in name else None, p if "p" in name else None
        ),
        generic=True,
    )
    for name in ("kp", "k", "p")
] + [
    Case(
        "top_k_top_p_sample",
        lambda x, k, p, q: npu.npu_top_k_top_p_sample(x, k, p, q, is_need_logits=True),
        (_LOGITS, torch.tensor([5, 1, 2000, 8]), torch.tensor([0.9, 0.1, 0.7, 1.0]), _Q),
        lambda x, k, p, q: (
            _drawn(experts.top_k_top_p(x, [5, 1, 20, 8], [0.9, 0.1, 0.7, 2.0]), q),
            experts.top_k_top_p(x, [5, 1, 20, 8], [0.9, 0.1, 0.7, 2.0]),
        ),
        generic=True,
    ),
    Case(
        "top_k_top_p_sample-largest",
        lambda x, k, p, m: npu.npu_top_k_top_p_sample(
            x, k, p, min_ps=m, is_need_logits=True, post_sample="None"
        ),
        (_LOGITS, torch.full((4,), 4000), torch.ones(4), torch.full((4,), 0.3)),
        lambda x, k, p, m: (
            x.argmax(-1),
            torch.where(
                torch.softmax(x.double(), -1)
                >= 0.3 * torch.softmax(x.double(), -1).amax(-1, keepdim=True),
                x.double(),
                -math.inf,
            ),
        ),
        generic=True,
    ),
]

CASES = [
    *TRANSPOSED,
    *FUSED,
    *DEQUANT,
    *ADDED,
    *IN_PLACE,
    *GROUPED,
    *FLOATS,
    *SCALED,
    *BLOCKS,
    *SAMPLING,
]
