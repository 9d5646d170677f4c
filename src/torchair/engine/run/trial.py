"""Kernels by themselves, each for one native step or several, over memory like that of their plan:
what is measured when forms of a kernel are compared.

The memory that a model reads from far away, its weights, comes in so many copies that runs read as
much of it as a call of the model does before they come to the same copy again. A run is short: on a
busy machine only those without an interruption mean anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch

from torchair.codegen.program import Allocation, AuxMemory, Constant, Timed, Trial, aligned_bytes
from torchair.codegen.requests import FAR, Convolution, Product, Request
from torchair.codegen.target import Generated, Pack, Target
from torchair.engine.plan.records import Plan, Step, extent
from torchair.engine.run.fixed import check_capturable
from torchair.engine.run.native import ProgramPool
from torchair.errors import CaptureError
from torchair.log import logger
from torchair.operators.purity import is_pure

TURNS = 64
"""Most copies, each of which is a step of some run."""
LONG = 40_000.0
"""Microseconds that all copies should not take longer than, about."""
RUN = 1_000.0
"""The same for the steps of one run."""

ConstantSource = Callable[[Constant, Pack | None], torch.Tensor]
"""A constant of a step as a kernel wants it."""


def far_bytes(plan: Plan) -> int:
    """How much memory from outside of it a call reads, at most."""
    return sum(r.size for r in plan.allocations if r.kind in ("input", "const"))


class Stage:
    """Memory for the steps of one kernel: operands hold random numbers, constants what they are."""

    def __init__(
        self, steps: Sequence[Step], plan: Plan, content: ConstantSource, target: Target
    ) -> None:
        self._steps, self._plan, self._content = steps, plan, content
        self._target = target
        self._device = torch.device(plan.device)
        self._slots: dict[int, Any] = {}
        self._constants: dict[int, Constant] = {}
        for part, step in enumerate(steps):
            self._slots |= {FAR * part + k: x for k, x in enumerate(step.code.addresses)}
            self._constants |= {FAR * part + k: x for k, x in step.code.constants.items()}
        self._work = max(sum(step.code.work for step in steps), 0.1)
        self._packed: dict[tuple[int, Pack | None, int], torch.Tensor] = {}
        self._fault = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.turns = self._turns(min(far_bytes(plan), target.reach))
        self._allocations = {
            (r.slot, turn): target.copied(_memory(r, seed, self._device))
            for seed, r in enumerate(self._distinct(constants=False))
            for turn in range(self.turns if _is_far(r) else 1)
        }

    def _distinct(self, constants: bool) -> list[Allocation]:
        """The memory of operands, with or without that of constants, which is made for kernels."""
        known = () if constants else self._constants
        slots = [s for k, s in self._slots.items() if isinstance(s, int) and k not in known]
        allocations = [self._plan.place(s)[0] for s in slots]
        return list({r.slot: r for r in allocations}.values())

    def _turns(self, reach: int) -> int:
        own = sum(r.size for r in self._distinct(constants=True) if _is_far(r))
        wanted = max(1, min(TURNS, int(LONG / self._work), -(-reach // max(own, 1))))
        self.steps = max(1, min(wanted, int(RUN / self._work)))
        return wanted // self.steps * self.steps

    def trial(self, made: Generated, threads: int) -> Trial:
        """A kernel of these steps, ready to be run, on so many threads. It is compiled."""
        if self._device.type == "cuda":  # blocks that share sums find zeros and leave zeros
            scratch = torch.zeros(made.scratch, dtype=torch.uint8, device=self._device)
        else:
            scratch = aligned_bytes(made.scratch * threads)
        words = [
            {k: self._word(k, slot, made, scratch, turn) for k, slot in self._slots.items()}
            for turn in range(self.turns)
        ]
        return self._target.trial(made, words, self.steps, threads, (self, scratch))

    def library(self, request: Request, threads: int) -> LibraryTrial | None:
        """Torch's kernel for the anchor of a request, without what is done with its results; None
        where torch has none."""
        if not isinstance(request, Product | Convolution):
            return None
        library_call: Any = _product if isinstance(request, Product) else _convolution
        operands = [partial(self._operand, turn) for turn in range(self.turns)]
        return LibraryTrial([library_call(request, operand) for operand in operands], threads)

    def _operand(self, turn: int, k: int, shape: Sequence[Any], strides: Any) -> torch.Tensor:
        """The tensor at a word: a constant as it is, or memory with these dims."""
        if k in self._constants:
            return self._constant(k, None, turn)
        allocation, offset = self._plan.place(self._slots[k])
        memory = self._allocations[allocation.slot, turn if _is_far(allocation) else 0]
        return memory.as_strided(shape, strides, offset // memory.element_size())

    def _word(self, k: int, slot: Any, made: Generated, scratch: torch.Tensor, turn: int) -> int:
        if k in self._constants:
            return self._constant(k, made.pack.get(k), turn).data_ptr()
        if not isinstance(slot, int):
            return (scratch if slot == AuxMemory.SCRATCH else self._fault).data_ptr()
        allocation, offset = self._plan.place(slot)
        return (
            self._allocations[allocation.slot, turn if _is_far(allocation) else 0].data_ptr()
            + offset
        )

    def _constant(self, word: int, pack: Pack | None, turn: int) -> torch.Tensor:
        key = word, pack, turn
        if key not in self._packed:
            first = self._packed.get((word, pack, 0))
            if first is None:
                first = self._content(self._constants[word], pack).to(self._device)
            packed = pack is not None
            self._packed[key] = self._target.copied(first, packed) if turn else first
        return self._packed[key]

    def clear(self) -> None:
        """Let the memory of results hold nothing that a kernel would write."""
        for memory in self._results():
            memory.view(torch.uint8).fill_(0xFF)

    def results(self) -> list[torch.Tensor]:
        """What the last run has written, with what lies between."""
        return [m.clone() for m in self._results()]

    def _results(self) -> list[torch.Tensor]:
        allocations = {self._plan.place(s)[0].slot for step in self._steps for s in step.outs}
        return [self._allocations[slot, 0] for slot in sorted(allocations)]

    @property
    def overwrites(self) -> bool:
        """Whether a step updates memory that it reads, so that no two runs are alike."""
        return any(map(self._updates, self._steps))

    def _updates(self, step: Step) -> bool:
        read = [s for s in step.code.addresses if isinstance(s, int) and s not in step.outs]
        made = [self._plan.place(s)[0] for s in step.outs]
        allocations, tied = {r.slot for r in made}, any(r.kind == "tied" for r in made)
        return tied or any(self._plan.place(s)[0].slot in allocations for s in read)


OperandSource = Callable[[int, Sequence[Any], Any], torch.Tensor]
"""The tensor at a word, of these dims and strides where it is no constant."""
LibraryCall = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]
"""A function of torch, and its tensors."""


def _product(request: Product, operand: OperandSource) -> LibraryCall:
    spec = request.matmul
    a = operand(0, (spec.batch, spec.m, spec.k), spec.a)
    b = operand(1, (spec.batch, spec.k, spec.n), spec.b)
    if spec.constant == "nk":
        b = b.t()
    alone = spec.batch == 1
    return torch.matmul, [a[0] if alone else a, b[0] if alone and b.dim() > 2 else b]


def _convolution(request: Convolution, operand: OperandSource) -> LibraryCall:
    spec = request.conv
    top, bottom, left, right = spec.padding
    x = operand(0, (spec.batch, spec.channels, spec.height, spec.width), spec.x)

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if (top, left) != (bottom, right):
            x = torch.nn.functional.pad(x, (left, right, top, bottom))
        pad = (top, left) if (top, left) == (bottom, right) else (0, 0)
        return torch.conv2d(x, weight, None, spec.stride, pad, spec.dilation, spec.groups)

    return convolve, [x, operand(1, (), ())]


class LibraryTrial:
    """Calls of torch that take turns. A run is one of them."""

    steps = 1

    def __init__(self, library_calls: Sequence[LibraryCall], threads: int) -> None:
        self.threads, self._first, self._library_calls = (
            threads,
            library_calls[0],
            cycle(library_calls),
        )

    def __call__(self) -> torch.Tensor:
        """One run."""
        function, tensors = next(self._library_calls)
        with torch.no_grad():
            return function(*tensors)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of the first call, and what it should be: computed in float64."""
        function, tensors = self._first
        with torch.no_grad():
            got = function(*tensors)
            return got, function(*(t.double() for t in tensors)).to(got.dtype)


