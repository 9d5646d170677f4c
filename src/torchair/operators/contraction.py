"""Matrix products, convolutions with channels first, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.ge.shapes import Dim, Shape, Sym, broadcast
from torchair.operators.core import SHORT, Op, TorchKernel, Trait, add_row, call, like
from torchair.torch_private.functions import nn

CONTRACTION = Trait.CONTRACTION
IMAGES = CONTRACTION | Trait.KEEPS_FORMAT


def matmul_shape(a: Shape, b: Shape, swap_a: bool, swap_b: bool) -> Shape:
    """Dims of a (batched) matrix product, operands optionally transposed."""
    m, k = (a[-1], a[-2]) if swap_a else (a[-2], a[-1])
    k2, n = (b[-1], b[-2]) if swap_b else (b[-2], b[-1])
    if not isinstance(k, Sym) and not isinstance(k2, Sym) and k != k2:
        raise ValueError(f"inner sizes {k} and {k2} of a matrix product differ")
    batch: tuple[Dim, ...] = broadcast(a[:-2], b[:-2])
    return (*batch, m, n)


def _product_rule(swap1: str, swap2: str) -> Callable[[Op], Fact]:
    def rule(op: Op) -> Fact:
        dims = matmul_shape(op.shape("x1"), op.shape("x2"), op.attr(swap1), op.attr(swap2))
        return Fact(op.dtype("x1"), dims)

    return rule


def _product(swap1: str, swap2: str) -> Callable[[Op], TorchKernel]:
    def make(op: Op) -> TorchKernel:
        flip1, flip2 = op.attr(swap1), op.attr(swap2)
        bias = op.get("bias")
        row = bias is None or len(bias.shape or ()) == 1
        flat = len(op.shape("x1")) == len(op.shape("x2")) == 2
        if flat and row and flip2 and not flip1:
            return _linear
        return _general(flip1, flip2)

    return make


def _linear(x1: Any, x2: Any, bias: Any = None, offset: Any = None, out: Any = None) -> Any:
    """The layout of nn.Linear has a call of its own, cheaper than a transpose and a product."""
    return nn.linear(x1, x2, bias, out=out)


def _general(flip1: bool, flip2: bool) -> TorchKernel:
    def run(x1: Any, x2: Any, bias: Any = None, offset: Any = None, out: Any = None) -> Any:
        a = x1.mT if flip1 else x1
        b = x2.mT if flip2 else x2
        if bias is None:
            return torch.matmul(a, b, out=out)
        if a.dim() == 2 and b.dim() == 2:
            return torch.addmm(bias, a, b, out=out)
        return torch.add(torch.matmul(a, b), bias, out=out)

    return run


for _type, _a, _b in (
    ("MatMul", "transpose_x1", "transpose_x2"),
    ("MatMulV2", "transpose_x1", "transpose_x2"),
    ("BatchMatMul", "adj_x1", "adj_x2"),
    ("BatchMatMulV2", "adj_x1", "adj_x2"),
):
    add_row(
        _type,
        _product_rule(_a, _b),
        _product(_a, _b),
        CONTRACTION,
        out=True,
        anchor="matmul",
        types=SHORT,
    )
add_row("Dot", lambda op: Fact(op.dtype("input_x"), ()), call(torch.dot), CONTRACTION, out=True)


# ---- convolutions, channels first, and their gradients ----

aten = torch.ops.aten
_convolution: Any = torch.convolution


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
            raise ValueError("asymmetric padding is not supported")
        return self.before

    def arguments(self, transposed: bool = False, extra: Any = None) -> tuple[Any, ...]:
        """What torch's convolution takes from the stride on."""
        geometry = self.strides, self.padding(), self.dilations
        return (*geometry, transposed, extra or [0] * self.rank, self.groups)


