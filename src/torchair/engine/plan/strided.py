"""Dims, strides and begin of a tensor that is not there: what planning must know of memory.

Sizes are integers, or Numbers where they vary. Views are worked out as torch does; whatever is
decided on a Number on the way is a condition of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.codegen.numbers import Int, same, value_of
from torchair.ge.shapes import contiguous_strides

Sizes = tuple[Int, ...]
_END = 2**31 - 1  # a slice that ends here or later ends with the dim


class Strided:
    """A layout. What shares memory has the same `memory`, any object."""

    __slots__ = ("_offset", "_strides", "dtype", "memory", "shape")

    def __init__(
        self,
        shape: Sequence[Int],
        strides: Sequence[Int] | None,
        dtype: torch.dtype,
        offset: Int = 0,
        memory: object | None = None,
    ) -> None:
        """Without strides it is laid out one row after the other."""
        self.shape: Sizes = tuple(shape)
        self._strides = _row_major(self.shape) if strides is None else tuple(strides)
        self.dtype, self._offset = dtype, offset
        self.memory = object() if memory is None else memory

    # ---- what a tensor tells of itself ----

    def stride(self) -> Sizes:
        """Elements from one to the next along each dim."""
        return self._strides

    def storage_offset(self) -> Int:
        """Elements before the first."""
        return self._offset

    def dim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def numel(self) -> Any:
        """Number of elements."""
        count: Int = 1
        for n in self.shape:
            count = count * n
        return count

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Whether it is laid out one row after the other."""
        expected = _row_major(self.shape)
        agree = zip(self.shape, self._strides, expected, strict=True)
        return all(same(s, e) or n == 1 or s == e for n, s, e in agree) or 0 in self.shape

    def plain(self) -> Strided:
        """The layout for the sizes of this plan alone."""
        shape, strides = map(value_of, self.shape), map(value_of, self._strides)
        return Strided(
            tuple(shape), tuple(strides), self.dtype, value_of(self._offset), self.memory
        )

    # ---- the same elements seen in another way ----

    def _seen(self, shape: Sequence[Int], strides: Sequence[Int], offset: Int = 0) -> Strided:
        return Strided(shape, strides, self.dtype, self._offset + offset, self.memory)

    def view(self, dtype: torch.dtype) -> Strided:
        """The same bytes as another type of the same width."""
        if dtype.itemsize != self.dtype.itemsize:
            raise ValueError(f"{self.dtype} cannot be seen as {dtype}")
        return Strided(self.shape, self._strides, dtype, self._offset, self.memory)

    def permute(self, order: Sequence[int]) -> Strided:
        """Dims in another order."""
        return self._seen([self.shape[d] for d in order], [self._strides[d] for d in order])

    def unsqueeze(self, at: int) -> Strided:
        """With a dim of size 1 more."""
        at %= self.dim() + 1
        shape, strides = list(self.shape), list(self._strides)
        strides.insert(at, 1 if at == len(shape) else shape[at] * strides[at])
        shape.insert(at, 1)
        return self._seen(shape, strides)

    def squeeze(self, dims: Sequence[int]) -> Strided:
        """Without those of these dims that have one element."""
        gone = {d % self.dim() for d in dims} if self.dim() else set()
        kept = [d for d, n in enumerate(self.shape) if d not in gone or n != 1]
        return self.permute(kept)

    def expand(self, shape: Sequence[Int]) -> Strided:
        """Repeated along dims of size 1, and along new ones before."""
        lead = len(shape) - self.dim()
        dims, strides = list(shape), [0] * lead + list(self._strides)
        for d, n in enumerate(self.shape, lead):
            wanted = dims[d]
            if not isinstance(wanted, int) or wanted != -1:
                if same(wanted, n) or wanted == n:
                    continue
                if n != 1:
                    raise ValueError(f"{n} elements cannot be repeated to {wanted}")
                strides[d] = 0
            else:
                dims[d] = n
        for d in range(lead - 1, -1, -1) if self.dim() else ():
            if dims[d] == 1:
                strides[d] = dims[d + 1] * strides[d + 1]
        return self._seen(dims, strides)

    def as_strided(self, shape: Sequence[Int], strides: Sequence[Int], offset: Int) -> Strided:
        """Any view of the memory."""
        return Strided(shape, strides, self.dtype, offset, self.memory)

    def sliced(self, dim: int, begin: Int, end: Int, step: int) -> Strided:
        """Some of the elements along a dim, bounds as in Python."""
        dim %= self.dim()
        n = self.shape[dim]
        begin, end = _bound(begin, n), _bound(end, n)
        taken = end - begin if end > begin else 0
        shape, strides = list(self.shape), list(self._strides)
        shape[dim], strides[dim] = (taken + step - 1) // step, strides[dim] * step
        return self._seen(shape, strides, begin * self._strides[dim])

    def split(self, sizes: Sequence[Int], dim: int) -> list[Strided]:
        """Pieces along a dim."""
        parts: list[Strided] = []
        begin: Int = 0
        for n in sizes:
            if n < 0:
                raise ValueError(f"a piece of {n} elements")
            shape = [n if d == dim else k for d, k in enumerate(self.shape)]
            parts.append(self._seen(shape, self._strides, begin * self._strides[dim]))
            begin = begin + n
        if not same(begin, self.shape[dim]) and begin != self.shape[dim]:
            raise ValueError(f"{self.shape[dim]} elements are not {begin}")
        return parts

    def unbind(self, dim: int) -> list[Strided]:
        """One by one along a dim."""
        dim %= self.dim()
        rest = [d for d in range(self.dim()) if d != dim]
        pieces = self.split([1] * int(self.shape[dim]), dim)
        return [p.permute(rest) for p in pieces]

    def reshape(self, shape: Sequence[Int]) -> Strided:
        """Other dims: a view where that can be, else in memory of its own."""
        wanted = self._filled(shape)
        strides = _viewed(self.shape, self._strides, wanted)
        if strides is None:
            return Strided(wanted, None, self.dtype)
        return self._seen(wanted, strides)

    def _filled(self, shape: Sequence[Int]) -> list[Int]:
        """Dims with the one that is -1 worked out."""
        open_at = [d for d, n in enumerate(shape) if isinstance(n, int) and n == -1]
        known: Int = 1
        for d, n in enumerate(shape):
            if d not in open_at:
                known = known * n
        filled, count = list(shape), self.numel()
        for d in open_at:
            filled[d] = count // known
            known = known * filled[d]
        if not same(count, known) and count != known:
            raise ValueError(f"{self.shape} cannot be seen as {tuple(shape)}")
        return filled

    def contiguous(self) -> Strided:
        """One row after the other: itself, or in memory of its own."""
        return self if self.is_contiguous() else Strided(self.shape, None, self.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Strided({self.shape}, {self._strides}, {self.dtype}, {self._offset})"


_FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.ops.aten.slice.Tensor: Strided.sliced}


