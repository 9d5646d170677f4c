"""Products with quantised weights: kernels against float64 for every width of vectors, and graphs
whose weights are packed, also after they were written to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from compiling import compiled
from lowering import check as check_lowering
from torchair import ge
from torchair.ascend import ops as npu
from torchair.ascend.ops.library import pack_int4
from torchair.codegen.cpu.jit import Library, empty, run_kernel
from torchair.codegen.cpu.matmul.kernel import choose, product
from torchair.codegen.cpu.target import CpuTarget
from torchair.codegen.requests import MatMul, Product, Weight, stored
from torchair.ge.build import Data, NetOutput
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Graph
from torchair.operators import infer
from torchair.operators.reference import interpret
from widths import LIBRARIES, MACHINES, ROUNDING, TYPES

GUARD = 64  # bytes around scratch memory that must stay as they are
NAMES = {v: k for k, v in TYPES.items()} | {torch.int8: "i8"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    npu.define()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- kernels ----


class Quantised:
    """A weight of integers with scales, and the numbers it stands for."""

    def __init__(
        self, n: int, k: int, bits: int, group: int, scales: torch.dtype, offsets: bool
    ) -> None:
        least, end = (-8, 8) if bits == 4 else (-128, 128)
        self.bits, self.group = bits, group or k
        self.integers = torch.randint(least, end, (n, k), dtype=torch.int8)
        groups = k // self.group
        self.scales = (torch.rand(n, groups) * 0.1).to(scales)
        self.offsets = torch.randint(-4, 5, (n, groups), dtype=torch.int8) if offsets else None

    @property
    def numbers(self) -> torch.Tensor:
        """The matrix [n, k] in float64."""
        whole = self.integers.double()
        if self.offsets is not None:
            whole = whole + self.offsets.double().repeat_interleave(self.group, 1)
        return whole * self.scales.double().repeat_interleave(self.group, 1)

    def weight(self) -> Weight:
        kept = "" if self.offsets is None else NAMES[self.offsets.dtype]
        return Weight(self.bits, self.group, NAMES[self.scales.dtype], kept)


def check(dtype: str, m: int, q: Quantised, bits: int, layout="nk", turned=False, a=None) -> None:
    """Run the kernel of one product with three threads and compare it with float64."""
    (n, k), threads = q.integers.shape, 3
    if a is None:
        a = torch.randn(k, m).t() if turned else torch.randn(m, k)
    a = a.to(TYPES[dtype])
    c = torch.full((m, n), 7.0, dtype=TYPES[dtype])
    b = (0, 1, k) if layout == "nk" else (0, n, 1)
    spec = MatMul(dtype, 1, m, n, k, (0, *a.stride()), b, layout, q.weight())
    made = product(Product(spec, stored((1, m, n), (0, n, 1), dtype, 5)), MACHINES[bits], "q")
    parts = [q.integers, q.scales] + ([] if q.offsets is None else [q.offsets])
    given = parts if layout == "nk" else [x.t().contiguous() for x in parts]
    packed = [made.pack[word](x) for word, x in zip((1, 3, 4), given, strict=False)]
    memory = torch.full((threads * made.scratch + 3 * GUARD,), 255, dtype=torch.uint8)
    start = GUARD + -memory.data_ptr() % GUARD
    tensors = [a, packed[0], memory, packed[1], packed[-1], c]
    words = [t.data_ptr() + (start if t is memory else 0) for t in tensors]
    run_kernel(LIBRARIES[bits], made.kernel, words, threads)
    assert torch.all(memory[:start] == 255)
    assert torch.all(memory[start + threads * made.scratch :] == 255)
    right, weight = a.double() @ q.numbers.t(), a.double().abs() @ q.numbers.abs().t()
    # Many rows multiply with numbers of the type of A: scales of groups are rounded into them.
    # Scales may be next to nothing, and results be steps of the smallest number.
    unit = 2e-6 + (ROUNDING[dtype] / 2 if m > 6 and q.group != k else 0.0)
    least = torch.finfo(TYPES[dtype]).smallest_normal * torch.finfo(TYPES[dtype]).eps
    allowed = unit * weight + 1.01 * ROUNDING[dtype] * right.abs() + least
    near = (c.double() - right).abs() <= allowed
    assert torch.all(near | (c == right) | (c.isnan() & right.isnan()))


@pytest.mark.parametrize("bits", MACHINES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("m", [1, 3, 6, 7, 33])
def test_kernels(bits, dtype, m):
    for integers in (8, 4):
        for group, offsets in ((0, False), (0, True), (32, False), (32, True)):
            q = Quantised(100, 96, integers, group, TYPES[dtype], offsets)
            check(dtype, m, q, bits, "kn" if m == 3 else "nk")


@pytest.mark.parametrize("m", [2, 9])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_odd_sizes_and_other_layouts_of_the_first_factor(dtype, m):
    check(dtype, m, Quantised(1, 41, 8, 0, torch.float32, True), 512)
    check(dtype, m, Quantised(70, 1, 8, 0, torch.float32, True), 512)
    check(dtype, m, Quantised(70, 40, 4, 0, torch.float32, True), 512, turned=True)
    check(dtype, m, Quantised(65, 43, 8, 0, torch.bfloat16, False), 512, "kn", turned=True)


@pytest.mark.skipif(not MACHINES[512].dot_i8, reason="the processor does not multiply bytes")
def test_rows_of_any_range_are_multiplied_as_digits():
    q = Quantised(70, 160, 8, 0, torch.bfloat16, True)
    a = torch.randn(5, 160)
    a[0] = 0
    a[1, ::3] *= 2.0 ** torch.randint(-40, 0, (54,))
    a[2, 7] = 3e4
    a[3] *= 2.0**-100
    a[4] *= 2.0**96
    check("bf16", 5, q, 512, a=a.bfloat16())
    a[:, 3] = a.bfloat16().abs().amax(1).float().log2().ceil().exp2() * (255 / 256)
    check("bf16", 5, q, 512, a=a.bfloat16())
    spec = MatMul("bf16", 1, 5, 70, 160, (0, 160, 1), (0, 1, 160), "nk", q.weight())
    assert choose(spec, MACHINES[512]).few == "split_int"


@pytest.mark.skipif(not MACHINES[512].dot_i8, reason="the processor does not multiply bytes")
@pytest.mark.parametrize("offsets", [False, True])
def test_what_digits_leave_is_multiplied_too(offsets):
    q = Quantised(70, 160, 8, 0, torch.bfloat16, offsets)
    a = torch.randn(6, 160)
    a[0, 5] = 1e30  # beside it other numbers have no digits
    a[1, 5], a[2, 5], a[3, 5] = torch.inf, -torch.inf, torch.nan
    a[4, ::2] *= 2.0**-20
    q.integers[::2, 5] = 0
    check("bf16", 6, q, 512, a=a.bfloat16())


def test_long_sums_are_written_out_in_rounds_of_whole_groups():
    check("f32", 9, Quantised(70, 2048, 8, 1024, torch.float32, True), 512)
    check("bf16", 40, Quantised(70, 3200, 4, 64, torch.bfloat16, True), 512)


def test_packed_weights_share_large_pages():
    sizes = [40_000, 300_001, 5_000_000, 16, 1_000_000, 3, 70_000]
    made = [empty((n,), torch.int8).fill_(i) for i, n in enumerate(sizes * 3)]
    for i, (n, x) in enumerate(zip(sizes * 3, made, strict=True)):
        assert x.shape == (n,) and x.data_ptr() % 64 == 0 and torch.all(x == i)
    ends = {x.data_ptr() + (x.numel() + 63) // 64 * 64 for x in made}
    assert len(ends & {x.data_ptr() for x in made}) >= len(made) // 2


# ---- kernels of bytes ----

PLAIN = replace(MACHINES[512], dot_i8=False)
BYTE_MACHINES = [(machine, LIBRARIES[bits]) for bits, machine in MACHINES.items()]
BYTE_MACHINES.append((PLAIN, Library(PLAIN)))


@pytest.mark.parametrize("number", range(len(BYTE_MACHINES)))
@pytest.mark.parametrize("m", [1, 3, 7, 50])
def test_products_of_bytes_are_exact(number, m):
    machine, library = BYTE_MACHINES[number]
    shapes = ((100, 96, "nk", 0), (70, 41, "kn", 0), (65, 3, "nk", 1), (64, 7001, "nk", 0))
    for n, k, layout, turned in shapes:
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        a = torch.randint(-128, 128, (k, m) if turned else (m, k), dtype=torch.int8)
        a = a.t() if turned else a
        c = torch.full((m, n), 7, dtype=torch.int32)
        b = (0, 1, k) if layout == "nk" else (0, n, 1)
        spec = MatMul("i8", 1, m, n, k, (0, *a.stride()), b, layout)
        made = product(Product(spec, stored((1, m, n), (0, n, 1), "i32", 4, "i32")), machine, "b")
        given = weight if layout == "nk" else weight.t().contiguous()
        memory = torch.zeros(2 * made.scratch + GUARD, dtype=torch.uint8)
        sums = made.pack[3](given) if 3 in made.pack else given
        tensors = [a, made.pack[1](given), memory, sums, c]
        words = [t.data_ptr() + (-t.data_ptr() % GUARD if t is memory else 0) for t in tensors]
        run_kernel(library, made.kernel, words, 2)
        assert torch.equal(c.long(), a.long() @ weight.long().t())


# ---- graphs ----

pytestmark = pytest.mark.filterwarnings("error:no native code")


class Layer(nn.Module):
    """A product with a quantised weight [k, n], and what is done with its results."""

    def __init__(self, q: Quantised, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        self.group = q.group if q.group != q.integers.shape[1] else 0
        values = [q.integers, q.scales, None if q.offsets is None else q.offsets.to(dtype)]
        turned = [None if x is None else x.t().contiguous() for x in values]
        self.weight, self.scale, self.offset = (
            None if x is None else nn.Parameter(x, requires_grad=False) for x in turned
        )
        self.bias = nn.Parameter(torch.randn(q.integers.shape[0]).to(dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.npu.npu_weight_quant_batchmatmul(
            x, self.weight, self.scale, self.offset, bias=self.bias, antiquant_group_size=self.group
        )
        return torch.relu(y) + 1


@torch.no_grad()
def close(model: nn.Module, fast, x: torch.Tensor) -> None:
    """No further from float64 than a few roundings of eager."""
    right = type(model).forward(_double(model), x.double())
    wrong = (model(x).double() - right).abs().max()
    unit = torch.finfo(x.dtype).eps * right.abs().max()
    assert (fast(x).double() - right).abs().max() <= 3 * wrong + unit


def _double(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for name, value in twin.named_parameters():
        if value.is_floating_point():
            setattr(twin, name, nn.Parameter(value.double(), requires_grad=False))
    return twin


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_product_and_what_follows_are_one_kernel(dtype, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    kind = TYPES[dtype]
    for bits, group in ((8, 0), (4, 32)):
        layer = Layer(Quantised(70, 96, bits, group, kind, group > 0), kind, bias=True)
        fast = compiled(layer, dynamic=True, fullgraph=False, frozen_parameter=True)
        for shape in ((1, 96), (2, 20, 96), (2, 3, 96)):
            close(layer, fast, torch.randn(shape).to(kind))
        assert "matmul    WeightQuantBatchMatmulV2 Relu Add " in capsys.readouterr().out


@pytest.mark.parametrize("turned", [False, True])
def test_a_target_with_kernels_for_few_rows_dequantises_for_more(turned, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    monkeypatch.setattr(CpuTarget, "quantised", 4)
    for group, offsets in ((0, False), (32, True)):
        q = Quantised(70, 96, 8, group, torch.bfloat16, offsets)
        layer = Layer(q, torch.bfloat16, bias=True)
        if turned:
            layer.weight = nn.Parameter(layer.weight.t().contiguous().t(), requires_grad=False)
        fast = compiled(layer, dynamic=False, fullgraph=False, frozen_parameter=True)
        for shape, form in (((3, 96), "WeightQuantBatchMatmulV2"), ((2, 5, 96), "BatchMatMulV2")):
            close(layer, fast, torch.randn(shape).bfloat16())
            assert f"matmul    {form} " in capsys.readouterr().out


def test_weights_that_change_are_packed_again_also_when_they_need_more_bits():
    layer = Layer(Quantised(70, 96, 4, 32, torch.float32, True), torch.float32, bias=False)
    fast, x = compiled(layer, fullgraph=False, frozen_parameter=True), torch.randn(2, 96)
    close(layer, fast, x)
    with torch.no_grad():
        layer.scale *= 2
    close(layer, fast, x)
    layer.weight.data.fill_(7)
    close(layer, fast, x)
    layer.weight.data.fill_(100)
    close(layer, fast, x)


@pytest.mark.parametrize("turned", [False, True])
def test_integers_packed_into_int32_are_unpacked_once(turned, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    q = Quantised(72, 96, 4, 32, torch.float32, True)
    layer = Layer(q, torch.float32, bias=True)
    whole = q.integers if turned else q.integers.t().contiguous()
    packed = pack_int4(whole)
    layer.weight = nn.Parameter(packed.t() if turned else packed, requires_grad=False)
    fast = torch.compile(layer, backend="torchair", fullgraph=True)
    close(layer, fast, torch.randn(2, 96))
    units = capsys.readouterr().out
    assert "matmul    WeightQuantBatchMatmulV2 Relu Add " in units and "0 generic" in units
    assert "LeftShift" not in units.partition("lay_out_filters")[2]


def test_groups_that_do_not_fit_are_refused():
    x, w = torch.randn(2, 96), torch.zeros(96, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="argument 'antiquant_scale': has 2 rows"):
        torch.ops.npu.npu_weight_quant_batchmatmul(x, w, torch.ones(2, 8), antiquant_group_size=32)


class Bytes(nn.Module):
    """A product of bytes whose rows are quantised as they come."""

    def __init__(self, bias: torch.Tensor | None, packed: bool = False) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (96, 72), dtype=torch.int8)
        if packed:
            weight = torch.ops.npu.npu_convert_weight_to_int4pack(weight.int() >> 4)
        values = (weight, torch.rand(72) * 0.01, bias)
        self.weight, self.scale, self.bias = (
            None if v is None else nn.Parameter(v, requires_grad=False) for v in values
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, scales = torch.ops.npu.npu_dynamic_quant(x)
        y = torch.ops.npu.npu_quant_matmul(
            rows,
            self.weight,
            self.scale,
            pertoken_scale=scales,
            bias=self.bias,
            output_dtype=x.dtype,
        )
        return torch.relu(y)


@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32, "packed"], ids=str)
@torch.no_grad()
def test_bytes_are_multiplied_and_scaled_in_one_kernel(bias, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    if bias == "packed":
        model = Bytes(None, packed=True)
    else:
        model = Bytes(None if bias is None else torch.randint(-50, 50, (72,)).to(bias))
    fast = torch.compile(model, backend="torchair", fullgraph=True)
    for rows in (1, 20):
        x = torch.randn(rows, 96).to(torch.bfloat16)
        torch.testing.assert_close(fast(x), model(x))
    units = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("matmul", "torch  "))]
    assert units and all(x.startswith("matmul    QuantBatchMatmulV3 ") for x in units)


class Narrow(nn.Module):
    """Products with int8 as results; numbers are such that float32 holds every one exactly."""

    def __init__(self, patterns: bool) -> None:
        super().__init__()
        scale, offset = 2.0 ** torch.randint(-6, -3, (24,)), torch.randint(-9, 9, (24,)).float()
        if patterns:
            scale, offset = torch.ops.npu.npu_trans_quant_param(scale, offset), None
        values = (torch.randint(-8, 8, (32, 24), dtype=torch.int8), scale, offset)
        self.weight, self.scale, self.offset = (
            None if v is None else nn.Parameter(v, requires_grad=False) for v in values
        )

    def forward(self, x: torch.Tensor, integers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_weight = torch.ops.npu.npu_weight_quant_batchmatmul(
            x,
            self.weight,
            torch.full((24,), 0.5),
            quant_scale=self.scale,
            quant_offset=self.offset,
            bias=torch.full((24,), 0.25, dtype=x.dtype),
        )
        by_both = torch.ops.npu.npu_quant_matmul(
            integers, self.weight, self.scale, offset=self.offset
        )
        return by_weight, by_both


@pytest.mark.parametrize("patterns", [False, True])
@torch.no_grad()
def test_results_of_int8_are_made_in_the_kernel(patterns, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    model = Narrow(patterns)
    fast = torch.compile(model, backend="torchair", fullgraph=True)
    for rows, dtype in ((2, torch.float32), (9, torch.float16)):
        x = (torch.randint(-16, 16, (rows, 32)) / 4).to(dtype)
        integers = torch.randint(-128, 128, (rows, 32), dtype=torch.int8)
        expected = model(x, integers)
        assert all(map(torch.equal, fast(x, integers), expected))
        assert all(len(y.unique()) > 4 and y.dtype == torch.int8 for y in expected)
    lines = capsys.readouterr().out.splitlines()
    units = [x.split("  ")[0] for x in lines if "BatchMatmul" in x and "AscendQuant" in x]
    assert units == ["matmul"] * 4 and not [x for x in lines if x.startswith("torch  ")]


@pytest.mark.parametrize("twice", [False, True])
def test_scales_of_graphs_made_by_hand(twice):
    x = torch.randn(5, 40)
    for dtype in (torch.float32, torch.float16):
        check_lowering(
            "AscendQuant",
            x.to(dtype),
            scale=7.5,
            offset=3.0,
            sqrt_mode=twice,
            round_mode="Round",
            dst_type=DataType.DT_INT8,
        )
    sums = torch.randint(-9000, 9000, (5, 40), dtype=torch.int32)
    for scales in (torch.rand(40), torch.rand(1)):
        for dtype, positive in ((DataType.DT_FLOAT, False), (DataType.DT_FLOAT16, True)):
            check_lowering(
                "AscendDequant",
                sums,
                (scales * 0.05).half(),
                sqrt_mode=twice,
                relu_flag=positive,
                dtype=dtype,
            )
    right = (torch.tensor([0.4, 100.0, -100.0]) * 2 + 1).round().clamp(-128, 127).to(torch.int8)
    with Graph("one", infer) as graph:
        data = Data(index=0, dtype=DataType.DT_FLOAT, shape=[3], placement="NPU")
        NetOutput([ge.AscendQuant(data, scale=2.0, offset=1.0)])
    (got,) = interpret(graph, [torch.tensor([0.4, 100.0, -100.0])])
    assert torch.equal(got, right)


# ---- weights as quantisers trace them ----


def scaled_sums(x, q, s, z):
    return (x @ q.t().to(x.dtype)) * s[:, :1].to(x.dtype).flatten() + 1


def scaled_rows(x, q, s, z):
    return x @ ((q.to(x.dtype) - z[:, :1].to(x.dtype)) * s[:, :1]).to(x.dtype).t() + 1


def scaled_groups(x, q, s, z):
    pieces = q.view(q.shape[0], s.shape[1], -1).to(x.dtype) - z[:, :, None].to(x.dtype)
    return x @ (pieces * s[:, :, None]).view(q.shape).to(x.dtype).t() + 1


class Traced(nn.Module):
    """A product with a weight [n, k] that is made of integers in every call."""

    def __init__(self, fn, q: Quantised) -> None:
        super().__init__()
        self.fn = fn
        values = (q.integers, q.scales, q.offsets)
        self.q, self.s, self.z = (nn.Parameter(v, requires_grad=False) for v in values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x, self.q, self.s, self.z)


@pytest.mark.parametrize("fn", [scaled_sums, scaled_rows, scaled_groups], ids=lambda f: f.__name__)
def test_dequantised_weights_become_quantised_products(fn, capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    for dtype, bits in ((torch.float32, 8), (torch.bfloat16, 4)):
        torch._dynamo.reset()
        model = Traced(fn, Quantised(70, 96, bits, 32, dtype, True))
        fast = torch.compile(model, backend="torchair", fullgraph=True)
        for rows in (1, 9):
            close(model, fast, torch.randn(rows, 96).to(dtype))
        assert "matmul    WeightQuantBatchMatmulV2 Add " in capsys.readouterr().out


def test_scales_of_other_dims_are_no_pattern(capsys, monkeypatch):
    monkeypatch.setenv("TORCHAIR_DEBUG", "3")
    model = Traced(
        lambda x, q, s, z: (x @ q.t().to(x.dtype)) * s[0, 0] + x @ (q.float() * s[:1, :1]).t(),
        Quantised(70, 96, 8, 32, torch.float32, True),
    )
    close(model, torch.compile(model, backend="torchair"), torch.randn(3, 96))
    told = capsys.readouterr().out
    assert "ScaledProductFusion declined" in told and "DequantisedWeightFusion declined" in told
    assert "WeightQuantBatchMatmulV2" not in told


def test_weights_of_a_product_are_seen_to_change_without_being_frozen():
    model = Traced(scaled_groups, Quantised(70, 96, 4, 32, torch.float32, True))
    fast, x = torch.compile(model, backend="torchair"), torch.randn(2, 96)
    close(model, fast, x)
    with torch.no_grad():
        model.s.mul_(3)
        model.z.sub_(2)
    close(model, fast, x)
    model.q.data.clamp_(-1, 100).mul_(9)
    close(model, fast, x)
