"""Calls of `npu` operators as random programs: any case of their tables, or a call of random sizes,
in any mode, with arguments that are frozen weights, with sizes that are symbols, with generated
code and without."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

import torchair
from npu_cases import MODULES, Case, leaves
from npu_pattern_cases import PATTERNS
from random_npu_calls import drawn

MODES = ("max-autotune", "max-autotune", "reduce-overhead")
HALF = 2e-2
SHARE = 8  # one of so many calls has random sizes: there are many more cases
COPIED = "apply_rotary"  # eager code updates arguments, graphs copy first: see npu_library.md


@cache
def cases() -> tuple[Case, ...]:
    """All calls; what is joined is compared with itself in eager mode."""
    found = [case for module in MODULES for case in import_module(module).CASES]
    found += [
        Case(f"joined-{name}", fn, args, fn, rough=HALF)
        for name, (fn, args, *_) in PATTERNS.items()
    ]
    return tuple(found)


class Call(torch.nn.Module):
    """A case of which all arguments but the first are weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for k, t in enumerate(case.inputs[1:]):
            self.register_buffer(f"held{k}", t.clone())

    def forward(self, first: torch.Tensor) -> Any:
        """The call."""
        held = [getattr(self, f"held{k}") for k in range(len(self.case.inputs) - 1)]
        return self.case.call(first, *held)


class NpuTrial:
    """One call and the way it is run."""

    def __init__(self, seed: int, number: int) -> None:
        pick = random.Random(f"npu {seed}")
        settings: dict[str, Any] = {}
        self.seed = seed
        self.case = cases()[(number - number // SHARE - 1) % len(cases())]
        if number % SHARE == 0:
            self.case, settings = drawn(seed, number // SHARE)
        self.mode = pick.choice(MODES)
        self.frozen = pick.random() < 0.4 and not self.case.name.startswith(COPIED)
        self.dynamic = pick.random() < 0.3
        self.native = pick.random() < 0.85
        for name, value in settings.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        ways = [w for w in ("frozen", "dynamic", "native") if getattr(self, w)]
        return " ".join([f"seed {self.seed} npu {self.case} {self.mode}", *ways])

    def run(self) -> str:
        """What is wrong, "" if nothing."""
        torch._dynamo.reset()
        config = torchair.CompilerConfig()
        config.mode = self.mode
        config.experimental_config.frozen_parameter = self.frozen
        config.experimental_config.native_code = self.native
        backend = torchair.get_npu_backend(compiler_config=config)
        fn, eager = (self._function() for _ in range(2))  # each with a state of its own
        call = torch.compile(fn, backend=backend, dynamic=self.dynamic)
        for turn in range(2):
            wanted, got = (self._called(each) for each in (eager, call))
            if wrong := self._differ(got, wanted):
                return f"call {turn}: {wrong}"
        return ""

    def _called(self, call: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(self.seed)  # dropout draws
        return leaves(call(*self._arguments()))

    def _function(self) -> Callable[..., Any]:
        case = self.case
        return Call(case) if self.frozen else lambda *tensors: case.call(*tensors)

    def _arguments(self) -> list[torch.Tensor]:
        given = self.case.inputs[:1] if self.frozen else self.case.inputs
        return [t.clone() for t in given]

    def _differ(self, got: Any, wanted: Any) -> str:
        """Errors count against the largest result: those of sums that cancel out."""
        for k, (g, w) in enumerate(zip(got, wanted, strict=True)):
            if not isinstance(w, torch.Tensor):
                if g != w:
                    return f"result {k}: {g} instead of {w}"
                continue
            if (g.shape, g.dtype) != (w.shape, w.dtype):
                return f"result {k}: {g.dtype} {[*g.shape]} instead of {w.dtype} {[*w.shape]}"
            unit = max(1.0, float(w.double().abs().nan_to_num(0, 0, 0).max())) if w.numel() else 1.0
            step = 1.0 if w.dtype in (torch.int8, torch.uint8) else 0.0  # rounded the other way
            close = torch.isclose(
                g.double(),
                w.double(),
                self.case.rough,
                max(self.case.rough * unit, step),
                equal_nan=True,
            )
            if not bool(close.all()):
                return f"result {k}: {int((~close).sum())} of {close.numel()} wrong"
        return ""
