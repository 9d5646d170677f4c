"""Random numbers from a seed and an offset.

torch's own functions draw. Where no offset is given, they draw the next numbers of the device's
generator: those that eager draws. An offset that is given seeds a generator made for the call, with
the seed, so that equal seeds and offsets give equal numbers whatever ran before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Kernel, Op, Trait, add_row, same_as
from torchair.catalog.elementwise import scalar
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.signature import NO_OFFSET

_WORD = 2**64 - 1


def mix(seed: int, offset: int) -> int:
    """One 64 bit seed from two numbers. All bits count: torch's CPU generator keeps the low half
    of a seed only, and near seeds must not give near numbers."""
    z = (seed * 0x9E3779B97F4A7C15 + offset) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def generator(device: torch.device, seed: int, offset: torch.Tensor) -> torch.Generator | None:
    """A generator for one call, None for the device's own; of an offset vector the last number
    counts."""
    number = int(offset.reshape(-1)[-1])
    if number == NO_OFFSET:
        return None
    made = torch.Generator(device)
    made.manual_seed(mix(seed, number))
    return made


# ---- results of given dims, filled by one function ----

_Tensor = torch.Tensor


def _drawer(fact: Fact, seed: int, fill: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A function of the offset, the result's place and what `fill` takes beside a generator."""
    dims: Any = fact.shape
    dtype = ge_to_torch(fact.dtype)

    def draw(offset: _Tensor, out: _Tensor | None, *rest: Any) -> _Tensor:
        made = torch.empty(dims, dtype=dtype) if out is None else out
        source = generator(made.device, seed, offset)
        if source is None:
            fill(made, *rest)
        else:
            fill(made, *rest, generator=source)
        return made

    return draw


def _dims_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), tuple(op.ints("shape")))


def _by_key(fill: Callable[..., Any]) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        draw = _drawer(_dims_rule(op), op.int("key"), fill)
        return lambda counter, out=None: draw(counter, out)

    return make


_KEY = ("shape", "key", "alg")
RANDOM = Trait.RANDOM | Trait.DRAWS
add_row(
    "StatelessRandomUniformV2", _dims_rule, _by_key(_Tensor.uniform_), RANDOM, host=_KEY, out=True
)
add_row(
    "StatelessRandomNormalV2", _dims_rule, _by_key(_Tensor.normal_), RANDOM, host=_KEY, out=True
)


def _integers_rule(op: Op) -> Fact:
    return Fact(op.dtype("minval"), tuple(op.ints("shape")))


def _integers(op: Op) -> Kernel:
    draw = _drawer(_integers_rule(op), op.int("key"), _Tensor.random_)
    low, high = scalar(op, "minval"), scalar(op, "maxval")
    return lambda counter, minval, maxval, out=None: draw(counter, out, low(minval), high(maxval))


add_row("StatelessRandomUniformIntV2", _integers_rule, _integers, RANDOM, host=_KEY, out=True)


def _bernoulli(op: Op) -> Kernel:
    draw = _drawer(_dims_rule(op), op.int("seed"), _Tensor.bernoulli_)
    exact = op.dtype("prob") in (DataType.DT_FLOAT, DataType.DT_DOUBLE)
    one = scalar(op, "prob") if op.shape("prob") == () else None

    def run(prob: _Tensor, offset: _Tensor, out: _Tensor | None = None) -> _Tensor:
        if one is not None:  # torch draws in another way where all have the same chance
            return draw(offset, out, float(one(prob)))
        return draw(offset, out, prob if exact else prob.float())

    return run


add_row("StatelessBernoulli", _dims_rule, _bernoulli, RANDOM, host=("shape", "seed"), out=True)


def _permutation_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), (op.int("n"),))


def _permutation(op: Op) -> Kernel:
    n = op.int("n")

    def fill(out: _Tensor, generator: torch.Generator | None = None) -> None:
        kind: Any = dict(dtype=out.dtype, device=out.device)
        torch.randperm(n, generator=generator, out=out, **kind)

    draw = _drawer(_permutation_rule(op), op.int("seed"), fill)
    return lambda offset, out=None: draw(offset, out)


add_row("StatelessRandperm", _permutation_rule, _permutation, RANDOM, host=("n", "seed"), out=True)


def _multinomial_rule(op: Op) -> Fact:
    return Fact(DataType.DT_INT64, (*op.shape("x")[:-1], op.attr("numsamples")))


def _multinomial(op: Op) -> Kernel:
    count, replacement = op.attr("numsamples"), op.attr("replacement")
    seed = op.int("seed")

    def run(x: _Tensor, offset: _Tensor) -> _Tensor:
        source = generator(x.device, seed, offset)
        return torch.multinomial(x, count, replacement, generator=source)

    return run


add_row("MultinomialWithReplacement", _multinomial_rule, _multinomial, RANDOM, host=("seed",))


# ---- dropout: the mask is one truth value for each element ----


def _mask_rule(op: Op) -> Fact:
    return Fact(DataType.DT_BOOL, tuple(op.ints("shape")))


def _mask(op: Op) -> Kernel:
    draw = _drawer(_mask_rule(op), op.int("seed"), _Tensor.bernoulli_)
    keep = scalar(op, "prob")
    return lambda prob, offset, out=None: draw(offset, out, keep(prob))


def _do_mask(op: Op) -> Kernel:
    keep = scalar(op, "keep_prob")

    def run(x: _Tensor, mask: _Tensor, prob: _Tensor, out: _Tensor | None = None) -> _Tensor:
        kept = keep(prob)
        return torch.mul(x, mask, out=out).mul_(1 / kept if kept else 0.0)

    return run


_MASK_HOST = ("shape", "seed", "seed1")
add_row("StatelessDropOutGenMask", _mask_rule, _mask, RANDOM, host=_MASK_HOST, out=True)
add_row("DropOutDoMask", same_as("x"), _do_mask, Trait.ELEMENTWISE, out=True)
