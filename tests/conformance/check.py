"""One case: run eager, run compiled, compare; when ours is wrong, ask AOTAutograd alone.

The compiled run goes through AOTAutograd without Dynamo, so that the graphs are those of
`torch.compile` and a sample takes milliseconds. What AOTAutograd with an eager compiler cannot do
either is not held against the converters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch.utils._pytree import tree_leaves

import torchair
from torchair.backend import boxed
from torchair.configs.options import Numerics
from torchair.verification.judge import same_bits

from .cases import Call, Case
from .watch import Seen, name_of, watch

PASSED, GENERIC, FAILED, UNTRACEABLE = "passed", "generic", "failed", "untraceable"

TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
    torch.complex64: (1e-5, 1e-5),
}
# Gradients add up more roundings, in another order than eager's.
GRAD_TOLERANCE = TOLERANCE | {torch.float32: (1e-4, 1e-4)}

TIMES_EAGER = 2

# Their results are whatever the memory held.
UNINITIALISED = ("empty", "new_empty")


class Mismatch(AssertionError):
    """The results differ from eager's."""


class OtherLayout(Mismatch):
    """The results are right but lie in memory in another way than eager's."""


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    status: str
    reason: str = ""
    families: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    generic: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.status in (PASSED, GENERIC)


def check(case: Case, call: Call, numerics: Numerics = "default") -> Outcome:
    """The outcome of one case."""
    try:
        expected = _evaluate(case, call.fn, call)
    except Exception as e:
        return Outcome(case, UNTRACEABLE, f"eager: {_line(e)}")
    with watch() as seen:
        try:
            got = _evaluate(case, _compiled(case, call, our_compiler(numerics)), call)
            if numerics == "strict":
                _compare_bits(case, got, expected)
            else:
                _compare(case, call, got, expected, seen)
            if seen.random and numerics == "default":
                again = _evaluate(case, _compiled(case, call, our_compiler()), call)
                _compare(case, call, again, got, None)
            if seen.errors:
                raise Mismatch(seen.errors[0])
        except Exception as e:
            return _blame(case, call, expected, seen, e, numerics)
    return _outcome(case, GENERIC if seen.generic else PASSED, "", seen)


def _blame(
    case: Case, call: Call, expected: Any, seen: Seen, ours: Exception, numerics: Numerics
) -> Outcome:
    """Ours is wrong; so it is a failure unless AOTAutograd alone is wrong as well."""
    if not seen.errors:
        try:
            got = _evaluate(case, _compiled(case, call, eager_compiler), call)
            if numerics == "strict":
                _compare_bits(case, got, expected)
            else:
                _compare(case, call, got, expected, seen)
        except OtherLayout:
            if isinstance(ours, OtherLayout):  # layouts are AOTAutograd's to choose
                return _outcome(case, GENERIC if seen.generic else PASSED, "", seen)
            return _outcome(case, FAILED, _line(ours), seen)
        except Exception as e:
            return _outcome(case, UNTRACEABLE, f"aot: {_line(e)}", seen)
    return _outcome(case, FAILED, _line(ours), seen)


def _outcome(case: Case, status: str, reason: str, seen: Seen) -> Outcome:
    used = sorted(name_of(t) for t in seen.used if str(t) not in seen.generic)
    return Outcome(case, status, reason, sorted(seen.families), used, dict(seen.generic))


# ---- running ----


def our_compiler(numerics: Numerics = "default") -> Callable[..., Any]:
    config = torchair.CompilerConfig()
    config.numerics = numerics
    compiler = torchair.get_compiler(config)
    return lambda gm, inputs: boxed(compiler(gm, inputs))


def eager_compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return boxed(gm.forward)


def _compiled(case: Case, call: Call, compiler: Callable[..., Any]) -> Callable[..., Any]:
    return aot_function(
        call.fn,
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=default_partition,
        decompositions={},
        keep_inference_input_mutations=True,
        dynamic=case.group.mode == "dynamic",
    )


