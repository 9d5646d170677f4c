"""Random GE graphs with inputs: what fusion, lowering and the generators meet in all mixtures.

Values that are compared, rounded or searched for their maximum must be the same in every way of
computing them, so the maker keeps track of which values are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.ge.build import Const, Data, NetOutput, builder
from torchair.ge.dtypes import ge_to_torch, torch_to_ge
from torchair.ge.graph import Graph, Value
from torchair.ge.shapes import Dim, Sym, evaluate, symbol
from torchair.operators import infer

SIZES = (2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 40, 64, 70)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVERYTHING = (*FLOATS, torch.int64, torch.int32, torch.bool)
MOST = 3000  # elements of a value


@dataclass(frozen=True)
class Item:
    """A value, its size at hand, and whether every way of computing it gives the same bits."""

    value: Value
    dims: tuple[int, ...]
    exact: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        return ge_to_torch(self.value.dtype)

    @property
    def real(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype.is_floating_point

    @property
    def count(self) -> int:
        """Number of elements."""
        return torch.Size(self.dims).numel()


Resize = Callable[[int], int]
"""What becomes of a size."""


class Noise:
    """Random tensors in different layouts."""

    def __init__(self, seed: int, extreme: bool = False) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.extreme = extreme

    def indices(self, dims: Sequence[int], below: int) -> torch.Tensor:
        """Positions along a dim."""
        return torch.randint(below, tuple(dims), generator=self.noise)

    def different(self, dims: Sequence[int], axis: int, whole: int) -> torch.Tensor:
        """Positions along an axis of size `whole`, none of them twice."""
        full = [whole if d == axis else n for d, n in enumerate(dims)]
        order = torch.rand(full, generator=self.noise).argsort(axis)
        return order.narrow(axis, 0, dims[axis]).contiguous()

    def strided(self, dtype: torch.dtype, dims: Sequence[int], way: str = "plain") -> torch.Tensor:
        """Random elements in some layout."""
        if way == "permuted" and len(dims) > 1:
            order = [*range(1, len(dims)), 0]
            made = self.content(dtype, [dims[d] for d in order])
            return made.permute([order.index(d) for d in range(len(dims))])
        if way == "spread" and dims:
            return self.content(dtype, [*dims[:-1], 2 * dims[-1] + 1])[..., 1::2]
        if way == "expanded" and dims:
            at = len(dims) // 2
            once = self.content(dtype, [1 if d == at else n for d, n in enumerate(dims)])
            return once.expand(tuple(dims))
        return self.content(dtype, dims)

    def content(self, dtype: torch.dtype, dims: Sequence[int]) -> torch.Tensor:
        """Random elements, one after the other in memory."""
        if dtype is torch.bool:
            return torch.randint(2, tuple(dims), generator=self.noise).bool()
        if dtype.is_complex:
            return torch.randn(tuple(dims), generator=self.noise, dtype=dtype)
        if not dtype.is_floating_point:
            least = -9 if dtype.is_signed else 0
            return torch.randint(least, 9, tuple(dims), generator=self.noise, dtype=dtype)
        made = torch.randn(tuple(dims), generator=self.noise, dtype=torch.float64)
        if self.extreme:
            powers = torch.randint(-40, 41, tuple(dims), generator=self.noise)
            made = made * 2.0**powers
            odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
            chosen = torch.randint(5, tuple(dims), generator=self.noise)
            rare = torch.rand(tuple(dims), generator=self.noise) < 0.02
            made = torch.where(rare, odd[chosen].double(), made)
        return made.to(dtype)


Make = Callable[[Noise, Resize], torch.Tensor]


class Maker:
    """Makes one graph and inputs for it. With `dynamic` sizes are symbols."""

    def __init__(self, seed: int, nodes: int = 12, dynamic: bool = False, extreme: bool = False):
        self.pick = random.Random(seed)
        self.dynamic, self.extreme = dynamic, extreme
        self.sizes = self.pick.sample(SIZES, 3)
        if not dynamic and self.pick.random() < 0.2:
            self.sizes[self.pick.randrange(3)] = self.pick.choice([0, 1])
        self.floats = self.pick.choices(FLOATS, [6, 3, 2, 2], k=2)
        self.items: list[Item] = []
        self._inputs: list[tuple[int, Make]] = []
        self.graph = Graph(f"random_{seed}", infer)
        with self.graph:
            for _ in range(self.pick.randint(2, 4)):
                self.input(self.pick.choice(self.floats))
            while len(self.graph) < nodes + len(self._inputs):
                self.grow()
            self.end()

    # ---- inputs ----

    def shape(self) -> list[Dim]:
        """Dims out of the sizes of this graph, with ones here and there."""
        while True:
            rank = self.pick.choices([0, 1, 2, 3, 4], [1, 3, 6, 5, 2])[0]
            dims = [1 if self.pick.random() < 0.12 else self.size() for _ in range(rank)]
            if torch.Size(self.real(dims)).numel() <= MOST:
                return dims

    def size(self) -> Dim:
        """One of the sizes of this graph."""
        n = self.pick.choice(self.sizes)
        return symbol(f"s{n}") if self.dynamic and n > 1 else n

    def real(self, dims: Sequence[Dim], size: Resize = lambda n: n) -> tuple[int, ...]:
        """The integers that dims stand for."""
        return evaluate(dims, {f"s{n}": size(n) for n in self.sizes})

    def input(self, dtype: torch.dtype, dims: Sequence[Dim] | None = None, below: int = 0) -> Item:
        """One more input; integers are indices if `below` is given."""
        wanted = self.shape() if dims is None else list(dims)
        way = self.pick.choices(["plain", "permuted", "spread", "expanded"], [7, 2, 1, 1])[0]

        def make(noise: Noise, size: Resize) -> torch.Tensor:
            new = self.real(wanted, size)
            return noise.indices(new, below) if below else noise.strided(dtype, new, way)

        return self.input_made_by(make, dtype, wanted)

    def input_made_by(self, make: Make, dtype: torch.dtype, dims: Sequence[Dim]) -> Item:
        """One more input, given as a function of what becomes of sizes."""
        value = Data(index=len(self._inputs), dtype=torch_to_ge(dtype), shape=dims)
        self._inputs.append((self.pick.getrandbits(32), make))
        return self.keep(value, self.real(dims), exact=True)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Inputs of the sizes the graph was made with."""
        return self.resized(lambda n: n)

    def resized(self, size: Resize) -> list[torch.Tensor]:
        """Inputs of other sizes, for a dynamic graph."""
        return [make(Noise(seed, self.extreme), size) for seed, make in self._inputs]

    # ---- the graph ----

    def keep(self, value: Value, dims: Sequence[int], exact: bool) -> Item:
        """A value that later nodes may read, None if it is too large."""
        item = Item(value, tuple(dims), exact)
        self.items.append(item)
        return item

    def some(self, *conditions: Any) -> Item | None:
        """A value that satisfies conditions, rather a recent one."""
        fit = [i for i in self.items if all(c(i) for c in conditions)]
        if not fit:
            return None
        return fit[-1 - min(int(self.pick.expovariate(0.45)), len(fit) - 1)]

    def grow(self) -> None:
        """One step: some operator on values that are there."""
        kind = self.pick.choices(list(STEPS), [w for w, _ in STEPS.values()])[0]
        STEPS[kind][1](self)

    def end(self) -> None:
        """Everything that nobody reads is a result, and some of the rest."""
        last = [i.value for i in self.items if not i.value.uses and i.value.node.type != "Data"]
        more = [i.value for i in self.items if i.value.uses and i.value.node.type != "Data"]
        NetOutput([*last, *(v for v in more if self.pick.random() < 0.15)])

    def node(
        self, op_type: str, dims: Sequence[int], exact: bool, /, *args: Any, **attrs: Any
    ) -> None:
        """Add a node with one result."""
        if torch.Size(dims).numel() <= MOST:
            self.keep(builder(op_type)(*args, **attrs), dims, exact)

    def number(self, dtype: torch.dtype) -> Value:
        """A constant without dims."""
        value = (
            self.pick.choice([2, 3, -1, 5])
            if not dtype.is_floating_point
            else (self.pick.choice([0.5, 2.0, -1.25, 3.0]))
        )
        return Const(torch.tensor(value, dtype=dtype))

    def partner(self, x: Item) -> tuple[Value, tuple[int, ...], bool]:
        """A second operand that broadcasts against `x`, made if there is none."""
        if self.pick.random() < 0.2:
            return self.number(x.dtype), x.dims, True
        fits = self.some(lambda i: i.dtype == x.dtype, lambda i: _fit(i, x))
        if fits is None or self.pick.random() < 0.1:
            dims = [n if self.pick.random() < 0.7 else 1 for n in x.value.shape or ()]
            fits = self.input(x.dtype, dims[self.pick.randint(0, len(dims)) :])
        dims = torch.broadcast_shapes(fits.dims, x.dims)
        return fits.value, tuple(dims), fits.exact


