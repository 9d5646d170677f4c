"""Run a Plan: one arena, one list of prepared calls, no shape work and no dispatch on types.

A `Program` is a plan bound to its own arena; a call takes one that is free, or binds another, so
calls from several threads never share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import CO_VARARGS
from types import FunctionType
from typing import Any

import torch

from torchair.codegen.poison import Area, areas_of, poisoned
from torchair.codegen.program import (
    Allocation,
    BadIndex,
    Memory,
    NativePart,
)
from torchair.codegen.streams import DeviceStreams
from torchair.engine.plan.forks import MOST_BRANCHES
from torchair.engine.plan.records import (
    OutputSpec,
    Plan,
    Step,
    StepGroup,
    extent,
    parts_of,
)
from torchair.engine.run.consumed import Consumed, RunStep
from torchair.engine.run.memory import (
    ARENA,
    PlaceMemory,
    allocator,
    laid_out,
    reshaped,
    seen_as,
)
from torchair.engine.run.native import StepFailure, explain
from torchair.engine.strides import as_list, same_strides
from torchair.flags import debug_level, poisoning
from torchair.ge.graph import Fact, Value
from torchair.log import debug_print
from torchair.operators import Op, row_of
from torchair.operators.reference import tensor_fact


class Program:
    """A plan bound to memory."""

    def __init__(
        self,
        plan: Plan,
        place: PlaceMemory | None = None,
        scratch: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """`place` gives memory for the arena and for results that stay where they are, as far as it
        has any: else the arena is this program's own, and results are made for each call.
        `scratch` gives memory that kernels use while they run."""
        self.plan, self._scratch = plan, scratch
        arena = place(ARENA, plan.arena_size) if place is not None else None
        with torch.inference_mode(False):
            self.arena = (
                torch.empty(plan.arena_size, dtype=torch.uint8, device=plan.device)
                if arena is None
                else arena
            )
            self._registers: list[Any] = [None] * plan.slots
            for slot, tensor in plan.constants.items():
                self._registers[slot] = tensor
            for allocation in plan.allocations:
                if allocation.kind == "arena" and (
                    allocation.slot in plan.read or plan.streams is not None
                ):
                    self._registers[allocation.slot] = self._buffer(allocation)
            for step in plan.bound:
                _view(step)(self._registers)
        self._fresh = [(r.slot, _maker(r, place)) for r in plan.allocations if r.kind == "fresh"]
        self._tied = [
            (r.slot, r.tied_to, r.meta.shape) for r in plan.allocations if r.kind == "tied"
        ]
        self._positions: list[int] = []  # step that each run begins with
        self.parts: list[NativePart] = []  # consecutive native steps, bound
        self._runs = self._prepare()
        if poisoning():
            areas = areas_of(plan.allocations)
            self._runs.insert(0, poisoned(lambda registers: None, self.arena, areas))
            self._positions.insert(0, 0)
        self._lasting = list(self._registers)  # without what belongs to one call

    def _prepare(self) -> list[RunStep]:
        """One function for each step, one for consecutive native steps together, and one for what
        runs side by side."""
        runs: list[RunStep] = []
        print_steps = debug_level() >= 5
        alone = [[part] for part in parts_of(self.plan.steps, single=print_steps)]
        groups = alone if print_steps else self.plan.groups or alone
        self._groups = [[step for part in group for step in part.steps] for group in groups]
        memory = Memory(self.plan, self.arena.data_ptr(), self._scratch)
        for group in groups:
            self._positions.append(group[0].first)
            calls = [(p, self._prepared(p, memory, print_steps)) for p in group]
            runs.append(calls[0][1] if len(calls) == 1 else side_by_side(calls, self.plan.streams))
        return runs

    def _prepared(self, part: StepGroup, memory: Memory, print_steps: bool) -> RunStep:
        first = part.steps[0]
        if first.kind != "native":
            return prepared(first, self.arena, self.plan)
        made = self._bound(part.steps, memory, torch.get_num_threads())
        run = made.bind()
        return with_debug_print(first, run, self.plan) if print_steps else run

    def _bound(self, steps: Sequence[Step], memory: Memory, threads: int) -> NativePart:
        """Consecutive native steps over the memory of this program."""
        assert self.plan.target is not None
        made = self.plan.target.bind(steps, memory, threads)
        self.parts.append(made)
        return made

    def _buffer(self, allocation: Allocation) -> torch.Tensor:
        meta = allocation.meta
        if allocation.device != self.plan.device or not allocation.size:
            return torch.empty(meta.shape, dtype=meta.dtype, device=allocation.device)
        return laid_out(self.arena[allocation.offset :], meta.dtype, meta.shape, meta.stride())

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs for one set of inputs."""
        registers = self._registers
        registers[: self.plan.inputs] = inputs
        if isinstance(inputs, Consumed):
            inputs.clear()
        for slot, make in self._fresh:
            registers[slot] = make()
        for slot, source, dims in self._tied:
            memory = registers[source]
            registers[slot] = memory if memory.shape == dims else reshaped(memory, dims)
        position = 0
        try:
            for run in self._runs:
                run(registers)
                position += 1
        except Exception as e:
            step = self.plan.steps[self._positions[position]]
            if isinstance(e, BadIndex | StepFailure):
                step = e.step
            raise explain(step, e) from e
        outputs = [_leave(spec, registers[spec.slot]) for spec in self.plan.outputs]
        if self.plan.write_backs:
            self._write_back(registers)
        registers[:] = self._lasting
        return outputs

    def _write_back(self, registers: list[Any]) -> None:
        sources = [
            registers[w.value_slot].clone() if w.staged else registers[w.value_slot]
            for w in self.plan.write_backs
        ]
        for write, source in zip(self.plan.write_backs, sources, strict=True):
            registers[write.input_slot].copy_(source)


