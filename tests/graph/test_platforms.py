"""What depends on the operating system. macOS and Windows are not here: functions of theirs have
stand-ins, and object code for them is made and read."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchair
from object_files import needed
from torchair.codegen.cpu import jit, layouts, openmp
from torchair.codegen.cpu.driver import BARRIER, HEADER, STEP, driver
from torchair.codegen.cpu.jit import Library, module_text
from torchair.codegen.cpu.libraries import (
    linux_libraries,
    loaded_libraries,
    macos_libraries,
    windows_libraries,
)
from torchair.codegen.cpu.openmp import Regions, ThreadPool
from torchair.codegen.cpu.processors import processor_named
from torchair.codegen.llvm import address, binding, parse
from torchair.codegen.target import Kernel
from torchair.engine import packaged
from torchair.torch_private import c_symbols

# ---- libraries of a process


def test_linux_tells_libraries_by_the_map_of_memory(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1  /opt/my env/torch/lib/libgomp.so.1\n"
        "7f01-7f02 r--p 00000000 08:01 1  /opt/my env/torch/lib/libgomp.so.1\n"
        "7f02-7f03 rw-p 00000000 00:00 0  [heap]\n7f03-7f04 rw-p 00000000 00:00 0\n"
    )
    assert linux_libraries(maps) == ["/opt/my env/torch/lib/libgomp.so.1"]
    assert linux_libraries(tmp_path / "missing") == []


class Function:
    """A function of a library: it takes the types of arguments that are set on it."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


def test_macos_tells_libraries_by_its_linker() -> None:
    images = [b"/usr/lib/libSystem.B.dylib", None, b"/env/torch/lib/libomp.dylib"]
    dyld = {
        "_dyld_image_count": Function(lambda: len(images)),
        "_dyld_get_image_name": Function(lambda k: images[k]),
    }
    assert macos_libraries(dyld) == ["/usr/lib/libSystem.B.dylib", "/env/torch/lib/libomp.dylib"]


class Kernel32:
    """Windows' kernel, with a library that is loaded while it is asked."""

    def __init__(self, paths: list[str]) -> None:
        self.paths, self.asked = paths, 0
        self.GetCurrentProcess = Function(lambda: -1)
        self.K32EnumProcessModules = Function(self.enumerate)
        self.GetModuleFileNameW = Function(self.name)

    def enumerate(self, process: int, modules: Any, room: int, needed: Any) -> bool:
        self.asked += 1
        count = len(self.paths) - (self.asked == 1)
        for k in range(min(count, room // 8)):
            modules[k] = 100 + k
        ctypes.cast(needed, ctypes.POINTER(ctypes.c_uint32))[0] = 8 * count
        return process == -1

    def name(self, module: int, path: Any, room: int) -> int:
        path.value = self.paths[module - 100]
        return len(path.value)


def test_windows_tells_libraries_by_handles() -> None:
    paths = [r"C:\python\python.exe", r"C:\env\torch\lib\libiomp5md.dll", r"C:\env\new.dll"]
    assert windows_libraries(Kernel32(paths)) == paths


def test_systems_that_are_not_known_have_no_libraries() -> None:
    assert loaded_libraries("Plan9") == []
    assert any("torch" in path for path in loaded_libraries())


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["/usr/lib/libgomp.so.1", "/a/torch/lib/libgomp.so.1"], "/a/torch/lib/libgomp.so.1"),
        (["/opt/libomp/lib/libz.dylib", "/a/torch/lib/libomp.dylib"], "/a/torch/lib/libomp.dylib"),
        ([r"C:\libomp\z.dll", r"C:\a\torch\lib\libiomp5md.dll"], r"C:\a\torch\lib\libiomp5md.dll"),
    ],
)
def test_the_pool_is_torchs_own(
    paths: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "loaded_libraries", lambda: paths)
    found = openmp._loaded_pools()
    assert found[0] == chosen and all("z." not in p for p in found)


