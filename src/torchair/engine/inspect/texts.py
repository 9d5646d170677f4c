"""A plan and its kernels as texts to read, for the structured trace."""

from __future__ import annotations

from collections.abc import Iterable

from torchair.codegen.program import Native
from torchair.engine.inspect.timeline import row_name
from torchair.engine.plan.records import Plan, Step, flat_slots


def plan_text(name: str, plan: Plan) -> str:
    """One line for each step: what it runs, what it reads and what it writes."""
    head = (
        f"{name}: {len(plan.steps)} steps on {plan.device}, {plan.inputs} inputs, "
        f"{len(plan.outputs)} outputs, {len(plan.constants)} constants, arena of "
        f"{plan.arena_size} bytes (most bytes alive at once: {plan.arena_floor})"
    )
    return "\n".join([head, *(_step_line(plan, k, step) for k, step in enumerate(plan.steps))])


def _step_line(plan: Plan, number: int, step: Step) -> str:
    reads = ", ".join(_memory(plan, slot) for slot in flat_slots(step.args))
    writes = ", ".join(_memory(plan, slot) for slot in step.outs)
    what = row_name(step).removeprefix("torchair::")
    kernel = f"  {step.native.kernel.entry}" if step.native is not None else ""
    return f"{number:4d} {step.kind:6s} {what}{kernel}\n       {reads} -> {writes}"


def _memory(plan: Plan, slot: int) -> str:
    """Where a slot lies, such as `arena[64:128]` or `input 3`."""
    if slot not in plan.places:
        return f"slot {slot}"
    allocation, offset = plan.place(slot)
    if allocation.kind == "arena" and allocation.offset >= 0:
        begin = allocation.offset + offset
        return f"arena[{begin}:{allocation.offset + allocation.bytes}]"
    return f"{allocation.kind} {allocation.slot}" + (f"+{offset}" if offset else "")


def kernels_text(natives: Iterable[Native]) -> str:
    """Each kernel once: the loops that were asked for as comments, then the generated text."""
    kernels = {n.kernel.entry: n for n in natives}
    return "\n\n".join(_kernel_text(entry, native) for entry, native in kernels.items())


def _kernel_text(entry: str, native: Native) -> str:
    request = "\n".join(f"; {line}" for line in str(native.order.request).splitlines())
    return f"; {entry}\n{request}\n{native.kernel.text}"
