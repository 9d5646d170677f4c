"""Attention that a model spells out: two products with a softmax between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchair import ge
from torchair.catalog import Op
from torchair.catalog.attention import is_plain
from torchair.engine.optimize.rules.pattern import (
    Inner,
    Mismatch,
    Pattern,
    both_orders,
    made_by,
    number,
    operands,
    shape_of,
    with_number,
)
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value

_TYPES = (DataType.DT_FLOAT, DataType.DT_BF16, DataType.DT_FLOAT16)
_WIDEST_HEAD = 256
_FEW = 32  # queries that a tile of the native kernel is not filled with
_HEADS_LAST = (0, 2, 1, 3)
_SWAPPED = (0, 1, 3, 2)


@dataclass
class _Scores:
    """scale * (query @ key^T) + mask"""

    product: Node
    scale: float = 1.0
    mask: Value | None = None


class AttentionFusion(Pattern):
    """softmax(scale * (q @ k^T) + mask) @ v -> FusedInferAttentionScore"""

    last = ("BatchMatMul",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        weights = _below(node.values()[0], inner)
        if not made_by(weights, "SoftmaxV2"):
            return None
        if node.attr("adj_x1") or [a % weights.rank for a in weights.node.attr("axes")] != [
            weights.rank - 1
        ]:
            raise Mismatch("the softmax is not over what is summed up", weights)
        inner.add(weights)
        length = shape_of(weights)[-2]
        if self.native and isinstance(length, int) and 1 < length < _FEW:
            raise Mismatch("generated code of the parts is faster for so few queries", weights)
        scores = _scores(_below(operands(weights)[0], inner), inner)
        return _Attention(node, shape_of(weights), scores).build


def _below(value: Value, inner: Inner) -> Value:
    """What is under casts and reshapes, which are part of the pattern."""
    while made_by(value, "Cast", "Reshape", "Identity"):
        inner.add(value)
        value = operands(value)[0]
    return value


def _scores(value: Value, inner: Inner) -> _Scores:
    """The product of query and key, with what is done to it before the softmax."""
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
            raise Mismatch("what the softmax is taken of is no product plus a mask", value)
    factor = _scale(value)
    if factor is not None:
        inner.add(value)
        value, scale = _below(factor[0], inner), factor[1]
    if not made_by(value, "BatchMatMul") or value.node.attr("adj_x1"):
        raise Mismatch("what the softmax is taken of is no product of query and key", value)
    inner.add(value)
    return _Scores(value.node, scale, mask)


def _scale(value: Value) -> tuple[Value, float] | None:
    found = with_number(value, "Mul")
    if found is None and made_by(value, "RealDiv", "Div"):
        x, divisor = operands(value)
        known = number(divisor)
        return (x, 1 / known) if known else None
    return found


def _is_scaled_product(value: Value) -> bool:
    passed = ("Cast", "Reshape", "Identity")
    while made_by(value, *passed) or _scale(value) is not None:
        found = _scale(value)
        value = operands(value)[0] if found is None else found[0]
    return made_by(value, "BatchMatMul")


class _Attention:
    """The parts of one attention, as the fused operator wants them."""

    def __init__(self, node: Node, weights: tuple[Any, ...], scores: _Scores) -> None:
        self.node, self.scores = node, scores
        self.query, self.key = scores.product.values()
        self.value = node.values()[1]
        self.key_turned = bool(scores.product.attr("adj_x2"))
        self.value_turned = bool(node.attr("adj_x2"))
        self.lead = weights[:-2]  # batch and heads
        self._check(weights)

    def _check(self, weights: tuple[Any, ...]) -> None:
        if len(weights) not in (3, 4):
            raise Mismatch("it has neither heads nor batches of them", self.node)
        if self.query.dtype not in _TYPES or self.query.dtype != self.value.dtype:
            raise Mismatch("its types have no fused kernel", self.query)
        width = shape_of(self.query)[-1]
        value_width = shape_of(self.value)[-2 if self.value_turned else -1]
        if not all(isinstance(w, int) and w <= _WIDEST_HEAD for w in (width, value_width)):
            raise Mismatch("its heads are too wide", self.query)
        if not isinstance(self.lead[-1], int):
            raise Mismatch("the number of heads is symbolic", self.query)
        self.width, self.value_width = width, value_width
        self.length, self.span = weights[-2:]

    def build(self) -> Any:
        """The fused node, and its result in the dims of the last product."""
        try:
            return self._build()
        except Mismatch as e:
            return e.no

    def _build(self) -> Value:
        batch, heads = (1, *self.lead)[-2:]
        query = self._four(self.query, (self.length, self.width))
        key = self._rows(self.key, self.key_turned, self.width)
        value = self._rows(self.value, not self.value_turned, self.value_width)
        last = self._heads_last()
        out, _ = ge.FusedInferAttentionScore(
            query,
            [key],
            [value],
            self._mask(),
            num_heads=heads,
            scale=self.scores.scale,
            input_layout="BNSD_BSND" if last else "BNSD",
            num_key_value_heads=heads,
            softmax_lse_flag=False,
        )
        if last:
            out = ge.Transpose(out, list(_HEADS_LAST))
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

    def _mask(self) -> Value | None:
        mask = self.scores.mask
        if mask is None:
            return None
        missing = 4 - len(shape_of(mask))
        return mask if not missing else ge.Unsqueeze(mask, axes=list(range(missing)))

    def _heads_last(self) -> bool:
        """Whether the reader brings the heads of a position together."""
        value = self.node.outputs[0]
        while len(value.users()) == 1 and value.users()[0].type == "Reshape":
            value = value.users()[0].outputs[0]
        users = value.users()
        return (
            len(users) == 1
            and users[0].type == "Transpose"
            and (users[0].values()[1].content == _HEADS_LAST)
        )

    def _result(self, out: Value, dims: tuple[Any, ...]) -> Value:
        wanted = shape_of(self.node.outputs[0])
        if wanted == dims:
            return out
        if all(isinstance(d, int) for d in wanted):
            return ge.Reshape(out, list(wanted))
        if made_by(self.query, "Reshape") and self.query.shape == wanted:
            return ge.Reshape(out, operands(self.query)[1])
        raise Mismatch("sizes are symbolic, and the dims of the result are not at hand", out)


class RepeatedHeadsFusion(Pattern):
    """Attention to heads of keys and values that were repeated -> to the heads themselves"""

    last = ("FusedInferAttentionScore",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        if not is_plain(Op(node)):
            return None
        query, key, value, *mask = node.values()
        sources = _repeated(key), _repeated(value)
        if sources[0] is None or sources[1] is None:
            return None
        if shape_of(sources[0])[:3] != shape_of(sources[1])[:3] or len(mask) > 1:
            raise Mismatch("keys and values are repeated in different ways", node)
        heads = shape_of(sources[0])[1]
        flags = {k: a.value for k, a in node.attrs.items() if not k.startswith("_")}
        flags["num_key_value_heads"] = heads
        shift = mask[0] if mask else None
        few = [[sources[0]], [sources[1]]]
        return lambda: list(ge.FusedInferAttentionScore(query, *few, shift, **flags))


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