def _conv_rule(op: Op) -> Fact:
    w, x, kernel = Window(op), op.shape("x"), op.shape("filter")
    dims: list[Dim] = []
    for i in range(w.rank):
        reach = w.dilations[i] * (kernel[i + 2] - 1) + 1
        dims.append((x[i + 2] + w.before[i] + w.after[i] - reach) // w.strides[i] + 1)
    channels = kernel[0] if x[1] != 0 else 0  # as torch has it
    return Fact(op.dtype("x"), (x[0], channels, *dims))


# Where a filter is large and serves few points, laying it out for the library takes longer than the
# sums: products with the matrix that it is already do without.

UNFOLDED = "_unfolded"
"""The attribute of a convolution of few points, or of its gradients, that is computed so."""
_HEAVY = 1 << 20
_SHARE, _SHARE_ALONE = 1 << 16, 1 << 18
"""Bytes of a filter, and for each point, from which on products were measured to be faster: those
of gradients, and of a convolution. Alone one over 49 points with 9 MB took longer as a product."""


def suits_products(op: Op) -> bool:
    """Whether a convolution, or its gradients, are such on a CPU, of float32 or bfloat16."""
    made = op.node.outputs[0] if op.node.type == "Conv2D" else op.node.value_on("out_backprop")
    kernel, images = _known(op.shape("filter")), _known(made.shape or ())
    window, width = Window(op), _WIDTHS.get(op.dtype("x"))
    if width is None or len(kernel) != 4 or len(images) != 4 or not window.even:
        return False
    points, size = images[0] * math.prod(images[2:]), math.prod(kernel) * width
    share = _SHARE_ALONE if op.node.type == "Conv2D" else _SHARE
    return window.groups == 1 and points > 0 and size > max(_HEAVY, share * points)


_WIDTHS: dict[int, int] = {DataType.DT_FLOAT: 4, DataType.DT_BF16: 2}


def _known(shape: Shape) -> list[int]:
    """Dims that are known; none where one is not."""
    known = [d for d in shape if isinstance(d, int)]
    return known if len(known) == len(shape) else []


class _Unfolded:
    """A convolution and its gradients over a matrix with a row for each point of the result."""

    def __init__(self, op: Op) -> None:
        self.window = Window(op)

    def takes(self, kernel: torch.Tensor) -> bool:
        """Whether a filter is a matrix in memory, on a CPU."""
        return kernel.device.type == "cpu" and kernel.is_contiguous()

    def forward(self, x: Any, kernel: Any, bias: Any, images: Sequence[Any]) -> torch.Tensor:
        """The result, of these dims."""
        made = nn.linear(self._rows(x, kernel), kernel.flatten(1), bias)
        return made.view(images[0], *images[2:], -1).permute(0, 3, 1, 2).contiguous()

    def backward(self, x: Any, kernel: Any, grad: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of input and filter. What meets in a point is summed up in float32."""
        points = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])
        of_kernel = torch.mm(points.t(), self._rows(x, kernel)).view(kernel.shape)
        pieces = torch.mm(points, kernel.flatten(1)).view(grad.shape[0], -1, kernel[0].numel())
        geometry = kernel.shape[2:], *self._geometry()
        of_x = aten.col2im(pieces.mT.float(), x.shape[2:], *geometry)
        return of_x.to(x.dtype), of_kernel

    def _rows(self, x: Any, kernel: Any) -> torch.Tensor:
        columns = aten.im2col(x, kernel.shape[2:], *self._geometry())
        return columns.mT.reshape(-1, columns.shape[1])

    def _geometry(self) -> tuple[Any, ...]:
        return self.window.dilations, self.window.padding(), self.window.strides


def _conv_kernel(op: Op) -> TorchKernel:
    plain = _library_conv(op)
    if UNFOLDED not in op.node.attrs:
        return plain
    images, unfolded = op.node.outputs[0].shape, _Unfolded(op)

    def run(x: Any, kernel: Any, bias: Any, offset: Any) -> torch.Tensor:
        if not unfolded.takes(kernel):
            return plain(x, kernel, bias, offset)
        return unfolded.forward(x, kernel, bias, images)  # type: ignore[arg-type]

    return run


def _library_conv(op: Op) -> TorchKernel:
    w = Window(op)
    if w.even:
        arguments = w.arguments()
        return lambda x, kernel, bias, _offset: _convolution(x, kernel, bias, *arguments)
    sides = [p for pair in reversed(list(zip(w.before, w.after, strict=True))) for p in pair]
    none = [0] * w.rank
    rest = (w.strides, none, w.dilations, False, none, w.groups)
    return lambda x, kernel, bias, _offset: _convolution(F.pad(x, sides), kernel, bias, *rest)


def _transpose(op: Op) -> TorchKernel:
    arguments = Window(op).arguments(True, op.attr("output_padding")[2:])
    return lambda x, kernel, bias, _offset: _convolution(x, kernel, bias, *arguments)


def _sized(port: str, like: str) -> Callable[[Op], Fact]:
    return lambda op: Fact(op.dtype(like), op.ints(port))


def _unread(size: Sequence[Dim], grad: torch.Tensor) -> torch.Tensor:
    """A tensor of which torch reads the dims, and the format in which it is to compute."""
    last = is_channels_last(grad)
    form = torch.channels_last if last else torch.contiguous_format
    dims: Any = tuple(size)
    return torch.empty(dims, dtype=grad.dtype, device=grad.device, memory_format=form)


def is_channels_last(t: torch.Tensor) -> bool:
    """Whether an image has its channels side by side in memory, and so is not contiguous."""
    plain = t.is_contiguous()
    return t.dim() == 4 and not plain and t.is_contiguous(memory_format=torch.channels_last)


def _backward(op: Op, *wanted: int) -> TorchKernel:
    """Gradients of the input (0) and of the filter (1), from that of the result and from both."""
    rest = (None, *Window(op).arguments(), [k in wanted for k in range(3)])
    return lambda grad, x, kernel: aten.convolution_backward(grad, x, kernel, *rest)


def _grad_of_input(op: Op) -> TorchKernel:
    size, backward = op.ints("input_size"), _backward(op, 0)
    return lambda kernel, grad: backward(grad, _unread(size, grad), kernel)[0]


def _grad_of_filter(op: Op) -> TorchKernel:
    size, backward = op.ints("filter_size"), _backward(op, 1)
    return lambda x, grad: backward(grad, x, grad.new_empty(size))[1]  # which nothing reads


def _gradients(op: Op) -> TorchKernel:
    backward = _backward(op, 0, 1)
    unfolded = _Unfolded(op) if UNFOLDED in op.node.attrs else None

    def run(x: Any, kernel: Any, grad: Any) -> tuple[torch.Tensor, ...]:
        if unfolded is not None and unfolded.takes(kernel):
            return unfolded.backward(x, kernel, grad)
        return backward(grad, x, kernel)[:2]

    return run


add_row("ConvGradients", like("x", "filter"), _gradients, IMAGES)
add_row("Conv2D", _conv_rule, _conv_kernel, IMAGES, anchor="conv", types=SHORT)
add_row("Conv3D", _conv_rule, _conv_kernel, IMAGES)
for _dim in ("2D", "3D"):
    add_row(
        f"Conv{_dim}Transpose",
        _sized("input_size", "x"),
        _transpose,
        CONTRACTION,
        host=("input_size",),
    )
    add_row(
        f"Conv{_dim}BackpropInput",
        _sized("input_size", "filter"),
        _grad_of_input,
        IMAGES,
        host=("input_size",),
    )
    add_row(
        f"Conv{_dim}BackpropFilter",
        _sized("filter_size", "x"),
        _grad_of_filter,
        CONTRACTION,
        host=("filter_size",),
    )
