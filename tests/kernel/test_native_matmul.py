"""Matrix product kernels against float64, in every form, type, layout and width of vectors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from torchair.codegen.cpu.jit import host, run_kernel
from torchair.codegen.cpu.matmul.kernel import B, choose, matmul, product
from torchair.codegen.cpu.matmul.pack import PackPanels
from torchair.codegen.requests import MatMul, Product, stored
from torchair.codegen.sizes import Size, SizeArgument
from torchair.codegen.target import Generated, Kernel
from torchair.codegen.text.writer import KernelWriter, Machine
from widths import LIBRARIES, MACHINES, ROUNDING, TYPES

FIRST_FREE_WORD = 4  # after A, B, scratch and C


class Case:
    """One product: operands that lie between NaNs, so that reading too much shows."""

    def __init__(self, dtype: str, sizes: tuple[int, int, int, int], layout: str = "nk") -> None:
        self.dtype = dtype
        self.batch, self.m, self.n, self.k = sizes
        a, _, b = layout.rpartition("*")
        self.layout = b
        swapped_a, swapped_b = a == "km", b == "nk"
        self.a = self._operand(self.m, self.k, swapped_a, apart=a == "apart")
        self.b = self._operand(self.k, self.n, swapped_b, apart=b == "apart")
        self.c = torch.full((self.batch, self.m, self.n), 7.0, dtype=TYPES[dtype])

    def _operand(self, rows: int, columns: int, swapped: bool, apart: bool) -> torch.Tensor:
        shape = (columns, rows) if swapped else (rows, columns)
        step = 2 if apart else 1
        room = torch.full((self.batch, shape[0] + 2, step * shape[1] + 3), float("nan"))
        room = room.to(TYPES[self.dtype])
        inner = room[:, 1 : shape[0] + 1, 1 : step * shape[1] + 1 : step]
        inner.copy_(torch.randn(self.batch, *shape))
        return inner.transpose(1, 2) if swapped else inner

    def check(self) -> None:
        """Compare with the product in float64: the error of sums in float32, and rounding."""
        a, b = self.a.double(), self.b.double()
        right, weight = a @ b, a.abs() @ b.abs()
        unit = 1e-15 if self.dtype == "f64" else 5e-7
        allowed = unit * weight + 1.01 * ROUNDING[self.dtype] * right.abs()
        assert torch.all((self.c.double() - right).abs() <= allowed)


class Arguments:
    """Sizes of a spec: literals, or words of the argument block that are filled on the way."""

    def __init__(self, symbolic: bool) -> None:
        self.symbolic = symbolic
        self.values: list[int] = []

    def size(self, value: int) -> Size:
        if not self.symbolic:
            return value
        self.values.append(value)
        return SizeArgument(FIRST_FREE_WORD + len(self.values) - 1)

    def strides(self, tensor: torch.Tensor, unit: int | None) -> tuple[Size, Size, Size]:
        """All but the stride that is known to be 1."""
        return tuple(1 if i == unit else self.size(s) for i, s in enumerate(tensor.stride()))


def plain(
    spec: MatMul, machine: Machine, strides: tuple[Size, ...], label: str = "matmul"
) -> Generated:
    """The kernel that writes its results as they are to word 3."""
    given = "f64" if spec.dtype == "f64" else "f32"
    epilogue = stored((spec.batch, spec.m, spec.n), strides, spec.dtype, 3, given)
    return product(Product(spec, epilogue), machine, label)


def run(
    case: Case, bits: int = 512, threads: int = 1, symbolic: bool = False, packed=False
) -> Kernel:
    """Check a case, with B packed ahead of time if asked for. Returns the kernel."""
    machine, given = MACHINES[bits], Arguments(symbolic)
    sizes = [given.size(x) for x in (case.batch, case.m, case.n, case.k)]
    a_unit = 2 if case.a.stride(2) == 1 else None
    b_unit = {"nk": 1, "kn": 2, "apart": None}[case.layout]
    spec = MatMul(
        case.dtype,
        *sizes,
        given.strides(case.a, a_unit),
        given.strides(case.b, b_unit),
        case.layout if packed else "",
    )
    made = plain(spec, machine, given.strides(case.c, 2))
    operand = case.b
    assert packed == (B in made.pack)
    if packed:
        operand = made.pack[B](case.b[0].t() if case.layout == "nk" else case.b[0])
        case.b = case.b[:1].expand(case.b.shape)
    launch(made, case, operand, bits, threads, given.values)
    case.check()
    return made.kernel


def launch(made, case, operand, bits, threads, values):
    """Call a kernel with scratch memory of which every byte around must stay as it is."""
    scratch = made.scratch
    memory = torch.full((threads * scratch + 192,), 255, dtype=torch.uint8)
    start = 64 + -memory.data_ptr() % 64
    tensors = (case.a, operand, memory, case.c)
    words = [t.data_ptr() + (start if t is memory else 0) for t in tensors]
    run_kernel(LIBRARIES[bits], made.kernel, [*words, *values], threads)
    assert torch.all(memory[:start] == 255)
    assert torch.all(memory[start + threads * scratch :] == 255)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", MACHINES)
@pytest.mark.parametrize("layout", ["nk", "kn", "apart", "km*nk", "apart*kn", "km*apart"])
def test_layouts(dtype, bits, layout):
    for sizes in ((1, 3, 19, 37), (2, 17, 70, 33)):
        run(Case(dtype, sizes, layout), bits, threads=3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", MACHINES)
def test_packed(dtype, bits):
    for m, n, k, layout in ((1, 1101, 501, "nk"), (5, 64, 64, "kn"), (33, 100, 41, "nk")):
        run(Case(dtype, (1, m, n, k), layout), bits, threads=3, packed=True)
    run(Case(dtype, (2, 7, 40, 30), "kn"), bits, packed=True)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8])
def test_few_rows(m):
    for dtype, n, k in (("f32", 48, 256), ("f32", 33, 83), ("bf16", 48, 256), ("bf16", 33, 83)):
        run(Case(dtype, (1, m, n, k)), threads=3)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("bits", [512, 256])
@pytest.mark.parametrize("layout", ["nk", "kn", "km*nk"])
def test_long_sums_take_several_rounds(dtype, bits, layout):
    run(Case(dtype, (1, 40, 80, 3301), layout), bits, threads=3)
    run(Case(dtype, (1, 40, 80, 3301), layout), bits, packed=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("packed", [False, True])
def test_many_rows(dtype, layout, packed):
    run(Case(dtype, (1, 301, 72, 50), layout), threads=3, packed=packed)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("bits", MACHINES)
@pytest.mark.parametrize("layout", ["nk", "kn", "km*nk"])
def test_symbolic_sizes(dtype, bits, layout):
    """One kernel is right for all sizes."""
    sizes = [
        (1, 1, 40, 90),
        (2, 21, 70, 33),
        (1, 5, 1, 1),
        (1, 3, 20, 0),
        (2, 0, 5, 5),
        (1, 2, 0, 5),
    ]
    kernels = [run(Case(dtype, s, layout), bits, threads=3, symbolic=True) for s in sizes]
    assert len({kernel.entry for kernel in kernels}) == 1


@pytest.mark.parametrize("bits", MACHINES)
def test_symbolic_sizes_packed(bits):
    for dtype in ("f32", "bf16"):
        for sizes in ((1, 1, 70, 33), (1, 23, 64, 900), (1, 0, 5, 5), (1, 4, 3, 0)):
            run(Case(dtype, sizes), bits, threads=3, symbolic=True, packed=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(1, 0, 5, 5), (1, 5, 0, 5), (1, 5, 5, 0), (0, 5, 5, 5)])
def test_nothing_to_do(sizes, packed):
    for layout in ("nk", "kn"):
        if not (packed and sizes[0] == 0):
            run(Case("bf16", sizes, layout), packed=packed)
    if sizes[3] == 0:
        case = Case("f32", sizes)
        run(case)
        assert torch.all(case.c == 0)


def test_one_matrix_for_the_whole_batch():
    for layout in ("nk", "kn"):
        case = Case("f32", (3, 20, 30, 40), layout)
        case.b = case.b[:1].expand(case.b.shape)
        run(case, threads=3)


def test_results_may_lie_apart():
    case = Case("f32", (2, 9, 35, 20))
    case.c = torch.zeros(2, 35, 9).transpose(1, 2)
    machine = MACHINES[512]
    spec = MatMul("f32", 2, 9, 35, 20, case.a.stride(), case.b.stride())
    launch(plain(spec, machine, case.c.stride()), case, case.b, 512, 1, [])
    case.check()


@pytest.mark.parametrize("m", [1, 20])
def test_store_gets_every_result_once(m):
    """An epilogue that adds to what is there shows a result that comes twice, or never."""
    case = Case("f32", (2, m, 77, 30))
    case.c.fill_(1.0)
    lanes = MACHINES[512].lanes

    def accumulate(w: KernelWriter, place: tuple[str, str, str], vector: str, mask: str | None):
        batch, row, n = place
        index = w.add(w.mul(batch, str(m * 77)), w.add(w.mul(row, "77"), n))
        at = w.offset(w.pointer(3), "float", index)
        for lane in range(lanes):
            valid = w(f"extractelement {w.vector('i1')} {mask}, i64 {lane}") if mask else "true"
            with w.when(valid):
                to = w.offset(at, "float", str(lane))
                new = w(f"extractelement {w.vector('float')} {vector}, i64 {lane}")
                before = w(f"load float, ptr {to}")
                w.do(f"store float {w(f'fadd float {before}, {new}')}, ptr {to}")

    spec = MatMul("f32", 2, m, 77, 30, case.a.stride(), case.b.stride())
    launch(matmul(spec, MACHINES[512], accumulate), case, case.b, 512, 3, [])
    case.c -= 1.0
    weight = case.a.double().abs() @ case.b.double().abs()
    right = case.a.double() @ case.b.double()
    assert torch.all((case.c.double() - right).abs() <= 1e-6 * weight + 1e-6)


@pytest.mark.parametrize("bits", MACHINES)
@pytest.mark.parametrize("dtype", TYPES)
def test_pack_layout(bits, dtype):
    machine = MACHINES[bits]
    weight = torch.arange(1, 1 + 70 * 5).view(70, 5).remainder(97).to(TYPES[dtype])
    panels = PackPanels(machine, True)(weight)
    assert torch.equal(panels, PackPanels(machine, False)(weight.t().contiguous()))
    assert panels.data_ptr() % 64 == 0
    pair = 2 if dtype == "bf16" and machine.dot_bf16 else 1
    width = panels.shape[2] // pair
    assert width % machine.lanes == 0
    flat = panels.view(panels.shape[0], -1, width, pair).permute(0, 2, 1, 3).flatten(2)
    flat = flat.flatten(0, 1)
    assert torch.equal(flat[:70, :5], weight)
    assert flat.count_nonzero() == weight.count_nonzero()


def test_subnormals_and_nan_survive_rounding():
    case = Case("bf16", (1, 1, 16, 1))
    case.a.fill_(1.0)
    case.b.fill_(float("nan"))
    machine = MACHINES[256]
    spec = MatMul("bf16", 1, 1, 16, 1, case.a.stride(), case.b.stride())
    made = plain(spec, machine, case.c.stride())
    launch(made, case, case.b, 256, 1, [])
    assert torch.all(case.c.isnan())
    case.b.fill_(1e-39)
    launch(made, case, case.b, 256, 1, [])
    assert torch.equal(case.c, torch.full_like(case.c, 1e-39))


def form(m: Size, k: Size, b: tuple[Size, Size, Size], **more) -> str | None:
    spec = MatMul(more.pop("dtype", "f32"), 1, m, 768, k, (0, k, 1), b, **more)
    return choose(spec, replace(host(), bits=512, registers=32, dot_bf16=True)).known(m)


def test_choice_of_form():
    linear, plain = (0, 1, 768), (0, 768, 1)
    assert form(1, 768, linear, constant="nk") == "panel"
    assert form(64, 64, linear, constant="nk") == "panel"
    assert form(1, 64, linear, constant="nk") == "dot"  # one row reads few weights as they are
    assert form(1, 768, linear) == form(64, 768, linear) == "dot"
    assert form(512, 64, linear) == form(512, 768, linear) == "copy"
    assert form(SizeArgument(4), 768, linear) == "dot"
    assert form(SizeArgument(4), 64, linear) is None
    assert form(1, 768, plain) == form(512, 768, plain) == "direct"
    assert form(4, 768, plain, dtype="bf16") == "direct"
    assert form(64, 768, plain, dtype="bf16") == "copy"
    assert form(4, 768, (0, 1536, 2)) == "copy"


@pytest.mark.parametrize("packed", [False, True])
def test_other_processors_get_plain_code(packed):
    """No instruction of one family of processors unless the machine has it."""
    machine = Machine("generic", "", 128, 32, fma=True, arch="aarch64")
    for dtype in TYPES:
        spec = MatMul(dtype, 1, 9, 33, 65, (0, 65, 1), (0, 1, 65), "nk" if packed else "")
        kernel = plain(spec, machine, (0, 33, 1)).kernel
        assert "llvm.x86" not in kernel.text + "".join(kernel.declarations)


def test_scratch_stays_small():
    for dtype in TYPES:
        spec = MatMul(
            dtype,
            1,
            SizeArgument(4),
            50,
            SizeArgument(5),
            (0, SizeArgument(5), 1),
            (0, 1, SizeArgument(5)),
        )
        assert 0 < plain(spec, host(), (0, 50, 1)).scratch <= 256 * 1024
    spec = MatMul("f32", 1, 4, 64, 512, (0, 512, 1), (0, 1, 512))
    assert plain(spec, host(), (0, 64, 1)).scratch == 0


def test_same_product_same_kernel():
    spec = MatMul("f32", 1, 8, 64, 64, (0, 64, 1), (0, 1, 64))
    one, two = (plain(spec, host(), (0, 64, 1), "product").kernel for _ in range(2))
    assert one == two
    assert re.fullmatch(r"product_[0-9a-f]{16}", one.entry)


@pytest.mark.parametrize(("m", "lines"), [(1, 4), (3, 4), (4, 1)])
def test_few_rows_fetch_every_line_of_a_panel_ahead(m, lines):
    spec = MatMul("f32", 1, m, 1024, 512, (0, 512, 1), (0, 1, 512), "nk")
    text = plain(spec, MACHINES[512], (0, 1024, 1)).kernel.text
    assert text.count("call void @llvm.prefetch") == lines


def test_rows_that_vary_fetch_as_few_rows_do():
    spec = MatMul("f32", 1, SizeArgument(4), 1024, 512, (0, 512, 1), (0, 1, 512), "nk")
    text = plain(spec, MACHINES[512], (0, 1024, 1)).kernel.text
    assert text.count("call void @llvm.prefetch") == 1 + 4 + 4  # tiles of 4, 2 and 1 rows
