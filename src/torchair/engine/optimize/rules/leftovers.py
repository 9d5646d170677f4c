"""Work that the faithful translation leaves behind: what changes nothing, copies that nobody sees,
and transposes and biases that a product takes into itself."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.ge.build import builder
from torchair.ge.graph import INPUTS, Node, Value
from torchair.ge.rewrite import (
    KERNEL_FLOATS,
    Build,
    Inner,
    Mismatch,
    Rule,
    both_orders,
    flags_of,
    made_by,
    only,
    operands,
)
from torchair.operators import Trait, has_trait, row_of
from torchair.operators.slicing import END, slice_length


def constant_of(value: Value) -> torch.Tensor | None:
    """The tensor of a Const, None for anything else."""
    return value.node.attr("value") if value.node.type == "Const" else None


class MultiplyByOne(Rule):
    """x * 1 -> x"""

    last = ("Mul",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        result = node.outputs[0]
        for kept, other in both_orders(node):
            one = constant_of(other)
            if one is None or one.numel() != 1 or not bool((one == 1).all()):
                continue
            if (kept.dtype, kept.shape) == (result.dtype, result.shape):
                return lambda: kept
        raise Mismatch("neither factor is one")


class CastToSameType(Rule):
    """A cast to the type that is there already."""

    last = ("Cast",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        (x,) = node.values()
        if x.dtype != node.attr("dst_type"):
            raise Mismatch("types differ", x)
        return lambda: x


class IdentityNode(Rule):
    """Identity(x) -> x, unless it orders something."""

    last = ("Identity",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        if node.control or node.control_users:
            raise Mismatch("it carries control edges", node)
        return lambda: node.values()[0]


class ReshapeToSameShape(Rule):
    """A reshape to the dims that are there already."""

    last = ("Reshape",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        x = node.values()[0]
        if x.shape is None or x.shape != node.outputs[0].shape:
            raise Mismatch("dims differ", x)
        return lambda: x


class ReshapeOfReshape(Rule):
    """Only the last of two reshapes counts."""

    last = above = ("Reshape",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        reshaped, shape = node.values()
        if not made_by(reshaped, "Reshape"):
            return None
        inner.see(reshaped)
        return lambda: ge.Reshape(operands(reshaped)[0], shape)


class TransposeNothing(Rule):
    """A transpose that keeps every dim in place."""

    last = ("Transpose",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        x, perm = node.values()
        if perm.content is None or perm.content != tuple(range(len(perm.content))):
            raise Mismatch("it moves dims", perm)
        return lambda: x


class TransposeTwice(Rule):
    """Two transposes are one."""

    last = above = ("Transpose",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        turned, outer = node.values()
        if not made_by(turned, "Transpose"):
            return None
        inner.see(turned)
        x, first = operands(turned)
        if first.content is None or outer.content is None:
            raise Mismatch("an order is not constant")
        return lambda: ge.Transpose(x, [first.content[p] for p in outer.content])


# ---- copies ----


class CloneIsCopy(Rule):
    """The Identity that stands for a `clone` -> TensorMove: its result is memory of its own."""

    last = ("Identity",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        if node.origin is None or node.origin.target != "aten.clone.default":
            raise Mismatch("it is another name, not a clone", node)
        return lambda: ge.TensorMove(node.values()[0])


class PartPutBack(Rule):
    """[x[:s], part, x[e:]] joined -> x with a part replaced, which needs no second tensor."""

    last, above = ("ConcatV2",), ("StridedSliceV2",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        if len(node.values()) != 4:
            return None
        before, part, behind, dim = node.values()
        slices = [operands(v) for v in (before, behind) if made_by(v, *self.above)]
        if [len(s) for s in slices] != [5, 5] or slices[0][0] is not slices[1][0]:
            return None
        inner.see(before, behind)
        (x, *first), (_, *last) = slices
        return self._assign(node, x, part, only(dim), [*map(only, first)], [*map(only, last)])

    def _assign(
        self, node: Node, x: Value, part: Value, axis: Any, before: list[Any], behind: list[Any]
    ) -> Build:
        """Slices are begin, end, axis and step."""
        s, e = before[1], behind[0]
        if before != [0, s, axis, 1] or behind != [e, END, axis, 1]:
            raise Mismatch("other parts than those before and behind one slice")
        if not isinstance(s, int) or not isinstance(e, int) or axis is None:
            raise Mismatch("the bounds are not numbers")
        size, length = x.shape[axis], part.shape[axis]  # type: ignore[index]
        taken = slice_length(s, e, 1, size) if isinstance(size, int) else e - s
        if length != taken or node.outputs[0].shape != x.shape:
            raise Mismatch("it has another size than what it replaces", part)
        rest = x.rank - axis - 1
        begins, ends = [0] * axis + [s] + [0] * rest, [END] * axis + [e] + [END] * rest
        return lambda: ge.StridedSliceAssign(x, begins, ends, [1] * x.rank, part)


class CopyOfResult(Rule):
    """TensorMove(x) -> x, where x is computed for the copy alone, or the copy is what an operator
    updates: that one has memory of its own anyway, or may be done in place."""

    last = ("TensorMove",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        (x,) = node.values()
        if not node.control_users and _is_updated(node.outputs[0]):
            return lambda: x
        if x.users() != [node] or x.node.control_users or node.control_users:
            raise Mismatch("others see what is copied", x)
        row = row_of(x.node.type)
        if x.node.type in INPUTS or row is None:
            raise Mismatch("it is a copy of an input", x)
        if row.has(Trait.VIEW | Trait.CONSTANT | Trait.WRITES_FIRST):
            raise Mismatch("what is copied may lie in other memory", x)
        return lambda: x


def _is_updated(value: Value) -> bool:
    """Whether a value is there for one operator, which updates it."""
    readers = value.users()
    if len(readers) != 1 or not has_trait(readers[0], Trait.WRITES_FIRST):
        return False
    first, *others = readers[0].values()
    return first is value and value not in others


# ---- matrix products ----


def swaps_last_two(perm: Value) -> bool:
    """Whether a transpose exchanges just the last two dims."""
    order = perm.content
    if order is None or len(order) < 2:
        return False
    rank = len(order)
    return order == (*range(rank - 2), rank - 1, rank - 2)


_PRODUCT_PORTS = {
    "MatMul": ("x1", "x2", "bias"),
    "MatMulV2": ("x1", "x2", "bias", "offset_w"),
    "BatchMatMul": ("x1", "x2"),
}


def _fed(product: Node) -> list[Any]:
    """What a product reads, None for what it does not."""
    return [product.inputs.get(port) for port in _PRODUCT_PORTS[product.type]]


class _TransposeInto(Rule):
    """Transpose on one operand -> the product's own flag."""

    above = ("Transpose",)

    def __init__(self, op_type: str, side: int, flag: str) -> None:
        self.last, self._side, self._flag = (op_type,), side, flag

    @property
    def name(self) -> str:
        return f"TransposeInto{self.last[0]}X{self._side}"

    def find(self, node: Node, inner: Inner) -> Build | None:
        fed = _fed(node)
        turned = fed[self._side - 1]
        if not made_by(turned, "Transpose"):
            return None
        inner.see(turned)
        x, perm = operands(turned)
        if not swaps_last_two(perm):
            raise Mismatch("it does not swap the last two dims", perm)
        fed[self._side - 1] = x
        flags = {**flags_of(node), self._flag: not node.attr(self._flag)}
        return lambda: builder(node.type)(*fed, **flags)


