"""Batch-invariant numerics on a GPU: kernels give a row the same bits alone and in a batch, on the
machine of numpy; and which operators of a graph are covered."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial

import numpy as np
import pytest
import torch

from cuda_cases import AttentionCase, ProductCase, QuantisedCase
from cuda_graphs import data
from cuda_tools import HOPPER, OLDER
from flash_cases import FlashCase
from invariant_cases import (
    LINEAR,
    MOST,
    ROWS,
    SAME,
    RowsCase,
    attended,
    few_rows,
    on_numpy,
    results_of,
)
from matmul_cases import ONE, OUT, SPLIT, MatmulCase
from models import LLAMA, MLP, Llama, Mlp, build, llama_inputs, mlp_inputs
from native_check import capture
from quantised import quantise
from torchair import ge
from torchair.codegen.cuda.attention import default_form
from torchair.codegen.cuda.jit import Gpu, describe
from torchair.codegen.cuda.matmul import forms
from torchair.codegen.cuda.matmul.forms import MatmulForm
from torchair.codegen.cuda.target import CudaTarget
from torchair.codegen.requests import Product
from torchair.engine.inspect.dry_run import dry_run
from torchair.engine.units.batches import has_sums, warn_of_library, warn_of_rows
from torchair.engine.units.native_units import NativeUnits
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph, Value
from torchair.operators import infer

FEW = describe((9, 0), 3)
"""A GPU with three multiprocessors."""


# ---- reductions, norms, softmax


def sums_of(
    case: RowsCase,
    rows: slice,
    gpu: Gpu = FEW,
    invariant: bool = True,
    counted: Collection[int] = (),
) -> list[np.ndarray]:
    return case.run(rows, gpu, partial(on_numpy, gpu=gpu), invariant, counted)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_sums_of_a_row_do_not_depend_on_the_batch(case: RowsCase) -> None:
    among = sums_of(case, slice(MOST))
    assert among[0].any()
    for rows, gpu, counted in (
        (slice(1), FEW, ()),
        (slice(8, 9), HOPPER, ()),
        (slice(3, 5), FEW, (2,)),
    ):
        for found, expected in zip(sums_of(case, rows, gpu, True, counted), among, strict=True):
            np.testing.assert_array_equal(found, expected[rows], f"rows {rows}")


@pytest.mark.parametrize("size", [300, 301])
@pytest.mark.parametrize("kind", ["norm", "softmax"])
def test_sums_of_rows_whose_length_is_a_word_do_not_depend_on_addresses(
    kind: str, size: int
) -> None:
    case = RowsCase(kind, (size,), dtype="bf16")
    among = sums_of(case, slice(MOST), counted=(size, MOST))
    for rows in (slice(1), slice(4, 6)):
        moved = dataclasses.replace(case, shift=2)
        for one in (case, moved):
            found = sums_of(one, rows, counted=(size, 2))
            for mine, all_ in zip(found, among, strict=True):
                np.testing.assert_array_equal(mine, all_[rows], f"rows {rows} of {one}")


@pytest.mark.parametrize("case", [ROWS[1], ROWS[3]], ids=str)
def test_usual_sums_of_a_row_depend_on_the_batch(case: RowsCase) -> None:
    among = sums_of(case, slice(MOST), invariant=False)[0]
    alone = [sums_of(case, slice(k, k + 1), invariant=False)[0] for k in range(MOST)]
    assert not np.array_equal(among, np.concatenate(alone))


# ---- products


@pytest.mark.parametrize("epilogue", ["gelu", "residual"])
@pytest.mark.parametrize("turned", ["", "b"])
def test_products_of_a_row_do_not_depend_on_the_batch(epilogue: str, turned: str) -> None:
    case = dataclasses.replace(LINEAR, epilogue=epilogue, turned=turned)
    among, work = results_of(case, slice(case.m)), case.work(HOPPER)
    memory = list(work.memory)
    memory[OUT] = among
    work.check(memory)
    for first, count in ((0, 1), (9, 1), (2, 2), (60, 4), (5, 5), (0, 17)):
        rows = slice(first, first + count)
        found = results_of(case, rows, counted=count % 2 == 0)
        np.testing.assert_array_equal(found, among[rows], f"rows {rows}")


@pytest.mark.parametrize("form", SAME, ids=str)
def test_forms_without_a_split_give_the_same_bits(form: MatmulForm) -> None:
    rows = slice(3, 6)
    expected = results_of(LINEAR, slice(LINEAR.m))[rows]
    np.testing.assert_array_equal(results_of(LINEAR, rows, form=form), expected)


def test_usual_products_of_a_row_depend_on_the_batch() -> None:
    """Few rows are a GEMV, and few tiles may be split."""
    whole = slice(LINEAR.m)
    among = results_of(LINEAR, whole, invariant=False)
    assert not np.array_equal(results_of(LINEAR, slice(2), invariant=False), among[:2])
    assert not np.array_equal(results_of(LINEAR, whole, form=SPLIT), among)


SIZES = [(1, 8, 8), (1, 4096, 4096), (8, 1024, 4096), (64, 14336, 4096), (4096, 4096, 14336)]


@pytest.mark.parametrize("turned", ["", "b"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_invariant_forms_have_no_split_and_no_choices(
    sizes: tuple[int, int, int], turned: str
) -> None:
    product = MatmulCase(*sizes, ONE, turned=turned).product()
    asked = dataclasses.replace(
        product, matmul=dataclasses.replace(product.matmul, batch_invariant=True)
    )
    (form,) = forms(asked, HOPPER)
    assert form.split == 1 and form.is_sound() and not (turned and form.columns % 64)
    assert not CudaTarget(0, HOPPER).choices(asked)
    if not turned:
        assert CudaTarget(0, HOPPER).choices(product)
    busy = -(-sizes[0] // form.rows) * -(-sizes[1] // form.columns)
    assert turned or busy > HOPPER.multiprocessors // 2 or sizes[1] == 8


@pytest.mark.parametrize(
    "case",
    [
        ProductCase(4, 9, 520, "f32"),
        ProductCase(4, 6, 4096),
        QuantisedCase(4, 40, 512),
        QuantisedCase(4, 16, 4096, 4, 128, "bf16", "f32"),
    ],
    ids=str,
)
def test_up_to_four_rows_have_the_same_bits(case: ProductCase | QuantisedCase) -> None:
    """Where there are no tensor cores for any number of rows, and with integers."""
    among, usual = few_rows(case, slice(4)), few_rows(case, slice(4), invariant=False)
    differ = False
    for rows in (slice(1), slice(2, 4), slice(1, 4)):
        np.testing.assert_array_equal(few_rows(case, rows), among[rows], f"rows {rows}")
        differ |= not np.array_equal(few_rows(case, rows, invariant=False), usual[rows])
    assert differ, "the usual kernels follow from the number of rows"


# ---- attention


@pytest.mark.parametrize("mask", [None, "bool"])
@pytest.mark.parametrize("length", [1, 3, 70])
def test_attention_does_not_depend_on_the_batch(length: int, mask: str | None) -> None:
    kind = AttentionCase if length <= 4 else FlashCase
    case = kind(4, 2, length, 300, 64, mask=mask, batch=3, lse=True)
    among = attended(case, slice(3))
    for rows in (slice(1), slice(2, 3), slice(1, 3)):
        found = attended(case, rows, counted=rows.stop == 3)
        for mine, all_ in zip(found, among, strict=True):
            np.testing.assert_array_equal(mine, all_[rows], f"rows {rows}")


def test_usual_attention_depends_on_the_batch() -> None:
    case = AttentionCase(2, 2, 1, 600, 64, "f32", batch=3)
    asked = [dataclasses.replace(case.request, batch=n) for n in (1, 70)]
    assert default_form(asked[0], HOPPER) != default_form(asked[1], HOPPER)
    ours = [dataclasses.replace(r, batch_invariant=True) for r in asked]
    assert default_form(ours[0], HOPPER) == default_form(ours[1], HOPPER)
    for invariant in (True, False):
        alone, among = (
            attended(case, rows, partial(on_numpy, gpu=FEW), FEW, invariant)[0]
            for rows in (slice(1), slice(3))
        )
        assert np.array_equal(alone, among[:1]) == invariant


# ---- whole graphs


def graph_of(name: str, batch: int) -> tuple[Graph, dict[Value, torch.Tensor], dict[int, int]]:
    """A model's graph as if it were on a GPU, its frozen values, and which inputs it updates."""
    config = dataclasses.replace(LLAMA["tiny grouped"], head_dim=64, dim=256, ffn=512)
    kinds = {"mlp": (Mlp, MLP["16 layers"]), "llama": (Llama, config)}
    model = build(*kinds[name.split()[-1]]).to(torch.bfloat16)
    if name.startswith("quantised"):
        quantise(model, bits=4, group=128)
    is_mlp = name == "mlp"
    inputs = mlp_inputs(MLP["16 layers"], batch) if is_mlp else llama_inputs(config, batch, start=3)
    given = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs]
    torch._dynamo.reset()
    with capture() as found, torch.no_grad():
        torch.compile(model, backend="torchair")(*given)
    session = found[0].session
    for node in session.graph.nodes:
        for value in node.outputs:
            value.device_type = "NPU"
    return session.graph, session.current.units.frozen, session.loaded.state.assigned


