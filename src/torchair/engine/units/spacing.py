"""How dims lie in memory that a kernel walks through together: with one stride, or, for matrices
of a product, with one over inner batches and one over outer ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchair.codegen.sizes import Int
from torchair.engine.units import emitter


def one_stride(dims: Sequence[Int], strides: Sequence[Int]) -> Int:
    """The stride of dims taken together; NotNative if there is none."""
    step: Int | None = None
    reach: Int = 0
    for n, s in zip(reversed(dims), reversed(strides), strict=True):
        if emitter.is_one(n):
            continue
        if step is not None and s != reach:
            raise emitter.NotNative("rows are not evenly spaced in memory")
        step, reach = (s if step is None else step), n * s
    return 0 if step is None else step


def steps_along(dims: Sequence[Int], own: Sequence[Int], strides: Sequence[Int]) -> list[Int]:
    """Strides over dims that an operand with its own dims is broadcast to."""
    own = [*[1] * (len(dims) - len(own)), *own]
    strides = [*[0] * (len(dims) - len(strides)), *strides]
    return [0 if emitter.is_one(n) else s for n, s in zip(own, strides, strict=True)]


@dataclass(frozen=True)
class BatchStrides:
    """Strides of both factors of a product: over `inner` matrices, and over those before them,
    where one does not reach them all."""

    near: tuple[Int, Int]
    inner: Int = 1
    far: tuple[Int, Int] | None = None


def batch_strides(
    dims: Sequence[Int], a: Sequence[Int], b: Sequence[Int], outer: bool
) -> BatchStrides:
    """Strides over the batches of a product. With `outer` a kernel may have outer batches."""

    def taken(part: slice) -> tuple[Int, Int]:
        return one_stride(dims[part], a[part]), one_stride(dims[part], b[part])

    try:
        return BatchStrides(taken(slice(None)))
    except emitter.NotNative:
        if not outer:
            raise
    for cut in range(1, len(dims)):
        try:
            far, near = taken(slice(cut)), taken(slice(cut, None))
        except emitter.NotNative:
            continue
        inner: Int = 1
        for n in dims[cut:]:
            inner = inner * n
        return BatchStrides(near, inner, far)
    raise emitter.NotNative("matrices are not evenly spaced in memory")
