"""How far a result may be from the truth. Float64 tells what rounding costs; nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TIMES_EAGER = 8  # other orders of rounding may cost up to this many errors of eager
FLOOR = 8  # and never less than this many units in the last place of the largest value
FLOOR_WIDE = 256  # the same where nothing is wider: eager itself is the judge


@dataclass(frozen=True)
class Difference:
    """Why a tensor is wrong: its largest error, and the largest that rounding explains."""

    error: float
    allowed: float
    scale: float
    what: str = ""  # where it is not the values that differ, or not by a number

    def __str__(self) -> str:
        if self.what:
            return self.what
        return f"error {self.error:.3g}, rounding explains {self.allowed:.3g}"


def difference(got: Any, eager: Any, truth: Any = None) -> Difference | None:
    """What is wrong with a result, None if it is as good as eager. `truth` is the same in float64,
    None where there is none."""
    if not isinstance(eager, Tensor):
        return _of_numbers(got, eager)
    if not isinstance(got, Tensor):
        return _other(f"{type(got).__name__} instead of a tensor")
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return _other(f"{_described(got)} instead of {_described(eager)}")
    if not eager.numel() or got is eager:
        return None
    got, eager = near(got), near(eager)
    known = near(truth) if isinstance(truth, Tensor) and truth.shape == eager.shape else None
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        return _of_integers(got, eager, known)
    return _of_floats(got, eager, known)


def is_explained(wrong: Difference, got: Any, eager: Any, truth: Any, moved: Any) -> bool:
    """Whether a difference is no larger than what rounding on the way does: `moved` is the truth
    where every number was off by that much."""
    if not isinstance(moved, Tensor) or not isinstance(got, Tensor) or moved.shape != got.shape:
        return False
    if got.dtype.is_floating_point:
        real = truth if isinstance(truth, Tensor) else eager
        far = (near(moved).double() - near(real).double()).abs().max() if got.numel() else 0.0
        return wrong.error <= TIMES_EAGER * float(far)
    return difference(got, eager, moved) is None


def near(tensor: Tensor) -> Tensor:
    """A tensor where it can be compared: on the GPU, or on the host."""
    plain = tensor.detach()
    return plain if plain.device.type in ("cpu", "cuda") else plain.cpu()


def close(got: Tensor, eager: Tensor) -> bool:
    """Whether two results are so close that float64 need not be asked: then one is right if the
    other is."""
    if (got.dtype, got.shape) != (eager.dtype, eager.shape):
        return False
    got, eager = near(got), near(eager)
    if not eager.dtype.is_floating_point:
        return bool(torch.equal(got, eager))
    if not eager.numel():
        return True
    wide = torch.float64 if eager.dtype is torch.float64 else torch.float32
    off = (got.to(wide) - eager.to(wide)).abs().max()
    scale = eager.to(wide).abs().max()
    return bool(off <= FLOOR / 2 * torch.finfo(eager.dtype).eps * scale)  # False where NaN is


def _of_numbers(got: Any, eager: Any) -> Difference | None:
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if got == eager or (got != got and eager != eager):
        return None
    if isinstance(eager, float) and isinstance(got, float):
        allowed = FLOOR_WIDE * torch.finfo(torch.float64).eps * abs(eager)
        if abs(got - eager) <= allowed:
            return None
    return _other(f"{got!r} instead of {eager!r}")


def _of_integers(got: Tensor, eager: Tensor, truth: Tensor | None) -> Difference | None:
    wrong = got != eager
    if truth is not None and truth.dtype == got.dtype:
        wrong &= got != truth  # eager's rounding may have decided otherwise
    count = int(wrong.sum())
    if not count:
        return None
    return _other(f"{count} of {got.numel()} elements differ")


def _of_floats(got: Tensor, eager: Tensor, truth: Tensor | None) -> Difference | None:
    dtype = got.dtype
    if dtype.is_complex:
        mine, theirs = (torch.view_as_real(t.resolve_conj()) for t in (got, eager))
        wide = None if truth is None else torch.view_as_real(truth.resolve_conj())
        return _of_floats(mine, theirs, wide)
    eps, own = torch.finfo(dtype).eps, truth is None or dtype is torch.float64
    mine, theirs = got.double(), eager.double()
    real = theirs if truth is None or own else truth.double()
    finite = mine.isfinite() & theirs.isfinite() & real.isfinite()
    odd = ~finite
    if bool(odd.any()):
        wrong = odd & ~_same(mine, theirs) & ~_same(mine, real.to(dtype).double())
        if bool(wrong.any()):
            return _other(f"{int(wrong.sum())} elements are not finite, or should not be")
        mine, theirs, real = (torch.where(finite, t, 0.0) for t in (mine, theirs, real))
    error, eagers, scale = torch.stack(
        [(mine - real).abs().max(), (theirs - real).abs().max(), real.abs().max()]
    ).tolist()
    floor = (FLOOR_WIDE if dtype is torch.float64 else FLOOR) * eps * scale
    allowed = max(TIMES_EAGER * eagers, floor, torch.finfo(dtype).smallest_normal)
    return None if error <= allowed else Difference(error, allowed, scale)


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _other(text: str) -> Difference:
    return Difference(float("inf"), 0.0, 0.0, text)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def leaves(tree: Any) -> Iterator[Any]:
    """What an FX node gives, one by one; None is left out."""
    members = tree if isinstance(tree, list | tuple) else (tree,)
    for member in members:
        if isinstance(member, list | tuple):
            yield from leaves(member)
        elif member is not None:
            yield member
