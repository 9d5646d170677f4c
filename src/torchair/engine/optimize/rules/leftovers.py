"""Work that the faithful translation leaves behind: what changes nothing, copies that nobody sees,
and transposes and biases that a product takes into itself."""

from __future__ import annotations

from typing import Any

import torch

from torchair import ge
from torchair.engine.optimize.rules.pattern import (
    KERNEL_FLOATS,
    Build,
    Inner,
    Mismatch,
    Pattern,
    flags_of,
    made_by,
    only,
    operands,
)
from torchair.ge.build import builder
from torchair.ge.graph import INPUTS, Node, Value
from torchair.ge.rewrite import Match, Rule, no
from torchair.operators import Trait, row_of
from torchair.operators.slicing import END, slice_length


def constant_of(value: Value) -> torch.Tensor | None:
    """The tensor of a Const, None for anything else."""
    return value.node.attr("value") if value.node.type == "Const" else None


class MultiplyByOne(Rule):
    """x * 1 -> x"""

    def pattern(self, x: Value, y: Value) -> Any:
        return ge.Mul(x, y)

    def replace(self, match: Match, x: Value, y: Value) -> Any:
        for kept, other in ((x, y), (y, x)):
            one = constant_of(other)
            if one is None or one.numel() != 1 or not bool((one == 1).all()):
                continue
            result = match.root.outputs[0]
            if (kept.dtype, kept.shape) == (result.dtype, result.shape):
                return kept
        return no("neither factor is one")


class CastToSameType(Rule):
    """A cast to the type that is there already."""

    def pattern(self, x: Value) -> Any:
        return ge.Cast(x, dst_type=0)

    def __init__(self) -> None:
        super().__init__()
        self.root.attrs.clear()  # any type

    def replace(self, match: Match, x: Value) -> Any:
        return x if x.dtype == match.root.attr("dst_type") else no("types differ", x)


class IdentityNode(Rule):
    """Identity(x) -> x, unless it orders something."""

    def pattern(self, x: Value) -> Any:
        return ge.Identity(x)

    def replace(self, match: Match, x: Value) -> Any:
        if match.root.control or match.root.control_users:
            return no("it carries control edges", match.root)
        return x


class ReshapeToSameShape(Rule):
    """A reshape to the dims that are there already."""

    def pattern(self, x: Value, shape: Value) -> Any:
        return ge.Reshape(x, shape)

    def replace(self, match: Match, x: Value, shape: Value) -> Any:
        result = match.root.outputs[0].shape
        if x.shape is None or x.shape != result:
            return no("dims differ", x)
        return x


