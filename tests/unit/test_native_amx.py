"""Products in AMX tile registers, run by an interpreter of tile instructions, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from amx_machine import MACHINE, interpreted
from torchair.codegen.cpu.jit import Library, assembly, host, run_kernel
from torchair.codegen.cpu.matmul.kernel import product
from torchair.codegen.requests import MatMul, Product, stored
from torchair.codegen.sizes import SizeArgument
from torchair.codegen.target import Generated
from torchair.codegen.text.writer import Machine

WIDE = replace(host(), bits=512, registers=32, dot_bf16=True, amx_bf16=True, amx_i8=True, fma=True)
SAPPHIRE_RAPIDS = replace(WIDE, name="sapphirerapids", features="", arch="x86_64")
pytestmark = pytest.mark.skipif(
    host().bits != 512 or not host().dot_bf16, reason="epilogues are for AVX-512 with bfloat16"
)
LIBRARY = Library(WIDE)


def launched(made: Generated, tensors: list[torch.Tensor], values: list[int], threads: int) -> None:
    """A kernel with scratch memory as its third argument."""
    memory = torch.zeros(threads * made.scratch + 128, dtype=torch.uint8)
    tensors = [*tensors[:2], memory, *tensors[2:]]
    words = [t.data_ptr() + (-t.data_ptr() % 64 if t is memory else 0) for t in tensors]
    run_kernel(LIBRARY, interpreted(made.kernel), [*words, *values], threads)
    assert not MACHINE.errors, MACHINE.errors[:3]
    assert not MACHINE.tiles, "registers are released"


def operand(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows apart from each other, between NaNs."""
    room = torch.full((m + 1, k + 10), float("nan"), dtype=dtype)
    room[:m, 2 : 2 + k] = torch.randn(m, k)
    return room[:m, 2 : 2 + k]


def check(
    m: int,
    n: int,
    k: int,
    layout: str = "nk",
    packed: bool = True,
    symbolic: bool = False,
    invariant: bool = False,
    threads: int = 2,
) -> torch.Tensor:
    """A product of bfloat16, compared with float64; its results."""
    a, b = operand(m, k), operand(n, k) if layout == "nk" else operand(k, n)
    strides = (0, 1, b.stride(0)) if layout == "nk" else (0, b.stride(0), 1)
    rows = SizeArgument(4) if symbolic else m
    spec = MatMul(
        "bf16",
        1,
        rows,
        n,
        k,
        (0, a.stride(0), 1),
        strides,
        layout if packed else "",
        batch_invariant=invariant,
    )
    out = torch.full((m, n), 7.0)
    made = product(Product(spec, stored((1, rows, n), (0, n, 1), "f32", 3, "f32")), WIDE, "amx")
    given = made.pack[1](b) if packed else b
    launched(made, [a, given, out], [m] if symbolic else [], threads)
    columns = (b if layout == "nk" else b.t()).double()
    right, size = a.double() @ columns.t(), a.double().abs() @ columns.t().abs()
    assert torch.all((out.double() - right).abs() <= 1e-6 * size)
    return out


@pytest.mark.parametrize("m", [5, 16, 17, 31, 32, 33, 100])
def test_rows(m):
    before = MACHINE.executed["tdpbf16ps"]
    check(m, 70, 64)
    assert MACHINE.executed["tdpbf16ps"] > before


@pytest.mark.parametrize("n", [1, 16, 33, 64, 130])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("packed", [True, False])
def test_columns_and_layouts(n, layout, packed):
    check(40, n, 96, layout, packed)


def test_panels_are_copied_for_few_rows_too():
    before = MACHINE.executed["tdpbf16ps"]
    check(8, 70, 768, packed=False)
    assert MACHINE.executed["tdpbf16ps"] > before


def test_registers_are_shaped_once_for_tiles_of_one_height():
    before = MACHINE.executed["ldtilecfg"]
    check(128, 256, 64, threads=1)
    assert MACHINE.executed["ldtilecfg"] == before + 1
    check(40, 256, 64, symbolic=True, threads=1)  # tiles of 32 and of 8 rows in turns
    assert MACHINE.executed["ldtilecfg"] > before + 2


@pytest.mark.parametrize("packed", [True, False])
def test_long_sums_take_several_rounds(packed):
    check(37, 40, 3200, packed=packed)


def test_one_kernel_for_any_number_of_rows():
    for m in (0, 1, 4, 8, 30, 77):
        check(m, 40, 64, symbolic=True, threads=3)


def test_few_rows_and_odd_sums_stay_in_vector_registers():
    before = dict(MACHINE.executed)
    check(4, 64, 64)
    check(40, 64, 50)
    assert before == MACHINE.executed


def test_rows_do_not_depend_on_those_beside_them():
    torch.manual_seed(0)
    whole = check(40, 70, 256, symbolic=True, invariant=True)
    for rows in (1, 3, 17, 33):
        torch.manual_seed(0)
        a, b = operand(40, 256)[:rows], operand(70, 256)
        spec = MatMul(
            "bf16",
            1,
            SizeArgument(4),
            70,
            256,
            (0, a.stride(0), 1),
            (0, 1, b.stride(0)),
            "nk",
            batch_invariant=True,
        )
        end = stored((1, SizeArgument(4), 70), (0, 70, 1), "f32", 3, "f32")
        made, out = product(Product(spec, end), WIDE, "amx"), torch.zeros(rows, 70)
        launched(made, [a, made.pack[1](b), out], [rows], 1)
        assert torch.equal(out, whole[:rows])


@pytest.mark.parametrize("m", [1, 7, 50])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_products_of_bytes_are_exact(m, layout):
    for n, k in ((100, 128), (16, 6400)):
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        out = torch.full((m, n), 7, dtype=torch.int32)
        strides = (0, 1, k) if layout == "nk" else (0, n, 1)
        spec = MatMul("i8", 1, m, n, k, (0, k, 1), strides, layout)
        made = product(Product(spec, stored((1, m, n), (0, n, 1), "i32", 4, "i32")), WIDE, "amx")
        assert sorted(made.pack) == [1], "no sums of columns are needed"
        given = made.pack[1](weight if layout == "nk" else weight.t().contiguous())
        launched(made, [a, given, given, out], [], 2)
        assert torch.equal(out.long(), a.long() @ weight.long().t())


def test_the_processor_gets_tile_instructions():
    spec = MatMul("bf16", 1, 64, 64, 64, (0, 64, 1), (0, 1, 64), "nk")
    end = stored((1, 64, 64), (0, 64, 1), "f32", 3, "f32")
    text = assembly(product(Product(spec, end), SAPPHIRE_RAPIDS, "amx").kernel, SAPPHIRE_RAPIDS)
    words = ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease")
    assert [text.count(word) for word in words] == [1, 8, 8, 8, 1]


def test_machines_without_tiles_have_the_text_of_before():
    plain: Machine = replace(WIDE, amx_bf16=False, amx_i8=False)
    spec = MatMul("bf16", 1, 64, 64, 64, (0, 64, 1), (0, 1, 64), "nk")
    end = stored((1, 64, 64), (0, 64, 1), "f32", 3, "f32")
    text = product(Product(spec, end), plain, "amx").kernel.text
    assert "tdpbf16ps" not in text and "dpbf16ps" in text
