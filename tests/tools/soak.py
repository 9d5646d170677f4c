"""A long run of everything at once: models, sizes, threads, weights that are exchanged, graphs that
are deleted. Results are right, and memory and file handles stay flat.

    python tests/tools/soak.py --seconds 600
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchair

_WARM = 0.4  # part of the time after which nothing may grow any more
_ROOM = 48 << 20  # bytes that memory may vary by, and ...
_RATE = 0.04  # ... this part of it
_THREADS = 3


class Quantised(nn.Module):
    """Integers for weights, which are packed without being asked for."""

    def __init__(self) -> None:
        super().__init__()
        integers = torch.randint(-8, 8, (32, 32), dtype=torch.int8)
        self.weight = nn.Parameter(integers, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(x, self.weight.to(x.dtype)) / 32)


class Attention(nn.Module):
    """One head over rows of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.q(x) @ self.k(x).mT / 6, -1)
        return self.norm(scores @ x)


class Image(nn.Module):
    """A convolution with a normalisation that is folded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x[None, None]))).sum((0, 1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


MODELS: tuple[Callable[[], nn.Module], ...] = (perceptron, Quantised, Attention, Image)
WAYS = ("direct", "dynamo", "captured")


def compiled(model: nn.Module, way: str) -> Any:
    config = torchair.CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.mode = "npugraph_ex" if way == "captured" else "max-autotune"
    if way == "direct":
        return torchair.compile(model, torch.randn(4, 32), config=config, dynamic=True)
    return torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config))


def exchange(model: nn.Module, chance: random.Random) -> None:
    """Other weights, in one of the ways that programs have."""
    weight = next(model.parameters())
    how = chance.randrange(4)
    other = weight.flip(0).clone()
    if how == 0:
        weight.copy_(other)
    elif how == 1:
        weight.data = other
    elif how == 2:
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    else:
        weight.detach().numpy()[:] = other.numpy()
        torchair.weights_changed(model)


class Soak:
    """One process."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self.seed = seconds, seed
        self.calls: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._dynamo = threading.Lock()  # `reset` is for threads that do not compile meanwhile

    def work(self, number: int) -> None:
        """What one thread does until time is over."""
        chance = random.Random(f"{self.seed} {number}")
        try:
            with torch.no_grad():
                while time.monotonic() < self.end and not self.failures:
                    self.life(chance, number)
        except BaseException as error:
            self.failures.append(error)

    def life(self, chance: random.Random, number: int) -> None:
        """A model is made, compiled, called, changed, and forgotten."""
        way = WAYS[number % len(WAYS)] if number else chance.choice(WAYS)
        model = chance.choice(MODELS)().eval()
        with self._dynamo:
            if way != "direct":
                torch._dynamo.reset()
            call = compiled(model, way)
            self.check(call, model, way, 4)
        for _ in range(chance.randrange(1, 60)):
            rows = chance.choice((4, 4, 4, 5, 9, chance.randrange(2, 40)))
            with self._dynamo if way != "direct" else _nothing:
                self.check(call, model, way, rows)
            if chance.random() < 0.05:
                exchange(model, chance)

    def check(self, call: Any, model: nn.Module, way: str, rows: int) -> None:
        x = torch.randn(rows, 32)
        torch.testing.assert_close(call(x), model(x), rtol=2e-4, atol=2e-5)
        self.calls[way] += 1

    def run(self) -> int:
        """Print what grew; 0 if nothing did."""
        begun = time.monotonic()
        self.end = begun + self.seconds
        threads = [threading.Thread(target=self.work, args=(k,)) for k in range(_THREADS)]
        for thread in threads:
            thread.start()
        start, seen = None, 0.0
        while any(t.is_alive() for t in threads):
            time.sleep(min(1.0, self.seconds / 50))
            part = (time.monotonic() - begun) / self.seconds
            if start is None and part > _WARM:
                start = measured()
                print(f"after {part:.0%}: {start}, {sum(self.calls.values()):,} calls", flush=True)
            if part - seen > 0.2:
                seen = part
                print(f"  {part:4.0%}: {measured()}, {dict(self.calls)}", flush=True)
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        end = measured()
        assert start is not None
        print(f"at the end: {end}, {sum(self.calls.values()):,} calls {dict(self.calls)}")
        grown = end.memory - start.memory
        too_much = grown > _ROOM + _RATE * start.memory
        if too_much or end.files > start.files or end.threads > start.threads + _THREADS:
            print("it grows")
            return 1
        print("flat: every result was right")
        return 0


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None: ...


_nothing = _Nothing()


class Measured:
    """What a process holds."""

    def __init__(self) -> None:
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as file:
            self.memory = int(file.read().split()[1]) * resource.getpagesize()
        self.files = len(os.listdir("/proc/self/fd"))
        self.threads = len(os.listdir("/proc/self/task"))

    def __str__(self) -> str:
        return f"{self.memory / 2**20:.0f} MiB, {self.files} files, {self.threads} threads"


def measured() -> Measured:
    """What this process holds now."""
    return Measured()


def main() -> None:
    parser = argparse.ArgumentParser(description="a long run of everything at once")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.exit(Soak(given.seconds, given.seed).run())


if __name__ == "__main__":
    main()
