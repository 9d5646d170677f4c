"""A chat with a language model through `generate`, with streaming output, eager or compiled.

    python examples/chat.py                                  a conversation with a random model
    python examples/chat.py --model DIR                      with a checkpoint that lies in a folder
    python examples/chat.py --compare                        eager, inductor and ours on one prompt
    python examples/chat.py --cache static                   `generate` itself compiles decoding

A random model has no words, so its tokens are printed as numbers. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from rich.console import Console
from rich.table import Table

import torchair  # noqa: F401  (registers the backends)

console = Console()
WAYS = ("eager", "inductor", "torchair", "npugraph_ex")
SIZES = {
    "tiny": dict(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8000,
    ),
    "100M": dict(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=32000,
    ),
}
ASKED = "Tell me how a compiler works."


class Numbers:
    """Stands in for a tokenizer: words are numbered by what they are made of."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        return [sum(word.encode()) % self._vocabulary for word in text.split()] or [1]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(str(t) for t in tokens) + " "


@dataclass
class Stream:
    """Prints tokens as they come, and notes when."""

    words: Any
    silent: bool = False
    times: list[float] = field(default_factory=list)
    _begin: float = field(default_factory=time.perf_counter)
    _prompt: bool = True

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`, first with the prompt and then with each token."""
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter() - self._begin)
        if not self.silent:
            print(self.words.decode(value.reshape(-1).tolist()), end="", flush=True)

    def end(self) -> None:
        """Called behind the last token."""
        if not self.silent:
            print()

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.times[0]

    @property
    def rate(self) -> float:
        """Tokens a second behind the first."""
        return (len(self.times) - 1) / max(self.times[-1] - self.times[0], 1e-9)


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and what reads and writes its tokens."""
    dtype = getattr(torch, options.dtype)
    if options.model is None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES[options.size], max_position_embeddings=4096)
        model = transformers.LlamaForCausalLM(config).eval().to(dtype)
        return model, Numbers(config.vocab_size)
    if not Path(options.model).is_dir():
        raise SystemExit(f"--model: {options.model} is no folder with a checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    return model, transformers.AutoTokenizer.from_pretrained(options.model)


def compile_for(model: Any, words: Any, way: str, cache: str = "growing") -> float:
    """Have `generate` call the compiled model, or compile it itself where the cache is static. Two
    texts get it warm: the second length of a prompt makes sizes symbols. Returns the seconds that
    took."""
    torch._dynamo.reset()
    model.__dict__.pop("forward", None)
    model.generation_config.cache_implementation = "static" if cache == "static" else None
    model.generation_config.compile_config = None
    model.generation_config.disable_compile = cache != "static" or way == "eager"
    if cache == "static" and way != "eager":
        config = transformers.CompileConfig(backend=way, mode="default")
        config._compile_all_devices = True  # without it transformers compiles for CUDA only
        model.generation_config.compile_config = config
    elif way != "eager":
        model.forward = torch.compile(model.forward, backend=way)
    start = time.perf_counter()
    for extra in ("", " Please."):
        answer(model, words, words.encode(ASKED + extra), 8, silent=True)
    return time.perf_counter() - start


def answer(model: Any, words: Any, history: list[int], tokens: int, silent: bool) -> Stream:
    """Generate behind a history, which grows by the answer."""
    stream = Stream(words, silent)
    ids = torch.tensor([history])
    model.generation_config.pad_token_id = 0
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=stream,
    )
    history[:] = made[0].tolist()
    return stream


def compare(model: Any, words: Any, options: argparse.Namespace) -> None:
    """All ways on one prompt, the best of three texts."""
    shown = Table("", "first token", "tokens a second", "compiling", "tokens")
    expected = None
    for way in WAYS:
        if way == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
            console.print("inductor: not measured, there is no C++ compiler")
            continue
        with console.status(f"{way}: compiling"):
            compiling = compile_for(model, words, way, options.cache)
        with console.status(f"{way}: generating"):
            texts = [words.encode(ASKED) for _ in range(3)]
            streams = [answer(model, words, text, options.tokens, True) for text in texts]
        expected = expected or texts[0]
        first, rate = min(s.first for s in streams), max(s.rate for s in streams)
        same = "as eager's" if texts[0] == expected else "others than eager's"
        shown.add_row(way, f"{first * 1e3:.1f} ms", f"{rate:.1f}", f"{compiling:.1f} s", same)
    console.print(shown)


def converse(model: Any, words: Any, options: argparse.Namespace) -> None:
    """A loop of questions and answers, until the input ends."""
    with console.status(f"preparing {options.backend}"):
        compile_for(model, words, options.backend, options.cache)
    history: list[int] = []
    asked = iter(options.prompt or [])
    while True:
        try:
            line = next(asked, None) if options.prompt else input("> ")
        except EOFError:
            return
        if not line:
            return
        if options.prompt:
            print(f"> {line}")
        history += words.encode(line)
        stream = answer(model, words, history, options.tokens, silent=False)
        first = f"{stream.first * 1e3:.0f} ms to the first token"
        print(f"[{first}, {stream.rate:.1f} tokens a second]")


def main() -> None:
    """Read what is asked for, and chat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a checkpoint; without it a random model")
    parser.add_argument("--size", default="tiny", choices=SIZES, help="of a random model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", default="torchair", choices=WAYS)
    parser.add_argument("--cache", default="growing", choices=("growing", "static"))
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--prompt", action="append", help="say this instead of asking")
    parser.add_argument("--compare", action="store_true", help="time all backends")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, words = loaded(options)
    with torch.no_grad():
        (compare if options.compare else converse)(model, words, options)


if __name__ == "__main__":
    sys.exit(main())
