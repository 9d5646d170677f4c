"""Products and attention as GPU kernels: values, on a GPU and on a machine of numpy."""

from __future__ import annotations

import dataclasses

import pytest

from cuda_cases import (
    LARGE_ATTENTION,
    LARGE_PRODUCTS,
    LARGE_QUANTISED,
    SMALL_ATTENTION,
    SMALL_PRODUCTS,
    SMALL_QUANTISED,
    AttentionCase,
    ProductCase,
    QuantisedCase,
)
from cuda_tools import HOPPER, entry_of
from cuda_works import on_gpu, on_numpy
from ptx_machine import Order
from torchair.codegen.cuda.attention import AttentionForm
from torchair.codegen.cuda.driver import library
from torchair.codegen.cuda.gemv import GemvForm, forms
from torchair.codegen.loops import Nest
from torchair.codegen.requests import Product

FORMED = ProductCase(2, 11, 520, "bf16", "residual")


@pytest.mark.parametrize("case", SMALL_PRODUCTS, ids=str)
def test_products_on_numpy(case: ProductCase) -> None:
    on_numpy(case.work(HOPPER), blocks=2)


@pytest.mark.parametrize("form", forms(Product(FORMED.matmul, Nest((1, 64), ())), HOPPER), ids=str)
def test_all_forms_on_numpy(form: GemvForm) -> None:
    on_numpy(dataclasses.replace(FORMED, form=form).work(HOPPER), blocks=2)


@pytest.mark.parametrize("case", SMALL_QUANTISED, ids=str)
def test_quantised_products_on_numpy(case: QuantisedCase) -> None:
    on_numpy(case.work(HOPPER), blocks=2)


@pytest.mark.parametrize("case", SMALL_ATTENTION, ids=str)
def test_attention_on_numpy(case: AttentionCase) -> None:
    on_numpy(case.work(HOPPER))


WAITING: list[ProductCase | AttentionCase] = [
    ProductCase(1, 9, 512, norm="rms", form=GemvForm(1, 2, 4)),
    ProductCase(1, 9, 512, form=GemvForm(1, 2, 4, in_registers=False)),
    AttentionCase(4, 2, 1, 150, 64, mask="bool", form=AttentionForm(2, 2, 2, 2)),
]


@pytest.mark.parametrize("order", ["up", "down"])
@pytest.mark.parametrize("case", WAITING, ids=str)
def test_warps_wait_for_each_other(case: ProductCase | AttentionCase, order: Order) -> None:
    on_numpy(case.work(HOPPER), 1 if isinstance(case, ProductCase) else None, order)


# ---- with a GPU ----


@pytest.mark.cuda
def test_values_on_a_gpu() -> None:
    cases: list[ProductCase | QuantisedCase | AttentionCase] = [
        *SMALL_PRODUCTS,
        *LARGE_PRODUCTS,
        *SMALL_QUANTISED,
        *LARGE_QUANTISED,
        *SMALL_ATTENTION,
        *LARGE_ATTENTION,
    ]
    works = [case.work(library(0).machine) for case in cases]
    assert not library(0).add([entry_of(work.kernel, work.launch) for work in works])
    wrong = []
    for case, work in zip(cases, works, strict=True):
        registers, spilled = library(0).registers(entry_of(work.kernel, work.launch))
        print(f"{case}: {registers} registers")
        assert spilled <= (128 if isinstance(case, QuantisedCase) else 0), case
        try:
            on_gpu(work)
        except AssertionError as e:
            wrong.append(f"{case}: {str(e).strip().splitlines()[:6]}")
    assert not wrong, "\n".join(wrong)