def _broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def _fit(a: Item, b: Item) -> bool:
    """Whether two values broadcast, at any size."""
    return _broadcast(a.value.shape or (), b.value.shape or ())


def _float(i: Item) -> bool:
    return i.real


def _narrow(i: Item) -> bool:
    return i.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _exact(i: Item) -> bool:
    return i.exact


def _dims(i: Item) -> bool:
    return len(i.dims) > 0


def _full(i: Item) -> bool:
    return i.count > 0


# ---- steps ----

_SMOOTH = (
    "Tanh", "Sigmoid", "Swish", "GeluV2", "Erf", "Exp", "Sin", "Square", "Cos", "Log1p", "Sqrt",
    "Rsqrt", "SoftplusV2", "Mish", "Elu",
)  # fmt: skip


def _unary(m: Maker) -> None:
    x = m.some(_float)
    if x is None:
        return
    kind = m.pick.choice([*_SMOOTH, "Neg", "Abs", "Relu", "Reciprocal"])
    value = x.value
    if kind in ("Log1p", "Sqrt", "Rsqrt"):
        value = builder("Abs")(value)
    if kind in ("Rsqrt", "Reciprocal"):
        value = builder("Add")(builder("Abs")(value), Const(torch.tensor(0.5, dtype=x.dtype)))
    m.node(kind, x.dims, x.exact and kind in ("Neg", "Abs", "Relu"), value)


