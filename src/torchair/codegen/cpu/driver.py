"""Native functions around the kernels: the one that runs a list of them, one parallel region with
light barriers between, and the test whether the tensors of a call are those of an earlier one.

The driver walks records instead of being compiled for each program, so that a plan for new sizes
needs no compiler: the records name the kernels, and an argument block of words belongs to each.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchair.codegen.cpu.jit import Library
from torchair.codegen.llvm import binding
from torchair.codegen.target import Kernel
from torchair.codegen.text.writer import Machine

# ---- the language of the texts here: LLVM's, with three words more ----


_ELEMENT = re.compile(r"  %(\S+) = (word|byte) (\w+) (%\S+), (\S+)$", re.M)
_EQUAL = re.compile(r"  equal (\w+) (\S+), (\S+) then (\S+)$", re.M)


def written_out(text: str) -> str:
    """A text in LLVM's language: `%x = word i64 %table, 3` loads a word, `byte` counts in bytes,
    and `equal i64 %a, %b then next` goes to the label `other` if the two differ."""
    return _EQUAL.sub(_equal, _ELEMENT.sub(_element, text))


def filled(text: str, **words: str) -> str:
    """A text with others in the place of some words."""
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def table_words(names: Sequence[str], numbers: Collection[str], first: int = 0) -> str:
    """The text that loads neighbouring words of `%table`: numbers, the others are addresses."""
    kinds = ("i64" if name in numbers else "ptr" for name in names)
    loads = enumerate(zip(names, kinds, strict=True), first)
    return "".join(f"  %{name} = word {kind} %table, {k}\n" for k, (name, kind) in loads)


def address(function: Any) -> int:
    """Where a function of a library is."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _element(found: re.Match[str]) -> str:
    name, unit, kind, base, index = found.groups()
    step = "i64" if unit == "word" else "i8"
    place = f"  %{name}.place = getelementptr {step}, ptr {base}, i64 {index}\n"
    return f"{place}  %{name} = load {kind}, ptr %{name}.place"


def _equal(found: re.Match[str]) -> str:
    kind, a, b, following = found.groups()
    test = f"%to.{following}.{found.start()}"
    return f"  {test} = icmp eq {kind} {a}, {b}\n  br i1 {test}, label %{following}, label %other"


# ---- running programs ----


BARRIER = 1
"""Flag of a step: wait for all threads before it."""

HEADER = 8  # words: steps, their number, threads, patches, their number, slots, barrier, unused
STEP = 3  # words: function, argument block, flags
PATCH = 3  # words: where to write, slot, bytes to add

_SPINS = 256  # looks at the barrier before a thread offers its core to others

_FORKED = "torchair_forked"
_forked = ctypes.c_int64(0)  # 1 in a child of fork: it has none of the threads that the pool counts
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_forked, "value", 1))

_TEXT = """
define internal void @ENTRY.wait(ptr %counter, i64 %target) #0 {
entry:
  %old = atomicrmw add ptr %counter, i64 1 acq_rel
  %mine = add i64 %old, 1
  %last = icmp sge i64 %mine, %target
  br i1 %last, label %done, label %spin
spin:
  %n = phi i64 [ 0, %entry ], [ %more, %next ]
  PAUSE
  %seen = load atomic i64, ptr %counter acquire, align 8
  %all = icmp sge i64 %seen, %target
  br i1 %all, label %done, label %still
still:
  %more = add i64 %n, 1
  %long = icmp sgt i64 %more, SPINS
  br i1 %long, label %yield, label %next
yield:
  %ignored = call i32 @sched_yield()
  br label %next
next:
  br label %spin
done:
  ret void
}

define internal void @ENTRY.walk(ptr %program, i64 %tid, i64 %nt) #0 {
entry:
  %steps = load ptr, ptr %program
  %count = word i64 %program, 1
  %counter = word ptr %program, 6
  %alone = icmp eq i64 %nt, 1
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %ready ]
  %round = phi i64 [ 0, %entry ], [ %round.next, %ready ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %step, label %done
step:
  %at = mul i64 %i, STEPWORDS
  %record = getelementptr i64, ptr %steps, i64 %at
  %function = load ptr, ptr %record
  %words = word ptr %record, 1
  %flags = word i64 %record, 2
  %b = and i64 %flags, 1
  %b1 = icmp ne i64 %b, 0
  %others = xor i1 %alone, true
  %waits = and i1 %b1, %others
  br i1 %waits, label %sync, label %ready
sync:
  %reached = add i64 %round, %nt
  call void @ENTRY.wait(ptr %counter, i64 %reached)
  br label %ready
ready:
  %round.next = phi i64 [ %round, %step ], [ %reached, %sync ]
  call void %function(i64 %tid, i64 %nt, ptr %words)
  %i.next = add i64 %i, 1
  br label %head
done:
  ret void
}

define internal void @ENTRY.region(ptr %program) #0 {
  %t = call i32 @omp_get_thread_num()
  %k = call i32 @omp_get_num_threads()
  %tid = sext i32 %t to i64
  %nt = sext i32 %k to i64
  call void @ENTRY.walk(ptr %program, i64 %tid, i64 %nt)
  ret void
}

define void @ENTRY(ptr %program) #0 {
entry:
  %patches = word ptr %program, 3
  %count = word i64 %program, 4
  %slots = word ptr %program, 5
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %patch ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %patch, label %go
patch:
  %at = mul i64 %i, PATCHWORDS
  %record = getelementptr i64, ptr %patches, i64 %at
  %target = load ptr, ptr %record
  %slot = word i64 %record, 1
  %plus = word i64 %record, 2
  %address = word i64 %slots, %slot
  %moved = add i64 %address, %plus
  store i64 %moved, ptr %target
  %i.next = add i64 %i, 1
  br label %head
go:
  %threads = word i64 %program, 2
  %one = icmp sle i64 %threads, 1
  %child = load i64, ptr @FORKED
  %lost = icmp ne i64 %child, 0
  %single = or i1 %one, %lost
  br i1 %single, label %alone, label %together
alone:
  call void @ENTRY.walk(ptr %program, i64 0, i64 1)
  ret void
together:
  %counter = word ptr %program, 6
  store i64 0, ptr %counter
  %wanted = trunc i64 %threads to i32
  call void @GOMP_parallel(ptr @ENTRY.region, ptr %program, i32 %wanted, i32 0)
  ret void
}
"""

