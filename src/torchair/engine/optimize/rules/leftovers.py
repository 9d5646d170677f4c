"""Work that the faithful translation leaves behind: what changes nothing, copies without an effect,
and transposes and biases that a product takes into itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from torchair import ge
from torchair.ge import rewrite
from torchair.ge.build import builder
from torchair.ge.graph import INPUTS, Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, both_orders, made_by, operands
from torchair.operators import Trait, has_trait, row_of
from torchair.operators.slicing import END, slice_length

RULES = RuleSet()


@RULES("Mul")
def MultiplyByOne(node: Node, inner: Inner) -> Build:
    """x * 1 -> x"""
    result = node.outputs[0]
    for kept, other in both_orders(node):
        if rewrite.number(other) == 1 and (kept.dtype, kept.shape) == (result.dtype, result.shape):
            return lambda: kept
    raise Mismatch("neither factor is one")


@RULES("Cast")
def CastToSameType(node: Node, inner: Inner) -> Build:
    """A cast to the type that is there already."""
    (x,) = node.values()
    if x.dtype != node.attr("dst_type"):
        raise Mismatch("types differ", x)
    return lambda: x


@RULES("Identity")
def CloneIsCopy(node: Node, inner: Inner) -> Build:
    """The Identity that stands for a `clone` -> TensorMove: its result is memory of its own."""
    if node.origin is None or node.origin.target != "aten.clone.default":
        raise Mismatch("it is another name, not a clone", node)
    return lambda: ge.TensorMove(node.values()[0])


@RULES("Identity")
def IdentityNode(node: Node, inner: Inner) -> Build:
    """Identity(x) -> x, unless it orders something."""
    if node.control or node.control_users:
        raise Mismatch("it carries control edges", node)
    return lambda: node.values()[0]


@RULES("Reshape")
def ReshapeToSameShape(node: Node, inner: Inner) -> Build:
    """A reshape to the dims that are there already."""
    x = node.values()[0]
    if x.shape is None or x.shape != node.outputs[0].shape:
        raise Mismatch("dims differ", x)
    return lambda: x


@RULES("Reshape")
def ReshapeOfReshape(node: Node, inner: Inner) -> Build | None:
    """Only the last of two reshapes counts."""
    reshaped, shape = node.values()
    if not made_by(reshaped, "Reshape"):
        return None
    inner.see(reshaped)
    return lambda: ge.Reshape(operands(reshaped)[0], shape)


@RULES("Reshape")
def ReshapeAroundCast(node: Node, inner: Inner) -> Build | None:
    """Reshape(Cast(Reshape(x))) -> Cast(x), where the dims are those of x again: kernels of other
    dims do not fuse with it."""
    turned = node.values()[0]
    if not made_by(turned, "Cast"):
        return None
    (reshaped,) = operands(turned)
    if not made_by(reshaped, "Reshape"):
        return None
    inner.see(turned, reshaped)
    x, dtype = operands(reshaped)[0], turned.node.attr("dst_type")
    if x.shape is None or x.shape != node.outputs[0].shape:
        raise Mismatch("dims differ", x)
    if any(u.type != "Reshape" for u in turned.users()):
        raise Mismatch("the cast is read in its dims too", turned)
    return lambda: ge.Cast(x, dst_type=dtype)


@RULES("Transpose")
def TransposeNothing(node: Node, inner: Inner) -> Build:
    """A transpose that keeps every dim in place."""
    x, perm = node.values()
    if perm.content is None or perm.content != tuple(range(len(perm.content))):
        raise Mismatch("it moves dims", perm)
    return lambda: x


@RULES("Transpose")
def TransposeTwice(node: Node, inner: Inner) -> Build | None:
    """Two transposes are one."""
    turned, outer = node.values()
    if not made_by(turned, "Transpose"):
        return None
    inner.see(turned)
    x, first = operands(turned)
    if first.content is None or outer.content is None:
        raise Mismatch("an order is not constant")
    return lambda: ge.Transpose(x, [first.content[p] for p in outer.content])


# ---- copies ----


@RULES("ConcatV2")
def PartPutBack(node: Node, inner: Inner) -> Build | None:
    """[x[:s], part, x[e:]] joined -> x with a part replaced, which needs no second tensor. Where no
    input keeps the result, x would be copied first, and what is joined is fused with what makes and
    reads it."""
    if len(node.values()) != 4:
        return None
    before, part, behind, dim = node.values()
    slices = [operands(v) for v in (before, behind) if made_by(v, "StridedSliceV2")]
    if [len(s) for s in slices] != [5, 5] or slices[0][0] is not slices[1][0]:
        return None
    inner.see(before, behind)
    (x, *first), (_, *last) = slices
    known, starts, ends = rewrite.only(dim), map(rewrite.only, first), map(rewrite.only, last)
    begin_end = _replaced(node, x, part, known, [*starts], [*ends])
    if not _updates(node.outputs[0], x, inner.state):
        raise Mismatch("no input keeps the result", x)
    return lambda: ge.StridedSliceAssign(x, *begin_end, [1] * rewrite.rank_of(x), part)


def _replaced(
    node: Node, x: Value, part: Value, axis: Any, before: list[Any], behind: list[Any]
) -> tuple[list[int], list[int]]:
    """Where a part begins and ends in each dim; slices are begin, end, axis and step."""
    s, e = before[1], behind[0]
    if before != [0, s, axis, 1] or behind != [e, END, axis, 1]:
        raise Mismatch("other parts than those before and behind one slice")
    if not isinstance(s, int) or not isinstance(e, int) or axis is None:
        raise Mismatch("the bounds are not numbers")
    size, length = rewrite.shape_of(x)[axis], rewrite.shape_of(part)[axis]
    taken = slice_length(s, e, 1, size) if isinstance(size, int) else e - s
    if length != taken or node.outputs[0].shape != x.shape:
        raise Mismatch("it has another size than what it replaces", part)
    rest = rewrite.rank_of(x) - axis - 1
    return [0] * axis + [s] + [0] * rest, [END] * axis + [e] + [END] * rest


def _updates(value: Value, x: Value, state: Any) -> bool:
    """Whether a value is the new one of an input."""
    if x.node.type not in INPUTS:
        return False
    if any(u.type == "Assign" and u.inputs["ref"] is x for u in value.users()):
        return True
    kept = [user.values() for user in value.users() if user.type == "NetOutput"]
    places = [k for values in kept for k, v in enumerate(values) if v is value]
    return any(state.assigned.get(k) == x.node.attr("index") for k in places)


@RULES("TensorMove")
def CopyOfResult(node: Node, inner: Inner) -> Build:
    """TensorMove(x) -> x, where x is computed for the copy alone, or the copy is what an operator
    updates: that one has memory of its own anyway, or may be done in place."""
    (x,) = node.values()
    if not node.control_users and _is_updated(node.outputs[0]):
        return lambda: x
    if x.users() != [node] or x.node.control_users or node.control_users:
        raise Mismatch("the copied value has other readers", x)
    row = row_of(x.node.type)
    if x.node.type in INPUTS or row is None:
        raise Mismatch("it is a copy of an input", x)
    if row.has(Trait.VIEW | Trait.CONSTANT | Trait.WRITES_FIRST):
        raise Mismatch("the copied value may be in other memory", x)
    return lambda: x


def _is_updated(value: Value) -> bool:
    """Whether a value is there for one operator, which updates it."""
    readers = value.users()
    if len(readers) != 1 or not has_trait(readers[0], Trait.WRITES_FIRST):
        return False
    first, *others = readers[0].values()
    return first is value and value not in others


# ---- matrix products ----


_PRODUCT_PORTS = {
    "MatMul": ("x1", "x2", "bias"),
    "MatMulV2": ("x1", "x2", "bias", "offset_w"),
    "BatchMatMul": ("x1", "x2"),
}


def _fed(product: Node) -> list[Any]:
    """What a product reads, None for what it does not."""
    return [product.inputs.get(port) for port in _PRODUCT_PORTS[product.type]]


def _transpose_into(node: Node, inner: Inner, side: int) -> Build | None:
    """Transpose on one operand -> the product's own flag."""
    fed = _fed(node)
    turned = fed[side - 1]
    if not made_by(turned, "Transpose"):
        return None
    inner.see(turned)
    x, perm = operands(turned)
    if not rewrite.swaps_last_two(perm):
        raise Mismatch("it does not swap the last two dims", perm)
    fed[side - 1] = x
    flag = f"{'adj' if node.type == 'BatchMatMul' else 'transpose'}_x{side}"
    flags = {**rewrite.flags_of(node), flag: not node.attr(flag)}
    return lambda: builder(node.type)(*fed, **flags)


