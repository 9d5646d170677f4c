"""Fused operators of the `npu` library that run as generated code: plans without a torch kernel,
values of the library's own kernels."""

from __future__ import annotations

import pytest
import torch

from compiling import compiled
from lane_tools import Sessions
from npu_cases import npu

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
TOKENS, CHOICES, WIDTH, EXPERTS = 6, 3, 8, 4


def routed(kind: torch.dtype) -> list[torch.Tensor]:
    rows = TOKENS * CHOICES
    places = torch.randperm(rows).int()
    places[0] = rows + 5  # held at the last row
    return [
        torch.randn(rows, WIDTH).to(kind),
        torch.randn(TOKENS, WIDTH).to(kind),
        torch.randn(EXPERTS, WIDTH).to(kind),
        torch.rand(TOKENS, CHOICES),
        places,
        torch.randint(EXPERTS, (TOKENS, CHOICES)).int(),
    ]


def finalized(x, skip, bias, scales, places, experts):
    """By columns with all operands, by rows without skips, and without scales."""
    one = places[:TOKENS].clone()
    return (
        npu.npu_moe_finalize_routing(x, skip, skip, bias, scales, places, experts),
        npu.npu_moe_finalize_routing(x, None, None, None, scales, places, experts, 2),
        npu.npu_moe_finalize_routing(x, skip, None, None, None, one, None),
    )


def gated(x, columns, rows, smooth):
    """Halves in both orders, with and without scales of columns; floats as they are."""
    scales = {"weight_scale": columns, "activation_scale": rows, "quant_mode": 1}
    return (
        *npu.npu_dequant_swiglu_quant(x, **scales, activate_left=True),
        *npu.npu_dequant_swiglu_quant(x, **scales, quant_scale=smooth),
        *npu.npu_dequant_swiglu_quant(x.float(), quant_mode=1),
    )


def permuted(x, weight):
    first = npu.npu_transpose_batchmatmul(x, weight, perm_x1=[1, 0, 2])
    turned = weight.transpose(1, 2).contiguous()
    return first, npu.npu_transpose_batchmatmul(x, turned, perm_x1=[1, 0, 2], perm_x2=[0, 2, 1])


def integers() -> list[torch.Tensor]:
    x = torch.randint(-5000, 5000, (5, 32), dtype=torch.int32)
    x[2] = 0  # a row of zeros has the scale 1
    return [x, torch.rand(32) * 1e-2, torch.rand(5) * 1e-1, torch.rand(16)]


@pytest.mark.parametrize(
    "function, given, near",
    [
        (finalized, routed(torch.float32), 1e-5),
        (finalized, routed(torch.bfloat16), 2e-2),
        (gated, integers(), 1e-5),
        (permuted, [torch.randn(3, 4, 16), torch.randn(4, 16, 8)], 1e-5),
    ],
    ids=["finalized", "finalized-bf16", "gated", "permuted"],
)
def test_plans_are_native(function, given, near, monkeypatch):
    sessions = Sessions(monkeypatch)
    with torch.no_grad():
        found, wanted = compiled(function, dynamic=False)(*given), function(*given)
    for got, expected in zip(found, wanted, strict=True):
        assert got.dtype == expected.dtype
        # Integers may be one apart where a quotient lies between two.
        whole = 1.0 if got.dtype == torch.int8 else near
        torch.testing.assert_close(got.double(), expected.double(), rtol=near, atol=whole)
    assert {step.kind for step in sessions.plan.steps} <= {"native", "view"}