def _binary(m: Maker) -> None:
    x = m.some(lambda i: i.dtype != torch.bool)
    if x is None:
        return
    other, dims, exact = m.partner(x)
    kinds = ["Add", "Sub", "Mul", "Maximum", "Minimum"]
    kind = m.pick.choice(kinds if x.real else [*kinds, "BitwiseAnd", "BitwiseXor"])
    same = not x.real or kind in ("Maximum", "Minimum")
    pair = [x.value, other] if m.pick.random() < 0.7 else [other, x.value]
    m.node(kind, dims, x.exact and exact and same, *pair)


def _divide(m: Maker) -> None:
    x = m.some(_float)
    if x is None:
        return
    other, dims, _ = m.partner(x)
    safe = builder("Add")(builder("Abs")(other), Const(torch.tensor(1.0, dtype=x.dtype)))
    m.node("RealDiv", dims, False, x.value, safe)


def _cast(m: Maker) -> None:
    x = m.some()
    target = (
        m.pick.choice(m.floats) if x is None or x.real else m.pick.choice([*m.floats, *EVERYTHING])
    )
    if x is None or target == x.dtype:
        return
    wider = {torch.float64: 3, torch.float32: 2}.get(target, 1) if target.is_floating_point else 9
    own = {torch.float64: 3, torch.float32: 2}.get(x.dtype, 1)
    m.node(
        "Cast",
        x.dims,
        x.exact and (not x.real or wider > own),
        x.value,
        dst_type=torch_to_ge(target),
    )


def _compare(m: Maker) -> None:
    x = m.some(_exact, lambda i: i.dtype != torch.bool)
    y = x and m.some(_exact, lambda i: i.dtype == x.dtype, lambda i: _fit(i, x))
    if x is None or y is None:
        return
    other = y.value if m.pick.random() < 0.7 else m.number(x.dtype)
    dims = torch.broadcast_shapes(x.dims, y.dims) if other is y.value else x.dims
    kind = m.pick.choice(["Greater", "Less", "Equal", "GreaterEqual", "NotEqual"])
    m.node(kind, dims, True, x.value, other)


def _logic(m: Maker) -> None:
    x = m.some(lambda i: i.dtype == torch.bool)
    if x is None:
        return
    other, dims, _ = m.partner(x) if m.pick.random() < 0.6 else (None, x.dims, True)
    if other is None or other.node.type == "Const":
        m.node("LogicalNot", x.dims, True, x.value)
    else:
        m.node(m.pick.choice(["LogicalAnd", "LogicalOr"]), dims, True, x.value, other)


