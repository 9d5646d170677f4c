"""vLLM's two operators of attention over the paged cache, called with less Python around them.

vLLM's own functions look the layer up, cut the cache into keys and values and go through several
wrappers, twice in each layer of each step. The compiled functions at the end are the same here;
the views of the cache are made once. What these functions do not know goes to vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops  # noqa: F401  (loads the library of compiled functions)
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from torchair.operators.generic import call_directly


@dataclass(frozen=True)
class _Layer:
    """A layer with its cache as the compiled functions take it."""

    cache: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    isa: str
    scales: tuple[float, float, str]  # of keys and values, and the type of the cache
    scale: float
    window: int
    softcap: float

    @classmethod
    def of(cls, layer: Any) -> _Layer | None:
        """None for a layer that vLLM's own functions must serve."""
        impl, cache = layer.impl, layer.kv_cache
        plain = type(impl) is CPUAttentionBackendImpl and impl.attn_type == AttentionType.DECODER
        if not plain or impl.alibi_slopes is not None or impl.sinks is not None:
            return None
        if impl.is_fp8_kv_cache:  # its scales may still change
            return None
        if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
            return None
        blocks, heads, size, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        scales = layer._k_scale_float, layer._v_scale_float, impl.kv_cache_dtype
        rest = impl.scale, impl.sliding_window, impl.logits_soft_cap
        return cls(cache, keys, values, layer.isa, scales, *rest)


_layers: dict[str, _Layer] = {}


def _found(name: str, context: Any) -> _Layer | None:
    """The layer of that name, as long as its cache is the one that was seen."""
    layer = context.no_compile_layers[name]
    known = _layers.get(name)
    if known is not None and known.cache is layer.kv_cache:
        return known
    made = _Layer.of(layer)
    if made is not None:
        _layers[name] = made
    return made


def update_cache(key: torch.Tensor, value: torch.Tensor, layer_name: Any) -> torch.Tensor:
    """`vllm::unified_kv_cache_update`."""
    name, context = getattr(layer_name, "value", layer_name), get_forward_context()
    slots, layer = context.slot_mapping.get(name), _found(name, context)
    if slots is None or layer is None:
        return attention.unified_kv_cache_update(key, value, layer_name)
    _write(key, value, layer.keys, layer.values, slots, layer.isa, *layer.scales)
    return key.new_empty(0)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: Any,
    *more: Any,
) -> None:
    """`vllm::unified_attention_with_output`."""
    name, context = getattr(layer_name, "value", layer_name), get_forward_context()
    found, layer = context.attn_metadata, _found(name, context)
    metadata = found.get(name) if type(found) is dict else None
    scaled = any(scale is not None for scale in more[:2])
    if metadata is None or layer is None or scaled or has_kv_transfer_group():
        attention.unified_attention_with_output(query, key, value, output, layer_name, *more)
        return
    count = metadata.num_actual_tokens
    if count != query.shape[0]:
        query, output = query[:count], output[:count]
    _attend(
        query,
        layer.keys,
        layer.values,
        output,
        metadata.query_start_loc,
        metadata.seq_lens,
        layer.scale,
        metadata.causal,
        None,
        layer.window,
        metadata.block_table,
        layer.softcap,
        metadata.scheduler_metadata,
        None,
        metadata.dynamic_causal,
        *layer.scales,
    )


_write = torch.ops._C.cpu_attn_reshape_and_cache.default
_attend = torch.ops._C.cpu_attention_with_kv_cache.default


def call_compiled_functions() -> None:
    """Let compiled graphs call these."""
    call_directly("vllm::unified_kv_cache_update", update_cache)
    call_directly("vllm::unified_attention_with_output", attend)
