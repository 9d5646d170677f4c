"""Decode steps with a cache that grows by a token a step, and with one of fixed size.

Each way to run them has a process of its own. Every length is met for the first time, called again
right after that, and met once more in a second round: new, repeated, seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.progress import track

import torchair
from common import console, duration, has_inductor, in_process, resident, table, warn_if_busy

TARGET = 0.2e-3  # seconds of CPU time that a new length may cost beyond one that was met before
CACHES = ("dynamic", "static")
OURS = ("max-autotune", "reduce-overhead")
WAYS = ("eager", "inductor", *OURS)
WARM = 4  # lengths that are compiled for, and not counted
PROMPT = 5
SPAN = 100  # lengths of a column, so that a cliff shows

Times = list[tuple[float, float]]
"""CPU time and wall time of calls, in seconds."""


def clocked(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """A result, and the times that it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, (time.process_time() - cpu, time.perf_counter() - wall)


def prepared(way: str, model: torch.nn.Module) -> Any:
    """What is called for a step."""
    if way == "eager":
        return model
    if way == "inductor":
        return torch.compile(model)
    config = torchair.CompilerConfig()
    config.mode = way
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))


def model_of(layers: int, lengths: int) -> torch.nn.Module:
    """A narrow Llama: the arithmetic does not hide what is around it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=lengths + 64,
    )
    return LlamaForCausalLM(config).eval()


def steps(call: Any, model: Any, kind: str, lengths: int) -> Iterator[Callable[[], Any]]:
    """The decode steps of one text, each to be called any number of times before the next."""
    from transformers import DynamicCache, StaticCache

    config, dynamic = model.config, kind == "dynamic"
    room = PROMPT + lengths + 1
    cache: Any = DynamicCache(config=config) if dynamic else StaticCache(config, max_cache_len=room)
    start = torch.arange(PROMPT)
    model(input_ids=start[None], past_key_values=cache, use_cache=True, cache_position=start)
    for k in range(lengths):
        before = [(layer.keys, layer.values) for layer in cache.layers]
        word, position = torch.tensor([[k % 1000]]), torch.tensor([PROMPT + k])

        def step(before: Any = before, word: Any = word, position: Any = position) -> Any:
            for layer, (keys, values) in zip(cache.layers, before, strict=True):
                layer.keys, layer.values = keys, values
            return call(
                input_ids=word, past_key_values=cache, use_cache=True, cache_position=position
            ).logits

        yield step


@torch.no_grad()
def measure(way: str, kind: str, layers: int, lengths: int) -> dict[str, Any]:
    """Times and peak memory of this process."""
    torch.set_num_threads(1)
    model = model_of(layers, lengths)
    call = prepared(way, model)
    found: dict[str, Times] = {"new": [], "repeated": [], "seen": []}
    sums: dict[str, float] = {"new": 0.0, "seen": 0.0}
    for turn in ("new", "seen"):
        for step in steps(call, model, kind, lengths):
            logits, times = clocked(step)
            found[turn].append(times)
            sums[turn] += float(logits.square().mean())
            if turn == "new":
                found["repeated"].append(clocked(step)[1])
    return {**found, "peak": resident("VmHWM"), "sums": list(sums.values())}


def medians(times: Times, which: int, span: int) -> list[float]:
    """Medians over stretches of lengths, without those that were compiled for."""
    kept = [pair[which] for pair in times][WARM:]
    return [statistics.median(kept[k : k + span]) for k in range(0, len(kept), span)]


def beyond(found: dict[str, Times], other: str) -> float:
    """CPU time of a new length beyond the same length later, in the median."""
    pairs = list(zip(found["new"], found[other], strict=True))[WARM:]
    return statistics.median(new[0] - old[0] for new, old in pairs)


def show(kind: str, layers: int, lengths: int, found: dict[str, dict[str, Any]]) -> None:
    """Tables of one cache: a token in all, by length, and what new lengths cost."""
    title = f"{layers} layers, {kind} cache, {lengths} lengths, one thread"
    columns = ["", "CPU time a token", "wall", "against eager", "against inductor", "peak MiB"]
    shown = table(title, columns)
    cpu = {w: medians(f["new"], 0, lengths)[0] for w, f in found.items()}
    wall = {w: medians(f["new"], 1, lengths)[0] for w, f in found.items()}
    for way, figures in found.items():
        ratios = [_ratio(cpu, way, peer) for peer in ("eager", "inductor")]
        times = duration(cpu[way]), duration(wall[way])
        shown.add_row(way, *times, *ratios, f"{figures['peak']:.0f}")
    console.print(shown)
    stretches = range(WARM, lengths, SPAN)
    by_length = table("CPU time a token, by length", ["", *[f"{k}-" for k in stretches]])
    for way, figures in found.items():
        by_length.add_row(way, *[f"{t * 1e3:.2f}" for t in medians(figures["new"], 0, SPAN)])
    console.print(by_length)
    for way in OURS:
        if way in found:
            print_verdict(way, found)


def _ratio(times: dict[str, float], name: str, against: str) -> str:
    return f"{times[against] / times[name]:.2f}x" if against in times else "-"


def print_verdict(way: str, found: dict[str, dict[str, Any]]) -> None:
    """What a new length costs, whether there is a cliff, and that results are eager's."""
    mine = found[way]
    extra = {other: beyond(mine, other) * 1e3 for other in ("repeated", "seen")}
    word = "met" if max(extra.values()) <= TARGET * 1e3 else "missed"
    line = f"{way}: a new length takes {extra['repeated']:.2f} ms beyond its repetition and "
    line += f"{extra['seen']:.2f} ms beyond the second round (at most 0.2: {word})"
    line += f"; the slowest hundred lengths take {_spread(mine):.2f}x the fastest"
    if "eager" in found:
        line += f" (eager {_spread(found['eager']):.2f}x)"
        gap = max(abs(a / b - 1) for a, b in zip(mine["sums"], found["eager"]["sums"], strict=True))
        line += f"; results differ by {gap:.1e}"
    console.print(line)


def _spread(figures: dict[str, Any]) -> float:
    times = medians(figures["new"], 0, SPAN)
    return max(times) / min(times)


def contestants(only: Sequence[str]) -> list[str]:
    """Those that can run here, with a line for one that cannot."""
    ways = [w for w in WAYS if not only or w in only]
    if "inductor" in ways and not has_inductor():
        console.print("inductor: not measured, there is no C++ compiler")
        ways.remove("inductor")
    return ways


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, default=900, help="steps of a text")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--cache", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--only", nargs="+", default=[], choices=WAYS, help="those to measure")
    parser.add_argument("--here", action="store_true", help="in this process, figures as JSON")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        console.print("not measured: transformers is not installed")
        return
    ways = contestants(options.only)
    if options.here:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(ways[0], options.cache[0], options.layers[0], options.lengths)))
        return
    warn_if_busy()
    for layers in options.layers:
        for kind in options.cache:
            given = ["--layers", str(layers), "--cache", kind, "--lengths", str(options.lengths)]
            found = {
                way: in_process(__file__, *given, "--only", way, "--here")
                for way in track(ways, f"{layers} layers, {kind}", console=console, transient=True)
            }
            show(kind, layers, options.lengths, found)


if __name__ == "__main__":
    main()
