"""Native parts of a program on a CPU: consecutive kernels become one call of the driver.

Where words go depends on the steps and on the kinds of memory they use, not on sizes: segments of
plans that differ in numbers only share an `Outline`, and binding one writes numbers and addresses.
A `Segment` is bound to the memory of one program: addresses that never change are written into the
argument blocks once, those of arguments and of fresh results are filled in at each call.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch

from torchair.codegen.cpu.driver import BARRIER, HEADER, PATCH, STEP, bind_threads, driver
from torchair.codegen.cpu.gate import Task
from torchair.codegen.cpu.target import cpu
from torchair.engine.plan.records import SIZES_AT, Plan, Room, Root, Step, aligned
from torchair.errors import InputError
from torchair.flags import poisoning
from torchair.log import native_logger

# ---- memory: pieces of it, tensors in it or made for each call, blocks that the user hands in;
# and a switch for finding faults, which fills it before each run, so that whatever reads what
# nothing has written gets NaN, a strange number, or now true and now false ----


Place = Callable[[int, int], torch.Tensor | None]
"""Memory, as bytes, for a slot of a plan or for its `ARENA`."""

ARENA = -1

_quick_empty = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
"""Torch's own short cut to `empty_strided`, without the parsing of arguments."""


@dataclass
class Memory:
    """Where the slots of a program are."""

    plan: Plan
    arena: int
    scratch: Callable[[int], torch.Tensor] | None = None  # gives so many bytes for this call

    def constant(self, root: Root) -> int:
        """Where a constant is."""
        return self.plan.constants[root.slot].data_ptr()


def aligned_bytes(size: int) -> torch.Tensor:
    """Memory that begins at a cache line."""
    made = torch.empty(size + 64, dtype=torch.uint8)
    return made[-made.data_ptr() % 64 :]


def laid_out(memory: torch.Tensor, dtype: torch.dtype, shape: Any, strides: Any) -> torch.Tensor:
    """Bytes as a tensor."""
    with torch.inference_mode(False):
        start = memory.storage_offset() // dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start, shape, strides)


Allocate = Callable[[Any, Any], Callable[[], torch.Tensor]]


def allocator(root: Root) -> Allocate:
    """From dims and strides to a function that makes the tensor of a root anew for every call,
    because it leaves the graph."""
    dtype, device = root.meta.dtype, torch.device(root.device)
    make = partial(torch.empty_strided, dtype=dtype, device=device)
    if poisoning():
        return lambda shape, strides: made_poisoned(partial(make, shape, strides))
    if device.type == "cpu" and _quick_empty is not None:
        return lambda shape, strides: partial(_quick_empty, shape, strides, dtype)
    return lambda shape, strides: partial(make, shape, strides)


# ---- poison ----

_NAN = 0xFF  # a number of such bytes is NaN in every float type
_STRANGE = 0xA5  # a large negative number in every signed type; 165


class Area(NamedTuple):
    """Bytes that hold elements of one type from step `first` on."""

    begin: int
    size: int
    first: int
    dtype: torch.dtype


def areas_of(plan: Plan, place: Callable[[Root], tuple[int, int]] | None = None) -> list[Area]:
    """What the arena of a plan holds; `place` gives (begin, bytes) where the plan does not."""
    areas = []
    for root in plan.roots:
        if root.kind == "arena":
            begin, size = (root.offset, root.bytes) if place is None else place(root)
            areas.append(Area(begin, size, root.first, root.meta.dtype))
    return areas


def pattern(size: int, areas: Iterable[Area]) -> torch.Tensor:
    """Bytes for memory of which these are the areas: what comes first decides where they overlap,
    the rest is NaN."""
    made = torch.full((size,), _NAN, dtype=torch.uint8)
    for area in sorted(areas, key=lambda a: -a.first):
        _fill(made[area.begin : area.begin + area.size], area.dtype)
    return made


