"""One program in one mode: two calls of eager, float64, ours, and aot_eager when ours is wrong.

A call's outcome is a list: results, arguments and buffers after the call, and in training the
gradients of arguments and parameters. The second call gets other numbers of the same kind.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tolerance import double_copy, to_double

from .judging import Counts, best, compiled, complaint, counted, timed
from .table import Right

CALLS = 2
SHAKEN = 3  # times that inputs are rounded otherwise, to see what that does to a result
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Program:
    """A function or module, and the arguments of a call."""

    name: str
    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def fresh(self, double: bool = False) -> Program:
        """A copy with tensors of its own, which a call may change."""
        fn: Callable[..., Any] = self.fn
        if isinstance(fn, nn.Module):
            fn = double_copy(fn) if double else copy.deepcopy(fn)
        given = tree_map(_own, (tuple(self.args), dict(self.kwargs)))
        args, kwargs = to_double(given) if double else given
        return Program(self.name, fn, args, kwargs)


@dataclass
class Finding:
    """What a program came to in a mode."""

    name: str
    right: Right
    why: str = ""
    counts: Counts = field(default_factory=Counts)
    seconds: float | None = None
    aot_eager: float | None = None
    speed: float | None = None


def tried(
    program: Program, mode: str, *, training: bool, timing: bool, dynamic: bool | None = False
) -> Finding:
    """Judge a program in a mode; with `timing` also aot_eager's first call and later calls."""
    try:
        eager = outcomes(program, _as_it_is, training)[1]
    except Exception as e:
        return Finding(program.name, Right.UNKNOWN, f"eager: {line(e)}")
    truth = _truth(program, training)
    with counted() as counts:
        try:
            seconds, got, call = outcomes(program, lambda fn: compiled(fn, mode, dynamic), training)
            wrong = complaint(got, eager, truth)
            if wrong:
                moved = [_truth(shaken(program, i), training) for i in range(SHAKEN)]
                wrong = complaint(got, eager, truth, moved)
        except Exception as e:
            got, call, seconds, wrong = None, None, None, line(e)
    if wrong:
        return _blamed(program, wrong, got, truth, counts, training, dynamic)
    found = Finding(program.name, Right.YES, "", counts, seconds)
    if timing and call is not None:
        found.speed = speed(program, call, training)
        found.aot_eager = _aot_eager(program, training, dynamic)[0]
    return found


def _blamed(
    program: Program,
    wrong: str,
    got: Any,
    truth: Any,
    counts: Counts,
    training: bool,
    dynamic: bool | None,
) -> Finding:
    """Ours is wrong, unless aot_eager does the same."""
    plain = _aot_eager(program, training, dynamic)[1]
    if isinstance(plain, Exception) and got is None:
        return Finding(program.name, Right.UNKNOWN, f"aot_eager: {line(plain)}", counts)
    if got is not None and not isinstance(plain, Exception) and not complaint(got, plain, truth):
        return Finding(program.name, Right.UNKNOWN, f"as aot_eager: {wrong}", counts)
    return Finding(program.name, Right.NO, wrong, counts)


def _aot_eager(program: Program, training: bool, dynamic: bool | None) -> tuple[Any, Any]:
    """Seconds of the first call with aot_eager and the outcomes, or the error."""
    try:
        return outcomes(program, lambda fn: compiled(fn, "aot_eager", dynamic), training)[:2]
    except Exception as e:
        return None, e


def _truth(program: Program, training: bool) -> list[Any] | None:
    """The outcomes in float64, None where torch has no such kernel."""
    try:
        return outcomes(program, _as_it_is, training, double=True)[1]
    except Exception:
        return None


