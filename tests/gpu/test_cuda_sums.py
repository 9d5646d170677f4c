"""Reductions that threads and blocks share: their text, their values on the machine in numpy, and
on a GPU where there is one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from cuda_tools import HOPPER, OLDER, back, entry_of, made, on_gpu, on_machine, run
from nest_plain import as_words, compare, noise
from nest_random import Maker
from torchair.codegen.cuda import cuts, driver
from torchair.codegen.cuda.cuts import Cut, cut_of
from torchair.codegen.cuda.driver import DriverError, library
from torchair.codegen.cuda.jit import SHARED, Gpu, describe, foreign, ptx
from torchair.codegen.cuda.nest import NestShape, print_nest
from torchair.codegen.cuda.run import SharedLaunches, keeping_scratch
from torchair.codegen.loops import Access, Expr, Nest, Store, cast, load, op, reduce, simplify

FEW = describe((9, 0), 3)
"""A GPU with three multiprocessors."""


def never(n: int) -> bool:
    return False


def always(n: int) -> bool:
    return True


def sums_of(
    rows: int, columns: int, dim: int | None, dtype: str = "f32", shift: int = 0
) -> tuple[Nest, list[np.ndarray]]:
    """The sum and the largest square of a matrix along a dim, and half of it beside them."""
    x = load(Access(0, dtype, (columns, 1), shift))
    along = {0: (0, 1), 1: (1, 0), None: (0, 0)}[dim]
    total = op("mul", reduce("sum", x), load(Access(4, "f32", along)))
    stores = (
        Store(Access(1, "f32", along), total),
        Store(Access(2, "f32", along), reduce("max", op("mul", x, x))),
        Store(Access(3, dtype, (columns, 1)), op("add", x, x)),
    )
    reduced = frozenset({0, 1} if dim is None else {dim})
    points = {0: columns, 1: rows, None: 1}[dim]
    memory = [
        noise(rows * columns + shift, dtype),
        noise(points, "f32"),
        noise(points, "f32"),
        noise(rows * columns, dtype),
        noise(points, "f32", 4),
    ]
    return simplify(Nest((rows, columns), stores, reduced)), memory


def statistics(n: int, c: int, size: int, dtype: str) -> tuple[Nest, list[np.ndarray]]:
    """Mean and mean square of the channels of images."""
    x = load(Access(0, dtype, (c * size, size, 1)))
    mean, square = (
        op("div", reduce("sum", y), Expr("const", "f32", data=float(n * size)))
        for y in (x, op("mul", x, x))
    )
    stores = tuple(Store(Access(k, "f32", (0, 1, 0)), y) for k, y in ((1, mean), (2, square)))
    nest = Nest((n, c, size), stores, frozenset({0, 2}))
    return simplify(nest), [noise(n * c * size, dtype), noise(c, "f32"), noise(c, "f32")]


def softmax(rows: int, columns: int) -> tuple[Nest, list[np.ndarray]]:
    """Over the rows."""
    count = rows * columns
    return softmax_nest(rows, columns), [noise(count, "f32"), noise(count, "f32")]


def softmax_nest(rows: int, columns: int) -> Nest:
    """The same without operands."""
    x = load(Access(0, "f32", (columns, 1)))
    e = Expr("exp", "f32", (op("sub", x, reduce("max", x)),))
    stored = Store(Access(1, "f32", (columns, 1)), op("div", e, reduce("sum", e)))
    return Nest((rows, columns), (stored,), frozenset({0}))


def normalised(rows: int, columns: int, dim: int | None) -> tuple[Nest, list[np.ndarray]]:
    """What has mean 0 along a dim, and an average of means that is updated in place."""
    along = {0: (0, 1), 1: (1, 0), None: (0, 0)}[dim]
    x = load(Access(0, "f32", (columns, 1)))
    count = Expr("const", "f32", data=float({0: rows, 1: columns, None: rows * columns}[dim]))
    mean = op("div", reduce("sum", x), count)
    apart = op("sub", x, mean)
    spread = op("div", reduce("sum", op("mul", apart, apart)), count)
    half = Expr("const", "f32", data=0.5)
    before = load(Access(2, "f32", along))
    stores = (
        Store(Access(1, "f32", (columns, 1)), op("div", apart, op("add", spread, half))),
        Store(Access(2, "f32", along), op("add", op("mul", before, half), mean)),
        Store(Access(3, "f32", along), spread),
    )
    points = {0: columns, 1: rows, None: 1}[dim]
    sizes = rows * columns, rows * columns, points, points
    memory = [noise(n, "f32", k) for k, n in enumerate(sizes)]
    reduced = frozenset({0, 1} if dim is None else {dim})
    return simplify(Nest((rows, columns), stores, reduced)), memory


def cut(nest: Nest, gpu: Gpu, shares: bool = True) -> Cut:
    printed, _ = as_words(nest, 9, never)
    found = cut_of(printed, gpu, shares=shares)
    assert found is not None
    return found


# ---- how they are shared ----


def test_rows_are_split_among_all_multiprocessors() -> None:
    nest, _ = sums_of(2048, 768, 0)
    found = cut(nest, HOPPER)
    assert (found.kind, found.across, found.splits) == ("columns", 8, 8)
    _, launch, _ = made(nest, 5, HOPPER)
    assert HOPPER.multiprocessors < launch.blocks(lambda word: 0) == 24 * 8
    whole, _ = sums_of(100_000, 100, None)
    splits = cut(whole, HOPPER).splits
    assert splits is not None
    assert 1.5 * HOPPER.multiprocessors < splits <= cuts.BLOCKS * HOPPER.multiprocessors
    stats, _ = statistics(32, 64, 3136, "bf16")
    assert cut(stats, HOPPER).kind == "rows" and cut(stats, HOPPER).splits == 4


def test_blocks_that_wait_for_each_other_are_all_resident() -> None:
    nest = softmax_nest(4096, 4096)
    assert cut(nest, HOPPER).waits
    kernel, launch, _ = made(nest, 2, HOPPER)
    assert launch.together and launch.resident == cuts.TOGETHER and not launch.early
    blocks = launch.blocks(lambda word: 0)
    assert HOPPER.multiprocessors < blocks <= launch.resident * HOPPER.multiprocessors
    text = ptx([entry_of(kernel, launch)], HOPPER)
    assert ".minnctapersm 2" in text and text.count("ld.acquire.gpu.u32") == 4  # in two versions
    assert not made(softmax_nest(4096, 64 * 4096), 2, HOPPER)[1].together


def shared_memory(nest: Nest, threads: int, gpu: Gpu = HOPPER) -> int:
    """Bytes of a block of so many threads."""
    kernel, launch = print_nest(nest, gpu, shape=NestShape(0, threads), scratch=9)
    text = ptx([entry_of(kernel, launch)], gpu)
    return sum(map(int, re.findall(r"\.shared .*?\.b8 [\w.$]+\[(\d+)\]", text)))


@pytest.mark.parametrize("threads", [0, 512, 1024])
@pytest.mark.parametrize("dtype", ["i8", "i16", "f32", "f64"])
def test_shared_memory_has_room_for_all_reductions(dtype: Any, threads: int) -> None:
    """Sums in 64 bits of as many columns as a thread can have, and another reduction."""
    x = load(Access(0, dtype, (512, 1)))
    wide: Any = "i64" if dtype[0] == "i" else dtype
    stores = (
        Store(Access(1, wide, (0, 1)), reduce("sum", x if wide == dtype else cast(x, wide))),
        Store(Access(2, dtype, (0, 1)), reduce("max", x)),
    )
    nest = simplify(Nest((4096, 512), stores, frozenset({0})))
    assert 0 < shared_memory(nest, threads) <= SHARED


def test_blocks_that_wait_have_room_whatever_is_asked_for() -> None:
    for threads in (64, 1024):
        nest = softmax_nest(4096, 4096)
        kernel, launch = print_nest(nest, OLDER, shape=NestShape(0, threads), scratch=2)
        assert launch.together and launch.resident * launch.block <= OLDER.threads
        assert entry_of(kernel, launch).together


@pytest.mark.parametrize(("fit", "enough"), [(2, True), (1, False)])
def test_blocks_that_wait_and_do_not_fit_are_an_error_when_they_are_compiled(
    monkeypatch: pytest.MonkeyPatch, fit: int, enough: bool
) -> None:
    """The driver would refuse the launch."""

    class Driver:
        def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, found: Any, *given: Any) -> int:
            found._obj.value = fit
            return 0

    monkeypatch.setattr(driver, "_driver", Driver)
    kernel, launch, _ = made(softmax_nest(4096, 4096), 2, HOPPER)
    with nullcontext() if enough else pytest.raises(DriverError, match="1 of 2 blocks"):
        driver.check_room(ctypes.c_void_p(1), entry_of(kernel, launch))


def test_what_is_shared_is_loaded_in_vectors_and_read_once() -> None:
    x = load(Access(0, "bf16", (768, 1)))
    stores = tuple(
        Store(Access(k, "f32", (0, 1)), reduce("sum", y)) for k, y in ((1, x), (2, op("mul", x, x)))
    )
    kernel, launch, _ = made(Nest((2048, 768), stores, frozenset({0})), 3, HOPPER)
    text = ptx([entry_of(kernel, launch)], HOPPER)
    vectors = [line for line in text.splitlines() if "ld.global.v4" in line]
    # a round of the loop has two rows, and one in the rest; the others are partial results
    assert len(vectors) <= 12 and ".local" not in text
    assert text.count("atom.add.acq_rel.gpu.u32") == 2  # one in either version


@pytest.mark.parametrize("gpu", [describe(c, 80) for c in ((7, 0), (8, 0), (9, 0), (12, 0))])
def test_every_chip_takes_shared_sums(gpu: Gpu) -> None:
    for nest, memory in (
        sums_of(2048, 768, 0),
        sums_of(1, 1 << 20, 1),
        statistics(8, 3, 900, "f16"),
    ):
        for wordy in (never, always):
            kernel, launch, _ = made(nest, len(memory), gpu, wordy)
            assert not foreign([kernel])
            assert f".target {gpu.name}" in ptx([entry_of(kernel, launch)], gpu)


def test_no_bit_depends_on_the_number_of_columns() -> None:
    for columns in (1, 7, 768, 20_000):
        nest, _ = sums_of(2048, columns, 0)
        found = cut_of(nest, HOPPER, shares=False)
        if columns > 1:
            assert found is not None and (found.across, found.splits) == (8, 1)


def test_few_points_need_nobody_else() -> None:
    nest, _ = sums_of(16, 768, 0)
    assert cut_of(nest, HOPPER) is None
    nest, _ = sums_of(4096, 1000, 1)
    assert cut_of(nest, HOPPER) is None


class Room(SharedLaunches):
    """Scratch memory of launches, on the host."""

    def __init__(self) -> None:
        self._cleared, self._user = torch.zeros(64), lambda: None

    def _zeros(self, index: int) -> torch.Tensor:
        return torch.zeros(64)


def test_recordings_share_no_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two that run at once would count each other."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    room = Room()
    with keeping_scratch():
        first, second = room.scratch(0), room.scratch(0)
        cleared = first.data_ptr()
        assert second.data_ptr() != cleared == room._cleared.data_ptr()
        del first
        assert room.scratch(0).data_ptr() == cleared  # of a recording that is no more
    # who else records, as a user may, drops its program at once, but not the recording
    assert room.scratch(0).data_ptr() != cleared
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with keeping_scratch():
        assert room.scratch(0).data_ptr() != cleared


# ---- values ----


CASES: list[tuple[Callable[..., tuple[Nest, list[np.ndarray]]], tuple[object, ...]]] = [
    (sums_of, (600, 40, 0)),
    (sums_of, (600, 40, 0, "bf16")),
    (sums_of, (300, 7, 0, "bf16")),
    (sums_of, (513, 33, 0, "f32", 1)),
    (sums_of, (2, 9000, 1)),
    (sums_of, (3, 8200, 1, "bf16", 3)),
    (sums_of, (97, 101, None)),
    (sums_of, (97, 101, None, "f16")),
    (statistics, (40, 3, 49, "f32")),
    (statistics, (12, 2, 784, "bf16")),
    (statistics, (3, 2, 5000, "f32")),
    (softmax, (70, 36)),
    (softmax, (600, 20)),
    (normalised, (700, 12, 0)),
    (normalised, (200, 45, None)),
    (normalised, (2, 9000, 1)),
]


@pytest.mark.parametrize("order", ("together", "down"))
@pytest.mark.parametrize(
    ("make", "sizes"), CASES, ids=[f"{make.__name__}-{sizes}" for make, sizes in CASES]
)
def test_values_on_numpy(make: Callable[..., object], sizes: Sequence[object], order: str) -> None:
    nest, memory = make(*sizes)  # type: ignore[misc]
    for wordy in (never, always):
        found = made(nest, len(memory), FEW, wordy)
        compare(nest, memory, on_machine(found, FEW, memory, order))  # type: ignore[arg-type]


@pytest.fixture
def eager_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest reductions are shared."""
    for name, value in (("SHORT", 2), ("LONG", 8), ("ROUNDS", 1), ("ALONE", 1 << 30)):
        monkeypatch.setattr(cuts, name, value)