@pytest.mark.parametrize(("name", "launches"), [("mlp", (32, 17)), ("llama", (26, 14))])
def test_products_of_a_model_have_one_kernel_for_all_batches(
    name: str, launches: tuple[int, int]
) -> None:
    """For which a token takes so many launches, and usually so many."""
    orders = {}
    for batch in (1, 16):
        graph, frozen, assigned = graph_of(name, batch)
        made = dry_run(graph, HOPPER, assigned, frozen, batch_invariant=True)
        assert not [s for s in made.plan.steps if s.native is None and s.kind != "view"]
        jobs = [job for bundle in made.launches for job in bundle]
        assert all(len(job.steps) == 1 for job in jobs)
        requests = [job.order.request for job in jobs]
        assert all(r.matmul.batch_invariant for r in requests if isinstance(r, Product))
        assert all(j.launch.shared for j in jobs if isinstance(j.order.request, Product))
        orders[batch] = [job.order.label for job in jobs]
        units = NativeUnits(graph, CudaTarget(0, HOPPER), frozen, batch_invariant=True)
        assert not units.following_rows() and not [n for n in units.fusion.alone if has_sums(n)]
        if batch == 1:
            usual = dry_run(graph, HOPPER, assigned, frozen)
            assert (len(made.launches), len(usual.launches)) == launches
    assert sorted(orders[1]) == sorted(orders[16])


