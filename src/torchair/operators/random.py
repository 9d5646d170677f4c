"""Random numbers that kernels draw themselves, as torch's kernels for GPUs do.

A state is a seed and an offset, of which all numbers are a function. `PhiloxState` advances torch's
generator as torch's operators would, and gives the state of each of them; what draws is then a
function without effects, which fuses with what reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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
    return Fact(DataType.DT_INT64, (len(op.attr("increments")), 2))


def _state(op: Op) -> TorchKernel:
    increments = [int(n) for n in op.attr("increments")]
    device = torch.device(op.attr("device"))
    firsts = list(accumulate(increments, initial=0))
    total = firsts.pop()

    def run(out: torch.Tensor | None = None) -> torch.Tensor:
        made = out
        if made is None:
            made = torch.empty((len(firsts), 2), dtype=torch.int64, device=device)
        if torch.cuda.is_current_stream_capturing():
            return _captured(made, firsts, total)
        generator = torch.cuda.default_generators[made.device.index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + total)
        seed -= 2**64 if seed >= 2**63 else 0
        return made.copy_(torch.tensor([[seed, offset + n] for n in firsts]))

    return run


def _captured(made: torch.Tensor, firsts: Sequence[int], total: int) -> torch.Tensor:
    """The state that the generator has at each replay of the graph that is being recorded. Python
    cannot ask for it; an attention with dropout, which advances the generator by one number for
    each score, tells the state that it has drawn with."""
    query, key = (
        torch.zeros((1, n, 1, 8), dtype=torch.float16, device=made.device) for n in (total, 1)
    )
    found = torch.ops.aten._efficient_attention_forward.default(
        query, key, key, None, None, None, None, None, 0.5, 0, False
    )
    seed, offset = found[2], found[3]
    made[:, 0].copy_(seed)
    for k, first in enumerate(firsts):
        torch.add(offset, first, out=made[k, 1])
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
    layout, keep = _layout(op, dims), op.attr("keep")

    def run(state: torch.Tensor) -> torch.Tensor:
        position = torch.arange(layout.elements, device=state.device)
        return (philox.drawn(state, position, layout) < philox.chance(keep)).view(dims)

    return run


@native("PhiloxMask", _mask_rule, _mask, host=("shape",))
def _mask_loops(node: LowerOp) -> Lowered:
    """Where a number is less than what is to be kept."""
    state, dims = node.tensor("state"), node.out_shape()
    layout, keep = _layout(node, dims), philox.chance(node.attr("keep"))

    def element(place: IndexTuple) -> Expr:
        seed, offset = (state.at((Index(offset=k),)) for k in (0, 1))
        drawn = Expr("philox", "f32", (seed, offset, flattened(place, dims).value()), layout)
        return f.lt(drawn, const(keep, "f32"))

    return Lowered(dims, "bool", element)
