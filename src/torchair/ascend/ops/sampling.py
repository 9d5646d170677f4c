"""Choosing the next token: logits outside of the top k and the top p masked, and a draw."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops.library import NpuOperators, like, refuse, wide, wrong

Tensor = torch.Tensor
OPERATORS = NpuOperators()


def _in_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits from the least to the largest, and their places."""
    found = torch.sort(logits, dim=-1, stable=True)
    return found.values, found.indices


def _without_small(values: Tensor, p: Tensor, is_logits: bool = True) -> Tensor:
    """Values in ascending order, masked where those up to them weigh no more than 1 - p."""
    weights = torch.softmax(values, -1) if is_logits else values.clamp(min=0)
    dropped = weights.cumsum(-1) <= 1 - p.to(values.dtype).unsqueeze(-1)
    dropped[..., -1] = False
    return values.masked_fill(dropped, -torch.inf)


@OPERATORS.add("npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor", like(0))
def top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """-inf where a logit is below the k-th largest of its row, and where the smallest ones together
    weigh no more than 1 - p. The largest stays."""
    values, places = _in_order(logits.to(wide(logits.dtype)))
    if k is not None:
        width = values.shape[-1]
        least = values.gather(-1, (width - k.to(torch.int64)).clamp(0, width - 1).unsqueeze(-1))
        values = values.masked_fill(values < least, -torch.inf)
    if p is not None:
        values = _without_small(values, p)
    return torch.empty_like(values).scatter_(-1, places, values).to(logits.dtype)


_NAME = "npu_top_k_top_p_sample"


def _fake_sample(
    logits: Any,
    top_k: Any,
    top_p: Any,
    q: Any = None,
    eps: float | None = 1e-8,
    is_need_logits: bool | None = False,
    *rest: Any,
    **more: Any,
) -> Any:
    shown = logits.shape if is_need_logits else [0]
    return (
        logits.new_empty([logits.shape[0]], dtype=torch.int64),
        logits.new_empty(shown, dtype=torch.float32),
    )


@OPERATORS.add(
    f"{_NAME}(Tensor logits, Tensor top_k, Tensor top_p, Tensor? q=None, float? eps=1e-8, "
    "bool? is_need_logits=False, int? top_k_guess=32, Tensor? min_ps=None, int? ks_max=1024, "
    "bool? input_is_logits=True, str? post_sample='qSample', Generator? generator=None) "
    "-> (Tensor, Tensor)",
    _fake_sample,
)
def top_k_top_p_sample(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    q: Tensor | None = None,
    eps: float | None = 1e-8,
    is_need_logits: bool | None = False,
    top_k_guess: int | None = 32,
    min_ps: Tensor | None = None,
    ks_max: int | None = 1024,
    input_is_logits: bool | None = True,
    post_sample: str | None = "qSample",
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    """A token for each row, among those that top k, top p and min p leave: the one of the largest
    weight over `q` (numbers of an exponential distribution), or the largest without `q`. The
    second result are the masked logits.

    No random numbers are drawn here, so `generator` has no effect. A `top_k` outside of 1 to
    `ks_max` and a `top_p` of 1 or more mask nothing.
    """
    if post_sample not in ("qSample", "None", None):
        raise refuse(_NAME, "post_sample", f"{post_sample!r} draws random numbers; give q")
    if top_k.shape[0] != logits.shape[0] or top_p.shape[0] != logits.shape[0]:
        raise wrong(_NAME, "top_k", f"and top_p have one number for each of {logits.shape[0]} rows")
    source, is_logits = logits.to(wide(logits.dtype)), input_is_logits is not False
    values, places = _in_order(source)
    width = values.shape[-1]
    limit = min(width, 1024 if ks_max is None else ks_max)
    k = top_k.to(torch.int64)
    k = torch.where((k >= 1) & (k <= limit), k, width)
    index = torch.arange(width, device=logits.device)
    values = values.masked_fill(index < (width - k).unsqueeze(-1), -torch.inf)
    p = torch.where(top_p >= 1, torch.full_like(top_p, 2), top_p).to(values.dtype)
    values = _without_small(values, p, is_logits)
    if min_ps is not None:
        weights = torch.softmax(values, -1) if is_logits else values
        least = weights[..., -1:] * min_ps.to(weights.dtype).clamp(max=1).unsqueeze(-1)
        values = values.masked_fill(weights < least, -torch.inf)
    masked = torch.empty_like(values).scatter_(-1, places, values)
    weights = torch.softmax(masked, -1) if is_logits else masked.clamp(min=0)
    if q is not None and post_sample == "qSample":
        weights = weights / (q.to(weights.dtype).abs() + (eps or 0.0))
    shown = masked.to(torch.float32) if is_need_logits else masked.new_empty(0, dtype=torch.float32)
    return weights.argmax(-1), shown
