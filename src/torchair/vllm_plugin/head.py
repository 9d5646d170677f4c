"""The product with the vocabulary, compiled.

vLLM computes logits outside of the graph that it compiles, with weights packed for oneDNN. Here the
product is compiled by itself, for any number of rows. The first call packs the weights, so that an
embedding that makes no logits costs nothing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.config import get_current_vllm_config_or_none

from torchair.configs.compiler_config import CompilerConfig
from torchair.deploy.compiled import CompiledModel
from torchair.vllm_plugin.platform import is_ours

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Projection(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class _AnyRows(CompiledModel):
    """One graph for all numbers of rows, a single one included."""

    from_two = False


class Logits:
    """What a layer calls for its logits, in the place of vLLM's `cpu_linear`."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._product: CompiledModel | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is not None or x.dim() != 2 or weight.dtype not in _DTYPES:
            return linear(x, weight, bias)
        if self._product is None or weight is not self._weight:
            self._weight, self._product = weight, _compiled(x, weight)
        result: Tensor = self._product(x)
        return result


def _compiled(x: Tensor, weight: Tensor) -> CompiledModel:
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    product = _Projection(nn.Parameter(weight, requires_grad=False))
    made = _AnyRows(product, config, {"x": [0]}, "error", {})
    made.add((x,), {})
    return made


def compile_logits(layers: ModuleType) -> None:
    """Give layers of models that torchair compiles a compiled product; `layers` is the module of
    vLLM that has them."""
    method: Any = layers.UnquantizedEmbeddingMethod
    given = method.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and is_ours(config) and not layer.weight.is_meta:
            layer.cpu_linear = Logits()  # type: ignore[assignment]
        else:
            given(self, layer)

    method.process_weights_after_loading = process_weights_after_loading
