"""The Plan: what to run for one set of sizes, and where every value lives. Plain records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchair.codegen.program import Allocation, Native, TargetStep
from torchair.codegen.streams import HOST, DeviceStreams, streams_of
from torchair.codegen.target import DEFAULT_CONFIG, KernelConfig, Target
from torchair.engine.plan.arena import Arena, BufferPlaces
from torchair.labels import SUPER_KERNEL

if TYPE_CHECKING:
    from torchair.ge.graph import Node, Value


StepKind = Literal["out", "call", "view", "copy", "native", "late"]
"""What is done: `out` (kernel writes planned buffers), `call` (kernel allocates), `view`, `copy`,
`native` (generated code), and `late` (kernel is made when the data are there)."""


MORE = 4 << 20
"""Bytes that steps side by side may use beside those that the plan needs at once anyway."""


def extent(shape: Any, strides: Any) -> int:
    """Elements of memory from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes these out of a sequence."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        only = positions[0]
        return lambda values: (values[only],)
    return lambda values: ()


def flat_slots(args: list[Any]) -> list[int]:
    """Slots of arguments, lists opened, unfed ones left out."""
    return [s for a in args for s in (a if isinstance(a, list) else [a]) if s is not None]


@dataclass(slots=True)
class Step:
    """One thing to do."""

    node: Node
    kind: StepKind
    kernel: Callable[..., Any] | None
    args: list[Any]  # slots, lists of slots, or None
    outs: list[int]
    frees: list[int] = field(default_factory=list)  # slots to drop after it
    slots: dict[Value, int] = field(default_factory=dict)  # of a late step: where its inputs are
    native: Native | None = None
    also: list[Node] = field(default_factory=list)  # all nodes that a native step computes
    values: list[Value] = field(default_factory=list)  # of a native step: what its `outs` are

    @property
    def reads(self) -> list[int]:
        """Slots of its arguments, and of what a late step asks about."""
        return [*flat_slots(self.args), *self.slots.values()]

    @property
    def made(self) -> list[Value]:
        """What its `outs` are; a copy gives no value of its own."""
        if self.kind == "native":
            return self.values
        return [] if self.kind == "copy" else self.node.outputs

    @property
    def code(self) -> Native:
        """What a native step runs."""
        assert self.native is not None
        return self.native


@dataclass
class StepGroup:
    """Consecutive steps that are run as one: native ones, or a single other step."""

    steps: list[Step]
    first: int  # the number of the first one

    @property
    def is_view(self) -> bool:
        """Whether nothing is run on a device."""
        return self.steps[0].kind == "view"


def parts_of(steps: Sequence[Step], single: bool = False) -> list[StepGroup]:
    """The steps, consecutive native ones together unless each is wanted `single`. Views between
    them come first: they read no memory, and native steps make no tensors."""
    parts: list[StepGroup] = []
    for k, step in enumerate(steps):
        after_native = bool(parts) and parts[-1].steps[0].kind == "native"
        if after_native and not single and step.kind == "native":
            parts[-1].steps.append(step)
        elif after_native and not single and step.kind == "view" and not step.frees:
            parts.insert(len(parts) - 1, StepGroup([step], k))
        else:
            parts.append(StepGroup([step], k))
    return parts


@dataclass
class OutputSpec:
    """How one graph output leaves the program."""

    slot: int
    strides: tuple[int, ...] | None = None  # copied into these, always or when they differ
    always_copy: bool = False
    offset: int = 0  # in the memory it leaves with, when that is not of its own choice
    again: bool = False  # left before: another tensor object over the same memory
    shape: tuple[int, ...] | None = None  # dims, if it is all of a fresh piece of memory


@dataclass
class WriteBack:
    """An input that takes over a value after everything else has run."""

    input_slot: int
    value_slot: int
    staged: bool  # the value lives in an input that is updated too: copy it aside first


@dataclass
class Schedule:
    """Steps of a plan, by number, on lanes that run beside each other. Steps in the order of the
    plan are right as well, one after the other."""

    lanes: list[str]  # labels; the default lane is the empty one, and first if it is there
    steps: list[list[int]]  # of each lane, in order
    waits: dict[int, list[int]]  # step: steps of other lanes that must have ended
    first: list[int]  # views that are made before anything runs
    views: dict[int, list[int]]  # step: views of its results, made right after it
    other_lanes: dict[int, list[int]]  # step: slots it reads that torch allocated in another lane

    @property
    def events(self) -> list[tuple[int, int]]:
        """Pairs (step, step of another lane that waits for it)."""
        return [(before, k) for k, befores in self.waits.items() for before in befores]

    def pieces(self, lane: int, steps: Sequence[Step]) -> list[list[int]]:
        """The steps of a lane, by number: native ones that follow each other together, unless one
        waits or another lane waits for one; all others by themselves."""
        awaited = {before for before, _ in self.events}
        pieces: list[list[int]] = []
        for k in self.steps[lane]:
            last = pieces[-1][-1] if pieces else None
            joins = last is not None and last not in awaited and k not in self.waits
            if joins and last is not None and steps[k].kind == steps[last].kind == "native":
                pieces[-1].append(k)
            else:
                pieces.append([k])
        return pieces


