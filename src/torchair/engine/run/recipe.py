"""A native plan as data, and back: a later process binds it without graph, planner or generators.

Kernels are named by their keys on disk. What the numbers mean follows from this code and from the
processor, so both are part of the data, and a plan is taken for the same only.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from torchair.codegen import kernel_cache
from torchair.codegen.cpu.driver import HEADER, PATCH, STEP, driver
from torchair.codegen.cpu.jit import key_of, made_with
from torchair.codegen.cpu.target import cpu
from torchair.codegen.program import (
    SIZES_AT,
    Allocation,
    AllocationKind,
    Argument,
    AuxMemory,
    Native,
)
from torchair.codegen.streams import HOST
from torchair.codegen.target import Generated, Kernel
from torchair.engine.plan import records
from torchair.engine.plan.records import Plan, Step, extent
from torchair.engine.run.native import NativeProgram

if TYPE_CHECKING:
    from torchair.ge.graph import Value

_FORMAT = 3
_MOST = 1 << 20  # bytes of constants that are kept twice: with the graph, and here

Data = dict[str, Any]
Packed = tuple[int, bool, int]
"""An input that is laid out in panels, whether its rows are columns, and vectors of a panel."""


@dataclass
class StoredPlan:
    """A plan from a file. Weights that are frozen are put in when the first call has them."""

    plan: Plan
    frozen: list[int]  # inputs whose addresses are part of the plan
    packs: list[Packed]  # inputs that are laid out anew
    sizes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]  # inputs of varying dims, strides
    packed: dict[int, torch.Tensor] = field(default_factory=dict)  # by number

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the plan is for inputs of such sizes."""
        for i, shape, strides in self.sizes:
            if inputs[i].shape != shape or inputs[i].stride() != strides:
                return False
        return True

    def freeze(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take the weights among these inputs for constants."""
        from torchair.codegen.cpu.matmul.pack import PackPanels

        machine = cpu().library.machine
        for i in self.frozen:
            self.plan.constants[i] = inputs[i].detach()
        for k, (i, transposed, vectors) in enumerate(self.packs):
            self.packed[k] = PackPanels(machine, transposed, vectors)(inputs[i].detach())
        for code in self.plan.natives:
            packings = {word: x[0] for word, x in enumerate(code.operands) if isinstance(x, list)}
            code.packed.update({word: self.packed[packing] for word, packing in packings.items()})


def maker() -> Data:
    """What the numbers of a recipe are for."""
    code = cpu().library
    words = [_FORMAT, HEADER, STEP, PATCH, SIZES_AT]
    return {"words": words, "with": [*made_with(code.machine), driver(code.machine).entry]}


def recipe_of(plan: Plan, frozen: Mapping[Value, int], varying: Sequence[int]) -> Data | None:
    """The data of a plan whose `frozen` inputs are constants, for these sizes of `varying` ones;
    None where it is more than native code, or kernels are not on disk."""
    if kernel_cache.in_use() is None or plan.schedule is not None or not NativeProgram.suits(plan):
        return None
    steps = plan.native_steps
    weights = set(frozen.values())
    packs = _packs(steps, frozen)
    constants = {s: t for s, t in plan.constants.items() if s not in weights}
    if packs is None or sum(t.numel() * t.element_size() for t in constants.values()) > _MOST:
        return None
    kernels = {s.code.kernel.entry: s.code for s in steps}
    number = {entry: k for k, entry in enumerate(kernels)}
    slots = {w for s in steps for w in (*s.code.addresses, *s.args, *s.outs) if isinstance(w, int)}
    slots |= {o.slot for o in plan.outputs}
    allocations = {plan.place(s)[0].slot: plan.place(s)[0] for s in slots}
    return {
        "maker": maker(),
        "inputs": plan.inputs,
        "arena": plan.arena_size,
        "threads": plan.threads,
        "kernels": [
            [entry, key_of(c.kernel, cpu().library.machine), c.scratch]
            for entry, c in kernels.items()
        ],
        "roots": [_allocation_data(r) for r in allocations.values()],
        "places": [[s, plan.place(s)[0].slot, plan.place(s)[1]] for s in sorted(slots)],
        "constants": {str(s): _tensor_data(t) for s, t in constants.items() if s in allocations},
        "frozen": sorted(weights),
        "sizes": [[i, *_layout(plan.place(i)[0].meta)] for i in varying],
        "packs": [list(p) for p in dict.fromkeys(packs.values())],
        "steps": [_step_data(s, number[s.code.kernel.entry], packs) for s in steps],
        "outputs": [[o.slot, o.strides, o.shape] for o in plan.outputs],
    }


def _layout(meta: Any) -> tuple[list[int], list[int]]:
    return list(meta.shape), list(meta.stride())


def _packs(steps: Sequence[Step], frozen: Mapping[Value, int]) -> dict[int, Packed] | None:
    """Which inputs packed constants come from, and how, by the identity of these tensors; None
    where one comes from something else."""
    from torchair.codegen.cpu.matmul.pack import PackPanels

    found: dict[int, Packed] = {}
    for code in (s.code for s in steps):
        for word, packed in code.packed.items():
            constant, pack = code.constants[word], code.generated.pack.get(word)
            if constant.content != "own" or constant.value not in frozen:
                return None
            if not isinstance(pack, PackPanels):
                return None
            found[id(packed)] = frozen[constant.value], pack.transposed, pack.vectors
    return found


def _allocation_data(allocation: Allocation) -> list[Any]:
    layout = (
        [_dtype_name(allocation.meta.dtype), *_layout(allocation.meta)]
        if allocation.kind == "fresh"
        else None
    )
    return [
        allocation.slot,
        allocation.kind,
        allocation.offset,
        allocation.bytes,
        allocation.tied_to,
        layout,
    ]


def _step_data(step: Step, kernel: int, packs: Mapping[int, Packed]) -> list[Any]:
    code, node = step.code, step.node
    packings = list(dict.fromkeys(packs.values()))
    found = {word: [packings.index(packs[id(t)])] for word, t in code.packed.items()}
    slots = [found.get(word, x) for word, x in enumerate(code.addresses)]
    line = node.origin.line if node.origin else None
    args = [s for s in step.args if isinstance(s, int)]
    named = [node.type, node.name, line]
    return [kernel, slots, list(code.numbers), code.work, args, list(step.outs), named]


def _tensor_data(t: torch.Tensor) -> list[Any]:
    whole = t.contiguous().view(-1).view(torch.uint8) if t.numel() else torch.empty(0)
    return [_dtype_name(t.dtype), *_layout(t), base64.b64encode(whole.numpy().tobytes()).decode()]


def plan_of(data: Mapping[str, Any]) -> StoredPlan | None:
    """The plan that a recipe describes; None where it is for another machine or another version, or
    where a kernel is not on disk any more. ValueError if it is no recipe."""
    try:
        if data["maker"] != maker():
            return None
        plan = _plan(data)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as e:
        raise ValueError(f"it is not a plan: {type(e).__name__} {e}") from e
    if not cpu().library.fetch({str(entry): str(key) for entry, key, _ in data["kernels"]}):
        return None
    packs = [(int(i), bool(turned), int(vectors)) for i, turned, vectors in data["packs"]]
    sizes = [(int(i), tuple(shape), tuple(strides)) for i, shape, strides in data["sizes"]]
    return StoredPlan(plan, list(data["frozen"]), packs, sizes)


def _plan(data: Mapping[str, Any]) -> Plan:
    allocations = {r[0]: _allocation(*r) for r in data["roots"]}
    places = {s: (allocations[allocation], offset) for s, allocation, offset in data["places"]}
    plan = Plan(
        target=cpu(),
        inputs=data["inputs"],
        allocations=list(allocations.values()),
        places=places,
        arena_size=data["arena"],
        arena_floor=data["arena"],
        threads=int(data["threads"]),
        constants={int(s): _tensor(*t) for s, t in data["constants"].items()},
        outputs=[_output(*o) for o in data["outputs"]],
    )
    made = [
        Generated(Kernel(str(entry), "", frozenset()), int(scratch))
        for entry, _, scratch in data["kernels"]
    ]
    orders = [SimpleNamespace(generated=m, label=m.kernel.entry, failed=None) for m in made]
    plan.steps = [_step(orders, *s) for s in data["steps"]]
    _check(plan, set(data["frozen"]), data["packs"])
    return plan


def _check(plan: Plan, frozen: set[int], packs: Sequence[Any]) -> None:
    """ValueError where a plan names memory that it does not have."""
    if not frozen <= set(range(plan.inputs)) or not {i for i, *_ in packs} <= frozen:
        raise ValueError("its plan freezes an unknown slot")
    for allocation in plan.allocations:
        if not _has_memory(plan, frozen, allocation):
            raise ValueError(f"its plan has no memory for {allocation.kind} {allocation.slot}")
    named = [w for code in plan.natives for w in code.addresses if not isinstance(w, AuxMemory)]
    packings = [w[0] for w in named if isinstance(w, list)]
    slots = [w for w in named if not isinstance(w, list)]
    there = all(s in plan.places for s in (*slots, *(o.slot for o in plan.outputs)))
    if not there or not {*packings} <= set(range(len(packs))) or not NativeProgram.suits(plan):
        raise ValueError("its plan names an unknown slot")
    for made, allocation in plan.leaving:
        if allocation.kind == "fresh" and (
            extent(made.shape, made.strides)
            < extent(allocation.meta.shape, allocation.meta.stride())
        ):
            raise ValueError("a result of its plan is smaller than the data written to it")


def _has_memory(plan: Plan, frozen: set[int], allocation: Allocation) -> bool:
    if allocation.kind == "arena":
        end = allocation.offset + allocation.bytes
        return 0 <= allocation.offset <= end <= plan.arena_size
    if allocation.kind == "input":
        return 0 <= allocation.slot < plan.inputs
    if allocation.kind == "tied":
        return 0 <= allocation.tied_to < plan.inputs
    if allocation.kind == "const":
        return allocation.slot in plan.constants or allocation.slot in frozen
    return True


def _allocation(
    slot: int, kind: AllocationKind, offset: int, size: int, tied_to: int, layout: Any
) -> Allocation:
    meta = None
    if layout is not None:
        dtype, shape, strides = layout
        meta = torch.empty_strided(shape, strides, dtype=_dtype(dtype), device="meta")
    allocation = Allocation(slot, kind, meta, HOST, offset=offset, bytes=size, tied_to=tied_to)
    allocation.buffer = 0 if kind == "arena" else -1
    return allocation


def _step(
    orders: Sequence[Any],
    kernel: int,
    slots: list[Any],
    numbers: Sequence[int],
    work: float,
    args: list[Any],
    outs: list[int],
    named: Sequence[Any],
) -> Step:
    kind, name, line = named
    origin = None if line is None else SimpleNamespace(line=line)
    node: Any = SimpleNamespace(type=kind, name=name, origin=origin)
    kinds = {kind.value: kind for kind in AuxMemory}
    arguments = [
        Argument(k if isinstance(x, list) else kinds.get(x, k)) for k, x in enumerate(slots)
    ]
    native = Native(orders[kernel], arguments, tuple(numbers), work, operands=slots)
    return Step(node, "native", None, args, outs, native=native)


def _tensor(dtype: str, shape: Sequence[int], strides: Sequence[int], text: str) -> torch.Tensor:
    made = torch.empty_strided(shape, strides, dtype=_dtype(dtype))
    content = bytearray(base64.b64decode(text, validate=True))
    if len(content) != made.numel() * made.element_size():
        raise ValueError("a constant of its plan has another size")
    if content:
        made.copy_(torch.frombuffer(content, dtype=made.dtype).view(made.shape))
    return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype of tensors")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _output(slot: int, strides: Any, shape: Any) -> records.OutputSpec:
    known = [None if values is None else tuple(values) for values in (strides, shape)]
    return records.OutputSpec(slot, known[0], shape=known[1])
