"""Random numbers that kernels draw themselves, as torch's kernels for GPUs do.

A state is a seed and an offset, of which all numbers are a function. `PhiloxState` advances torch's
generator as several operators of torch would, and gives the state of the first one; each draws from
an offset so much further. What draws is then a function without effects, which fuses with what
reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchair.codegen import philox
from torchair.codegen.loops import Expr, Index, const
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import Op, TorchKernel, Trait, add_row, native
from torchair.operators.loops import IndexTuple, Lowered, LowerOp, flattened

_DRAWS = Trait.RANDOM | Trait.DRAWS

# ---- dropout as one operator of torch: where kernels do not draw ----


def _dropout_rule(op: Op) -> list[Fact]:
    return [Fact(op.dtype("x"), op.shape("x")), Fact(DataType.DT_BOOL, op.shape("x"))]


def _dropout(op: Op) -> TorchKernel:
    p = op.attr("p")
    return lambda x: torch.ops.aten.native_dropout.default(x, p, True)


add_row("NativeDropout", _dropout_rule, _dropout, _DRAWS)


# ---- the state of a generator ----


def _state_rule(op: Op) -> Fact:
    return Fact(DataType.DT_INT64, (2,))


def _state(op: Op) -> TorchKernel:
    increment, device = int(op.attr("increment")), torch.device(op.attr("device"))

    def run(out: torch.Tensor | None = None) -> torch.Tensor:
        made = torch.empty(2, dtype=torch.int64, device=device) if out is None else out
        if torch.cuda.is_current_stream_capturing():
            return _captured(made, increment)
        generator = torch.cuda.default_generators[made.device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + increment)
        made[0].fill_(seed - 2**64 if seed >= 2**63 else seed)  # no copy, which no recording holds
        made[1].fill_(offset)
        return made

    return run


def _captured(made: torch.Tensor, increment: int) -> torch.Tensor:
    """The state that the generator has at each replay of the graph that is being recorded. Python
    cannot ask for it; an attention with dropout, which advances the generator by one number for
    each score, tells the state that it has drawn with."""
    query, key = (
        torch.zeros((1, n, 1, 8), dtype=torch.float16, device=made.device) for n in (increment, 1)
    )
    found = torch.ops.aten._efficient_attention_forward.default(
        query, key, key, None, None, None, None, None, 0.5, 0, False
    )
    made[0].copy_(found[2])
    made[1].copy_(found[3])
    return made


add_row("PhiloxState", _state_rule, _state, _DRAWS, out=True)


# ---- what is kept ----


def _layout(op: Op, dims: Sequence[Any]) -> philox.PhiloxLayout:
    elements = 1
    for n in dims:
        elements *= n
    return philox.PhiloxLayout(elements, op.attr("vector"), op.attr("threads"))


def _mask_rule(op: Op) -> Fact:
    return Fact(DataType.DT_BOOL, tuple(op.ints("shape")))


def _mask(op: Op) -> TorchKernel:
    dims = tuple(op.ints("shape"))
    layout, keep, first = _layout(op, dims), op.attr("keep"), op.attr("first")

    def run(state: torch.Tensor) -> torch.Tensor:
        position = torch.arange(layout.elements, device=state.device)
        own = torch.stack([state[0], state[1] + first])
        return (philox.drawn(own, position, layout) < philox.chance(keep)).view(dims)

    return run


@native("PhiloxMask", _mask_rule, _mask, host=("shape",))
def _mask_loops(node: LowerOp) -> Lowered:
    """Where a number is less than what is to be kept."""
    state, dims = node.tensor("state"), node.out_shape()
    layout, keep = _layout(node, dims), philox.chance(node.attr("keep"))

    def element(place: IndexTuple) -> Expr:
        seed, offset = (state.at((Index(offset=k),)) for k in (0, 1))
        offset = f.add(offset, const(node.attr("first"), "i64"))
        drawn = Expr("philox", "f32", (seed, offset, flattened(place, dims).value()), layout)
        return f.lt(drawn, const(keep, "f32"))

    return Lowered(dims, "bool", element)
