"""Attention that a model spells out, two products with a softmax between them, and that of the
`npu` library: as FusedInferAttentionScore by heads, which generated code has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import (
    KERNEL_FLOATS,
    Build,
    Inner,
    Mismatch,
    Rule,
    both_orders,
    flags_of,
    made_by,
    number,
    operands,
    shape_of,
    with_number,
)
from torchair.operators import Op
from torchair.operators.attention import is_plain
from torchair.ops.npu.attend import ALL, CAUSAL, CAUSAL_END, DEFAULT, NO_LIMIT

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


class AttentionFusion(Rule):
    """softmax(scale * (q @ k^T) + mask) @ v -> FusedInferAttentionScore"""

    last = ("BatchMatMul",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        weights = _below(node.values()[0], inner)
        if not made_by(weights, "SoftmaxV2"):
            return None
        if node.attr("adj_x1") or [a % weights.rank for a in weights.node.attr("axes")] != [
            weights.rank - 1
        ]:
            raise Mismatch("the softmax is not over what is summed up", weights)
        inner.add(weights)
        length = shape_of(weights)[-2]
        if inner.state.native and isinstance(length, int) and 1 < length < _FEW:
            raise Mismatch("generated code of the parts is faster for so few queries", weights)
        scores = _scores(_below(operands(weights)[0], inner), inner)
        return _SpeltOut(node, shape_of(weights), scores).build


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


class _SpeltOut:
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
        if self.query.dtype not in KERNEL_FLOATS or self.query.dtype != self.value.dtype:
            raise Mismatch("its types have no fused kernel", self.query)
        width = shape_of(self.query)[-1]
        value_width = shape_of(self.value)[-2 if self.value_turned else -1]
        if not all(isinstance(w, int) and w <= _WIDEST_HEAD for w in (width, value_width)):
            raise Mismatch("its heads are too wide", self.query)
        if not isinstance(self.lead[-1], int):
            raise Mismatch("the number of heads is symbolic", self.query)
        self.width, self.value_width = width, value_width
        self.length, self.span = weights[-2:]

    def build(self) -> Value:
        """The fused node, and its result in the dims of the last product."""
        batch, heads = (1, *self.lead)[-2:]
        query = self._four(self.query, (self.length, self.width))
        key = self._rows(self.key, self.key_turned, self.width)
        value = self._rows(self.value, not self.value_turned, self.value_width)
        last = self._heads_last()
        out, _ = ge.FusedInferAttentionScore(
            query, [key], [value], self._mask(), num_heads=heads, scale=self.scores.scale,
            input_layout="BNSD_BSND" if last else "BNSD", num_key_value_heads=heads,
            softmax_lse_flag=False,
        )  # fmt: skip
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


class RepeatedHeadsFusion(Rule):
    """Attention to heads of keys and values that were repeated -> to the heads themselves"""

    last = ("FusedInferAttentionScore",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        if not is_plain(Op(node)):
            return None
        query, key, value, *mask = node.values()
        sources = _repeated(key), _repeated(value)
        if sources[0] is None or sources[1] is None:
            return None
        if shape_of(sources[0])[:3] != shape_of(sources[1])[:3] or len(mask) > 1:
            raise Mismatch("keys and values are repeated in different ways", node)
        heads = shape_of(sources[0])[1]
        flags = {**flags_of(node), "num_key_value_heads": heads}
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


# ---- attention of the `npu` library ----

_HEADS_FIRST = [0, 2, 1, 3]
_BY_HEADS = ("BNSD", "BNSD_BSND")
_LAYOUTS = ("BSH", "BSND", "BNSD")


@dataclass
class _Call:
    """An attention node, under names that all attention operators share."""

    node: Node
    heads: int
    scale: float
    layout: str
    key_heads: int = 0  # 0 if the operator does not say it
    mode: int = DEFAULT
    before: int = NO_LIMIT
    after: int = NO_LIMIT
    shift: Value | None = None
    mask: Value | None = None
    key_lengths: Value | None = None

    def value(self, port: str) -> Value:
        """An operand, of which there may be a list of one."""
        slot = self.node.inputs[port]
        if isinstance(slot, list):
            if len(slot) != 1:
                raise Mismatch("keys and values are several tensors", self.node)
            return slot[0]
        assert slot is not None
        return slot


_ATTRS = {
    "heads": "num_heads", "key_heads": "num_key_value_heads", "scale": "scale_value",
    "layout": "input_layout",
}  # fmt: skip
_WINDOW = {"mode": "sparse_mode", "before": "pre_tokens", "after": "next_tokens"}
_PORTS = {"shift": "pse_shift", "mask": "atten_mask"}


class _ByHeads(Rule):
    """An attention operator in any dense layout -> FusedInferAttentionScore by heads. Subclasses
    say which attributes and ports hold the fields of `_Call`."""

    attrs: Mapping[str, str]
    ports: Mapping[str, str]

    def find(self, node: Node, inner: Inner) -> Build | None:
        if not inner.state.native:
            return None
        if not _fed_ports(node) <= {"query", "key", "value", *self.ports.values()}:
            raise Mismatch("it has operands that generated code does not know", node)
        found: dict[str, Any] = {field: node.attr(name) for field, name in self.attrs.items()}
        found |= {field: _fed(node, port) for field, port in self.ports.items()}
        return _ByHeadsOf(_Call(node, **found)).build


def _fed_ports(node: Node) -> set[str]:
    return {port for port, _, value in node.slots() if value is not None}


def _fed(node: Node, port: str) -> Value | None:
    value = node.inputs.get(port)
    return value if isinstance(value, Value) else None


class PromptAttentionByHeads(_ByHeads):
    """PromptFlashAttention -> FusedInferAttentionScore by heads"""

    last = ("PromptFlashAttention",)
    attrs, ports = {**_ATTRS, **_WINDOW}, _PORTS


class StepAttentionByHeads(_ByHeads):
    """IncreFlashAttention -> FusedInferAttentionScore by heads"""

    last = ("IncreFlashAttention",)
    attrs, ports = _ATTRS, {**_PORTS, "key_lengths": "actual_seq_lengths"}


class FusedAttentionByHeads(_ByHeads):
    """FusedInferAttentionScore in another layout, or with a mask or lengths -> by heads, with
    numbers that are added to the scores"""

    last = ("FusedInferAttentionScore",)
    attrs = {**_ATTRS, **_WINDOW, "scale": "scale"}
    ports = {**_PORTS, "key_lengths": "actual_seq_lengths_kv"}

    def find(self, node: Node, inner: Inner) -> Build | None:
        plain = _fed_ports(node) <= {"query", "key", "value", "pse_shift"}
        known_mode = node.attr("sparse_mode") in (DEFAULT, CAUSAL)
        if node.attr("input_layout") in _BY_HEADS and plain and known_mode:
            return None
        if node.outputs[1].uses:
            raise Mismatch("the sums are read", node)
        return super().find(node, inner)


class TrainingAttentionByHeads(_ByHeads):
    """FlashAttentionScore without a backward -> FusedInferAttentionScore by heads"""

    last = ("FlashAttentionScore",)
    attrs = {
        "heads": "head_num", "scale": "scale_value", "layout": "input_layout",
        "mode": "sparse_mode", "before": "pre_tockens", "after": "next_tockens",
    }  # fmt: skip
    ports = {"mask": "atten_mask"}

    def find(self, node: Node, inner: Inner) -> Build | None:
        if any(v.uses for v in node.outputs[:3]):
            raise Mismatch("its statistics are read, by a backward", node)
        if node.attr("keep_prob") != 1.0:
            raise Mismatch("it has dropout", node)
        return super().find(node, inner)


class _ByHeadsOf:
    """One attention by heads: its operands as (batch, heads, positions, features), and what is
    added to its scores."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        first, _, second = call.layout.partition("_")
        self.layout, self.out_layout = first, second or first
        if self.layout not in _LAYOUTS or self.out_layout not in _LAYOUTS:
            raise Mismatch(f"its layout is {call.layout}", call.node)
        self.query, self.key, self.value = (call.value(p) for p in ("query", "key", "value"))
        if self.query.dtype not in KERNEL_FLOATS or self.query.dtype != self.key.dtype:
            raise Mismatch("its types have no generated code", self.query)
        self.batch, self.length, self.width = self._dims(self.query, call.heads)
        self.key_heads = call.key_heads or self._key_heads()
        _, self.span, _ = self._dims(self.key, self.key_heads)
        self.value_width = self._dims(self.value, self.key_heads)[2]
        widths = (self.width, self.value_width)
        if not all(isinstance(w, int) and w <= _WIDEST_HEAD for w in widths):
            raise Mismatch("its heads are too wide", self.query)
        self.causal = self._is_causal()

    def _key_heads(self) -> int:
        """The number of key heads, of an operator that does not say it."""
        dims = shape_of(self.key)
        if self.layout == "BSH":
            found = dims[2] // self.width
        else:
            found = dims[1 if self.layout == "BNSD" else 2]
        if not isinstance(found, int):
            raise Mismatch("the number of heads is symbolic", self.key)
        return found

    def _dims(self, x: Value, heads: int) -> tuple[Any, Any, Any]:
        """Batch, positions and features of an operand."""
        dims = shape_of(x)
        if self.layout == "BSH":
            return dims[0], dims[1], dims[2] // heads
        where = (0, 2, 3) if self.layout == "BNSD" else (0, 1, 3)
        batch, length, width = (dims[k] for k in where)
        return batch, length, width

    def _is_causal(self) -> bool:
        """Whether a query sees keys up to itself alone; Mismatch for windows of another form."""
        call = self.call
        if call.mode == ALL or (call.mode == DEFAULT and call.mask is None):
            return False
        if call.mode == DEFAULT:
            if call.before < NO_LIMIT or call.after not in (0, NO_LIMIT):
                raise Mismatch("it has a window", call.node)
            return call.after == 0
        if call.mode == CAUSAL_END:
            if self.length == 1:
                return False
            if self.length != self.span:
                raise Mismatch("queries stand at the last keys", call.node)
        elif call.mode != CAUSAL:
            raise Mismatch(f"sparse mode {call.mode} has no generated code", call.node)
        return True

    def build(self) -> Any:
        """The results of the node; those beside the first that nobody reads may be anything."""
        call, last = self.call, self.out_layout != "BNSD"
        query = self._by_heads(self.query, call.heads, self.length, self.width)
        key = self._by_heads(self.key, self.key_heads, self.span, self.width)
        value = self._by_heads(self.value, self.key_heads, self.span, self.value_width)
        out, _ = ge.FusedInferAttentionScore(
            query, [key], [value], self._shift(), num_heads=call.heads, scale=call.scale,
            input_layout="BNSD_BSND" if last else "BNSD", num_key_value_heads=self.key_heads,
            sparse_mode=CAUSAL if self.causal else DEFAULT, softmax_lse_flag=False,
        )  # fmt: skip
        if self.out_layout == "BSH":
            dims = (self.batch, self.length, call.heads * self.value_width)
            out = ge.Reshape(out, _one_open(dims, self.query))
        return [out] * len(call.node.outputs)

    def _by_heads(self, x: Value, heads: int, length: Any, width: int) -> Value:
        if self.layout == "BNSD":
            return x
        if self.layout == "BSH":
            x = ge.Reshape(x, _one_open((self.batch, length, heads, width), x))
        turned: Value = ge.Transpose(x, _HEADS_FIRST)
        return turned

    def _shift(self) -> Value | None:
        """Everything that is added to the scores."""
        call, shift = self.call, self.call.shift
        for hidden in (self._hidden(), self._beyond()):
            if hidden is None:
                continue
            dtype = self.query.dtype
            none, least = ge.Const(0.0, dtype=dtype), ge.Const(float("-inf"), dtype=dtype)
            term = ge.SelectV2(hidden, least, none)
            shift = term if shift is None else ge.Add(shift, term)
        if shift is call.shift and shift is not None and len(shape_of(shift)) != 4:
            raise Mismatch("what is added to the scores has no heads", shift)
        return shift

    def _hidden(self) -> Value | None:
        """Where a mask hides keys, as (batch, head, query, key)."""
        mask = self.call.mask
        if mask is None or self.call.mode not in (DEFAULT, ALL):
            return None
        dims = shape_of(mask)
        rows = dims[-2] if len(dims) > 2 or self.length != 1 else 1
        if dims[-1] != self.span or rows not in (1, self.length):
            raise Mismatch("the mask is larger than the scores", mask)
        if mask.dtype != DataType.DT_BOOL:
            mask = ge.Cast(mask, dst_type=DataType.DT_BOOL)
        by_batch = len(dims) == 2 and self.length == 1 and dims[0] == self.batch
        axes = {2: [1, 2] if by_batch else [0, 1], 3: [1]}.get(len(dims))
        return mask if axes is None else ge.Unsqueeze(mask, axes=axes)

    def _beyond(self) -> Value | None:
        """Where keys are behind the end of their sequence."""
        lengths = self.call.key_lengths
        if lengths is None:
            return None
        if not isinstance(self.span, int) or shape_of(lengths) not in ((1,), (self.batch,)):
            raise Mismatch("lengths do not fit the keys", lengths)
        ends = ge.Unsqueeze(lengths, axes=[1, 2, 3])
        found: Value = ge.GreaterEqual(ge.Const(torch.arange(self.span)), ends)
        return found


def _one_open(dims: tuple[Any, ...], about: Value) -> list[int]:
    """Dims of a reshape, of which one may be open."""
    symbolic = [d for d in dims if not isinstance(d, int)]
    if len(symbolic) > 1:
        raise Mismatch("two sizes are symbolic", about)
    return [d if isinstance(d, int) else -1 for d in dims]


ATTENTION_PATTERNS = (
    AttentionFusion(),
    RepeatedHeadsFusion(),
    PromptAttentionByHeads(),
    StepAttentionByHeads(),
    FusedAttentionByHeads(),
    TrainingAttentionByHeads(),
)