@pytest.mark.parametrize(
    ("system", "file"),
    [("Linux", "libc10.so"), ("Darwin", "libc10.dylib"), ("Windows", "c10.dll")],
)
def test_files_of_torch_have_names_of_the_system(
    system: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(c_symbols.ctypes, "CDLL", lambda path: opened.append(Path(path).name))
    c_symbols._library.__wrapped__("c10")
    assert opened == [file]


def test_objects_are_read_in_python_on_systems_that_were_not_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert layouts.self_test() is None
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert layouts.refusal() == "Darwin on arm64 was not tested"
    monkeypatch.setenv("TORCHAIR_LAYOUT_PROBES", "1")
    assert layouts.refusal() is None


def test_processors_whose_features_llvm_cannot_tell_get_code_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise RuntimeError("failed to get host cpu features")

    monkeypatch.setattr(binding(), "get_host_cpu_features", fails)
    monkeypatch.delenv("TORCHAIR_CPU", raising=False)
    found = jit.host.__wrapped__()
    assert (found.bits, found.dot_bf16, found.amx_bf16) == (128, False, False)
    assert found.name == binding().get_host_cpu_name()


# ---- parallel regions by the functions of LLVM's library

_LIKE_LLVM = """
@NAME.count = internal global i32 0
define void @NAME.push(ptr %place, i32 %me, i32 %threads) {
  store i32 %threads, ptr @NAME.count
  ret void
}
define i32 @NAME.me(ptr %place) {
  ret i32 0
}
define internal void @NAME.each(ptr %call) {
  %number = alloca i32
  store i32 0, ptr %number
  %task = load ptr, ptr %call
  %b = getelementptr ptr, ptr %call, i64 1
  %body = load ptr, ptr %b
  %d = getelementptr ptr, ptr %call, i64 2
  %data = load ptr, ptr %d
  call void %task(ptr %number, ptr %number, ptr %body, ptr %data)
  ret void
}
define void @NAME.fork(ptr %place, i32 %count, ptr %task, ptr %body, ptr %data) {
  %call = alloca [3 x ptr]
  store ptr %task, ptr %call
  %b = getelementptr ptr, ptr %call, i64 1
  store ptr %body, ptr %b
  %d = getelementptr ptr, ptr %call, i64 2
  store ptr %data, ptr %d
  %threads = load i32, ptr @NAME.count
  call void @GOMP_parallel(ptr @NAME.each, ptr %call, i32 %threads, i32 0)
  ret void
}
"""
"""The functions of LLVM's library by means of GCC's, which is here."""


@pytest.fixture
def like_llvm() -> Iterator[None]:
    """The symbols of a pool with LLVM's functions, known to the JIT."""
    if openmp.thread_pool() is None or platform.system() != "Linux":
        pytest.skip("no OpenMP library of GCC is in this process")
    openmp.bind_threads()
    library = Library()
    text = _LIKE_LLVM.replace("NAME", "like_llvm")
    parts = ("fork", "me", "push")
    kernel = Kernel("like_llvm", text, ("declare void @GOMP_parallel(ptr, ptr, i32, i32)",))
    library._link([f"like_llvm.{p}" for p in parts], jit._objects([kernel], library.machine))
    for name, part in zip(Regions.LLVM.value, parts, strict=True):
        binding().add_symbol(name, library._addresses[f"like_llvm.{part}"])
    yield
    for name in Regions.LLVM.value:
        binding().add_symbol(name, 0)


@pytest.mark.usefixtures("like_llvm")
def test_a_program_runs_on_the_threads_of_llvms_library() -> None:
    library, seen = Library(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    def step(tid: int, count: int, words: int) -> None:
        seen.append((words, tid, count))

    code = driver(library.machine, Regions.LLVM)
    assert "GOMP" not in code.text
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library.address(code))
    place = ctypes.cast(step, ctypes.c_void_p).value or 0
    steps = (ctypes.c_int64 * (2 * STEP))(place, 1, 0, place, 2, BARRIER)
    counter = (ctypes.c_int64 * 8)()
    program = (ctypes.c_int64 * HEADER)(
        ctypes.addressof(steps), 2, 2, 0, 0, 0, ctypes.addressof(counter), 0
    )
    for _ in range(20):
        seen.clear()
        run(ctypes.addressof(program))
        assert sorted(seen[:2]) == [(1, 0, 2), (1, 1, 2)]  # both before the barrier
        assert sorted(seen[2:]) == [(2, 0, 2), (2, 1, 2)]


def test_a_pool_is_taken_by_the_functions_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = ctypes.CFUNCTYPE(None)(lambda: None)
    both = dict.fromkeys((*Regions.LLVM.value, *openmp._NUMBERS), nothing)
    monkeypatch.setattr(openmp, "_loaded_pools", lambda: ["stubs", "iomp"])
    monkeypatch.setattr(
        openmp.ctypes, "CDLL", lambda p: SimpleNamespace(**(both if p == "iomp" else {}))
    )
    found = openmp.thread_pool.__wrapped__()
    assert isinstance(found, ThreadPool) and found.regions is Regions.LLVM
    monkeypatch.setattr(openmp, "thread_pool", lambda: found)
    symbols, several = openmp.package_symbols.__wrapped__()
    assert not several and {"GOMP_parallel", *openmp._NUMBERS} <= set(symbols)
    assert found.symbols() == dict.fromkeys(both, address(nothing))


# ---- object code


class Kinds(nn.Module):
    """A convolution, products, attention, and functions of the C library."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 16, 3), nn.Linear(16 * 36, 64)

    def forward(self, x: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(self.conv(x).flatten(1).relu())
        q = h.view(-1, 2, 4, 8)
        a = nn.functional.scaled_dot_product_attention(q, q, q)
        return a.softmax(-1), d.sin() + d.cos() + d.exp().log1p() + d.tanh() + d.pow(1.7)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Kernel]]:
    """What a package of that model has for two processors, and what runs it."""
    found: dict[str, list[Kernel]] = {}
    with pytest.MonkeyPatch.context() as patch:
        make = packaged.objects_for

        def noted(kernels: Any, processor: Any) -> Any:
            found[processor.name] = list(kernels)
            return make(kernels, processor)

        patch.setattr(packaged, "objects_for", noted)
        path = tmp_path_factory.mktemp("kinds") / "model.air"
        example = (torch.randn(2, 3, 8, 8), torch.rand(5, dtype=torch.float64))
        torchair.package(
            torch.export.export(Kinds(), example),
            path,
            cpu=["x86-64-v3", "aarch64"],
            frozen_parameter=True,
        )
    return found


SYSTEMS = [
    ("x86_64-pc-windows-msvc-elf", "x86-64-v3", "ELF"),  # what a JIT makes on Windows
    ("x86_64-pc-windows-msvc", "x86-64-v3", "COFF"),
    ("x86_64-apple-darwin", "x86-64-v3", "Mach-O"),
    ("arm64-apple-darwin", "aarch64", "Mach-O"),
]
AROUND = {
    "torchair_forked", "sched_yield", "omp_get_thread_num", "omp_get_num_threads", "GOMP_parallel",
}  # fmt: skip
"""What is told to the JIT by name."""
C_LIBRARY = {
    "memcpy", "memset", "memmove", "bzero", "exp", "log", "log1p", "sin", "cos", "tanh", "pow",
}  # fmt: skip
"""Of these, `bzero` is on macOS only, and the others on all systems."""
OF_SYSTEMS = {"windows": {"__chkstk", "_fltused"}, "darwin": {"__sincos_stret"}}
"""What LLVM itself asks for, of the system's own libraries."""


@pytest.mark.parametrize(("triple", "processor", "form"), SYSTEMS)
def test_object_code_needs_what_a_system_has(
    kernels: dict[str, list[Kernel]], triple: str, processor: str, form: str
) -> None:
    llvm, machine = binding(), processor_named(processor).machine
    assert len(kernels[processor]) > 8
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=machine.name, features=machine.features, opt=2, jit=True
    )
    system = next(s for s in OF_SYSTEMS if s in triple)
    allowed = AROUND | C_LIBRARY | OF_SYSTEMS[system]
    layout = f'target datalayout = "{target.target_data}"\ntarget triple = "{triple}"\n'
    for kernel in kernels[processor]:
        data = target.emit_object(parse(layout + module_text([kernel], machine)))
        kind, arch, names = needed(data)
        assert (kind, arch) == (form, machine.arch)
        assert names <= allowed, (kernel.entry, names)


def test_undefined_symbols_are_found_in_each_format() -> None:
    llvm = binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for triple, _, form in SYSTEMS:
        target = llvm.Target.from_triple(triple).create_target_machine(codemodel="large")
        text = (
            f'target triple = "{triple}"\ndeclare void @short()\n'
            "declare void @a_name_of_many_letters()\n"
            "define void @here() {\n  call void @short()\n"
            "  call void @a_name_of_many_letters()\n  ret void\n}\n"
        )
        kind, _, names = needed(target.emit_object(parse(text)))
        assert kind == form and names == {"short", "a_name_of_many_letters"}
