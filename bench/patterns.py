"""What the built-in patterns gain: each form compiled with and without `pattern_fusion_pass`.

Both run in native code, so a ratio of 1 says that the loops of the parts are as good; below 1 the
pattern should have declined.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import torchair
from common import console, duration, interleaved, ratio, table, warn_if_busy

Inputs = tuple[torch.Tensor, ...]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Any:
    return rms_norm(x + y, weight), x + y


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-5) * weight + bias


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b, n, t, d = k.shape
    more = q.shape[1] // n
    few = (x[:, :, None].expand(b, n, more, t, d).reshape(b, n * more, t, d) for x in (k, v))
    return attention(q, *few)


def _heads(length: int, span: int, kv_heads: int = 8) -> Inputs:
    return (
        torch.randn(1, 8, length, 64),
        torch.randn(1, kv_heads, span, 64),
        torch.randn(1, kv_heads, span, 64),
    )


FORMS: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "rms norm, 128 x 1024": (rms_norm, (torch.randn(128, 1024), torch.randn(1024))),
    "add and rms norm": (
        add_rms_norm, (torch.randn(128, 1024), torch.randn(128, 1024), torch.randn(1024))),
    "layer norm, 128 x 1024": (
        layer_norm, (torch.randn(128, 1024), torch.randn(1024), torch.randn(1024))),
    "rotary, 16 heads": (
        rotary, (torch.randn(1, 16, 128, 64), torch.randn(128, 64), torch.randn(128, 64))),
    "swiglu, 128 x 4096": (swiglu, (torch.randn(128, 4096),)),
    "gelu with tanh": (gelu_tanh, (torch.randn(128, 2048),)),
    "quick gelu": (quick_gelu, (torch.randn(128, 2048),)),
    "attention, 128 x 128": (attention, _heads(128, 128)),
    "attention, 256 x 256, mask": (attention, (*_heads(256, 256), torch.randn(1, 1, 256, 256))),
    "attention, 512 x 512": (attention, _heads(512, 512)),
    "attention, one query of 1024": (attention, _heads(1, 1024)),
    "attention, heads in groups": (grouped, _heads(128, 128, kv_heads=2)),
}  # fmt: skip


def compiled(fn: Callable[..., Any], inputs: Inputs, fused: bool) -> Callable[[], Any]:
    """A call of the compiled function."""
    config = torchair.CompilerConfig()
    config.experimental_config.pattern_fusion_pass = fused
    backend = torchair.get_npu_backend(compiler_config=config)
    torch._dynamo.reset()
    made = torch.compile(fn, backend=backend, dynamic=False, fullgraph=True)
    made(*inputs)
    return lambda: made(*inputs)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short windows: figures are rough")
    parser.add_argument("--only", default="", help="forms whose name holds this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warn_if_busy()
    shown = table("patterns in native code", ["form", "fused", "parts", "gain"])
    for name, (fn, inputs) in FORMS.items():
        if options.only in name:
            calls = {way: compiled(fn, inputs, way == "fused") for way in ("fused", "parts")}
            times = interleaved(calls, *((2, 0.005) if options.quick else (10, 0.05)))
            gain = ratio(times, "fused", "parts")
            shown.add_row(name, duration(times["fused"]), duration(times["parts"]), gain)
    console.print(shown)


if __name__ == "__main__":
    main()