FILL = 4  # words: where to write, and the numbers of three values whose sum is written

_FILL_TEXT = """
define void @ENTRY(ptr %block, ptr %records, i64 %count, ptr %values) #0 {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %one ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %one, label %done
one:
  %at = mul i64 %i, FILLWORDS
  %record = getelementptr i64, ptr %records, i64 %at
  %word = load i64, ptr %record
  %a = word i64 %record, 1
  %b = word i64 %record, 2
  %c = word i64 %record, 3
  %x = word i64 %values, %a
  %y = word i64 %values, %b
  %z = word i64 %values, %c
  %xy = add i64 %x, %y
  %sum = add i64 %xy, %z
  %target = getelementptr i64, ptr %block, i64 %word
  store i64 %sum, ptr %target
  %i.next = add i64 %i, 1
  br label %head
done:
  ret void
}
"""


@cache
def filler(library: Library) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """A Python callable that writes the words of a program that follow from sizes: of the addresses
    of its block and of records, their number, and the address of values."""
    kernel = Kernel.of("fill", written_out(_FILL_TEXT.replace("FILLWORDS", str(FILL))), [])
    place = ctypes.c_void_p
    return ctypes.CFUNCTYPE(None, place, place, ctypes.c_int64, place)(library.address(kernel))


def driver(machine: Machine) -> Kernel:
    """The code of the driver for a processor."""
    pause = "call void @llvm.x86.sse2.pause()" if machine.arch == "x86_64" else "fence acquire"
    counts = {"SPINS": str(_SPINS), "STEPWORDS": str(STEP), "PATCHWORDS": str(PATCH)}
    text = written_out(filled(_TEXT, PAUSE=pause, FORKED=_FORKED, **counts))
    declared = [
        f"@{_FORKED} = external global i64",
        "declare i32 @sched_yield()",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
        "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
    ]
    if machine.arch == "x86_64":
        declared.append("declare void @llvm.x86.sse2.pause()")
    return Kernel.of("run", text, declared)


@cache
def entry_point(library: Library) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The driver as a Python callable of one address; the interpreter lock is released."""
    bind_threads()
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library.address(driver(library.machine)))


@cache
def bind_threads() -> bool:
    """Make the thread pool that torch computes with known to the JIT; False if there is none, and
    then programs run on one thread."""
    llvm = binding()
    llvm.add_symbol(_FORKED, ctypes.addressof(_forked))
    symbols = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for path in _loaded_pools():
        pool = ctypes.CDLL(path)
        if all(hasattr(pool, s) for s in symbols):
            for s in symbols:
                llvm.add_symbol(s, address(getattr(pool, s)))
            return True
    nothing = ctypes.CFUNCTYPE(None)(lambda: None)
    bind_threads.unused = nothing  # type: ignore[attr-defined]
    for s in symbols:
        llvm.add_symbol(s, address(nothing))
    return False


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """While this is open, parallel regions of the calling thread have at most so many threads,
    torch's own as well."""
    pool = _pool()
    if pool is None:
        yield
        return
    before = pool.omp_get_max_threads()
    pool.omp_set_num_threads(min(count, before))
    try:
        yield
    finally:
        pool.omp_set_num_threads(before)


