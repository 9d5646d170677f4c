"""Functions on the machine for PTX: arguments of each thread, memory of the block by a pointer,
barriers in them, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_machine
from ptx_machine import Order
from torchair.codegen.cuda.jit import Entry, describe, ptx
from torchair.codegen.target import Kernel, Launch

GPU = describe((9, 0), 4)
THREADS = 64
REGISTER = "llvm.nvvm.read.ptx.sreg.tid.x"
DECLARED = [f"declare i32 @{REGISTER}()", "declare void @llvm.nvvm.barrier0()"]
TEXT = f"""
@ENTRY.room = internal addrspace(3) global [{2 * THREADS} x i32] poison, align 16

define internal void @ENTRY.put(ptr addrspace(3) %room, i64 %at, i32 %value) noinline {{
  %to = getelementptr i32, ptr addrspace(3) %room, i64 %at
  store i32 %value, ptr addrspace(3) %to
  ret void
}}

define internal void @ENTRY.swap(
  ptr addrspace(3) %room, i64 %mine, i64 %other, i32 %value, ptr %out
) noinline {{
  call void @ENTRY.put(ptr addrspace(3) %room, i64 %mine, i32 %value)
  BARRIER
  %from = getelementptr i32, ptr addrspace(3) %room, i64 %other
  %found = load i32, ptr addrspace(3) %from
  %to = getelementptr i32, ptr %out, i64 %mine
  store i32 %found, ptr %to
  ret void
}}

define internal void @ENTRY(i64 %block, i64 %blocks, ptr %w0) alwaysinline {{
  %short = call i32 @{REGISTER}()
  %thread = zext i32 %short to i64
  %other = sub i64 {THREADS - 1}, %thread
  %low = icmp ult i32 %short, 32
  br i1 %low, label %lower, label %upper
lower:
  %times = mul i32 %short, 10
  call void @ENTRY.swap(
    ptr addrspace(3) @ENTRY.room, i64 %thread, i64 %other, i32 %times, ptr %w0)
  br label %again
upper:
  %more = add i32 %short, 1000
  call void @ENTRY.swap(
    ptr addrspace(3) @ENTRY.room, i64 %thread, i64 %other, i32 %more, ptr %w0)
  br label %again
again:
  %behind = getelementptr i32, ptr %w0, i64 {THREADS}
  %room = getelementptr i32, ptr addrspace(3) @ENTRY.room, i64 {THREADS}
  call void @ENTRY.swap(
    ptr addrspace(3) %room, i64 %other, i64 %thread, i32 %short, ptr %behind)
  ret void
}}
"""
BARRIER = "call void @llvm.nvvm.barrier0()"


def ran(text: str, order: Order) -> np.ndarray:
    kernel = Kernel.of("swaps", text, DECLARED, {0: "ptr"})
    assert ptx([Entry((kernel,), THREADS)], GPU).count("call.uni") == 4
    memory, like = ptx_machine.Memory(), np.zeros(2 * THREADS, np.int32)
    out = memory.place(like)
    how = Launch(THREADS, 1, (1,))
    ptx_machine.launch(kernel, how, GPU, memory, [out], 1, order)
    return memory.read(out, like)


def expected() -> np.ndarray:
    number = np.arange(THREADS)
    given = np.where(number < 32, 10 * number, number + 1000)
    return np.concatenate([given[::-1], number])


@pytest.mark.parametrize("order", ["together", "up", "down"])
def test_functions_return_to_where_each_thread_came_from(order: Order) -> None:
    assert (ran(TEXT.replace("BARRIER", BARRIER), order) == expected()).all()


def test_a_barrier_that_is_missing_in_a_function_shows() -> None:
    assert (ran(TEXT.replace("BARRIER", ""), "up") != expected()).any()
