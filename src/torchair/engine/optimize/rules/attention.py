"""Attention that a model spells out, two products with a softmax between them, and that of the
`npu` library: as FusedInferAttentionScore by heads, which generated code has."""

from __future__ import annotations

from typing import Any

from torchair import ge
from torchair.ge import rewrite
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, both_orders, made_by, operands
from torchair.operators import Op
from torchair.operators.attention import is_plain

ATTENTION_PATTERNS = RuleSet()
_WIDEST_HEAD = 256
_FEW = 32  # queries that a tile of the native kernel is not filled with
HEADS_LAST = (0, 2, 1, 3)
_SWAPPED = (0, 1, 3, 2)
_PASSED = ("Cast", "Reshape", "Identity")  # what is part of a pattern wherever it stands


@ATTENTION_PATTERNS("BatchMatMul")
def AttentionFusion(node: Node, inner: Inner) -> Build | None:
    """softmax(scale * (q @ k^T) + mask) @ v -> FusedInferAttentionScore"""
    weights = _below(node.values()[0], inner)
    if not made_by(weights, "SoftmaxV2"):
        return None
    rank = rewrite.rank_of(weights)
    axes = [a % rank for a in weights.node.attr("axes")]
    if node.attr("adj_x1") or axes != [rank - 1]:
        raise Mismatch("the softmax is not over the axis that is summed", weights)
    inner.add(weights)
    length = rewrite.shape_of(weights)[-2]
    if inner.state.native and isinstance(length, int) and 1 < length < _FEW:
        raise Mismatch("generated code of the parts is faster for so few queries", weights)
    scores = _scores(_below(operands(weights)[0], inner), inner)
    return _UnfusedAttention(node, rewrite.shape_of(weights), *scores).build


def _below(value: Value, inner: Inner) -> Value:
    """What is under casts and reshapes, which are part of the pattern."""
    while made_by(value, *_PASSED):
        inner.add(value)
        value = operands(value)[0]
    return value


def _scores(value: Value, inner: Inner) -> tuple[Node, float, Value | None]:
    """The product, scale and mask of scale * (query @ key^T) + mask."""
    mask, scale = None, 1.0
    if made_by(value, "Add"):
        for scores, other in both_orders(value.node):
            if _is_scaled_product(scores):
                if scores.shape != value.shape:
                    raise Mismatch("the mask is larger than the scores", other)
                inner.add(value)
                value, mask = _below(scores, inner), other
                break
        else:
            raise Mismatch("the operand of the softmax is not a product plus a mask", value)
    factor = _scale(value)
    if factor is not None:
        inner.add(value)
        value, scale = _below(factor[0], inner), factor[1]
    if not made_by(value, "BatchMatMul") or value.node.attr("adj_x1"):
        raise Mismatch("the operand of the softmax is not a product of query and key", value)
    inner.add(value)
    return value.node, scale, mask


def _scale(value: Value) -> tuple[Value, float] | None:
    found = rewrite.with_number(value, "Mul")
    if found is None and made_by(value, "RealDiv", "Div"):
        x, divisor = operands(value)
        known = rewrite.number(divisor)
        return (x, 1 / known) if known else None
    return found


def _is_scaled_product(value: Value) -> bool:
    while made_by(value, *_PASSED) or _scale(value) is not None:
        found = _scale(value)
        value = operands(value)[0] if found is None else found[0]
    return made_by(value, "BatchMatMul")


