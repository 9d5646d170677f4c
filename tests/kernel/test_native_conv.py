"""Native convolution and pooling against float64 references and torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from torchair.codegen.cpu.conv.kernel import WEIGHTS, conv, convolution
from torchair.codegen.cpu.conv.plan import output_size
from torchair.codegen.cpu.conv.winograd import patches
from torchair.codegen.cpu.jit import Library, host, module_text, run_kernel
from torchair.codegen.cpu.pool import pool
from torchair.codegen.requests import Conv, Convolution, Pool, stored
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.target import Generated
from torchair.codegen.text.writer import KernelWriter, Machine

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"f32": 2e-5, "bf16": 3e-2, "f16": 4e-3}
NHWC, NCHW, MIXED = (0, 2, 3, 1), (0, 1, 2, 3), (1, 2, 0, 3)
WORDS = [SizeArgument(index) for index in range(4, 20)]


def narrower(bits: int) -> Machine:
    """This machine seen as one with fewer and shorter vectors."""
    return dataclasses.replace(host(), bits=min(bits, host().bits), registers=16, dot_bf16=False)


@functools.cache
def library(machine: Machine) -> Library:
    return Library(machine)


def arranged(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same values, dense in this order of dimensions."""
    back = [order.index(k) for k in range(4)]
    return x.permute(*order).contiguous().permute(*back)


def strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    n, c, h, w = x.stride()
    return n, c, h, w


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution to try: sizes (n, c, h, w), output channels, and the rest of its spec."""

    sizes: tuple[int, int, int, int]
    out: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def inputs(self, dtype: str, order: Sequence[int] = NHWC) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(hash(self) % 1000)
        shape = (self.out, self.sizes[1] // self.groups, *self.kernel)
        x = torch.randn(self.sizes, generator=generator).to(DTYPES[dtype])
        weight = torch.randn(shape, generator=generator)
        weight /= (shape[1] * shape[2] * shape[3]) ** 0.5
        return arranged(x, order), weight.to(DTYPES[dtype])

    def spec(self, dtype: str, x: Sequence[Size], sizes: Sequence[Size] | None = None) -> Conv:
        n, c, h, w = self.sizes
        n, h, w = sizes if sizes is not None else (n, h, w)
        return Conv(
            dtype,
            n,
            c,
            h,
            w,
            self.out,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            tuple(x),
        )

    def reference(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In float64, group by group, each as one matrix product."""
        top, bottom, left, right = self.padding
        wide = F.pad(x.double(), (left, right, top, bottom))
        taps = F.unfold(wide, self.kernel, self.dilation, 0, self.stride)
        taps = taps.unflatten(1, (self.groups, -1))
        weights = weight.double().reshape(self.groups, self.out // self.groups, -1)
        sums = torch.einsum("gok,ngkp->ngop", weights, taps).flatten(1, 2)
        high = (wide.shape[2] - (self.kernel[0] - 1) * self.dilation[0] - 1) // self.stride[0] + 1
        return sums.unflatten(2, (high, -1))


PAD1 = (1, 1, 1, 1)
CASES = {
    "3x3": Case((1, 16, 14, 14), 64, (3, 3), padding=PAD1),
    "patches": Case((2, 32, 9, 8), 40, (3, 3), padding=(1, 0, 2, 1)),
    "many patches": Case((1, 48, 29, 31), 64, (3, 3), padding=PAD1),
    "stem": Case((2, 3, 33, 31), 40, (7, 7), (2, 2), (3, 3, 3, 3)),
    "narrow image": Case((2, 16, 7, 3), 33, (3, 3), padding=PAD1),
    "1x1": Case((1, 8, 9, 5), 16, (1, 1)),
    "1x1 strided": Case((2, 8, 9, 17), 70, (1, 1), (2, 2)),
    "dilated": Case((1, 12, 13, 17), 24, (3, 2), (1, 2), (0, 1, 2, 1), (2, 3)),
    "wide dilation": Case((1, 8, 20, 20), 16, (3, 3), (2, 2), (4, 4, 4, 4), (4, 4)),
    "groups": Case((2, 12, 13, 17), 24, (3, 3), padding=PAD1, groups=4),
    "groups of odd size": Case((1, 9, 8, 20), 51, (3, 3), padding=PAD1, groups=3),
    "in place": Case((2, 24, 9, 17), 20, (3, 3), (1, 2), dilation=(2, 1)),
    "groups in place": Case((2, 24, 6, 5), 36, (2, 3), groups=3),
    "depthwise": Case((2, 19, 13, 17), 19, (3, 3), padding=PAD1, groups=19),
    "depthwise 5x5": Case((1, 32, 9, 30), 32, (5, 5), (2, 1), (2, 2, 2, 2), groups=32),
    "depth multiplied": Case((1, 5, 13, 17), 10, (3, 3), padding=PAD1, groups=5),
    "one dimension": Case((1, 7, 1, 50), 5, (1, 5), padding=(0, 0, 2, 2)),
    "mostly padding": Case((1, 4, 3, 3), 4, (5, 5), padding=(3, 3, 3, 3)),
    "many channels": Case((1, 1024, 3, 4), 16, (1, 1)),
    "one channel": Case((1, 1, 12, 19), 1, (3, 3), padding=PAD1),
    "one pixel": Case((1, 6, 1, 1), 35, (1, 1)),
    "empty batch": Case((0, 6, 4, 4), 8, (3, 3)),
}


def plain(spec: Conv, dtype: str, out: Sequence[Size], machine: Machine) -> Generated:
    """The kernel that writes its results as they are to word 3."""
    high, wide = spec.results or (SizeArgument(62), SizeArgument(63))
    axes = (spec.batch, spec.out_channels, high, wide)
    return convolution(Convolution(spec, stored(axes, tuple(out), dtype, 3)), machine, "conv")


def compute(
    made: Generated,
    x: torch.Tensor,
    weight: torch.Tensor,
    result: torch.Tensor,
    machine: Machine,
    threads: int = 1,
    words: Sequence[int] = (),
) -> None:
    """Run the kernel with the result in word 3. Scratch starts as NaN: none of it may be used."""
    scratch = torch.full((max(64, threads * made.scratch),), 255, dtype=torch.uint8)
    packed = made.pack[WEIGHTS](weight)
    assert packed.data_ptr() % 64 == scratch.data_ptr() % 64 == 0
    addresses = [t.data_ptr() for t in (x, packed, scratch, result)]
    run_kernel(library(machine), made.kernel, [*addresses, *words], threads)


def convolve(
    case: Case,
    dtype: str,
    order: Sequence[int],
    machine: Machine,
    threads: int = 1,
    winograd: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our result and the reference."""
    x, weight = case.inputs(dtype, order)
    spec = dataclasses.replace(case.spec(dtype, strides(x)), winograd=winograd)
    result = arranged(torch.full(output_size(spec), 7.0).to(DTYPES[dtype]), NHWC)
    compute(plain(spec, dtype, strides(result), machine), x, weight, result, machine, threads)
    return result, case.reference(x, weight)


def close(result: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(result.double(), wanted, rtol=limit, atol=limit)


FORMS = {
    "f32 nhwc": ("f32", NHWC), "f32 nchw": ("f32", NCHW), "f32 mixed": ("f32", MIXED),
    "bf16 nhwc": ("bf16", NHWC), "bf16 nchw": ("bf16", NCHW), "f16 nhwc": ("f16", NHWC),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_conv(name, form):
    dtype, order = FORMS[form]
    close(*convolve(CASES[name], dtype, order, host()), dtype)


@pytest.mark.parametrize("bits", [256, 128])
@pytest.mark.parametrize("name", CASES)
def test_conv_with_shorter_vectors(name, bits):
    close(*convolve(CASES[name], "f32", NHWC, narrower(bits)), "f32")
    order = {256: NCHW, 128: NHWC}[bits]
    close(*convolve(CASES[name], "bf16", order, narrower(bits)), "bf16")


@pytest.mark.parametrize("name", ["3x3", "many patches", "stem", "groups", "depthwise", "1x1"])
def test_threads_share_the_work(name):
    one, _ = convolve(CASES[name], "f32", NHWC, host())
    for threads in (3, 50):
        several, _ = convolve(CASES[name], "f32", NHWC, host(), threads)
        assert torch.equal(one, several)


@pytest.mark.parametrize("winograd", [0, 2, 4])
@pytest.mark.parametrize("channels", [32, 128])
def test_rounding_error_of_patches(channels, winograd):
    case = Case((1, channels, 17, 18), channels, (3, 3), padding=PAD1)
    result, wanted = convolve(case, "f32", NHWC, host(), winograd=winograd)
    assert (result - wanted).abs().max() < {0: 1e-5, 2: 1e-5, 4: 3e-5}[winograd]
    spec = dataclasses.replace(case.spec("f32", (0, 1, 0, 0)), winograd=winograd)
    cut = patches(spec, host())
    assert (cut.m if cut else 0) == winograd


@pytest.mark.parametrize("order", [NHWC, NCHW], ids=["nhwc", "nchw"])
@pytest.mark.parametrize("name", ["many patches", "stem", "1x1 strided", "dilated", "depthwise"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_kernel_for_all_sizes(dtype, name, order):
    case = CASES[name]
    n, h, w, x0, x1, x2, y0, y2 = WORDS[:8]
    known = (x0, 1, x2, case.sizes[1]) if order == NHWC else (x0, x1, x2, 1)
    spec = case.spec(dtype, known, (n, h, w))
    made = plain(spec, dtype, (y0, 1, y2, case.out), host())
    for batch, high, wide in ((1, 9, 11), (2, 30, 5), (3, 8, 57)):
        sized = dataclasses.replace(case, sizes=(batch, case.sizes[1], high, wide))
        x, weight = sized.inputs(dtype, order)
        shape = output_size(sized.spec(dtype, strides(x)))
        result = arranged(torch.full(shape, 7.0).to(DTYPES[dtype]), NHWC)
        words = [batch, high, wide, *x.stride()[:3], result.stride(0), result.stride(2)]
        compute(made, x, weight, result, host(), 3, words)
        close(result, sized.reference(x, weight), dtype)


@pytest.mark.parametrize("wide", (1, 5, 32, 33, 57))
@pytest.mark.parametrize("name", ("3x3", "stem", "groups", "depthwise", "one channel"))
def test_one_kernel_for_all_heights_writes_nothing_behind_a_row(name, wide):
    """The width is known, and no multiple of what a tile has: memory behind stays as it is."""
    case = CASES[name]
    n, h, x0, _, x2, y0, y2 = WORDS[:7]
    spec = case.spec("f32", (x0, 1, x2, case.sizes[1]), (n, h, wide))
    made = plain(spec, "f32", (y0, 1, y2, case.out), host())
    for high in (7, 12):
        sized = dataclasses.replace(case, sizes=(1, case.sizes[1], high, wide))
        x, weight = sized.inputs("f32")
        _, out, rows, columns = output_size(sized.spec("f32", strides(x)))
        memory = torch.full((out * rows * columns + 64 * out,), 7.0)
        result = memory[: out * rows * columns].view(1, rows, columns, out).permute(0, 3, 1, 2)
        words = [1, high, *x.stride()[:3], result.stride(0), result.stride(2)]
        compute(made, x, weight, result, host(), 1, words)
        close(result, sized.reference(x, weight), "f32")
        assert (memory[out * rows * columns :] == 7.0).all()


@pytest.mark.parametrize("name", CASES)
def test_each_result_is_stored_once(name):
    """A store that counts: memory of the result grows by one for each lane it is given."""
    case = CASES[name]
    x, weight = case.inputs("f32")
    spec = case.spec("f32", strides(x))
    n, out, high, wide = output_size(spec)
    lanes = host().lanes
    counts = torch.zeros(n, high, wide, out + lanes)

    def count(
        w: KernelWriter, at: tuple[str, str, str, str], vector: str, mask: str | None
    ) -> None:
        sizes = (high * wide * (out + lanes), 1, wide * (out + lanes), out + lanes)
        offset = "0"
        for index, size in zip(at, sizes, strict=True):
            offset = w.add(offset, w.mul(index, str(size)))
        place, kind = w.offset(w.pointer(3), "float", offset), w.vector("float")
        one = "splat (float 1.0)"
        if mask is not None:
            one = w(f"select {w.vector('i1')} {mask}, {kind} {one}, {kind} zeroinitializer")
        old = w(f"load {kind}, ptr {place}, align 4")
        w.do(f"store {kind} {w(f'fadd {kind} {old}, {one}')}, ptr {place}, align 4")

    compute(conv(spec, host(), count), x, weight, counts, host(), 3)
    assert bool((counts[..., :out] == 1).all())
    assert bool((counts[..., out:] == 0).all())


def test_result_in_another_layout():
    case = CASES["narrow image"]
    x, weight = case.inputs("f32")
    spec = case.spec("f32", strides(x))
    result = torch.zeros(output_size(spec))
    compute(plain(spec, "f32", strides(result), host()), x, weight, result, host())
    close(result, case.reference(x, weight), "f32")


def test_input_at_any_address():
    case = CASES["many patches"]
    x, weight = case.inputs("f32")
    moved = torch.empty(x.numel() + 1)[1:].as_strided(x.shape, x.stride()).copy_(x)
    spec = case.spec("f32", strides(x))
    result = arranged(torch.empty(output_size(spec)), NHWC)
    compute(plain(spec, "f32", strides(result), host()), moved, weight, result, host())
    close(result, case.reference(x, weight), "f32")


def test_infinity_stays_in_its_window():
    case = Case((1, 32, 9, 10), 32, (3, 3), padding=PAD1)
    x, weight = case.inputs("f32")
    x[0, 3, 4, 5] = float("inf")
    spec = dataclasses.replace(case.spec("f32", strides(x)), winograd=0)
    result = arranged(torch.empty(output_size(spec)), NHWC)
    compute(plain(spec, "f32", strides(result), host()), x, weight, result, host())
    assert torch.equal(result.isinf(), case.reference(x, weight).isinf())


def test_results_round_to_nearest():
    """A depthwise product with one hands values through, so that only the rounding is seen."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(1))
    special = torch.tensor([0x7F800000, 0x7F7FFFFF, 0x00018000, 0x7F800001, 0x3F808000, 0x3F818000])
    values = torch.cat([bits, special, torch.zeros(26, dtype=torch.int64)]).to(torch.int32)
    x = arranged(values.view(torch.float32).view(1, 32, 129, 1), NHWC)
    case = Case((1, 32, 129, 1), 32, (1, 1), groups=32)
    for dtype in ("bf16", "f16"):
        result = arranged(torch.empty(x.shape, dtype=DTYPES[dtype]), NHWC)
        made = plain(case.spec("f32", strides(x)), dtype, strides(result), host())
        compute(made, x, torch.ones(32, 1, 1, 1), result, host())
        torch.testing.assert_close(result, x.to(DTYPES[dtype]), rtol=0, atol=0, equal_nan=True)


def test_generated_text_is_valid_for_other_processors():
    import llvmlite.binding as llvm

    other = Machine("generic", "", 128, 32, fma=True, arch="aarch64")
    for case, dtype in itertools.product(CASES.values(), DTYPES):
        x, _ = case.inputs(dtype)
        made = plain(case.spec(dtype, strides(x)), dtype, (1, 1, 1, 1), other).kernel
        assert "x86" not in made.text
        llvm.parse_assembly(module_text([made], other)).verify()


def test_sizes_must_be_known_for_the_output_size():
    case = CASES["1x1"]
    with pytest.raises(ValueError, match="run time"):
        output_size(case.spec("f32", (1, 1, 1, 1), (1, WORDS[0], 5)))


# ---- pooling


@dataclasses.dataclass(frozen=True)
class Pooled:
    """A pooling to try, as the arguments of torch."""

    sizes: tuple[int, int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil: bool = False

    def wanted(
        self, kind: str, x: torch.Tensor, counted: bool, divisor: int | None
    ) -> torch.Tensor:
        around = (self.kernel, self.stride, self.padding)
        if kind == "max":
            return F.max_pool2d(x, *around, self.dilation, self.ceil)
        return F.avg_pool2d(x, *around, self.ceil, counted, divisor)


POOLS = {
    "3x3": Pooled((1, 64, 14, 14), (3, 3), (2, 2), (1, 1)),
    "dense": Pooled((2, 5, 9, 40), (3, 3), (1, 1), (1, 1)),
    "rounded up": Pooled((2, 70, 9, 13), (3, 2), (2, 3), (1, 1), ceil=True),
    "2x2": Pooled((1, 3, 20, 51), (2, 2), (2, 2), ceil=True),
    "dilated": Pooled((1, 33, 20, 50), (3, 3), (2, 1), (1, 1), (2, 2)),
    "one channel": Pooled((3, 1, 12, 70), (3, 3), (2, 2), (1, 1)),
    "whole image": Pooled((1, 100, 7, 7), (7, 7), (7, 7)),
    "wide stride": Pooled((1, 3, 8, 200), (1, 5), (5, 5), (0, 2)),
    "empty batch": Pooled((0, 3, 8, 8), (2, 2), (2, 2)),
}


def pooled(
    case: Pooled,
    kind: str,
    dtype: str,
    orders: Sequence[Sequence[int]],
    machine: Machine,
    counted: bool = True,
    divisor: int | None = None,
    at_run_time: bool = False,
    threads: int = 1,
) -> None:
    """Pool random values, some of them not finite for a maximum, and compare with torch."""
    x = torch.randn(case.sizes, generator=torch.Generator().manual_seed(3)).to(DTYPES[dtype])
    if kind == "max":
        x.view(-1)[::7], x.view(-1)[::11] = float("nan"), -float("inf")
    x = arranged(x, orders[0])
    wanted = case.wanted(kind, x, counted, divisor)
    result = arranged(torch.full(wanted.shape, 7.0).to(DTYPES[dtype]), orders[1])
    sizes: list[Size] = [*x.shape, *wanted.shape[2:], *x.stride(), *result.stride()]
    words = [x.data_ptr(), result.data_ptr()]
    if at_run_time:
        words += [size for size in sizes if isinstance(size, int)]
        sizes = [
            size if k > 5 and size == 1 else SizeArgument(k + 2) for k, size in enumerate(sizes)
        ]
    (top, left), (n, c, h, w, high, wide) = case.padding, sizes[:6]
    spec = Pool(
        kind,
        dtype,
        n,
        c,
        h,
        w,
        high,
        wide,
        case.kernel,
        case.stride,
        (top, top, left, left),
        case.dilation,
        tuple(sizes[6:10]),
        tuple(sizes[10:]),
        counted,
        divisor,
    )
    run_kernel(library(machine), pool(spec, machine).kernel, words, threads)
    limit = 1e-6 if dtype == "f32" else 1e-2
    torch.testing.assert_close(result, wanted, rtol=limit, atol=limit, equal_nan=True)


LAYOUTS = {
    "nhwc": (NHWC, NHWC),
    "nchw": (NCHW, NCHW),
    "to nchw": (NHWC, NCHW),
    "mixed": (MIXED, NHWC),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("name", POOLS)
def test_pool(name, kind, dtype, layout):
    if kind == "max" or POOLS[name].dilation == (1, 1):
        pooled(POOLS[name], kind, dtype, LAYOUTS[layout], host())


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", POOLS)
def test_pool_with_sizes_at_run_time_and_threads(name, layout):
    pooled(POOLS[name], "max", "f32", LAYOUTS[layout], host(), at_run_time=True, threads=3)


@pytest.mark.parametrize("bits", [256, 128])
@pytest.mark.parametrize("name", POOLS)
def test_pool_with_shorter_vectors(name, bits):
    pooled(POOLS[name], "max", "bf16", LAYOUTS["nhwc"], narrower(bits))
    pooled(POOLS[name], "max", "f32", LAYOUTS["nchw"], narrower(bits))


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(("counted", "divisor"), [(False, None), (True, 5), (False, 3)])
def test_what_an_average_divides_by(counted, divisor, layout):
    for name in ("3x3", "dense", "rounded up", "2x2"):
        pooled(POOLS[name], "avg", "f32", LAYOUTS[layout], host(), counted, divisor)