def _maker(allocation: Allocation, place: PlaceMemory | None) -> Callable[[], torch.Tensor]:
    """A function that gives the tensor of a fresh allocation: a new one, or always the same."""
    memory = place(allocation.slot, allocation.size) if place is not None else None
    if memory is None:
        return allocator(allocation)(tuple(allocation.meta.shape), allocation.meta.stride())
    kept = laid_out(memory, allocation.meta.dtype, allocation.meta.shape, allocation.meta.stride())
    return poisoned(lambda: kept, memory, [Area(0, len(memory), 0, allocation.meta.dtype)])


def _leave(spec: OutputSpec, tensor: torch.Tensor) -> torch.Tensor:
    if not spec.always_copy and (spec.strides is None or tensor.stride() == spec.strides):
        return torch.ops.aten.alias.default(tensor) if spec.again else tensor
    if spec.strides is None:
        return tensor.clone()
    shape, strides = tensor.shape, spec.strides
    if 0 in shape:
        return tensor.new_empty_strided(shape, strides)
    if not spec.always_copy and same_strides(tensor, strides):
        return seen_as(tensor, shape, strides, tensor.storage_offset())
    memory = tensor.new_empty(spec.offset + extent(shape, strides))
    made = seen_as(memory, shape, strides, spec.offset)
    once(made, made).copy_(once(tensor, made))
    return made


def once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that stands for all of it where another one repeats elements: there is
    one element to write."""
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# ---- steps as functions of the registers ----


def prepared(step: Step, arena: torch.Tensor, plan: Plan) -> RunStep:
    """A step as a function of the registers."""
    makers: dict[str, Callable[[Step], RunStep]] = {
        "out": _out, "view": _view, "copy": _copy,
        "call": lambda s: _call(s, arena), "late": lambda s: _late(s, arena),
    }  # fmt: skip
    run = _restrided(step, makers[step.kind](step), plan)
    if debug_level() >= 5:
        run = with_debug_print(step, run, plan)
    if not step.frees:
        return run
    frees = step.frees

    def run_and_free(r: list[Any]) -> None:
        run(r)
        for slot in frees:
            r[slot] = None

    return run_and_free


def _restrided(step: Step, run: RunStep, plan: Plan) -> RunStep:
    """A step of torch whose results native code reads: they get the type and the strides that were
    planned."""
    places = [plan.places.get(s) for s in step.outs]
    wanted = [
        (s, place[0].meta.stride(), place[0].meta.dtype)
        for s, place in zip(step.outs, places, strict=True)
        if place is not None and place[0].strict_strides and place[0].slot == s
    ]
    if not wanted:
        return run

    def run_and_restride(r: list[Any]) -> None:
        run(r)
        for slot, strides, dtype in wanted:
            t = r[slot]
            if t.stride() != strides or t.dtype is not dtype:
                made = torch.empty_strided(t.shape, strides, dtype=dtype, device=t.device)
                r[slot] = made.copy_(t)

    return run_and_restride


def with_debug_print(step: Step, run: RunStep, plan: Plan) -> RunStep:
    """A step that says what it does, for debug level 5."""
    types = "+".join(n.type for n in step.also or [step.node])

    def run_and_print(r: list[Any]) -> None:
        run(r)
        made = [plan.place(o)[0].meta if r[o] is None else r[o] for o in step.outs]
        shown = ", ".join(f"{list(t.shape)} {t.dtype}" for t in made)
        debug_print(5, f"torchair step {step.kind:6s} {types} {step.node.name} -> {shown}")

    return run_and_print


def _fed(kernel: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Arguments without the unfed ones at the end, where the kernel has defaults for them."""
    if not isinstance(kernel, FunctionType) or kernel.__code__.co_flags & CO_VARARGS:
        return args
    needed = kernel.__code__.co_argcount - len(kernel.__defaults__ or ())
    while len(args) > needed and args[-1] is None:
        args = args[:-1]
    return args


