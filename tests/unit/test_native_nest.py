"""Kernels of loop nests against a plain evaluation of the same nest with numpy."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from nest_plain import (
    MACHINES,
    NUMPY,
    PLAIN,
    check,
    from_memory,
    library_of,
    narrowed,
    noise,
    run_nest,
    to_bf16,
)
from nest_random import Maker
from torchair.codegen.cpu.jit import host, module_text, run_kernel
from torchair.codegen.cpu.nest import print_nest
from torchair.codegen.loops import (
    Access,
    Expr,
    Nest,
    Store,
    axis,
    cast,
    const,
    load,
    op,
    reduce,
    simplify,
    size,
)
from torchair.codegen.pieces import pieces
from torchair.codegen.sizes import GuardSet, SizeArgument
from torchair.codegen.text.memory import masked_load
from torchair.codegen.text.point import emit_point
from torchair.codegen.text.writer import KernelWriter, Machine

each_target = pytest.mark.parametrize("machine", MACHINES, ids=lambda t: str(t.bits))
each_way = pytest.mark.parametrize("dynamic", [False, True], ids=["ints", "words"])
OLD = Machine("x86-64", "+sse2", 128, 16)
"""A processor without fused multiply-add, masks, gathers, or conversions of f16."""


def words(dynamic: bool) -> Callable[[int], bool]:
    return lambda n: dynamic


# ---- random nests ----


@pytest.mark.parametrize("seed", range(150))
def test_random_nest(seed: int) -> None:
    maker = Maker(seed)
    nest = maker.nest()
    pick = random.Random(seed)
    if pick.random() < 0.7:
        nest = simplify(nest)
    wordy = pick.choice([lambda n: False, lambda n: True, lambda n: n % 2 == 0])
    machine = OLD if seed % 10 == 9 else MACHINES[seed % 3]
    check(nest, maker.memory, machine, pick.choice([1, 3]), wordy)


# ---- well known kernels ----


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
    scale = op("rsqrt", op("add", variance, const(1e-5, "f32")))
    weight, bias = (load(Access(k, dtype, (0, 1))) for k in (1, 2))
    y = op("add", op("mul", op("mul", d, scale), weight), bias)
    stores = (Store(Access(3, dtype, (columns, 1)), y), Store(Access(4, "f32", (1, 0)), mean))
    memory = [noise(rows * columns, dtype), noise(columns, dtype, 1), noise(columns, dtype, 2)]
    memory += [noise(rows * columns, dtype, 3), noise(rows, "f32", 4)]
    return Nest((rows, columns), stores, frozenset({1})), memory


@each_target
@each_way
@pytest.mark.parametrize("shape", [(1, 64), (3, 17), (5, 200), (2, 1000), (4, 1), (0, 9), (3, 0)])
def test_layer_norm(machine: Machine, shape: tuple[int, int], dynamic: bool) -> None:
    nest, memory = layer_norm(*shape)
    check(nest, memory, machine, 1 if dynamic else 3, words(dynamic))


@each_way
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [40, 700, 9001])
def test_softmax(columns: int, dynamic: bool, dtype: str) -> None:
    nest, memory = softmax(3, columns, dtype)
    memory[0][:5] = to_bf16(np.float32(-np.inf)) if dtype == "bf16" else -np.inf
    check(nest, memory, host(), 1, words(dynamic))


def test_a_nest_prints_as_loops() -> None:
    nest, _ = layer_norm(3, 17)
    assert (
        str(nest)
        == """\
for a0 in range(3)
for a1 in range(17)  # reduced
    t0 = f32 word0[17 * a0 + a1]
    t1 = sum(t0)
    t2 = t1 / 17.0
    t3 = t0 - t2
    t4 = sum(t3 * t3)
    f32 word3[17 * a0 + a1] = ((t3 * rsqrt((t4 / 17.0) + 1e-05)) * f32 word1[a1]) + f32 word2[a1]
    f32 word4[a0] = t2"""
    )


def test_places_that_depend_on_data_print_as_they_are() -> None:
    here = load(Access(1, "i64", (1, 0)))
    inside = op("and", op("ge", here, const(0, "i64")), op("lt", here, size(9)))
    row = op("mul", here, size(6))
    x = load(Access(0, "bf16", (0, 1), SizeArgument(64), row, inside))
    y = op("where", inside, x, const(float("inf"), "f32"))
    nest = Nest((SizeArgument(65), 6), (Store(Access(2, "bf16", (6, 1)), cast(y, "f32")),))
    assert (
        str(nest)
        == """\
