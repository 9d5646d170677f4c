"""Generated code for the way of tokens back from their experts: the rows of each token, scaled and
added up."""

from __future__ import annotations

from typing import Any

from torchair.ascend.ops import rows
from torchair.codegen.loops import Expr, Index, at_value, const, size
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import SHORT, Op, call, native
from torchair.operators.index import not_positions, verified, wide
from torchair.operators.loops import TYPES, IndexTuple, Lowered, LowerOp

_MOST = 16  # choices of a token that are written out
_SKIPS = ("x1", "x2")
_FLOATS = ("expanded_x", *_SKIPS, "bias", "scales")


def _choices(o: Op) -> Any:
    return o.shape("scales")[1] if o.fed("scales") else 1


def _rule(o: Op) -> Fact:
    places, width = o.shape("expanded_row_idx")[0], o.shape("expanded_x")[-1]
    return Fact(o.dtype("expanded_x"), (places // _choices(o), width))


def _second(
    x: Any, places: Any, x1: Any, x2: Any, bias: Any, scales: Any, experts: Any, mode: int
) -> Any:
    return rows.finalize_routing(x, x1, x2, bias, scales, places, experts, mode)


def _declines(o: Op) -> str | None:
    choices = _choices(o)
    if not isinstance(choices, int) or choices > _MOST:
        return f"the number of choices is not known, or larger than {_MOST}"
    plain = o.attr("drop_pad_mode", 0) in (rows.COLUMNS, rows.ROWS)
    if not plain or len(o.shape("expanded_x")) != len(_rule(o).shape or ()):
        return "rows are padded"
    if {TYPES.get(o.dtype(port)) for port in _FLOATS if o.fed(port)} - SHORT:
        return "types that are no short floats"
    positions = [o[port] for port in ("expanded_row_idx", *_expert_port(o)) if o.fed(port)]
    return not_positions(positions)


def _expert_port(o: Op) -> tuple[str, ...]:
    """Where the expert of each choice is given, if it is needed."""
    names = ("expert_idx", "expanded_expert_idx")
    return tuple(n for n in names if o.fed("bias") and n in o.node.inputs and o.fed(n))


def _row(o: LowerOp, token: Index, choice: int) -> Index:
    """The row of a choice of a token; positions outside are held at the ends."""
    places = o.tensor("expanded_row_idx")
    choices, count = _choices(o), o.tensor("expanded_x").shape[0]
    by_columns = o.attr("drop_pad_mode", 0) == rows.COLUMNS
    tokens = places.shape[0] // choices
    at = token + choice * tokens if by_columns else token * choices + choice
    e = wide(places.at((at,)))
    e = f.where(f.lt(e, const(0, "i64")), const(0, "i64"), e)
    last = size(count - 1)
    return at_value(f.where(f.lt(e, size(count)), e, last))


def finalized(o: LowerOp) -> Lowered:
    """The sum over the choices of a token of scale * (row + bias of the expert), and skips."""
    x, scales, bias = o.tensor("expanded_x"), o.maybe("scales"), o.maybe("bias")
    experts = [o.tensor(port) for port in _expert_port(o)]

    def term(place: IndexTuple, choice: int) -> Expr:
        token, column = place
        made = x.at((_row(o, token, choice), column))
        if bias is not None and experts:
            expert = wide(experts[0].at((token, Index(offset=choice))))
            made = f.add(made, bias.at((at_value(verified(o, expert, bias.shape[0])), column)))
        if scales is not None:
            made = f.mul(made, scales.at((token, Index(offset=choice))))
        return made

    def element(place: IndexTuple) -> Expr:
        total = term(place, 0)
        for choice in range(1, _choices(o)):
            total = f.add(total, term(place, choice))
        for port in _SKIPS:
            skip = o.maybe(port)
            total = total if skip is None else f.add(total, skip.at(place))
        return total

    return Lowered(o.out_shape(), o.out_dtype(), element)


for _type, _kernel in (
    ("MoeFinalizeRouting", call(rows.finalize_routing)),
    ("MoeFinalizeRoutingV2", call(_second, "drop_pad_mode")),
):
    native(_type, _rule, _kernel, kind="move", declines=_declines, types=SHORT)(finalized)