def _choose(m: Maker) -> None:
    x = m.some()
    mask = x and m.some(lambda i: i.dtype == torch.bool, lambda i: _fit(i, x))
    if x is None or mask is None:
        return
    dims = torch.broadcast_shapes(mask.dims, x.dims)
    if m.pick.random() < 0.4 and dims == x.dims:
        m.node("MaskedFill", dims, x.exact, x.value, mask.value, m.number(x.dtype))
        return
    other, more, exact = m.partner(x)
    if _broadcast(other.shape or (), mask.value.shape or ()):
        dims = torch.broadcast_shapes(more, dims)
        m.node("SelectV2", dims, x.exact and exact, mask.value, x.value, other)


def _reduce(m: Maker) -> None:
    x = m.some(_dims)
    if x is None:
        return
    axes = sorted(m.pick.sample(range(len(x.dims)), m.pick.randint(1, min(2, len(x.dims)))))
    keep = m.pick.random() < 0.5
    empty = any(x.dims[a] == 0 for a in axes)
    if x.dtype == torch.int32:
        return  # torch gives sums of them another type
    kinds = ["ReduceSum", "ReduceMean", "ReduceLogSumExp"] if x.real else ["ReduceSum"]
    kinds += [] if empty else ["ReduceMax", "ReduceMin"]
    kind = m.pick.choice(["ReduceAny", "ReduceAll"] if x.dtype == torch.bool else kinds)
    dims = [1 if d in axes else n for d, n in enumerate(x.dims) if keep or d not in axes]
    given = [a - len(x.dims) if m.pick.random() < 0.5 else a for a in axes]
    exact = x.exact and (not x.real or kind in ("ReduceMax", "ReduceMin"))
    m.node(kind, dims, exact, x.value, given, keep_dims=keep)


def _position(m: Maker) -> None:
    x = m.some(_exact, _dims, _full, lambda i: i.dtype != torch.bool)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    dims = [n for d, n in enumerate(x.dims) if d != axis]
    if m.pick.random() < 0.5:
        m.node("ArgMaxV2", dims, True, x.value, axis)
        return
    index, value = builder("ArgMaxWithValue")(x.value, dimension=axis)
    m.keep(index, dims, True)
    m.keep(value, dims, True)


def _softmax(m: Maker) -> None:
    x = m.some(_float, _dims)
    if x is None:
        return
    axis = [m.pick.randrange(-len(x.dims), len(x.dims))]
    m.node(m.pick.choice(["SoftmaxV2", "LogSoftmaxV2"]), x.dims, False, x.value, axes=axis)


def _norm(m: Maker) -> None:
    x = m.some(_float, _dims, _full)
    if x is None or (not isinstance(x.value.shape[-1], int) and m.pick.random() < 0.5):
        return
    size = x.value.shape[-1:]
    gamma = m.input(x.dtype, size)
    if m.extreme or m.pick.random() < 0.5:  # the variance of equal large numbers is pure rounding
        m.keep(builder("RmsNorm")(x.value, gamma.value)[0], x.dims, False)
        return
    if isinstance(x.value.shape[-1], Sym):
        return
    beta = m.input(x.dtype, size)
    # with the usual epsilon the rounding of equal numbers grows by its root, 300 times
    y, mean, rstd = builder("LayerNormV4")(
        x.value, list(size), gamma.value, beta.value, epsilon=1.0
    )
    m.keep(y, x.dims, False)
    if m.pick.random() < 0.3 and x.dtype in (torch.float32, torch.float64):
        m.keep(mean, [*x.dims[:-1], 1], False)
        m.keep(rstd, [*x.dims[:-1], 1], False)


def _matmul(m: Maker) -> None:
    x = m.some(_narrow, lambda i: len(i.dims) >= 2)
    if x is None:
        return
    lead, (rows, inner) = x.value.shape[:-2], x.value.shape[-2:]
    columns = m.size()
    first, second = m.pick.random() < 0.25, m.pick.random() < 0.5
    if first:
        rows, inner = inner, rows
    own = lead if m.pick.random() < 0.6 else ()
    other = m.input(x.dtype, [*own, *((columns, inner) if second else (inner, columns))])
    dims = m.real([*lead, rows, columns])
    if lead:
        m.node(
            "BatchMatMulV2", dims, False, x.value, other.value, None, adj_x1=first, adj_x2=second
        )
        return
    bias = m.input(x.dtype, [columns]).value if m.pick.random() < 0.4 else None
    m.node(
        "MatMulV2", dims, False, x.value, other.value, bias, transpose_x1=first, transpose_x2=second
    )


