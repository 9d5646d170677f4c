"""Training steps against eager and inductor: forward, loss, backward and optimizer of 20 models.

The contestants train copies of one model in this process and take turns; the best window's median
counts. Memory is the peak of a step beyond parameters and optimizer, each contestant in a process
of its own. Models of timm and diffusers take part where these are installed (`make trainers`,
`pip install --no-deps timm`).
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common import (
    console,
    duration,
    has_inductor,
    in_process,
    interleaved,
    ratio,
    resident,
    table,
    warn_if_busy,
)
from contestants import APART, torchair_backend
from memory import forget_peak
from vision import model_and_picture, timm

Inputs = dict[str, Tensor]
Step = Callable[[], Tensor]
WAYS = ("eager", "inductor", "torchair")
_SEED = 0


@dataclass(frozen=True)
class Setting:
    """How all contestants train."""

    autocast: bool = False
    channels_last: bool = False

    def flags(self) -> list[str]:
        """The options of this program that ask for it."""
        chosen = {"--autocast": self.autocast, "--channels-last": self.channels_last}
        return [flag for flag, on in chosen.items() if on]


@dataclass(frozen=True)
class Entry:
    """A model to train: how to build it, what a step is called with, and the package it needs."""

    build: Callable[[], tuple[nn.Module, Inputs]]
    needs: str = ""

    def missing(self) -> bool:
        """Whether the package is not installed."""
        if self.needs == "timm":
            return not has_timm()
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


@functools.cache
def has_timm() -> bool:
    """Whether the package timm is installed, which a benchmark has the name of."""
    try:
        return timm() is not None
    except ImportError:
        return False


# ---- models


class LayerNormMlp(nn.Module):
    """Linear layers with layer norms and GELU in between."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        block = (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        self.body = nn.Sequential(*(copy.deepcopy(m) for _ in range(layers) for m in block))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


class ConvNet(nn.Module):
    """Convolutions with batch norm and ReLU."""

    def __init__(self, channels: int = 32, layers: int = 4) -> None:
        super().__init__()
        made: list[nn.Module] = []
        for k in range(layers):
            made += [nn.Conv2d(channels if k else 3, channels, 3, padding=1, bias=False)]
            made += [nn.BatchNorm2d(channels), nn.ReLU()]
        self.body, self.head = nn.Sequential(*made), nn.Linear(channels, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


class Classifier(nn.Module):
    """A network for pictures with a cross-entropy loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


class Denoiser(nn.Module):
    """A UNet of diffusers that learns to predict the noise."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.net(sample, timestep).sample, noise)


def _mlp() -> tuple[nn.Module, Inputs]:
    return LayerNormMlp(), {"x": torch.randn(64, 256)}


def _convolutions() -> tuple[nn.Module, Inputs]:
    return ConvNet(), {"x": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}


_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WIDE = {**_SIZES, "intermediate_size": 1024, "vocab_size": 8000}
LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertConfig", "BertForMaskedLM", {**_WIDE, **_OFF}),
    "GPT-2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {**_WIDE, "num_key_value_heads": 2}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_WIDE, "num_key_value_heads": 2}),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _WIDE),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_SIZES, "ffn_dim": 1024, "vocab_size": 8000, "dropout": 0.0},
    ),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4}
        | {"vocab_size": 8000, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "ELECTRA": ("ElectraConfig", "ElectraForMaskedLM", {**_WIDE, **_OFF}),
}
VISION_MODELS = (
    "resnet18",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "convnext_atto",
    "regnetx_002",
    "densenet121",
    "repvgg_a0",
    "vit_tiny_patch16_224",
    "mixer_s16_224",
)


