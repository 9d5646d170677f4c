"""Convolutions, channels first, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torchair.catalog.core import Kernel, Op, Trait, add_row
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim

aten = torch.ops.aten
CONTRACTION = Trait.CONTRACTION


class Window:
    """Strides, pads and dilations of the spatial dims, as torch counts them."""

    def __init__(self, op: Op) -> None:
        layout = op.attr("data_format")
        if not layout.startswith("NC"):
            raise ValueError(f"{op.node} has layout {layout}, only channels first is known")
        pads = op.attr("pads")
        self.strides = op.attr("strides")[2:]
        self.dilations = op.attr("dilations")[2:]
        self.before, self.after = pads[::2], pads[1::2]
        self.groups = op.attr("groups")
        self.rank = len(self.strides)

    @property
    def even(self) -> bool:
        """Whether every dim has the same padding on both sides."""
        return self.before == self.after

    def padding(self) -> list[int]:
        """One number per dim; only for even pads."""
        if not self.even:
            raise ValueError("padding that differs from side to side is not known here")
        return self.before

    def arguments(self) -> tuple[Any, ...]:
        """What torch's convolution takes after stride."""
        return self.strides, self.padding(), self.dilations


def _rule(op: Op) -> Fact:
    w, x, kernel = Window(op), op.shape("x"), op.shape("filter")
    dims: list[Dim] = []
    for i in range(w.rank):
        reach = w.dilations[i] * (kernel[i + 2] - 1) + 1
        dims.append((x[i + 2] + w.before[i] + w.after[i] - reach) // w.strides[i] + 1)
    return Fact(op.dtype("x"), (x[0], kernel[0], *dims))


def _kernel(op: Op) -> Kernel:
    w = Window(op)
    none = [0] * w.rank
    if w.even:
        return lambda x, kernel, bias, _offset: torch.convolution(
            x, kernel, bias, *w.arguments(), False, none, w.groups
        )
    sides = [p for pair in reversed(list(zip(w.before, w.after, strict=True))) for p in pair]
    return lambda x, kernel, bias, _offset: torch.convolution(
        F.pad(x, sides), kernel, bias, w.strides, none, w.dilations, False, none, w.groups
    )


def _transpose(op: Op) -> Kernel:
    w = Window(op)
    extra = op.attr("output_padding")[2:]
    return lambda x, kernel, bias, _offset: torch.convolution(
        x, kernel, bias, *w.arguments(), True, extra, w.groups
    )


def _sized(port: str, like: str) -> Callable[[Op], Fact]:
    return lambda op: Fact(op.dtype(like), op.ints(port))


def _grad_of_input(op: Op) -> Kernel:
    w, size = Window(op), op.ints("input_size")
    none, mask = [0] * w.rank, [True, False, False]

    def run(kernel: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        x = grad.new_empty(1).expand(size)  # only its dims are read
        arguments = (*w.arguments(), False, none, w.groups, mask)
        return aten.convolution_backward(grad, x, kernel, None, *arguments)[0]

    return run


def _grad_of_filter(op: Op) -> Kernel:
    w, size = Window(op), op.ints("filter_size")
    none, mask = [0] * w.rank, [False, True, False]

    def run(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        kernel = grad.new_empty(1).expand(size)  # only its dims are read
        arguments = (*w.arguments(), False, none, w.groups, mask)
        return aten.convolution_backward(grad, x, kernel, None, *arguments)[1]

    return run


for _dim in ("2D", "3D"):
    add_row(f"Conv{_dim}", _rule, _kernel, CONTRACTION)
    add_row(
        f"Conv{_dim}Transpose", _sized("input_size", "x"), _transpose, CONTRACTION,
        host=("input_size",),
    )  # fmt: skip
    add_row(
        f"Conv{_dim}BackpropInput", _sized("input_size", "filter"), _grad_of_input, CONTRACTION,
        host=("input_size",),
    )  # fmt: skip
    add_row(
        f"Conv{_dim}BackpropFilter", _sized("filter_size", "x"), _grad_of_filter, CONTRACTION,
        host=("filter_size",),
    )  # fmt: skip
