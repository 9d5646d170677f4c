"""Converters of matrix products and convolutions. One spatial dim is convolved as two, the first of
size 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.convert.direct import Direct, direct
from torchair.convert.operands import HALF, INT64, dims_of, plain, promote
from torchair.convert.registry import Decline, builtin
from torchair.ge.build import builder
from torchair.ge.graph import TensorSpec, Value
from torchair.ge.shapes import is_static

aten = torch.ops.aten


def _is_bias(x: Value) -> bool:
    assert x.shape is not None
    return x.rank == 1 or (x.rank == 2 and x.shape[0] == 1)


@builtin(aten.addmm.default)
def addmm(
    self: Value, mat1: Value, mat2: Value, beta: Any, alpha: Any, meta_outputs: TensorSpec
) -> Value:
    dtype = meta_outputs.dtype
    plain(alpha, beta)
    self, mat1, mat2 = promote(dtype, self, mat1, mat2)
    if alpha == 0:
        raise Decline("alpha is 0")
    if dtype in HALF and _is_bias(self) and alpha == 1 and beta == 1:
        return ge.MatMulV2(mat1, mat2, self, None)
    product = ge.Mul(ge.MatMulV2(mat1, mat2, None, None), ge.Const(alpha, dtype=dtype))
    if beta == 0:
        return product
    if beta == 1:
        return ge.Add(product, self)
    return ge.AxpyV2(product, self, ge.Const(beta, dtype=dtype))


@builtin(aten.baddbmm.default)
def baddbmm(
    self: Value, batch1: Value, batch2: Value, beta: Any, alpha: Any, meta_outputs: TensorSpec
) -> Value:
    dtype = meta_outputs.dtype
    plain(alpha, beta)
    if beta == 0:
        raise Decline("beta is 0")
    self, batch1, batch2 = promote(dtype, self, batch1, batch2)
    product = ge.Mul(ge.BatchMatMul(batch1, batch2), ge.Const(alpha, dtype=dtype))
    return ge.Add(product, ge.Mul(self, ge.Const(beta, dtype=dtype)))


# ---- vectors: a matrix with one row or column ----

direct(
    {
        aten.bmm.default: Direct("BatchMatMul", promoted=True),
        aten.dot.default: "Dot",
        aten.mm.default: Direct("MatMul", "self mat2 None"),
    }
)


def _matrix(x: Value, axis: int) -> Value:
    return ge.Unsqueeze(x, axes=[axis]) if x.rank == 1 else x


@builtin(aten.mv.default)
def mv(self: Value, vec: Value) -> Value:
    return ge.Squeeze(ge.MatMul(self, _matrix(vec, 1), None), axis=[1])


@builtin(aten.addmv.default)
def addmv(
    self: Value, mat: Value, vec: Value, beta: Any, alpha: Any, meta_outputs: TensorSpec
) -> Value:
    plain(alpha, beta)
    if 0 in (alpha, beta):
        raise Decline("a scale is 0")
    dtype = meta_outputs.dtype
    product = mv(mat, vec)
    if alpha != 1:
        product = ge.Mul(product, ge.Const(alpha, dtype=dtype))
    if beta != 1:
        self = ge.Mul(self, ge.Const(beta, dtype=dtype))
    return ge.Add(product, self)


@builtin(aten.matmul.default)
def matmul(self: Value, other: Value, meta_outputs: TensorSpec) -> Value:
    if self.rank == other.rank == 1:
        return ge.Dot(self, other)
    a, b = _matrix(self, 0), _matrix(other, 1)
    if a.rank <= 2 and b.rank <= 2:
        product = ge.MatMul(a, b, None)
    else:
        product = ge.BatchMatMul(*promote(meta_outputs.dtype, a, b))
    gone = [-2] if self.rank == 1 else [-1]
    return product if 1 not in (self.rank, other.rank) else ge.Squeeze(product, axis=gone)


@dataclass(frozen=True)
class _ConvWindow:
    """The plain arguments of a convolution over two or three spatial dims."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int

    @property
    def kind(self) -> str:
        return f"Conv{len(self.stride)}D"

    @property
    def attrs(self) -> dict[str, Any]:
        """GE attributes: batch and channel first, pads once for every side."""
        return dict(
            strides=[1, 1, *self.stride],
            pads=[p for p in self.padding for _ in range(2)],
            dilations=[1, 1, *self.dilation],
            groups=self.groups,
            data_format="NCHW" if len(self.stride) == 2 else "NCDHW",
        )


