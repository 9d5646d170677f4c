"""Tensors made from sizes and numbers, and random ones.

torch's own functions draw. Where no offset is given, they draw the next numbers of the device's
generator: those that eager draws. An offset that is given seeds a generator made for the call, with
the seed, so that equal seeds and offsets give equal numbers whatever ran before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, const, size
from torchair.codegen.sizes import FLOATS, Element
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim
from torchair.ge.signature import NO_OFFSET
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import (
    Lowering,
    Op,
    TorchKernel,
    Trait,
    add_row,
    call,
    ints,
    native,
    scalar,
)
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, elementwise


def _fill_kernel(value: torch.Tensor, dims: Any, out: Any = None) -> torch.Tensor:
    made = torch.empty(dims, dtype=value.dtype, device=value.device) if out is None else out
    return made.fill_(value.reshape(()))


@native(
    "Fill",
    lambda op: Fact(op.dtype("value"), tuple(op.ints("dims"))),
    call(_fill_kernel, ints("dims")),
    host=("dims",),
    out=True,
)
def _fill(node: LowerOp) -> Lowered:
    value = node.tensor("value")
    return Lowered(node.out_shape(), value.dtype, lambda _: f.single_element(value))


def _like(op_type: str, value: int) -> None:
    def kernel(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full_like(x, value) if out is None else out.fill_(value)

    def rule(node: LowerOp) -> Lowered:
        return Lowered(node.out_shape(), node.out_dtype(), lambda _: const(value, "i64"))

    ew = Trait.ELEMENTWISE
    add_row(op_type, core.like_first, call(kernel), ew, out=True, loops=Lowering(rule))


_like("ZerosLike", 0)
_like("OnesLike", 1)


def _dims_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), tuple(op.ints("shape")))


def unwritten(dtype: torch.dtype) -> Any:
    """What unwritten memory holds under deterministic algorithms, as torch fills
    it; None where it may hold anything. Dynamo guards the switch."""
    switches: Any = torch.utils.deterministic
    wanted = torch.are_deterministic_algorithms_enabled()
    if not wanted or not switches.fill_uninitialized_memory:
        return None
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _empty(dims: Any, dtype: torch.dtype, init: bool, out: Any = None) -> torch.Tensor:
    made = torch.empty(dims, dtype=dtype) if out is None else out
    filled = 0 if init else unwritten(dtype)
    return made if filled is None else made.fill_(filled)


_made = call(_empty, ints("shape"), core.torch_type("dtype"), "init")
add_row("Empty", _dims_rule, _made, host=("shape",), out=True)


def _eye_rule(op: Op) -> Fact:
    rows, columns = op.attr("num_rows"), op.attr("num_columns")
    return Fact(op.attr("dtype"), (*op.attr("batch_shape"), rows, columns or rows))


def _eye_kernel(op: Op) -> TorchKernel:
    fact = _eye_rule(op)
    dims: Any = fact.shape
    dtype = ge_to_torch(fact.dtype)
    return lambda: torch.eye(*dims[-2:], dtype=dtype).repeat(*dims[:-2], 1, 1).reshape(dims)


@native("Eye", _eye_rule, _eye_kernel)
def _eye(node: LowerOp) -> Lowered:
    dims, dtype = node.out_shape(), node.out_dtype()
    return Lowered(dims, dtype, lambda place: f.eq(place[-2].value(), place[-1].value()))


# ---- ranges ----

_RANGE = ("start", "limit", "delta")


def _bounds(op: Op) -> list[Any]:
    """Start, limit and step: numbers of constants, else host integers."""
    known = {p: core.known_number(op, p) for p in _RANGE}
    return [op.int(p) if n is None else n for p, n in known.items()]


def _count(start: Any, limit: Any, delta: Any) -> Dim:
    if any(isinstance(n, float) for n in (start, limit, delta)):
        return math.ceil((limit - start) / delta)
    if delta == 1:
        return limit - start
    return start - limit if delta == -1 else -((start - limit) // delta)


def _range_type(op: Op) -> int:
    types = {op.dtype(p) for p in _RANGE}
    return DataType.DT_INT64 if len(types) > 1 else types.pop()


def _range_kernel(op: Op) -> TorchKernel:
    bounds, dtype = _bounds(op), ge_to_torch(_range_type(op))
    return lambda out=None: torch.arange(*bounds, dtype=dtype, out=out)


@native(
    "Range",
    lambda op: Fact(_range_type(op), (_count(*_bounds(op)),)),
    _range_kernel,
    host=_RANGE,
    out=True,
)
def _range(node: LowerOp) -> Lowered:
    dtype = node.out_dtype()
    exact: Element = "f64" if dtype in FLOATS else "i64"
    start, _, step = _bounds(node)

    def bound(value: Any) -> Expr:
        return cast(const(value, "f64") if isinstance(value, float) else size(value), exact)

    def element(place: IndexTuple) -> Expr:
        return f.add(f.mul(cast(place[0].value(), exact), bound(step)), bound(start))

    return Lowered(node.out_shape(), dtype, element)


def _linspace_kernel(start: Any, stop: Any, count: int, out: Any = None) -> torch.Tensor:
    return torch.linspace(start.item(), stop.item(), count, dtype=start.dtype, out=out)


@native(
    "LinSpace",
    lambda op: Fact(op.dtype("start"), (op.int("num"),)),
    call(_linspace_kernel, lambda op: op.int("num")),
    host=("num",),
    out=True,
)
def _linspace(node: LowerOp) -> Lowered:
    """Each half is counted from its own end, so that both ends are met exactly."""
    (count,) = node.out_shape()
    start, stop = (node.tensor(p) for p in ("start", "stop"))

    def element(place: IndexTuple) -> Expr:
        first, last = (cast(f.single_element(t), "f64") for t in (start, stop))
        gaps = cast(f.most(f.sub(size(count), 1), 1), "f64")
        step, index = f.div(f.sub(last, first), gaps), place[0].value()
        rising = f.add(first, f.mul(step, cast(index, "f64")))
        falling = f.sub(last, f.mul(step, f.sub(gaps, cast(index, "f64"))))
        return f.where(f.lt(index, f.most(size(count // 2), 1)), rising, falling)

    return Lowered((count,), node.out_dtype(), element)


# ---- triangles: what stays depends on the place, so these are not elementwise ----


def _triangle(op_type: str, function: Callable[..., torch.Tensor], keeps: f.Formula) -> None:
    def rule(node: LowerOp) -> Lowered:
        x, diagonal = node.tensor("x"), node.attr("diagonal")

        def element(place: IndexTuple) -> Expr:
            row, column = place[-2].value(), place[-1].value()
            return f.where(keeps(f.sub(column, row), diagonal), x.at(place), 0)

        return Lowered(x.shape, x.dtype, element)

    add_row(op_type, core.like_first, call(function, "diagonal"), out=True, loops=Lowering(rule))


_triangle("Tril", torch.tril, f.le)
_triangle("Triu", torch.triu, f.ge)


# ---- random numbers from a seed and an offset ----

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


def _by_key(fill: Callable[..., Any]) -> Callable[[Op], TorchKernel]:
    def make(op: Op) -> TorchKernel:
        draw = _drawer(_dims_rule(op), op.int("key"), fill)
        return lambda counter, out=None: draw(counter, out)

    return make


_KEY = ("shape", "key", "alg")
RANDOM = Trait.RANDOM | Trait.DRAWS
for _type, _fill_in in (("Uniform", _Tensor.uniform_), ("Normal", _Tensor.normal_)):
    _kernel = _by_key(_fill_in)
    add_row(f"StatelessRandom{_type}V2", _dims_rule, _kernel, RANDOM, host=_KEY, out=True)


def _integers_rule(op: Op) -> Fact:
    return Fact(op.dtype("minval"), tuple(op.ints("shape")))


def _integers(op: Op) -> TorchKernel:
    draw = _drawer(_integers_rule(op), op.int("key"), _Tensor.random_)
    low, high = scalar(op, "minval"), scalar(op, "maxval")
    return lambda counter, minval, maxval, out=None: draw(counter, out, low(minval), high(maxval))


add_row("StatelessRandomUniformIntV2", _integers_rule, _integers, RANDOM, host=_KEY, out=True)


def _bernoulli(op: Op) -> TorchKernel:
    draw = _drawer(_dims_rule(op), op.int("seed"), _Tensor.bernoulli_)
    exact = op.dtype("prob") in (DataType.DT_FLOAT, DataType.DT_DOUBLE)
    one = scalar(op, "prob") if op.shape("prob") == () else None

    def run(prob: _Tensor, offset: _Tensor, out: _Tensor | None = None) -> _Tensor:
        if one is not None:  # torch draws in another way where all have the same chance
            return draw(offset, out, float(one(prob)))
        fits = prob if op.shape("shape") != (0,) else prob.reshape(())
        return draw(offset, out, fits if exact else fits.float())

    return run


add_row("StatelessBernoulli", _dims_rule, _bernoulli, RANDOM, host=("shape", "seed"), out=True)


def _permutation_rule(op: Op) -> Fact:
    return Fact(op.attr("dtype"), (op.int("n"),))


def _permutation(op: Op) -> TorchKernel:
    n = op.int("n")

    def fill(out: _Tensor, generator: torch.Generator | None = None) -> None:
        kind: Any = dict(dtype=out.dtype, device=out.device)
        torch.randperm(n, generator=generator, out=out, **kind)

    draw = _drawer(_permutation_rule(op), op.int("seed"), fill)
    return lambda offset, out=None: draw(offset, out)


add_row("StatelessRandperm", _permutation_rule, _permutation, RANDOM, host=("n", "seed"), out=True)


def _multinomial(x: _Tensor, offset: _Tensor, count: int, again: bool, seed: int) -> _Tensor:
    return torch.multinomial(x, count, again, generator=generator(x.device, seed, offset))


add_row(
    "MultinomialWithReplacement",
    lambda op: Fact(DataType.DT_INT64, (*op.shape("x")[:-1], op.attr("numsamples"))),
    call(_multinomial, "numsamples", "replacement", lambda op: op.int("seed")),
    RANDOM,
    host=("seed",),
)


# ---- dropout: the mask is one truth value for each element ----


def _mask_rule(op: Op) -> Fact:
    return Fact(DataType.DT_BOOL, tuple(op.ints("shape")))


def _mask(op: Op) -> TorchKernel:
    draw = _drawer(_mask_rule(op), op.int("seed"), _Tensor.bernoulli_)
    keep = scalar(op, "prob")
    return lambda prob, offset, out=None: draw(offset, out, keep(prob))


def _do_mask(op: Op) -> TorchKernel:
    keep = scalar(op, "keep_prob")

    def run(x: _Tensor, mask: _Tensor, prob: _Tensor, out: _Tensor | None = None) -> _Tensor:
        kept = keep(prob)
        return torch.mul(x, mask, out=out).mul_(1 / kept if kept else 0.0)

    return run


_MASK_HOST = ("shape", "seed", "seed1")
add_row("StatelessDropOutGenMask", _mask_rule, _mask, RANDOM, host=_MASK_HOST, out=True)


@native("DropOutDoMask", core.same_as("x"), _do_mask, Trait.ELEMENTWISE, out=True)
def _dropout(node: LowerOp) -> Lowered:
    keep = node.tensor("keep_prob")

    def formula(x: Expr, mask: Expr) -> Expr:
        chance = cast(f.single_element(keep), x.dtype)
        factor = f.where(f.eq(chance, 0), 0, f.div(1, chance))
        return f.mul(f.mul(x, cast(mask, x.dtype)), factor)

    return elementwise(formula, node.tensor("x"), node.tensor("mask"))