def _evaluate(case: Case, fn: Callable[..., Any], call: Call) -> list[Any]:
    """The results of a call and its inputs, which it may change; or its gradients.

    Random numbers are the same every time.
    """
    torch.manual_seed(case.index)
    inputs = call.fresh()
    if case.group.mode != "grad":
        with torch.no_grad():
            return [*tree_leaves(fn(*inputs)), *inputs]
    results = [
        r for r in tree_leaves(fn(*inputs)) if isinstance(r, torch.Tensor) and r.requires_grad
    ]
    if not results:
        raise ValueError("no result depends on an input in a differentiable way")
    wanted = [x for x in inputs if x.requires_grad]
    given = [_cotangent(r, i) for i, r in enumerate(results)]
    return list(torch.autograd.grad(results, wanted, given, allow_unused=True))


def _cotangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """A gradient to start from, the same for eager and compiled whatever they draw."""
    generator = torch.Generator().manual_seed(index)
    real = torch.rand(result.shape, dtype=torch.float64, generator=generator) + 0.5
    return real.to(result.device, result.dtype)


# ---- comparing ----


def _compare(
    case: Case, call: Call, got: list[Any], expected: list[Any], seen: Seen | None
) -> None:
    """Raise Mismatch unless `got` is `expected`. Without `seen`, random numbers count too."""
    if len(got) != len(expected):
        raise Mismatch(f"{len(got)} results instead of {len(expected)}")
    values = not _is_uninitialised(case) and (seen is None or not seen.random)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(e, torch.Tensor) or not isinstance(g, torch.Tensor):
            if values and not _same_number(g, e):
                raise Mismatch(f"result {i}: {g!r} instead of {e!r}")
            continue
        for what in ("dtype", "shape", "layout"):
            if getattr(g, what) != getattr(e, what):
                raise Mismatch(f"result {i}: {what} {getattr(g, what)}, not {getattr(e, what)}")
        difference = _difference(g, e, case.group.mode) if values else ""
        if difference and not _as_good_as_eager(case, call, i, g, e):
            raise Mismatch(f"result {i}: {difference}")
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if isinstance(e, torch.Tensor) and _strides(g) != _strides(e):
            raise OtherLayout(f"result {i}: strides {g.stride()}, not {e.stride()}")


def _compare_bits(case: Case, got: list[Any], expected: list[Any]) -> None:
    """Raise Mismatch unless every number of `got` has the bits of `expected`; a NaN is a NaN."""
    if len(got) != len(expected):
        raise Mismatch(f"{len(got)} results instead of {len(expected)}")
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if _is_uninitialised(case) or e is None:
            continue
        if not same_bits(g, e):
            raise Mismatch(f"result {i}: other bits, {_difference(g, e, '') or 'within tolerance'}")


def _strides(t: torch.Tensor) -> list[int]:
    """The strides that matter."""
    if t.layout is not torch.strided or t.numel() < 2:
        return []
    return [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _difference(got: torch.Tensor, expected: torch.Tensor, mode: str) -> str:
    """What is wrong, empty if nothing is."""
    table = GRAD_TOLERANCE if mode == "grad" else TOLERANCE
    rtol, atol = table.get(expected.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as e:
        return " ".join(line for line in str(e).splitlines()[:4] if line)
    return ""


def _as_good_as_eager(
    case: Case, call: Call, index: int, got: torch.Tensor, eager: torch.Tensor
) -> bool:
    """Whether a result is at most TIMES_EAGER times as far from the truth as eager's.

    Where large terms cancel, two results that are rounded differently are both right.
    """
    if eager.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    exact = Call(call.fn, [t.double() if t.is_floating_point() else t for t in call.tensors])
    try:
        truth = _evaluate(case, exact.fn, exact)[index]
        mine, theirs = ((t.double() - truth).abs().max().item() for t in (got, eager))
    except Exception:  # not every operator is there in double
        return False
    return mine <= TIMES_EAGER * theirs


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b


def _is_uninitialised(case: Case) -> bool:
    return case.group.op.startswith(UNINITIALISED)


def _line(error: Exception) -> str:
    text = " ".join(str(error).partition("Traceback (most recent")[0].split())
    return f"{type(error).__name__}: {text}"[:400]