def _language(config: str, model: str, settings: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    import transformers

    net = getattr(transformers, model)(getattr(transformers, config)(**settings))
    tokens = torch.randint(8000, (4, 64))
    return net, {"input_ids": tokens, "labels": tokens}


def _vision(name: str) -> tuple[nn.Module, Inputs]:
    net, picture = model_and_picture(name)
    return Classifier(net), {"x": picture.repeat(4, 1, 1, 1), "labels": torch.randint(10, (4,))}


def _unet() -> tuple[nn.Module, Inputs]:
    import diffusers

    net = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    sample = torch.randn(2, 3, 32, 32)
    return Denoiser(net), {
        "sample": sample,
        "timestep": torch.tensor([3, 700]),
        "noise": torch.randn_like(sample),
    }


ENTRIES: dict[str, Entry] = {
    "MLP with layer norms": Entry(_mlp),
    "4 convolutions, batch norm": Entry(_convolutions),
    **{
        name: Entry(functools.partial(_language, *row), "transformers")
        for name, row in LANGUAGE_MODELS.items()
    },
    **{name: Entry(functools.partial(_vision, name), "timm") for name in VISION_MODELS},
    "UNet2DModel": Entry(_unet, "diffusers"),
}


# ---- steps


def training_step(name: str, way: str, setting: Setting) -> Step:
    """One training step of a model in one way, the first two calls done."""
    torch.manual_seed(_SEED)
    model, inputs = ENTRIES[name].build()
    model.train()
    if setting.channels_last:
        last = torch.channels_last
        model = model.to(memory_format=last)
        inputs = {k: t.to(memory_format=last) if t.dim() == 4 else t for k, t in inputs.items()}
    run, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    update = optimizer.step
    if way != "eager":
        backend = torchair_backend() if way == "torchair" else "inductor"
        run = torch.compile(model, backend=backend, dynamic=False, **APART)
        update = torch.compile(optimizer.step, backend=backend, dynamic=False, **APART)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            found = run(**inputs)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        update()
        return loss.detach()

    for _ in range(2):
        step()
    return step


@torch.enable_grad()
def measure(
    name: str, ways: list[str], setting: Setting, windows: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of a step, and of the start, of each contestant."""
    steps, starts = {}, {}
    for way in ways:
        begun = time.perf_counter()
        steps[way] = training_step(name, way, setting)
        starts[way] = time.perf_counter() - begun
    return {"times": interleaved(steps, **windows), "starts": starts}


@torch.enable_grad()
def peak(name: str, way: str, setting: Setting) -> dict[str, float]:
    """MiB that steps need beyond what stays between them, in this process."""
    step = training_step(name, way, setting)
    forget_peak()
    before = resident("VmRSS")
    for _ in range(3):
        step()
    return {"peak": resident("VmHWM") - before}


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of models, or parts of them, by commas")
    parser.add_argument("--autocast", action="store_true", help="forward under bfloat16 autocast")
    parser.add_argument("--channels-last", action="store_true", help="models and images in NHWC")
    parser.add_argument("--memory", action="store_true", help="peak memory too, in new processes")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few and short windows")
    parser.add_argument("--processor-time", action="store_true", help="not the clock on the wall")
    parser.add_argument("--peak-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = Setting(options.autocast, options.channels_last)
    warnings.simplefilter("ignore")
    torch._dynamo.config.recompile_limit = 64
    if options.peak_of:
        print(json.dumps(peak(options.only, options.peak_of, setting)))
        return
    ways = [w for w in WAYS if w != "inductor" or (has_inductor() and not options.no_inductor)]
    windows = {"windows": 3, "seconds": 0.1} if options.quick else {"windows": 8, "seconds": 0.3}
    clock = time.process_time if options.processor_time else time.perf_counter
    warn_if_busy()
    wanted = options.only.split(",")
    chosen = [n for n in ENTRIES if any(part in n for part in wanted)]
    absent = [n for n in chosen if ENTRIES[n].missing()]
    if absent:
        console.print(f"not installed, left out: {', '.join(absent)}", style="yellow")
    rows = {}
    for name in (n for n in chosen if n not in absent):
        console.print(f"{name}, model {len(rows) + 1} of {len(chosen) - len(absent)}", style="dim")
        torch._dynamo.reset()
        rows[name] = measure(name, ways, setting, {**windows, "clock": clock})
        if options.memory:
            rows[name]["peaks"] = {
                way: in_process(__file__, "--only", name, "--peak-of", way, *setting.flags())[
                    "peak"
                ]
                for way in ways
            }
    _print(rows, ways)


def _print(rows: dict[str, Any], ways: list[str]) -> None:
    others = [w for w in ways if w != "eager"]
    columns = ["model", *ways, *(f"ours / {w}" for w in ways[:-1]), *(f"start {w}" for w in others)]
    shown = table("a training step with AdamW; above 1 ours is faster", columns)
    for name, row in rows.items():
        times, starts, peaks = row["times"], row["starts"], row.get("peaks", {})
        cells = [duration(times[w]) + (f"\n{peaks[w]:.0f} MiB" if peaks else "") for w in ways]
        cells += [ratio(times, "torchair", w) for w in ways[:-1]]
        shown.add_row(name, *cells, *(f"{starts[w]:.1f} s" for w in others))
    console.print(shown)
    for against in ways[:-1]:
        gains = [row["times"][against] / row["times"]["torchair"] for row in rows.values()]
        if gains:
            mean = math.exp(sum(map(math.log, gains)) / len(gains))
            console.print(f"against {against}: geometric mean {mean:.2f}, least {min(gains):.2f}")


if __name__ == "__main__":
    main()
