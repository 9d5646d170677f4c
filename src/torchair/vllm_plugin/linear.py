"""Linear layers that stay `torch.nn.functional.linear` on the weights of the checkpoint.

vLLM packs the weights of linear layers for oneDNN and calls an operator that no compiler looks
into. A layer with the attribute `_cpu_skip_gemm_dispatch` keeps `F.linear`: then the product, what
is added to it and the activation after it are kernels of ours, on weights that we pack.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase

from torchair.vllm_plugin.platform import is_ours

ATTRIBUTE = "_cpu_skip_gemm_dispatch"


class _ForOurModels:
    """True for layers of models that torchair compiles. A layer's own attribute goes first."""

    def __get__(self, layer: Any, owner: type) -> bool:
        config = get_current_vllm_config_or_none()
        return layer is not None and config is not None and is_ours(config)


def keep_weights() -> None:
    """Let all linear layers ask."""
    if ATTRIBUTE not in vars(LinearBase):
        setattr(LinearBase, ATTRIBUTE, _ForOurModels())
