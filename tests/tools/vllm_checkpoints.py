"""Tiny checkpoints for vLLM, and what it generates with them in a process of its own.

`write` takes a folder with a model of float32 weights and writes two: one that is quantised, in a
format that tools of others write, and one of the numbers that its integers stand for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    initializer_range=0.2,
)  # large and untied: else each token is the one before, whatever attention does


def save_tiny(folder: Path, kind: str) -> Path:
    """A model of random weights, `llama` or `qwen3`."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    }[kind]()
    model.save_pretrained(folder)
    return folder


def generate(
    model: Path, cache: Path, *more: str, path: str | None = None, **options: Any
) -> dict[str, Any]:
    """What `vllm_run.py` prints; `path` is for programs, with no compiler where it is given."""
    environment = os.environ | {"VLLM_CACHE_ROOT": str(cache), "VLLM_LOGGING_LEVEL": "WARNING"}
    if path is not None:
        environment |= {"PATH": path, "CC": "", "CXX": ""}
    tool = Path(__file__).with_name("vllm_run.py")
    done = subprocess.run(
        [sys.executable, tool, model, json.dumps(options), *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- quantised weights ----

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours is where in an int32, from the lowest bits on."""


@dataclass
class Quantised:
    """A matrix [n, k] as integers from 0 on, with scales and zero points [n, groups]."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def numbers(self) -> Tensor:
        """What the integers stand for."""
        pieces = self.integers.unflatten(1, (self.scales.shape[1], -1)) - self.zeros[..., None]
        return (pieces * self.scales[..., None]).flatten(1)


def quantised(weight: Tensor, bits: int, group: int, symmetric: bool) -> Quantised:
    """The nearest integers."""
    pieces, top = weight.unflatten(1, (-1, group)), 2**bits - 1
    if symmetric:
        scales = pieces.abs().amax(2) / (top // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = pieces.amin(2), pieces.amax(2)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    integers = (pieces / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    return Quantised(integers.flatten(1), scales, zeros, bits)


def packed(integers: Tensor, bits: int, dim: int) -> Tensor:
    """Neighbours along a dim, as many as fit into an int32, the first in the lowest bits."""
    count = 32 // bits
    apart = integers.to(torch.int64).unflatten(dim, (-1, count)).movedim(dim + 1, -1)
    words = (apart << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


# ---- formats ----

Tensors = dict[str, Tensor]


def _compressed(q: Quantised) -> Tensors:
    made = {
        "weight_packed": packed(q.integers, q.bits, 1),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor(q.integers.shape),
    }
    if (q.zeros != q.zeros.flatten()[0]).any():
        made["weight_zero_point"] = packed(q.zeros, q.bits, 0)
    return made


def _gptq(q: Quantised) -> Tensors:
    return {
        "qweight": packed(q.integers.t(), q.bits, 0),
        "scales": q.scales.t().contiguous(),
        "qzeros": packed(q.zeros.t() - 1, q.bits, 1),  # as its first version stores them
    }


def _awq(q: Quantised) -> Tensors:
    def ordered(x: Tensor) -> Tensor:
        mixed = x.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
        return packed(mixed, q.bits, 1)

    return {
        "qweight": ordered(q.integers.t()),
        "qzeros": ordered(q.zeros.t()),
        "scales": q.scales.t().contiguous(),
    }


def _bytes(q: Quantised) -> Tensors:
    return {"weight": (q.integers - 128).to(torch.int8), "weight_scale": q.scales}


def _compressed_config(weights: dict[str, Any], inputs: Any, form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _weights(bits: int, symmetric: bool, group: int | None = GROUP) -> dict[str, Any]:
    found = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    return found | (
        {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    )


_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Format:
    """How a checkpoint is quantised and written."""

    tensors: Callable[[Quantised], Tensors]
    config: dict[str, Any]
    bits: int
    symmetric: bool = True
    group: int = GROUP  # 0: a row has one scale


FORMATS = {
    "compressed int4": Format(
        _compressed, _compressed_config(_weights(4, True), None, "pack-quantized"), 4
    ),
    "compressed int4, zero points": Format(
        _compressed, _compressed_config(_weights(4, False), None, "pack-quantized"), 4, False
    ),
    "compressed int8": Format(
        _compressed, _compressed_config(_weights(8, True), None, "pack-quantized"), 8
    ),
    "GPTQ int4": Format(
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
         "lm_head": False},
        4,
    ),
    "AWQ int4": Format(
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
         "version": "gemm"},
        4,
        False,
    ),
    "int8 x int8": Format(
        _bytes, _compressed_config(_weights(8, True, None), _ROWS, "int-quantized"), 8, group=0
    ),
}  # fmt: skip


def write(source: Path, folder: Path, form: Format) -> tuple[Path, Path]:
    """The folders of the quantised checkpoint and of the one with its numbers."""
    integers, numbers = folder / "integers", folder / "numbers"
    given = load_file(source / "model.safetensors")
    small, dense = dict(given), dict(given)
    for name, weight in given.items():
        if name.endswith("_proj.weight"):
            del small[name]
            made = quantised(weight, form.bits, form.group or weight.shape[1], form.symmetric)
            dense[name] = made.numbers
            head = name.removesuffix("weight")
            small |= {head + part: value for part, value in form.tensors(made).items()}
    for path, tensors in ((integers, small), (numbers, dense)):
        shutil.copytree(source, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = form.config
    (integers / "config.json").write_text(json.dumps(config))
    return integers, numbers