@pytest.mark.parametrize(
    ("name", "gpu", "type_"),
    [("quantised llama", HOPPER, "WeightQuantBatchMatmulV2"), ("llama", OLDER, "MatMul")],
)
def test_products_whose_kernel_follows_from_their_rows_are_named(
    name: str, gpu: Gpu, type_: str
) -> None:
    graph, frozen, _ = graph_of(name, 1)
    units = NativeUnits(graph, CudaTarget(0, gpu), frozen, batch_invariant=True)
    assert type_ in {n.type for n in units.following_rows()}
    with pytest.warns(UserWarning, match=f"another kernel of .*{type_} for more"):
        warn_of_rows(units.following_rows())


def test_a_product_that_turns_out_to_be_the_library_s_is_named() -> None:
    """Its rows are not evenly spaced in memory, which only its strides say."""
    with Graph("g", infer) as graph:
        turned = ge.Transpose(data(0, 4, 3, 64), [1, 0, 2])
        ge.NetOutput([ge.MatMulV2(turned, data(1, 72, 64), transpose_x2=True)])
    with pytest.warns(UserWarning, match="torch's kernels compute MatMulV2"):
        dry_run(graph, HOPPER, batch_invariant=True)


def test_attention_that_torch_computes_is_named() -> None:
    with Graph("g", infer) as graph:
        q, k, v = (data(i, 2, 2, 9, 64, dtype=DataType.DT_FLOAT) for i in range(3))
        out, _ = ge.FusedInferAttentionScore(
            q, [k], [v], num_heads=2, scale=0.125, input_layout="BNSD", num_key_value_heads=2
        )
        ge.NetOutput([out])
    units = NativeUnits(graph, CudaTarget(0, HOPPER), batch_invariant=True)
    with pytest.warns(UserWarning, match="torch's kernels compute FusedInferAttentionScore"):
        warn_of_library(units.fusion.alone)
