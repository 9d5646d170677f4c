"""How results of random programs are judged: what is as near to the truth as eager, what rounding
explains, how tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from like_eager import sharing, twin
from native_check import differences
from torchair.deploy.guards import TraceError


def lost(
    got: torch.Tensor,
    plain: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    scale: float,
) -> bool:
    """Whether `aot_eager` differs from eager, and a result is what it gives."""
    wide = plain.double() if plain.is_floating_point() else plain
    return bool(differences(plain, eager, truth, scale)) and not differences(
        got, plain, wide, scale
    )


def uncertain(eager: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether eager itself does not give what float64 gives, where numbers are not finite."""
    if not eager.is_floating_point():
        return True  # a comparison of what is not a number
    same = eager.isfinite() == truth.isfinite()
    return not bool(same.all()) or bool((eager.isnan() != truth.isnan()).any())


def rounded(
    got: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    scale: float,
    values: Iterable[torch.Tensor],
) -> bool:
    """Whether a result is off by what is left of larger numbers that cancel, or by the rounding of
    shorter ones that it was computed from: fused, these are not rounded in between."""
    if not got.is_floating_point():
        return False
    own, floats = torch.finfo(got.dtype).eps, [v for v in values if v.is_floating_point()]
    coarse = max((torch.finfo(v.dtype).eps for v in floats), default=own)
    allowed = coarse * truth.double().abs() + 32 * torch.finfo(torch.float32).eps * scale
    near = (got.double() - truth.double()).abs() <= allowed
    return own < 1e-3 and not differences(torch.where(near, eager, got), eager, truth, scale)


class RoundingNoise(TorchDispatchMode):
    """What operators compute in bfloat16 or float16 is off by up to one rounding more, at random:
    other places where a right program may round. Without a seed there is no noise."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.draws = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op._schema.is_mutable or any(r.alias_info for r in op._schema.returns):
            return made  # what it returns is an argument, or part of one
        return tree_map(self._noisy, made)

    def _noisy(self, x: Any) -> Any:
        short = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        if self.draws is None or not short:
            return x
        noise = torch.rand(x.shape, generator=self.draws) * 2 - 1
        return (x.float() * (1 + torch.finfo(x.dtype).eps / 2 * noise)).to(x.dtype)


def within_noise(
    got: torch.Tensor,
    eager: torch.Tensor,
    noisy: Callable[[int | None], torch.Tensor],
    runs: int = 16,
) -> bool:
    """Whether a result is no further from eager's than twice what rounding noise makes of that in
    any of some runs: gradients in which large numbers cancel. Nothing is, where runs give something
    else without noise too, as for operators that are differentiated in another way then."""
    if not got.is_floating_point() or not torch.equal(noisy(None), eager):
        return False
    wide = eager.double()
    spread = torch.stack([(noisy(seed).double() - wide).abs() for seed in range(runs)]).amax(0)
    return bool(((got.double() - wide).abs() <= 2 * spread).all())


def refused(e: Exception) -> bool:
    """Whether `torchair.compile` says that a call is not for it, in ways that its page tells."""
    return isinstance(e, TraceError) or "updates its arguments, and" in str(e)


def strided(t: torch.Tensor) -> list[int]:
    """Strides that say something."""
    if not t.numel():
        return []
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1]


def memory(tensors: list[torch.Tensor]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """How tensors lie in memory: their strides, and which share it."""
    return [strided(t) for t in tensors], sharing(tensors)


def copied(args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory as the arguments do."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for t in args:
        if not t.numel():
            made[id(t)] = twin(t)
            continue
        at = t.untyped_storage().data_ptr()
        copy = storages.setdefault(at, t.untyped_storage().clone())
        empty = torch.empty(0, dtype=t.dtype)
        made[id(t)] = empty.set_(copy, t.storage_offset(), t.shape, t.stride())
    return [made[id(t)] for t in args]


def unchanged(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors hold the same; so does what is not a number."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def parts(t: torch.Tensor) -> torch.Tensor:
    """A tensor as numbers that have a size: a complex one as its two parts."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
