"""Operators of the `npu` library that GE has of its own: cache updates, gradients, quantisation."""

from __future__ import annotations

from collections.abc import Callable

from torchair.catalog import Op
from torchair.codegen.loops import Expr, Index, at_value, cast, op
from torchair.codegen.types import FLOATS
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    Update,
    broadcast_index,
    elementwise,
    lowering,
)
from torchair.engine.lower.elementwise import (
    absolute,
    add,
    div,
    eq,
    least,
    most,
    mul,
    neg,
    not_floats,
    sigmoid,
    sub,
    where,
)
from torchair.engine.lower.index import inside
from torchair.engine.lower.reduce import mean, typed
from torchair.engine.lower.slicing import Joined, replaced
from torchair.ge.dtypes import DataType

_POSITIONS = ("i64", "i32")


def _wide(e: Expr) -> Expr:
    return cast(e, "i64")


def _not_positions(o: Op) -> str | None:
    known = TYPES.get(o.dtype("indices")) in _POSITIONS
    return None if known else "indices are no positions"


# ---- cache updates: the nest runs over what is written ----


def _scatter_declines(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    axis = o.attr("axis") % len(var)
    if o.attr("reduce") != "update" or axis == 0 or len(var) != len(updates):
        return "it is not the update of a cache"
    same = [d for d in range(1, len(var)) if d != axis and var[d] != updates[d]]
    if same or indices[0] != updates[0] or (len(indices) == 2 and indices[1] != 2):
        return "its operands do not fit"
    return _not_positions(o)


@lowering("Scatter", kind="update", domain="updates", declines=_scatter_declines)
def scatter(o: LowerOp) -> Update:
    """Rows of each batch written from a position on, that an index gives."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    axis, pairs = o.attr("axis") % var.rank, indices.rank == 2

    def batch(index: Place) -> Expr:
        return _wide(indices.at((index[0], Index()))) if pairs else index[0].value()

    def position(index: Place) -> Expr:
        start = indices.at((index[0], Index(offset=1)) if pairs else (index[0],))
        return op("add", _wide(start), index[axis].value())

    def place(index: Place) -> Place:
        first = at_value(batch(index)) if pairs else index[0]
        return replaced((first, *index[1:]), axis, at_value(position(index)))

    def valid(index: Place) -> Expr:
        fits = inside(position(index), var.shape[axis])
        return o.verify(op("and", fits, inside(batch(index), var.shape[0])))

    return Update(updates, place, valid)


def _points_decline(o: Op) -> str | None:
    var, updates, indices = (o.shape(p) for p in ("var", "updates", "indices"))
    depth = indices[-1] if indices else 0
    if not isinstance(depth, int) or not 1 <= depth <= len(var):
        return "how many dims a point has is not known"
    if updates != (*indices[:-1], *var[depth:]):
        return "its operands do not fit"
    return _not_positions(o)


@lowering("ScatterNdUpdate", kind="update", domain="updates", declines=_points_decline)
def scatter_nd_update(o: LowerOp) -> Update:
    """Rows written at the points that indices name."""
    var, updates, indices = o.tensor("var"), o.tensor("updates"), o.tensor("indices")
    depth, lead = int(o.shape("indices")[-1]), indices.rank - 1

    def position(index: Place, d: int) -> Expr:
        return _wide(indices.at((*index[:lead], Index(offset=d))))

    def place(index: Place) -> Place:
        return (*(at_value(position(index, d)) for d in range(depth)), *index[lead:])

    def valid(index: Place) -> Expr:
        tests = [inside(position(index, d), var.shape[d]) for d in range(depth)]
        fits = tests[0]
        for test in tests[1:]:
            fits = op("and", fits, test)
        return o.verify(fits)

    return Update(updates, place, valid)


# ---- gradients ----


@lowering("SwiGluGrad", kind="move", declines=not_floats)
def swiglu_grad(o: LowerOp) -> Tensor:
    """Gradients of the gate, then those of what it gates."""
    grad, x = o.tensor("y_grad"), o.tensor("x")
    dim = o.attr("dim") % x.rank
    half = x.shape[dim] // 2

    def read(k: int, place: Place) -> Expr:
        g, a = grad.at(place), x.at(place)
        gate = sigmoid(a)
        if k == 1:
            return mul(mul(g, a), gate)
        b = x.at(replaced(place, dim, place[dim] + half))
        return mul(mul(g, b), mul(gate, add(mul(a, sub(1.0, gate)), 1.0)))

    return Tensor(x.shape, x.dtype, Joined(dim, [half, half], read).element)


def _factors_wanted(o: Op) -> str | None:
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of the angles are sums over other dims" if read else not_floats(o)


@lowering("RotaryMulGrad", kind="move", declines=_factors_wanted)
def rotary_grad(o: LowerOp) -> list[Tensor | None]:
    """The gradient of what was turned: turned the other way."""
    grad, r1, r2 = o.tensor("dy"), o.tensor("r1"), o.tensor("r2")
    last, half = grad.rank - 1, grad.shape[-1] // 2

    def across(place: Place) -> Expr:
        return mul(grad.at(place), r2.at(broadcast_index(place, r2.shape)))

    def other(k: int, place: Place) -> Expr:
        if k == 0:
            return across(replaced(place, last, place[last] + half))
        return neg(across(place))

    turned = Joined(last, [half, half], other)

    def element(place: Place) -> Expr:
        along = r1.at(broadcast_index(place, r1.shape))
        return add(mul(grad.at(place), along), turned.element(place))

    return [Tensor(grad.shape, grad.dtype, element), None, None]


def _like_gamma(o: Op) -> tuple[int, ...]:
    rank = len(o.shape("x"))
    return tuple(range(rank - len(o.shape("gamma")), rank))


def _gamma_wanted(o: Op) -> str | None:
    wanted = bool(o.node.outputs[1].uses)
    return "the gradient of gamma is a sum over other dims" if wanted else None


@lowering("RmsNormGrad", kind="reduce", domain="x", reduces=_like_gamma, declines=_gamma_wanted)
def rms_norm_grad(o: LowerOp) -> list[Tensor | None]:
    """The gradient of the input: rstd * (g - hat * mean(g * hat)) where g = dy * gamma and hat is
    the normalised input."""
    rstd = o.tensor("rstd")
    grad = elementwise(mul, o.tensor("dy"), o.tensor("gamma"))
    hat = elementwise(mul, o.tensor("x"), rstd)
    middle = mean(o, elementwise(mul, grad, hat), _like_gamma(o))

    def element(g: Expr, h: Expr, m: Expr, r: Expr) -> Expr:
        return mul(r, sub(g, mul(h, m)))

    return [typed(elementwise(element, grad, hat, middle, rstd), o.out_dtype()), None]


# ---- quantisation ----


def _narrowed(x: Expr, dtype: str) -> Expr:
    """The nearest integer that a type holds."""
    low, high = {"i8": (-128.0, 127.0), "u8": (0.0, 255.0)}[dtype]
    return cast(most(least(op("round", x), high), low), dtype)


def _dynamic_declines(o: Op) -> str | None:
    if o.attr("dst_type") != DataType.DT_INT8 or TYPES.get(o.dtype("x")) not in FLOATS:
        return "only floats become int8"
    return "rows have groups" if o.fed("group_index") else None


def _last(o: Op) -> tuple[int, ...]:
    return (len(o.shape("x")) - 1,)


def _smoothed(o: LowerOp) -> tuple[Tensor, Tensor]:
    """The operand, and what is quantised of it."""
    x, smooth = o.tensor("x"), o.maybe("smooth_scales")
    return x, x if smooth is None else elementwise(mul, x, smooth)


@lowering(
    "DynamicQuant", kind="reduce", domain="x", reduces=_last, declines=_dynamic_declines
)  # fmt: skip
def dynamic_quant(o: LowerOp) -> list[Tensor]:
    """Values over the scale that lets the largest of a row just fit."""
    x, values = _smoothed(o)
    top = o.reduce("max", elementwise(absolute, values), _last(o), keep=True)
    scale = elementwise(lambda t: div(t, 127.0), top)

    def element(v: Expr, s: Expr) -> Expr:
        return _narrowed(div(v, where(eq(s, 0.0), 1.0, s)), "i8")

    return [elementwise(element, values, scale, dtype="i8"), _of_rows(x, scale)]


def _of_rows(x: Tensor, kept: Tensor) -> Tensor:
    """What a row has one of, without the dim that was reduced."""
    return Tensor(x.shape[:-1], "f32", lambda place: kept.at((*place, Index())))


def _asymmetric_declines(o: Op) -> str | None:
    rows = o.attr("quant_mode") == "pertoken" and not o.attr("dst_type_max")
    if not rows or o.attr("is_symmetrical"):
        return "only rows without symmetry are known, up to the largest number of int8"
    return _dynamic_declines(o)


@lowering(
    "DynamicQuantV2", kind="reduce", domain="x", reduces=_last, declines=_asymmetric_declines
)  # fmt: skip
def asymmetric_quant(o: LowerOp) -> list[Tensor]:
    """Values over the scale, plus the offset, that let both ends of a row just fit."""
    x, values = _smoothed(o)
    top, bottom = (o.reduce(end, values, _last(o), keep=True) for end in ("max", "min"))
    scale = elementwise(lambda t, b: div(sub(t, b), 255.0), top, bottom)
    safe = elementwise(lambda s: where(eq(s, 0.0), 1.0, s), scale)
    offset = elementwise(lambda t, s: sub(127.0, div(t, s)), top, safe)
    y = elementwise(
        lambda v, s, z: _narrowed(add(div(v, s), z), "i8"), values, safe, offset, dtype="i8"
    )
    return [y, _of_rows(x, scale), _of_rows(x, offset)]


def _along_last(port: str) -> Callable[[Op], str | None]:
    """Scales that are broadcast as they are: one, or a row of them."""

    def declines(o: Op) -> str | None:
        axis, rank = o.attr("axis"), len(o.shape("x"))
        if TYPES.get(o.dtype("x")) not in FLOATS or TYPES.get(o.node.outputs[0].dtype) not in (
            "i8",
            "u8",
        ):
            return "only floats become bytes"
        whole = all(s == (1,) or axis in (-1, rank - 1) for s in _vectors(o, port))
        return None if whole else "scales lie along another dim"

    return declines


def _vectors(o: Op, port: str) -> list[tuple[object, ...]]:
    facts = [o.get(p) for p in (port, "offset" if port == "scale" else "zero_points")]
    return [tuple(f.shape or ()) for f in facts if f is not None]


def _moved(o: LowerOp, values: Tensor, port: str) -> Tensor:
    """Values plus zero points, as the nearest ones of the result's type."""
    zero, dtype = o.maybe(port), o.out_dtype()
    if zero is None:
        return elementwise(lambda v: _narrowed(v, dtype), values, dtype=dtype)
    return elementwise(
        lambda v, z: _narrowed(add(v, cast(z, v.dtype)), dtype), values, zero, dtype=dtype
    )


@lowering("AscendQuantV2", declines=_along_last("scale"))
def ascend_quant(o: LowerOp) -> Tensor:
    """Values times a scale, plus an offset."""
    return _moved(o, elementwise(mul, o.tensor("x"), o.tensor("scale")), "offset")


def _quant_declines(o: Op) -> str | None:
    to_bytes = o.attr("dst_type") == DataType.DT_INT8 and TYPES.get(o.dtype("x")) in FLOATS
    rounds = str(o.attr("round_mode")).lower() == "round"
    return None if to_bytes and rounds else "only floats become int8"


@lowering("AscendQuant", declines=_quant_declines)
def quant_of_one_scale(o: LowerOp) -> Tensor:
    """Values times a number, plus a number."""
    scale = o.attr("scale") ** (2 if o.attr("sqrt_mode") else 1)
    return elementwise(
        lambda v: _narrowed(add(mul(v, scale), o.attr("offset")), "i8"), o.tensor("x"), dtype="i8"
    )


@lowering(
    "AscendDequant",
    declines=lambda o: None if TYPES.get(o.dtype("deq_scale")) in FLOATS else "scales are patterns",
)
def dequant(o: LowerOp) -> Tensor:
    """Whole sums times scales."""

    def element(x: Expr, s: Expr) -> Expr:
        scale = cast(s, "f32")
        value = mul(cast(x, "f32"), mul(scale, scale) if o.attr("sqrt_mode") else scale)
        return most(value, 0.0) if o.attr("relu_flag") else value

    return elementwise(element, o.tensor("x"), o.tensor("deq_scale"), dtype=o.out_dtype())


@lowering("Quantize", declines=_along_last("scales"))
def quantize(o: LowerOp) -> Tensor:
    """Values over a scale, plus a zero point."""
    return _moved(o, elementwise(div, o.tensor("x"), o.tensor("scales")), "zero_points")
