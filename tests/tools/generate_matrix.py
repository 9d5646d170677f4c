"""`generate` of transformers, compiled: the same tokens as eager's, and how many compilations.

    python tests/tools/generate_matrix.py [--only llama] [--steps 24] [--ways greedy]

Eight architectures, both caches, both backends; greedy, drawn, beams and assisted. One process for
each architecture. The version of transformers is that of the environment it runs in.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from architectures import CASES, MORE, VOCAB

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "phi3", "opt")
BACKENDS = ("torchair", "npugraph_ex")
CACHES = ("dynamic", "static")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
    "assisted": {"do_sample": False},  # by a smaller model
}
PROMPT = 5
MOST = {"dynamic": 3, "static": 2}
"""Compilations: prefill and decode, and for a cache that grows the first token, before its length
is a symbol."""
MORE_COMPILATIONS = {"assisted": 2}
"""A cache that was cut off has other strides, and the last token may come without a draft. Dynamo
makes as many graphs for its own backend `eager`."""


@dataclass(frozen=True)
class Outcome:
    """Of one way to generate."""

    name: str
    backend: str
    cache: str
    way: str
    equal: bool
    compilations: int

    @property
    def most(self) -> int:
        """Compilations that are expected at most."""
        return MOST[self.cache] + MORE_COMPILATIONS.get(self.way, 0)

    @property
    def good(self) -> bool:
        """Whether it is as it should be."""
        return self.equal and self.compilations <= self.most

    def __str__(self) -> str:
        where = f"{self.name:8} {self.backend:12} {self.cache:8} {self.way:9}"
        verdict = "tokens equal" if self.equal else "TOKENS DIFFER"
        many = "" if self.compilations <= self.most else f", at most {self.most} were expected"
        return f"{where} {verdict}, {self.compilations} compilations{many}"


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self, name: str) -> None:
        self._name, self.count = name, 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.backends.registry.lookup_backend(self._name)(module, inputs)


def built(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """A small model that never ends a text by itself."""
    case = {**CASES, **MORE}[name]
    model: Any = replace(case, sizes={**case.sizes, **sizes}).build(torch.float32)
    if seed:  # other weights
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.data.add_(torch.randn_like(weight), alpha=0.01)
    model.generation_config.pad_token_id = 0
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


def tokens(model: Any, cache: str, way: str, steps: int, helper: Any) -> torch.Tensor:
    """What is generated behind a fixed prompt."""
    torch.manual_seed(1)
    prompt = torch.randint(3, VOCAB, (1 if way == "assisted" else 2, PROMPT))
    chosen = dict(WAYS[way])
    if way == "assisted":
        chosen["assistant_model"] = helper
    if cache == "static":
        chosen["cache_implementation"] = "static"
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        disable_compile=True,
        **chosen,
    )


def outcomes(name: str, steps: int, ways: Any = WAYS) -> Iterator[Outcome]:
    """All ways of one architecture."""
    for cache in CACHES:
        for way in ways:
            if (way, cache) == ("assisted", "static"):
                continue  # 4.57 takes a cache that grows instead, 5.22 refuses: drafts are cut off
            model, helper = built(name), built(name, 1)
            expected = tokens(model, cache, way, steps, helper)
            eager = model.forward
            for backend in BACKENDS:
                torch._dynamo.reset()
                counting = Counting(backend)
                model.forward = torch.compile(eager, backend=counting)
                got = tokens(model, cache, way, steps, helper)
                model.forward = eager
                same = got.shape == expected.shape and torch.equal(got, expected)
                yield Outcome(name, backend, cache, way, same, counting.count)


def main() -> int:
    """Print one line for each; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=NAMES, help="one architecture, in this process")
    parser.add_argument("--steps", type=int, default=24, help="tokens of a text")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    if options.only is None:
        print(f"transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
        rest = ["--steps", str(options.steps), "--ways", *options.ways]
        runs = [
            subprocess.run([sys.executable, __file__, "--only", name, *rest]).returncode
            for name in NAMES
        ]
        bad = [name for name, code in zip(NAMES, runs, strict=True) if code]
        print(f"{len(NAMES) - len(bad)} of {len(NAMES)} architectures as expected", *bad)
        return int(bool(bad))
    warnings.simplefilter("ignore")
    good = True
    for outcome in outcomes(options.only, options.steps, options.ways):
        print(outcome, flush=True)
        good = good and outcome.good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