class ReshapeOfReshape(Rule):
    """Only the last of two reshapes counts."""

    def pattern(self, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Reshape(ge.Reshape(x, inner), outer)

    def replace(self, match: Match, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Reshape(x, outer)


class TransposeNothing(Rule):
    """A transpose that keeps every dim in place."""

    def pattern(self, x: Value, perm: Value) -> Any:
        return ge.Transpose(x, perm)

    def replace(self, match: Match, x: Value, perm: Value) -> Any:
        order = perm.content
        if order is None or order != tuple(range(len(order))):
            return no("it moves dims", perm)
        return x


class TransposeTwice(Rule):
    """Two transposes are one."""

    def pattern(self, x: Value, inner: Value, outer: Value) -> Any:
        return ge.Transpose(ge.Transpose(x, inner), outer)

    def replace(self, match: Match, x: Value, inner: Value, outer: Value) -> Any:
        if inner.content is None or outer.content is None:
            return no("an order is not constant")
        return ge.Transpose(x, [inner.content[p] for p in outer.content])


# ---- copies ----


class CloneIsCopy(Rule):
    """The Identity that stands for a `clone` -> TensorMove: its result is memory of its own."""

    def pattern(self, x: Value) -> Any:
        return ge.Identity(x)

    def replace(self, match: Match, x: Value) -> Any:
        origin = match.root.origin
        if origin is None or origin.target != "aten.clone.default":
            return no("it is another name, not a clone", match.root)
        return ge.TensorMove(x)


class PartPutBack(Rule):
    """[x[:s], part, x[e:]] joined -> x with a part replaced, which needs no second tensor."""

    def pattern(
        self, x: Value, part: Value, dim: Value, zero: Value, s: Value, a: Value, i: Value,
        e: Value, end: Value, b: Value, j: Value,
    ) -> Any:  # fmt: skip
        before, behind = ge.StridedSliceV2(x, zero, s, a, i), ge.StridedSliceV2(x, e, end, b, j)
        return ge.ConcatV2([before, part, behind], dim, N=3)

    def replace(self, match: Match, x: Value, part: Value, dim: Value, **bounds: Value) -> Any:
        numbers = {name: only(value) for name, value in bounds.items()}
        axis, s, e = only(dim), numbers["s"], numbers["e"]
        known = dict(zero=0, end=END, i=1, j=1, a=axis, b=axis)
        if any(numbers[name] != number for name, number in known.items()):
            return no("other parts than those before and behind one slice")
        if not isinstance(s, int) or not isinstance(e, int) or axis is None:
            return no("the bounds are not numbers")
        size, length = x.shape[axis], part.shape[axis]  # type: ignore[index]
        taken = slice_length(s, e, 1, size) if isinstance(size, int) else e - s
        if length != taken or match.root.outputs[0].shape != x.shape:
            return no("it has another size than what it replaces", part)
        rest = x.rank - axis - 1
        begins, ends = [0] * axis + [s] + [0] * rest, [END] * axis + [e] + [END] * rest
        return ge.StridedSliceAssign(x, begins, ends, [1] * x.rank, part)


class CopyOfResult(Rule):
    """TensorMove(x) -> x, where x is computed for the copy alone, or the copy is what an operator
    updates: that one has memory of its own anyway, or may be done in place."""

    def pattern(self, x: Value) -> Any:
        return ge.TensorMove(x)

    def replace(self, match: Match, x: Value) -> Any:
        if not match.root.control_users and _is_updated(match.root.outputs[0]):
            return x
        if x.users() != [match.root] or x.node.control_users or match.root.control_users:
            return no("others see what is copied", x)
        row = row_of(x.node.type)
        if x.node.type in INPUTS or row is None:
            return no("it is a copy of an input", x)
        if row.has(Trait.VIEW | Trait.CONSTANT | Trait.WRITES_FIRST):
            return no("what is copied may lie in other memory", x)
        return x


def _is_updated(value: Value) -> bool:
    """Whether a value is there for one operator, which updates it."""
    readers = value.users()
    row = row_of(readers[0].type) if len(readers) == 1 else None
    if row is None or not row.has(Trait.WRITES_FIRST):
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


class _TransposeInto(Rule):
    """Transpose on one operand -> the product's own flag."""

    def __init__(self, op_type: str, side: int, flag: str, optional: int) -> None:
        self.op_type, self.side, self.flag, self.optional = op_type, side, flag, optional
        super().__init__()

    @property
    def name(self) -> str:
        return f"TransposeInto{self.op_type}X{self.side}"

    def pattern(
        self, x1: Value, x2: Value, perm: Value, bias: Any = None, offset: Any = None
    ) -> Any:
        turned = ge.Transpose(x1 if self.side == 1 else x2, perm)
        pair = (turned, x2) if self.side == 1 else (x1, turned)
        return builder(self.op_type)(*pair, *[bias, offset][: self.optional])

    def replace(
        self, match: Match, x1: Value, x2: Value, perm: Value, bias: Any = None, offset: Any = None
    ) -> Any:
        if not swaps_last_two(perm):
            return no("it does not swap the last two dims", perm)
        flags = {**flags_of(match.root), self.flag: not match.root.attr(self.flag)}
        extra = [bias, offset][: self.optional]
        return builder(self.op_type)(x1, x2, *extra, **flags)


TRANSPOSE_RULES = tuple(
    _TransposeInto(op_type, side, f"{stem}_x{side}", optional)
    for op_type, stem, optional in (
        ("MatMul", "transpose", 1),
        ("MatMulV2", "transpose", 2),
        ("BatchMatMul", "adj", 0),
    )
    for side in (1, 2)
)


class _BiasInto(Rule):
    """MatMul + row vector -> MatMul with bias."""

    def __init__(self, op_type: str, optional: int, bias_first: bool) -> None:
        self.op_type, self.optional, self.bias_first = op_type, optional, bias_first
        super().__init__()

    @property
    def name(self) -> str:
        return f"BiasInto{self.op_type}"

    def pattern(self, x1: Value, x2: Value, bias: Value) -> Any:
        product = builder(self.op_type)(x1, x2, *[None] * self.optional)
        return ge.Add(bias, product) if self.bias_first else ge.Add(product, bias)

    def replace(self, match: Match, x1: Value, x2: Value, bias: Value) -> Any:
        product = next(n for n in match.nodes if n.type == self.op_type)
        result = product.outputs[0]
        if len(result.uses) != 1:
            return no("the product is read elsewhere too", product)
        if bias.shape is None or bias.rank != 1 or result.shape is None:
            return no("the other term is not a row", bias)
        if bias.shape[0] != result.shape[-1] or bias.dtype != result.dtype:
            return no("bias and product do not fit", bias)
        extra = [bias, None][: self.optional]
        return builder(self.op_type)(x1, x2, *extra, **flags_of(product))


BIAS_RULES = tuple(
    _BiasInto(op_type, optional, first)
    for op_type, optional in (("MatMulV2", 2), ("MatMul", 1))
    for first in (False, True)
)


_BATCH_SWAPPED = (1, 0, 2)


class BatchMatMulTransposeFusion(Pattern):
    """Transposes of batch and rows around a batched product -> TransposeBatchMatMul"""

    last = ("Transpose",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        product, order = node.values()
        if not made_by(product, "BatchMatMul") or order.content != _BATCH_SWAPPED:
            return None
        if self.state.native:
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
