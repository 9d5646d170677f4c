"""A block of convolutions and batch norms, and steps of training that are compared with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchair
from tolerance import assert_close

LAST = torch.channels_last


class Block(nn.Module):
    """Two convolutions with batch norms around a residual sum."""

    def __init__(self, channels: int = 8, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.skip = nn.Conv2d(3, channels, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.norms
        return F.relu(b(self.second(F.relu(a(self.first(x))))) + c(self.skip(x)))


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Result, gradients and buffers of a step."""
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = run(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device)
    (y * weights.view(y.shape)).sum().backward()
    found: list[Any] = [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.detach().clone(memory_format=torch.preserve_format) for t in found]


def check_steps(model: nn.Module, x: Tensor, last: bool, either: bool = False) -> None:
    """Two steps have the values and strides of eager; with `last` on channels last. With `either`
    they may be as far from the truth as eager is with one layout or the other."""
    if last:
        model, x = model.to(memory_format=LAST), x.to(memory_format=LAST)
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    others = [copy.deepcopy(model).to(memory_format=LAST)] if either else []
    run = torch.compile(mine, backend=torchair.get_npu_backend(), dynamic=False)
    for _ in range(2):
        got, eager = gradients(mine, run, x), gradients(model, model, x)
        more = [gradients(m, m, x.to(memory_format=LAST)) for m in others]
        with _sizes_of_terms(wide) as sizes:
            truth = gradients(wide, wide, x.double())
        first = len(truth) - len(list(model.buffers()))
        terms = {
            first + k: sizes[n] for k, (n, _) in enumerate(model.named_buffers()) if n in sizes
        }
        assert_close(got, eager, truth, *more, terms=terms)
        assert [t.stride() for t in got] == [t.stride() for t in eager]


@contextmanager
def _sizes_of_terms(model: nn.Module) -> Iterator[dict[str, float]]:
    """How far apart the elements are that running means are made of, by the name of the buffer."""
    found: dict[str, float] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):

            def note(m: Any, given: Any, made: Any, name: str = f"{name}.running_mean") -> None:
                found[name] = m.momentum * given[0].detach().std().item()

            hooks.append(module.register_forward_hook(note))
    yield found
    for hook in hooks:
        hook.remove()
