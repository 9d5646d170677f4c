"""Attention for many queries on a GPU beside torch's kernels, by lengths: TFLOP/s of device time.

Each contestant is recorded into a CUDA graph; the graphs are replayed in turns, and the best replay
counts. Operations that a causal mask spares are not counted.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import NOT_MEASURED, console, ratio, table
from torchair.codegen.cuda.driver import KernelLaunch, available, library
from torchair.codegen.cuda.flash import FlashForm, flash
from torchair.codegen.cuda.run import entry_alone
from torchair.codegen.cuda.trial import Replay
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import Element
from torchair.codegen.target import Declined, Generated

RIVALS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOKENS = 8192  # of all sequences together, where there is more than one
DTYPES: dict[str, tuple[Element, torch.dtype]] = {
    "bf16": ("bf16", torch.bfloat16),
    "f16": ("f16", torch.float16),
}
RECORDED = 2e-3  # seconds of work in a graph
MASKS = ("none", "added", "padding")


def mask_of(kind: str, batch: int, length: int, dtype: torch.dtype) -> Tensor | None:
    """Numbers to be added to scores: for each query, or the same for all."""
    if kind == "none":
        return None
    rows = length if kind == "added" else 1
    return torch.randn(batch, 1, rows, length, device="cuda").to(dtype)


def strides_of(x: Tensor) -> Any:
    """Four strides, 0 along dims of one element."""
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


def request_of(
    name: Element, q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool, mask: Tensor | None
) -> Attention:
    """What is asked for."""
    batch, heads, length, width = q.shape
    return Attention(
        name,
        batch,
        heads,
        k.shape[1],
        length,
        k.shape[2],
        width,
        v.shape[3],
        strides_of(q),
        strides_of(k),
        strides_of(v),
        strides_of(out),
        1 / math.sqrt(width),
        causal,
        None if mask is None else name,
        (0, 0, 0, 0) if mask is None else strides_of(mask),
    )


def ours(request: Attention, tensors: list[Tensor], form: FlashForm | None) -> Callable[[], None]:
    """A launch of our kernel."""
    machine = library(0).machine
    kernel, launch = flash(request, machine, form=form)
    entry = entry_alone(Generated(kernel, launch=launch))
    blocks = launch.blocks(lambda word: 0)
    words = [blocks, *(tensors[word].data_ptr() for word in kernel.words)]
    call = KernelLaunch(library(0), entry, blocks, words, launch.shared, launch.cluster)
    return lambda: call(torch.cuda.current_stream().cuda_stream)


def theirs(
    backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> Callable[[], Any]:
    """A call of one of torch's kernels."""
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

    return call


def contest(case: tuple[int, int, int, int, int], args: Any, causal: bool) -> dict[str, float]:
    """Seconds of device time by contestant, of those that serve the case."""
    batch, heads, kv_heads, length, width = case
    name, dtype = DTYPES[args.dtype]
    q, k, v = (
        torch.randn(batch, n, length, width, device="cuda").to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    mask = mask_of(args.mask, batch, length, dtype)
    out = torch.empty(batch, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
    request = request_of(name, q, k, v, out, causal, mask)
    calls = {rival: theirs(b, q, k, v, causal, mask) for rival, b in RIVALS.items()}
    tensors = [q, k, v, q if mask is None else mask, out, out, out]
    calls["ours"] = ours(request, tensors, None)
    for form in args.form or []:
        try:
            calls[form] = ours(request, tensors, form_of(form))
        except Declined as e:
            console.print(f"{form}: {e}")
    return measured(calls)


def form_of(text: str) -> FlashForm:
    """A form as it is given on the command line."""
    warpgroups, keys = (int(x) for x in text.split("x"))
    return FlashForm(warpgroups, keys)


def measured(calls: dict[str, Callable[[], Any]], rounds: int = 6) -> dict[str, float]:
    """Seconds of the best replay of each that can be recorded."""
    device, replays = torch.device("cuda", 0), {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            once = max(Replay(call, device).seconds(0), 1e-6)
        except RuntimeError:
            continue  # torch's kernel does not serve this case
        count = max(1, min(64, int(RECORDED / once)))
        replays[name] = count, Replay(partial(several, call, count), device)
    best = dict.fromkeys(replays, float("inf"))
    for _ in range(rounds):
        for name, (count, replay) in replays.items():
            best[name] = min(best[name], replay.seconds(0) / count)
    return best


def several(call: Callable[[], Any], count: int) -> None:
    """So many calls."""
    for _ in range(count):
        call()


def cases(args: Any) -> list[tuple[int, int, int, int, int]]:
    """Batch, heads, key heads, tokens and width."""
    heads, kv_heads = args.heads, args.kv_heads or args.heads
    return [
        (max(1, min(args.batch or TOKENS, TOKENS // length)), heads, kv_heads, length, width)
        for width in args.width
        for length in args.tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    lengths = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--tokens", type=int, nargs="+", default=lengths)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--batch", type=int, help="at most so many sequences")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--mask", choices=MASKS, default="none")
    parser.add_argument("--form", nargs="+", help="more forms, like 2x128: warpgroups and keys")
    args = parser.parse_args()
    missing = available()
    if missing:
        console.print(f"Attention is measured on a GPU, and there is none: {missing}.")
        return
    warnings.simplefilter("ignore")  # torch says why a kernel does not serve a case
    names = ["ours", *RIVALS, *(args.form or [])]
    columns = ["batch x heads x tokens x width", *(f"{n} TFLOP/s" for n in names)]
    columns += ["to the best", "ours us"]
    for causal in (False, True) if args.mask == "none" else (False,):
        shown = table(f"attention, {args.dtype}, {'causal' if causal else 'full'}", columns)
        for case in cases(args):
            shown.add_row(*row(case, contest(case, args, causal), names, causal))
        console.print(shown)


def row(
    case: tuple[int, int, int, int, int], times: dict[str, float], names: list[str], causal: bool
) -> list[str]:
    """A line of the table."""
    batch, heads, kv_heads, length, width = case
    work = 4 * batch * heads * length * length * width / (2 if causal else 1)
    speeds = [f"{work / times[n] / 1e12:.0f}" if n in times else NOT_MEASURED for n in names]
    rivals = {n: t for n, t in times.items() if n in RIVALS}
    best = min(rivals, key=rivals.__getitem__, default="")
    grouped = f"{heads}" if heads == kv_heads else f"{heads}/{kv_heads}"
    title = f"{batch} x {grouped} x {length} x {width}"
    return [title, *speeds, ratio(times, "ours", best), f"{times['ours'] * 1e6:.1f}"]


if __name__ == "__main__":
    main()
