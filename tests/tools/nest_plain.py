"""A plain evaluation of loop nests with numpy, and a comparison of kernels with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchair.codegen.cpu.jit import Library, host, run_kernel
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import Access, Expr, Nest, Store, expressions, with_words
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.text.writer import Machine

NUMPY: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16": np.float16, "bool": np.bool_,
    "u8": np.uint8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip
INTEGERS = ("u8", "i8", "i16", "i32", "i64")


def narrowed(bits: int) -> Machine:
    """This machine with narrower vectors."""
    if bits >= host().bits:
        return host()
    return dataclasses.replace(host(), bits=bits, registers=16, dot_bf16=False)


MACHINES = [narrowed(bits) for bits in (512, 256, 128)]


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
    "sum": np.sum,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "any": np.any,
    "all": np.all,
}


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
        return SizeArgument(operands + words.setdefault(n, len(words)))

    return with_words(nest, word), list(words)  # type: ignore[arg-type]


def run_nest(
    nest: Nest,
    memory: list[np.ndarray],
    machine: Machine,
    threads: int = 1,
    wordy: Callable[[int], bool] = lambda n: False,
) -> None:
    printed, words = as_words(nest, len(memory), wordy)
    kernel = print_nest(printed, machine)
    run_kernel(library_of(machine), kernel, [*(m.ctypes.data for m in memory), *words], threads)


LIBRARIES: dict[Machine, Library] = {}


def library_of(machine: Machine) -> Library:
    return LIBRARIES.setdefault(machine, Library(machine))


def check(
    nest: Nest,
    memory: list[np.ndarray],
    machine: Machine,
    threads: int = 1,
    wordy: Callable[[int], bool] = lambda n: False,
    tolerance: float = 2e-5,
) -> list[np.ndarray]:
    """Run a nest both ways; everything in memory must agree. Returns the memory."""
    got = [m.copy() for m in memory]
    run_nest(nest, got, machine, threads, wordy)
    compare(nest, memory, got, tolerance)
    return got


def compare(
    nest: Nest, memory: list[np.ndarray], got: list[np.ndarray], tolerance: float = 2e-5
) -> None:
    """What a kernel left in memory against the plain evaluation."""
    expected = [m.copy() for m in memory]
    Plain(nest, expected).run()
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


def noise(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        return rng.integers(0 if dtype == "u8" else -50, 51, count).astype(NUMPY[dtype])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    return into_memory(rng.standard_normal(count).astype(np.float64), dtype)
