"""One package for many machines: made here for several processors, loaded without LLVM."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim, export
from torch.testing import assert_close

import torchair
from cuda_tools import HOPPER
from torchair import cli, fallbacks
from torchair.codegen.cpu.elf import BadObject, read_object
from torchair.codegen.cpu.image import MappedImage, MissingSymbol
from torchair.codegen.cpu.jit import Library, objects_for
from torchair.codegen.cpu.link import PAGE, Image, link
from torchair.codegen.cpu.processors import best, processor_named
from torchair.codegen.cuda.driver import image
from torchair.codegen.target import BrokenKernels, Kernel
from torchair.deploy.code import code_in
from torchair.deploy.load import load_air
from torchair.engine import packaged
from torchair.engine.packaged import CodeError, PackagedCode, RecordingTarget
from torchair.errors import GraphError, InputError, SerializationError
from torchair.serde.air import add_code

PROCESSORS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64")
HERE = [name for name in PROCESSORS if processor_named(name).runs_here()]


class Model(torch.nn.Module):
    """Products, reductions, functions, a step of torch, and a buffer that calls update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)
        self.last = torch.nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        h = self.norm(torch.nn.functional.gelu(self.first(x)))
        return torch.softmax(self.last(h), -1).sort(-1)[0] + self.calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Iterator[Path]:
    """Packages of the model, of sizes that vary and of fixed ones with packed weights."""
    made = tmp_path_factory.mktemp("packages")
    x = torch.randn(4, 16)
    rows = {"x": {0: Dim("rows", min=1, max=64)}}
    torch.export.save(export(Model(), (x,), dynamic_shapes=rows), made / "model.pt2")
    (made / "key").write_bytes(os.urandom(32))
    given = [str(made / "model.pt2"), "-o", str(made / "dynamic.air"), "--key", str(made / "key")]
    assert cli.main(["package", *given]) == 0
    torchair.package(
        export(Model(), (x,)),
        made / "fixed.air",
        cpu=PROCESSORS,
        gpu=["sm_80", "sm_90"],
        frozen_parameter=True,
    )
    yield made