def random_cases(seeds: range, gpu: Gpu) -> list[tuple[int, Maker, Nest, Callable[[int], bool]]]:
    """Random nests that are shared."""
    found = []
    for seed in seeds:
        maker = Maker(seed)
        nest = simplify(maker.nest())
        wordy = (never, always, lambda n: n % 2 == 0)[seed % 3]
        printed, _ = as_words(nest, len(maker.memory), wordy)
        if nest.axes and cut_of(printed, gpu) is not None:
            found.append((seed, maker, nest, wordy))
    return found


@pytest.mark.usefixtures("eager_to_share")
def test_random_nests_on_numpy() -> None:
    done = 0
    for _, maker, nest, wordy in random_cases(range(60), FEW):
        found = made(nest, len(maker.memory), FEW, wordy)
        if foreign([found[0]]) or np.prod(nest.axes) > 2000:
            continue
        compare(nest, maker.memory, on_machine(found, FEW, maker.memory))
        done += 1
    assert done > 5


@pytest.mark.cuda
@pytest.mark.usefixtures("eager_to_share")
def test_random_nests() -> None:
    gpu, wrong = library(0).machine, []
    cases = [
        (case, made(case[2], len(case[1].memory), gpu, case[3]))
        for case in random_cases(range(400), gpu)
    ]
    cases = [(case, found) for case, found in cases if not foreign([found[0]])]
    assert not library(0).add([entry_of(kernel, launch) for _, (kernel, launch, _) in cases])
    for (seed, maker, nest, _), (kernel, launch, words) in cases:
        tensors = on_gpu(maker.memory)
        run(kernel, launch, tensors, words)
        try:
            compare(nest, maker.memory, back(tensors, maker.memory))
        except AssertionError as e:
            wrong.append(f"seed {seed}: {str(e).strip().splitlines()[:6]}")
    assert not wrong, "\n".join(wrong)


