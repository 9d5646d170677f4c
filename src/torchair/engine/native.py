"""Native parts of a program: consecutive kernels become one call of the driver.

A `Segment` is bound to the memory of one program: addresses that never change are written into the
argument blocks once, those of arguments and of fresh results are filled in at each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchair.codegen.llvm.driver import BARRIER, HEADER, PATCH, STEP, bind_threads, entry_point
from torchair.codegen.llvm.jit import Library
from torchair.codegen.llvm.target import host
from torchair.engine.plan import Plan, Step

_ALONE = 12.0  # microseconds of work that a second thread does not pay for
_LINE = 8  # words in a cache line


@cache
def library() -> Library:
    """All native code of this process."""
    return Library()


@cache
def _driver() -> Any:
    return entry_point(library())


@cache
def available() -> str | None:
    """Why there is no native code on this machine, None if there is."""
    try:
        host()
        _driver()
    except Exception as e:  # LLVM missing, or a processor it does not know
        return f"{type(e).__name__}: {e}"
    return None


@dataclass
class Memory:
    """Where the slots of a program are. `fixed` are addresses known when it is bound."""

    plan: Plan
    arena: int
    constants: dict[int, torch.Tensor]

    def fixed(self, slot: int) -> int | None:
        """The address of a slot if it is the same in every call."""
        root, offset = self.plan.place(slot)
        if root.kind == "arena":
            return self.arena + root.offset + offset
        if root.kind == "const":
            return self.constants[root.slot].data_ptr() + offset
        return None


class BadIndex(IndexError):
    """An index out of range that a kernel met; `step` is the one it belongs to."""

    def __init__(self, step: Step) -> None:
        super().__init__("an index is out of range")
        self.step = step


class Segment:
    """Consecutive native steps, bound to memory."""

    def __init__(
        self, steps: Sequence[Step], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not."""
        self.steps = list(steps)
        self._last = list(last)
        self._plan = memory.plan
        calls = [s.code for s in steps]
        work = sum(c.work for c in calls)
        self._threads = threads if work > _ALONE and bind_threads() else 1
        self._scratch = _aligned(max((c.scratch for c in calls), default=0) * self._threads)
        self._sources: list[int] = []  # slots whose address is asked for at each call
        self._patches: list[tuple[int, int, int]] = []  # (word in the block, source, bytes)
        self._faults: list[tuple[int, Step]] = []  # (word in a block, step)
        self._keep: list[Any] = [self._scratch]
        library().add(c.kernel for c in calls)
        self._write(memory)

    def _write(self, memory: Memory) -> None:
        """Header, records, patches and argument blocks, in one piece of memory."""
        sizes = [s.code.words for s in self.steps]
        blocks, total = [], HEADER + _LINE + STEP * len(self.steps)
        for n in sizes:
            blocks.append(total)
            total += n
        words = [0] * total
        for step, at in zip(self.steps, blocks, strict=True):
            self._fill(words, step, at, memory)
        self._arrange()
        patches, total = total, total + PATCH * len(self._patches)
        slots, total = total, total + len(self._sources)
        faults, total = total, total + len(self._faults)
        block = self._block = (ctypes.c_int64 * (total + 2 * _LINE))()
        base = ctypes.addressof(block)
        shift = -(base // 8) % _LINE  # the barrier has a cache line to itself
        base += 8 * shift
        flags = _barriers(self.steps, self._plan)
        for k, (step, at, flag) in enumerate(zip(self.steps, blocks, flags, strict=True)):
            record = HEADER + _LINE + STEP * k
            words[record : record + STEP] = [
                library().address(step.code.kernel), base + 8 * at, flag,
            ]  # fmt: skip
        words += [x for at, k, plus in self._patches for x in (base + 8 * at, k, plus)]
        words += [0] * (len(self._sources) + len(self._faults))
        for k, (at, _) in enumerate(self._faults):
            words[at] = base + 8 * (faults + k)
        words[:HEADER] = [
            base + 8 * (HEADER + _LINE), len(self.steps), self._threads, base + 8 * patches,
            len(self._patches), base + 8 * slots, base + 8 * HEADER, 0,
        ]  # fmt: skip
        block[shift : shift + total] = words  # type: ignore[assignment]
        self._base, self._slots = base, shift + slots
        self._faults_at = shift + faults
        self._threads_at = shift + 2

    def _arrange(self) -> None:
        """Put the slots that are to be last there."""
        order = [s for s in self._sources if s not in self._last] + self._last
        self._patches = [
            (at, order.index(self._sources[k]), plus) for at, k, plus in self._patches
        ]
        self._sources = order

    def _fill(self, words: list[int], step: Step, at: int, memory: Memory) -> None:
        call = step.code
        for k, slot in enumerate(call.slots):
            if isinstance(slot, str) and slot == "scratch":
                words[at + k] = self._scratch.data_ptr()
            elif isinstance(slot, str):
                self._faults.append((at + k, step))
            elif isinstance(slot, torch.Tensor):
                self._keep.append(slot)
                words[at + k] = slot.data_ptr()
            else:
                self._point(words, at + k, slot, memory)
        first = at + call.words - len(call.numbers)
        words[first : first + len(call.numbers)] = call.numbers

    def _point(self, words: list[int], at: int, slot: int, memory: Memory) -> None:
        address = memory.fixed(slot)
        if address is not None:
            words[at] = address
            return
        root, offset = memory.plan.place(slot)
        source = root.tied_to if root.kind == "tied" else root.slot
        if source not in self._sources:
            self._sources.append(source)
        self._patches.append((at, self._sources.index(source), offset))

    @property
    def sources(self) -> list[int]:
        """Slots whose address is asked for at each call."""
        return self._sources

    def bind(self) -> Callable[[list[Any]], None]:
        """A function of the registers that runs the segment."""
        sources, run = self._sources, self.call()
        return lambda r: run([r[s].data_ptr() for s in sources])

    def call(self) -> Callable[[list[int]], None]:
        """A function of the addresses of `sources` that runs the segment."""
        block, base, driver = self._block, self._base, _driver()
        first, last = self._slots, self._slots + len(self._sources)
        most, threads_at, threads = self._threads, self._threads_at, torch.get_num_threads

        def run(addresses: list[int], _owner: Any = self) -> None:
            block[first:last] = addresses  # type: ignore[assignment]
            if most > 1:
                block[threads_at] = min(most, threads())
            driver(base)

        return self._raising(run) if self._faults else run

    def _raising(self, run: Callable[[list[int]], None]) -> Callable[[list[int]], None]:
        """The same, raising for an index out of range when the kernels have ended."""
        block, first = self._block, self._faults_at
        last = first + len(self._faults)
        clean, steps = [0] * len(self._faults), [s for _, s in self._faults]

        def run_and_look(addresses: list[int]) -> None:
            run(addresses)
            found = block[first:last]
            if found != clean:
                block[first:last] = clean  # type: ignore[assignment]
                raise BadIndex(steps[found.index(1)])

        return run_and_look


def _aligned(size: int) -> torch.Tensor:
    """Memory that begins at a cache line."""
    made = torch.empty(size + 64, dtype=torch.uint8)
    return made[-made.data_ptr() % 64 :]


def _barriers(steps: Sequence[Step], plan: Plan) -> list[int]:
    """Which steps must wait for all threads: those that touch what others have just written."""
    flags: list[int] = []
    reads: list[tuple[int, int, int]] = []
    writes: list[tuple[int, int, int]] = []
    scratch = 0
    for step in steps:
        ins = [_range(s, plan) for s in step.args if isinstance(s, int)]
        outs = [_range(s, plan) for s in step.outs]
        own = step.code.scratch
        waits = _touch(ins, writes) or _touch(outs, writes) or _touch(outs, reads)
        waits = waits or bool(scratch and own and scratch != own)
        if waits and flags:
            reads, writes, scratch = [], [], 0
        reads += ins
        writes += outs
        scratch = own or scratch
        flags.append(BARRIER if waits else 0)
    return flags


def _range(slot: int, plan: Plan) -> tuple[int, int, int]:
    """The piece of memory a slot is in: (space, first, last + 1); the arena is space -1."""
    root, _ = plan.place(slot)
    if root.kind == "arena":
        return -1, root.offset, root.offset + max(root.size, 1)
    return (root.tied_to if root.kind == "tied" else root.slot), 0, 1


def _touch(a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]) -> bool:
    return any(x == y and lo < hi2 and lo2 < hi for x, lo, hi in a for y, lo2, hi2 in b)
