"""Batch-invariant numerics on a GPU: rows of kernels and of models have the same bits in batches of
1 to 64."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import torchair
from compiling import compiled
from cuda_cases import AttentionCase
from flash_cases import FlashCase
from invariant_cases import MOST, ROWS, SAME, RowsCase, attended, on_gpu, results_of
from matmul_cases import ONE, MatmulCase
from models import LLAMA, MLP, Llama, Mlp, build, llama_inputs, mlp_inputs
from torchair.codegen.cuda.driver import library
from torchair.codegen.cuda.matmul.forms import LARGE, MatmulForm
from torchair.verification.judge import same_bits

pytestmark = pytest.mark.cuda
BATCHES = (1, 2, 3, 4, 5, 8, 16, 31)
MOST_OF_MODELS = 64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def hopper() -> None:
    if library(0).machine.capability != (9, 0):
        pytest.skip("kernels for compute capability 9.0")


def invariant() -> torchair.CompilerConfig:
    config = torchair.CompilerConfig()
    config.numerics = "batch_invariant"
    return config


# ---- kernels


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_sums_of_a_row(case: RowsCase) -> None:
    machine = library(0).machine
    among = case.run(slice(MOST), machine, on_gpu)
    for rows, counted in ((slice(1), ()), (slice(8, 9), ()), (slice(3, 5), (2,))):
        for found, expected in zip(
            case.run(rows, machine, on_gpu, True, counted), among, strict=True
        ):
            np.testing.assert_array_equal(found, expected[rows], f"rows {rows}")


LINEAR = MatmulCase(300, 1032, 2056, ONE, "gelu", out="f32")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("turned", ["", "b"])
def test_products_of_a_row(dtype: str, turned: str) -> None:
    """Tensor cores add up the same for any number of columns of an instruction: nothing but this
    test promises that."""
    hopper()
    case = dataclasses.replace(LINEAR, dtype=dtype, turned=turned)
    among = results_of(case, slice(case.m), on_gpu)
    for first, count in ((0, 1), (77, 1), (3, 4), (64, 64), (100, 200)):
        rows = slice(first, first + count)
        found = results_of(case, rows, on_gpu, counted=count % 2 == 0)
        np.testing.assert_array_equal(found, among[rows], f"rows {rows}")
    wanted: list[MatmulForm] = [LARGE] if turned else [*SAME, LARGE]
    for form in wanted:
        found = results_of(case, slice(5, 90), on_gpu, form)
        np.testing.assert_array_equal(found, among[5:90], str(form))


@pytest.mark.parametrize("length", [1, 4, 300])
@pytest.mark.parametrize("mask", [None, "bool"])
def test_attention_of_a_member_of_a_batch(length: int, mask: str | None) -> None:
    if length > 4:
        hopper()
    kind = AttentionCase if length <= 4 else FlashCase
    case = kind(8, 2, length, 1000, 64, mask=mask, batch=33, lse=True)
    among = attended(case, slice(33), on_gpu, library(0).machine)
    for rows in (slice(1), slice(32, 33), slice(4, 20)):
        found = attended(case, rows, on_gpu, library(0).machine)
        for mine, all_ in zip(found, among, strict=True):
            np.testing.assert_array_equal(mine, all_[rows], f"rows {rows}")


# ---- models


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", [None, "max-autotune"])
def test_rows_of_an_mlp(mode: str | None, dynamic: bool) -> None:
    hopper()
    model = build(Mlp, replace(MLP["16 layers"], dim=256)).cuda().to(torch.bfloat16)
    (x,) = mlp_inputs(replace(MLP["16 layers"], dim=256), MOST_OF_MODELS, torch.bfloat16)
    x = x.cuda()
    each = torch._dynamo.config.patch(recompile_limit=1 + len(BATCHES))  # a graph for each
    with warnings.catch_warnings(), each:
        warnings.filterwarnings("error", ".*batch_invariant")  # nothing is named
        fast = compiled(model, invariant(), mode=mode, dynamic=dynamic)
        among = fast(x).clone()
        for batch in BATCHES:
            assert same_bits(fast(x[:batch]), among[:batch]), batch


@pytest.mark.parametrize("mode", [None, "max-autotune"])
@pytest.mark.parametrize("length", [1, 17])
def test_rows_of_a_llama(length: int, mode: str | None) -> None:
    """A prompt of some tokens, or none, and three decode steps after it; products of 1 to 64 rows,
    and of 17 times as many."""
    hopper()
    results: dict[int, list[torch.Tensor]] = {}
    for batch in (MOST_OF_MODELS, *BATCHES):
        torch._dynamo.reset()
        config = replace(LLAMA["1B"], layers=2, vocab=1000, batch=batch, context=64)
        model = build(Llama, config).cuda().to(torch.bfloat16)
        fast = compiled(model, invariant(), mode=mode, dynamic=False)
        results[batch] = []
        for start, count in ((0, length), (length, 1), (length + 1, 1), (length + 2, 1)):
            wide = replace(config, batch=MOST_OF_MODELS)
            tokens, positions = llama_inputs(wide, count, start=start)
            results[batch].append(fast(tokens[:batch].cuda(), positions.cuda()).clone())
    for batch in BATCHES:
        for found, among in zip(results[batch], results[MOST_OF_MODELS], strict=True):
            assert same_bits(found, among[:batch]), batch


def test_usual_rows_of_a_llama_depend_on_their_batch() -> None:
    """One row is a GEMV, 64 are not."""
    hopper()
    found = []
    for batch in (1, MOST_OF_MODELS):
        torch._dynamo.reset()
        config = replace(LLAMA["1B"], layers=2, vocab=1000, batch=batch, context=64)
        model = build(Llama, config).cuda().to(torch.bfloat16)
        tokens, positions = llama_inputs(replace(config, batch=MOST_OF_MODELS), 1)
        found.append(compiled(model)(tokens[:batch].cuda(), positions.cuda()).clone())
    assert not same_bits(found[0], found[1][:1])


def test_a_convolution_is_named() -> None:
    model, x = torch.nn.Conv2d(3, 4, 3).cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    with pytest.warns(UserWarning, match="torch's kernels compute Conv2D"):
        torch.compile(model, backend=torchair.get_npu_backend(compiler_config=invariant()))(x)
