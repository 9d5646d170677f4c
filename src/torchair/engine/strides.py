"""Dims, strides and small contents that planning asks about.

A `Strided` is the layout of a tensor that is not there. Sizes are integers, or GuardedInts where
they vary. Views are worked out as torch does; whatever is decided on a GuardedInt on the way is a
condition of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchair.codegen.sizes import GuardedInt, Int, same, value_of
from torchair.codegen.streams import HOST
from torchair.ge.dtypes import ge_to_torch
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import Sym, compile_dims, contiguous_strides, free_symbols
from torchair.operators import DimOrder, Op, Row, Trait, row_of
from torchair.operators.reference import tensor_args

Dims = tuple[Int, ...]
_END = 2**31 - 1  # a slice that ends here or later ends with the dim


class NoShapeFamily(Exception):
    """A graph or sizes that there is no family for."""


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
        self.shape: Dims = tuple(shape)
        self._strides = _row_major(self.shape) if strides is None else tuple(strides)
        self.dtype, self._offset = dtype, offset
        self.memory = object() if memory is None else memory

    # ---- what a tensor tells of itself ----

    def stride(self) -> Dims:
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
        agree = zip(self.shape, self._strides, _row_major(self.shape), strict=True)
        return all(same(s, e) or n == 1 or s == e for n, s, e in agree) or 0 in self.shape

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
        return self.permute([d for d, n in enumerate(self.shape) if d not in gone or n != 1])

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
        return [p.permute(rest) for p in self.split([1] * int(self.shape[dim]), dim)]

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
        if function not in _FUNCTIONS:
            raise NoShapeFamily(f"nothing says what {function} does to strides that vary")
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Strided({self.shape}, {self._strides}, {self.dtype}, {self._offset})"


_FUNCTIONS: dict[Any, Callable[..., Any]] = {torch.ops.aten.slice.Tensor: Strided.sliced}


def _bound(bound: Int, size: Int) -> Int:
    if isinstance(bound, int) and bound >= _END:
        return size
    if bound < 0:
        bound = bound + size
        return bound if bound > 0 else 0
    return size if bound > size else bound


def _viewed(shape: Dims, strides: Dims, wanted: Sequence[Int]) -> Sequence[Int] | None:
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


def _runs(shape: Dims, strides: Dims) -> list[tuple[Int, Int]]:
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


HOST_SIZE = 64


class SizeFormula:
    """Sizes that follow from the values of symbols, compiled once."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.names = sorted(free_symbols(sizes))
        self._compute = compile_dims(sizes, self.names)

    def __call__(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return self._compute(*[values[n] for n in self.names])


Meta = Any
"""What planning knows of a tensor: a torch tensor without data, or `Strided` where sizes vary."""


def meta_of(fact: Fact, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Without strides one row after the other, as with those that only differ where they do not
    matter."""
    dims: Any = fact.shape
    made = torch.empty(dims, dtype=ge_to_torch(fact.dtype), device="meta")
    return made if strides is None or same_strides(made, strides) else with_strides(made, strides)


def strided(fact: Fact, strides: Sequence[Int] | None = None) -> Strided:
    """The same for sizes that may vary."""
    return Strided(fact.shape or (), strides, ge_to_torch(fact.dtype))  # type: ignore[arg-type]


def plain(meta: Meta) -> torch.Tensor:
    """A layout for the sizes of this plan alone, on which nothing is decided."""
    if not isinstance(meta, Strided):
        return meta
    shape, strides = map(value_of, meta.shape), map(value_of, meta.stride())
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=meta.dtype, device="meta")


def in_format(meta: Meta, memory_format: torch.memory_format) -> Meta:
    """The same dims with the strides of a memory format."""
    if not isinstance(meta, Strided):
        return torch.empty_like(meta, memory_format=memory_format)
    if memory_format != torch.channels_last:
        raise NoShapeFamily(f"no strides are known for {memory_format}")
    _, c, h, w = meta.shape
    return with_strides(meta, (c * w * h, 1, c * w, c))


def in_order(meta: Meta, order: DimOrder) -> Meta:
    """The same dims without gaps, in an order of dims."""
    return with_strides(meta, order.strides(meta.shape))


def dense_strides(meta: Meta) -> tuple[int, ...]:
    """Strides of the same dims, row-major and without gaps."""
    return _row_major(meta.shape)


def _row_major(shape: Sequence[Any]) -> tuple[Any, ...]:
    return contiguous_strides(tuple(shape))


def is_dense(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether these strides give every element its own place, without gaps."""
    if all(same(s, d) for s, d in zip(strides, _row_major(shape), strict=True)):
        return True
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return 0 in shape
        expected *= size
    return True


def is_writable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements have places of their own, but for dims that only repeat (stride 0)."""
    extent = 1
    for stride, size in sorted((st, n) for st, n in zip(strides, shape, strict=True) if n != 1):
        if stride and stride < extent:
            return 0 in shape
        extent += stride * (size - 1)
    return True


def with_strides(meta: Meta, strides: Any) -> Meta:
    """The same dims with these strides."""
    if isinstance(meta, Strided):
        return Strided(meta.shape, strides, meta.dtype)
    return torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device="meta")


def laid_out(meta: Meta, strides: Sequence[int] | None) -> Meta:
    """The same dims with these strides, if they leave no gaps."""
    fits = strides is not None and is_dense(meta.shape, strides)
    return with_strides(meta, strides) if fits else meta


def count_of(fact: Fact) -> int:
    """Number of elements."""
    return math.prod(fact.shape or ())  # type: ignore[arg-type]


def is_known(fact: Fact) -> bool:
    """Whether the content of a value is known as integers, without symbols."""
    content = fact.content
    if content is None or isinstance(content, Sym):
        return False
    return not (isinstance(content, tuple) and any(isinstance(c, Sym) for c in content))


def symbols_of(inputs: Iterable[tuple[Value, Fact]]) -> dict[str, int]:
    """Values of the symbols that inputs declare, from their facts in one call."""
    found: dict[str, int] = {}
    for value, fact in inputs:
        declared, real = list(value.shape or ()), list(fact.shape or ())
        if value.content is not None and is_known(fact):
            declared += as_tuple(value.content)
            real += as_tuple(fact.content)
        for d, n in zip(declared, real, strict=False):
            if isinstance(d, Sym) and d.expr.is_Symbol:
                found[d.expr.name] = n  # type: ignore[assignment]
    return found


def as_tuple(content: Any) -> tuple[Any, ...]:
    """Numbers of a host value, a scalar counting as one."""
    return content if isinstance(content, tuple) else (content,)


def content_of(t: torch.Tensor) -> Any:
    """A small host tensor as a scalar or a tuple; None for any other."""
    if t.dim() > 1 or t.numel() > HOST_SIZE or t.dtype.is_complex or t.device.type != HOST:
        return None
    return tuple(t.tolist()) if t.dim() else t.item()


def as_list(x: Any) -> list[Any]:
    """Several results as a list, a single one as a list of one."""
    return list(x) if isinstance(x, (list, tuple)) else [x]


def shares(view: Meta, base: Meta) -> bool:
    """Whether two values are in the same memory."""
    if isinstance(view, Strided):
        return view.memory is base.memory
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata


def same_dims(shape: Sequence[Int], other: Sequence[Int]) -> bool:
    """Whether two shapes are equal for all sizes."""
    return len(shape) == len(other) and all(map(same, shape, other))


def same_strides(meta: Meta, wanted: Sequence[int]) -> bool:
    """Strides agree wherever they matter: a dim of size 1 may have any."""
    if meta.numel() == 0:
        return True
    return all(s == w or n == 1 for s, w, n in zip(meta.stride(), wanted, meta.shape, strict=True))


# ---- small integers that only depend on sizes: computed while planning, constants of the plan ----


def numbers_in(fact: Fact) -> list[GuardedInt]:
    """Sizes in a fact that may vary."""
    return [n for n in (*(fact.shape or ()), *as_tuple(fact.content)) if isinstance(n, GuardedInt)]


def each_size(change: Callable[[Any], Any], fact: Fact) -> Fact:
    """A fact with every size in it changed: dims, then its content."""
    content = fact.content
    shape = None if fact.shape is None else tuple(map(change, fact.shape))
    known = tuple(map(change, content)) if isinstance(content, tuple) else change(content)
    return Fact(fact.dtype, shape, known)


def folded(
    node: Node, row: Row, facts: Sequence[Fact], fact: Callable[[Value], Fact]
) -> list[Fact] | None:
    """The results of a node with all their elements for contents, None if sizes alone do not tell
    them. `facts` are those of the results as far as the shape rule knows them."""
    if not node.outputs or row.has(Trait.SIDE_EFFECT | Trait.RANDOM):
        return None
    if all(is_known(f) for f in facts):
        return list(facts)
    inputs = {v: fact(v) for v in node.values()}
    small = all(f.shape is not None and count_of(f) <= HOST_SIZE for f in facts)
    if not small or not inputs or not all(is_known(f) for f in inputs.values()):
        return None

    def run(*numbers: Any) -> list[Fact]:
        rest = iter(numbers)
        given = {v: _with_content(f, rest) for v, f in inputs.items()}
        tensors = tensor_args(node, row, lambda v: tensor_of(given[v]))
        results = as_list(row.kernel(Op(node, given.__getitem__))(*tensors))
        contents = [tuple(t.reshape(-1).tolist()) if t.dim() else t.item() for t in results]
        found = zip(facts, results, contents, strict=True)
        return [Fact(f.dtype, tuple(t.shape), content) for f, t, content in found]

    numbers = [n for f in inputs.values() for n in as_tuple(f.content)]
    found = run(*map(value_of, numbers))
    guards = next((n.guards for n in numbers if isinstance(n, GuardedInt)), None)
    if guards is None:
        return found
    again = iter(
        guards.called(lambda *x: [n for f in run(*x) for n in as_tuple(f.content)], numbers)
    )
    return [_with_content(f, again) for f in found]


def _with_content(fact: Fact, numbers: Iterator[Any]) -> Fact:
    known = fact.content
    made = tuple([next(numbers) for _ in known]) if isinstance(known, tuple) else next(numbers)
    return Fact(fact.dtype, fact.shape, made)


def tensor_of(fact: Fact) -> torch.Tensor:
    """The tensor of a value whose content is known."""
    made = torch.tensor(fact.content, dtype=ge_to_torch(fact.dtype))
    return made.reshape(fact.shape)  # type: ignore[arg-type]


def kernel_of(node: Node, fact: Callable[[Value], Fact]) -> Callable[..., Any]:
    """The function that torch runs for a node."""
    row = row_of(node.type)
    assert row is not None
    return row.kernel(Op(node, fact))
