"""What a target runs: pieces of memory, calls of kernels over them, and where the words go that
kernels are called with. Records that planning fills and targets read; no graph is known here.

`Step` and `Plan` are what a target sees of those of the engine.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torchair.codegen.target import Generated, Kernel, KernelConfig, KernelOrder

# ---- memory ----


AllocationKind = Literal["input", "const", "arena", "fresh", "torch", "tied"]
"""Whose memory it is: `input` and `const` come from outside; `arena` is planned here; `fresh` is
allocated for each call because it leaves the graph; `torch` is whatever the kernel returns; `tied`
is the memory of an input that this value updates."""


@dataclass(slots=True)
class Allocation:
    """One piece of memory that values live in."""

    slot: int
    kind: AllocationKind
    meta: Any  # dims, strides and type, without data: see `strides.Meta`
    device: str
    first: int = 0
    last: int = 0
    buffer: int = -1  # of the arena
    offset: int = -1  # of that buffer in the arena
    bytes: int = 0  # of that buffer
    # a buffer that ends where this one begins: may be reused
    successor_of: Allocation | None = None
    tied_to: int = -1  # slot of the input it updates
    fixed: bool = False  # native code knows its strides
    # made by torch, read by native code: strides must be the planned ones
    strict_strides: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.meta.numel() * self.meta.element_size()


# ---- calls of kernels ----


SIZES_AT = 64
"""Word of an argument block where the sizes of a kernel begin; addresses come before."""


class AuxMemory(StrEnum):
    """Memory of a program that a kernel gets beside its operands."""

    SCRATCH = "scratch"  # for itself, while it runs
    FAULT = "fault"  # the word where it notes down that an index was out of range


ConstantContent = Literal["own", "scaled", "shift"]
"""What a constant holds for a kernel: its own content, the weights of a convolution times the
scale of the normalisation after it, or what is added then."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What one word of a kernel is the address of."""

    of: int | AuxMemory  # an operand by its number: the inputs of a unit, then its outputs
    content: ConstantContent | None = None  # of one that is the same in every call


class Constant(NamedTuple):
    """A constant operand of a unit, which its kernel may want in another layout. Which value of
    which unit it is concerns the engine alone."""

    unit: Any
    value: Any
    content: ConstantContent


@dataclass(slots=True)
class Native:
    """A kernel with what it is called with: an address for each of its `arguments`, which all its
    calls have in common, then sizes."""

    order: KernelOrder
    arguments: Sequence[Argument]
    numbers: tuple[int, ...]
    work: float  # microseconds that one thread needs, roughly
    unit: Any = None  # of the engine: whose operands they are
    operands: list[Any] = field(default_factory=list)  # slots
    packed: dict[int, torch.Tensor] = field(default_factory=dict)  # by word: constants laid out
    copies: bool = False  # its first argument must have been copied to its result
    pointwise: bool = False  # it may overwrite an argument of the same dims

    @property
    def addresses(self) -> list[Any]:
        """What each of the first words is the address of: a slot, a `AuxMemory`, or a constant as
        the kernel wants it."""
        own = [a.of if isinstance(a.of, AuxMemory) else self.operands[a.of] for a in self.arguments]
        return [self.packed.get(word, x) for word, x in enumerate(own)]

    @property
    def constants(self) -> dict[int, Constant]:
        """Operands that are the same in every call, by word."""
        values = [*self.unit.inputs, *self.unit.outputs] if self.unit is not None else []
        return {
            word: Constant(self.unit, values[a.of], a.content)  # type: ignore[index]
            for word, a in enumerate(self.arguments)
            if a.content is not None
        }

    @property
    def generated(self) -> Generated:
        """What the target made of the order."""
        return self.order.generated

    @property
    def kernel(self) -> Kernel:
        """Its code."""
        return self.generated.kernel

    @property
    def scratch(self) -> int:
        """Bytes of memory that each thread needs."""
        return self.generated.scratch

    @property
    def words(self) -> int:
        """Length of the argument block."""
        return SIZES_AT + len(self.numbers) if self.numbers else len(self.arguments)


class TargetStep(Protocol):
    """A native step of a plan."""

    @property
    def code(self) -> Native:
        """What it runs."""

    @property
    def args(self) -> Sequence[Any]:
        """Slots that it reads, lists of slots, or None."""

    @property
    def outs(self) -> Sequence[int]:
        """Slots that it writes."""


@dataclass(frozen=True)
class Subject:
    """What is measured: a kernel, and the steps that it computes, by whose order words count."""

    order: KernelOrder
    steps: Sequence[Any]
    beside: bool = False  # others stand beside it in a launch, which asks for blocks of one size

    @property
    def work(self) -> float:
        """Microseconds, roughly."""
        return sum(step.code.work for step in self.steps)


class Trial(Protocol):
    """A kernel by itself, ready to be run. What has a clock of its own has `seconds` too."""

    steps: int
    """How often a run computes it."""
    threads: int

    def __call__(self) -> object:
        """One run."""


@runtime_checkable
class Timed(Protocol):
    """Work of a device that has a clock of its own."""

    def seconds(self, window: float) -> float:
        """What the best of some runs takes, in a window of so many seconds."""


