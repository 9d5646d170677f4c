"""Convolutions, channels first, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchair.catalog.core import Kernel, Op, Trait, add_row
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim

aten = torch.ops.aten
_convolution: Any = torch.convolution
CONTRACTION = Trait.CONTRACTION
IMAGES = Trait.CONTRACTION | Trait.KEEPS_FORMAT


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

    def arguments(self, transposed: bool = False, extra: Any = None) -> tuple[Any, ...]:
        """What torch's convolution takes from the stride on."""
        geometry = self.strides, self.padding(), self.dilations
        return (*geometry, transposed, extra or [0] * self.rank, self.groups)


def _rule(op: Op) -> Fact:
    w, x, kernel = Window(op), op.shape("x"), op.shape("filter")
    dims: list[Dim] = []
    for i in range(w.rank):
        reach = w.dilations[i] * (kernel[i + 2] - 1) + 1
        dims.append((x[i + 2] + w.before[i] + w.after[i] - reach) // w.strides[i] + 1)
    channels = kernel[0] if x[1] != 0 else 0  # as torch has it
    return Fact(op.dtype("x"), (x[0], channels, *dims))


def _kernel(op: Op) -> Kernel:
    w = Window(op)
    if w.even:
        arguments = w.arguments()
        return lambda x, kernel, bias, _offset: _convolution(x, kernel, bias, *arguments)
    sides = [p for pair in reversed(list(zip(w.before, w.after, strict=True))) for p in pair]
    none = [0] * w.rank
    rest = (w.strides, none, w.dilations, False, none, w.groups)
    return lambda x, kernel, bias, _offset: _convolution(F.pad(x, sides), kernel, bias, *rest)


def _transpose(op: Op) -> Kernel:
    arguments = Window(op).arguments(True, op.attr("output_padding")[2:])
    return lambda x, kernel, bias, _offset: _convolution(x, kernel, bias, *arguments)


def _sized(port: str, like: str) -> Callable[[Op], Fact]:
    return lambda op: Fact(op.dtype(like), op.ints(port))


def _grad_of_input(op: Op) -> Kernel:
    size, arguments = op.ints("input_size"), Window(op).arguments()
    mask = [True, False, False]

    def run(kernel: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        x = _unread(size, grad)
        return aten.convolution_backward(grad, x, kernel, None, *arguments, mask)[0]

    return run


def _unread(size: Sequence[Dim], grad: torch.Tensor) -> torch.Tensor:
    """A tensor of which torch reads the dims, and the format in which it is to compute."""
    last = is_channels_last(grad)
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(
        tuple(size), dtype=grad.dtype, device=grad.device, memory_format=form  # type: ignore[arg-type]
    )


def is_channels_last(t: torch.Tensor) -> bool:
    """Whether an image has its channels side by side in memory, and so is not contiguous."""
    plain = t.is_contiguous()
    return t.dim() == 4 and not plain and t.is_contiguous(memory_format=torch.channels_last)


def _grad_of_filter(op: Op) -> Kernel:
    size, arguments = op.ints("filter_size"), Window(op).arguments()
    mask = [False, True, False]

    def run(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        kernel = grad.new_empty(size)  # nobody reads it
        return aten.convolution_backward(grad, x, kernel, None, *arguments, mask)[1]

    return run


def _gradients(op: Op) -> Kernel:
    arguments = Window(op).arguments()
    both = [True, True, False]

    def run(x: torch.Tensor, kernel: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.convolution_backward(grad, x, kernel, None, *arguments, both)[:2]

    return run


add_row(
    "ConvGradients", lambda op: [Fact(op.dtype(p), op.shape(p)) for p in ("x", "filter")],
    _gradients, IMAGES,
)  # fmt: skip

for _dim in ("2D", "3D"):
    add_row(f"Conv{_dim}", _rule, _kernel, IMAGES)
    add_row(
        f"Conv{_dim}Transpose", _sized("input_size", "x"), _transpose, CONTRACTION,
        host=("input_size",),
    )  # fmt: skip
    add_row(
        f"Conv{_dim}BackpropInput", _sized("input_size", "filter"), _grad_of_input, IMAGES,
        host=("input_size",),
    )  # fmt: skip
    add_row(
        f"Conv{_dim}BackpropFilter", _sized("filter_size", "x"), _grad_of_filter, CONTRACTION,
        host=("filter_size",),
    )  # fmt: skip
