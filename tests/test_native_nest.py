"""Kernels of loop nests against a plain evaluation of the same nest with numpy."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from torchair.codegen.abi import Size, Word
from torchair.codegen.llvm.jit import Library, run_kernel
from torchair.codegen.llvm.nest import emit_point, print_nest
from torchair.codegen.llvm.target import Target, host
from torchair.codegen.llvm.writer import KernelWriter
from torchair.codegen.loops import (
    Access,
    Expr,
    Nest,
    Store,
    axis,
    cast,
    const,
    expressions,
    load,
    op,
    reduce,
    simplify,
    size,
    with_words,
)

LIBRARY = Library()
NUMPY: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16": np.float16, "bool": np.bool_,
    "u8": np.uint8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
INTEGERS = ("u8", "i8", "i16", "i32", "i64")


def narrowed(bits: int) -> Target:
    """This machine with narrower vectors."""
    if bits >= host().bits:
        return host()
    return dataclasses.replace(host(), bits=bits, registers=16, dot_bf16=False)


TARGETS = [narrowed(bits) for bits in (512, 256, 128)]


# ---- the plain evaluation ----


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Float32 rounded to the upper 16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def into_memory(x: np.ndarray, dtype: str) -> np.ndarray:
    return to_bf16(x) if dtype == "bf16" else x.astype(NUMPY[dtype])


def from_memory(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return from_bf16(x)
    return x.astype(np.float32) if dtype == "f16" else x


def python_sign(a: Any, b: Any) -> Any:
    """The remainder of a division that rounds down, as torch defines it for floats."""
    r = np.fmod(a, b)
    return np.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)


def floor_divide(a: Any, b: Any) -> Any:
    r = np.fmod(a, b)
    q = (a - r) / b
    q = np.where((r != 0) & ((b < 0) != (r < 0)), q - 1, q)
    floor = np.floor(q)
    floor = np.where(q - floor > 0.5, floor + 1, floor)
    return np.where(b == 0, a / b, np.where(q == 0, np.copysign(0.0, a / b), floor)).astype(a.dtype)


def truncating(a: Any, b: Any) -> Any:
    return (np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))).astype(a.dtype)


def shifted(kind: str) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        bits = a.dtype.itemsize * 8
        inside = (b >= 0) & (b < bits)
        amount = np.where(inside, b, bits - 1).astype(a.dtype)
        if kind == "shl":
            return np.where(inside, a << amount, 0).astype(a.dtype)
        return np.where(inside | (a.dtype.kind == "i"), a >> amount, 0).astype(a.dtype)

    return apply


def numeric(floats: Callable[..., Any], integers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *a: (floats if a[0].dtype.kind == "f" else integers)(*a)


PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "div": numeric(np.divide, truncating), "min": np.minimum, "max": np.maximum,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "where": np.where, "shl": shifted("shl"), "shr": shifted("shr"),
    "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite,
    "fmod": np.fmod, "remainder": numeric(python_sign, np.remainder),
    "floordiv": numeric(floor_divide, np.floor_divide),
    "sign": lambda x: np.where(np.isnan(x), 0, np.sign(x)).astype(x.dtype),
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "exp": np.exp, "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
REDUCE: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any, "all": np.all,
}  # fmt: skip


class Plain:
    """Values of a nest on the whole grid of its axes."""

    def __init__(self, nest: Nest, memory: Sequence[np.ndarray]) -> None:
        self.nest, self.memory = nest, memory
        self.values: dict[int, Any] = {}

    def run(self) -> None:
        """Store what the nest stores."""
        with np.errstate(all="ignore"):
            for x in expressions(self.nest):
                self.values[id(x)] = np.asarray(self.value(x)).astype(NUMPY[x.dtype])
            for s in self.nest.stores:
                self.store(s)

    def grid(self, number: int) -> np.ndarray:
        shape = [1] * len(self.nest.axes)
        shape[number] = self.nest.axes[number]
        return np.arange(self.nest.axes[number]).reshape(shape)

    def places(self, place: Access) -> tuple[np.ndarray, Any]:
        index: Any = np.asarray(place.offset)
        for a, stride in enumerate(place.strides):
            index = index + (self.grid(a) * stride if stride else 0)
        if place.extra is not None:
            index = index + self.values[id(place.extra)]
        mask = True if place.mask is None else self.values[id(place.mask)]
        return np.where(mask, index, 0), mask

    def value(self, x: Expr) -> Any:
        args = [self.values[id(a)] for a in x.args]
        if x.kind in ("const", "size"):
            return x.data
        if x.kind == "axis":
            return self.grid(x.data)
        if x.kind == "load":
            index, mask = self.places(x.data)
            got = from_memory(self.memory[x.data.operand][index], x.data.dtype)
            return np.where(mask, got, np.zeros((), got.dtype))
        if x.kind == "reduce":
            return self.reduced(x, args[0])
        if x.kind == "cast":
            return self.cast(args[0], x.dtype)
        if x.dtype in ("f32", "f64") and x.kind in ("exp", "tanh", "sigmoid", "rsqrt"):
            args = [a.astype(np.float64) for a in args]
        return PLAIN[x.kind](*args)

    def cast(self, x: Any, dtype: str) -> Any:
        if x.dtype.kind == "f" and dtype in INTEGERS:
            return x.astype(np.int64).astype(NUMPY[dtype])
        return x.astype(NUMPY[dtype])

    def reduced(self, x: Expr, value: Any) -> Any:
        shape = tuple(self.nest.axes)
        full = np.broadcast_to(value, shape)
        full = full.astype(np.float64) if full.dtype == np.float32 else full
        where = tuple(sorted(self.nest.reduced))
        if not full.size and x.data in ("max", "min"):
            infinite = -np.inf if x.data == "max" else np.inf
            return np.max(full, axis=where, keepdims=True, initial=infinite)
        return REDUCE[x.data](full, axis=where, keepdims=True)

    def store(self, s: Store) -> None:
        index, mask = self.places(s.access)
        value = into_memory(self.values[id(s.value)], s.access.dtype)
        shape = np.broadcast_shapes(index.shape, value.shape, np.shape(mask))
        index, value, mask = (np.broadcast_to(x, shape) for x in (index, value, mask))
        self.memory[s.access.operand][index[mask]] = value[mask]


# ---- running a nest ----


def as_words(nest: Nest, operands: int, wordy: Callable[[int], bool]) -> tuple[Nest, list[int]]:
    """The nest with some of its sizes as words behind the operands."""
    words: dict[int, int] = {}

    def word(n: int) -> Size:
        if n in (0, 1) or not wordy(n):
            return n
        return Word(operands + words.setdefault(n, len(words)))

    return with_words(nest, word), list(words)  # type: ignore[arg-type]


def run_nest(
    nest: Nest,
    memory: list[np.ndarray],
    target: Target,
    threads: int = 1,
    wordy: Callable[[int], bool] = lambda n: False,
) -> None:
    printed, words = as_words(nest, len(memory), wordy)
    kernel = print_nest(printed, target)
    library = LIBRARY if target == host() else library_of(target)
    run_kernel(library, kernel, [*(m.ctypes.data for m in memory), *words], threads)


LIBRARIES: dict[Target, Library] = {}


def library_of(target: Target) -> Library:
    return LIBRARIES.setdefault(target, Library(target))


def check(
    nest: Nest,
    memory: list[np.ndarray],
    target: Target,
    threads: int = 1,
    wordy: Callable[[int], bool] = lambda n: False,
    tolerance: float = 2e-5,
) -> list[np.ndarray]:
    """Run a nest both ways; everything in memory must agree. Returns the memory."""
    expected = [m.copy() for m in memory]
    Plain(nest, expected).run()
    got = [m.copy() for m in memory]
    run_nest(nest, got, target, threads, wordy)
    kinds = {s.access.operand: s.access.dtype for s in nest.stores}
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        dtype = kinds.get(k)
        if dtype not in ("f32", "f64", "bf16", "f16"):
            np.testing.assert_array_equal(a, b, err_msg=f"operand {k}")
            continue
        loose = {"bf16": 1e-2, "f16": 2e-3}.get(dtype, tolerance)
        x, y = (from_memory(v, dtype).astype(np.float64) for v in (a, b))
        largest = max(1.0, float(np.max(np.abs(y), where=np.isfinite(y), initial=0)))
        np.testing.assert_allclose(x, y, loose, loose * largest, err_msg=f"operand {k}")
    return got


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(1, shape[k + 1])
    return tuple(strides)


def noise(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        return rng.integers(0 if dtype == "u8" else -50, 51, count).astype(NUMPY[dtype])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    return into_memory(rng.standard_normal(count).astype(np.float64), dtype)


# ---- whole kernels ----


def softmax(rows: int, columns: int, dtype: str = "f32") -> tuple[Nest, list[np.ndarray]]:
    x = load(Access(0, dtype, (columns, 1)))
    e = op("exp", op("sub", x, reduce("max", x)))
    y = op("div", e, reduce("sum", e))
    nest = Nest((rows, columns), (Store(Access(1, dtype, (columns, 1)), y),), frozenset({1}))
    return nest, [noise(rows * columns, dtype), noise(rows * columns, dtype, 1)]


def layer_norm(rows: int, columns: int, dtype: str = "f32") -> tuple[Nest, list[np.ndarray]]:
    x = load(Access(0, dtype, (columns, 1)))
    n = cast(size(columns), "f32")
    mean = op("div", reduce("sum", x), n)
    d = op("sub", x, mean)
    variance = op("div", reduce("sum", op("mul", d, d)), n)
    scale = op("div", const(1.0, "f32"), op("sqrt", op("add", variance, const(1e-5, "f32"))))
    y = op("add", op("mul", op("mul", d, scale), load(Access(1, dtype, (0, 1)))),
           load(Access(2, dtype, (0, 1))))  # fmt: skip
    stores = (Store(Access(3, dtype, (columns, 1)), y), Store(Access(4, "f32", (1, 0)), mean))
    memory = [noise(rows * columns, dtype), noise(columns, dtype, 1), noise(columns, dtype, 2)]
    memory += [noise(rows * columns, dtype, 3), noise(rows, "f32", 4)]
    return Nest((rows, columns), stores, frozenset({1})), memory


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t.bits))
@pytest.mark.parametrize("shape", [(1, 64), (3, 17), (5, 200), (2, 1000), (4, 1), (0, 9), (3, 0)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_layer_norm(target: Target, shape: tuple[int, int], dynamic: bool) -> None:
    nest, memory = layer_norm(*shape)
    check(nest, memory, target, 1 if dynamic else 3, lambda n: dynamic)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t.bits))
def test_added(target: Target) -> None:
    for n in (1, 5, 16, 64, 100, 129, 1000, 5000):
        x, y = (load(Access(k, "f32", (1,))) for k in (0, 1))
        nest = Nest((n,), (Store(Access(2, "f32", (1,)), op("add", x, y)),))
        memory = [noise(n, "f32", k) for k in range(3)]
        for threads in (1, 3):
            for dynamic in (False, True):
                got = check(nest, memory, target, threads, lambda _, d=dynamic: d)
                assert np.array_equal(got[2], memory[0] + memory[1])


# ---- random nests ----


class Maker:
    """Makes random nests with their memory."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.memory: list[np.ndarray] = []
        sizes = [1, 2, 3, 5, 7, 16, 17, 31, 64, 100, 130, 300]
        self.axes = [self.pick.choice(sizes) for _ in range(self.pick.randint(1, 4))]
        while int(np.prod(self.axes)) > 12000:
            self.axes.remove(max(self.axes))
        some = self.pick.random() < 0.65
        self.reduced = {a for a in range(len(self.axes)) if some and self.pick.random() < 0.5}
        self.leaves: dict[str, list[Expr]] = {}

    def nest(self) -> Nest:
        """A nest with one to three stores."""
        kinds = self.pick.choices(["f32", "f64", "i64", "i32", "u8", "bool"], [6, 2, 1, 1, 1, 1], k=2)
        stores = tuple(
            self.store(self.value(self.pick.choice(kinds), self.pick.randint(1, 4)))
            for _ in range(self.pick.randint(1, 3))
        )
        return Nest(tuple(self.axes), stores, frozenset(self.reduced))

    def layout(self, used: set[int], gaps: bool = True) -> tuple[tuple[int, ...], int, int]:
        """Strides in some order, an offset, and how many elements that takes."""
        order = sorted(used, key=lambda a: self.pick.random())
        if self.pick.random() < 0.6:
            order = sorted(used)
        strides, step, offset = [0] * len(self.axes), 1, 0
        if gaps and self.pick.random() < 0.2:
            step = self.pick.choice([2, 3])
        for a in reversed(order):
            strides[a] = step
            step *= max(1, self.axes[a]) + (gaps and self.pick.random() < 0.15)
            if gaps and self.pick.random() < 0.12:
                offset += strides[a] * (self.axes[a] - 1)
                strides[a] = -strides[a]
        return tuple(strides), offset, max(1, step)

    def operand(self, count: int, dtype: str) -> int:
        self.memory.append(noise(count, dtype, len(self.memory)))
        return len(self.memory) - 1

    def load(self, dtype: str, low: bool = False) -> Expr:
        """A load of some form; `low` ones are not masked and not scattered."""
        used = {a for a in range(len(self.axes)) if self.pick.random() < 0.75}
        strides, offset, count = self.layout(used)
        extra = mask = None
        if not low and self.pick.random() < 0.2:
            rows = self.pick.randint(1, 9)
            row = op("remainder", self.load("i64", low=True), const(rows, "i64"))
            extra, count = op("mul", row, const(count, "i64")), count * rows
        if not low and self.pick.random() < 0.15:
            mask = self.value("bool", 1)
        return load(Access(self.operand(count, dtype), dtype, strides, offset, extra, mask))

    def leaf(self, dtype: str) -> Expr:
        known = self.leaves.setdefault(dtype, [])
        if known and self.pick.random() < 0.4:
            return self.pick.choice(known)
        chance = self.pick.random()
        if chance < 0.1:
            return const(self.pick.choice([0, 1, 2, 3]), dtype)
        if dtype == "i64" and chance < 0.3:
            return axis(self.pick.randrange(len(self.axes)))
        memory = self.pick.choice(["f32", "f32", "bf16", "f16"]) if dtype == "f32" else dtype
        if dtype == "f32" and chance < 0.2:
            return cast(self.load(self.pick.choice([*INTEGERS, "bool"])), "f32")
        known.append(self.load(memory))
        return known[-1]

    def value(self, dtype: str, depth: int) -> Expr:
        """An expression of a type."""
        if depth <= 0:
            return self.leaf(dtype)
        made = self.reduction(dtype, depth) if self.reduced and self.pick.random() < 0.3 else None
        if made is None and dtype in ("f32", "f64"):
            made = self.floating(dtype, depth - 1)
        if made is None:
            made = self.logical(depth - 1) if dtype == "bool" else self.integer(dtype, depth - 1)
        self.leaves.setdefault(dtype, []).append(made)
        return made

    def reduction(self, dtype: str, depth: int) -> Expr:
        if dtype == "bool":
            return reduce(self.pick.choice(["any", "all"]), self.value("bool", depth - 1))
        if dtype == "u8":
            return reduce(self.pick.choice(["max", "min"]), self.value(dtype, depth - 1))
        kind = self.pick.choice(["sum", "sum", "max", "min"])
        count = int(np.prod([self.axes[a] for a in self.reduced]))
        result = reduce(kind, self.value(dtype, depth - 1))
        if kind == "sum" and dtype in ("f32", "f64"):
            return op("div", result, const(float(max(1, count)), dtype))
        return result

    def floating(self, dtype: str, depth: int) -> Expr:
        kind = self.pick.choice(
            "add sub mul div min max where neg abs sqrt tanh sigmoid sign cast".split()
        )
        x = self.value(dtype, depth)
        if kind == "where":
            return op("where", self.value("bool", depth), x, self.value(dtype, depth))
        if kind == "cast":
            other = self.pick.choice(["i32", "u8", "bool", "f64" if dtype == "f32" else "f32"])
            return cast(self.value(other, depth), dtype)
        if kind == "sqrt":
            return op("sqrt", op("abs", x))
        if kind in ("neg", "abs", "tanh", "sigmoid"):
            return op(kind, x)
        if kind == "sign":
            return op("sign", self.leaf(dtype))
        if kind == "div":
            return op("div", x, op("add", op("abs", self.value(dtype, depth)), const(0.5, dtype)))
        return op(kind, x, self.value(dtype, depth))

    def integer(self, dtype: str, depth: int) -> Expr:
        kinds = "add sub mul and or xor not shl shr where div floordiv remainder fmod min max cast"
        kind = self.pick.choice(kinds.split())
        x, y = self.value(dtype, depth), self.value(dtype, depth)
        if kind == "not":
            return op("not", x)
        if kind == "where":
            return op("where", self.value("bool", depth), x, y)
        if kind == "cast":
            return cast(self.leaf(self.pick.choice(["f32", "bool", *INTEGERS])), dtype)
        if kind in ("div", "floordiv", "remainder", "fmod"):
            y = op("max", y, const(1, dtype))
        return op(kind, x, y)

    def logical(self, depth: int) -> Expr:
        kind = self.pick.choice("eq ne lt le gt ge and or xor not isnan cast".split())
        if kind in ("and", "or", "xor"):
            return op(kind, self.value("bool", depth), self.value("bool", depth))
        if kind == "not":
            return op(kind, self.value("bool", depth))
        dtype = self.pick.choice(["f32", "f64", "u8", "i64", "i8"])
        if kind == "cast":
            return cast(self.leaf(dtype), "bool")
        if kind == "isnan":
            return op(kind, self.leaf("f32"))
        return op(kind, self.leaf(dtype), self.leaf(dtype))

    def store(self, x: Expr) -> Store:
        """A store of every point that the value differs in."""
        row = self.pick.random() < 0.2 or self.varies_in_row(x)
        used = {a for a in range(len(self.axes)) if row or a not in self.reduced}
        dtype = self.pick.choice(["f32", "f32", "bf16", "f16"]) if x.dtype == "f32" else x.dtype
        strides, offset, count = self.layout(used)
        mask = None
        if row and self.pick.random() < 0.1:
            mask = op("lt", self.load("f32"), const(0.3, "f32"))
        return Store(Access(self.operand(count, dtype), dtype, strides, offset, None, mask), x)

    def varies_in_row(self, x: Expr) -> bool:
        found: dict[int, bool] = {}
        place = Access(0, "f32", (0,) * len(self.axes))
        for e in expressions(Nest((), (Store(place, x),))):
            inner = [found[id(a)] for a in e.args]
            if e.kind == "load":
                inner += [found[id(a)] for a in (e.data.extra, e.data.mask) if a is not None]
                inner += [e.data.strides[a] != 0 for a in self.reduced]
            inner += [e.data in self.reduced] if e.kind == "axis" else []
            found[id(e)] = any(inner) and e.kind != "reduce"
        return found[id(x)]


@pytest.mark.parametrize("seed", range(120))
def test_random_nest(seed: int) -> None:
    maker = Maker(seed)
    nest = maker.nest()
    pick = random.Random(seed)
    if pick.random() < 0.7:
        nest = simplify(nest)
    wordy = pick.choice([lambda n: False, lambda n: True, lambda n: n % 2 == 0])
    check(nest, maker.memory, TARGETS[seed % 3], pick.choice([1, 3]), wordy)
