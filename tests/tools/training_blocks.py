"""A block of convolutions and batch norms, and steps of training that are compared with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def check_steps(model: nn.Module, x: Tensor, last: bool) -> None:
    """Two steps have the values and strides of eager; with `last` on channels last."""
    if last:
        model, x = model.to(memory_format=LAST), x.to(memory_format=LAST)
    mine, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    run = torch.compile(mine, backend=torchair.get_npu_backend(), dynamic=False)
    for _ in range(2):
        got, eager = gradients(mine, run, x), gradients(model, model, x)
        assert_close(got, eager, gradients(wide, wide, x.double()))
        assert [t.stride() for t in got] == [t.stride() for t in eager]
