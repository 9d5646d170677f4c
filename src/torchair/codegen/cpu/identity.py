"""A native test whether the tensors of a call are still those of an earlier one: the same objects,
over the same memory, not written to since. One call for all of them, whatever their number."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchair.codegen.cpu.jit import Library
from torchair.codegen.kernel import Kernel

HITS = 0
"""Word of a table that counts the calls that passed the test."""

_HEAD = 10  # words: hits, records, samples, length, where an object has its tensor, functions
_RECORD = 5  # words: position, object, implementation, address, version
_SAMPLE = 2  # words: address, content

_TEXT = """
define i64 @ENTRY(ptr %given, ptr %table) #0 {
entry:
  %found = alloca ptr
WORDS
  %size = call i64 %size.of(ptr %given)
  %complete = icmp eq i64 %size, %length
  br i1 %complete, label %head, label %other
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %alike ]
  %more = icmp slt i64 %i, %records
  br i1 %more, label %look, label %samples.of
look:
  %i.at = mul i64 %i, RECORDWORDS
  %i.word = add i64 %i.at, HEADWORDS
  %record = getelementptr i64, ptr %table, i64 %i.word
  %position = load i64, ptr %record
  %object.at = getelementptr i64, ptr %record, i64 1
  %object = load ptr, ptr %object.at
  %mine = call ptr %item(ptr %given, i64 %position)
  call void %release(ptr %mine)
  %same.object = icmp eq ptr %mine, %object
  br i1 %same.object, label %inner, label %other
inner:
  %handle = getelementptr i8, ptr %object, i64 %inside
  %impl = load i64, ptr %handle
  %impl.at = getelementptr i64, ptr %record, i64 2
  %impl.then = load i64, ptr %impl.at
  %same.impl = icmp eq i64 %impl, %impl.then
  br i1 %same.impl, label %place, label %other
place:
  %ignored = call i32 %address.of(ptr %handle, ptr %found)
  %address = load i64, ptr %found
  %address.at = getelementptr i64, ptr %record, i64 3
  %address.then = load i64, ptr %address.at
  %same.address = icmp eq i64 %address, %address.then
  br i1 %same.address, label %counted, label %other
counted:
  %version.at = getelementptr i64, ptr %record, i64 4
  %version.then = load i64, ptr %version.at
  %counts = icmp sge i64 %version.then, 0
  br i1 %counts, label %written, label %alike
written:
  %version = call i64 %version.of(ptr %handle)
  %same.version = icmp eq i64 %version, %version.then
  br i1 %same.version, label %alike, label %other
alike:
  %i.next = add i64 %i, 1
  br label %head
samples.of:
  %first.at = mul i64 %records, RECORDWORDS
  %first = add i64 %first.at, HEADWORDS
  br label %samples.head
samples.head:
  %k = phi i64 [ 0, %samples.of ], [ %k.next, %sample ]
  %differ = phi i32 [ 0, %samples.of ], [ %differ.next, %sample ]
  %k.more = icmp slt i64 %k, %samples
  br i1 %k.more, label %sample, label %sampled
sample:
  %k.at = mul i64 %k, SAMPLEWORDS
  %k.word = add i64 %first, %k.at
  %pair = getelementptr i64, ptr %table, i64 %k.word
  %at = load ptr, ptr %pair
  %now = load i32, ptr %at, align 1
  %then.at = getelementptr i64, ptr %pair, i64 1
  %then = load i32, ptr %then.at
  %changed = xor i32 %now, %then
  %differ.next = or i32 %differ, %changed
  %k.next = add i64 %k, 1
  br label %samples.head
sampled:
  %untouched = icmp eq i32 %differ, 0
  br i1 %untouched, label %yes, label %other
yes:
  %hits = load i64, ptr %table
  %hits.next = add i64 %hits, 1
  store i64 %hits.next, ptr %table
  ret i64 1