# ---- steps that move elements ----


def _transpose(m: Maker) -> None:
    x = m.some(lambda i: len(i.dims) > 1)
    if x is not None:
        order = m.pick.sample(range(len(x.dims)), len(x.dims))
        m.node("Transpose", [x.dims[d] for d in order], x.exact, x.value, order)


def _reshape(m: Maker) -> None:
    x = m.some(lambda i: len(i.dims) > 1)
    if x is None:
        return
    at = m.pick.randrange(len(x.dims) - 1)
    if m.dynamic and any(
        isinstance(d, Sym) for k, d in enumerate(x.value.shape) if k not in (at, at + 1)
    ):
        return
    dims = [*x.dims[:at], x.dims[at] * x.dims[at + 1], *x.dims[at + 2 :]]
    wanted = list(dims)
    if m.dynamic:
        wanted[at] = -1
    elif m.pick.random() < 0.3:
        wanted = dims = [*x.dims[:at], 1, *x.dims[at:]]
    if 0 not in dims or not m.dynamic:
        m.node("Reshape", dims, x.exact, x.value, wanted)


def _ones(m: Maker) -> None:
    x = m.some()
    if x is None:
        return
    if 1 in x.dims and m.pick.random() < 0.5:
        at = m.pick.choice([d for d, n in enumerate(x.dims) if n == 1])
        m.node("Squeeze", [*x.dims[:at], *x.dims[at + 1 :]], x.exact, x.value, axis=[at])
    elif len(x.dims) < 4:
        at = m.pick.randint(0, len(x.dims))
        m.node("Unsqueeze", [*x.dims[:at], 1, *x.dims[at:]], x.exact, x.value, axes=[at])


def _broadcast_to(m: Maker) -> None:
    x = m.some(lambda i: len(i.dims) < 4, lambda i: all(isinstance(d, int) for d in i.value.shape))
    if x is None:
        return
    dims = [m.pick.choice([2, 3]), *(5 if n == 1 else n for n in x.dims)]
    m.node("BroadcastTo", dims, x.exact, x.value, dims)


