"""`scaled_dot_product_attention` on the device takes the CPU's fused kernel where the CPU would.

Torch chooses by the type of the device and knows nothing better than plain products for this one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.library import Library

from torchair.emulate.memory import as_cpu

Tensor = torch.Tensor

_aten = torch.ops.aten
_attention = _aten.scaled_dot_product_attention.default
_fused = _aten._scaled_dot_product_flash_attention_for_cpu.default
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KEYS = ("AutogradPrivateUse1", "PrivateUse1")
_FLASH = 1  # torch's number for the fused kernel


class AttentionKernel:
    """The kernel, registered for as long as this object lives; above autograd, since it is made of
    operators that have gradients."""

    def __init__(self) -> None:
        takes_groups()  # now: a tracer would ask with tensors that have no memory
        self._libraries = [Library("aten", "IMPL", key) for key in _KEYS]
        for library in self._libraries:
            library.impl("scaled_dot_product_attention", attention)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The fused kernel, or torch's own way to do without."""
    choose = suits if _is_traced(query) else _suits_cpu
    both = is_causal and attn_mask is not None  # an error that torch explains
    if both or not choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        made: Tensor = _attention._op_dk(
            _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return made
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        lowest = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, lowest)
    result: Tensor = _fused(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


def _is_traced(tensor: Tensor) -> bool:
    """Whether there is no memory to ask about."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _suits_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> bool:  # fmt: skip
    """What torch chooses for the same tensors on the CPU."""
    if mask is not None and mask.requires_grad:
        return False
    q, k, v = (as_cpu(t) for t in (query, key, value))
    choice = torch._fused_sdp_choice(
        q, k, v, None if mask is None else as_cpu(mask), dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    return bool(choice == _FLASH)


def suits(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> bool:  # fmt: skip
    """The same from dims, strides and types alone, for tensors that a tracer holds."""
    tensors = (query, key, value)
    if dropout_p > 0 or not torch._C._get_flash_sdp_enabled():
        return False
    if any(t.dim() != 4 for t in tensors) or query.dtype not in _DTYPES:
        return False
    if any(t.dtype is not query.dtype or t.shape[0] != query.shape[0] for t in tensors):
        return False
    if any(t.shape[3] != query.shape[3] for t in tensors) or not _heads_suit(*tensors, enable_gqa):
        return False
    if query.shape[2] == 0 or key.shape[2] == 0:
        return False
    if query.shape[3] != 1 and any(t.stride(3) != 1 for t in tensors):
        return False
    return mask is None or _mask_suits(query, key, mask)


def _heads_suit(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    heads, ours, theirs = query.shape[1], key.shape[1], value.shape[1]
    if enable_gqa and takes_groups():
        return ours == theirs and heads % ours == 0
    return heads == ours == theirs


def _mask_suits(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return all(m == 1 or m == w for m, w in zip(mask.shape, wanted, strict=True))


@cache
def takes_groups() -> bool:
    """Whether the CPU's fused kernel takes fewer heads of keys than of queries."""
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 1, 8)
    choice: Any = torch._fused_sdp_choice(q, k, k, enable_gqa=True)
    return bool(choice == _FLASH)
