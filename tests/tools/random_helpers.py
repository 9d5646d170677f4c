"""Higher-order operators as random functions call them: torch's own where Dynamo traces, plain
Python elsewhere. So eager needs no compiler, and judges by other code than it is to judge. Where
tensors have no numbers, a branch is the first one, and a loop is run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan as _associative_scan
from torch._higher_order_ops.map import map as _map
from torch._higher_order_ops.scan import scan as _scan
from torch._higher_order_ops.while_loop import while_loop as _while_loop
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import flex_attention as _flex_attention
from torch.utils.checkpoint import checkpoint as _checkpoint

Function = Callable[..., Any]


def cond(chosen: Any, true: Function, false: Function, args: tuple[Any, ...]) -> Any:
    """One of two functions of the same arguments."""
    if torch.compiler.is_dynamo_compiling():
        return torch.cond(chosen, true, false, args)
    return (true if isinstance(chosen, FakeTensor) or chosen else false)(*args)


def while_loop(again: Function, body: Function, state: tuple[Any, ...]) -> Any:
    """A body repeated while its state asks for it."""
    if torch.compiler.is_dynamo_compiling():
        return _while_loop(again, body, state)
    if isinstance(state[0], FakeTensor):  # nobody knows how often
        return body(*state)
    while again(*state):
        state = body(*state)
    return state


def scan(body: Function, carry: torch.Tensor, xs: torch.Tensor) -> Any:
    """What is carried through the rows of a tensor, and what was made of each."""
    if torch.compiler.is_dynamo_compiling():
        return _scan(body, carry, xs)
    rows = []
    for x in xs.unbind():
        carry, row = body(carry, x)
        rows.append(row)
    return carry, torch.stack(rows)


def map(body: Function, xs: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
    """A function of each row."""
    if torch.compiler.is_dynamo_compiling():
        return _map(body, xs, *args)
    return torch.stack([body(x, *args) for x in xs.unbind()])


def associative_scan(combine: Function, xs: torch.Tensor) -> torch.Tensor:
    """Rows, each combined with all before it."""
    if torch.compiler.is_dynamo_compiling():
        return _associative_scan(combine, xs, 0, combine_mode="generic")
    rows = list[torch.Tensor]()
    for x in xs.unbind():
        rows.append(combine(rows[-1], x) if rows else x)
    return torch.stack(rows)


def checkpoint(body: Function, *args: torch.Tensor) -> Any:
    """A function that is computed again for gradients."""
    return _checkpoint(body, *args, use_reentrant=False)


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Function | None = None
) -> torch.Tensor:
    """Attention with a function of its scores."""
    if torch.compiler.is_dynamo_compiling():
        made: Any = _flex_attention(q, k, v, score_mod=score)
        return made
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if score is not None:
        places = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = score(scores, 0, 0, *places)
    return scores.softmax(-1) @ v


def region(x: torch.Tensor) -> torch.Tensor:
    """A region that is compiled once for all its calls."""
    return (_region if torch.compiler.is_dynamo_compiling() else _inside)(x)


def _inside(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


_region = torch.compiler.nested_compile_region(_inside)
