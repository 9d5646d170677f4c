"""What is drawn of a plan: memory over time, lanes over time, and the text of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torchair.codegen.target import Order
from torchair.engine.inspect.timeline import Slice
from torchair.engine.plan.records import Plan
from torchair.engine.plan.strides import flat_slots

_LONGEST = 120_000  # characters of one text of a kernel


def memory_picture(plan: Plan) -> dict[str, Any]:
    """Boxes `[name, steps that write it, first, last, offset, bytes]` of the arena, one for each
    buffer, and what else has memory."""
    buffers: dict[int, list[Any]] = {}
    for k, step in enumerate(plan.steps):
        named = dict(zip(step.outs, step.made, strict=False))
        for slot in [*flat_slots(step.args), *step.outs]:
            root = plan.place(slot)[0]
            if root.offset < 0:
                continue
            box = buffers.setdefault(root.buffer, [[], [], k, k, root.offset, root.bytes])
            box[3] = k
            if slot in step.outs:
                box[0] += [named[slot].node.name] if slot in named else []
                box[1].append(k)
    boxes = [[", ".join(names[:4]) or "copy", *rest] for names, *rest in buffers.values()]
    others: Counter[str] = Counter()
    for root in plan.roots:
        if root.offset < 0:
            others[root.kind] += root.size
    return {
        "size": plan.arena_size, "floor": plan.arena_floor, "steps": len(plan.steps),
        "boxes": boxes, "others": dict(others),
    }  # fmt: skip


def timeline_picture(plan: Plan, slices: Sequence[Slice]) -> dict[str, Any]:
    """Slices `[lane, step, begin, end]` in microseconds since the first, and the events between
    lanes."""
    lanes = plan.schedule.lanes if plan.schedule is not None else [""]
    begin = min((t0 for _, _, t0, _ in slices), default=0.0)
    return {
        "lanes": [lane or "default stream" for lane in lanes],
        "slices": [
            [lanes.index(lane), k, round(t0 - begin, 3), round(t1 - begin, 3)]
            for lane, k, t0, t1 in slices
        ],
        "events": plan.schedule.events if plan.schedule is not None else [],
    }


def kernel_rows(plan: Plan) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Kernels, each once, with what was asked for and the text that was generated; and the kernel
    of each native step."""
    rows: list[dict[str, Any]] = []
    number: dict[str, int] = {}
    kernel_of: dict[int, int] = {}
    for k, step in enumerate(plan.steps):
        if step.native is None:
            continue
        kernel = step.native.kernel
        if kernel.entry not in number:
            number[kernel.entry] = len(rows)
            order = step.native.order
            texts = {"nest": str(order.request), "text": kernel.text, "machine": _code(order)}
            rows.append({"name": kernel.entry, **{k: cut(text) for k, text in texts.items()}})
        kernel_of[k] = number[kernel.entry]
    return rows, kernel_of


def _code(order: Order) -> str:
    try:
        return order.machine_text()
    except RuntimeError as e:  # LLVM's
        return f"no machine code: {e}"


def cut(text: str) -> str:
    """A text that a page can hold."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}\n… and {len(text) - _LONGEST:,} characters more"
