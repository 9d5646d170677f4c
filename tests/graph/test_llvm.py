"""LLVM of several versions: which ones are taken, and text that none of them may choke on."""

from __future__ import annotations

import llvmlite
import pytest
import torch

from nest_plain import noise
from torchair.codegen.cpu.jit import Library, compile_all, host, run_kernel
from torchair.codegen.cuda.jit import Entry, describe, module_text, ptx
from torchair.codegen.llvm import binding, parse
from torchair.codegen.target import BrokenKernels, Kernel
from torchair.codegen.text.memory import masked_load, masked_store
from torchair.codegen.text.writer import KernelWriter, prefix_mask
from torchair.versions import release

SQUARED = "define double @f(double %x) {\n  %y = fmul double %x, %x\n  ret double %y\n}"
# LLVM 20 asserts when it generates code for this, LLVM 22 takes it.
NEWER_FORM = """declare <4 x i32> @llvm.masked.load.v4i32.p0(ptr, <4 x i1>, <4 x i32>)
define <4 x i32> @f(ptr %p, <4 x i1> %m, <4 x i32> %x) {
  %v = call <4 x i32> @llvm.masked.load.v4i32.p0(ptr %p, <4 x i1> %m, <4 x i32> %x)
  ret <4 x i32> %v
}"""
WRONG_TYPE = """declare float @llvm.sqrt.f32(i32)
define float @f(i32 %x) {
  %y = call float @llvm.sqrt.f32(i32 %x)
  ret float %y
}"""
NO_INTRINSIC = "declare void @llvm.no.such.thing()\n" + SQUARED


def test_versions_are_compared_by_number() -> None:
    assert release("0.47.0") < release("0.50.0rc1") < release("0.100")


@pytest.fixture
def old_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvmlite, "__version__", "0.46.0")
    binding.cache_clear()
    yield
    binding.cache_clear()


def test_older_ones_are_refused_in_one_sentence(old_llvmlite: None) -> None:
    with pytest.raises(ImportError, match=r"llvmlite 0\.46\.0 is too old .* 0\.47 or newer"):
        binding()


@pytest.mark.parametrize("text", [WRONG_TYPE, NO_INTRINSIC, "not LLVM's language"])
def test_bad_text_raises_before_code_is_generated(text: str) -> None:
    with pytest.raises(RuntimeError):
        parse(text)


def test_text_of_newer_versions_never_ends_the_process() -> None:
    if binding().llvm_version_info[0] < 22:
        with pytest.raises(RuntimeError, match="non-immediate"):
            parse(NEWER_FORM)
    else:
        parse(NEWER_FORM)


def test_a_broken_kernel_is_named_and_others_compile() -> None:
    good = Kernel.of("good", SQUARED.replace("@f", "@ENTRY"), [])
    bad = Kernel.of("bad", WRONG_TYPE.split("\n", 1)[1].replace("@f", "@ENTRY"), ())
    bad = Kernel(bad.entry, bad.text, frozenset({WRONG_TYPE.split("\n", 1)[0]}))
    library = Library()
    with pytest.raises(BrokenKernels) as caught:
        compile_all(library, [good, bad])
    assert list(caught.value.errors) == [bad.entry] and good in library


def test_masked_memory_operations_run() -> None:
    machine = host()
    writer, lanes = KernelWriter(machine), machine.lanes
    mask = prefix_mask(lanes, lanes - 1)
    found = masked_load(writer, "float", writer.pointer(0), mask, lanes, 4)
    masked_store(writer, "float", found, writer.pointer(1), mask, lanes, 4)
    given, result = noise(lanes, "f32"), noise(lanes, "f32", 1)
    last = result[-1]
    run_kernel(Library(), writer.kernel("copy"), [given.ctypes.data, result.ctypes.data])
    assert (result[:-1] == given[:-1]).all() and result[-1] == last


def test_notes_on_gpu_kernels_arrive() -> None:
    text = "define internal void @ENTRY(i64 %block, i64 %blocks) {\n  ret void\n}\n"
    kernel = Kernel.of("empty", text, [])
    entry = Entry((kernel,), 96, 3)
    assert module_text([entry]).count("nvvm.annotations") == 1
    text = ptx([entry], describe((9, 0), 132))
    assert ".maxntid 96" in text and ".minnctapersm 3" in text


def test_beside_numba() -> None:
    numba = pytest.importorskip("numba")
    twice = numba.njit(lambda x: x * 2.0)
    assert twice(4.0) == 8.0
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1), backend="torchair")
    x = torch.randn(3, 20)
    torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))
    assert numba.njit(lambda x: x + 1.0)(4.0) == 5.0