@dataclass
class Plan:
    """Everything needed to run a graph for one set of sizes."""

    slots: int = 0
    inputs: int = 0
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    bound: list[Step] = field(default_factory=list)  # views of planned memory, made once
    steps: list[Step] = field(default_factory=list)
    outputs: list[OutputSpec] = field(default_factory=list)
    write_backs: list[WriteBack] = field(default_factory=list)
    arena: Arena = field(default_factory=lambda: Arena([]))
    arena_size: int = 0
    arena_floor: int = 0  # the most bytes alive at once
    device: str = HOST
    target: Target | None = None  # runs its native steps
    read: set[int] = field(default_factory=set)  # slots that must exist as tensors
    # allocation, byte offset in it
    places: dict[int, tuple[Allocation, int]] = field(default_factory=dict)
    layouts: dict[Any, Any] = field(default_factory=dict)  # what programs of such plans share
    schedule: Schedule | None = None  # if there is more than one lane
    launches: Sequence[Sequence[TargetStep]] = ()  # native steps as the target joins and moves them
    groups: list[list[StepGroup]] = field(
        default_factory=list
    )  # parts, branches of a fork together
    # of kernels for several steps
    config_of: Callable[[Any], KernelConfig] = lambda request: DEFAULT_CONFIG
    threads: int = 0  # most that run its native steps, 0: as many as torch has
    super_kernels: bool = False  # whether native steps that follow one another are one kernel

    @property
    def streams(self) -> DeviceStreams | None:
        """Streams of its device; None where a step is done when its call returns."""
        return streams_of(self.device)

    @property
    def enters(self) -> bool:
        """Whether native code alone runs it, which needs addresses and nothing else."""
        return self.target is not None and self.target.enters and self.all_native

    @property
    def all_native(self) -> bool:
        """Whether there is nothing but native steps from arguments to results in memory of their
        own and updated arguments."""
        native = self.native_steps and all(s.kind in ("native", "view") for s in self.steps)
        if not native or self.write_backs:
            return False
        fresh = [r.slot for _, r in self.leaving if r.kind == "fresh"]
        known = sum(r.kind == "fresh" for r in self.allocations)
        if len(set(fresh)) != len(fresh) or len(fresh) != known:
            return False
        return all(
            o.shape is not None and not o.always_copy and not o.again
            if r.kind == "fresh"
            else r.kind == "tied" and r.slot == o.slot
            for o, r in self.leaving
        )

    @property
    def native_steps(self) -> list[Step]:
        """Those that are generated code."""
        return [s for s in self.steps if s.native is not None]

    @property
    def native_parts(self) -> list[list[Step]]:
        """The same, those together that programs run as one part."""
        if self.schedule is not None:
            lanes = range(len(self.schedule.steps))
            pieces = [p for lane in lanes for p in self.schedule.pieces(lane, self.steps)]
            found = [[self.steps[k] for k in piece] for piece in pieces]
            return [part for part in found if part[0].kind == "native"]
        return [p.steps for p in parts_of(self.steps) if p.steps[0].kind == "native"]

    @property
    def natives(self) -> list[Native]:
        """What they run."""
        return [s.code for s in self.native_steps]

    @property
    def new_natives(self) -> list[Native]:
        """Those whose kernels may have to be made."""
        return self.natives

    @property
    def leaving(self) -> list[tuple[OutputSpec, Allocation]]:
        """Outputs, each with the memory that it is in."""
        return [(o, self.place(o.slot)[0]) for o in self.outputs]

    @property
    def work(self) -> Any:
        """Microseconds that one thread needs for the native steps, roughly."""
        return sum(s.code.work for s in self.native_steps)

    @property
    def overlaps(self) -> bool:
        """Whether calls of libraries that need nothing of each other are run side by side."""
        recorded = self.streams is not None and self.streams.can_record
        return recorded or (self.target is not None and self.target.overlaps)

    # ---- memory ----

    def touches(self) -> list[list[int]]:
        """For each buffer of the arena the steps, by number, that read or write it; the number
        after the last one if it is read when all have run."""
        found: list[list[int]] = [[] for _ in self.arena.buffers]
        leaving = [o.slot for o in self.outputs] + [w.value_slot for w in self.write_backs]
        used = [[] if s.kind == "view" else [*s.reads, *s.outs] for s in self.steps]
        for k, slots in enumerate([*used, leaving]):
            for buffer in {self.places[slot][0].buffer for slot in slots} - {-1}:
                found[buffer].append(k)
        return found

    @cached_property
    def _alive(self) -> dict[int, int]:
        """Bytes of buffers in use at each step, by its identity."""
        change = [0] * (len(self.steps) + 2)
        for buffer, steps in zip(self.arena.buffers, self.touches(), strict=True):
            if steps:
                change[steps[0]] += buffer.size
                change[steps[-1] + 1] -= buffer.size
        return dict(zip(map(id, self.steps), accumulate(change), strict=False))

    def alive(self, step: TargetStep) -> int:
        """Bytes of planned memory in use while a step runs, where none is moved."""
        return self._alive[id(step)]

    @cached_property
    def most_alive(self) -> int:
        """Bytes of planned memory that steps may use at once, wherever they are moved."""
        return max(self._alive.values(), default=0) + MORE

    def arrange(self, placement: BufferPlaces) -> None:
        """Take over where buffers lie."""
        for allocation in self.allocations:
            if allocation.buffer >= 0:
                allocation.offset = placement.offsets[allocation.buffer]
                allocation.bytes = placement.sizes[allocation.buffer]
        self.arena_size, self.arena_floor = placement.total, placement.floor

    def super_kernel_of(self, step: TargetStep) -> str | None:
        """The one kernel that a step is to be computed in with others: that of all steps, or of the
        first scope that one of its nodes is in."""
        if self.super_kernels:
            return ""
        assert isinstance(step, Step)
        scopes = (n.attrs.get(SUPER_KERNEL) for n in step.also or [step.node])
        return next((str(s.value) for s in scopes if s is not None and s.value), None)

    def place(self, slot: int) -> tuple[Allocation, int]:
        """The allocation a slot is in, and how many bytes after its begin."""
        return self.places[slot]
