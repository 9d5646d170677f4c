"""Calls of operators of the `npu` library beside what they should give, short of attention."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import npu_references as reference
from torchair.ascend import ops as library

library.define()
npu = torch.ops.npu
Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A function of tensors, tensors for it, and the same in float64 by other means."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    expected: Callable[..., Any]
    generic: bool = False  # whether it goes to the generic node
    rough: float = 2e-5  # how far results may be off, for halves of a type the step of that type

    def __str__(self) -> str:
        return self.name

    def call(self, *tensors: Tensor) -> Any:
        """What the function gives, as a flat tuple."""
        return tuple(leaves(self.fn(*tensors)))


def leaves(tree: Any) -> list[Any]:
    """The members of nested lists and tuples."""
    if isinstance(tree, (list, tuple)):
        return [leaf for member in tree for leaf in leaves(member)]
    return [tree]


def randn(*dims: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers that are the same in every run."""
    generator = torch.Generator().manual_seed(1000 * len(dims) + sum(dims) + seed)
    return torch.randn(*dims, generator=generator).to(dtype)


def randint(low: int, high: int, *dims: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Random integers that are the same in every run."""
    generator = torch.Generator().manual_seed(sum(dims))
    return torch.randint(low, high, dims, generator=generator).to(dtype)


BF16, F16 = torch.bfloat16, torch.float16
HALF = 2e-2

NORMS = [
    Case(
        f"rms_norm-{str(dtype)[6:]}",
        lambda x, g: npu.npu_rms_norm(x, g, 1e-5),
        (randn(2, 3, 16, dtype=dtype), randn(16, dtype=dtype)),
        lambda x, g: reference.rms_norm(x, g, 1e-5),
        rough=2e-5 if dtype == torch.float32 else HALF,
    )
    for dtype in (torch.float32, BF16, F16)
] + [
    Case(
        "rms_norm-two-dims",
        lambda x, g: npu.npu_rms_norm(x, g),
        (randn(2, 3, 4, 8), randn(4, 8)),
        lambda x, g: reference.rms_norm(x, g, 1e-6),
    ),
    Case(
        "rms_norm-mixed",
        lambda x, g: npu.npu_rms_norm(x, g),
        (randn(4, 16, dtype=BF16), randn(16)),
        lambda x, g: reference.rms_norm(x, g, 1e-6),
        generic=True,
        rough=HALF,
    ),
    Case(
        "rms_norm_backward",
        npu.npu_rms_norm_backward,
        (
            randn(5, 8, seed=1),
            randn(5, 8),
            randn(8),
            reference.rms_norm(randn(5, 8), randn(8), 1e-6)[1].float(),
        ),
        lambda dy, x, g, rstd: _norm_gradient(dy, x, g),
    ),
    Case(
        "add_rms_norm",
        lambda a, b, g: npu.npu_add_rms_norm(a, b, g, 1e-5),
        (randn(2, 3, 16), randn(2, 3, 16, seed=1), randn(16)),
        lambda a, b, g: (*reference.rms_norm(a + b, g, 1e-5), a.double() + b.double()),
    ),
    Case(
        "add_rms_norm-bfloat16",
        lambda a, b, g: npu.npu_add_rms_norm(a, b, g),
        (randn(4, 16, dtype=BF16), randn(4, 16, dtype=BF16, seed=1), randn(16, dtype=BF16)),
        lambda a, b, g: (*reference.rms_norm(a + b, g, 1e-6), a.double() + b.double()),
        rough=HALF,
    ),
]


def _norm_gradient(dy: Tensor, x: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    x, gamma = x.double().requires_grad_(), gamma.double().requires_grad_()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma
    return torch.autograd.grad(y, (x, gamma), dy.double())


ACTIVATIONS = [
    Case(
        f"swiglu-{dim}",
        lambda x, dim=dim: npu.npu_swiglu(x, dim),
        (randn(3, 4, 10),),
        lambda x, dim=dim: reference.swiglu(x, dim),
    )
    for dim in (-1, 1)
] + [
    Case(
        "swiglu-bfloat16",
        npu.npu_swiglu,
        (randn(5, 32, dtype=BF16),),
        lambda x: reference.swiglu(x, -1),
        rough=HALF,
    ),
    Case(
        "swiglu_backward",
        npu.npu_swiglu_backward,
        (randn(3, 8, seed=1), randn(3, 16)),
        lambda g, x: _gradient(lambda x: reference.swiglu(x, -1), g, x),
    ),
]


def _gradient(fn: Any, grad: Tensor, *inputs: Tensor) -> Any:
    leaves = [x.double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(fn(*leaves), leaves, grad.double())
    return found[0] if len(found) == 1 else found


MODES = ("half", "interleave", "quarter", "interleave-half")
_ROTARY = (randn(2, 5, 3, 8), randn(1, 5, 1, 8), randn(2, 5, 1, 8))

ROTARY = [
    Case(
        f"rotary_mul-{mode}",
        lambda x, a, b, mode=mode: npu.npu_rotary_mul(x, a, b, mode),
        _ROTARY,
        lambda x, a, b, mode=mode: reference.rotary(x, a, b, mode),
    )
    for mode in MODES
] + [
    Case(
        f"rotary_mul_backward-{mode}",
        lambda g, x, a, b, mode=mode: npu.npu_rotary_mul_backward(g, x, a, b, mode),
        (randn(2, 5, 3, 8, seed=1), *_ROTARY),
        lambda g, *x, mode=mode: _gradient(lambda *y: reference.rotary(*y, mode), g, *x),
    )
    for mode in MODES
]

FORMATS = [
    Case("format_cast", lambda x: npu.npu_format_cast(x, 29), (randn(3, 4),), lambda x: x),
    Case("format_cast-like", lambda x: npu.npu_format_cast(x, x), (randn(3, 4),), lambda x: x),
]


# ---- scatter ----


def _scattered(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    out, size = data.double().clone(), updates.shape[axis]
    for i, entry in enumerate(indices.tolist()):
        batch, start = entry if isinstance(entry, list) else (i, entry)
        out[batch].narrow(axis - 1 if axis > 0 else axis, start, size).copy_(updates[i])
    return out


def _scattered_points(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    out = data.double().clone()
    for point, row in zip(
        indices.reshape(-1, indices.shape[-1]).tolist(),
        updates.reshape(-1, *data.shape[indices.shape[-1] :]),
        strict=True,
    ):
        out[tuple(point)] = row.double()
    return out


_CACHE = (randn(3, 2, 6, 4), torch.tensor([4, 0, 2]), randn(3, 2, 1, 4))

SCATTERS = [
    Case(
        "scatter_update",
        lambda d, i, u: npu.scatter_update(d, i, u, -2),
        _CACHE,
        lambda d, i, u: _scattered(d, i, u, -2),
    ),
    Case(
        "scatter_update-rows",
        lambda d, i, u: npu.scatter_update(d, i, u, 1),
        (randn(2, 7, 4), torch.tensor([2, 4], dtype=torch.int32), randn(2, 3, 4)),
        lambda d, i, u: _scattered(d, i, u, 1),
    ),
    Case(
        "scatter_update-pairs",
        lambda d, i, u: npu.scatter_update(d, i, u, 2),
        (randn(3, 2, 6, 4), torch.tensor([[2, 3], [0, 1]]), randn(2, 2, 2, 4)),
        lambda d, i, u: _scattered(d, i, u, 2),
    ),
    Case(
        "scatter_nd_update",
        npu.npu_scatter_nd_update,
        (randn(5, 4, 3), torch.tensor([[1], [4]]), randn(2, 4, 3)),
        _scattered_points,
    ),
    Case(
        "scatter_nd_update-points",
        npu.npu_scatter_nd_update,
        (randn(5, 4, 3), torch.tensor([[[1, 0], [4, 3]]], dtype=torch.int32), randn(1, 2, 3)),
        _scattered_points,
    ),
]


# ---- quantisation ----


def _dynamic(x: Tensor, smooth: Tensor | None = None, axis: int = -1) -> tuple[Tensor, Tensor]:
    values = x.double() if smooth is None else x.double() * smooth.double()
    scale = values.abs().amax(axis, keepdim=True) / 127
    return reference.nearest(values / scale, -128, 127).reshape(x.shape), scale.squeeze(axis)


def _asymmetric(x: Tensor, smooth: Tensor, axis: int) -> tuple[Tensor, ...]:
    values = x.double() * smooth.double()
    top, bottom = values.amax(axis, keepdim=True), values.amin(axis, keepdim=True)
    scale = (top - bottom) / 255
    offset = 127 - top / scale
    y = reference.nearest(values / scale + offset, -128, 127).reshape(x.shape)
    return y, scale.squeeze(axis), offset.squeeze(axis)


def _eight_in_one(w: Tensor) -> Tensor:
    rows = [[row[k : k + 8] for k in range(0, len(row), 8)] for row in w.tolist()]
    words = [[sum((v % 16) << 4 * k for k, v in enumerate(p)) for p in row] for row in rows]
    return torch.tensor([[v - (v >> 31 << 32) for v in row] for row in words])


def _patterns(scale: Tensor, offset: Tensor) -> Tensor:
    words = []
    for s, o in zip(scale.tolist(), offset.tolist(), strict=True):
        (bits,) = struct.unpack("<I", struct.pack("<f", s))
        words.append(bits // 8192 * 8192 + (max(min(round(o), 255), -256) % 512) * 2**37 + 2**46)
    return torch.tensor(words)


QUANTS = [
    Case(
        f"quantize-{axis}-{divides}",
        lambda x, s, z, axis=axis, d=divides: npu.npu_quantize(x, s, z, torch.qint8, axis, d),
        (randn(4, 6) * 30, randn(n).abs() + 0.1, randint(-5, 5, n, dtype=torch.int32)),
        lambda x, s, z, axis=axis, d=divides: reference.quantize(x, s, z, axis, d, (-128, 127)),
    )
    for axis, divides, n in ((-1, True, 6), (0, True, 4), (-1, False, 6), (-2, False, 4))
] + [
    Case(
        "quantize-unsigned",
        lambda x, s: npu.npu_quantize(x, s, None, torch.quint8, 0, True),
        (randn(4, 6, dtype=F16) * 30, torch.tensor([0.25])),
        lambda x, s: reference.quantize(x, s, None, 0, True, (0, 255)),
    ),
    Case(
        "quantize-float8",
        lambda x, s: npu.npu_quantize(x, s, None, torch.float8_e4m3fn, 0, True).float(),
        (randn(4, 6), torch.tensor([0.25])),
        lambda x, s: (x / s).to(torch.float8_e4m3fn).double(),
    ),
    Case(
        "dynamic_quant",
        npu.npu_dynamic_quant,
        (randn(3, 4, 16, dtype=BF16),),
        _dynamic,
        rough=1e-6,
    ),
    Case(
        "dynamic_quant-smooth",
        lambda x, s: npu.npu_dynamic_quant(x, smooth_scales=s),
        (randn(4, 16), randn(16).abs() + 0.5),
        _dynamic,
    ),
    Case(
        "dynamic_quant-groups",
        lambda x, s, g: npu.npu_dynamic_quant(x, smooth_scales=s, group_index=g),
        (randn(5, 16), randn(2, 16).abs() + 0.5, torch.tensor([2, 5], dtype=torch.int32)),
        lambda x, s, g: _dynamic(x, torch.stack([s[0], s[0], s[1], s[1], s[1]])),
    ),
    Case(
        "dynamic_quant-columns",
        lambda x: npu.npu_dynamic_quant(x, quant_mode="perchannel"),
        (randn(2, 4, 16),),
        lambda x: _dynamic(x, axis=-2),
    ),
    Case(
        "dynamic_quant-whole",
        lambda x: npu.npu_dynamic_quant(x, quant_mode="pertensor"),
        (randn(4, 16),),
        lambda x: (
            reference.nearest(x.double() * 127 / x.abs().max(), -128, 127).reshape(x.shape),
            x.double().abs().max().reshape(1) / 127,
        ),
    ),
    *(
        Case(
            f"dynamic_quant_asymmetric-{mode}",
            lambda x, s, mode=mode: npu.npu_dynamic_quant_asymmetric(
                x, smooth_scales=s, quant_mode=mode
            ),
            ((randn(2, 4, 16) + 1).to(dtype), (randn(16).abs() + 0.5).to(dtype)),
            lambda x, s, axis=axis: _asymmetric(x, s, axis),
        )
        for mode, axis, dtype in (("pertoken", -1, BF16), ("perchannel", -2, torch.float32))
    ),
    Case(
        "int4pack",
        npu.npu_convert_weight_to_int4pack,
        (randint(-8, 8, 6, 16, dtype=torch.int32),),
        _eight_in_one,
        rough=0,
    ),
    Case(
        "trans_quant_param",
        npu.npu_trans_quant_param,
        (randn(4), torch.tensor([0.5, -3.0, 400.0, -400.0])),
        _patterns,
        rough=0,
    ),
]


# ---- products ----


def _int8_result(x1: Tensor, x2: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    values = reference.product(x1, x2) * scale.double() + offset.double()
    return reference.nearest(values, -128, 127).reshape(values.shape)


_X1, _X2 = randint(-128, 128, 5, 16), randint(-128, 128, 16, 8)
_SCALES = randn(8).abs() / 100 + 0.001
_PACKED = torch.tensor([[0x76543210], [-1985229329]], dtype=torch.int32)
_UNPACKED = torch.stack([torch.arange(8), -1 - torch.arange(8)])


def _bits_as_int64(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


PRODUCTS = [
    Case(
        "quant_matmul-int8",
        lambda a, b, s, o: npu.npu_quant_matmul(a, b, s, offset=o),
        (_X1, _X2, _SCALES, randn(8)),
        _int8_result,
    ),
    Case(
        "quant_matmul-float16",
        lambda a, b, s, c: npu.npu_quant_matmul(a, b, s, bias=c, output_dtype=torch.float16),
        (_X1, _X2, _SCALES, randint(-1000, 1000, 8, dtype=torch.int32)),
        lambda a, b, s, c: (reference.product(a, b) + c.double()) * s.double(),
        rough=5e-3,
    ),
    Case(
        "quant_matmul-rows",
        lambda a, b, s, p, c: npu.npu_quant_matmul(
            a, b, s, pertoken_scale=p, bias=c, output_dtype=torch.bfloat16
        ),
        (_X1, _X2, _SCALES.to(BF16), randn(5).abs(), randn(8, dtype=BF16)),
        lambda a, b, s, p, c: (
            reference.product(a, b) * s.double() * p.double()[:, None] + c.double()
        ),
        rough=HALF,
    ),
    Case(
        "quant_matmul-int32",
        lambda a, b, s: npu.npu_quant_matmul(a, b, s, output_dtype=torch.int32),
        (randint(-128, 128, 2, 5, 16), _X2, _SCALES),
        lambda a, b, s: reference.product(a, b),
    ),
    Case(
        "quant_matmul-packed-scale",
        lambda a, b, s: npu.npu_quant_matmul(a, b, s, output_dtype=torch.float16),
        (_X1, _X2, _bits_as_int64(_SCALES)),
        lambda a, b, s: reference.product(a, b) * _SCALES.double(),
        rough=5e-3,
    ),
    Case(
        "quant_matmul-packed-offset",
        lambda a, b, s: npu.npu_quant_matmul(a, b, s),
        (_X1, _X2, _patterns(_SCALES, torch.arange(8.0) * 9 - 30)),
        lambda a, b, s: _int8_result(
            a, b, (_SCALES.view(torch.int32) // 8192 * 8192).view(torch.float32),
            torch.arange(8) * 9 - 30,
        ),
    ),
    Case(
        "quant_matmul-transposed",
        lambda a, b, s: npu.npu_quant_matmul(a, b.t(), s, output_dtype=torch.float16),
        (_X1, randint(-128, 128, 8, 16), _SCALES),
        lambda a, b, s: reference.product(a, b.t()) * s.double(),
        rough=5e-3,
    ),
    Case(
        "quant_matmul-packed-weight",
        lambda a, b, s: npu.npu_quant_matmul(a, b, s, output_dtype=torch.float16),
        (randint(-128, 128, 5, 2), _PACKED, _SCALES),
        lambda a, b, s: reference.product(a, _UNPACKED) * s.double(),
        rough=5e-3,
    ),
    Case(
        "weight_quant",
        lambda x, w, s, o, c: npu.npu_weight_quant_batchmatmul(x, w, s, o, bias=c),
        (randn(5, 16), _X2, _SCALES[None], randn(1, 8), randn(8)),
        lambda x, w, s, o, c: (
            reference.product(x, (w.double() + o.double()) * s.double()) + c.double()
        ),
    ),
    Case(
        "weight_quant-groups",
        lambda x, w, s: npu.npu_weight_quant_batchmatmul(x, w, s, antiquant_group_size=8),
        (randn(5, 16, dtype=BF16), _X2, randn(2, 8, dtype=BF16)),
        lambda x, w, s: reference.product(
            x, w.double() * torch.cat([s[:1].expand(8, 8), s[1:].expand(8, 8)]).double()
        ),
        rough=HALF,
    ),
    Case(
        "weight_quant-int8",
        lambda x, w, s, q, o: npu.npu_weight_quant_batchmatmul(
            x, w, s, quant_scale=q, quant_offset=o
        ),
        (randn(5, 16), _X2, _SCALES, torch.tensor([[7.0]]), torch.tensor([[1.5]])),
        lambda x, w, s, q, o: reference.nearest(
            reference.product(x, w.double() * s.double()) * 7 + 1.5, -128, 127
        ).reshape(5, 8),
    ),
    Case(
        "weight_quant-packed",
        lambda x, w, s: npu.npu_weight_quant_batchmatmul(x, w, s),
        (randn(5, 2), _PACKED, randn(8)),
        lambda x, w, s: reference.product(x, _UNPACKED * s.double()),
    ),
]  # fmt: skip

_GROUPS = torch.tensor([2, 2, 7])
_SMALL, _SMALL_WEIGHTS = randint(-9, 9, 7, 8), randint(-9, 9, 3, 8, 6)


def _cut_products(x: Tensor, weights: Any) -> list[Tensor]:
    return [
        reference.product(x[a:b], w) for a, b, w in zip((0, 2, 2), (2, 2, 7), weights, strict=True)
    ]


GROUPED = [
    Case(
        "grouped_matmul-alone",
        lambda a, b, v, w: npu.npu_grouped_matmul([a, b], [v, w], group_type=-1),
        (randn(3, 8), randn(5, 4), randn(8, 6), randn(4, 2)),
        lambda a, b, v, w: (reference.product(a, v), reference.product(b, w)),
    ),
    Case(
        "grouped_matmul-rows",
        lambda x, w, g: npu.npu_grouped_matmul([x], [w], group_list=g, group_type=0, split_item=3),
        (randn(7, 8), randn(3, 8, 6), _GROUPS),
        lambda x, w, g: torch.cat(_cut_products(x, w)),
    ),
    Case(
        "grouped_matmul-counts",
        lambda x, u, v, w, b, g: npu.npu_grouped_matmul(
            [x], [u, v, w], bias=[b, b, b], group_list=g, group_type=0, split_item=2,
            group_list_type=1, act_type=1,
        ),
        (
            randn(7, 8), randn(8, 6), randn(8, 6, seed=1), randn(8, 6, seed=2), randn(6),
            torch.tensor([2, 0, 5]),
        ),
        lambda x, u, v, w, b, g: (torch.cat(_cut_products(x, (u, v, w))) + b.double()).relu(),
    ),
    Case(
        "grouped_matmul-list",
        lambda x, u, v, w: tuple(
            npu.npu_grouped_matmul([x], [u, v, w], group_list=[2, 3, 7], group_type=0, split_item=0)
        ),
        (randn(7, 8), randn(8, 6), randn(8, 6, seed=1), randn(8, 6, seed=2)),
        lambda x, u, v, w: (
            reference.product(x[:2], u), reference.product(x[2:3], v), reference.product(x[3:], w)
        ),
    ),
    Case(
        "grouped_matmul-features",
        lambda x, w, g: npu.npu_grouped_matmul([x], [w], group_list=g, group_type=2, split_item=3),
        (randn(5, 7), randn(7, 6), _GROUPS),
        lambda x, w, g: torch.stack(
            [reference.product(x[:, a:b], w[a:b]) for a, b in ((0, 2), (2, 2), (2, 7))]
        ),
    ),
    Case(
        "grouped_matmul-int8",
        lambda x, w, s, p, g: npu.npu_grouped_matmul(
            [x], [w], scale=[s], per_token_scale=[p], group_list=g, group_type=0, split_item=2,
            output_dtype=torch.bfloat16,
        ),
        (_SMALL, _SMALL_WEIGHTS, randn(3, 6, dtype=BF16), randn(7).abs(), _GROUPS),
        lambda x, w, s, p, g: torch.cat(
            [y * t.double() for y, t in zip(_cut_products(x, w), s, strict=True)]
        ) * p.double()[:, None],
        rough=HALF,
    ),
    Case(
        "grouped_matmul-weights",
        lambda x, w, s, o, g: npu.npu_grouped_matmul(
            [x], [w], antiquant_scale=[s], antiquant_offset=[o], group_list=g, group_type=0,
            split_item=3,
        ),
        (
            randn(7, 8, dtype=F16), _SMALL_WEIGHTS, randn(3, 6, dtype=F16),
            randn(3, 6, dtype=F16, seed=1), _GROUPS,
        ),
        lambda x, w, s, o, g: torch.cat(
            _cut_products(x, (w.double() + o.double()[:, None]) * s.double()[:, None])
        ),
        rough=HALF,
    ),
]  # fmt: skip


# ---- experts ----

_LOGITS = randn(6, 5)
_CHOICES = reference.top_k_softmax(_LOGITS, 2)
_ROWS, _EXPERTS = _CHOICES[2].int(), _CHOICES[1].int()
_PLACES = reference.init_routing(randn(6, 8), _ROWS, _EXPERTS)[1].int()
_SKIPS = (randn(6, 8, seed=1), randn(6, 8, seed=2))
_BIAS, _WEIGHTS = randn(5, 8), randn(6, 2).abs()

EXPERTS = [
    Case(
        "gating",
        lambda x: npu.npu_moe_gating_top_k_softmax(x, None, 2),
        (_LOGITS,),
        lambda x: reference.top_k_softmax(x, 2),
    ),
    Case(
        "gating-finished",
        lambda x, f: npu.npu_moe_gating_top_k_softmax(x, f, 2)[1],
        (_LOGITS, torch.arange(6) % 3 == 0),
        lambda x, f: torch.where(f[:, None], 5, reference.top_k_softmax(x, 2)[1]),
    ),
    Case(
        "init_routing",
        lambda x, r, e: npu.npu_moe_init_routing(x, r, e, 6),
        (randn(6, 8), _ROWS, _EXPERTS),
        reference.init_routing,
    ),
    Case(
        "init_routing-active",
        lambda x, r, e: npu.npu_moe_init_routing(x, r, e, 4)[0],
        (randn(6, 8), _ROWS, _EXPERTS),
        lambda x, r, e: reference.init_routing(x, r, e)[0][:8],
    ),
    Case(
        "finalize_routing",
        npu.npu_moe_finalize_routing,
        (randn(12, 8), *_SKIPS, _BIAS, _WEIGHTS, _PLACES, _EXPERTS),
        lambda x, a, b, c, s, p, e: reference.finalize_routing(x, (a, b), c, s, p, e),
    ),
    Case(
        "finalize_routing-some",
        lambda x, a, c, s, p, e: npu.npu_moe_finalize_routing(x, a, None, c, s, p, e),
        (randn(12, 8), _SKIPS[0], _BIAS, _WEIGHTS, _PLACES, _EXPERTS),
        lambda x, a, c, s, p, e: reference.finalize_routing(x, (a,), c, s, p, e),
    ),
    Case(
        "finalize_routing-by-token",
        lambda x, c, s, p, e: npu.npu_moe_finalize_routing(x, None, None, c, s, p, e, 2),
        (randn(12, 8), _BIAS, _WEIGHTS, _PLACES.view(2, 6).t().reshape(-1).contiguous(), _EXPERTS),
        lambda x, c, s, p, e: reference.finalize_routing(x, (), c, s, _PLACES, e),
    ),
]

CASES = [*NORMS, *ACTIVATIONS, *ROTARY, *FORMATS, *SCATTERS, *QUANTS, *PRODUCTS, *GROUPED, *EXPERTS]

MODULES = (
    "npu_attention_cases",
    "npu_cache_cases",
    "npu_cases",
    "npu_comm_cases",
    "npu_expert_cases",
    "npu_fused_cases",
    "npu_latent_cases",
    "npu_mx_cases",
    "npu_product_cases",
    "npu_state_cases",
)
"""Modules of the tests that have a list `CASES` of calls beside what they should give."""