for _type in _PRODUCT_PORTS:
    for _side in (1, 2):
        RULES(_type, name=f"TransposeInto{_type}X{_side}")(partial(_transpose_into, side=_side))


def _bias_into(node: Node, inner: Inner, op_type: str) -> Build | None:
    """MatMul + row vector -> MatMul with bias."""
    for product, bias in both_orders(node):
        if not made_by(product, op_type) or any(_fed(product.node)[2:]):
            continue
        if len(product.uses) != 1:
            raise Mismatch("the product is read elsewhere too", product)
        if bias.shape is None or bias.rank != 1 or product.shape is None:
            raise Mismatch("the other term is not a row", bias)
        if bias.shape[0] != product.shape[-1] or bias.dtype != product.dtype:
            raise Mismatch("bias and product do not fit", bias)
        inner.add(product)
        x1, x2, _, *rest = _fed(product.node)
        flags = rewrite.flags_of(product.node)
        return lambda: builder(op_type)(x1, x2, bias, *rest, **flags)
    return None


for _type in ("MatMulV2", "MatMul"):
    RULES("Add", name=f"BiasInto{_type}")(partial(_bias_into, op_type=_type))


_BATCH_SWAPPED = (1, 0, 2)
PRODUCT_PATTERNS = RuleSet()


@PRODUCT_PATTERNS("Transpose")
def BatchMatMulTransposeFusion(node: Node, inner: Inner) -> Build | None:
    """Transposes of batch and rows around a batched product -> TransposeBatchMatMul"""
    product, order = node.values()
    if not made_by(product, "BatchMatMul") or order.content != _BATCH_SWAPPED:
        return None
    if inner.state.native:
        raise Mismatch("a transpose of a native product costs nothing", node)
    if product.node.attr("adj_x1") or product.node.attr("adj_x2"):
        raise Mismatch("an operand is read transposed", product)
    x1, x2 = operands(product)
    if x1.dtype not in rewrite.KERNEL_FLOATS:
        raise Mismatch("its type has no fused kernel", x1)
    inner.add(product)
    perm = (0, 1, 2)
    if made_by(x1, "Transpose") and len(x1.users()) == 1:
        turned, dims = operands(x1)
        if dims.content == _BATCH_SWAPPED:
            inner.add(x1)
            x1, perm = turned, _BATCH_SWAPPED
    return lambda: ge.TransposeBatchMatMul(
        x1, x2, perm_x1=list(perm), perm_x2=[0, 1, 2], perm_y=list(_BATCH_SWAPPED)
    )