for a0 in range(n65)
for a1 in range(6)
    t0 = i64 word1[a0]
    t1 = (t0 >= 0) & (t0 < 9)
    bf16 word2[6 * a0 + a1] = where(t1, (bf16 word0[a1 + t0 * 6 + n64] if t1), inf)"""
    )


def test_printing_decides_nothing() -> None:
    guards = GuardSet()
    rows, columns = guards.variable(5), guards.variable(1)
    x = load(Access(0, "f32", (columns, 1)))
    text = str(Nest((rows, columns), (Store(Access(1, "f32", (columns, 1)), x),)))
    assert "range(s[0]=5)" in text
    assert guards.recipe()([7, 3]) is not None


def test_short_rows_have_no_loop() -> None:
    nest, _ = layer_norm(1, 64)
    assert "phi" not in print_nest(simplify(nest), narrowed(256)).text


@each_target
@each_way
def test_elementwise(machine: Machine, dynamic: bool) -> None:
    for n in (0, 1, 5, 16, 64, 100, 129, 1000, 5000):
        x, y, z = (load(Access(k, "f32", (1,))) for k in range(3))
        nest = Nest((n,), (Store(Access(3, "f32", (1,)), op("add", op("mul", x, y), z)),))
        memory = [noise(n, "f32", k) for k in range(4)]
        for threads in (1, 3):
            got = check(nest, memory, machine, threads, words(dynamic))
            assert np.array_equal(got[3], memory[0] * memory[1] + memory[2])  # not contracted


@each_target
@each_way
@pytest.mark.parametrize("shape", [(50, 70), (16, 16), (33, 5), (4, 200), (20, 17)])
def test_transposed(machine: Machine, dynamic: bool, shape: tuple[int, int]) -> None:
    rows, columns = shape
    for dtype in ("f32", "bf16", "u8", "i64"):
        turned, straight = load(Access(0, dtype, (1, rows))), load(Access(1, dtype, (columns, 1)))
        value = op("add", turned, straight)
        nest = Nest((rows, columns), (Store(Access(2, dtype, (columns, 1)), value),))
        memory = [noise(rows * columns, dtype, k) for k in range(3)]
        check(nest, memory, machine, 3, words(dynamic))


def test_vectors_lie_along_what_is_most() -> None:
    """Many small operands along one axis do not outvote a large one along the other."""
    rows, columns = 48, 1000
    value = load(Access(0, "f32", (columns, 1)))
    for k in range(1, 9):
        value = op("add", value, load(Access(k, "f32", (1, 0))))
    nest = Nest((rows, columns), (Store(Access(9, "f32", (columns, 1)), value),))
    assert simplify(nest).axes == (rows, columns)


def joined(rows: int, sizes: list[int], along: int) -> Nest:
    """Operands of so many columns each, side by side; `along` is the axis of the columns."""
    total, value, start = sum(sizes), const(7.0, "f32"), sum(sizes)
    here = axis(along)

    def strides(columns: int) -> tuple[int, int]:
        return (columns, 1) if along else (1, columns)

    for k, n in reversed(list(enumerate(sizes))):
        start = start - n
        inside = op("and", op("ge", here, size(start)), op("lt", here, size(start + n)))
        x = load(Access(k, "f32", strides(n), 0 - start, mask=inside))
        value = op("where", op("lt", here, size(start + n)), x, value)
    out = Store(Access(len(sizes), "f32", strides(total)), value)
    return Nest((rows, total) if along else (total, rows), (out,))


@pytest.mark.parametrize("rows, sizes", [(80, [32, 48, 16]), (2500, [1, 1])])
@pytest.mark.parametrize("along", [0, 1])
def test_joined_operands_are_walked_one_after_the_other(
    along: int, rows: int, sizes: list[int]
) -> None:
    nest = joined(rows, sizes, along)
    parts = pieces(nest)
    assert [p.axes[along] for p in parts] == sizes
    assert not any(w in str(p) for p in parts for w in ("where", "if", "a0 <", "a1 <"))
    memory = [noise(rows * n, "f32", k) for k, n in enumerate([*sizes, sum(sizes)])]
    got = [m.copy() for m in memory]
    for part in parts:
        run_nest(simplify(part), got, MACHINES[0], 3, words(False))
    expected = [m.reshape(rows, n) for m, n in zip(memory, sizes, strict=False)]
    assert np.array_equal(got[-1].reshape(rows, -1), np.concatenate(expected, 1))


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_of_a_row_are_filled_one_after_the_other(threads: int) -> None:
    """One walk over the rows does all parts, so that memory is written in order."""
    rows, sizes = 80, [32, 48, 160]
    nest, *more = [simplify(p) for p in pieces(joined(rows, sizes, 1))]
    kernel = print_nest(nest, MACHINES[0], "joined", more)
    assert len(more) == 2 and kernel.text.count("sdiv i64") + kernel.text.count("udiv i64") == 2
    memory = [noise(rows * n, "f32", k) for k, n in enumerate([*sizes, sum(sizes)])]
    run_kernel(library_of(MACHINES[0]), kernel, [m.ctypes.data for m in memory], threads)
    expected = [m.reshape(rows, n) for m, n in zip(memory, sizes, strict=False)]
    assert np.array_equal(memory[-1].reshape(rows, -1), np.concatenate(expected, 1))


@each_target
@each_way
def test_columns_by_number(machine: Machine, dynamic: bool) -> None:
    """Elements of a row that the data name are read without the instruction for that."""
    number = load(Access(1, "i64", (0, 1)))
    x = load(Access(0, "f32", (50, 0), 0, number))
    nest = Nest((6, 40), (Store(Access(2, "f32", (40, 1)), x),))
    memory = [noise(300, "f32"), np.arange(40)[::-1].copy(), noise(240, "f32", 1)]
    check(nest, memory, machine, 2, words(dynamic))
    assert "masked.gather" not in print_nest(Nest((6, 32), nest.stores), machine).text


def test_what_would_not_pay_stays_whole() -> None:
    for nest in (joined(8, [32, 48], 1), joined(5000, [3, 5], 1), joined(2000, [1] * 40, 0)):
        assert pieces(nest) == [nest]


@each_way
@pytest.mark.parametrize("shape", [(7, 300, 40), (2, 9, 100), (1, 65, 3), (3, 0, 20)])
def test_reduced_axes_around(shape: tuple[int, int, int], dynamic: bool) -> None:
    """Softmax along an axis that is not the last one in memory."""
    b, r, c = shape
    strides = (r * c, c, 1)
    x = load(Access(0, "f32", strides))
    e = op("exp", op("sub", x, reduce("max", x)))
    total = reduce("sum", e)
    stores = (
        Store(Access(1, "f32", strides), op("div", e, total)),
        Store(Access(2, "f32", (c, 0, 1)), total),
    )
    memory = [noise(b * r * c, "f32"), noise(b * r * c, "f32", 1), noise(b * c, "f32", 2)]
    for machine in MACHINES:
        check(Nest(shape, stores, frozenset({1})), memory, machine, 3, words(dynamic))


# ---- places ----


@each_target
def test_rows_by_number(machine: Machine) -> None:
    """An embedding: the rows are given by data; a number that is too small reads nothing."""
    number = load(Access(1, "i64", (1, 0)))
    row = op("mul", number, const(40, "i64"))
    there = op("ge", number, const(0, "i64"))
    x = load(Access(0, "f32", (0, 1), 0, row, there))
    nest = Nest((6, 40), (Store(Access(2, "f32", (40, 1)), x),))
    numbers = np.array([3, 0, -(1 << 40), 9, 9, 1])
    check(nest, [noise(400, "f32"), numbers, noise(240, "f32", 1)], machine)


@each_target
def test_scattered(machine: Machine) -> None:
    place = op("mul", load(Access(0, "i64", (1,))), const(2, "i64"))
    value = load(Access(1, "f32", (1,)))
    positive = op("gt", value, const(0.0, "f32"))
    nest = Nest((70,), (Store(Access(2, "f32", (0,), 1, place, positive), value),))
    order = np.random.default_rng(0).permutation(70)
    check(nest, [order, noise(70, "f32"), noise(150, "f32", 1)], machine, 3)


@each_target
@each_way
def test_positions(machine: Machine, dynamic: bool) -> None:
    """Quotients and remainders of positions, as a reshape that is not linear has them."""
    n = 1000
    flat = op("add", op("mul", axis(0), size(n)), axis(1))
    for divisor in (7, 8, 97):
        parts = [op(k, flat, size(divisor)) for k in ("floordiv", "remainder", "div", "fmod")]
        stores = tuple(Store(Access(k, "i64", (n, 1)), x) for k, x in enumerate(parts))
        memory = [noise(2 * n, "i64", k) for k in range(4)]
        check(Nest((2, n), stores), memory, machine, 1, lambda m: dynamic and m != 8)


@contextmanager
def fenced(count: int) -> Iterator[np.ndarray]:
    """Float32 elements of which the last is the last that may be touched."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    yield np.frombuffer(area, np.float32, count, page - 4 * count)
    assert libc.mprotect(ctypes.c_void_p(start + page), page, 3) == 0


