"""What torch chooses by the kind of device: the kernel of attention, types of mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from torchair.ascend.emulate.kernels import overload
from torchair.ascend.emulate.state import DEVICE_TYPE
from torchair.fx.forms import tensors_in
from torchair.torch_private.dispatch import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard
from torchair.torch_private.functions import flash_sdp_enabled, fused_sdp_choice

# ---- attention: the CPU's fused kernel where the CPU would, which torch does not know of here ----


_aten = torch.ops.aten
_attention = _aten.scaled_dot_product_attention.default
_fused = _aten._scaled_dot_product_flash_attention_for_cpu.default
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_KEYS = ("AutogradPrivateUse1", "PrivateUse1")
_FLASH = 1  # torch's number for the fused kernel


def register_attention() -> list[Library]:
    """The kernel, registered for as long as these libraries live; above autograd, since it is made
    of operators that have gradients."""
    takes_groups()  # now: a tracer would ask with tensors that have no memory
    libraries = [Library("aten", "IMPL", key) for key in _KEYS]
    for library in libraries:
        library.impl("scaled_dot_product_attention", attention)
    return libraries


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The fused kernel, or torch's own way to do without."""
    both = is_causal and attn_mask is not None  # an error that torch explains
    if both or not suits(query, key, value, attn_mask, dropout_p, enable_gqa):
        return _attention._op_dk(
            _COMPOSITE,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        lowest = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, lowest)
    return _fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def suits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> bool:
    """What torch chooses for the same tensors on the CPU, from dims, strides and types alone: those
    that a tracer holds have no memory to ask about."""
    tensors = (query, key, value)
    if dropout_p > 0 or not flash_sdp_enabled():
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
    return bool(fused_sdp_choice(q, k, k, enable_gqa=True) == _FLASH)


# ---- mixed precision, by torch's own lists; casts of parameters are not kept between calls ----


KEY = "AutocastPrivateUse1"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]

LOWER = [
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm",
    "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention",
]  # fmt: skip

FLOAT32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm.Scalar", "norm.ScalarOpt_dim", "prod",
    "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
]  # fmt: skip

WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]

_DtypeChoice = Callable[[list[torch.Tensor]], torch.dtype]


def register_autocast() -> list[Library]:
    """The casts, registered for as long as these libraries live."""
    everything, aten = Library("_", "IMPL"), Library("aten", "IMPL", KEY)
    everything.fallback(fallthrough_kernel, KEY)
    rules: list[tuple[list[str], _DtypeChoice]] = [
        (LOWER, lambda _: torch.get_autocast_dtype(DEVICE_TYPE)),
        (FLOAT32, lambda _: torch.float32),
        (WIDEST, _widest),
    ]
    for names, choose in rules:
        for name in names:
            aten.impl(name, _casting(overload(name), choose))
    aten.impl("binary_cross_entropy", _refuse)
    return [everything, aten]


def _casting(operator: Any, choose: _DtypeChoice) -> Callable[..., Any]:
    excluded = DispatchKeySet(getattr(DispatchKey, KEY))
    given_dtype = any(a.name == "dtype" for a in operator._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tensors_in([args, list(kwargs.values())]) if _castable(t)]
        with ExcludeDispatchKeyGuard(excluded):
            if not tensors or (given_dtype and _asks_for_type(args, kwargs)):
                return operator(*args, **kwargs)
            dtype = choose(tensors)
            cast = [_cast(a, dtype) for a in args]
            return operator(*cast, **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return run


def _castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == DEVICE_TYPE
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(v, dtype) for v in value]
    return value.to(dtype) if _castable(value) else value


def _asks_for_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A caller who names the type of the result wants it so."""
    return any(isinstance(a, torch.dtype) for a in (*args, kwargs.get("dtype")))


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    wide = any(t.dtype is torch.float32 for t in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype(DEVICE_TYPE)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
        "use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
    )
