"""Models compiled inside of the tools that people train and run them with, each with tiny random
weights, beside the same in eager mode.

    python examples/trainers.py                   all tools that are installed
    python examples/trainers.py lightning peft    these

docs/trainers.md shows the one line for each. Needs the packages that are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import torchair  # noqa: F401  (registers the backend)

STEPS = 4  # of training
Values = list[Tensor]
"""What is compared: weights after training, or results."""


# ---- tiny models and data


class Perceptron(nn.Module):
    """Two layers. It is a class of its own: `compile` of a bare `nn.Sequential` has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron()


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=drawn), torch.randint(4, (16,), generator=drawn))
        for _ in range(STEPS)
    ]


def bert(labels: int | None = None) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=99,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=labels or 2,
        problem_type="single_label_classification",  # else it is set in the first step: a guard
    )
    return BertModel(config) if labels is None else BertForSequenceClassification(config)


def weights(model: nn.Module) -> Values:
    return [p.detach().clone() for p in model.parameters()]


# ---- one function for each tool: `compiled` says whether the line of docs/trainers.md runs


def hf_trainer(compiled: bool) -> Values:
    """`Trainer` of transformers: a classifier is trained for a few steps."""
    from transformers import Trainer, TrainingArguments

    drawn = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(99, (12,), generator=drawn), "labels": torch.tensor(k % 3)}
        for k in range(4 * STEPS)
    ]
    model = bert(labels=3)
    if compiled:
        model.compile(backend="torchair")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            learning_rate=0.1,
        )
        Trainer(model, arguments, train_dataset=rows).train()
    return weights(model)


def accelerate(compiled: bool) -> Values:
    """A training loop with `Accelerator.prepare`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = perceptron()
    if compiled:
        model.compile(backend="torchair")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    return weights(accelerator.unwrap_model(model))


def lightning(compiled: bool) -> Values:
    """`Trainer.fit` of Lightning, with the training step inside of the graph."""
    from lightning import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()

        def training_step(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    model: Any = Classifier()
    if compiled:
        model = torch.compile(model, backend="torchair")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=True,
    )
    trainer.fit(model, DataLoader(batches(), batch_size=None))
    return weights(model)


def diffusers(compiled: bool) -> Values:
    """A diffusion pipeline, whose U-Net is called once a step."""
    from diffusers import DDIMScheduler, DDPMPipeline, UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        norm_num_groups=8,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    pipeline = DDPMPipeline(unet.eval(), DDIMScheduler(num_train_timesteps=100))
    pipeline.set_progress_bar_config(disable=True)
    if compiled:
        pipeline.unet.compile(backend="torchair")
    drawn = torch.Generator().manual_seed(2)
    made = pipeline(num_inference_steps=STEPS, generator=drawn, output_type="np")
    return [torch.from_numpy(made.images)]


def diffusers_blocks(compiled: bool) -> Values:
    """A diffusion transformer, of which each kind of repeated block is compiled once."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    if compiled:
        model.compile_repeated_blocks(backend="torchair")
    drawn = torch.Generator().manual_seed(2)
    image, text = torch.randn(2, 16, 4, generator=drawn), torch.randn(2, 5, 32, generator=drawn)
    pooled = torch.randn(2, 32, generator=drawn)
    places = torch.randint(8, (21, 3), generator=drawn)
    with torch.no_grad():
        made = model(
            image, text, pooled, torch.tensor([0.5, 0.5]), img_ids=places[:16], txt_ids=places[16:]
        )
    return [made.sample]


def sentence_transformers(compiled: bool) -> Values:
    """Texts of several lengths as vectors."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        words = Tokenizer(WordLevel({f"w{k}": k for k in range(99)}, unk_token="w0"))
        words.pre_tokenizer = Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
        fast.save_pretrained(folder)
        bert().save_pretrained(folder)
        body = Transformer(folder)
        model = SentenceTransformer(modules=[body, Pooling(32)], device="cpu")
    if compiled:
        model.compile(backend="torchair", dynamic=True)
    texts = [" ".join(f"w{(7 * k + n) % 99}" for k in range(n)) for n in (3, 5, 9, 4)]
    return [model.encode(text, convert_to_tensor=True).cpu() for text in texts]


def peft(compiled: bool) -> Values:
    """Adapters of PEFT (LoRA) are trained, all else is fixed."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(perceptron(), LoraConfig(r=4, target_modules=["up", "down"]))
    drawn = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.copy_(torch.randn(p.shape, generator=drawn) * 0.1)
    if compiled:
        model.compile(backend="torchair")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in trained]


def optimizer_of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    def run(compiled: bool) -> Values:
        """A training loop whose optimizer is one graph."""
        model = perceptron()
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        step: Callable[[], Any] = optimizer.step
        if compiled:
            step = torch.compile(optimizer.step, backend="torchair")
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            step()
        return weights(model)

    return run


def generate(compiled: bool) -> Values:
    """`generate` of transformers with a static cache, which compiles the decode step itself."""
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=99,
        )
    ).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([[5, 17, 42]])
    options: dict[str, Any] = {}
    if compiled:
        config = CompileConfig(backend="torchair")
        config._compile_all_devices = True
        options["compile_config"] = config
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        **options,
    )
    return [made]


@dataclass(frozen=True)
class Tool:
    """What runs, and the packages that it needs."""

    run: Callable[[bool], Values]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


TOOLS = {
    "trainer": Tool(hf_trainer, ("transformers", "accelerate")),
    "accelerate": Tool(accelerate, ("accelerate",)),
    "lightning": Tool(lightning, ("lightning",)),
    "diffusers": Tool(diffusers, ("diffusers",)),
    "diffusers_blocks": Tool(diffusers_blocks, ("diffusers",)),
    "sentence_transformers": Tool(sentence_transformers, ("sentence_transformers",)),
    "peft": Tool(peft, ("peft",)),
    "generate": Tool(generate, ("transformers",)),
    "sgd": Tool(optimizer_of(torch.optim.SGD, momentum=0.9)),
    "adamw": Tool(optimizer_of(torch.optim.AdamW)),
}


@dataclass(frozen=True)
class Outcome:
    """Of one tool: the largest difference from eager, relative to the largest value, and how many
    graphs were compiled."""

    difference: float
    graphs: int
    seconds: float


def outcome_of(tool: Tool) -> Outcome:
    """Run a tool in eager mode and compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = tool.run(False)
        counters.clear()
        begun = time.perf_counter()
        found = tool.run(True)
    seconds = time.perf_counter() - begun
    assert len(found) == len(expected)
    differences = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-9))
        for a, b in zip(found, expected, strict=True)
    ]
    known = counters["torchair"]
    return Outcome(max(differences), known["static"] + known["dynamic"], seconds)


def main() -> int:
    """Run tools and print a table; 1 if one differs from eager, or compiled nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", metavar="tool", help=", ".join(TOOLS))
    wanted = parser.parse_args().tools or list(TOOLS)
    unknown = [name for name in wanted if name not in TOOLS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    shown, good = Table("tool", "graphs", "largest difference", "seconds"), True
    for name in wanted:
        tool = TOOLS[name]
        if tool.missing:
            shown.add_row(name, "-", f"not installed: {', '.join(tool.missing)}", "-")
            continue
        found = outcome_of(tool)
        good = good and found.graphs > 0 and found.difference < 1e-3
        row = (str(found.graphs), f"{found.difference:.1e}", f"{found.seconds:.1f}")
        shown.add_row(name, *row)
    Console().print(shown)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
