"""Training steps on a GPU: models of transformers in sizes that people train, and what a step is.

A step clears the gradients, computes the loss under bfloat16 autocast, goes backward and updates
with AdamW, fused as torch has it. Everyone trains a copy of the same model on the same batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from contestants import Contestant

Step = Callable[[], Tensor]
Batch = dict[str, Tensor]
FIRST = 4  # steps of which the losses are compared
_RATE = 1e-4


@dataclass(frozen=True)
class Recipe:
    """A model of transformers with what its configuration changes, and the shape of a batch."""

    config: str
    model: str
    batch: tuple[int, ...]  # of tokens, or of pictures with three channels
    changes: dict[str, Any] = field(default_factory=dict)

    def build(self, device: str) -> tuple[nn.Module, Batch]:
        """The model, ready to learn, and a batch."""
        import transformers

        torch.manual_seed(0)
        settings = getattr(transformers, self.config)(**self.changes)
        with torch.device(device):
            net = getattr(transformers, self.model)(settings).to(device).train()
            net.loss_function = net.loss_function  # else some warn in every step that they guess it
            if len(self.batch) == 2:
                tokens = torch.randint(settings.vocab_size, self.batch)
                return net, {"input_ids": tokens, "labels": tokens}
            labels = torch.randint(settings.num_labels, self.batch[:1])
            return net, {"pixel_values": torch.randn(self.batch), "labels": labels}


_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "use_cache": False,
}
RECIPES = {
    "train BERT 6 layers b16 t128": Recipe(
        "BertConfig", "BertForMaskedLM", (16, 128), {"num_hidden_layers": 6, **_CALM}
    ),
    "train BERT 6 layers b16 t128 dropout": Recipe(
        "BertConfig", "BertForMaskedLM", (16, 128), {"num_hidden_layers": 6}
    ),
    "train GPT-2 6 layers b8 t256": Recipe(
        "GPT2Config", "GPT2LMHeadModel", (8, 256), {"n_layer": 6, **_STILL}
    ),
    "train ResNet-50 b32": Recipe(
        "ResNetConfig", "ResNetForImageClassification", (32, 3, 224, 224), {"num_labels": 1000}
    ),
    "train ViT-B 6 layers b32": Recipe(
        "ViTConfig", "ViTForImageClassification", (32, 3, 224, 224),
        {"num_hidden_layers": 6, "num_labels": 1000, **_CALM},
    ),
    "train Llama 4 layers b4 t512": Recipe("LlamaConfig", "LlamaForCausalLM", (4, 512), _LLAMA),
}  # fmt: skip


class Learner(nn.Module):
    """A model that returns its loss, called with the values of a batch."""

    def __init__(self, net: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *values: Tensor) -> Tensor:
        return self.net(**dict(zip(self.names, values, strict=True))).loss


@dataclass
class Trained:
    """A copy of a model that a contestant trains: its step, and the losses of the first ones."""

    step: Step
    losses: list[float]


def prepared_step(one: Contestant, recipe: Recipe, device: str = "cuda") -> Trained:
    """A contestant with its first steps behind it."""
    net, batch = recipe.build(device)
    model, values = Learner(net, tuple(batch)), tuple(batch.values())
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=fused, capturable=fused)
    loss_of, context = one.prepare, functools.partial(_autocast, device)
    with context():
        call = loss_of(model, values)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = call()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trained(step, [step().item() for _ in range(FIRST)])


def _autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16)


def by_hand(trained: Trained) -> Trained:
    """A whole step, optimizer included, recorded into a CUDA graph and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trained.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = trained.step()

    def step(keep: Step = trained.step) -> Tensor:  # the graph holds addresses of its model only
        graph.replay()
        return loss

    return Trained(step, trained.losses)


# ---- memory


def private_pools() -> int:
    """Bytes that CUDA graphs hold beside tensors that are alive, of all graphs there are."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory._snapshot()["segments"]
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


@dataclass(frozen=True)
class Memory:
    """What was allocated before a contestant was prepared."""

    allocated: int
    private: int

    @classmethod
    def now(cls) -> Memory:
        """What is allocated now."""
        return cls(torch.cuda.memory_allocated(), private_pools())

    def peak(self, call: Callable[[], Any]) -> int:
        """Bytes that a contestant needs in calls: at their peak, with what stays between them, and
        with memory of its graphs, which replays use without allocating it. What other contestants
        hold does not count."""
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - self.allocated
        return most + max(0, private_pools() - self.private)
