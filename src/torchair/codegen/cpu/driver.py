"""Native functions around the kernels: the one that runs a list of them, one parallel region with
light barriers between.

The driver walks records instead of being compiled for each program, so that a plan for new sizes
needs no compiler: the records name the kernels, and an argument block of words belongs to each.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.layouts import address
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
    place = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(None, place, place, ctypes.c_int64, place)
    return kind(library.address(filler_kernel()))


def filler_kernel() -> Kernel:
    """The code of the filler."""
    return Kernel.of("fill", written_out(_FILL_TEXT.replace("FILLWORDS", str(FILL))), [])


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
    """Make the thread pool that torch computes with known to the JIT, where there is one; False if
    there is no pool, and then programs run on one thread."""
    symbols, several = pool_symbols()
    try:
        llvm = binding()
    except ImportError:  # code is from a package, which has been given the symbols
        return several
    for name, at in symbols.items():
        llvm.add_symbol(name, at)
    return several


@cache
def pool_symbols() -> tuple[dict[str, int], bool]:
    """Addresses of what the driver needs, and whether there is a thread pool among it."""
    found = {_FORKED: ctypes.addressof(_forked)}
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for path in _loaded_pools():
        pool = ctypes.CDLL(path)
        if all(hasattr(pool, name) for name in names):
            return found | {name: address(getattr(pool, name)) for name in names}, True
    return found | dict.fromkeys(names, address(_nothing)), False


_nothing = ctypes.CFUNCTYPE(None)(lambda: None)  # in the place of a pool that is not used


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
