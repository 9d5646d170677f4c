"""Random functions with views, updates in place, concatenations and streams, and what a caller can
see of a graph: values, strides, changed arguments, shared memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from like_eager import sharing
from torchair.fx.passes import CAPTURE_PASSES
from torchair.fx.passes.builtin import view_to_reshape
from torchair.passes import FxContext, call_pass
from torchair.scope import npu_stream_switch

Tensors = list[torch.Tensor]
PASSES = {p.name: getattr(p.fn, "__wrapped__", p.fn) for p in CAPTURE_PASSES}
"""The passes by name, without the caution that turns a failure into a warning."""

UNARY = (
    torch.exp, torch.sin, torch.neg, torch.relu, torch.abs, torch.clone,
    torch.nn.functional.gelu, lambda t: t * 2, lambda t: 1 - t, lambda t: t.cumsum(0),
    lambda t: t.sum(0, keepdim=True), lambda t: t.masked_fill(t > 0, 1.0),
)  # fmt: skip
UPDATES = (
    lambda t: t.add_(1), lambda t: t.mul_(0.5), lambda t: t.sin_(), lambda t: t.fill_(3),
    lambda t: t.zero_(), lambda t: t.copy_(t.flip(0)), lambda t: t[1:].copy_(t[:-1] * 2),
    lambda t: t[:-1].copy_(t[1:] + 1), lambda t: t.t().copy_(t.t().clone() + t.t()[:1]),
)  # fmt: skip


def twin(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, of its own memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _views(t: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    found = [lambda: t, lambda: t.reshape(-1), lambda: t[None], lambda: t.expand(2, *t.shape)]
    found += [lambda: t.view(torch.int32).view(torch.float32)]
    if t.shape[0] > 1:
        found += [lambda: t[1:], lambda: t[0], lambda: t[::2], lambda: t.split(1)[-1]]
    if t.dim() == 2:
        found += [lambda: t.t(), lambda: t[:, 0], lambda: t[:, 1:], lambda: t.diagonal()]
    return found


def _step(choice: random.Random, pool: Tensors) -> None:
    kind, t = choice.random(), choice.choice(pool)
    if kind < 0.25:
        pool.append(choice.choice(UNARY)(t))
    elif kind < 0.4:
        pool.append(choice.choice(_views(t))())
    elif kind < 0.65:
        view = choice.choice(_views(t))()
        if choice.random() < 0.5:
            view = choice.choice(_views(view))()
        choice.choice(UPDATES)(view)
        if choice.random() < 0.3:
            pool.append(view)
    elif kind < 0.72:
        pool.append(t + choice.choice(pool))
    elif kind < 0.77:
        t.add_(choice.choice(pool))
    elif kind < 0.8:
        pool.append(t * t[:1])
    elif kind < 0.85:
        view = choice.choice(_views(t))()
        value = view * 3
        view.copy_(value)
        pool.append(value)
    else:
        same = [p for p in pool if p.shape[1:] == t.shape[1:]]
        parts = [choice.choice((*UNARY, *[lambda p: p] * 6))(choice.choice(same)) for _ in "abc"]
        pool.append(torch.cat(parts[: choice.choice((2, 3))], choice.choice((0, 0, 0, -1))))


def inputs(seed: int) -> Tensors:
    """Arguments of a random function."""
    torch.manual_seed(seed)
    other = torch.randn(4, 3).t() if seed % 2 else torch.randn(3, 4)
    return [torch.randn(3, 4), other, torch.randn(4)]


def program(seed: int, streams: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A random function. A step that does not work on real tensors is not in it."""
    choice = random.Random(seed)
    pool, steps = [twin(t) for t in inputs(seed)], []
    for _ in range(choice.randrange(5, 14)):
        step = (choice.random(), choice.choice((None, "1", "2")) if streams else None)
        try:
            _step(random.Random(step[0]), pool)
            steps.append(step)
        except (RuntimeError, IndexError):
            pass
    picked = [choice.randrange(len(pool)) for _ in range(choice.randrange(1, 4))]

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(args)
        for number, stream in steps:
            with nullcontext() if stream is None else npu_stream_switch(stream):
                _step(random.Random(number), values)
        return tuple(values[i] for i in picked)

    return run


def traced(fn: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    """A graph as the passes get them: functional but for copies to arguments in the end, and with
    `reshape` for `view`."""
    functional = functionalize(fn, remove="mutations")
    gm = make_fx(functional, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)
    view_to_reshape(gm)
    return gm


def apply(
    gm: fx.GraphModule, *names: str, config: Any = None, graph_name: str = "graph"
) -> fx.GraphModule:
    """Run passes by name, all without a name, and check the graph after each."""
    for name in names or PASSES:
        call_pass(PASSES[name], gm, FxContext(config=config, name=graph_name))
        gm.graph.lint()
    gm.recompile()
    return gm


def text(gm: fx.GraphModule) -> str:
    """A graph, one line for each node."""
    lines = []
    for node in gm.graph.nodes:
        args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
        elif node.op == "call_function":
            target = getattr(node.target, "__name__", "")
            lines.append(f"{node.name} = {target}({', '.join(args)})")
    return "\n".join(lines)


def targets(gm: fx.GraphModule) -> list[str]:
    """What a graph calls, in order."""
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def written(gm: fx.GraphModule) -> list[str]:
    """The calls of a graph that write to arguments."""
    nodes = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [str(n.target) for n in nodes if n.target._schema.is_mutable]


def expect(gm: fx.GraphModule, wanted: str) -> None:
    """The text of a graph must be this."""
    lines = [line.strip() for line in wanted.strip().splitlines()]
    assert text(gm).splitlines() == lines, "\n" + text(gm)


def x34() -> torch.Tensor:
    """An argument."""
    return torch.randn(3, 4)


def assert_same_effect(
    expected: Callable[..., Any], got: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Results, changed arguments, strides and shared memory of two functions."""
    mine, theirs = [twin(a) for a in args], [twin(a) for a in args]
    ours, wanted = tree_leaves(got(*mine)), tree_leaves(expected(*theirs))
    torch.testing.assert_close([*ours, *mine], [*wanted, *theirs], equal_nan=True)
    assert _strides(ours) == _strides(wanted)
    assert sharing([*mine, *ours]) == sharing([*theirs, *wanted])


def _strides(values: list[Any]) -> list[Any]:
    return [v.stride() if isinstance(v, torch.Tensor) else v for v in values]


def checked(
    fn: Callable[..., Any], *args: Any, passes: Sequence[str] = (), config: Any = None
) -> fx.GraphModule:
    """The graph of a function after passes, which must not change what a caller sees."""
    gm = traced(fn, *args)
    before = copy.deepcopy(gm)
    assert_same_effect(before, apply(gm, *passes, config=config), args)
    return gm
