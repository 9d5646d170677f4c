"""Mixed precision on the device: which operators get their arguments cast, and to what.

The lists are torch's own for accelerators. Casts of parameters are not kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from torchair.emulate.kernels import overload
from torchair.emulate.state import DEVICE_TYPE

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
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
    "tensordot", "scatter_add",
]  # fmt: skip

_Choice = Callable[[list[torch.Tensor]], torch.dtype]


class Autocast:
    """The casts. They are registered for as long as this object lives."""

    def __init__(self) -> None:
        self._all = Library("_", "IMPL")
        self._all.fallback(fallthrough_kernel, KEY)
        self._aten = Library("aten", "IMPL", KEY)
        rules: list[tuple[list[str], _Choice]] = [
            (LOWER, lambda _: torch.get_autocast_dtype(DEVICE_TYPE)),
            (FLOAT32, lambda _: torch.float32),
            (WIDEST, _widest),
        ]
        for names, choose in rules:
            for name in names:
                self._aten.impl(name, _casting(overload(name), choose))
        self._aten.impl("binary_cross_entropy", _refuse)


def _casting(operator: Any, choose: _Choice) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
    given_dtype = any(a.name == "dtype" for a in operator._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        _collect([args, list(kwargs.values())], tensors)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
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


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, (list, tuple)):
        for member in tree:
            _collect(member, found)
    elif _castable(tree):
        found.append(tree)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(v, dtype) for v in value]
    return value.to(dtype) if _castable(value) else value


def _asks_for_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A caller who names the type of the result wants it so."""
    return isinstance(kwargs.get("dtype"), torch.dtype) or any(
        isinstance(a, torch.dtype) for a in args
    )


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    wide = any(t.dtype is torch.float32 for t in tensors)
    return torch.float32 if wide else torch.get_autocast_dtype(DEVICE_TYPE)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
        "use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
    )
