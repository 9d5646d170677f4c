"""Attention in training on a CPU: its gradient as products, and products of matrices that lie in
batches of batches, as heads of sequences do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiling import compiled
from native_check import capture, native_types
from tolerance import assert_close
from torchair.convert import attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def attended(**options: Any) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), **options)
        return made.transpose(1, 2).flatten(2)

    return forward


def gradients(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in given]
    y = run(*given)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), *(t.grad for t in given if t.grad is not None)]


def check_gradients(forward: Callable[..., Tensor], given: list[Tensor], native: bool) -> None:
    """Gradients are as good as eager's, and those of attention are native products, or torch's."""
    with capture() as found:
        got = gradients(compiled(forward), given)
    truth = gradients(forward, [t.double() for t in given])
    eager = gradients(forward, given)
    assert_close(got, eager, truth)
    assert [t.stride() for t in got] == [t.stride() for t in eager]
    _, backward = found
    backward.check_units()
    steps = [s.node.type for s in backward.plan.steps if s.kind in ("out", "call", "late")]
    assert steps == ([] if native else ["TorchCall"])
    assert ("BatchMatMul" in native_types(backward.plan)) is native


def tokens(queries: int = 21, keys: int = 21, width: int = 32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, n, width) for n in (queries, keys, keys)]


@pytest.mark.parametrize("width", [32, 140])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"]
)
def test_gradient_of_attention(options: dict[str, Any], width: int) -> None:
    check_gradients(attended(**options), tokens(width=width), native=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(5, 37), (37, 5)])
def test_gradient_of_attention_to_other_tokens(queries: int, keys: int, causal: bool) -> None:
    check_gradients(attended(is_causal=causal), tokens(queries, keys), native=True)


def test_large_scores_are_hidden_from_queries_before_them() -> None:
    """Exponentials of scores that no query sees may overflow."""
    q, k, v = tokens()
    k[:, -1] *= 1e4
    check_gradients(attended(is_causal=True), [q, k, v], native=True)


def test_gradient_with_a_mask_is_that_of_torch() -> None:
    mask = torch.randn(21, 21)
    check_gradients(lambda *t: attended(attn_mask=mask.to(t[0].dtype))(*t), tokens(), native=False)


def test_gradient_of_many_scores_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORES", 4 * 21 * 21 - 1)
    check_gradients(attended(), tokens(), native=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_products_of_heads_are_native(dynamic: bool, dtype: torch.dtype) -> None:
    """Matrices of heads and of sequences are apart by two strides."""

    def forward(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b = heads(q), heads(k)
        return a @ w, w.mT @ b, torch.einsum("bhmd,bhnd->bhmn", a, b)

    def given(batch: int, n: int) -> list[Tensor]:
        made = torch.randn(batch, n, 48), torch.randn(batch, n, 48), torch.randn(batch, 4, 12, 12)
        return [t.to(dtype) for t in made]

    run = compiled(forward, dynamic=dynamic)
    for sizes in [(3, 12), (2, 12)] if dynamic else [(3, 12)]:
        now = given(*sizes)
        assert_close(run(*now), forward(*now), forward(*(t.double() for t in now)))
