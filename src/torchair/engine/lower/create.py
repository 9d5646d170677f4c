"""Tensors made from sizes and numbers: what an element is depends on its place."""

from __future__ import annotations

from typing import Any

from torchair.catalog.elementwise import number as known_number
from torchair.codegen.loops import Expr, cast, const, op, size
from torchair.codegen.types import FLOATS
from torchair.engine.lower.core import LowerOp, Place, Rule, Tensor, lowering, number
from torchair.engine.lower.elementwise import (
    add,
    div,
    eq,
    ge,
    le,
    lt,
    most,
    mul,
    of_elements,
    single_element,
    sub,
    where,
)


def _filled(value: int) -> Rule:
    def rule(node: LowerOp) -> Tensor:
        return Tensor(node.out_shape(), node.out_dtype(), lambda _: const(value, "i64"))

    return rule


lowering("ZerosLike")(_filled(0))
lowering("OnesLike")(_filled(1))
lowering("TensorMove")(of_elements(lambda x: x))


@lowering("Fill")
def _fill(node: LowerOp) -> Tensor:
    value = node.tensor("value")
    return Tensor(node.out_shape(), value.dtype, lambda _: single_element(value))


@lowering("Eye")
def _eye(node: LowerOp) -> Tensor:
    def element(place: Place) -> Expr:
        return eq(place[-2].value(), place[-1].value())

    return Tensor(node.out_shape(), node.out_dtype(), element)


# ---- ranges: computed in double precision and rounded once, integers exactly ----


def _bound(node: LowerOp, port: str, dtype: str) -> Expr:
    value: Any = known_number(node, port)
    value = node.int(port) if value is None else value
    return cast(const(value, "f64") if isinstance(value, float) else size(value), dtype)


@lowering("Range")
def _range(node: LowerOp) -> Tensor:
    dtype = node.out_dtype()
    exact = "f64" if dtype in FLOATS else "i64"
    start, step = (_bound(node, p, exact) for p in ("start", "delta"))

    def element(place: Place) -> Expr:
        return add(mul(cast(place[0].value(), exact), step), start)

    return Tensor(node.out_shape(), dtype, element)


@lowering("LinSpace")
def _linspace(node: LowerOp) -> Tensor:
    """Each half is counted from its own end, so that both ends are met exactly."""
    (count,) = node.out_shape()
    start, stop = (node.tensor(p) for p in ("start", "stop"))

    def element(place: Place) -> Expr:
        first, last = (cast(single_element(t), "f64") for t in (start, stop))
        gaps = cast(most(sub(size(count), 1), 1), "f64")
        step, index = div(sub(last, first), gaps), place[0].value()
        rising = add(first, mul(step, cast(index, "f64")))
        falling = sub(last, mul(step, sub(gaps, cast(index, "f64"))))
        return where(lt(index, most(size(count // 2), 1)), rising, falling)

    return Tensor((count,), node.out_dtype(), element)


# ---- triangles ----


def _triangle(kind: str) -> Rule:
    keeps = {"lower": le, "upper": ge}[kind]

    def rule(node: LowerOp) -> Tensor:
        x, diagonal = node.tensor("x"), node.attr("diagonal")

        def element(place: Place) -> Expr:
            row, column = place[-2].value(), place[-1].value()
            inside = keeps(sub(column, row), number(diagonal, row))
            found = x.at(place)
            return op("where", inside, found, number(0, found))

        return Tensor(x.shape, x.dtype, element)

    return rule


lowering("Tril")(_triangle("lower"))
lowering("Triu")(_triangle("upper"))
