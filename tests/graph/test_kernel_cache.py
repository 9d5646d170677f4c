"""Kernels on disk: found again by later processes, never trusted, never in the way."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchair
from torchair.codegen import kernel_cache
from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.target import cpu
from torchair.codegen.cuda import driver
from torchair.codegen.cuda.jit import Entry, describe
from torchair.codegen.kernel_cache import KernelStore, key_of
from torchair.codegen.target import Kernel

KEY = key_of("a test")
DATA = bytes(range(256)) * 3


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    monkeypatch.setenv("TORCHAIR_CACHE_DIR", str(tmp_path / "cache"))
    return kernel_cache.store()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the cache."""
    found: list[str] = []
    monkeypatch.setattr(kernel_cache.warnings, "warn", found.append)
    return found


def kernel(number: int) -> Kernel:
    """A function that writes a number where its first word says."""
    text = f"""define void @ENTRY(i64 %tid, i64 %nt, ptr %words) #0 {{
  %at = load ptr, ptr %words
  store i64 {number}, ptr %at
  ret void
}}
"""
    return Kernel.of("number", text, ())


def written_by(library: Library, made: Kernel) -> int:
    """What a kernel writes."""
    result = ctypes.c_int64(-1)
    words = (ctypes.c_int64 * 1)(ctypes.addressof(result))
    types = (None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    ctypes.CFUNCTYPE(*types)(library.address(made))(0, 1, ctypes.addressof(words))
    return result.value


def test_a_kernel_is_compiled_once_for_all_processes(store: KernelStore) -> None:
    first, second = Library(), Library()
    assert written_by(first, kernel(42)) == 42
    assert (store.hits, store.misses) == (0, 1)
    second.add([kernel(7), kernel(42)])  # whatever stands beside it
    assert (store.hits, store.misses) == (1, 2)
    assert [written_by(second, kernel(n)) for n in (42, 7)] == [42, 7]


def test_a_model_compiled_again_finds_its_kernels(store: KernelStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Softmax(-1))
    x = torch.randn(3, 8)

    def result(**options: bool) -> torch.Tensor:
        torch._dynamo.reset()
        cpu.cache_clear()
        config = torchair.CompilerConfig()
        for name, value in options.items():
            setattr(config.experimental_config, name, value)
        backend = torchair.get_npu_backend(compiler_config=config)
        with torch.no_grad():
            return torch.compile(model, backend=backend)(x)

    first = result()
    made = store.misses
    assert made > 0 and store.hits == 0
    assert torch.equal(result(), first)
    assert (store.hits, store.misses) == (made, made)
    assert torch.equal(result(kernel_cache=False), first)
    assert store.misses == made and store.hits <= made + 1  # the driver of programs is no graph's


def test_the_cache_can_be_switched_off(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHAIR_KERNEL_CACHE", "off")
    assert written_by(Library(), kernel(1)) == 1
    assert not store.folder.exists()


def test_the_default_folder_is_in_the_cache_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHAIR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache.store().folder == tmp_path / "torchair" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernel_cache.store().folder == Path.home() / ".cache" / "torchair" / "kernels"


def test_folder_and_files_are_private(store: KernelStore) -> None:
    store.put(KEY, DATA)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert (store.folder / KEY).stat().st_mode & 0o777 == 0o600
    assert store.get(KEY) == DATA


def test_keys_tell_parts_apart() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("", "abc")}) == 4


