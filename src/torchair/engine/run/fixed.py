"""A plan bound to memory that never moves: what a captured graph is on the CPU.

Everything a call would otherwise do is done once: memory for intermediates and results comes from
the caller, addresses are written into the argument blocks, and a run is one native call where all
steps are native.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchair.codegen.poison import Area, areas_of, poisoned
from torchair.codegen.program import BadIndex, EnteredPart, Memory
from torchair.engine.plan.arena import aligned
from torchair.engine.plan.records import Plan, extent
from torchair.engine.run.executor import Program, once
from torchair.engine.run.lanes import bind_lanes
from torchair.engine.run.memory import ARENA
from torchair.engine.run.native import NativeProgram, explain
from torchair.errors import CaptureError
from torchair.flags import poisoning
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node
from torchair.operators.generic import find_target
from torchair.torch_private.dispatch import OpOverload, set_grad_enabled


@dataclass(frozen=True)
class Placed:
    """A result in a piece of the memory that was given, `offset` elements from its begin."""

    piece: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


ResultPlace = Placed | int | torch.Tensor
"""Where a result is: in given memory, in the input of that number, or a tensor of its own."""


def memory_of(plan: Plan) -> int:
    """Bytes that a fixed program of this plan needs."""
    return sum(aligned(size) for _, size in _pieces(plan))


class FixedProgram:
    """A plan over given memory. Set inputs, run, then look at `places`."""

    def __init__(self, plan: Plan, memory: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self._memory = memory
        self._starts: dict[int, tuple[int, int]] = {}  # of each piece: (byte, length)
        at = 0
        for slot, size in _pieces(plan):
            self._starts[slot] = (at, size)
            at += aligned(size)
        self.inputs = list(inputs)
        self.places: list[ResultPlace] = []  # of the results, known after the first run
        self.set: Callable[[int, torch.Tensor], None]
        self.run: Callable[[], None]
        self.words: dict[int, int] = {}  # input: its word in `given`, if only its address counts
        self.given: Any = None
        if plan.schedule is None and NativeProgram.suits(plan):
            self._bind_native()
        else:
            self._bind()

    def _bind_native(self) -> None:
        plan, base = self.plan, self._memory.data_ptr()
        slots = [r.slot for _, r in plan.leaving if r.kind == "fresh"]
        memory = Memory(plan, base + self._starts[ARENA][0])
        assert plan.target is not None
        part = plan.target.bind(plan.native_steps, memory, torch.get_num_threads(), slots)
        assert isinstance(part, EnteredPart)
        self.given, fire = part.given, part.fire()
        for word, slot in enumerate(part.sources):
            if slot in slots:
                self.given[word] = base + self._starts[slot][0]
            else:
                self.words[slot] = word
                self.given[word] = self.inputs[slot].data_ptr()
        self.places = [
            Placed(r.slot, r.meta.dtype, o.shape or (), o.strides or ())
            if r.kind == "fresh"
            else r.tied_to
            for o, r in plan.leaving
        ]
        self.set = self._set_word
        self.run = _explained(fire)
        if poisoning():
            # results have pieces of the memory; the arena begins where it does
            fresh = [r for r in plan.allocations if r.kind == "fresh" and r.slot in self._starts]
            results = [Area(*self._starts[r.slot], 0, r.meta.dtype) for r in fresh]
            self.run = poisoned(self.run, self._memory, [*areas_of(plan.allocations), *results])

    def _set_word(self, number: int, tensor: torch.Tensor) -> None:
        self.inputs[number] = tensor
        if number in self.words:
            self.given[self.words[number]] = tensor.data_ptr()

    def _bind(self) -> None:
        bind = Program if self.plan.schedule is None else bind_lanes
        program = bind(self.plan, self._piece)
        self.set = self.inputs.__setitem__

        def run() -> None:
            grad = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                self._collect_results(program.run(self.inputs))
            finally:
                set_grad_enabled(grad)

        self.run = run

    def _piece(self, slot: int, size: int) -> torch.Tensor | None:
        if slot not in self._starts:
            return None
        start, _ = self._starts[slot]
        return self._memory[start : start + size]

    def _collect_results(self, outputs: Sequence[torch.Tensor]) -> None:
        """Results that are not where they should be are copied; the first run tells where."""
        if not self.places:
            self.places = [self._find(k, t) for k, t in enumerate(outputs)]
            return
        for place, tensor in zip(self.places, outputs, strict=True):
            if isinstance(place, torch.Tensor) and place is not tensor:
                once(place, place).copy_(once(tensor, place))

    def _find(self, number: int, tensor: torch.Tensor) -> ResultPlace:
        for k, given in enumerate(self.inputs):
            if tensor is given:
                return k
        allocation = self.plan.places.get(self.plan.outputs[number].slot, (None, 0))[0]
        start, size = (
            self._starts.get(allocation.slot, (0, 0)) if allocation is not None else (0, 0)
        )
        inside = tensor.data_ptr() - self._memory.data_ptr() - start
        if size and 0 <= inside < size:
            offset = inside // tensor.element_size()
            shape, strides = tuple(tensor.shape), tensor.stride()
            return Placed(allocation.slot, tensor.dtype, shape, strides, offset)  # type: ignore[union-attr]
        return tensor

    def put(self, outputs: Sequence[torch.Tensor]) -> None:
        """Take over results that were computed elsewhere."""
        for place, tensor in zip(self.places, outputs, strict=True):
            if isinstance(place, Placed):
                start, size = self._starts[place.piece]
                whole = self._memory[start : start + size].view(place.dtype)
                first = int(whole.storage_offset()) + place.offset
                target = whole.as_strided(place.shape, place.strides, first)
                once(target, target).copy_(once(tensor, target))
            elif isinstance(place, torch.Tensor):
                once(place, place).copy_(once(tensor, place))

    def piece(self, number: int) -> tuple[int, int]:
        """Where a piece of the memory is: (first byte, length)."""
        return self._starts[number]


def _pieces(plan: Plan) -> list[tuple[int, int]]:
    """(slot, bytes) of the arena and of the results that can stay in place."""
    fresh = [r for r in plan.allocations if r.kind == "fresh" and r.device == plan.device]
    sizes = [extent(r.meta.shape, r.meta.stride()) * r.meta.element_size() for r in fresh]
    return [(ARENA, plan.arena_size), *zip([r.slot for r in fresh], sizes, strict=True)]


def _explained(fire: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            fire()
        except BadIndex as e:
            raise explain(e.step, e) from e

    return run


# ---- whether a plan can be captured: not if it leaves sizes open until the data are there ----

SIZE_HINT = "use an operator whose result has a fixed size, and torch.where for decisions"
_DATA = "makes a result whose size depends on data"
_PRINTS = "npu_print prints on the host, which a device does not wait for"
_NO_META = "has no meta kernel, so the sizes of its results are not known"
_AROUND = "reads memory around an argument, of which a replay has a copy"
_PYTHON = "runs Python functions, so the sizes of its results are not known"
# Why a graph cannot be captured, and what the user can do about it.
_HINTS = {
    _DATA: SIZE_HINT,
    _PRINTS: "print outside of the compiled function, or use the mode max-autotune",
    _AROUND: "say it with slices, select, unfold or reshape",
    _NO_META: "register one with torch.library.register_fake",
    _PYTHON: "make them an operator with torch.library.custom_op and register_fake",
}
_SIZES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def check_capturable(plan: Plan, copied: bool = False) -> None:
    """CaptureError if some dims of a plan are data-dependent, if it prints and runs on a device, or
    if it reads memory of arguments that are to be `copied`; it names the first node."""
    calls = [s.node for s in plan.steps if copied and s.node.type == "TorchCall"]
    around = next((n for n in calls if n.attr("target") == "aten::as_strided"), None)
    if around is not None:  # it reads memory by where an argument lies
        raise _error(around, f"{find_target(around)} {_AROUND}", _HINTS[_AROUND])
    if plan.streams is not None:
        said = next((s.node for s in plan.steps if s.node.type == "PrintV2"), None)
        if said is not None:
            raise _error(said, _PRINTS, _HINTS[_PRINTS])
    open_ended = (s.node for s in plan.steps if s.kind == "late")
    text = DataType.DT_STRING  # to be printed: nothing is computed from it
    late = next((n for n in open_ended if any(v.dtype != text for v in n.outputs)), None)
    if late is None:
        return
    target, why = _reason(late)
    raise _error(late, f"{target} {why}", _HINTS[why])


def _error(node: Node, message: str, hint: str) -> CaptureError:
    origin = node.origin
    name = origin.fx_name if origin is not None and origin.fx_name else node.name
    source = None if origin is None else origin.line
    return CaptureError(message, node=name, source=source, hint=hint)


def _reason(node: Node) -> tuple[str, str]:
    """What the node calls, and why its sizes are open."""
    if node.type != "TorchCall":
        return node.type, _DATA
    target = find_target(node)
    if isinstance(target, OpOverload):
        if any(tag in target.tags for tag in _SIZES):
            return str(target), _DATA
        return str(target), _NO_META
    return str(target), _PYTHON
