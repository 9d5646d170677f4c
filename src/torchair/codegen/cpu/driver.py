"""Native functions around the kernels: the one that runs a list of them, one parallel region with
light barriers between.

The driver walks records instead of being compiled for each program, so that a plan for new sizes
needs no compiler: the records name the kernels, and an argument block of words belongs to each.
"""

from __future__ import annotations

import ctypes
from functools import cache

from torchair.codegen.cpu.jit import Library
from torchair.codegen.cpu.openmp import FORKED, Regions, bind_threads, thread_pool
from torchair.codegen.cpu.templates import filled, written_out
from torchair.codegen.target import Kernel
from torchair.codegen.text.writer import Machine

BARRIER = 1
"""Flag of a step: wait for all threads before it."""

HEADER = 8  # words: steps, their number, threads, patches, their number, slots, barrier, unused
STEP = 3  # words: function, argument block, flags
PATCH = 3  # words: where to write, slot, bytes to add

_SPINS = 256  # looks at the barrier before a thread offers its core to others


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

_LLVM_TEXT = """
@ENTRY.source = internal constant [23 x i8] c";unknown;unknown;0;0;;\\00"
@ENTRY.place = internal constant { i32, i32, i32, i32, ptr }
  { i32 0, i32 2, i32 0, i32 22, ptr @ENTRY.source }

define internal void @ENTRY.task(ptr %global, ptr %bound, ptr %body, ptr %data) #0 {
  call void %body(ptr %data)
  ret void
}

define internal void @ENTRY.parallel(ptr %body, ptr %data, i32 %threads, i32 %flags) #0 {
  %me = call i32 @__kmpc_global_thread_num(ptr @ENTRY.place)
  call void @__kmpc_push_num_threads(ptr @ENTRY.place, i32 %me, i32 %threads)
  call void (ptr, i32, ptr, ...) @__kmpc_fork_call(ptr @ENTRY.place, i32 2, ptr @ENTRY.task,
                                                   ptr %body, ptr %data)
  ret void
}
"""
"""GCC's function in terms of LLVM's, which wants the place in the source that a region is from."""

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


_DECLARED = {
    Regions.GCC: ["declare void @GOMP_parallel(ptr, ptr, i32, i32)"],
    Regions.LLVM: [
        "declare i32 @__kmpc_global_thread_num(ptr)",
        "declare void @__kmpc_push_num_threads(ptr, i32, i32)",
        "declare void @__kmpc_fork_call(ptr, i32, ptr, ...)",
    ],
}


def driver(machine: Machine, regions: Regions = Regions.GCC) -> Kernel:
    """The code of the driver for a processor, with the functions of a thread pool."""
    pause = "call void @llvm.x86.sse2.pause()" if machine.arch == "x86_64" else "fence acquire"
    counts = {"SPINS": str(_SPINS), "STEPWORDS": str(STEP), "PATCHWORDS": str(PATCH)}
    text = written_out(filled(_TEXT, PAUSE=pause, FORKED=FORKED, **counts))
    if regions is Regions.LLVM:
        text = _LLVM_TEXT + text.replace("@GOMP_parallel", "@ENTRY.parallel")
    declared = [
        f"@{FORKED} = external global i64",
        "declare i32 @sched_yield()",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
        *_DECLARED[regions],
    ]
    if machine.arch == "x86_64":
        declared.append("declare void @llvm.x86.sse2.pause()")
    return Kernel.of("run", text, declared)


@cache
def entry_point(library: Library) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The driver as a Python callable of one address; the interpreter lock is released."""
    bind_threads()
    pool = thread_pool()
    code = driver(library.machine, pool.regions) if pool else driver(library.machine)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library.address(code))