def _row_major(shape: Sequence[Int]) -> Sizes:
    return contiguous_strides(shape)  # type: ignore[arg-type, return-value]


def _bound(bound: Int, size: Int) -> Int:
    if isinstance(bound, int) and bound >= _END:
        return size
    if bound < 0:
        bound = bound + size
        return bound if bound > 0 else 0
    return size if bound > size else bound


def _viewed(shape: Sizes, strides: Sizes, wanted: Sequence[Int]) -> Sequence[Int] | None:
    """Strides of the same memory with other dims, None if there are none: dims that lie one after
    the other in memory are taken together, and cut anew."""
    if any(n == 0 for n in shape):
        return strides if tuple(wanted) == shape else _row_major(wanted)
    found: list[Int] = []
    at = len(wanted) - 1
    for count, stride in _runs(shape, strides):
        taken: Int = 1
        while at >= 0 and ((not same(taken, count) and taken < count) or wanted[at] == 1):
            found.append(taken * stride)
            taken = taken * wanted[at]
            at -= 1
        if not same(taken, count) and taken != count:
            return None
    return found[::-1] if at < 0 else None


def _runs(shape: Sizes, strides: Sizes) -> list[tuple[Int, Int]]:
    """Dims from the last, taken together where no element lies between: (elements, stride)."""
    runs: list[tuple[Int, Int]] = []
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if runs and (n == 1 or _continues(runs[-1], stride)):
            runs[-1] = (runs[-1][0] * n, runs[-1][1])
        else:
            runs.append((n, stride))
    return runs or [(1, 1)]


def _continues(run: tuple[Int, Int], stride: Int) -> bool:
    reach = run[0] * run[1]
    return same(reach, stride) or reach == stride