def has_effects(plan: Plan) -> bool:
    """Whether a step does more than to compute results, or may."""
    return not all(is_pure(step.node) for step in plan.steps)


def call_of(pool: ProgramPool, inputs: Sequence[torch.Tensor]) -> Callable[[], Any] | None:
    """A call with these inputs that can be measured, recorded where a device does that; None where
    it cannot be, or where what runs may have effects."""
    plan = pool.plan
    if pool.native:
        return partial(pool.run, inputs)
    if has_effects(plan):
        return None
    if plan.streams is None:
        return torch.no_grad()(partial(pool.run, inputs))
    assert plan.target is not None, "graphs without kernels are not tuned"
    try:
        with torch.no_grad():
            check_capturable(plan)
            _, program = pool.once(inputs)  # libraries are initialised then
            return plan.target.recorded(lambda: program.run(inputs), (program, inputs))
    except (CaptureError, RuntimeError) as e:
        logger.info("a graph cannot be measured as a whole: %s", e)
        return None


def least_time(call: Callable[[], object], threads: int, window: float) -> float:
    """Seconds of the best call in a window of so many seconds of a core. One thread is measured by
    the time that it had a core for, several by the clock: while one waits for another that has
    none, it only seems to be busy. A GPU has a clock of its own."""
    if isinstance(call, Timed):
        return call.seconds(window)
    clock = time.thread_time if threads == 1 else time.perf_counter
    best, end, now = float("inf"), time.thread_time() + window, clock()
    while True:
        call()
        before, now = now, clock()
        best = min(best, now - before)
        if time.thread_time() >= end:
            return best


def _is_far(allocation: Allocation) -> bool:
    return allocation.kind in ("input", "const", "tied")


def _memory(allocation: Allocation, seed: int, device: torch.device) -> torch.Tensor:
    """Memory as an allocation has it, of its type: normal numbers, true, or the index 0."""
    meta = allocation.meta
    count = extent(meta.shape, meta.stride()) + 64
    dtype = meta.dtype
    if dtype.is_floating_point:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(count, generator=generator, device=device).to(dtype)
    return torch.full((count,), dtype == torch.bool, dtype=dtype, device=device)
