"""Batch-invariant numerics over whole models, all or those named (`make strict`):

    python tests/tools/batch_models.py [NAME ...]

Six architectures in float32 and bfloat16, with frozen weights: has a row the same bits in batches
of 1 to 64, on one thread and on two?
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import torchair
from architectures import CASES, MIXTRAL, Case
from torchair.verification.judge import same_bits

BATCHES = (1, 2, 3, 5, 8, 16, 31, 64)
THREADS = (1, 2)
_LENGTH = 7


class Convolutions(nn.Module):
    """Convolutions with strides, groups and batch norms, as residual networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.Conv2d(32, 32, 1),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        return self.head((x + self.body(x)).mean((2, 3)))


def _convolutions(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Convolutions().eval().to(dtype)


MODELS: dict[str, tuple[Callable[[torch.dtype], nn.Module], Case]] = {
    **{name: (CASES[name].build, CASES[name]) for name in ("llama", "bert", "gpt2", "vit")},
    "mixtral": (MIXTRAL.build, MIXTRAL),
    "convolutions": (_convolutions, CASES["vit"]),
}
"""What makes a model, and a case with arguments for it."""


def rows(result: Any) -> Tensor:
    """The logits, or whatever comes first."""
    return result if isinstance(result, Tensor) else next(iter(result.values()))


def first(arguments: Mapping[str, Any], batch: int) -> dict[str, Any]:
    return {k: v[:batch] if isinstance(v, Tensor) else v for k, v in arguments.items()}


def differing(name: str, dtype: torch.dtype) -> Iterator[str]:
    """The batches and numbers of threads in which a row has other bits than among 64 rows."""
    build, case = MODELS[name]
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.numerics = "batch_invariant"
    config.experimental_config.frozen_parameter = True
    backend = torchair.get_npu_backend(compiler_config=config)
    compiled = torch.compile(build(dtype), backend=backend, dynamic=True)
    arguments = case.arguments(max(BATCHES), _LENGTH, dtype)
    expected = None
    for threads in THREADS:
        torch.set_num_threads(threads)
        for batch in reversed(BATCHES):
            found = rows(compiled(**first(arguments, batch)))
            expected = found if expected is None else expected
            if not same_bits(found, expected[:batch]):
                yield f"batch {batch}, {threads} threads"


@torch.no_grad()
def main() -> int:
    """Print a line for each model and dtype."""
    warnings.simplefilter("ignore")
    failed = 0
    for name in sys.argv[1:] or MODELS:
        for dtype in (torch.float32, torch.bfloat16):
            found = list(differing(name, dtype))
            failed += bool(found)
            verdict = f"OTHER BITS: {', '.join(found)}" if found else "the same bits"
            print(f"{name:24s} {dtype!s:16s} {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