class TargetPlan(Protocol):
    """Steps over memory, for one set of sizes."""

    @property
    def constants(self) -> Mapping[int, torch.Tensor]:
        """Tensors by slot that are the same in every call."""

    @property
    def places(self) -> Mapping[int, tuple[Allocation, int]]:
        """By slot the piece of memory that it is in, and how many bytes after its begin."""

    @property
    def layouts(self) -> dict[Any, Any]:
        """What programs of this plan share: a target keeps here what it computes once."""

    @property
    def threads(self) -> int:
        """The most threads that run its native steps, 0: as many as torch has."""

    @property
    def config_of(self) -> Callable[[Any], KernelConfig]:
        """What was chosen by measuring for a kernel that computes several steps."""

    @property
    def native_steps(self) -> Sequence[TargetStep]:
        """All steps that are generated code."""

    @property
    def native_parts(self) -> Sequence[Sequence[TargetStep]]:
        """The same, those together that programs run as one part."""

    @property
    def new_natives(self) -> Sequence[Native]:
        """What they run, as far as it may have to be compiled."""

    @property
    def most_alive(self) -> int:
        """Bytes of planned memory that steps may use at once, wherever they are moved."""

    def super_kernel_of(self, step: TargetStep) -> str | None:
        """The name of the one kernel that a step is to be computed in with others; None where it
        is in whatever kernel it is."""

    def alive(self, step: TargetStep) -> int:
        """Bytes of planned memory in use while a step runs, where none is moved."""

    def place(self, slot: int) -> tuple[Allocation, int]:
        """The piece of memory a slot is in, and how many bytes after its begin."""


@dataclass
class Memory:
    """Where the slots of a program are."""

    plan: TargetPlan
    arena: int  # its address
    scratch: Callable[[int], torch.Tensor] | None = None  # gives so many bytes for this call

    def constant(self, allocation: Allocation) -> int:
        """Where a constant is."""
        return self.plan.constants[allocation.slot].data_ptr()


def aligned_bytes(size: int) -> torch.Tensor:
    """Memory that begins at a cache line."""
    made = torch.empty(size + 64, dtype=torch.uint8)
    return made[-made.data_ptr() % 64 :]


# ---- where words go ----


Range = tuple[int, int, int]
"""A piece of memory: (space, first byte, last + 1); the arena is space -1, where buffers count as
long as they have no bytes."""


class ArgumentLayout:
    """Where the words of consecutive native steps go: one argument block for each, one after the
    other. It depends on the steps and on the kinds of memory they use, not on sizes: plans that
    differ in numbers only share it."""

    def __init__(
        self,
        steps: Sequence[TargetStep],
        plan: TargetPlan,
        last: Sequence[int] = (),
        first: int = 0,
    ) -> None:
        """`last` are slots that come at the end of `sources`, whether a kernel uses them or not;
        `first` is the word that the blocks begin at."""
        self.blocks: list[int] = []  # where the argument block of each step begins
        self.packed: list[tuple[int, torch.Tensor]] = []  # (word, constant)
        self.placed: list[tuple[int, int]] = []  # (word, slot) of the arena or of a constant
        self.scratch: list[int] = []
        self.faults: list[tuple[int, int]] = []  # (word, number of the step)
        given: list[tuple[int, int]] = []  # (word, slot)
        end = first
        for k, step in enumerate(steps):
            self._add(k, step, end, plan, given)
            end += step.code.words
        self.end = end
        self._arrange(given, plan, last)
        self._find_writes(steps, plan)

    def _add(
        self, k: int, step: TargetStep, at: int, plan: TargetPlan, given: list[tuple[int, int]]
    ) -> None:
        self.blocks.append(at)
        for word, x in enumerate(step.code.addresses, at):
            if isinstance(x, torch.Tensor):
                self.packed.append((word, x))
            elif isinstance(x, int):
                own = plan.place(x)[0].kind in ("arena", "const")
                (self.placed if own else given).append((word, x))
            elif x == AuxMemory.SCRATCH:
                self.scratch.append(word)
            else:
                self.faults.append((word, k))

    def _arrange(self, given: list[tuple[int, int]], plan: TargetPlan, last: Sequence[int]) -> None:
        """Slots whose address is asked for at each call, and the words that it goes to."""
        owners = [_owner(plan.place(slot)[0]) for _, slot in given]
        self.sources = [s for s in dict.fromkeys(owners) if s not in last] + list(last)
        number = {s: k for k, s in enumerate(self.sources)}
        self.patches = [
            (word, number[owner], slot) for (word, slot), owner in zip(given, owners, strict=True)
        ]

    def _find_writes(self, steps: Sequence[TargetStep], plan: TargetPlan) -> None:
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

    def write_sized(self, block: Any, memory: Memory, steps: Sequence[TargetStep]) -> None:
        """Words that follow from sizes, and from where memory is."""
        places = memory.plan.places
        for word, slot in self.placed:
            allocation, offset = places[slot]
            inside = allocation.kind == "arena"
            start = memory.arena + allocation.offset if inside else memory.constant(allocation)
            block[word] = start + offset
        for step, at in zip(steps, self.blocks, strict=True):
            numbers = step.code.numbers
            block[at + SIZES_AT : at + SIZES_AT + len(numbers)] = numbers

    def ranges(self, plan: TargetPlan) -> list[tuple[list[Range], list[Range]]]:
        """For each step the memory that it reads, as far as steps write it, and that it writes."""
        found = {s: range_of(plan.places[s][0]) for s in self._owners}
        return [([found[s] for s in ins], [found[s] for s in outs]) for ins, outs in self._touched]


