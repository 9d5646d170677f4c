"""One model in one mode: compile it, compare with eager and float64, time it; and the program of a
worker, which does that for the rows that its arguments name.

    python -m tests.outside.model_rows --timeout 120 diffusers/dit:training timm/vit:dynamic
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tolerance import call as call_with
from tolerance import double_copy, tensors, to_double
from torchair import fallbacks
from torchair.fallbacks import Fallback

from .judging import MODES as FORWARD
from .judging import best, compiled, complaint, counted, timed
from .models import Entry, entry
from .table import Right, Row
from .trial import SHAKEN

MODES = (*FORWARD, "dynamic", "training")
"""Forward at one size in our two modes; then in the first of them with symbolic sizes, at two
sizes; and two training steps."""

LEARNING_RATE = 1e-3
WINDOW = 0.1  # seconds in which the fastest call is looked for
Call = Callable[..., Any]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The type of tensors that are made without one."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


_WIDE = {"cfloat": torch.complex128, "complex64": torch.complex128}
"""What models mean that name a complex type, in double precision."""


class Use:
    """A way to use a model: forward at some sizes."""

    def __init__(self, model: Entry, sizes: tuple[int, ...] = (0,)) -> None:
        self.entry = model
        self.sizes = sizes
        self.rounding: torch.Generator | None = None  # changes inputs in double precision

    def build(self) -> nn.Module:
        """The model, with the same random weights each time."""
        torch.manual_seed(0)
        return self.entry.build().eval()

    def inputs(self, size: int, wide: bool = False) -> Any:
        """The same random inputs each time; `wide`: the same numbers in double precision."""
        torch.manual_seed(size)
        with default_dtype(torch.float32):
            made = self.entry.inputs(size)
        return self._rounded(to_double(made)) if wide else made

    def _rounded(self, tree: Any) -> Any:
        """Double precision as it is, or changed by about the rounding of float32."""
        numbers = self.rounding
        return tree if numbers is None else tree_map(partial(_changed, numbers=numbers), tree)

    def moved(self, seed: int) -> list[Tensor]:
        """Results in double precision, with other roundings of inputs and parameters."""
        self.rounding = torch.Generator().manual_seed(seed)
        model = double_copy(self.build())
        try:
            for parameter in model.parameters():
                parameter.data = _changed(parameter.data, self.rounding)
            with patch.multiple(torch, **_WIDE):
                return self.outcome(model, model, wide=True)
        finally:
            self.rounding = None

    def outcome(self, model: nn.Module, call: Call, wide: bool = False) -> list[Tensor]:
        """Results at all sizes."""
        results: list[Tensor] = []
        with torch.set_grad_enabled(self.entry.needs_grad):
            for size in self.sizes:
                inputs = self.inputs(size, wide)
                results += [t.detach() for t in tensors(_called(call, inputs))]
        return results

    def once(self, call: Call) -> Callable[[], Any]:
        """One call at the first size, to be timed."""
        inputs = self.inputs(0)

        def run() -> Any:
            with torch.set_grad_enabled(self.entry.needs_grad):
                return call_with(call, inputs)

        return run


class Training(Use):
    """Two steps of gradient descent; dropout is off, since compiled random numbers are others, and
    batch normalisation is on."""

    def build(self) -> nn.Module:
        model = super().build()
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.training = True
        return model

    def outcome(self, model: nn.Module, call: Call, wide: bool = False) -> list[Tensor]:
        """Losses, gradients of the second step, and buffers."""
        optimizer = torch.optim.SGD(
            [*model.parameters(), nn.Parameter(torch.zeros(1))], LEARNING_RATE
        )
        losses = []
        for _ in range(2):
            inputs = _differentiable(self.inputs(0, wide))
            optimizer.zero_grad()
            loss = _loss(_called(call, inputs))
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        sources = [*tensors(inputs), *model.parameters()]
        gradients = [t.grad for t in sources if t.grad is not None]
        return [*losses, *gradients, *(b.detach().clone() for b in model.buffers())]

    def once(self, call: Call) -> Callable[[], Any]:
        inputs = _differentiable(self.inputs(0))
        return lambda: _loss(call_with(call, inputs)).backward()


def _changed(leaf: Any, numbers: torch.Generator) -> Any:
    """A tensor of float64 changed by about the rounding of float32; the rest as it is."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    noise = torch.rand(leaf.shape, dtype=leaf.dtype, generator=numbers) * 2 - 1
    return leaf * (1 + torch.finfo(torch.float32).eps * noise)


def _called(call: Call, inputs: Any) -> Any:
    torch.manual_seed(1)
    return call_with(call, inputs)


def _differentiable(inputs: Any) -> Any:
    for tensor in tensors(inputs):
        if tensor.is_floating_point():
            tensor.requires_grad_()
    return inputs


def _loss(result: Any) -> Tensor:
    parts = [t for t in tensors(result) if t.requires_grad]
    return torch.stack([t.abs().square().mean() for t in parts]).sum()


