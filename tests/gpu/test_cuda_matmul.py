"""Products of many rows on the tensor cores: their text, values on the machine of numpy and on a
GPU, and when they are chosen."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch

from compiling import compiled
from cuda_tools import HOPPER, OLDER, entry_of
from cuda_works import on_gpu, on_numpy
from matmul_cases import LARGE_MATMULS, ONE, SMALL_MATMULS, SPLIT, TURNS, TWO, MatmulCase
from ptx_machine import Order
from torchair.codegen.cuda.driver import library
from torchair.codegen.cuda.hopper import WARPGROUP
from torchair.codegen.cuda.jit import Entry, describe, foreign, ptx
from torchair.codegen.cuda.matmul import declines, default_form, forms, matmul
from torchair.codegen.cuda.matmul.cluster import FREE, READ, SENT, Cluster
from torchair.codegen.cuda.matmul.forms import (
    LARGE,
    MatmulForm,
    Sizes,
    candidates,
    clusters,
    filled,
    wins,
)
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.requests import Product
from torchair.codegen.target import Anchor, Declined

FORMS = (LARGE, MatmulForm(128, blocks=2), MatmulForm(128, stages=6), MatmulForm(256, group=16))
BARRIERS_OF_CLUSTERS = {SENT: "sent", FREE: "free", READ: "read"}

# ---- text ----


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_llvm_takes_all_forms(form: Any) -> None:
    kernel, launch = MatmulCase(1024, 1024, 1024, form, "gelu").generate(HOPPER)
    assert not foreign([kernel]) and form.is_sound()
    text = ptx([entry_of(kernel, launch)], HOPPER)
    assert ".target sm_90a" in text and f".maxntid {form.threads}" in text
    assert text.count("wgmma.mma_async") == 4 * form.blocks
    assert text.count("st.global.v4.b32") == form.sums // 8


@pytest.mark.parametrize("case", LARGE_MATMULS, ids=str)
def test_large_cases_are_served(case: MatmulCase) -> None:
    """Those that run on a GPU only."""
    kernel, launch = case.generate(HOPPER)
    assert "wgmma.mma_async" in ptx([entry_of(kernel, launch)], HOPPER)


def test_the_copy_engine_reads_parameters() -> None:
    kernel, launch = MatmulCase(128, 128, 128, TWO).generate(HOPPER)
    text = ptx([entry_of(kernel, launch)], HOPPER)
    assert text.count(".param .align 64 .b8") == 2
    assert "cvta.param" in text


def test_other_kernels_are_for_any_chip_after_theirs() -> None:
    kernel, launch = MatmulCase(128, 128, 128, TWO).generate(HOPPER)
    plain = dataclasses.replace(kernel, tensors=())
    assert entry_of(kernel, launch).needs_own_chip
    assert not Entry((plain,), launch.block).needs_own_chip


def test_kernels_differ_by_what_the_copy_engine_is_told() -> None:
    made = [MatmulCase(64, 64, 64, ONE, padded=p).generate(HOPPER)[0] for p in (0, 8)]
    assert made[0].entry != made[1].entry


# ---- what is served ----


def asked(case: MatmulCase, **changes: Any) -> Product:
    request = case.product()
    return Product(dataclasses.replace(request.matmul, **changes), request.epilogue)


@pytest.mark.parametrize(
    "changes",
    [{"a": (0, 60, 1)}, {"b": (0, 1, 60)}, {"a": (0, 128, 2)}, {"dtype": "f32"}, {"k": 0}],
    ids=str,
)
def test_what_the_copy_engine_cannot_read_is_declined(changes: dict[str, Any]) -> None:
    with pytest.raises(Declined):
        matmul(asked(MatmulCase(128, 128, 64, TWO), **changes), HOPPER)
    assert not forms(asked(MatmulCase(128, 128, 64, TWO), **changes), HOPPER)


def test_tiles_across_the_sum_are_whole_lines() -> None:
    """The copy engine brings 64 columns of them at a time; the block waits for the bytes of all."""
    sizes, odd = (64, 6144, 4096), MatmulForm(80, 1, 1, 2)
    forms_of = {t: forms(MatmulCase(*sizes, ONE, turned=t).product(), HOPPER) for t in ("", "b")}
    assert any(form.columns % 64 for form in forms_of[""])
    assert not any(form.columns % 64 for form in forms_of["b"]) and len(forms_of["b"]) > 1
    with pytest.raises(Declined, match="80 columns"):
        MatmulCase(64, 80, 64, odd, turned="b").generate(HOPPER)


def product(*sizes: int | None, **changes: Any) -> Anchor:
    rows = sizes[1] if sizes[0] == 1 else None
    return Anchor("matmul", "bf16", rows=rows, along=True, sizes=sizes, **changes)


@pytest.mark.parametrize("chip", [(7, 0), (8, 0), (10, 0), (12, 0)])
def test_other_chips_leave_products_of_many_rows_to_the_library(chip: tuple[int, int]) -> None:
    large = product(1, 4096, 4096, 4096)
    assert CudaTarget(0, HOPPER).declines(large) is None
    assert CudaTarget(0, describe(chip, 132)).declines(large)
    assert CudaTarget(0, OLDER).declines(large)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, None, 4096, 4096), (1, 4096, 4096, 0), (1, 4096, 4096, 4100), (None, 1, 1, 1),
        (1, 128, 128, 128), (1, 4096, 4099, 4096),
    ],
)  # fmt: skip
def test_products_that_the_library_is_better_at_are_its(sizes: tuple[int | None, ...]) -> None:
    assert CudaTarget(0, HOPPER).declines(product(*sizes))
    assert declines(product(*sizes), HOPPER)


def test_a_tuner_may_choose_among_forms() -> None:
    request = MatmulCase(4096, 4096, 4096, TWO).product()
    found = CudaTarget(0, HOPPER).choices(request)
    assert found["form"][0] == str(LARGE)
    assert 1 < len(found["form"]) == len(set(found["form"]))
    made = CudaTarget(0, HOPPER).generate(request, "product")
    assert made.launch is not None and made.launch.most_blocks == HOPPER.multiprocessors


SHAPES = [
    (1, 4096, 4096, 4096), (1, 1024, 1024, 1024), (1, 16, 14336, 4096), (1, 64, 4096, 14336),
    (8, 300, 520, 264), (1, 16384, 2048, 2048), (1, 1, 8, 8), (64, 128, 128, 64),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_forms_that_are_tried_have_room_and_fit_the_product(sizes: Any) -> None:
    found = candidates(Sizes(*sizes), 132)
    assert found and all(form.is_sound() for form in found)
    (_, m, n, _), first = sizes, found[0]
    assert first.rows < 2 * max(m, 64) and first.columns < 2 * max(n, 64)
    make = MatmulCase(*sizes[1:], first, batch=sizes[0]).generate
    assert "wgmma.mma_async" in ptx([entry_of(*make(HOPPER))], HOPPER)


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_warpgroups_hand_each_other_registers_that_there_are(warpgroups: int) -> None:
    form = MatmulForm(128, warpgroups)
    assert (warpgroups + 1) * form.begun * WARPGROUP <= 1 << 16 and form.begun % 8 == 0
    kernel, launch = MatmulCase(256, 256, 256, form).generate(HOPPER)
    text = ptx([entry_of(kernel, launch)], HOPPER)
    found = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", text)]
    if not found:  # nobody needs more than all have
        assert form.begun >= 240
        return
    fewer, more = sorted(found)
    assert fewer <= form.begun <= more and not fewer % 8 and not more % 8
    assert fewer + warpgroups * more <= (warpgroups + 1) * form.begun


def test_stages_have_room_for_the_rows_that_there_are() -> None:
    few, all_ = MatmulForm(64, 1, few=16), MatmulForm(64, 1)
    assert few.stage < all_.stage and few.is_sound()
    assert not MatmulForm(8, 1, few=16).is_sound()  # tensor cores would read behind stages
    MatmulCase(16, 64, 64, few).generate(HOPPER)
    for case in (
        MatmulCase(17, 64, 64, few),
        MatmulCase(16, 64, 64, few, counted=True),
        MatmulCase(16, 64, 64, few, turned="a"),
    ):
        with pytest.raises(Declined, match="room for 16"):
            case.generate(HOPPER)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_default_form_is_served(sizes: Any, turned: str) -> None:
    case = MatmulCase(*sizes[1:], LARGE, batch=sizes[0], turned=turned)
    if turned and any(n % 8 for n in sizes[1:]):
        return
    found = forms(case.product(), HOPPER)
    assert found and found[0] == default_form(case.product(), HOPPER)
    assert (found[0] == LARGE) == (filled(Sizes(*sizes), 132) >= 0.7)
    made = matmul(case.product(), HOPPER)[1]
    assert made.block == found[0].threads and made.cluster == found[0].split


def test_clusters_stay_among_neighbours() -> None:
    assert [clusters(132, n) for n in (1, 2, 4, 8)] == [132, 66, 32, 16]
    made = MatmulCase(64, 8192, 256, SPLIT).generate(HOPPER)[1]
    assert made.blocks(lambda word: 0) == 132


def test_few_tiles_are_split_among_multiprocessors() -> None:
    few, many = (candidates(Sizes(1, n, n, 4096), 132)[0] for n in (512, 8192))
    assert few.split > 1 and many.split == 1
    assert few.rows * few.columns < many.rows * many.columns


def test_products_larger_than_measured_are_left_to_the_library() -> None:
    assert wins(1, 4096, 4096, 4096, 132) and not wins(1, 8192, 8192, 8192, 132)


def test_few_rows_of_a_layer_are_ours() -> None:
    layer = product(1, 16, 4096, 14336)
    assert CudaTarget(0, HOPPER).declines(layer) is None
    for other in (
        dataclasses.replace(layer, along=False),
        product(1, 16, 1024, 1024),
        product(2, 16, 4096, 14336),
        product(1, 256, 65536, 4096),
    ):
        assert CudaTarget(0, HOPPER).declines(other), other


# ---- values ----


@pytest.mark.parametrize("case", SMALL_MATMULS, ids=str)
def test_products_on_numpy(case: MatmulCase) -> None:
    work = case.work(HOPPER)
    on_numpy(work, blocks=2 * work.launch.cluster)


@pytest.mark.parametrize("turned", ["", "a", "b", "ab"])
@pytest.mark.parametrize("sizes", [(16, 136, 520), (104, 200, 328)], ids=str)
def test_forms_for_few_tiles_on_numpy(sizes: tuple[int, int, int], turned: str) -> None:
    """Those that are chosen for multiprocessors that are many."""
    case = MatmulCase(*sizes, LARGE, "residual", "f16", turned=turned)
    found = forms(case.product(), HOPPER)
    splits = {form.split: form for form in reversed(found) if form != LARGE}
    assert found[0] != LARGE and len(splits) > 1
    for form in {found[0], splits[max(splits)]}:
        on_numpy(dataclasses.replace(case, form=form).work(HOPPER), blocks=2 * form.split)


@pytest.mark.parametrize("order", ["up", "down"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_warps_wait_for_each_other(order: Order, blocks: int) -> None:
    on_numpy(MatmulCase(130, 136, 200, TWO, "gelu").work(HOPPER), blocks, order)
    on_numpy(MatmulCase(200, 72, 200, TURNS, "gelu").work(HOPPER), blocks, order)
    on_numpy(MatmulCase(70, 136, 200, SPLIT, "gelu").work(HOPPER), 2 * blocks, order)


@pytest.mark.parametrize("order", ["up", "down"])
def test_warps_wait_for_each_other_with_few_rows(order: Order) -> None:
    few = MatmulForm(64, 1, 1, 3, split=2, few=24)
    on_numpy(MatmulCase(20, 72, 200, few, "gelu").work(HOPPER), 2, order)


@pytest.mark.parametrize("missing", BARRIERS_OF_CLUSTERS, ids=BARRIERS_OF_CLUSTERS.get)
def test_a_missing_wait_of_a_cluster_shows(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two blocks has more than one tile, so stages are used again."""
    case = MatmulCase(64, 136, 200, SPLIT)
    orders: tuple[Order, ...] = ("up", "down", "random")

    def right(order: Order) -> bool:
        try:
            on_numpy(case.work(HOPPER), SPLIT.split, order)
        except (AssertionError, RuntimeError):
            return False
        return True

    assert all(map(right, orders))
    wait = Cluster._await
    monkeypatch.setattr(
        Cluster, "_await", lambda c, k, parity: None if k == missing else wait(c, k, parity)
    )
    assert not all(map(right, orders))


@pytest.mark.cuda
def test_values_on_a_gpu() -> None:
    machine = library(0).machine
    if machine.capability != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    cases = [*SMALL_MATMULS, *LARGE_MATMULS]
    works = [case.work(machine) for case in cases]
    entries = [entry_of(work.kernel, work.launch) for work in works]
    assert not library(0).add(entries)
    wrong = []
    for case, work in zip(cases, works, strict=True):
        try:
            on_gpu(work)
        except AssertionError as e:
            wrong.append(f"{case}: {str(e).strip().splitlines()[:6]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.cuda
def test_a_compiled_layer_is_one_launch() -> None:
    if library(0).machine.capability != (9, 0):
        pytest.skip("kernels for compute capability 9.0")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048)]
    model = torch.nn.Sequential(*layers).cuda().bfloat16()
    exact = copy.deepcopy(model).double()
    fast = compiled(model, dynamic=False)
    x = torch.randn(2049, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for part in (x[:2048], x[1:], x[:2048].clone()):  # other addresses in each call
            torch.testing.assert_close(fast(part).double(), exact(part.double()), rtol=0, atol=0.02)
