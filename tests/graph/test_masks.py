"""Masks of attention that are laid out for fused kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torchair
from torchair.fx import masks

KEYS = 24


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(masks, "_DEVICES", ("cpu",))


def expanded(x: Tensor) -> Tensor:
    """Each row is one value."""
    shown = torch.arange(x.shape[2])[None, None, :, None] > 3
    return shown.expand(x.shape[0], -1, x.shape[2], KEYS)


def plain(x: Tensor) -> Tensor:
    return expanded(x).clone()


def attend(q: Tensor, k: Tensor, made: Any) -> Tensor:
    mask = made(q)
    first = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    return F.scaled_dot_product_attention(first, k, k, mask)


def copies(made: Any, dtype: torch.dtype) -> tuple[int, int, bool]:
    """How many masks were copied, how many nodes read a copy, and whether the results are right."""
    found: list[tuple[int, int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        count = masks.lay_out_masks(gm)
        nodes = gm.graph.find_nodes(op="call_method", target="contiguous")
        for node in nodes:
            assert node.meta["example_value"].is_contiguous()
        found.append((count, sum(len(n.users) for n in nodes)))
        return gm.forward

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 16, 8, dtype=dtype), torch.randn(2, 3, KEYS, 8, dtype=dtype)
    got = torch.compile(attend, backend=backend)(q, k, made)
    return *found[0], torch.equal(got, attend(q, k, made))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expanded_masks_are_copied(dtype: torch.dtype) -> None:
    assert copies(expanded, dtype) == (2, 2, True)


def test_masks_are_copied_after_they_are_written() -> None:
    def hidden(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        own = torch.zeros(KEYS, q.shape[2], dtype=q.dtype).t()
        own.masked_fill_(mask, -1e4)
        first = F.scaled_dot_product_attention(q, k, k, attn_mask=own)
        own.masked_fill_(~mask, -1e4)
        return first + F.scaled_dot_product_attention(q, k, k, attn_mask=own)

    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 16, 8).bfloat16(), torch.randn(2, 3, KEYS, 8).bfloat16()
    mask = torch.rand(16, KEYS) > 0.5
    counts: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(masks.lay_out_masks(gm))
        return gm.forward

    got = torch.compile(hidden, backend=backend)(q, k, mask)
    assert counts == [2]
    torch.testing.assert_close(got, hidden(q, k, mask))


@pytest.mark.parametrize("made, dtype", [(plain, torch.bfloat16), (expanded, torch.float32)])
def test_others_stay(made: Any, dtype: torch.dtype) -> None:
    assert copies(made, dtype) == (0, 0, True)


@pytest.mark.parametrize("strict, count", [(False, 2), (True, 0)])
def test_strict_numerics_leave_masks(
    strict: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel rounds in another way than products and a softmax."""
    seen: list[int] = []
    before = masks.lay_out_masks
    monkeypatch.setattr(masks, "lay_out_masks", lambda gm: seen.append(before(gm)))
    config = torchair.CompilerConfig()
    config.numerics = "strict" if strict else "default"
    backend = torchair.get_npu_backend(compiler_config=config)
    q, k = torch.randn(2, 3, 16, 8).bfloat16(), torch.randn(2, 3, KEYS, 8).bfloat16()
    with torch.no_grad():
        got = torch.compile(attend, backend=backend, dynamic=False)(q, k, expanded)
        torch.testing.assert_close(got, attend(q, k, expanded), atol=3e-2, rtol=3e-2)
    assert sum(seen) == count