@cache
def _pool() -> ctypes.CDLL | None:
    pools = [ctypes.CDLL(path) for path in _loaded_pools()]
    return next((p for p in pools if hasattr(p, "omp_set_num_threads")), None)


def _loaded_pools() -> list[str]:
    """Paths of OpenMP libraries in this process, torch's own first."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    found = [p for p in paths if any(n in Path(p).name for n in ("libgomp", "libiomp", "libomp"))]
    return sorted(found, key=lambda p: ("torch" not in p, p))


# ---- are the tensors of a call still those of an earlier one? ----


HITS = 0
"""Word of a table that counts the calls that passed the test."""

_RECORD = 5  # words: position, object, implementation, address, version
_SAMPLE = 2  # words: address, content

_TEST_TEXT = """
define i64 @ENTRY(ptr %given, ptr %table) #0 {
entry:
  %found = alloca ptr
WORDS
  %size = call i64 %size.of(ptr %given)
  equal i64 %size, %length then head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %alike ]
  %more = icmp slt i64 %i, %records
  br i1 %more, label %look, label %samples.of
look:
  %i.at = mul i64 %i, RECORDWORDS
  %i.word = add i64 %i.at, HEADWORDS
  %record = getelementptr i64, ptr %table, i64 %i.word
  %position = load i64, ptr %record
  %object = word ptr %record, 1
  %mine = call ptr %item(ptr %given, i64 %position)
  call void %release(ptr %mine)
  equal ptr %mine, %object then inner
inner:
  %handle = getelementptr i8, ptr %object, i64 %inside
  %impl = load i64, ptr %handle
  %impl.then = word i64 %record, 2
  equal i64 %impl, %impl.then then place
place:
  %ignored = call i32 %address.of(ptr %handle, ptr %found)
  %address = load i64, ptr %found
  %address.then = word i64 %record, 3
  equal i64 %address, %address.then then counted
counted:
  %version.then = word i64 %record, 4
  %counts = icmp sge i64 %version.then, 0
  br i1 %counts, label %written, label %alike
written:
  %version = call i64 %version.of(ptr %handle)
  equal i64 %version, %version.then then alike
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
  %then = word i32 %pair, 1
  %changed = xor i32 %now, %then
  %differ.next = or i32 %differ, %changed
  %k.next = add i64 %k, 1
  br label %samples.head
sampled:
  equal i32 %differ, 0 then yes
yes:
  %hits = load i64, ptr %table
  %hits.next = add i64 %hits, 1
  store i64 %hits.next, ptr %table
  ret i64 1
other:
  ret i64 0
}
"""

_NUMBERS = ("records", "samples", "length", "inside")
_WORDS = (*_NUMBERS, "size.of", "item", "release", "address.of", "version.of")  # after the hits


Sample = tuple[int, int]
"""The address of four bytes of a tensor, and these."""


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
    for sample in samples:
        words += sample
    table = (ctypes.c_int64 * len(words))(*words)
    entry = _test(library)
    at = ctypes.cast(table, ctypes.c_void_p)  # which keeps the table
    return lambda given: entry(given, at), table


@cache
def _test(library: Library) -> Any:
    """The test as a Python callable that keeps the interpreter lock."""
    kinds = (ctypes.c_int64, ctypes.py_object, ctypes.c_void_p)
    return ctypes.PYFUNCTYPE(*kinds)(test_address(library))


@cache
def test_address(library: Library) -> int:
    """Where the test is: a function of a list or tuple and a table."""
    counts = {"RECORD": _RECORD, "HEAD": HITS + 1 + len(_WORDS), "SAMPLE": _SAMPLE}
    words = {f"{name}WORDS": str(count) for name, count in counts.items()}
    head = table_words(_WORDS, _NUMBERS, HITS + 1)
    text = filled(_TEST_TEXT, **words, **{"WORDS\n": head})
    return library.address(Kernel.of("same", written_out(text), ()))


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
    return inside, tuple(map(address, (*functions, address_of, version_of)))


@cache
def inside_of_tensors() -> int | None:
    """Where an object of class Tensor has its tensor, in bytes; None if that is not clear."""
    probe = torch.ones(3)
    words = torch.Tensor.__basicsize__ // 8
    inner = (ctypes.c_int64 * words).from_address(id(probe))
    places = [8 * k for k in range(2, words) if inner[k] == probe._cdata]
    return places[0] if len(places) == 1 else None


_VERSION = "_ZNK2at10TensorBase8_versionEv"  # int64_t at::TensorBase::_version() const