@each_target
@each_way
def test_nothing_is_touched_behind_the_end(machine: Machine, dynamic: bool) -> None:
    for n in (3, 37, 201):
        for stride in (1, 2):
            with fenced((n - 1) * stride + 1) as x, fenced(n) as y:
                x[:] = noise(len(x), "f32")
                value = op("sub", load(Access(0, "f32", (stride,))), const(1.0, "f32"))
                nest = Nest((n,), (Store(Access(1, "f32", (1,)), value),))
                run_nest(nest, [x, y], machine, 1, words(dynamic))
                np.testing.assert_array_equal(y, x[::stride] - 1)


# ---- numbers ----

BOTH = ("add", "sub", "mul", "min", "max", "lt", "le", "gt", "ge")
DIVISIONS = ("remainder", "fmod", "floordiv")
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    2.5,
    1e-42,
    -3e-39,
    3e38,
    -3e38,
    np.inf,
    -np.inf,
    np.nan,
    7.0,
    -7.0,
]


def pairs(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.meshgrid(np.array(SPECIAL, dtype), np.array(SPECIAL, dtype))
    return np.ascontiguousarray(a.ravel()), np.ascontiguousarray(b.ravel())


def run_binary(kind: str, dtype: str, a: np.ndarray, b: np.ndarray, machine: Machine) -> np.ndarray:
    x, y = (load(Access(k, dtype, (1,))) for k in range(2))
    result = op(kind, x, y)
    out = np.zeros(len(a), bool if result.dtype == "bool" else a.dtype)
    nest = Nest((len(a),), (Store(Access(2, result.dtype, (1,)), result),))
    run_nest(nest, [a, b, out], machine)
    return out


def as_torch(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    functions = {
        "min": torch.minimum,
        "max": torch.maximum,
        "floordiv": torch.floor_divide,
        "div": partial(torch.div, rounding_mode="trunc" if a.dtype.kind in "iu" else None),
        "shl": torch.bitwise_left_shift,
        "shr": torch.bitwise_right_shift,
    }
    function = functions.get(kind) or getattr(torch, kind)
    return function(torch.from_numpy(a), torch.from_numpy(b)).numpy()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", [*BOTH, "div", "eq", "ne", *DIVISIONS])
def test_special_floats(kind: str, dtype: type) -> None:
    a, b = pairs(dtype)
    with np.errstate(all="ignore"):  # torch gives NaN for the remainder by a subnormal float32
        expected = (PLAIN[kind] if kind in DIVISIONS else partial(as_torch, kind))(a, b)
    for machine in (host(), OLD):
        name = "f32" if dtype is np.float32 else "f64"
        np.testing.assert_array_equal(run_binary(kind, name, a, b, machine), expected)


@pytest.mark.parametrize("dtype", ["u8", "i8", "i32", "i64"])
def test_special_integers(dtype: str) -> None:
    kind = NUMPY[dtype]
    limits = np.iinfo(kind)
    values = np.array([limits.min, limits.max, 0, 1, 2, 3, 7, 100] + [-1] * (limits.min < 0), kind)
    a, b = (np.ascontiguousarray(x.ravel()) for x in np.meshgrid(values, values))
    sound = (b != 0) & ~((a == limits.min) & (b.astype(np.int64) == -1))
    for kind_ in (*BOTH, "shl", "shr"):
        np.testing.assert_array_equal(run_binary(kind_, dtype, a, b, host()), as_torch(kind_, a, b))
    for kind_ in ("div", *DIVISIONS):
        got = run_binary(kind_, dtype, a, b, host())  # nor does it trap
        np.testing.assert_array_equal(got[sound], as_torch(kind_, a[sound], b[sound]))


@pytest.mark.parametrize("machine", [*MACHINES, OLD], ids=["512", "256", "128", "old"])
def test_short_floats(machine: Machine) -> None:
    """Every 16-bit float is read right, and float32 is rounded as torch rounds."""
    every = np.arange(1 << 16, dtype=np.uint16)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32)
    ties = (every.astype(np.uint32) << 16) | 0x8000
    near = np.concatenate([np.float16(every.view(np.float16)).astype(np.float32), ties.view("f4")])
    with np.errstate(all="ignore"):
        near = np.concatenate([near, np.nextafter(near, np.float32(0)), bits.view(np.float32)])
    for dtype, kind in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        out = np.zeros(len(every), np.float32)
        memory = every if dtype == "bf16" else every.view(np.float16)
        read = Store(Access(1, "f32", (1,)), load(Access(0, dtype, (1,))))
        run_nest(Nest((len(every),), (read,)), [memory, out], machine)
        np.testing.assert_array_equal(out, from_memory(memory, dtype))
        rounded = np.zeros(len(near), np.uint16)
        write = Store(Access(1, dtype, (1,)), load(Access(0, "f32", (1,))))
        run_nest(Nest((len(near),), (write,)), [near, rounded], machine)
        got = torch.from_numpy(rounded).view(kind)
        assert torch.equal(got.isnan(), torch.from_numpy(near).isnan())
        expected = torch.from_numpy(near).to(kind)
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@each_target
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("columns", [7, 40, 500])
def test_nan_wins(machine: Machine, kind: str, columns: int) -> None:
    x = noise(4 * columns, "f32").reshape(4, columns)
    x[1, columns // 2] = np.nan
    x[2] = np.inf
    x[3] = -np.inf
    value = reduce(kind, load(Access(0, "f32", (columns, 1))))
    nest = Nest((4, columns), (Store(Access(1, "f32", (1, 0)), value),), frozenset({1}))
    check(nest, [x.ravel(), noise(4, "f32", 1)], machine)
    flipped = Nest(
        (columns, 4),
        (Store(Access(1, "f32", (0, 1)), reduce(kind, load(Access(0, "f32", (1, columns))))),),
        frozenset({0}),
    )
    check(flipped, [x.ravel(), noise(4, "f32", 1)], machine)


LONG = {
    "row": ((1_000_000,), (1,), (0,), {0}),
    "columns": ((60_000, 20), (20, 1), (0, 1), {0}),
    "rows": ((900, 1000), (1003, 1), (0, 0), {0, 1}),
    "channels": ((700, 3, 500), (1500, 500, 1), (0, 1, 0), {0, 2}),
    "narrow channels": ((30_000, 3, 12), (36, 12, 1), (0, 1, 0), {0, 2}),
}
"""Nests with long sums: axes, strides of the operand and of the result, reduced axes."""


@each_way
@pytest.mark.parametrize("name", LONG)
def test_long_sums_are_exact(name: str, dynamic: bool) -> None:
    """A tenth, added up in one row, loses in the same direction all the time."""
    axes, strides, stored, reduced = LONG[name]
    x = np.full(axes[0] * strides[0], 0.1, np.float32)
    total = reduce("sum", load(Access(0, "f32", strides)))
    most = reduce("max", load(Access(0, "f32", strides)))  # carried beside the sum
    stores = (Store(Access(1, "f32", stored), total), Store(Access(2, "f32", stored), most))
    count = axes[1] if len(axes) > 1 and 1 not in reduced else 1
    got = [np.zeros(count, np.float32) for _ in range(2)]
    run_nest(Nest(axes, stores, frozenset(reduced)), [x, *got], host(), 2, words(dynamic))
    exact = float(np.float32(0.1)) * np.prod([axes[a] for a in reduced])
    np.testing.assert_allclose(got[0], exact, rtol=5e-6)
    np.testing.assert_array_equal(got[1], np.float32(0.1))


def test_conversions() -> None:
    x = np.array([-1.5, 300.0, 3e9, -0.0, 0.3, np.nan, 2.0], np.float32)
    loaded = load(Access(0, "f32", (1,)))
    kinds = {"i64": np.int64, "i32": np.int32, "u8": np.uint8, "bool": bool, "f64": np.float64}
    memory = [x, *(np.zeros(len(x), k) for k in kinds.values())]
    stores = [Store(Access(k, d, (1,)), cast(loaded, d)) for k, d in enumerate(kinds, 1)]
    run_nest(Nest((len(x),), tuple(stores)), memory, host())
    for got, dtype in zip(memory[1:], kinds, strict=True):
        rows = [0, 1, 3, 4, 6] if dtype in ("i64", "i32", "u8") else range(len(x))
        kind = {"i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool}
        expected = torch.from_numpy(x).to(kind.get(dtype, torch.float64)).numpy()
        np.testing.assert_array_equal(got[rows], expected[rows])


# ---- epilogues ----


@each_target
@pytest.mark.parametrize("columns", [64, 50])
def test_point(machine: Machine, columns: int) -> None:
    """A generator hands vectors in; bias, residual and activation are done at the point."""
    rows = 5
    w = KernelWriter(machine)
    given = Expr("given", "f32", data=0)
    bias, row, rest = (
        load(Access(1, "f32", (0, 1))),
        load(Access(2, "f32", (1, 0))),
        load(Access(3, "f32", (columns, 1))),
    )
    value = op("max", op("add", op("mul", op("add", given, bias), row), rest), const(0.0, "f32"))
    stores = (
        Store(Access(4, "bf16", (1, rows)), value),
        Store(Access(5, "f32", (columns, 1)), given),
    )
    with w.loop("0", str(rows)) as r, w.loop("0", str(columns), machine.lanes) as c:
        left = w.splat("i64", w.sub(str(columns), c.index))
        lanes = ", ".join(f"i64 {k}" for k in range(machine.lanes))
        mask = w(f"icmp slt {w.vector('i64')} <{lanes}>, {left}")
        place = w.offset(w.pointer(0), "float", w.add(w.mul(r.index, str(columns)), c.index))
        x = masked_load(w, "float", place, mask, machine.lanes, 4)
        emit_point(w, stores, [r.index, c.index], 1, [x], mask)
    memory = [noise(rows * columns, "f32"), noise(columns, "f32", 1), noise(rows, "f32", 2)]
    memory += [noise(rows * columns, "f32", 3), noise(rows * columns, "bf16", 4)]
    memory += [noise(rows * columns, "f32", 5)]
    run_kernel(library_of(machine), w.kernel("point"), [m.ctypes.data for m in memory])
    a, d = memory[0].reshape(rows, columns), memory[3].reshape(rows, columns)
    expected = np.maximum((a + memory[1]) * memory[2][:, None] + d, 0)
    np.testing.assert_array_equal(memory[4].reshape(columns, rows).T, to_bf16(expected))
    np.testing.assert_array_equal(memory[5], memory[0])


def test_other_processors_get_valid_code() -> None:
    arm = dataclasses.replace(narrowed(128), arch="aarch64", fma=True)
    nests = [softmax(3, 50, "f16")[0], layer_norm(2, 700, "bf16")[0], Maker(3).nest()]
    for kernel in (print_nest(n, arm) for n in nests):
        assert "x86" not in kernel.text
        llvm.parse_assembly(module_text([kernel], arm)).verify()
