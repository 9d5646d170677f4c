"""Attention that a model spells out, two products with a softmax between them, and that of the
`npu` library: as FusedInferAttentionScore by heads, which generated code has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.ge import rewrite
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, both_orders, made_by, operands
from torchair.operators import Op
from torchair.operators.attention import is_plain
from torchair.ops.npu.attend import ALL, CAUSAL, CAUSAL_END, DEFAULT, NO_LIMIT

ATTENTION_PATTERNS = RuleSet()
_WIDEST_HEAD = 256
_FEW = 32  # queries that a tile of the native kernel is not filled with
_HEADS_LAST = (0, 2, 1, 3)
_SWAPPED = (0, 1, 3, 2)
_PASSED = ("Cast", "Reshape", "Identity")  # what is part of a pattern wherever it stands


@ATTENTION_PATTERNS("BatchMatMul")
def AttentionFusion(node: Node, inner: Inner) -> Build | None:
    """softmax(scale * (q @ k^T) + mask) @ v -> FusedInferAttentionScore"""
    weights = _below(node.values()[0], inner)
    if not made_by(weights, "SoftmaxV2"):
        return None
    axes = [a % weights.rank for a in weights.node.attr("axes")]
    if node.attr("adj_x1") or axes != [weights.rank - 1]:
        raise Mismatch("the softmax is not over what is summed up", weights)
    inner.add(weights)
    length = rewrite.shape_of(weights)[-2]
    if inner.state.native and isinstance(length, int) and 1 < length < _FEW:
        raise Mismatch("generated code of the parts is faster for so few queries", weights)
    scores = _scores(_below(operands(weights)[0], inner), inner)
    return _SpeltOut(node, rewrite.shape_of(weights), *scores).build


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
            raise Mismatch("what the softmax is taken of is no product plus a mask", value)
    factor = _scale(value)
    if factor is not None:
        inner.add(value)
        value, scale = _below(factor[0], inner), factor[1]
    if not made_by(value, "BatchMatMul") or value.node.attr("adj_x1"):
        raise Mismatch("what the softmax is taken of is no product of query and key", value)
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


class _SpeltOut:
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
        _check_widths(self.query, self.width, self.value_width)
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
            query, [key], [value], mask, num_heads=heads, scale=self.scale,
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

    def _heads_last(self) -> bool:
        """Whether the reader brings the heads of a position together."""
        value = self.node.outputs[0]
        while len(value.users()) == 1 and value.users()[0].type == "Reshape":
            value = value.users()[0].outputs[0]
        users = value.users()
        turned = len(users) == 1 and users[0].type == "Transpose"
        return turned and users[0].values()[1].content == _HEADS_LAST

    def _result(self, out: Value, dims: tuple[Any, ...]) -> Value:
        wanted = rewrite.shape_of(self.node.outputs[0])
        if wanted == dims:
            return out
        if all(isinstance(d, int) for d in wanted):
            return ge.Reshape(out, list(wanted))
        if made_by(self.query, "Reshape") and self.query.shape == wanted:
            return ge.Reshape(out, operands(self.query)[1])
        raise Mismatch("sizes are symbolic, and the dims of the result are not at hand", out)


def _check_widths(query: Value, *widths: Any) -> None:
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


# ---- attention of the `npu` library ----

_BY_HEADS = ("BNSD", "BNSD_BSND")
_LAYOUTS = ("BSH", "BSND", "BNSD")
_ATTRS = {
    "heads": "num_heads", "key_heads": "num_key_value_heads", "scale": "scale_value",
    "layout": "input_layout",
}  # fmt: skip
_WINDOW = {"mode": "sparse_mode", "before": "pre_tokens", "after": "next_tokens"}
_PORTS = {"shift": "pse_shift", "mask": "atten_mask"}


def _by_heads(
    node: Node, inner: Inner, attrs: dict[str, str], ports: dict[str, str]
) -> Build | None:
    """An attention operator in any dense layout -> FusedInferAttentionScore by heads. Attributes
    and ports are told by the fields of `_ByHeads`."""
    if not inner.state.native:
        return None
    if not _fed_ports(node) <= {"query", "key", "value", *ports.values()}:
        raise Mismatch("it has operands that generated code does not know", node)
    found = {name: node.attr(attribute) for name, attribute in attrs.items()}
    found |= {name: node.inputs.get(port) for name, port in ports.items()}
    return _ByHeads(node, **found).build


def _fed_ports(node: Node) -> set[str]:
    return {port for port, _, value in node.slots() if value is not None}


@ATTENTION_PATTERNS("PromptFlashAttention")
def PromptAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """PromptFlashAttention -> FusedInferAttentionScore by heads"""
    return _by_heads(node, inner, _ATTRS | _WINDOW, _PORTS)


@ATTENTION_PATTERNS("IncreFlashAttention")
def StepAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """IncreFlashAttention -> FusedInferAttentionScore by heads"""
    return _by_heads(node, inner, _ATTRS, _PORTS | {"key_lengths": "actual_seq_lengths"})


@ATTENTION_PATTERNS("FusedInferAttentionScore")
def FusedAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """FusedInferAttentionScore in another layout, or with a mask or lengths -> by heads, with
    numbers that are added to the scores"""
    plain = _fed_ports(node) <= {"query", "key", "value", "pse_shift"}
    known_mode = node.attr("sparse_mode") in (DEFAULT, CAUSAL)
    if node.attr("input_layout") in _BY_HEADS and plain and known_mode:
        return None
    if node.outputs[1].uses:
        raise Mismatch("the sums are read", node)
    attrs, ports = {"scale": "scale"}, {"key_lengths": "actual_seq_lengths_kv"}
    return _by_heads(node, inner, _ATTRS | _WINDOW | attrs, _PORTS | ports)


@ATTENTION_PATTERNS("FlashAttentionScore")
def TrainingAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """FlashAttentionScore without a backward -> FusedInferAttentionScore by heads"""
    if any(v.uses for v in node.outputs[:3]):
        raise Mismatch("its statistics are read, by a backward", node)
    if node.attr("keep_prob") != 1.0:
        raise Mismatch("it has dropout", node)
    attrs = {
        "heads": "head_num", "scale": "scale_value", "layout": "input_layout",
        "mode": "sparse_mode", "before": "pre_tockens", "after": "next_tockens",
    }  # fmt: skip
    return _by_heads(node, inner, attrs, {"mask": "atten_mask"})


@dataclass
class _ByHeads:
    """An attention node, under names that all attention operators share, by heads: its operands as
    (batch, heads, positions, features), and what is added to its scores."""

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

    def __post_init__(self) -> None:
        layout = self.layout
        self.layout, _, second = layout.partition("_")
        self.out_layout = second or self.layout
        if self.layout not in _LAYOUTS or self.out_layout not in _LAYOUTS:
            raise Mismatch(f"its layout is {layout}", self.node)
        self.query, self.key, self.value = map(self._operand, ("query", "key", "value"))
        if self.query.dtype not in rewrite.KERNEL_FLOATS or self.query.dtype != self.key.dtype:
            raise Mismatch("its types have no generated code", self.query)
        self.batch, self.length, self.width = self._dims(self.query, self.heads)
        if not self.key_heads:  # the operator does not say it
            found = rewrite.shape_of(self.key)[1 if self.layout == "BNSD" else 2]
            self.key_heads = found // self.width if self.layout == "BSH" else found
            if not isinstance(self.key_heads, int):
                raise Mismatch("the number of heads is symbolic", self.key)
        _, self.span, _ = self._dims(self.key, self.key_heads)
        self.value_width = self._dims(self.value, self.key_heads)[2]
        _check_widths(self.query, self.width, self.value_width)
        self.causal = self._is_causal()

    def _operand(self, port: str) -> Value:
        """An operand, of which there may be a list of one."""
        slot = self.node.inputs[port]
        if isinstance(slot, list) and len(slot) != 1:
            raise Mismatch("keys and values are several tensors", self.node)
        found = slot[0] if isinstance(slot, list) else slot
        assert found is not None
        return found

    def _dims(self, x: Value, heads: int) -> tuple[Any, Any, Any]:
        """Batch, positions and features of an operand."""
        dims = rewrite.shape_of(x)
        if self.layout == "BSH":
            return dims[0], dims[1], dims[2] // heads
        return dims[0], dims[2 if self.layout == "BNSD" else 1], dims[3]

    def _is_causal(self) -> bool:
        """Whether a query sees keys up to itself alone; Mismatch for windows of another form."""
        if self.mode == ALL or (self.mode == DEFAULT and self.mask is None):
            return False
        if self.mode == DEFAULT:
            if self.before < NO_LIMIT or self.after not in (0, NO_LIMIT):
                raise Mismatch("it has a window", self.node)
            return self.after == 0
        if self.mode == CAUSAL_END:
            if self.length == 1:
                return False
            if self.length != self.span:
                raise Mismatch("queries stand at the last keys", self.node)
        elif self.mode != CAUSAL:
            raise Mismatch(f"sparse mode {self.mode} has no generated code", self.node)
        return True

    def build(self) -> Any:
        """The results of the node; those beside the first that nobody reads may be anything."""
        last = self.out_layout != "BNSD"
        query = self._by_heads(self.query, self.heads, self.length, self.width)
        key = self._by_heads(self.key, self.key_heads, self.span, self.width)
        value = self._by_heads(self.value, self.key_heads, self.span, self.value_width)
        out, _ = ge.FusedInferAttentionScore(
            query, [key], [value], self._shift(), num_heads=self.heads, scale=self.scale,
            input_layout="BNSD_BSND" if last else "BNSD", num_key_value_heads=self.key_heads,
            sparse_mode=CAUSAL if self.causal else DEFAULT, softmax_lse_flag=False,
        )  # fmt: skip
        if self.out_layout == "BSH":
            dims = (self.batch, self.length, self.heads * self.value_width)
            out = ge.Reshape(out, _one_open(dims, self.query))
        return [out] * len(self.node.outputs)

    def _by_heads(self, x: Value, heads: int, length: Any, width: int) -> Value:
        if self.layout == "BNSD":
            return x
        if self.layout == "BSH":
            x = ge.Reshape(x, _one_open((self.batch, length, heads, width), x))
        return ge.Transpose(x, list(_HEADS_LAST))

    def _shift(self) -> Value | None:
        """Everything that is added to the scores."""
        shift = self.shift
        for hidden in (self._hidden(), self._beyond()):
            if hidden is None:
                continue
            dtype = self.query.dtype
            none, least = ge.Const(0.0, dtype=dtype), ge.Const(float("-inf"), dtype=dtype)
            term = ge.SelectV2(hidden, least, none)
            shift = term if shift is None else ge.Add(shift, term)
        if shift is self.shift and shift is not None and len(rewrite.shape_of(shift)) != 4:
            raise Mismatch("what is added to the scores has no heads", shift)
        return shift

    def _hidden(self) -> Value | None:
        """Where a mask hides keys, as (batch, head, query, key)."""
        mask = self.mask
        if mask is None or self.mode not in (DEFAULT, ALL):
            return None
        dims = rewrite.shape_of(mask)
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
        lengths = self.key_lengths
        if lengths is None:
            return None
        if not isinstance(self.span, int) or rewrite.shape_of(lengths) not in ((1,), (self.batch,)):
            raise Mismatch("lengths do not fit the keys", lengths)
        ends = ge.Unsqueeze(lengths, axes=[1, 2, 3])
        return ge.GreaterEqual(ge.Const(torch.arange(self.span)), ends)


def _one_open(dims: tuple[Any, ...], about: Value) -> list[int]:
    """Dims of a reshape, of which one may be open."""
    if sum(not isinstance(d, int) for d in dims) > 1:
        raise Mismatch("two sizes are symbolic", about)
    return [d if isinstance(d, int) else -1 for d in dims]
