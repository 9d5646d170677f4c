"""The models that are measured, with what the CPU engine is to reach on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import common  # noqa: F401  puts the models on the path
from models import (
    BERT,
    LLAMA,
    MLP,
    RESNET,
    Bert,
    Llama,
    Mlp,
    ResNet,
    bert_inputs,
    build,
    llama_inputs,
    mlp_inputs,
    resnet_inputs,
)


@dataclass(frozen=True)
class Workload:
    """A model and the inputs of one call.

    `reach` is how many times faster than its best rival the engine is to be. Where `compiled` is
    set only other compilers are rivals: such a small call is one through torch.compile, and a
    runtime that is called without its guards does something else.
    """

    kind: type[torch.nn.Module]
    config: Any
    inputs: Callable[[Any], tuple[torch.Tensor, ...]]
    dtype: torch.dtype = torch.float32
    reach: float = 1.0
    compiled: bool = False

    def build(
        self, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """The model and its inputs, on a device and, if wanted, in another type."""
        dtype = dtype or self.dtype
        inputs = tuple(
            x.to(device, dtype if x.is_floating_point() else None) for x in self.inputs(self.config)
        )
        return build(self.kind, self.config).to(device, dtype), inputs


def _one_row(config: Any) -> tuple[torch.Tensor, ...]:
    return mlp_inputs(config, batch=1)


def _sentence(config: Any) -> tuple[torch.Tensor, ...]:
    return bert_inputs(config, 1, 128)


def _image(config: Any) -> tuple[torch.Tensor, ...]:
    return resnet_inputs(config, 1)


def _decode(config: Any) -> tuple[torch.Tensor, ...]:
    return llama_inputs(config, 1, start=128)


def _prefill(config: Any) -> tuple[torch.Tensor, ...]:
    return llama_inputs(config, 128)


_HALF = torch.bfloat16

WORKLOADS = {
    "tiny MLP b1": Workload(Mlp, MLP["16 layers"], _one_row, compiled=True),
    "Llama tiny decode": Workload(Llama, LLAMA["4 layers"], _decode, reach=3.0),
    "Llama 100M decode": Workload(Llama, LLAMA["100M"], _decode),
    "Llama 100M decode bf16": Workload(Llama, LLAMA["100M"], _decode, _HALF, reach=1.5),
    "encoder b1 t128": Workload(Bert, BERT["base"], _sentence),
    "encoder b1 t128 bf16": Workload(Bert, BERT["base"], _sentence, _HALF),
    "ResNet-18 b1": Workload(ResNet, RESNET["18"], _image, reach=0.97),
    "Llama 100M prefill t128": Workload(Llama, LLAMA["100M"], _prefill),
    "Llama 100M prefill t128 bf16": Workload(Llama, LLAMA["100M"], _prefill, _HALF),
}


def chosen(part: str | None) -> dict[str, Workload]:
    """Workloads whose name contains a text, all without one."""
    return {k: w for k, w in WORKLOADS.items() if part is None or part.lower() in k.lower()}