ALONE = """
import json, os, sys, warnings

class NoLlvm:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llvmlite":
            raise ImportError("there is no llvmlite")

sys.meta_path.insert(0, NoLlvm())
import torch, torchair

warnings.simplefilter("error")
path, processors, sizes = sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3])
for processor in processors:
    if os.fork() == 0:
        model = torchair.load(path, trust=True, processor=processor)
        for n in sizes:
            got = model(torch.arange(n * 16.0).reshape(n, 16).sin())
        plan = model.call.session.last_plan()
        found = [processor, model.call.target.compiled, sum(s.kind == "native" for s in plan.steps)]
        print(json.dumps([*found, "llvmlite" in sys.modules, got.tolist()]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def run_alone(path: Path, sizes: list[int]) -> list[Any]:
    """What each processor's code gives in a process in which llvmlite cannot be imported."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(path), ",".join(HERE), json.dumps(sizes)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(torchair.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "TORCHAIR_KERNEL_CACHE": "0",
        },
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("name", "sizes"), [("dynamic", [1, 5, 64, 30]), ("fixed", [4, 4, 4])])
def test_every_processor_gives_eagers_results_without_llvm(
    folder: Path, name: str, sizes: list[int]
) -> None:
    eager = Model()
    for n in sizes:
        wanted = eager(torch.arange(n * 16.0).reshape(n, 16).sin())
    found = run_alone(folder / f"{name}.air", sizes)
    assert [f[0] for f in found] == HERE
    for _, compiled, native, llvm, got in found:
        assert compiled == 0 and native >= 3 and not llvm
        assert_close(torch.tensor(got), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_code_for_aarch64_gives_eagers_results_in_an_emulator(folder: Path) -> None:
    pytest.importorskip("unicorn")
    from emulated_aarch64 import EmulatedTarget

    code = code_in(folder / "fixed.air")
    assert code is not None
    target = EmulatedTarget(code.images["aarch64"])
    x = torch.randn(4, 16)
    found = load_air(folder / "fixed.air", target=target)(x)
    assert target.entered == 2  # before and after the step of torch
    assert_close(found, Model()(x), rtol=1e-5, atol=1e-5)


def test_code_is_run_only_if_the_caller_vouches_for_it(folder: Path, tmp_path: Path) -> None:
    path, x = folder / "dynamic.air", torch.randn(3, 16)
    wanted = Model()(x)
    with pytest.warns(UserWarning, match=r"machine code, which is not run.*trust=True"):
        plain = torchair.load(path)
    assert plain.call.target is None
    assert_close(plain(x), wanted, rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        signed = torchair.load(path, key=folder / "key")
    assert signed.call.target.name_of_processor == HERE[-1]
    assert_close(signed(x), wanted, rtol=1e-5, atol=1e-5)
    (tmp_path / "other").write_bytes(b"another secret, long enough")
    for file, key in ((path, tmp_path / "other"), (folder / "fixed.air", folder / "key")):
        with pytest.raises(SerializationError, match="not signed with this key"):
            torchair.load(file, key=key)
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(InputError, match="16 bytes"):
        torchair.load(path, key=tmp_path / "short")


def test_damaged_packages_are_refused(folder: Path, tmp_path: Path) -> None:
    whole, path = bytearray((folder / "dynamic.air").read_bytes()), tmp_path / "damaged.air"
    code = code_in(folder / "dynamic.air")
    assert code is not None
    inside = whole.index(code.images[HERE[0]].code)
    for at in (inside, inside + 100, len(whole) - 1, len(whole) // 2):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(SerializationError):
            torchair.load(path, trust=True)
    path.write_bytes(whole[: inside + 50])
    with pytest.raises(SerializationError):
        torchair.load(path, trust=True)
    data = code.to_bytes()
    with pytest.raises(CodeError, match="damaged"):
        PackagedCode.from_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CodeError, match="format"):
        PackagedCode.from_bytes(data.replace(b'"format":1', b'"format":9'))
    appended = bytes(whole) + whole  # a second model, after the signature of the first
    path.write_bytes(appended)
    with pytest.raises(SerializationError):
        torchair.load(path, key=folder / "key")


def test_what_cannot_be_packaged_is_told(folder: Path, tmp_path: Path, capsys: Any) -> None:
    given = ["package", str(folder / "model.pt2"), "-o", str(tmp_path / "made.air")]
    assert cli.main([*given, "--cpu", "pentium"]) == 2
    assert cli.main([*given, "--cpu", "x86-64-v3", "--gpu", "sm_90"]) == 2
    assert cli.main(["package", str(folder / "dynamic.air"), *given[2:]]) == 2
    told = capsys.readouterr().err
    assert "known are x86-64-v2" in told and "fixed sizes" in told and "package already" in told
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"no code for x86-64-v4.avx512vnni"):
        torchair.load(folder / "fixed.air", trust=True, processor="x86-64-v4+avx512vnni")
    if "aarch64" not in HERE:
        with pytest.raises(InputError, match="does not run code for aarch64"):
            torchair.load(folder / "fixed.air", trust=True, processor="aarch64")
    torchair.dynamo_export(
        torch.randn(4, 16), model=Model(), export_path=str(tmp_path), dynamic=True
    )
    with pytest.raises(GraphError, match="does not say in which ranges"):
        torchair.package(tmp_path / "export.air", tmp_path / "made.air", cpu=["x86-64-v3"])


def test_ptx_is_stored_for_each_gpu(folder: Path) -> None:
    code = code_in(folder / "fixed.air")
    assert code is not None and set(code.ptx) == {"sm_80", "sm_90"}
    for architecture, texts in code.ptx.items():
        assert texts
        for name, text in texts.items():
            assert f".target {architecture}" in text and f".entry {name}(" in text
            entry: Any = None  # which is not looked at where a package brought the text
            assert image(entry, HOPPER, "", None, text) == text.encode() + b"\0"


def test_kernels_that_a_package_lacks_are_compiled_or_run_by_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_in(folder / "fixed.air")
    assert code is not None
    target = code.target()
    text = "define void @ENTRY(i64 %t, i64 %n, ptr %w) #0 {\n  ret void\n}\n"
    target.compile([Kernel.of("lacking", text, ())])
    assert target.compiled == 1
    monkeypatch.setattr(packaged.cpu(), "_missing", "there is no LLVM")
    with pytest.raises(BrokenKernels) as broken:
        target.compile([Kernel.of("also_lacking", text, ())])
    assert "no code for these sizes" in str(next(iter(broken.value.errors.values())))


def test_a_model_whose_kernels_are_missing_runs_with_those_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package holds what runs programs, and no kernel; LLVM is not there either."""
    torchair.dynamo_export(
        torch.randn(3, 19),
        model=torch.nn.Sequential(torch.nn.Linear(19, 23), torch.nn.GELU()),
        export_path=str(tmp_path),
    )
    source, path = tmp_path / "export.air", tmp_path / "package.air"
    torchair.package(source, path, cpu=HERE[:1])
    x = torch.randn(3, 19)
    wanted = torchair.load(path, trust=True)(x)
    empty = RecordingTarget(processor_named(HERE[0])).image()
    notes = {"torchair": torchair.__version__}
    add_code(source, path, PackagedCode({HERE[0]: empty}, notes=notes).to_bytes())
    monkeypatch.setattr(packaged.cpu(), "library", Library())
    monkeypatch.setattr(packaged.cpu(), "_missing", "there is no LLVM")
    monkeypatch.delenv("TORCHAIR_STRICT", raising=False)
    before = fallbacks.total()
    assert_close(torchair.load(path, trust=True)(x), wanted, rtol=1e-5, atol=1e-5)
    told = "no code for these sizes, and there is no LLVM"
    assert any(told in str(record) for record in fallbacks.since(before))


def test_the_command_runs_packages(folder: Path, tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", torch.ones(4, 16).numpy())
    given = ["run-air", str(folder / "fixed.air"), "--trust", "--processor", HERE[0]]
    assert cli.main([*given, "--input", str(tmp_path / "x.npy"), "--repeat", "0"]) == 0
    assert "result 0" in capsys.readouterr().out
    assert cli.main([*given[:-1], "aarch65"]) == 2


def test_processors_have_names_and_the_best_is_chosen() -> None:
    four = processor_named("x86-64-v4+avx512bf16+avx512vnni")
    assert four.machine.dot_i8 and four.machine.dot_bf16 and "avx512_vnni" in four.flags
    for name in ("x86-64-v3+avx512vnni", "x86-64-v4+sse9", ""):
        with pytest.raises(ValueError, match="not a processor that code can be generated for"):
            processor_named(name)
    chosen = best(map(processor_named, PROCESSORS))
    assert chosen is not None and chosen.name == HERE[-1]


# ---- linking ----


CALLS = """
@table = external global i64
@numbers = internal constant [4 x i64] [i64 3, i64 5, i64 7, i64 9]
declare i64 @outside(i64)
define i64 @ENTRY(i64 %i) #0 {
  %at = getelementptr [4 x i64], ptr @numbers, i64 0, i64 %i
  %x = load i64, ptr %at
  %y = call i64 @outside(i64 %x)
  %z = load i64, ptr @table
  %sum = add i64 %y, %z
  ret i64 %sum
}
"""


def linked(processor: str) -> tuple[Kernel, Image]:
    kernel = Kernel.of("calls", CALLS, ())
    return kernel, link(objects_for([kernel], processor_named(processor)))


def test_code_reaches_constants_functions_and_data_outside() -> None:
    import ctypes

    kernel, image = linked(HERE[0])
    number = ctypes.c_int64(100)
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    outside = kind(lambda x: x * 10)
    symbols = {
        "table": ctypes.addressof(number),
        "outside": ctypes.cast(outside, ctypes.c_void_p).value,
    }
    mapped = MappedImage(image, symbols)
    function = kind(mapped.addresses[kernel.entry])
    assert [function(i) for i in range(4)] == [130, 150, 170, 190]
    with pytest.raises(MissingSymbol, match="outside"):
        MappedImage(image, {"table": 0})


def test_stubs_of_aarch64_load_from_the_table() -> None:
    """`adrp x16, page; ldr x17, [x16, offset]; br x17` with the page and offset of the slot."""
    _, image = linked("aarch64")
    stub = image.code.index(struct.pack("<I", 0xD61F0220)) - 8
    adrp, load = struct.unpack_from("<II", image.code, stub)
    pages = (adrp >> 29 & 3) | (adrp >> 5 & 0x7FFFF) << 2
    offset = (load >> 10 & 0xFFF) * 8
    slot = image.table + 8 * image.imports.index("outside")
    assert (stub >> 12) + pages == slot >> 12 and offset == slot & 0xFFF
    assert image.table % PAGE == 0 and set(image.imports) == {"outside", "table"}


def test_objects_that_no_loader_can_take_are_refused() -> None:
    (code,) = objects_for([Kernel.of("calls", CALLS, ())], processor_named("x86-64-v3"))
    for broken in (b"", code[:100], b"MZ" + code[2:], code[: len(code) - 40]):
        with pytest.raises(BadObject):
            read_object(broken)
    other = objects_for([Kernel.of("calls", CALLS, ())], processor_named("aarch64"))
    with pytest.raises(BadObject, match="several processors"):
        link([code, *other])
    written = CALLS.replace("internal constant", "internal global")
    with pytest.raises(BadObject, match="could write"):
        link(objects_for([Kernel.of("calls", written, ())], processor_named("x86-64-v3")))
