"""Fused attention beside torch's own kernel for CPUs, on the same threads and in one process."""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import console, interleaved, ratio, table
from torchair.codegen.cpu.attention.kernel import attention
from torchair.codegen.cpu.driver import HEADER, STEP, entry_point
from torchair.codegen.cpu.jit import Library
from torchair.codegen.requests import Attention
from torchair.codegen.target import Kernel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# (heads, key heads, queries, keys, width, kind of mask or how many keys are seen)
CASES = [
    (12, 4, 1, 512, 64, 128),
    (12, 12, 1, 512, 64, 512),
    (32, 8, 1, 2048, 128, 1000),
    (12, 4, 4, 512, 64, 128),
    (12, 12, 16, 128, 64, "none"),
    (12, 12, 128, 128, 64, "none"),
    (12, 12, 128, 128, 64, "causal"),
    (12, 12, 128, 128, 64, 100),
    (12, 12, 128, 128, 64, "added"),
    (12, 4, 128, 512, 64, 128),
    (12, 12, 512, 512, 64, "none"),
    (12, 12, 512, 512, 64, "causal"),
    (6, 6, 256, 256, 128, "none"),
]


class Team:
    """Runs single kernels on the threads that torch uses."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.library = Library()
        self.enter = entry_point(self.library)

    def bind(self, kernel: Kernel, tensors: list[Tensor | None]) -> Callable[[], None]:
        """A call that runs the kernel on all threads."""
        words = [0 if t is None else t.data_ptr() for t in tensors]
        block = (ctypes.c_int64 * len(words))(*words)
        step = (ctypes.c_int64 * STEP)(self.library.address(kernel), ctypes.addressof(block), 0)
        barrier = (ctypes.c_int64 * 8)()
        steps, counter = ctypes.addressof(step), ctypes.addressof(barrier)
        program = (ctypes.c_int64 * HEADER)(steps, 1, self.threads, 0, 0, 0, counter, 0)
        address = ctypes.addressof(program)

        def call(keep: Any = (block, step, barrier, program, tensors)) -> None:
            self.enter(address)

        return call


def aligned(bytes_: int) -> Tensor:
    """Memory that begins at a cache line."""
    memory = torch.empty(bytes_ + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 64 :]


def options_of(case: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """The mask of a case, and whether it is causal."""
    _, _, length, span, _, kind = case
    if kind == "added":
        return torch.randn(1, 1, length, span).to(dtype), False
    if isinstance(kind, int):
        return (torch.arange(span) < kind).expand(1, 1, 1, span), False
    return None, kind == "causal"


def contest(team: Team, name: str, case: tuple[Any, ...]) -> tuple[dict[str, Any], float]:
    """Our kernel and torch's bound to the same tensors, and the seconds to make ours."""
    heads, kv_heads, length, span, width, _ = case
    dtype = DTYPES[name]
    q = torch.randn(1, heads, length, width).to(dtype)
    k, v = (torch.randn(1, kv_heads, span, width).to(dtype) for _ in range(2))
    mask, causal = options_of(case, dtype)
    out = torch.empty_like(q)
    spread = None if mask is None else mask.expand(1, heads, length, span)
    spec = Attention(
        name,
        1,
        heads,
        kv_heads,
        length,
        span,
        width,
        width,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        width**-0.5,
        causal,
        None if mask is None else "bool" if mask.dtype == torch.bool else name,
        (0, 0, 0, 0) if spread is None else spread.stride(),
    )
    start = time.perf_counter()
    made = attention(spec, team.library.machine)
    team.library.address(made.kernel)
    seconds = time.perf_counter() - start
    scratch = aligned(team.threads * made.scratch)
    ours = team.bind(made.kernel, [q, k, v, mask, out, None, scratch])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    calls = {"ours": ours, "torch": lambda: flash(q, k, v, is_causal=causal, attn_mask=mask)}
    ours()
    torch.testing.assert_close(out, calls["torch"]()[0], atol=2e-2, rtol=2e-2)
    return calls, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    team = Team(args.threads)
    columns = ["heads/keys' t x span, width, mask", "ours us", "torch us", "ratio", "made ms"]
    for name in args.dtype or ["f32", "bf16"]:
        shown = table(f"attention {name}, {args.threads} threads", columns)
        for case in CASES:
            calls, seconds = contest(team, name, case)
            times = interleaved(calls, windows=10, seconds=0.05)
            heads, kv_heads, length, span, width, kind = case
            kind = f"{kind} seen" if isinstance(kind, int) else kind
            shown.add_row(
                f"{heads}/{kv_heads} {length} x {span}, {width}, {kind}",
                *(f"{times[x] * 1e6:.1f}" for x in ("ours", "torch")),
                ratio(times, "ours", "torch"),
                f"{seconds * 1e3:.0f}",
            )
        console.print(shown)


if __name__ == "__main__":
    main()