def _slice(m: Maker) -> None:
    x = m.some(_dims)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    n = x.dims[axis]
    begin, step = m.pick.randint(0, max(n // 2, 0)), m.pick.choice([1, 1, 1, 2, 3])
    end = m.pick.choice([n, n - 1, -1, 2**62]) if not m.dynamic else m.pick.choice([-1, 2**62])
    if isinstance(x.value.shape[axis], Sym):
        begin, step = m.pick.choice([0, 1]), 1
    y = builder("StridedSliceV2")(x.value, [begin], [end], [axis], [step])
    dims = list(x.dims)
    dims[axis] = len(range(n)[begin:end:step])
    if torch.Size(dims).numel() <= MOST:
        m.keep(y, dims, x.exact)


def _split(m: Maker) -> None:
    x = m.some(_dims, lambda i: any(isinstance(d, int) and d > 1 for d in i.value.shape))
    if x is None:
        return
    axis = m.pick.choice([k for k, d in enumerate(x.value.shape) if isinstance(d, int) and d > 1])
    first = m.pick.randint(1, x.dims[axis] - 1)
    parts = builder("SplitV")(x.value, [first, x.dims[axis] - first], axis, num_split=2)
    for part, n in zip(parts, (first, x.dims[axis] - first), strict=True):
        dims = list(x.dims)
        dims[axis] = n
        m.keep(part, dims, x.exact)


def _concat(m: Maker) -> None:
    x = m.some(_dims)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    rest = [d for d in range(len(x.dims)) if d != axis]
    fits = [
        i
        for i in m.items
        if i.dtype == x.dtype
        and len(i.dims) == len(x.dims)
        and all(i.dims[d] == x.dims[d] and i.value.shape[d] == x.value.shape[d] for d in rest)
    ]
    parts = [m.pick.choice(fits) for _ in range(m.pick.randint(1, 3))]
    m.pick.shuffle(parts := [x, *parts])
    dims = list(x.dims)
    dims[axis] = sum(p.dims[axis] for p in parts)
    m.node(
        "ConcatV2", dims, all(p.exact for p in parts), [p.value for p in parts], axis, N=len(parts)
    )


def _pack(m: Maker) -> None:
    x = m.some(lambda i: len(i.dims) < 4)
    if x is None:
        return
    same = [i for i in m.items if i.dtype == x.dtype and i.value.shape == x.value.shape]
    parts = [x, m.pick.choice(same)]
    axis = m.pick.randint(0, len(x.dims))
    dims = [*x.dims[:axis], 2, *x.dims[axis:]]
    m.node("Pack", dims, all(p.exact for p in parts), [p.value for p in parts], axis=axis, N=2)


def _shuffle(m: Maker) -> None:
    x = m.some(_dims, _full)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    kind = m.pick.choice(["Roll", "ReverseV2", "PadV3", "Tile"])
    if kind == "Roll":
        m.node(kind, x.dims, x.exact, x.value, shifts=[m.pick.randint(-3, 3)], dims=[axis])
    elif kind == "ReverseV2":
        m.node(kind, x.dims, x.exact, x.value, [axis])
    elif kind == "PadV3":
        before, after = m.pick.randint(0, 3), m.pick.randint(0, 3)
        pads = [0] * 2 * len(x.dims)
        pads[2 * axis : 2 * axis + 2] = [before, after]
        dims = [n + before + after if d == axis else n for d, n in enumerate(x.dims)]
        m.node(kind, dims, x.exact, x.value, pads, m.number(x.dtype))
    else:
        times = [m.pick.choice([1, 2]) for _ in x.dims]
        dims = [n * t for n, t in zip(x.dims, times, strict=True)]
        m.node(kind, dims, x.exact, x.value, times)


def _gather(m: Maker) -> None:
    x = m.some(_dims, _full)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    if m.pick.random() < 0.5:
        index = m.input(torch.int64, m.pick.choice([[4], [2, 3], [7], []]), x.dims[axis])
        dims = [*x.dims[:axis], *index.dims, *x.dims[axis + 1 :]]
        m.node("GatherV2", dims, x.exact, x.value, index.value, [axis])
        return
    dims = [3 if d == axis else n for d, n in enumerate(x.value.shape)]
    index = m.input(torch.int64, dims, x.dims[axis])
    m.node("GatherElements", index.dims, x.exact, x.value, index.value, dim=axis)


def _points(m: Maker) -> None:
    x = m.some(lambda i: len(i.dims) > 1, _full)
    if x is None:
        return
    count = m.pick.choice([1, 2])
    index = [m.input(torch.int64, [6], x.dims[d]).value for d in range(count)]
    mask = [1] * count + [0] * (len(x.dims) - count)
    m.node("IndexByTensor", [6, *x.dims[count:]], x.exact, x.value, index, indices_mask=mask)


def _update(m: Maker) -> None:
    x = m.some(_dims, _full)
    if x is None:
        return
    axis = m.pick.randrange(len(x.dims))
    n = x.dims[axis]
    whole, few = x.value.shape[axis], min(2, n)
    part = [few if d == axis else k for d, k in enumerate(x.value.shape)]
    source = m.input(x.dtype, part)
    if m.pick.random() < 0.5 and not m.dynamic:
        begins = [n - few if d == axis else 0 for d in range(len(x.dims))]
        ends = list(x.dims)
        m.node(
            "StridedSliceAssign",
            x.dims,
            x.exact,
            x.value,
            begins,
            ends,
            [1] * len(ends),
            source.value,
        )
        return

    def positions(noise: Noise, size: Resize) -> torch.Tensor:
        return noise.different(m.real(part, size), axis, m.real([whole], size)[0])

    index = m.input_made_by(positions, torch.int64, part)
    m.node("ScatterElements", x.dims, x.exact, x.value, index.value, source.value, axis=axis)


STEPS = {
    "unary": (8, _unary), "binary": (14, _binary), "divide": (3, _divide), "cast": (4, _cast),
    "compare": (3, _compare), "logic": (2, _logic), "choose": (3, _choose), "reduce": (7, _reduce),
    "position": (1, _position), "softmax": (3, _softmax), "norm": (3, _norm),
    "matmul": (4, _matmul), "transpose": (4, _transpose), "reshape": (3, _reshape),
    "ones": (3, _ones), "broadcast": (1, _broadcast_to), "slice": (4, _slice),
    "split": (3, _split), "concat": (3, _concat), "pack": (1, _pack), "shuffle": (3, _shuffle),
    "gather": (3, _gather), "points": (1, _points), "update": (2, _update),
}  # fmt: skip
