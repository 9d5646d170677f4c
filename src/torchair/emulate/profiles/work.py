"""What is known of a kernel beside its time: type, core, operands, graph, line of the program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Core = Literal["AI_CORE", "AI_VECTOR_CORE", "COMMUNICATION"]
"""The kind of core that such an operator is for: products, all others, talk between processes."""

State = Literal["static", "dynamic"]
"""Whether sizes are fixed."""

Operand = tuple[str, list[int]]
"""Name of the type, and dims: -1 where the graph has a symbol."""

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "convolution",
     "convolution_backward", "_convolution"}
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One kernel, as it goes into a trace and comes out of it."""

    type: str
    core: Core
    nodes: list[str] = field(default_factory=list)  # of the graph; none for an eager operator
    inputs: list[Operand] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    graph: str = ""
    state: State = "dynamic"
    source: str = ""
    kernel: str = ""  # kind of step


def of_call(name: str, args: Any, kwargs: Any, result: Any) -> Work:
    """An eager operator `library::name` that was called."""
    library, _, base = name.partition("::")
    core: Core = "AI_CORE" if base in _PRODUCTS else "AI_VECTOR_CORE"
    if "c10d" in library:
        core = "COMMUNICATION"
    given = [*args, *kwargs.values()]
    return Work(
        base, core, inputs=[_operand(t) for t in _tensors(given)],
        outputs=[_operand(t) for t in _tensors([result])],
    )  # fmt: skip


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


def _operand(tensor: torch.Tensor) -> Operand:
    from torchair.ge.dtypes import dtype_name, torch_to_ge

    try:
        kind = dtype_name(torch_to_ge(tensor.dtype))
    except RuntimeError:  # a type that GE does not have
        kind = str(tensor.dtype).removeprefix("torch.").upper()
    return kind.removeprefix("DT_"), list(tensor.shape)


def of_step(graph: str, step: Any) -> Work:
    """A step of a plan."""
    from torchair.engine.optimize.passes.ordering import communicates
    from torchair.operators import Trait, row_of

    nodes = step.also or [step.node]
    inside = set(nodes)
    read = [v for n in nodes for v in n.values() if v.node not in inside]
    if len(nodes) > 1:
        read = list(dict.fromkeys(read))  # a kernel reads a value once
    rows = [row_of(n.type) for n in nodes]
    core: Core = "AI_VECTOR_CORE"
    if any(row is not None and row.has(Trait.CONTRACTION) for row in rows):
        core = "AI_CORE"
    elif any(map(communicates, nodes)):
        core = "COMMUNICATION"
    made = step.made or step.node.outputs
    dims = [v.shape for v in (*read, *made)]
    fixed = all(s is not None and all(isinstance(d, int) for d in s) for s in dims)
    origin = step.node.origin
    return Work(
        "+".join(n.type for n in nodes), core, [n.name for n in nodes],
        [_value(v) for v in read], [_value(v) for v in made], graph,
        "static" if fixed else "dynamic", origin.line if origin else "", step.kind,
    )  # fmt: skip


def _value(value: Any) -> Operand:
    from torchair.ge.dtypes import dtype_name
    from torchair.ge.shapes import on_wire

    return dtype_name(value.dtype).removeprefix("DT_"), on_wire(value.shape)
