"""The CPU as a target: its generators, what they decline, compiling, running, rates of a core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from torchair.codegen import target
from torchair.codegen.cpu.driver import driver, entry_point, filler
from torchair.codegen.cpu.jit import Library, assembly, compile_all, empty, host
from torchair.codegen.cpu.run import Segment, SizedSegment, threads_for
from torchair.codegen.cpu.trial import CpuTrial
from torchair.codegen.llvm import binding
from torchair.codegen.program import (
    ApartStep,
    Memory,
    PersistentKernel,
    PlanFamily,
    Subject,
    TargetPlan,
    TargetStep,
    aligned_bytes,
)
from torchair.codegen.sizes import largest

if TYPE_CHECKING:
    from torchair.codegen.requests import Request
    from torchair.codegen.target import Anchor

TYPES = ("f32", "bf16", "f16")  # of operators with a generator of their own
WIDEST_HEAD = 256  # features of a head of attention
IN_CACHE = 1 << 18  # bytes that come from a cache


class CpuTarget:
    """The processor of this machine."""

    name = "cpu"
    channels_last = True  # vectors lie along the channels then
    piecewise = True
    resizes = True
    quantised = target.ANY_ROWS
    library_channels_last = False
    splits_lists = False
    drawing_threads = 0
    splits_batch_norms = False
    outer_batches = True
    splits_group_norms = True
    overlaps = False
    shares_sums = False
    enters = True
    replays = False
    reach = 64 << 20

    def __init__(self, library: Library | None = None) -> None:
        self.library = library or Library()

    @property
    def processor(self) -> str:
        """The name of the processor, and a hash of all that it can do."""
        machine = self.library.machine
        features = hashlib.blake2b(machine.features.encode(), digest_size=4).hexdigest()
        return f"{machine.arch} {machine.name} {features}"

    def available(self) -> str | None:
        """LLVM may be missing, or not know the processor."""
        return self._missing

    @cached_property
    def _missing(self) -> str | None:
        try:
            binding()  # without it only code runs that a package has brought
            host()
            self.driver()
        except Exception as e:  # a fallback, which `usable_target` takes note of
            return f"{type(e).__name__}: {e}"
        return None

    def runs(self) -> bool:
        """Whether there is a driver: compiled here, or from a package."""
        return driver(self.library.machine) in self.library or self.available() is None

    def driver(self) -> Any:
        """The native function that runs programs."""
        return entry_point(self.code)

    def filler(self) -> Any:
        """The native function that writes what follows from sizes into a program."""
        return filler(self.code)

    def declines(self, anchor: Anchor) -> str | None:
        """Why there is no generator for an operator."""
        if anchor.kind == "conv" and not anchor.constant:
            return "its weights may change: frozen_parameter is off"
        if anchor.quantised and not anchor.constant:
            return "its weights or scales may change: frozen_parameter is off"
        if anchor.kind == "attention" and (anchor.width is None or anchor.width > WIDEST_HEAD):
            return "its heads are too wide"
        if anchor.dtype not in TYPES and not (anchor.quantised and anchor.dtype == "i8"):
            return "this generator is for float32, bfloat16 and float16"
        return None

    def keeps_rows(self, anchor: Anchor) -> bool:
        """Every kernel does."""
        return True

    def choices(self, request: Request) -> target.Choices:
        """What may be chosen for a kernel."""
        from torchair.codegen.cpu.generators import GENERATORS

        return GENERATORS[type(request)][1](request, self.library.machine)

    def generate(
        self, request: Request, label: str, config: target.KernelConfig = target.DEFAULT_CONFIG
    ) -> target.Generated:
        """The kernel of a request."""
        from torchair.codegen.cpu.generators import GENERATORS

        if config == target.BY_TORCH:
            raise target.Declined("torch's kernel was measured to be faster")
        machine = self.library.machine
        if bits := config.integer("bits", 0):
            machine = replace(machine, bits=bits)
        return GENERATORS[type(request)][0](request, machine, label, config)

    @property
    def code(self) -> Library:
        """Where code is that runs."""
        return self.library

    def schedule(self, plan: TargetPlan) -> Sequence[Sequence[TargetStep]]:
        """Every step is a kernel of its own, in the order of the plan."""
        return ()

    def persistent(self, plan: TargetPlan) -> tuple[list[PersistentKernel], list[ApartStep]]:
        """Steps run one after the other in any case."""
        return [], []

    def build(self, plan: target.Buildable) -> None:
        """Compile the kernels of a plan."""
        self.compile([n.kernel for n in plan.new_natives])

    def bind(
        self, steps: Sequence[TargetStep], memory: Memory, threads: int, last: Sequence[int] = ()
    ) -> Segment:
        """Steps as one call of the driver."""
        return Segment(steps, memory, self, threads, last)

    def bind_sized(
        self,
        family: PlanFamily,
        threads: int,
        last: Sequence[int],
        scratch: Callable[[int], torch.Tensor] | None,
    ) -> SizedSegment:
        """The same for plans that differ in sizes only."""
        return SizedSegment(family, self, threads, last, scratch)

    def threads(self, work: float) -> int:
        """As many as torch has, where that pays."""
        return threads_for(work, torch.get_num_threads())

    def subjects(self, plan: TargetPlan) -> list[Subject]:
        """One kernel for each step."""
        return [Subject(s.code.order, [s]) for s in plan.native_steps]

    def copied(self, tensor: torch.Tensor, packed: bool = False) -> torch.Tensor:
        """A copy at the begin of a cache line, in large pages if it is packed."""
        if packed:
            return empty(tensor.shape, tensor.dtype).copy_(tensor)
        memory = aligned_bytes(tensor.nbytes)[: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def trial(
        self,
        made: target.Generated,
        words: Sequence[Mapping[int, int]],
        steps: int,
        threads: int,
        keep: Any,
    ) -> CpuTrial:
        """Programs of the driver for one kernel."""
        return CpuTrial(made, [list(w.values()) for w in words], steps, threads, self, keep)

    def recorded(self, run: Callable[[], object], keep: Any) -> Callable[[], object]:
        """A CPU runs it as it is."""
        return run

    def compile(self, kernels: Sequence[target.Kernel]) -> None:
        """Make machine code of those that are new."""
        compile_all(self.library, kernels)

    def compile_alone(self, made: Sequence[target.Generated]) -> None:
        """All kernels can be run by themselves."""
        self.compile([m.kernel for m in made])

    def machine_text(self, generated: target.Generated) -> str:
        """Assembly of this processor."""
        return assembly(generated.kernel, self.library.machine)

    @property
    def seconds(self) -> float:
        """Time spent in compiling so far."""
        return self.library.seconds

    def work(self, moved: int, points: int, flops: float) -> float:
        """Microseconds of one thread, at rates that any core has."""
        far = largest(moved - IN_CACHE, 0)
        return moved / 1e5 + far / 2.5e4 + points / 8e3 + 0.05 + flops / 1e5


@cache
def cpu() -> CpuTarget:
    """The target of this process, with all its native code."""
    return CpuTarget()