def shaken(program: Program, seed: int) -> Program:
    """The program with arguments and parameters changed by about their rounding."""
    own = program.fresh()
    numbers = torch.Generator().manual_seed(seed)

    def shake(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            noise = torch.rand(leaf.shape, dtype=torch.float64, generator=numbers) * 2 - 1
            leaf = leaf.double() * (1 + torch.finfo(leaf.dtype).eps * noise)
        return leaf

    args, kwargs = tree_map(shake, (own.args, own.kwargs))
    fn = own.fn
    if isinstance(fn, nn.Module):
        before = [p.detach().clone() for p in fn.parameters()]
        fn = double_copy(fn)
        with torch.no_grad():
            for p, old in zip(fn.parameters(), before, strict=True):
                p.copy_(shake(old))
    return Program(own.name, fn, args, kwargs)


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


# ---- calls ----


def outcomes(
    program: Program, compile_: Compile, training: bool, double: bool = False
) -> tuple[float, list[Any], Callable[..., Any]]:
    """Seconds of the first call, what all calls came to, and what was called."""
    own = program.fresh(double)
    if isinstance(own.fn, nn.Module):
        own.fn.train(training)
    call = compile_(own.fn)
    came_to: list[Any] = []
    seconds = []
    for turn in range(CALLS):
        given = own.fresh() if turn == 0 else _turned(own.fresh())
        torch.manual_seed(turn)
        taken, found = timed(lambda given=given: _once(own.fn, call, given, training))
        seconds.append(taken)
        came_to += found
    return seconds[0], came_to, call


def _once(fn: Any, call: Callable[..., Any], given: Program, training: bool) -> list[Any]:
    with torch.set_grad_enabled(training):
        inputs = [t for t in tree_leaves((given.args, given.kwargs)) if isinstance(t, Tensor)]
        wanted = [t.requires_grad_() for t in inputs if training and _differentiable(t)]
        # Leaves may not be changed in place, so functions get results of a trivial operator.
        args, kwargs = given.args, given.kwargs
        if training:
            args, kwargs = tree_map(_handed, (given.args, given.kwargs))
        results = tree_leaves(call(*args, **kwargs))
        found = [*results, *(inputs if not training else [])]
        if isinstance(fn, nn.Module):
            found += list(fn.buffers())
            wanted += [p for p in fn.parameters() if training and p.requires_grad]
        gradients = _gradients(results, wanted) if training else []
        plain = [t.detach().clone() if isinstance(t, Tensor) else t for t in found]
        return [*plain, *gradients]


def _gradients(results: Sequence[Any], wanted: Sequence[Tensor]) -> list[Tensor | None]:
    sources = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if not sources or not wanted:
        raise ValueError("no result depends on an input in a differentiable way")
    given = [_cotangent(r, i) for i, r in enumerate(sources)]
    return list(torch.autograd.grad(sources, wanted, given, allow_unused=True))


def _cotangent(result: Tensor, index: int) -> Tensor:
    """A gradient to start from: the same numbers in every type."""
    generator = torch.Generator().manual_seed(index)
    numbers = torch.rand(result.shape, dtype=torch.float64, generator=generator) + 0.5
    return numbers.bfloat16().to(result.dtype)


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.copy(leaf) if isinstance(leaf, list) else leaf
    with torch.no_grad():
        return leaf.detach().clone()


def _handed(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _turned(program: Program) -> Program:
    """The same tensors with the numbers of floats in another order."""

    def turned(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and _differentiable(leaf) and leaf.dim():
            leaf.copy_(leaf.flip(0))
        return leaf

    args, kwargs = tree_map(turned, (program.args, program.kwargs))
    return Program(program.name, program.fn, args, kwargs)


def speed(program: Program, call: Callable[..., Any], training: bool) -> float:
    """Seconds of eager divided by those of a compiled call; a call in training has a backward."""
    own = program.fresh()
    if isinstance(own.fn, nn.Module):
        own.fn.train(training)
    theirs = _repeated(own.fn, own.fn, own, training)
    mine = _repeated(getattr(call, "_orig_mod", None), call, own, training)
    return theirs / mine


def _repeated(fn: Any, call: Callable[..., Any], own: Program, training: bool) -> float:
    if training:
        return best(lambda: _once(fn, call, own.fresh(), training), 0.05)
    with torch.no_grad():
        return best(lambda: call(*own.args, **own.kwargs), 0.05)


def line(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).partition("Traceback (most recent")[0].split())
    return f"{type(error).__name__}: {text}"[:300]
