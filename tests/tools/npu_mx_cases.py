"""Calls of operators that quantise by blocks, beside what they should give."""

from __future__ import annotations

import math
from typing import Any

import torch

import npu_format_references as formats
from npu_cases import BF16, F16, Case, npu, randn

Tensor = torch.Tensor
E5M2, E4M3, HIF8, E2M1, E1M2 = 291, 292, 290, 296, 297
_NAMES = {E5M2: "e5m2", E4M3: "e4m3", E2M1: "e2m1", E1M2: "e1m2"}


def as_bytes(results: Any) -> Any:
    """Results with the bytes of types that cannot be compared."""
    if isinstance(results, (tuple, list)):
        return tuple(as_bytes(r) for r in results)
    return results.view(torch.uint8) if "float8" in str(results.dtype) else results


def _spread(*dims: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, a block of zeros among them."""
    x = randn(*dims, seed=seed) * torch.exp2(randn(*dims, seed=seed + 1).round() * 3)
    x[0, ..., : min(32, dims[-1])] = 0
    return x.to(dtype)


_X = _spread(3, 5, 70)

MX = [
    Case(
        f"dynamic_mx_quant-{_NAMES[kind]}-{axis}-{alg}",
        lambda x, kind=kind, axis=axis, alg=alg: as_bytes(
            npu.npu_dynamic_mx_quant(x, axis=axis, dst_type=kind, scale_alg=alg)
        ),
        (_X.to(dtype),),
        lambda x, kind=kind, axis=axis, alg=alg: formats.mx(x, _NAMES[kind], axis, alg > 0),
        rough=0,
    )
    for kind, axis, alg, dtype in (
        (E2M1, -1, 0, BF16),
        (E1M2, -1, 0, F16),
        (E4M3, 1, 0, BF16),
        (E5M2, 0, 0, F16),
        (E4M3, -1, 1, BF16),
        (E2M1, -1, 1, BF16),
    )
] + [
    Case(
        "dynamic_mx_quant-chosen",
        lambda x: npu.npu_dynamic_mx_quant(x, dst_type=E2M1, scale_alg=2, dst_type_max=7.0),
        (_X,),
        lambda x: formats.mx(x, "e2m1", -1, True, 7.0),
        rough=0,
    ),
    Case(
        "dynamic_mx_quant-floor",
        lambda x: npu.npu_dynamic_mx_quant(x, round_mode="floor")[0],
        (torch.tensor([[6.0, -3.5, 3.5, -0.2, 0.2, 1.4, -1.4, 0.0]], dtype=BF16),),
        lambda x: torch.tensor([[7 + 16 * 14, 5 + 16 * 9, 0 + 16 * 2, 11 + 16 * 0]]),
        rough=0,
    ),
    Case(
        "dynamic_mx_quant-empty",
        lambda x: npu.npu_dynamic_mx_quant(x),
        (torch.empty(0, 64, dtype=BF16),),
        lambda x: (torch.empty(0, 32), torch.empty(0, 1, 2)),
        rough=0,
    ),
    Case(
        "dynamic_mx_quant_with_dual_axis",
        lambda x: as_bytes(npu.npu_dynamic_mx_quant_with_dual_axis(x, dst_type=E4M3)),
        (_spread(66, 34),),
        lambda x: (*formats.mx(x, "e4m3", -1), *formats.mx(x, "e4m3", 0)),
        rough=0,
    ),
    Case(
        "dynamic_block_mx_quant",
        lambda x: npu.npu_dynamic_block_mx_quant(x),
        (_spread(2, 40, 66),),
        lambda x: _block_mx(x, "e2m1"),
        rough=0,
    ),
    Case(
        "dynamic_dual_level_mx_quant",
        lambda x: npu.npu_dynamic_dual_level_mx_quant(x),
        (_spread(2, 520),),
        lambda x: _two_levels(x),
        rough=1e-6,
    ),
    Case(
        "grouped_dynamic_mx_quant",
        lambda x, g: as_bytes(npu.npu_grouped_dynamic_mx_quant(x, g)),
        (_spread(70, 6, dtype=F16), torch.tensor([3, 3, 70], dtype=torch.int32)),
        lambda x, g: _grouped_mx(x, (3, 3, 70), "e5m2"),
        rough=0,
    ),
    *(
        Case(
            f"anti_mx_quant-{name}",
            lambda x, s, kind=kind: npu.npu_anti_mx_quant(
                x.view(torch.float8_e4m3fn) if kind == E4M3 else x, s, dst_type=6, src_type=kind
            ),
            codes,
            lambda x, s, name=name: formats.mx_product(unpaired(x, name), s, name),
        )
        for kind, name, codes in (
            (kind, name, tuple(t.to(torch.uint8) for t in formats.mx(_X, name)))
            for kind, name in ((E4M3, "e4m3"), (E2M1, "e2m1"))
        )
    ),
]


def unpaired(bytes_: Tensor, name: str) -> Tensor:
    if not name.startswith(("e2", "e1")):
        return bytes_
    return torch.stack([bytes_ % 16, bytes_ // 16], -1).flatten(-2)


def _block_mx(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of 32 x 32 with one exponent each."""
    batch, rows, columns = x.shape
    codes = torch.zeros(x.shape, dtype=torch.int64)
    along = torch.zeros(batch, rows, 2 * math.ceil(columns / 64), dtype=torch.int64)
    across = torch.zeros(batch, 2 * math.ceil(rows / 64), columns, dtype=torch.int64)
    for b in range(batch):
        for i in range(0, rows, 32):
            for j in range(0, columns, 32):
                tile = x[b, i : i + 32, j : j + 32].double()
                e = formats.shared_exponent(tile.flatten().tolist(), name)
                for di, row in enumerate(tile.tolist()):
                    for dj, v in enumerate(row):
                        codes[b, i + di, j + dj] = formats.nearest_code(v / 2.0**e, name)
                along[b, i : i + 32, j // 32] = e + 127
                across[b, i // 32, j : j + 32] = e + 127
    return (
        formats.pairs(codes),
        along.unflatten(-1, (-1, 2)),
        across.unflatten(1, (-1, 2)).movedim(2, -1),
    )


def _two_levels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outer, parts = [], []
    for row in x:
        line, scales = [], []
        for k in range(0, x.shape[1], 512):
            scale = row[k : k + 512].float().abs().max() / 6
            scales.append(scale)
            line.append((row[k : k + 512].float() / (scale if scale else 1)).to(x.dtype))
        outer.append(torch.stack(scales))
        parts.append(torch.cat(line))
    y, inner = formats.mx(torch.stack(parts), "e2m1")
    return y, torch.stack(outer), inner


def _grouped_mx(x: Tensor, ends: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    y = torch.zeros(x.shape, dtype=torch.int64)
    scales = torch.zeros(x.shape[0] // 64 + len(ends), x.shape[1], 2, dtype=torch.int64)
    begin = 0
    for g, end in enumerate(ends):
        if end > begin:
            y[begin:end], found = formats.mx(x[begin:end], name, 0)
            scales[begin // 64 + g : begin // 64 + g + len(found)] = found
        begin = end
    return y, scales


# ---- float32 scales of tiles ----


def _tiles(
    x: Tensor, height: int, width: int, top: float, code: Any, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    y = torch.zeros(x.shape, dtype=torch.float64)
    rows = -(-x.shape[-2] // height)
    scales = torch.zeros(*x.shape[:-2], rows, -(-x.shape[-1] // width), dtype=torch.float64)
    for index in range(math.prod(x.shape[:-2])):
        part = x.reshape(-1, *x.shape[-2:])[index].double()
        for i in range(0, x.shape[-2], height):
            for j in range(0, x.shape[-1], width):
                tile = part[i : i + height, j : j + width]
                scale = max(float(tile.float().abs().max()) / top, least)
                made = [[code(float(v) / (scale or 1)) for v in row] for row in tile]
                y.reshape(-1, *x.shape[-2:])[index, i : i + height, j : j + width] = torch.tensor(
                    made, dtype=torch.float64
                )
                scales.reshape(-1, *scales.shape[-2:])[index, i // height, j // width] = scale
    return y, scales


def _int8(v: float) -> int:
    return min(max(round(v), -128), 127)


BLOCKS = [
    Case(
        "dynamic_block_quant",
        lambda x: npu.npu_dynamic_block_quant(x),
        (_spread(4, 130),),
        lambda x: _tiles(x, 1, 128, 127, _int8),
        rough=1e-6,
    ),
    Case(
        "dynamic_block_quant-float8",
        lambda x: as_bytes(
            npu.npu_dynamic_block_quant(
                x, dst_type=E4M3, row_block_size=2, col_block_size=8, min_scale=0.01
            )
        ),
        (_spread(2, 5, 12),),
        lambda x: _tiles(x, 2, 8, 448, lambda v: formats.nearest_code(v, "e4m3"), 0.01),
        rough=1e-6,
    ),
    Case(
        "dynamic_block_quant-hifloat8",
        lambda x: npu.npu_dynamic_block_quant(x, dst_type=HIF8, col_block_size=16),
        (_spread(3, 16),),
        lambda x: _tiles(x, 1, 16, 32768, formats.nearest_hifloat8),
        rough=1e-6,
    ),
    Case(
        "grouped_dynamic_block_quant",
        lambda x, g: as_bytes(
            npu.npu_grouped_dynamic_block_quant(
                x, g, row_block_size=2, col_block_size=8, group_list_type=1
            )
        ),
        (_spread(5, 12), torch.tensor([3, 0, 2], dtype=torch.int32)),
        lambda x, g: _grouped_tiles(x),
        rough=1e-6,
    ),
]


def _grouped_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = [
        _tiles(x[a:b], 2, 8, 57344, lambda v: formats.nearest_code(v, "e5m2"))
        for a, b in ((0, 3), (3, 5))
    ]
    scales = torch.zeros(5, 2, dtype=torch.float64)
    scales[0:2], scales[3:4] = parts[0][1], parts[1][1]
    return torch.cat([parts[0][0], parts[1][0]]), scales


CASES = [*MX, *BLOCKS]
