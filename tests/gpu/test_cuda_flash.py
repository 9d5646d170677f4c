"""Attention of many queries on tensor cores: its text, its values on a GPU and on a machine of
numpy, and what is left to torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cuda_graphs import data
from cuda_tools import HOPPER, OLDER, entry_of
from cuda_works import on_gpu, on_numpy
from flash_cases import LARGE_FLASH, SMALL_FLASH, FlashCase
from ptx_machine import Order
from torchair import ge
from torchair.codegen.cuda.driver import library
from torchair.codegen.cuda.flash import FlashForm, flash, forms, refusal
from torchair.codegen.cuda.jit import foreign, ptx
from torchair.codegen.requests import Attention
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Declined
from torchair.engine.inspect.dry_run import DryRun, dry_run
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer

TURNS = 2
"""Blocks on the machine of numpy, fewer than there are tiles."""
PLAIN = FlashCase(4, 2, 300, 421, 128, causal=True)


# ---- text ----


def test_all_of_it_is_valid_text_without_local_memory() -> None:
    made = [case.generate(HOPPER) for case in [*SMALL_FLASH, *LARGE_FLASH]]
    text = ptx([entry_of(*each) for each in made], HOPPER)
    assert ".target sm_90a" in text and ".local" not in text
    assert all(f".entry {entry_of(*each).name}(" in text for each in made)
    assert not foreign([kernel for kernel, _ in made])


def test_weights_stay_in_registers() -> None:
    """Scores are not stored: all that is written to shared memory comes from the copy engine."""
    kernel, how = PLAIN.generate(HOPPER)
    text = ptx([entry_of(kernel, how)], HOPPER)
    assert "st.shared" not in text and "st.local" not in text
    assert text.count("cp.async.bulk.tensor") == 2 * 5  # two tiles of 64 features side by side
    assert "setmaxnreg.dec" in text and "setmaxnreg.inc" in text


@pytest.mark.parametrize("form", forms(PLAIN.request), ids=str)
def test_forms_say_how_they_are_launched(form: FlashForm) -> None:
    kernel, how = dataclasses.replace(PLAIN, tiles=form).generate(HOPPER)
    assert how.block == 128 * (1 + form.warpgroups) and how.resident == 1
    assert how.blocks(lambda word: 0) == 4 * -(-300 // form.rows)
    large = dataclasses.replace(PLAIN, batch=100, tiles=form)
    blocks = large.generate(HOPPER)[1].blocks(lambda word: 0)
    assert (blocks == HOPPER.multiprocessors) == form.persistent
    assert [t.box[1] for t in kernel.tensors] == [form.keys, form.keys, form.rows]


# ---- what is left to torch ----


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "f32"}, "f32"),
        ({"length": SizeArgument(7)}, "queries"),
        ({"span": 0}, "0 queries or keys"),
        ({"batch": 0}, "a batch of nothing"),
        ({"heads": 9}, "9 heads"),
        ({"width": 60}, "60"),
        ({"value_width": 512}, "512 features"),
        ({"k": (0, 4096, 1, 64)}, "no neighbours"),
        ({"v": (0, 4100, 128, 1)}, "16 bytes"),
        ({"scale": -1.0}, "scale"),
    ],
    ids=str,
)
def test_what_is_not_served_is_declined(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Declined, match=reason):
        flash(dataclasses.replace(PLAIN.request, **change), HOPPER)


def test_older_tensor_cores_are_not_served() -> None:
    assert "another kind" in (refusal(PLAIN.request, OLDER) or "")


def planned(
    length: int, heads: int = 16, dtype: DataType = DataType.DT_BF16, width: int = 128
) -> DryRun:
    """A graph of one attention with a causal mask."""
    with Graph("g", infer) as graph:
        q, k, v = (data(i, 4, heads, length, width, dtype=dtype) for i in range(3))
        out, _ = ge.FusedInferAttentionScore(
            q,
            [k],
            [v],
            num_heads=heads,
            scale=0.125,
            input_layout="BNSD_BSND",
            num_key_value_heads=heads,
            sparse_mode=2,
        )
        ge.NetOutput([out])
    return dry_run(graph, HOPPER)


def test_a_long_attention_of_a_graph_is_ours_and_others_are_those_of_torch() -> None:
    request = planned(2048).plan.native_parts[0][0].code.order.request
    assert isinstance(request, Attention) and request.causal and request.length == 2048
    assert not planned(2048, dtype=DataType.DT_FLOAT).plan.native_parts
    assert not planned(2048, width=60).plan.native_parts


# ---- values ----


@pytest.mark.parametrize("case", SMALL_FLASH, ids=str)
def test_values_on_numpy(case: FlashCase) -> None:
    on_numpy(case.work(HOPPER), TURNS)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("order", ["up", "down"])
def test_warpgroups_wait_for_each_other(order: Order, alternate: bool) -> None:
    form = FlashForm(2, 32, alternate=alternate)
    case = FlashCase(2, 1, 200, 200, 64, causal=True, tiles=form)
    on_numpy(case.work(HOPPER), TURNS, order)


@pytest.mark.cuda
def test_values_on_a_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tensor cores of another kind")
    cases = [*SMALL_FLASH, *LARGE_FLASH]
    cases += [dataclasses.replace(PLAIN, tiles=form) for form in forms(PLAIN.request)]
    works = [case.work(library(0).machine) for case in cases]
    assert not library(0).add([entry_of(work.kernel, work.launch) for work in works])
    wrong = []
    for case, work in zip(cases, works, strict=True):
        registers, spilled = library(0).registers(entry_of(work.kernel, work.launch))
        print(f"{case}: {registers} registers, {spilled} bytes")
        try:
            on_gpu(work)
        except AssertionError as e:
            wrong.append(f"{case}: {str(e).strip().splitlines()[:6]}")
    assert not wrong, "\n".join(wrong)
