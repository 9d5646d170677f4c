"""Rows of torch's profiler: each kernel of a program under the names of the torch operators that it
computes. A program with rows is made when a profiler runs, and used only then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch.autograd.profiler import record_function

from torchair.engine.plan.records import Plan, Step
from torchair.engine.run.executor import Run
from torchair.ge.graph import Node

_LONGEST = 8  # operators that a name shows


class KernelRows:
    """Lets the steps of a program show as rows, native ones one by one."""

    alone = True

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def begin(self) -> None:
        """Nothing to prepare."""

    def wrap(self, run: Run, steps: Sequence[int], lane: str) -> Run:
        """The same run inside of a row."""
        name = row_name(self._plan.steps[steps[0]])

        def labelled(registers: list[Any]) -> None:
            with record_function(name):
                run(registers)

        return labelled

    def end(self) -> None:
        """The profiler has all."""


def row_name(step: Step) -> str:
    """`torchair::mm+add+relu`: torch operators in the order of the graph, `mul x3` for three in
    turn; what has none goes by the name of its GE operator."""
    seen: dict[str, str] = {}  # operator by FX node: one may have become several nodes
    for node in step.also or [step.node]:
        seen.setdefault(_key(node), _operator(node))
    runs = [(name, len(list(same))) for name, same in groupby(seen.values())]
    shown = [name if count == 1 else f"{name} x{count}" for name, count in runs[:_LONGEST]]
    if len(runs) > _LONGEST:
        shown.append(f"{len(runs) - _LONGEST} more")
    return "torchair::" + "+".join(shown)


def _key(node: Node) -> str:
    return node.origin.fx_name if node.origin is not None and node.origin.fx_name else node.name


def _operator(node: Node) -> str:
    target = node.origin.target if node.origin is not None else ""
    words = target.split(".")
    return words[1] if len(words) > 1 and words[0] in ("aten", "prims", "npu") else node.type