other:
  ret i64 0
}
"""

_WORDS = (
    ("i64", "records"),
    ("i64", "samples"),
    ("i64", "length"),
    ("i64", "inside"),
    ("ptr", "size.of"),
    ("ptr", "item"),
    ("ptr", "release"),
    ("ptr", "address.of"),
    ("ptr", "version.of"),
)  # of the head, after the hits


@dataclass(frozen=True)
class Sample:
    """Four bytes of a tensor, and where they are."""

    address: int
    content: int


@dataclass(frozen=True)
class Known:
    """A tensor among the arguments; a `version` of -1 is not asked for."""

    position: int
    tensor: torch.Tensor
    address: int
    version: int = -1


def test_of(
    library: Library, length: int, known: Sequence[Known], samples: Sequence[Sample]
) -> tuple[Callable[[Any], int], Any] | None:
    """A test of a list or tuple of `length` arguments, and the table it counts its hits in; None
    where torch or Python are not as this code expects them."""
    functions = _functions()
    if functions is None:
        return None
    inside, addresses = functions
    words = [0, len(known), len(samples), length, inside, *addresses]
    for k in known:
        words += (k.position, id(k.tensor), k.tensor._cdata, k.address, k.version)
    for s in samples:
        words += (s.address, s.content)
    table = (ctypes.c_int64 * len(words))(*words)
    entry = _entry(library)
    at = ctypes.cast(table, ctypes.c_void_p)  # which keeps the table
    return lambda given: entry(given, at), table


@cache
def _entry(library: Library) -> Any:
    """The test as a Python callable that keeps the interpreter lock."""
    kinds = (ctypes.c_int64, ctypes.py_object, ctypes.c_void_p)
    return ctypes.PYFUNCTYPE(*kinds)(entry_address(library))


@cache
def entry_address(library: Library) -> int:
    """Where the test is: a function of a list or tuple and a table."""
    lines = [
        f"  %{name}.word = getelementptr i64, ptr %table, i64 {k}\n"
        f"  %{name} = load {kind}, ptr %{name}.word"
        for k, (kind, name) in enumerate(_WORDS, HITS + 1)
    ]
    text = _TEXT.replace("WORDS\n", "\n".join(lines) + "\n", 1)
    for name, value in (("RECORD", _RECORD), ("HEAD", _HEAD), ("SAMPLE", _SAMPLE)):
        text = text.replace(f"{name}WORDS", str(value))
    return library.address(Kernel.of("same", text, ()))


@cache
def _functions() -> tuple[int, tuple[int, ...]] | None:
    """Where an object of class Tensor has its tensor, in bytes, and addresses of the functions of
    Python and torch that the test calls. They are tried out before they are relied on."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address_of, version_of = torch_cpu.aoti_torch_get_data_ptr, torch_cpu[_VERSION]
    except (OSError, AttributeError):
        return None
    python = ctypes.pythonapi
    functions = (python.PySequence_Size, python.PySequence_GetItem, python.Py_DecRef)
    with torch.inference_mode(False):  # tensors of that mode have no version
        probe = torch.ones(3).add_(1).add_(1)
    inside = inside_of_tensors()
    if inside is None:
        return None
    handle, found = ctypes.c_void_p(id(probe) + inside), ctypes.c_void_p()
    version_of.restype = ctypes.c_int64
    failed = address_of(handle, ctypes.byref(found))
    if failed or found.value != probe.data_ptr() or version_of(handle) != probe._version:
        return None
    every = (*functions, address_of, version_of)
    return inside, tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in every)


@cache
def inside_of_tensors() -> int | None:
    """Where an object of class Tensor has its tensor, in bytes; None if that is not clear."""
    probe = torch.ones(3)
    words = torch.Tensor.__basicsize__ // 8
    inner = (ctypes.c_int64 * words).from_address(id(probe))
    places = [8 * k for k in range(2, words) if inner[k] == probe._cdata]
    return places[0] if len(places) == 1 else None


_VERSION = "_ZNK2at10TensorBase8_versionEv"  # int64_t at::TensorBase::_version() const