def _fill(bytes: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.bool:  # other bytes than 0 and 1 are no values of the type
        bytes.fill_(0)[::2] = 1
    else:
        bytes.fill_(_NAN if dtype.is_floating_point or dtype.is_complex else _STRANGE)


def poisoned(
    run: Callable[..., Any], memory: torch.Tensor, areas: Sequence[Area] = ()
) -> Callable[..., Any]:
    """The same function, which finds the bytes of `memory` filled at each call."""
    if not poisoning():
        return run
    with torch.inference_mode():
        wanted = pattern(len(memory), areas).to(memory.device)

    def filled(*args: Any) -> Any:
        with torch.inference_mode():  # where tensors of all modes may be written
            memory.copy_(wanted)
        return run(*args)

    return filled


def made_poisoned(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same function, whose tensors are filled, with what lies between their elements."""

    def filled() -> torch.Tensor:
        made = make()
        bytes = torch.empty(0, dtype=torch.uint8, device=made.device)
        _fill(bytes.set_(made.untyped_storage()), made.dtype)
        return made

    return filled


# ---- memory that the user hands in ----


class GivenMemory:
    """Blocks of bytes that belong to the user. Calls that use them run one at a time."""

    def __init__(self) -> None:
        self.feature: torch.Tensor | None = None
        self.lock = RLock()
        self._constants: torch.Tensor | None = None
        self._used = 0
        self._moved: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def take_feature(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for intermediates from now on."""
        self.feature = _bytes(block, size, device, "intermediates")

    def take_constants(self, block: torch.Tensor, size: int, device: str) -> None:
        """Use a block for the constants of plans that are made from now on."""
        self._constants = _bytes(block, size, device, "constants")
        self._used, self._moved = 0, {}

    def place(self, slot: int, size: int) -> torch.Tensor | None:
        """Memory for a program, as its plan asks for it."""
        if slot != ARENA or self.feature is None or size > self.feature.numel():
            return None
        return self.feature[:size]

    def move_constants(self, plan: Plan) -> None:
        """Put the constants of a plan into the block, as far as there is room."""
        if self._constants is None:
            return
        for slot, t in plan.constants.items():
            plan.constants[slot] = self._at_home(t)

    def _at_home(self, t: torch.Tensor) -> torch.Tensor:
        key = (t.data_ptr(), t.dtype, t.shape)
        found = self._moved.get(key)
        assert self._constants is not None
        if found is not None or str(t.device.type) != str(self._constants.device.type):
            return t if found is None else found
        size = aligned(t.numel() * t.element_size())
        if not t.is_contiguous() or self._used + size > self._constants.numel():
            native_logger.info("a constant of %s bytes stays outside of the block given", size)
            return t
        place = self._constants[self._used : self._used + size]
        self._used += size
        moved = laid_out(place, t.dtype, t.shape, t.stride()).copy_(t)
        self._moved[key] = self._moved[(moved.data_ptr(), t.dtype, t.shape)] = moved
        return moved


def constant_bytes(plan: Plan) -> int:
    """Bytes that a block for the constants of a plan must have."""
    distinct = {(t.data_ptr(), t.dtype, t.shape): t for t in plan.constants.values()}
    return sum(aligned(t.numel() * t.element_size()) for t in distinct.values())


def _bytes(block: torch.Tensor, size: int, device: str, use: str) -> torch.Tensor:
    """A block as bytes that begin at a cache line; InputError if it is not large enough."""
    wanted = torch.device(device)
    if not isinstance(block, torch.Tensor) or not block.is_contiguous():
        raise InputError(f"memory for {use} is a contiguous tensor", got=type(block).__name__)
    if block.device.type != wanted.type:
        raise InputError(
            f"memory for {use} is on another device", expected=device, got=str(block.device)
        )
    whole = block.detach().view(-1).view(torch.uint8)
    whole = whole[-whole.data_ptr() % 64 :]
    if whole.numel() < size:
        raise InputError(
            f"memory for {use} is too small",
            expected=f"{size} bytes after the first address that 64 divides",
            got=f"{whole.numel()} bytes",
            hint="summary() tells the sizes; ask for 64 bytes more to be sure of the begin",
        )
    return whole


LINE = 8  # words in a cache line

Range = tuple[int, int, int]
"""A piece of memory: (space, first byte, last + 1); the arena is space -1."""


class Outline:
    """Positions in the memory of a segment, all in words: a header, a line for the barrier, the
    records of steps, their argument blocks, patches, addresses given by the caller, faults."""

    def __init__(self, steps: Sequence[Step], plan: Plan, last: Sequence[int] = ()) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not."""
        self.records = HEADER + LINE
        self.blocks: list[int] = []  # where the argument block of each step begins
        self.packed: list[tuple[int, torch.Tensor]] = []  # (word, constant)
        self.placed: list[tuple[int, int]] = []  # (word, slot) of the arena or of a constant
        self.scratch: list[int] = []
        self.faults: list[tuple[int, int]] = []  # (word, number of the step)
        given: list[tuple[int, int]] = []  # (word, slot)
        end = self.records + STEP * len(steps)
        for k, step in enumerate(steps):
            self._add(k, step, end, plan, given)
            end += step.code.words
        self._arrange(given, plan, last)
        self.patches_at, end = end, end + PATCH * len(self.patches)
        self.sources_at, end = end, end + len(self.sources)
        self.faults_at, end = end, end + len(self.faults)
        self.total = end
        self._find_writes(steps, plan)

    def _add(self, k: int, step: Step, at: int, plan: Plan, given: list[tuple[int, int]]) -> None:
        self.blocks.append(at)
        for word, x in enumerate(step.code.addresses, at):
            if isinstance(x, torch.Tensor):
                self.packed.append((word, x))
            elif isinstance(x, int):
                own = plan.place(x)[0].kind in ("arena", "const")
                (self.placed if own else given).append((word, x))
            elif x == Room.SCRATCH:
                self.scratch.append(word)
            else:
                self.faults.append((word, k))

    def _arrange(self, given: list[tuple[int, int]], plan: Plan, last: Sequence[int]) -> None:
        """Slots whose address is asked for at each call, and the words that it goes to."""
        owners = [_owner(plan.place(slot)[0]) for _, slot in given]
        self.sources = [s for s in dict.fromkeys(owners) if s not in last] + list(last)
        number = {s: k for k, s in enumerate(self.sources)}
        self.patches = [
            (word, number[owner], slot) for (word, slot), owner in zip(given, owners, strict=True)
        ]

    def _find_writes(self, steps: Sequence[Step], plan: Plan) -> None:
        """For each step the memory that it reads and that it writes, as far as steps write it."""
        written = {_space(plan.place(s)[0]) for step in steps for s in step.outs}
        self._touched: list[tuple[list[int], list[int]]] = []
        for step in steps:
            read = [plan.place(s)[0] for s in step.args if isinstance(s, int)]
            ins = [r.slot for r in read if _space(r) in written]
            self._touched.append((ins, [plan.place(s)[0].slot for s in step.outs]))
        self._owners = {s for ins, outs in self._touched for s in (*ins, *outs)}
        before = [([], []), *self._touched]
        self._sure = [  # steps that wait for the one before, wherever memory is
            not {*ins, *outs}.isdisjoint(written) or not set(outs).isdisjoint(read)
            for (ins, outs), (read, written) in zip(self._touched, before, strict=False)
        ]

    def write_fixed(self, block: Any, faults: int, scratch: int = 0) -> None:
        """Words that are the same for all sizes, in memory where those of faults are there."""
        for word, tensor in self.packed:
            block[word] = tensor.data_ptr()
        for word in self.scratch:
            block[word] = scratch
        for k, (word, _) in enumerate(self.faults):
            block[word] = faults + 8 * k

    def write_sized(self, block: Any, memory: Memory, steps: Sequence[Step]) -> None:
        """Words that follow from sizes, and from where memory is."""
        places = memory.plan.places
        for word, slot in self.placed:
            root, offset = places[slot]
            inside = root.kind == "arena"
            start = memory.arena + root.offset if inside else memory.constant(root)
            block[word] = start + offset
        for step, at in zip(steps, self.blocks, strict=True):
            numbers = step.code.numbers
            block[at + SIZES_AT : at + SIZES_AT + len(numbers)] = numbers

    def ranges(self, plan: Plan) -> list[tuple[list[Range], list[Range]]]:
        """For each step the memory that it reads, as far as steps write it, and that it writes."""
        found = {s: range_of(plan.places[s][0]) for s in self._owners}
        return [([found[s] for s in ins], [found[s] for s in outs]) for ins, outs in self._touched]

    def barriers(self, steps: Sequence[Step], plan: Plan) -> list[int]:
        """Flags of the steps: those wait for all threads that touch what was just written."""
        flags: list[int] = []
        reads: list[Range] = []
        writes: list[Range] = []
        scratch = 0
        for step, (ins, outs), sure in zip(steps, self.ranges(plan), self._sure, strict=True):
            own = step.code.scratch
            waits = sure or bool(scratch and own and scratch != own)
            waits = waits or meet(ins, writes) or meet(outs, writes) or meet(outs, reads)
            if waits and flags:
                reads, writes, scratch = [], [], 0
            reads += ins
            writes += outs
            scratch = own or scratch
            flags.append(BARRIER if waits else 0)
        return flags


def _owner(root: Root) -> int:
    """The slot with the tensor that a root is the memory of."""
    return root.tied_to if root.kind == "tied" else root.slot


def _space(root: Root) -> int:
    return -1 if root.kind == "arena" else _owner(root)


def range_of(root: Root) -> Range:
    """Where a root is; an empty one in the arena meets no other."""
    if root.kind == "arena" and root.bytes:
        return -1, root.offset, root.offset + root.bytes
    return _owner(root), 0, 1


def meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether two lots of memory have a byte in common."""
    for space, first, end in some:
        for space2, first2, end2 in others:
            if space == space2 and first < end2 and first2 < end:
                return True
    return False


ALONE = 12.0  # microseconds of work that a second thread does not pay for
LONG = 20.0  # microseconds of work, from which on other threads of Python run meanwhile
THREADS = 2  # word of the header


class BadIndex(IndexError):
    """An index out of range that a kernel met; `step` is the one it belongs to."""

    def __init__(self, step: Step) -> None:
        super().__init__("an index is out of range")
        self.step = step


class NativePart(abc.ABC):
    """Consecutive native steps, bound to memory."""

    steps: list[Step]
    outline: Outline

    @property
    def sources(self) -> list[int]:
        """Slots whose address is asked for at each call."""
        return self.outline.sources

    @abc.abstractmethod
    def call(self) -> Callable[[list[int]], None]:
        """A function of the addresses of `sources` that runs all steps."""

    def bind(self) -> Callable[[list[Any]], None]:
        """A function of the registers that runs all steps."""
        sources, run = self.sources, self.call()
        return lambda r: run([r[s].data_ptr() for s in sources])


class Segment(NativePart):
    """Native steps on a CPU."""

    def __init__(
        self, steps: Sequence[Step], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not."""
        self.steps = list(steps)
        calls = [s.code for s in steps]
        most = self._threads_of(min(threads, memory.plan.threads or threads))
        self.threads = self.most = most  # for the sizes of this plan
        room = max((c.scratch for c in calls), default=0) * self.threads
        self._scratch = (memory.scratch or aligned_bytes)(room)
        outlines, key = memory.plan.outlines, (*[id(c.operands) for c in calls], *last)
        if key not in outlines:
            outlines[key] = Outline(steps, memory.plan, last)
        self.outline: Outline = outlines[key]
        self._memory = torch.zeros(self.outline.total + LINE, dtype=torch.int64)
        self.base = -(-self._memory.data_ptr() // 64) * 64  # the barrier has a line to itself
        self.block = (ctypes.c_int64 * self.outline.total).from_address(self.base)
        faults = self.base + 8 * self.outline.faults_at
        self.outline.write_fixed(self.block, faults, self._scratch.data_ptr())
        self._write_sized(memory)
        self._write_program()

    def _threads_of(self, threads: int) -> int:
        """The most threads that ever run it."""
        return threads if sum(s.code.work for s in self.steps) > ALONE and bind_threads() else 1

    def _write_sized(self, memory: Memory) -> None:
        """What follows from sizes, and from where memory is."""
        outline = self.outline
        outline.write_sized(self.block, memory, self.steps)
        for k, (_, _, slot) in enumerate(outline.patches):
            self.block[outline.patches_at + PATCH * k + 2] = memory.plan.places[slot][1]
        self._write_flags(outline.barriers(self.steps, memory.plan))

    def _write_program(self) -> None:
        """Header, records of steps, patches."""
        outline, base, code = self.outline, self.base, cpu().library
        for k, (step, at) in enumerate(zip(self.steps, outline.blocks, strict=True)):
            first = outline.records + STEP * k
            self.block[first : first + 2] = code.address(step.code.kernel), base + 8 * at
        for k, (word, source, _) in enumerate(outline.patches):
            first = outline.patches_at + PATCH * k
            self.block[first : first + 2] = base + 8 * word, source
        header = [
            base + 8 * outline.records, len(self.steps), self.threads,
            base + 8 * outline.patches_at, len(outline.patches), base + 8 * outline.sources_at,
            base + 8 * HEADER, 0,
        ]  # fmt: skip
        self.block[0 : len(header)] = header

    def _write_flags(self, flags: Sequence[int]) -> None:
        for k, flag in enumerate(flags):
            self.block[self.outline.records + STEP * k + 2] = flag

    def call(self) -> Callable[[list[int]], None]:
        given, fire = self.given, self.fire()

        def run(addresses: list[int]) -> None:
            given[:] = addresses
            fire()

        return run

    @property
    def given(self) -> Any:
        """The words that hold the addresses of `sources`."""
        return (ctypes.c_int64 * len(self.outline.sources)).from_address(self.given_at)

    @property
    def given_at(self) -> int:
        """Where these words are."""
        return self.base + 8 * self.outline.sources_at

    def task(self) -> Task:
        """The segment as a gate runs it."""
        outline, code = self.outline, cpu().library
        faults = self.base + 8 * outline.faults_at
        long = sum(s.code.work for s in self.steps) > LONG
        drive = code.address(driver(code.machine))
        return Task(self.base, drive, self.threads, faults, len(outline.faults), long)

    def faulty(self) -> Step | None:
        """The step whose kernel met a bad index in the last run. It is forgotten then."""
        first, count = self.outline.faults_at, len(self.outline.faults)
        found = self.block[first : first + count]
        self.block[first : first + count] = [0] * count
        steps = [k for f, (_, k) in zip(found, self.outline.faults, strict=True) if f]
        return self.steps[steps[0]] if steps else None

    def fire(self) -> Callable[[], None]:
        """A function that runs the segment on the addresses `given` holds."""
        block, base, driver = self.block, self.base, cpu().driver()
        threads = torch.get_num_threads

        def run(owner: Any = self) -> None:
            if owner.most > 1:
                block[THREADS] = min(owner.most, threads())
            driver(base)

        fire = poisoned(run, self._scratch)
        return self._raising(fire) if self.outline.faults else fire

    def _raising(self, run: Callable[[], None]) -> Callable[[], None]:
        """The same, raising for an index out of range when the kernels have ended."""
        block, first = self.block, self.outline.faults_at
        last, clean = first + len(self.outline.faults), [0] * len(self.outline.faults)

        def run_and_look() -> None:
            run()
            if block[first:last] != clean:
                step = self.faulty()
                assert step is not None
                raise BadIndex(step)

        return run_and_look
