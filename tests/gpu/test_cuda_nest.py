"""Loop nests as GPU kernels: their text on any machine, their values where there is a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from cuda_tools import HOPPER, OLDER, back, entry_of, made, on_gpu, on_machine, run
from nest_plain import compare
from nest_random import Maker
from torchair.codegen.cuda.driver import library
from torchair.codegen.cuda.jit import foreign, ptx
from torchair.codegen.loops import Access, Expr, Nest, Store, load, op, reduce, simplify

SEEDS = range(150)


def random_nest(seed: int) -> tuple[Maker, Nest, Callable[[int], bool]]:
    maker, pick = Maker(seed), random.Random(seed)
    nest = maker.nest()
    if pick.random() < 0.7:
        nest = simplify(nest)
    return maker, nest, pick.choice([lambda n: False, lambda n: True, lambda n: n % 2 == 0])


def softmax(rows: int, columns: int, dtype: str = "f32") -> Nest:
    x = load(Access(0, dtype, (columns, 1)))
    e = Expr("exp", "f32", (op("sub", x, reduce("max", x)),))
    stored = Access(1, dtype, (columns, 1))
    return Nest((rows, columns), (Store(stored, op("div", e, reduce("sum", e))),), frozenset({1}))


# ---- text ----


@pytest.mark.parametrize("part", range(5))
def test_any_nest_is_valid_text(part: int) -> None:
    entries = []
    for seed in SEEDS[part::5]:
        maker, nest, wordy = random_nest(seed)
        kernel, launch, _ = made(nest, len(maker.memory), OLDER if seed % 9 == 0 else HOPPER, wordy)
        assert launch.block <= 1024
        if not foreign([kernel]):
            entries.append(entry_of(kernel, launch))
    assert len(entries) > 20
    text = ptx(entries, HOPPER)
    assert all(f".entry {e.name}(" in text for e in entries)


def test_rows_stay_in_registers() -> None:
    kernel, launch, _ = made(softmax(64, 2048, "bf16"), 2, HOPPER)
    text = ptx([entry_of(kernel, launch)], HOPPER)
    assert (launch.block, launch.per_block, launch.units) == (256, 1, (64,))
    vectors = [line for line in text.splitlines() if "ld.global.v4" in line]
    assert len(vectors) == 1  # the row is read once, 16 bytes at a time
    assert "shfl.sync.bfly" in text and "bar.sync" in text and ".local" not in text


def test_short_rows_share_a_warp() -> None:
    kernel, launch, _ = made(softmax(1000, 24), 2, HOPPER)
    text = ptx([entry_of(kernel, launch)], HOPPER)
    assert launch.per_block * 8 == launch.block  # six vectors of four: eight threads for a row
    assert "bar.sync" not in text


# ---- values ----


def test_one_point_without_axes() -> None:
    stores = (
        Store(
            Access(1, "f32", ()),
            op("add", load(Access(0, "f32", ())), Expr("const", "f32", data=1.0)),
        ),
    )
    nest, memory = Nest((), stores), [np.full(1, 2.5, np.float32), np.zeros(1, np.float32)]
    assert on_machine(made(nest, 2, HOPPER), HOPPER, memory)[1] == 3.5


@pytest.mark.parametrize("part", range(2))
def test_random_nests_on_numpy(part: int) -> None:
    """Small ones, on a machine that is slow."""
    done = 0
    for seed in SEEDS[part::5]:
        maker, nest, wordy = random_nest(seed)
        kernel, launch, words = made(nest, len(maker.memory), HOPPER, wordy)
        if foreign([kernel]) or math.prod(nest.axes) > 2000:
            continue
        got = on_machine((kernel, launch, words), HOPPER, maker.memory)
        compare(nest, maker.memory, got)
        done += 1
    assert done > 5


@pytest.mark.cuda
def test_random_nests() -> None:
    cases = []
    for seed in [*SEEDS, *range(1000, 1150)]:
        maker, nest, wordy = random_nest(seed)
        kernel, launch, words = made(nest, len(maker.memory), library(0).machine, wordy)
        if not foreign([kernel]):
            cases.append((seed, maker, nest, kernel, launch, words))
    assert not library(0).add([entry_of(kernel, launch) for *_, kernel, launch, _ in cases])
    wrong = []
    for seed, maker, nest, kernel, launch, words in cases:
        tensors = on_gpu(maker.memory)
        run(kernel, launch, tensors, words)
        try:
            compare(nest, maker.memory, back(tensors, maker.memory))
        except AssertionError as e:
            wrong.append(f"seed {seed}: {str(e).strip().splitlines()[:6]}")
    assert not wrong, "\n".join(wrong)