SHAPES = [(2048, 768), (1, 10**6), (10**6, 1), (10**5, 10), (1000, 1001), (12345, 67), (5, 54321)]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=str)
def test_sums_are_as_good_as_in_float64(rows: int, columns: int, dtype: str) -> None:
    """Twice in a row, by what a launch leaves in scratch memory, and with the same bits."""
    torch.manual_seed(0)
    x = (torch.randn(rows, columns, device="cuda") + 0.1).to(TYPES[dtype])
    for dim in (0, 1, None):
        dims = (0, 1) if dim is None else dim
        stored = Access(1, "f32", {0: (0, 1), 1: (1, 0), None: (0, 0)}[dim])
        reduced = frozenset({0, 1} if dim is None else {dim})
        value = reduce("sum", load(Access(0, dtype, (columns, 1))))
        nest = simplify(Nest((rows, columns), (Store(stored, value),), reduced))
        results = []
        for wordy in (never, never, always):
            kernel, launch, words = made(nest, 2, library(0).machine, wordy)
            out = torch.full(((rows, columns, 1)[1 - dim if dim is not None else 2],), 7.0).cuda()
            run(kernel, launch, [x, out], words)
            results.append(out)
        right = x.double().sum(dims).reshape(-1)
        scale = x.double().abs().sum(dims).reshape(-1)
        for out in results:
            assert ((out.double() - right).abs() <= 3e-6 * scale + 1e-30).all()
        assert torch.equal(results[0], results[1])


def test_older_chips_combine_as_well() -> None:
    nest, memory = sums_of(600, 40, 0, "bf16")
    compare(nest, memory, on_machine(made(nest, len(memory), OLDER), OLDER, memory))


def test_without_scratch_memory_no_block_waits() -> None:
    nest, _ = sums_of(2048, 768, 0)
    printed, _ = as_words(nest, 5, never)
    kernel, launch = print_nest(printed, HOPPER)
    assert launch.scratch == 0 and "atom." not in ptx([entry_of(kernel, launch)], HOPPER)