TRANSPOSE_RULES = tuple(
    _TransposeInto(op_type, side, f"{'adj' if op_type == 'BatchMatMul' else 'transpose'}_x{side}")
    for op_type in _PRODUCT_PORTS
    for side in (1, 2)
)


class _BiasInto(Rule):
    """MatMul + row vector -> MatMul with bias."""

    last = ("Add",)

    def __init__(self, op_type: str) -> None:
        self.above = (op_type,)

    @property
    def name(self) -> str:
        return f"BiasInto{self.above[0]}"

    def find(self, node: Node, inner: Inner) -> Build | None:
        declined = None
        for product, bias in both_orders(node):
            if not made_by(product, *self.above) or any(_fed(product.node)[2:]):
                continue
            declined = self._declines(product, bias)
            if declined is None:
                inner.add(product)
                x1, x2, _, *rest = _fed(product.node)
                flags = flags_of(product.node)
                return lambda: builder(self.above[0])(x1, x2, bias, *rest, **flags)
        if declined is not None:
            raise declined
        return None

    def _declines(self, product: Value, bias: Value) -> Mismatch | None:
        if len(product.uses) != 1:
            return Mismatch("the product is read elsewhere too", product)
        if bias.shape is None or bias.rank != 1 or product.shape is None:
            return Mismatch("the other term is not a row", bias)
        if bias.shape[0] != product.shape[-1] or bias.dtype != product.dtype:
            return Mismatch("bias and product do not fit", bias)
        return None


BIAS_RULES = tuple(_BiasInto(op_type) for op_type in ("MatMulV2", "MatMul"))


_BATCH_SWAPPED = (1, 0, 2)


class BatchMatMulTransposeFusion(Rule):
    """Transposes of batch and rows around a batched product -> TransposeBatchMatMul"""

    last = ("Transpose",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        product, order = node.values()
        if not made_by(product, "BatchMatMul") or order.content != _BATCH_SWAPPED:
            return None
        if inner.state.native:
            raise Mismatch("a transpose of a native product costs nothing", node)
        if product.node.attr("adj_x1") or product.node.attr("adj_x2"):
            raise Mismatch("an operand is read transposed", product)
        x1, x2 = operands(product)
        if x1.dtype not in KERNEL_FLOATS:
            raise Mismatch("its type has no fused kernel", x1)
        inner.add(product)
        x1, perm = _unswapped(x1, inner)
        return lambda: ge.TransposeBatchMatMul(
            x1, x2, perm_x1=list(perm), perm_x2=[0, 1, 2], perm_y=list(_BATCH_SWAPPED)
        )


def _unswapped(x: Value, inner: Inner) -> tuple[Value, tuple[int, ...]]:
    """An operand and the order of dims it is read in."""
    if made_by(x, "Transpose") and operands(x)[1].content == _BATCH_SWAPPED and len(x.users()) == 1:
        inner.add(x)
        return operands(x)[0], _BATCH_SWAPPED
    return x, (0, 1, 2)


RULES: tuple[Rule, ...] = (
    MultiplyByOne(),
    CastToSameType(),
    CloneIsCopy(),
    IdentityNode(),
    PartPutBack(),
    ReshapeToSameShape(),
    ReshapeOfReshape(),
    TransposeNothing(),
    TransposeTwice(),
    *TRANSPOSE_RULES,
    *BIAS_RULES,
    CopyOfResult(),
)