def use_of(name: str, mode: str) -> Use:
    """How a mode uses a model."""
    if mode == "training":
        return Training(entry(name))
    return Use(entry(name), (0, 1) if mode == "dynamic" else (0,))


# ---- one row ----


class Reference:
    """What eager and aot_eager make of a use of a model, and the truth."""

    def __init__(self, name: str, mode: str) -> None:
        self.use, self.dynamic = use_of(name, mode), mode == "dynamic"
        model = self.use.build()
        self.eager = self.use.outcome(model, model)
        self.eager_s = best(self.use.once(model), WINDOW)
        self.truth = self._truth()
        self.aot_eager_s: float | None = None
        self.aot_eager = self._with_aot_eager()

    def _truth(self) -> list[Tensor] | None:
        """The same in double precision; None where a model insists on a type."""
        for default in (torch.float64, torch.float32):
            model = double_copy(self.use.build())
            try:
                with default_dtype(default), patch.multiple(torch, **_WIDE):
                    return self.use.outcome(model, model, wide=True)
            except Exception as error:
                print(f"no float64: {_sentence(error)}", file=sys.stderr)
        return None

    def _with_aot_eager(self) -> str:
        """What is wrong with aot_eager."""
        model = self.use.build()
        try:
            call = compiled(model, "aot_eager", self.dynamic)
            self.aot_eager_s, got = timed(lambda: self.use.outcome(model, call))
        except Exception as error:
            return _sentence(error)
        return self.complaint(got)

    def complaint(self, got: list[Tensor]) -> str:
        """What is wrong with results, "" if nothing is."""
        found = complaint(got, self.eager, self.truth)
        if not found or self._is_small(got):
            return ""
        if self.truth is None:
            return found
        return complaint(got, self.eager, self.truth, [self.use.moved(i) for i in range(SHAKEN)])

    def _is_small(self, got: list[Tensor]) -> bool:
        """Whether all differences are below the last place of the largest result of a training
        step: a gradient that is zero but for rounding has no place of its own."""
        if not isinstance(self.use, Training) or len(got) != len(self.eager):
            return False
        pairs = [(g, e) for g, e in zip(got, self.eager, strict=True) if e.is_floating_point()]
        if any(g.shape != e.shape or g.dtype != e.dtype for g, e in pairs):
            return False
        scale = max((float(e.abs().max()) for _, e in pairs if e.numel()), default=0.0)
        far = max((float((g - e).abs().max()) for g, e in pairs if e.numel()), default=0.0)
        return far <= torch.finfo(torch.float32).eps * scale


@lru_cache(maxsize=1)
def _reference(name: str, mode: str) -> Reference:
    return Reference(name, mode)


def row(name: str, mode: str) -> Row:
    """Compile a model in a mode and judge it."""
    try:
        reference = _reference(name, FORWARD[0] if mode in FORWARD else mode)
    except Exception as error:
        return Row(name, mode, Right.UNKNOWN, note=f"eager: {_sentence(error)}")
    use, model, seconds, speed = reference.use, reference.use.build(), None, None
    call = compiled(model, mode if mode in FORWARD else FORWARD[0], reference.dynamic)
    before = fallbacks.total()
    with counted() as counts:
        try:
            seconds, got = timed(lambda: use.outcome(model, call))
            wrong = reference.complaint(got)
            if not wrong and mode != "training":  # another call may take another path
                wrong = reference.complaint(use.outcome(model, call))
            if not wrong:
                speed = reference.eager_s / best(use.once(call), WINDOW)
        except Exception as error:
            wrong = _sentence(error)
    right = Right.NO if wrong else Right.YES
    if wrong and reference.aot_eager:
        right, wrong = Right.UNKNOWN, f"{wrong}; aot_eager: {reference.aot_eager}"
    judge = "judged by eager: no float64" if reference.truth is None else ""
    note = "; ".join(filter(None, [wrong, judge, _lesser(before)]))
    return Row(
        name,
        mode,
        right,
        counts.graph_breaks.total(),
        counts.fallbacks.total(),
        seconds,
        reference.aot_eager_s,
        speed,
        note,
    )


def _lesser(before: int) -> str:
    """The fallbacks since then: operators without a converter by name, others by what they say."""
    found = {
        str(r).removesuffix(" without a converter").split()[-1]
        if r.kind is Fallback.GENERIC_NODE
        else str(r)
        for r in fallbacks.since(before)
    }
    return ", ".join(sorted(found))[:300]


def _sentence(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


# ---- the program of a worker ----


def main() -> None:
    """A line of JSON for each row. A row that takes too long ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", help="library/model:mode")
    parser.add_argument("--timeout", type=float, default=120)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for mode in ("aot_eager", *FORWARD):  # so that no row pays for imports
        compiled(torch.sin, mode)(torch.ones(2))
    for asked in options.rows:
        name, mode = asked.split(":")
        entry(name)
        faulthandler.dump_traceback_later(options.timeout, exit=True)
        made = row(name, mode)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({**asdict(made), "right": made.right.value}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
