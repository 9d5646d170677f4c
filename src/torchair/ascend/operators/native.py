"""Generated code for fused operators of the `npu` library: activations, rotary embeddings, norms
with quantised results, and writes into pages of a cache."""

from __future__ import annotations

from typing import Any

from torchair.ascend.ops import caches, gates, norms, rope
from torchair.codegen.loops import Expr, Index, at_value, cast, const, op, size
from torchair.codegen.sizes import FLOATS
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Fact
from torchair.operators import formulas as f
from torchair.operators.core import Op, call, native, same_as, update
from torchair.operators.gated import halved
from torchair.operators.index import not_positions, wide
from torchair.operators.loops import (
    TYPES,
    IndexTuple,
    Lowered,
    LowerOp,
    Update,
    as_stored,
    broadcast_index,
    elementwise,
)
from torchair.operators.norm import over_root, root_facts
from torchair.operators.quant import narrowed_byte
from torchair.operators.scatter import WRITES

# ---- activations ----


@native(
    "FastGelu",
    same_as("x"),
    call(gates.fast_gelu),
    declines=f.mixed,
    types=FLOATS,
)
def fast_gelu(o: LowerOp) -> Lowered:
    """x * sigmoid(1.702 x)."""
    return elementwise(lambda x: f.mul(x, f.sigmoid(f.mul(x, gates.FAST))), o.tensor("x"))


@native(
    "FastGeluGrad",
    same_as("x"),
    call(gates.fast_gelu_backward),
    declines=f.mixed,
    types=FLOATS,
)
def fast_gelu_grad(o: LowerOp) -> Lowered:
    """The gradient of that."""

    def element(grad: Expr, x: Expr) -> Expr:
        gate = f.sigmoid(f.mul(x, gates.FAST))
        slope = f.add(f.mul(f.mul(x, gates.FAST), f.sub(1.0, gate)), 1.0)
        return f.mul(f.mul(grad, gate), slope)

    return elementwise(element, o.tensor("dy"), o.tensor("x"))


def _clipped_declines(o: Op) -> str | None:
    if o.fed("group_index"):
        return "rows behind the groups are zero"
    last = o.attr("dim") in (-1, len(o.shape("x")) - 1)
    return None if last else "pairs along another dim than the last"


def _clipped(x: Any, group_index: Any, *numbers: Any) -> Any:
    names = ("dim", "alpha", "limit", "bias", "interleaved")
    named: Any = dict(zip(names, numbers, strict=True))
    return gates.clipped_swiglu(x, group_index=group_index, **named)


@native(
    "ClippedSwiglu",
    lambda op: halved(op, op.attr("dim")),
    call(_clipped, "dim", "alpha", "limit", "bias", "interleaved"),
    kind="move",
    declines=_clipped_declines,
    types=FLOATS,
)
def clipped_swiglu(o: LowerOp) -> Lowered:
    """glu * sigmoid(alpha glu) * (linear + bias), both held at a limit."""
    x, limit, pairs = o.tensor("x"), float(o.attr("limit")), o.attr("interleaved")
    last = x.rank - 1
    half = x.shape[-1] // 2

    def element(place: IndexTuple) -> Expr:
        at = place[last]
        first, second = (at * 2, at * 2 + 1) if pairs else (at, at + half)
        glu = f.least(x.at(f.replaced(place, last, first)), limit)
        linear = f.clamp(x.at(f.replaced(place, last, second)), -limit, limit)
        gate = f.sigmoid(f.mul(glu, float(o.attr("alpha"))))
        return f.mul(f.mul(glu, gate), f.add(linear, float(o.attr("bias"))))

    return Lowered(o.out_shape(), o.out_dtype(), element)


# ---- rotary embedding of neighbours, whose first members come first in the result ----


@native(
    "InterleaveRope",
    same_as("x"),
    call(rope.interleave_rope),
    kind="move",
    declines=f.mixed,
    types=FLOATS,
)
def interleave_rope(o: LowerOp) -> Lowered:
    """Pairs (a, b) as a cos - b sin, and behind all of those b cos + a sin."""
    x, cos, sin = o.tensor("x"), o.tensor("cos"), o.tensor("sin")
    last, half = x.rank - 1, x.shape[-1] // 2

    def read(k: int, place: IndexTuple) -> Expr:
        at = place[last]
        a, b = (x.at(f.replaced(place, last, at * 2 + i)) for i in range(2))
        whole = f.replaced(place, last, at + half) if k else place
        c, s = (t.at(broadcast_index(whole, t.shape)) for t in (cos, sin))
        if k:
            return f.add(f.mul(b, c), f.mul(a, s))
        return f.sub(f.mul(a, c), f.mul(b, s))

    return Lowered(x.shape, x.dtype, f.Concatenated(last, [half, half], read).element)


# ---- the norm of a sum, in two types or quantised ----


def _last_of_gamma(o: Op) -> tuple[int, ...]:
    rank = len(o.shape("x1"))
    return tuple(range(rank - len(o.shape("gamma")), rank))


def _cast_rule(op: Op) -> list[Fact]:
    y, rstd = root_facts(op, "x1")
    return [Fact(rstd.dtype, y.shape), y, rstd, y]