def _out(step: Step) -> RunStep:
    kernel, outs = step.kernel, step.outs
    assert kernel is not None
    args = _fed(kernel, step.args)
    simple = len(outs) == 1 and all(isinstance(a, int) for a in args)
    if simple and len(args) == 1:
        (a,), (o,) = args, outs
        return lambda r: kernel(r[a], out=r[o])
    if simple and len(args) == 2:
        (a, b), (o,) = args, outs
        return lambda r: kernel(r[a], r[b], out=r[o])
    if simple and len(args) == 3:
        (a, b, c), (o,) = args, outs
        return lambda r: kernel(r[a], r[b], r[c], out=r[o])
    if len(outs) == 1:
        o = outs[0]
        return lambda r: kernel(*_gather(r, args), out=r[o])
    return lambda r: kernel(*_gather(r, args), out=tuple(r[o] for o in outs))


def _gather(r: list[Any], args: list[Any]) -> list[Any]:
    """Arguments of a kernel from the registers: a slot, a list of slots, or None."""
    return [r[a] if isinstance(a, int) else _gather_list(r, a) for a in args]


def _gather_list(r: list[Any], slots: list[int] | None) -> list[Any] | None:
    return None if slots is None else [r[s] for s in slots]


def _call(step: Step, arena: torch.Tensor) -> RunStep:
    kernel = step.kernel
    assert kernel is not None
    args = _fed(kernel, step.args)
    store = _storer(step, arena)
    simple = all(isinstance(x, int) for x in args)
    if simple and len(args) == 2:
        a, b = args
        return lambda r: store(r, kernel(r[a], r[b]))
    if simple and len(args) == 3:
        a, b, c = args
        return lambda r: store(r, kernel(r[a], r[b], r[c]))
    return lambda r: store(r, kernel(*_gather(r, args)))


def _storer(step: Step, arena: torch.Tensor) -> Callable[[list[Any], Any], None]:
    """Puts what a kernel returned into registers; what lies in the arena is copied out first,
    because no plan says for how long it is needed. Whether a kernel hands memory back that it was
    given depends on the sizes alone, so the first call tells for all."""
    outs = step.outs
    planned = arena.untyped_storage().data_ptr()
    shared: list[bool] = []

    def store(r: list[Any], result: Any) -> None:
        tensors = [] if result is None else as_list(result)
        if not shared:
            shared[:] = [
                bool(planned) and t.untyped_storage().data_ptr() == planned for t in tensors
            ]
        if True in shared:
            tensors = [t.clone() if s else t for t, s in zip(tensors, shared, strict=True)]
        for slot, tensor in zip(outs, tensors, strict=True):
            r[slot] = tensor

    return store


def _view(step: Step) -> RunStep:
    kernel, (source,), outs = step.kernel, step.args, step.outs
    assert kernel is not None
    if len(outs) == 1:
        out = outs[0]

        def run_one(r: list[Any]) -> None:
            result = kernel(r[source])
            r[out] = result[0] if isinstance(result, (list, tuple)) else result

        return run_one

    def run(r: list[Any]) -> None:
        for slot, tensor in zip(outs, kernel(r[source]), strict=True):
            r[slot] = tensor

    return run


def _copy(step: Step) -> RunStep:
    (source,), (target,) = step.args, step.outs
    return lambda r: r[target].copy_(r[source])


def _late(step: Step, arena: torch.Tensor) -> RunStep:
    """A step with data-dependent dims or host integers: the kernel is made at every call."""
    row = row_of(step.node.type)
    assert row is not None
    store = _storer(step, arena)

    def run(r: list[Any]) -> None:
        def fact(value: Value) -> Fact:
            slot = step.slots.get(value)
            return value.fact if slot is None else tensor_fact(r[slot], value)

        store(r, row.kernel(Op(step.node, fact))(*_gather(r, step.args)))

    return run


# ---- parts that a GPU runs side by side ----


def side_by_side(
    calls: Sequence[tuple[StepGroup, RunStep]], streams: DeviceStreams | None
) -> RunStep:
    """Parts of a fork as one function of the registers."""
    assert streams is not None, "a fork is for a device that records"

    def run(r: list[Any]) -> None:
        if not streams.recording:
            for _, call in calls:
                call(r)
            return
        here = streams.current
        kept = list(r)  # memory that one branch lets go of another one could get on its stream
        begin = here.record_event()
        unused = iter([None, *streams.sides(MOST_BRANCHES - 1)])  # the first stays here
        used: list[Any] = []
        for part, call in calls:
            side = None if part.is_view else next(unused)
            if side is None:
                call(r)
                continue
            side.wait_event(begin)
            with streams.on(side):
                call(r)
            used.append(side)
        for side in used:
            here.wait_stream(side)
        del kept

    return run