def _owner(allocation: Allocation) -> int:
    """The slot with the tensor that an allocation is the memory of."""
    return allocation.tied_to if allocation.kind == "tied" else allocation.slot


def _space(allocation: Allocation) -> int:
    return -1 if allocation.kind == "arena" else _owner(allocation)


def range_of(allocation: Allocation) -> Range:
    """Where an allocation is: the buffer that it is in before the arena is laid out, its bytes
    afterwards. An empty one in the arena meets no other."""
    if allocation.kind == "arena" and allocation.buffer >= 0 and allocation.offset < 0:
        return -1, allocation.buffer, allocation.buffer + 1
    if allocation.kind == "arena" and allocation.bytes:
        return -1, allocation.offset, allocation.offset + allocation.bytes
    return _owner(allocation), 0, 1


def overlap(some: Sequence[Range], others: Sequence[Range]) -> bool:
    """Whether two groups of buffers have a byte in common."""
    for space, first, end in some:
        for space2, first2, end2 in others:
            if space == space2 and first < end2 and first2 < end:
                return True
    return False


# ---- several launches as one ----


@dataclass(frozen=True)
class PersistentKernel:
    """Launches that became one, whose blocks walk through lists of items."""

    name: str  # of the scope, empty where all steps are asked for
    steps: Sequence[TargetStep]
    launches: int  # that it takes the place of
    items: int
    blocks: int
    counters: int
    lists: str  # as a text

    def __str__(self) -> str:
        return (
            f"{self.launches} launches of {len(self.steps)} steps as one: {self.items} items on "
            f"{self.blocks} blocks, {self.counters} counters"
        )


@dataclass(frozen=True)
class ApartStep:
    """A step that was asked for as part of such a kernel and is launched by itself."""

    step: Any  # of the engine
    reason: str


# ---- steps bound to memory ----


class BadIndex(IndexError):
    """An index out of range that a kernel met; `step` is the one it belongs to."""

    def __init__(self, step: TargetStep) -> None:
        super().__init__("an index is out of range")
        self.step: Any = step


class NativePart(abc.ABC):
    """Consecutive native steps, bound to memory."""

    steps: list[TargetStep]
    layout: ArgumentLayout

    @property
    def sources(self) -> list[int]:
        """Slots whose address is asked for at each call."""
        return self.layout.sources

    @abc.abstractmethod
    def call(self) -> Callable[[list[int]], None]:
        """A function of the addresses of `sources` that runs all steps."""

    def bind(self) -> Callable[[list[Any]], None]:
        """A function of the registers that runs all steps."""
        sources, run = self.sources, self.call()
        return lambda r: run([r[s].data_ptr() for s in sources])


class EnteredPart(NativePart):
    """A part that native code enters without Python: addresses are written where it reads them."""

    @property
    @abc.abstractmethod
    def given_at(self) -> int:
        """Where the words are that hold the addresses of `sources`."""

    @property
    @abc.abstractmethod
    def given(self) -> Any:
        """These words."""

    @abc.abstractmethod
    def fire(self) -> Callable[[], None]:
        """A function that runs the part on the addresses `given` holds."""

    @abc.abstractmethod
    def task(self) -> Any:
        """The part as a native guard runs it, see `codegen/cpu/native_guard.py`."""

    @abc.abstractmethod
    def faulty(self) -> Any:
        """The step whose kernel met a bad index in the last run. It is forgotten then."""


class PlanFamily(Protocol):
    """Plans that differ in sizes only, as a part of a program sees them: the `ShapeFamily` of the
    engine, whose shape plans give integers for its GuardedInts."""

    @property
    def plan(self) -> TargetPlan:
        """The plan with numbers for sizes."""

    @property
    def buffers(self) -> int:
        """How many pieces its arena has."""

    @property
    def words(self) -> int:
        """How many of the values of a plan are integers that programs hold."""

    @property
    def sized(self) -> Mapping[int, Any]:
        """Constants, by slot, that follow from sizes."""

    def at(self, size: Any) -> int:
        """Where a size is among the values of a plan."""

    def barriers(self, placement: Any, layout: Any, steps: Sequence[Any]) -> list[int]:
        """Flags of steps when buffers lie like this."""


class SizedPart(EnteredPart):
    """A part for plans that differ in sizes only. `fit` makes it ready for one of them."""

    @abc.abstractmethod
    def fit(
        self,
        values: Sequence[int],
        work: float,
        placement: Any,
        arena: int,
        constants: Sequence[torch.Tensor],
    ) -> None:
        """Write all that follows from sizes and from where memory is."""