@native(
    "AddRmsNormCast",
    _cast_rule,
    call(norms.add_rms_norm_cast, "epsilon"),
    kind="reduce",
    domain="x1",
    reduces=_last_of_gamma,
    declines=f.mixed,
    types=FLOATS,
)
def add_rms_norm_cast(o: LowerOp) -> list[Lowered]:
    """The norm in float32 and in its own type, the inverse root, and the sum."""
    total = elementwise(f.add, o.tensor("x1"), o.tensor("x2"), dtype=o.out_dtype(3))
    y, rstd = over_root(o, total, "x1")
    own = f.typed(y, o.out_dtype(1))
    return [f.typed(as_stored(own), o.out_dtype(0)), own, f.typed(rstd, o.out_dtype(2)), total]


def _branches(o: Op) -> tuple[bool, bool]:
    mask = o.attr("output_mask")
    given = mask if mask and len(mask) > 1 else None
    return norms.dynamic_branches(o.get("smooth_scale1"), o.get("smooth_scale2"), given)


def _quant_rule(op: Op) -> list[Fact]:
    dims, wanted = op.shape("x1"), _branches(op)
    int8, wide_type = DataType.DT_INT8, DataType.DT_FLOAT
    ys = [Fact(int8, dims if w else (0,)) for w in wanted]
    scales = [Fact(wide_type, dims[:-1] if w else (0,)) for w in wanted]
    return [*ys, Fact(op.dtype("x1"), dims), *scales]


def _quant_kernel(op: Op) -> Any:
    mask = op.attr("output_mask")
    given = mask if mask and len(mask) > 1 else None
    packed = op.node.attrs.get("_argument_y_dtype")
    kind = None if packed is None else op.attr("_argument_y_dtype")
    return lambda x1, x2, gamma, first, second, beta: norms.add_rms_norm_dynamic_quant(
        x1,
        x2,
        gamma,
        smooth_scale1=first,
        smooth_scale2=second,
        beta=beta,
        epsilon=op.attr("epsilon"),
        output_mask=given,
        y_dtype=kind,
    )


def _quant_declines(o: Op) -> str | None:
    if _branches(o) != (True, False) or any(o.node.outputs[k].uses for k in (1, 4)):
        return "two quantised results, or the empty one is read"
    if "_argument_y_dtype" in o.node.attrs or len(o.shape("gamma")) != 1:
        return "results of another type, or norms over several dims"
    return f.mixed(o)


@native(
    "AddRmsNormDynamicQuant",
    _quant_rule,
    _quant_kernel,
    kind="reduce",
    domain="x1",
    reduces=_last_of_gamma,
    declines=_quant_declines,
    types=FLOATS,
)
def add_rms_norm_dynamic_quant(o: LowerOp) -> list[Lowered | None]:
    """Rows over the largest of each, the sum, and the scales."""
    total = elementwise(f.add, o.tensor("x1"), o.tensor("x2"), dtype=o.out_dtype(2))
    y = over_root(o, total, "x1")[0]
    for port, combine in (("beta", f.add), ("smooth_scale1", f.mul)):
        parameter = o.maybe(port)
        y = y if parameter is None else elementwise(combine, y, parameter)
    top = o.reduce("max", elementwise(f.absolute, y), _last_of_gamma(o))

    def factor(t: Expr) -> Expr:
        return f.where(f.gt(t, 0.0), f.div(t, 127.0), 1.0)

    scale = elementwise(factor, top)
    values = elementwise(lambda v, s: narrowed_byte(f.div(v, s)), y, scale, dtype="i8")
    rows = Lowered(total.shape[:-1], "f32", lambda place: scale.at((*place, Index())))
    return [values, None, total, rows, None]


# ---- pages of a cache: one cache, which is updated in place ----


def _page_sizes(o: Op) -> tuple[Any, Any]:
    dims = o.shape("cache")
    return dims[0], dims[2 if o.attr("blocked") else 1]


def _page_declines(o: Op) -> str | None:
    cache, tokens = o.shape("cache"), o.shape("tokens")
    rest = (cache[1], cache[3]) if o.attr("blocked") else cache[2:]
    if tuple(tokens[1:]) != tuple(rest) or len(o.shape("slots")) != 1:
        return "tokens are not as the pages have them"
    if TYPES.get(o.dtype("cache")) != TYPES.get(o.dtype("tokens")):
        return "tokens of another type than the cache"
    return not_positions([o["slots"]])


def _page_kernel(cache: Any, tokens: Any, slots: Any, blocked: bool) -> None:
    layout = caches.BLOCKED if blocked else caches.PLAIN
    caches.write_tokens("npu_scatter_pa_kv_cache", "slot_mapping", cache, tokens, slots, layout)


@native(
    "PagedUpdate",
    same_as("cache"),
    update(_page_kernel, "blocked"),
    WRITES,
    kind="update",
    domain="tokens",
    declines=_page_declines,
    out=True,
)
def paged_update(o: LowerOp) -> Update:
    """Each token at its slot; one with a negative slot is left out."""
    tokens, slots = o.tensor("tokens"), o.tensor("slots")
    pages, length = _page_sizes(o)
    blocked = o.attr("blocked")

    def slot(index: IndexTuple) -> Expr:
        return wide(slots.at((index[0],)))

    def place(index: IndexTuple) -> IndexTuple:
        page = at_value(op("floordiv", slot(index), size(length)))
        row = at_value(op("remainder", slot(index), size(length)))
        return (page, index[1], row, *index[2:]) if blocked else (page, row, *index[1:])

    def valid(index: IndexTuple) -> Expr:
        used = f.ge(slot(index), const(0, "i64"))
        fits = f.lt(slot(index), cast(size(pages * length), "i64"))
        return f.both(used, o.verify(f.either(f.flipped(used), fits)))

    return Update(tokens, place, valid)
