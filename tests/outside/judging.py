"""What programs from outside have in common: our modes, the judgement by float64, counters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

import torchair
from torchair.fallbacks import COUNTERS
from torchair.npugraph_ex.backend import npugraph_ex_backend
from torchair.verification.judge import difference, is_explained, leaves

MODES = ("max-autotune", "npugraph_ex")
"""A GE graph in the engine, and a captured graph. `reduce-overhead` is the latter with the options
of `CompilerConfig`."""


def compiled(fn: Callable[..., Any], mode: str, dynamic: bool | None = False) -> Any:
    """A function or a module compiled in a mode; `aot_eager` is the one that others are held
    against."""
    torch._dynamo.reset()
    return torch.compile(fn, backend=_backend(mode), dynamic=dynamic)


def _backend(mode: str) -> Any:
    if mode == "aot_eager":
        return mode
    if mode == "npugraph_ex":
        return npugraph_ex_backend  # by name it is known only where torchair is installed
    config = torchair.CompilerConfig()
    config.mode = mode
    return torchair.get_npu_backend(compiler_config=config)


def complaint(got: Any, eager: Any, truth: Any = None, moved: Sequence[Any] = ()) -> str:
    """What is wrong with a tree of results, "" if it is as good as eager's. `truth` is the same
    tree from float64: a result may be off by a few errors of eager (tests/tools/tolerance.py), or
    by a few times what the rounding of inputs does: `moved` are truths of inputs so changed."""
    mine, theirs = leaves(got), leaves(eager)
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    known, *others = (_fitting(tree, len(theirs)) for tree in (truth, *moved))
    for i, (g, e, t) in enumerate(zip(mine, theirs, known, strict=True)):
        wrong = difference(g, e, t)
        if wrong is None or any(is_explained(wrong, g, e, t, other[i]) for other in others):
            continue
        return f"result {i}: {wrong}"
    return ""


def _fitting(tree: Any, count: int) -> list[Any]:
    """The leaves of a tree from float64, None for all where there is no such tree."""
    found = leaves(tree) if tree is not None else []
    return found if len(found) == count else [None] * count


@dataclass
class Counts:
    """Graph breaks and fallbacks of the calls inside `counted`."""

    graph_breaks: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return " ".join(f"{kind}:{n}" for kind, n in sorted(self.fallbacks.items()))


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what Dynamo and our compiler note inside."""
    counts = Counts()
    before = [Counter(counters[name]) for name in ("graph_break", COUNTERS)]
    try:
        yield counts
    finally:
        breaks, ours = (
            Counter(counters[name]) - was
            for name, was in zip(("graph_break", COUNTERS), before, strict=True)
        )
        counts.graph_breaks.update(breaks)
        prefix = "fallback_"
        counts.fallbacks.update(
            {k.removeprefix(prefix): n for k, n in ours.items() if k.startswith(prefix)}
        )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def best(call: Callable[[], Any], seconds: float = 0.2) -> float:
    """Seconds of the fastest of several calls, at least three."""
    times = [timed(call)[0] for _ in range(3)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(timed(call)[0])
    return min(times)