def test_a_flipped_bit_anywhere_is_noticed(store: KernelStore, said: list[str]) -> None:
    path = store.folder / KEY
    store.put(KEY, DATA)
    whole = path.read_bytes()
    generator = random.Random(0)
    for position in [*range(0, 90, 3), *range(90, len(whole), 37), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        assert store.get(KEY) is None, position
        assert not path.exists()
    assert len(said) == 1 and "is damaged" in said[0] and str(path) in said[0]


@pytest.mark.parametrize("length", [0, 1, 50, 81, 82, 83, 400])
def test_a_file_cut_short_is_noticed(store: KernelStore, said: list[str], length: int) -> None:
    store.put(KEY, DATA)
    os.truncate(store.folder / KEY, length)
    assert store.get(KEY) is None and len(said) == 1


def test_an_entry_under_another_name_is_noticed(store: KernelStore, said: list[str]) -> None:
    store.put(KEY, DATA)
    other = key_of("another")
    (store.folder / KEY).rename(store.folder / other)
    assert store.get(other) is None and len(said) == 1


def test_a_damaged_kernel_is_made_again(store: KernelStore, said: list[str]) -> None:
    assert written_by(Library(), kernel(5)) == 5
    (entry,) = store.entries()
    entry.path.write_bytes(entry.path.read_bytes()[:-1] + b"\0\0")
    assert written_by(Library(), kernel(5)) == 5 and len(said) == 1
    assert written_by(Library(), kernel(5)) == 5 and store.hits == 1


def _symlink(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [_symlink, _fifo, _folder, lambda p: p.chmod(0o622)])
def test_what_is_no_private_file_is_not_read(
    store: KernelStore, said: list[str], spoil: Callable[[Path], None]
) -> None:
    store.put(KEY, DATA)
    spoil(store.folder / KEY)
    assert store.get(KEY) is None and len(said) == 1
    store.put(KEY, DATA)
    assert store.get(KEY) == (None if spoil is _folder else DATA) and len(said) == 1


def test_entries_of_another_user_are_not_read(
    store: KernelStore, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(KEY, DATA)
    monkeypatch.setattr(kernel_cache.os, "getuid", lambda: 12345)
    assert store.get(KEY) is None
    assert KernelStore(store.folder).get(KEY) is None
    assert "belongs to another user" in said[0] and len(said) == 2


def test_a_folder_that_others_may_write_to_is_not_used(store: KernelStore, said: list[str]) -> None:
    store.put(KEY, DATA)
    store.folder.chmod(0o777)
    again = KernelStore(store.folder)
    assert again.get(KEY) is None and again.get(key_of("b")) is None
    again.put(KEY, b"other")
    assert len(said) == 1 and "others may write to it" in said[0]
    assert store.get(KEY) == DATA


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_what_cannot_be_written_costs_the_cache_only(
    store: KernelStore, said: list[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    written_by(Library(), kernel(0))

    def refuse(path: Path, data: object, mode: int) -> None:
        path.write_bytes(b"a part of it")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("torchair.store._write_new", refuse)
    library = Library()
    assert [written_by(library, kernel(n)) for n in range(3)] == [0, 1, 2]
    assert len(said) == 1 and os.strerror(code) in said[0]
    assert store.hits == 1 and len(list(store.folder.iterdir())) == 1


def test_a_folder_that_cannot_be_made_costs_the_cache_only(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHAIR_CACHE_DIR", str(tmp_path / "file"))
    assert written_by(Library(), kernel(3)) == 3 and len(said) == 1


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    size = 10_000
    store = KernelStore(tmp_path / "small", limit=5 * size)
    names = [key_of(str(n)) for n in range(4)]
    for age, name in enumerate(names):
        store.put(name, bytes(size - 200))
        then = time.time() - 10_000 * (4 - age)
        os.utime(store.folder / name, (then, then))
    assert store.get(names[0]) is not None  # used just now
    left_over = store.folder / ".dead.1.2"
    left_over.write_bytes(b"x")
    os.utime(left_over, (0, 0))
    for extra in ("a", "b"):
        store.put(key_of(extra), bytes(size - 200))
    there = {e.path.name for e in store.entries()}
    assert names[0] in there and key_of("b") in there
    assert names[1] not in there
    assert sum(e.size for e in store.entries()) <= store.limit
    assert not left_over.exists()


def test_clear_removes_everything(store: KernelStore) -> None:
    for n in range(3):
        store.put(key_of(str(n)), DATA)
    (store.folder / ".dead.1.2").write_bytes(b"x")
    assert store.clear() == 3 and list(store.folder.iterdir()) == []
    store.put(KEY, DATA)
    assert store.get(KEY) == DATA


def _child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _write_all(folder: Path, rounds: int) -> None:
    store = KernelStore(folder)
    for _ in range(rounds):
        for n in range(8):
            store.put(key_of(str(n)), bytes([n]) * 100_000)


def test_writers_may_be_killed_at_any_moment(tmp_path: Path, said: list[str]) -> None:
    generator = random.Random(0)
    for _ in range(12):
        pid = _child(lambda: _write_all(tmp_path / "k", 10_000))
        time.sleep(generator.uniform(0.001, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        store = KernelStore(tmp_path / "k")
        for n in range(8):
            assert store.get(key_of(str(n))) in (None, bytes([n]) * 100_000)
    assert said == []


def test_processes_write_and_clear_at_once(tmp_path: Path, said: list[str]) -> None:
    children = [_child(lambda: _write_all(tmp_path / "k", 30)) for _ in range(3)]
    store = KernelStore(tmp_path / "k")
    for turn in range(20):
        for n in range(8):
            assert store.get(key_of(str(n))) in (None, bytes([n]) * 100_000)
        if turn % 5 == 4:
            store.clear()
    for pid in children:
        os.waitpid(pid, 0)
    assert said == []


class _Driver:
    """As much of the driver as makes machine code, which here is the text backwards."""

    def __init__(self, broken: bool = False) -> None:
        self.linked, self._broken = 0, broken

    def cuDriverGetVersion(self, found: Any) -> int:
        found._obj.value = 12080
        return 0

    def cuGetErrorString(self, code: int, found: Any) -> int:
        return 0

    def cuLinkCreate_v2(self, *given: Any) -> int:
        return 0

    def cuLinkAddData_v2(self, state: Any, kind: int, text: bytes, size: Any, *rest: Any) -> int:
        assert kind == 1 and size.value == len(text) and text.endswith(b"\0")
        self._code = ctypes.create_string_buffer(text[::-1], len(text))
        return 1 if self._broken else 0

    def cuLinkComplete(self, state: Any, code: Any, size: Any) -> int:
        self.linked += 1
        code._obj.value, size._obj.value = ctypes.addressof(self._code), len(self._code)
        return 0

    def cuLinkDestroy(self, state: Any) -> int:
        return 0


GPU_TEXT = "define void @ENTRY(i64 %block, i64 %blocks, ptr %w0) {\n  ret void\n}\n"


def test_machine_code_of_a_gpu_is_kept(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _Driver()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    driver._driver_version.cache_clear()
    entry = Entry((Kernel.of("nothing", GPU_TEXT, (), {0: "ptr"}),), 32)
    gpu = describe((9, 0), 132)
    text = driver.image(entry, gpu, "one", None)
    assert entry.name.encode() in text and made.linked == 0
    code = driver.image(entry, gpu, "one", store)
    assert code == text[::-1] and made.linked == 1
    assert driver.image(entry, gpu, "one", store) == code and made.linked == 1
    assert driver.image(entry, gpu, "another", store) == code and made.linked == 2
    assert len(store.entries()) == 3  # the text, and code for two devices
    broken = _Driver(broken=True)
    monkeypatch.setattr(driver, "_driver", lambda: broken)
    assert driver.image(entry, gpu, "a third", store) == text
    driver._driver_version.cache_clear()