class _UnfusedAttention:
    """The parts of one attention, as the fused operator wants them."""

    def __init__(
        self, node: Node, weights: tuple[Any, ...], product: Node, scale: float, mask: Value | None
    ) -> None:
        self.node, self.scale, self.mask = node, scale, mask
        self.query, self.key = product.values()
        self.value = node.values()[1]
        self.key_turned = bool(product.attr("adj_x2"))
        self.value_turned = bool(node.attr("adj_x2"))
        self.lead = weights[:-2]  # batch and heads
        self.length, self.span = weights[-2:]
        if len(weights) not in (3, 4):
            raise Mismatch("it has neither heads nor batches of them", self.node)
        if self.query.dtype not in rewrite.KERNEL_FLOATS or self.query.dtype != self.value.dtype:
            raise Mismatch("its types have no fused kernel", self.query)
        self.width = rewrite.shape_of(self.query)[-1]
        self.value_width = rewrite.shape_of(self.value)[-2 if self.value_turned else -1]
        check_widths(self.query, self.width, self.value_width)
        if not isinstance(self.lead[-1], int):
            raise Mismatch("the number of heads is symbolic", self.query)

    def build(self) -> Value:
        """The fused node, and its result in the dims of the last product."""
        batch, heads = (1, *self.lead)[-2:]
        query = self._four(self.query, (self.length, self.width))
        key = self._rows(self.key, self.key_turned, self.width)
        value = self._rows(self.value, not self.value_turned, self.value_width)
        last = self._heads_last()
        missing = 0 if self.mask is None else 4 - len(rewrite.shape_of(self.mask))
        mask = ge.Unsqueeze(self.mask, axes=list(range(missing))) if missing else self.mask
        out, _ = ge.FusedInferAttentionScore(
            query,
            [key],
            [value],
            mask,
            num_heads=heads,
            scale=self.scale,
            input_layout="BNSD_BSND" if last else "BNSD",
            num_key_value_heads=heads,
            softmax_lse_flag=False,
        )
        if last:
            out = ge.Transpose(out, list(HEADS_LAST))
        return self._result(out, (batch, heads, self.length, self.value_width))

    def _four(self, x: Value, tail: tuple[Any, ...]) -> Value:
        """A matrix of each head as batch, heads, rows and columns."""
        dims = ((1, *self.lead)[-2:]) + tail
        while x.shape != dims and made_by(x, "Reshape", "TensorMove"):
            x = operands(x)[0]
        while made_by(x, "TensorMove"):  # the kernel reads any strides
            x = operands(x)[0]
        if x.shape == dims:
            return x
        if not all(isinstance(d, int) for d in dims):
            raise Mismatch("sizes are symbolic, and an operand has no heads", x)
        return ge.Reshape(x, list(dims))

    def _rows(self, x: Value, as_rows: bool, width: int) -> Value:
        """Keys or values, one row for each position."""
        if as_rows:
            return self._four(x, (self.span, width))
        x = self._four(x, (width, self.span))
        if made_by(x, "Transpose") and operands(x)[1].content == _SWAPPED:
            return operands(x)[0]
        return ge.Transpose(x, list(_SWAPPED))

    def _heads_last(self) -> bool:
        """Whether the reader brings the heads of a position together."""
        value = self.node.outputs[0]
        while len(value.users()) == 1 and value.users()[0].type == "Reshape":
            value = value.users()[0].outputs[0]
        users = value.users()
        turned = len(users) == 1 and users[0].type == "Transpose"
        return turned and users[0].values()[1].content == HEADS_LAST

    def _result(self, out: Value, dims: tuple[Any, ...]) -> Value:
        wanted = rewrite.shape_of(self.node.outputs[0])
        if wanted == dims:
            return out
        if all(isinstance(d, int) for d in wanted):
            return ge.Reshape(out, list(wanted))
        if made_by(self.query, "Reshape") and self.query.shape == wanted:
            return ge.Reshape(out, operands(self.query)[1])
        raise Mismatch("sizes are symbolic, and the dims of the result are not at hand", out)


def check_widths(query: Value, *widths: Any) -> None:
    """Mismatch where features of a head are unknown, or too many for the kernels."""
    if not all(isinstance(w, int) and w <= _WIDEST_HEAD for w in widths):
        raise Mismatch("its heads are too wide", query)


@ATTENTION_PATTERNS("FusedInferAttentionScore")
def RepeatedHeadsFusion(node: Node, inner: Inner) -> Build | None:
    """Attention to heads of keys and values that were repeated -> to the heads themselves"""
    if not is_plain(Op(node)):
        return None
    query, key, value, *mask = node.values()
    sources = _repeated(key), _repeated(value)
    if sources[0] is None or sources[1] is None:
        return None
    if rewrite.shape_of(sources[0])[:3] != rewrite.shape_of(sources[1])[:3] or len(mask) > 1:
        raise Mismatch("keys and values are repeated in different ways", node)
    flags = {**rewrite.flags_of(node), "num_key_value_heads": rewrite.shape_of(sources[0])[1]}
    few = [[sources[0]], [sources[1]]]
    return lambda: list(ge.FusedInferAttentionScore(query, *few, *mask, **flags))


def _repeated(value: Value) -> Value | None:
    """(batch, heads, rows, width) that was broadcast to more heads, each next to its copies."""
    if not made_by(value, "Reshape"):
        return None
    wide = operands(value)[0]
    wide = operands(wide)[0] if made_by(wide, "TensorMove") else wide
    if not made_by(wide, "BroadcastTo", "Expand") or wide.shape is None or len(wide.shape) != 5:
        return None
    source = operands(wide)[0]
    batch, heads, times, rows, width = wide.shape
    if source.shape != (batch, heads, 1, rows, width) or not isinstance(times, int):
        return None
    if value.shape != (batch, heads * times, rows, width):
        return None
    below = operands(source)[0] if made_by(source, "Reshape", "Unsqueeze", "ExpandDims") else None
    return below if below is not None and below.shape == (batch, heads, rows, width) else None