def _window(
    rank: int, stride: Any, padding: Any, dilation: Any, extra: Any, groups: Any
) -> _ConvWindow:
    plain(stride, padding, dilation, extra, groups)
    if rank not in (1, 2, 3):
        raise Decline(f"{rank} spatial dims")

    def spread(values: Sequence[int], first: int) -> list[int]:
        lead = [first] if rank == 1 else []
        return lead + (list(values) * rank if len(values) == 1 else list(values))

    sizes = (spread(stride, 1), spread(padding, 0), spread(dilation, 1), spread(extra, 0))
    return _ConvWindow(*sizes, groups)


def _widen(x: Value) -> Value:
    return ge.Unsqueeze(x, axes=[2]) if x.rank == 3 else x


def _narrow(x: Value, rank: int) -> Value:
    return ge.Squeeze(x, axis=[2]) if rank == 3 else x


# ---- convolutions ----


@builtin(aten.convolution.default)
def convolution(
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    meta_outputs: TensorSpec,
) -> Value:
    rank = input.rank
    w = _window(rank - 2, stride, padding, dilation, output_padding, groups)
    input, weight, bias = promote(meta_outputs.dtype, input, weight, bias)
    x, kernel = _widen(input), _widen(weight)
    if not transposed:
        return _narrow(builder(w.kind)(x, kernel, bias, None, **w.attrs), rank)
    y = builder(f"{w.kind}Transpose")(
        _transposed_size(x, kernel, w),
        x,
        kernel,
        bias,
        None,
        **w.attrs,
        output_padding=[0, 0, *w.output_padding],
    )
    return _narrow(y, rank)


def _transposed_size(x: Value, kernel: Value, w: _ConvWindow) -> Any:
    """Dims of the result: constants, or worked out from the dims of the operands."""
    batch, _, *sizes = _dims(x)
    _, channels, *kernels = _dims(kernel)
    dims = [batch, _times(channels, w.groups)]
    for i, (n, k) in enumerate(zip(sizes, kernels, strict=True)):
        # (n - 1) * stride + (k - 1) * dilation + 1 + output_padding - 2 * padding
        rest = 1 + w.output_padding[i] - 2 * w.padding[i] - w.stride[i] - w.dilation[i]
        spread = _plus(_times(n, w.stride[i]), _times(k, w.dilation[i]))
        dims.append(_plus(spread, rest))
    symbolic = any(isinstance(d, Value) for d in dims)
    return ge.Pack(dims, N=len(dims), axis=0) if symbolic else dims


def _dims(x: Value) -> list[Any]:
    """Dims of a tensor, those not known at compile time as values of the graph."""
    assert x.shape is not None
    if is_static(x.shape):
        return list(x.shape)
    shape = ge.Shape(x, dtype=INT64)
    return [d if isinstance(d, int) else ge.Gather(shape, i) for i, d in enumerate(x.shape)]


def _times(a: Any, b: int) -> Any:
    return ge.Mul(a, b) if isinstance(a, Value) else a * b


def _plus(a: Any, b: Any) -> Any:
    return ge.Add(a, b) if isinstance(a, Value) or isinstance(b, Value) else a + b


# ---- gradients of convolutions ----


@builtin(aten.convolution_backward.default)
def convolution_backward(
    grad_output: Value,
    input: Value,
    weight: Value,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    meta_outputs: Sequence[Any],
) -> list[Value | None]:
    rank = input.rank
    w = _window(rank - 2, stride, padding, dilation, output_padding, groups)
    if transposed and any(o >= s for o, s in zip(w.output_padding, w.stride, strict=True)):
        raise Decline("the convolution of the gradient would be larger than the input")
    dy, x, kernel = _widen(grad_output), _widen(input), _widen(weight)
    wanted = [m is not None for m in meta_outputs]
    dx = dw = db = None
    if wanted[0] and transposed:
        dx = builder(w.kind)(dy, kernel, None, None, **w.attrs)
    elif wanted[0]:
        dx = builder(f"{w.kind}BackpropInput")(dims_of(x), kernel, dy, **w.attrs)
    if wanted[1]:
        big, small = (dy, x) if transposed else (x, dy)
        dw = builder(f"{w.kind}BackpropFilter")(big, dims_of(kernel), small, **w.attrs)
    if wanted[2]:
        db = ge.ReduceSum(grad_output, [0, *range(2, rank)], keep_dims=False)
    grads = (dx if dx is None else _narrow(dx, rank), dw if dw is None else _narrow(dw, rank), db)
    return list(grads)
