"""Operators of the `npu` library in the forms that generated code has: attention by heads, and the
gradient of a norm without its sum over rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.engine.optimize.rules.pattern import Inner, Mismatch, Pattern, shape_of
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ops.npu.masks import ALL, CAUSAL, CAUSAL_END, DEFAULT, NO_LIMIT

_TYPES = (DataType.DT_FLOAT, DataType.DT_BF16, DataType.DT_FLOAT16)
_WIDEST_HEAD = 256
_HEADS_FIRST = [0, 2, 1, 3]
_BY_HEADS = ("BNSD", "BNSD_BSND")
_LAYOUTS = ("BSH", "BSND", "BNSD")


@dataclass
class _Call:
    """An attention node, under names that all attention operators share."""

    node: Node
    heads: int
    key_heads: int
    scale: float
    layout: str
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


class _ByHeads(Pattern):
    """An attention operator in any dense layout -> FusedInferAttentionScore by heads"""

    known: frozenset[str] = frozenset(
        {"query", "key", "value", "pse_shift", "atten_mask", "actual_seq_lengths_kv"}
    )

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        if not self.native:
            return None
        fed = {port for port, _, value in node.slots() if value is not None}
        if not fed <= self.known:
            raise Mismatch("it has operands that generated code does not know", node)
        return _Attention(self.call(node), self.results).build

    def call(self, node: Node) -> _Call:
        """What a node asks for."""
        raise NotImplementedError

    def results(self, node: Node, out: Value) -> Any:
        """The results of the node; those beside the first that nobody reads may be anything."""
        return [out] * len(node.outputs)


class PromptAttentionByHeads(_ByHeads):
    """PromptFlashAttention -> FusedInferAttentionScore by heads"""

    last = ("PromptFlashAttention",)
    known = _ByHeads.known - {"actual_seq_lengths_kv"}

    def call(self, node: Node) -> _Call:
        return _Call(
            node, node.attr("num_heads"), node.attr("num_key_value_heads"),
            node.attr("scale_value"), node.attr("input_layout"), node.attr("sparse_mode"),
            node.attr("pre_tokens"), node.attr("next_tokens"), _fed(node, "pse_shift"),
            _fed(node, "atten_mask"),
        )  # fmt: skip


class StepAttentionByHeads(_ByHeads):
    """IncreFlashAttention -> FusedInferAttentionScore by heads"""

    last = ("IncreFlashAttention",)
    known = _ByHeads.known - {"actual_seq_lengths_kv"} | {"actual_seq_lengths"}

    def call(self, node: Node) -> _Call:
        return _Call(
            node, node.attr("num_heads"), node.attr("num_key_value_heads"),
            node.attr("scale_value"), node.attr("input_layout"), shift=_fed(node, "pse_shift"),
            mask=_fed(node, "atten_mask"), key_lengths=_fed(node, "actual_seq_lengths"),
        )  # fmt: skip


class FusedAttentionByHeads(_ByHeads):
    """FusedInferAttentionScore in another layout, or with a mask or lengths -> by heads, with
    numbers that are added to the scores"""

    last = ("FusedInferAttentionScore",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        plain = {"query", "key", "value", "pse_shift"}
        fed = {port for port, _, value in node.slots() if value is not None}
        known_mode = node.attr("sparse_mode") in (DEFAULT, CAUSAL)
        if node.attr("input_layout") in _BY_HEADS and fed <= plain and known_mode:
            return None
        if node.outputs[1].uses:
            raise Mismatch("the sums are read", node)
        return super().find(node, inner)

    def call(self, node: Node) -> _Call:
        return _Call(
            node, node.attr("num_heads"), node.attr("num_key_value_heads"), node.attr("scale"),
            node.attr("input_layout"), node.attr("sparse_mode"), node.attr("pre_tokens"),
            node.attr("next_tokens"), _fed(node, "pse_shift"), _fed(node, "atten_mask"),
            _fed(node, "actual_seq_lengths_kv"),
        )  # fmt: skip


class TrainingAttentionByHeads(_ByHeads):
    """FlashAttentionScore without a backward -> FusedInferAttentionScore by heads"""

    last = ("FlashAttentionScore",)
    known = frozenset({"query", "key", "value", "atten_mask"})

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        if any(v.uses for v in node.outputs[:3]):
            raise Mismatch("its statistics are read, by a backward", node)
        return super().find(node, inner)

    def call(self, node: Node) -> _Call:
        if node.attr("keep_prob") != 1.0:
            raise Mismatch("it has dropout", node)
        return _Call(
            node, node.attr("head_num"), 0, node.attr("scale_value"), node.attr("input_layout"),
            node.attr("sparse_mode"), node.attr("pre_tockens"), node.attr("next_tockens"),
            mask=_fed(node, "atten_mask"),
        )  # fmt: skip


def _fed(node: Node, port: str) -> Value | None:
    value = node.inputs.get(port)
    return value if isinstance(value, Value) else None


class _Attention:
    """One attention by heads: its operands as (batch, heads, positions, features), and what is
    added to its scores."""

    def __init__(self, call: _Call, results: Callable[[Node, Value], Any]) -> None:
        self.call, self.results = call, results
        first, _, second = call.layout.partition("_")
        self.layout, self.out_layout = first, second or first
        if self.layout not in _LAYOUTS or self.out_layout not in _LAYOUTS:
            raise Mismatch(f"its layout is {call.layout}", call.node)
        self.query, self.key, self.value = (call.value(p) for p in ("query", "key", "value"))
        if self.query.dtype not in _TYPES or self.query.dtype != self.key.dtype:
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

    # ---- building ----

    def build(self) -> Any:
        """The results of the node."""
        try:
            return self._build()
        except Mismatch as e:
            return e.no

    def _build(self) -> Any:
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
        return self.results(call.node, out)

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


# ---- gradient of a norm ----


class RmsNormGradSplit(Pattern):
    """RmsNormGrad -> the gradient of the input alone, and a sum over rows for that of gamma"""

    last = ("RmsNormGrad",)

    def find(self, node: Node, inner: Inner) -> Callable[[], Any] | None:
        if not self.native or not node.outputs[1].uses:
            return None
        return lambda: self._split(node)

    def _split(self, node: Node) -> list[Value]:
        dy, x, rstd, gamma = node.values()
        leading = list(range(len(shape_of(x)) - len(shape_of(gamma))))
        hat = ge.Mul(_cast(x, rstd.dtype), rstd)
        product = ge.Mul(_cast(dy, rstd.dtype), hat)
        total = ge.ReduceSum(product, leading) if leading else product
        dx, _ = ge.RmsNormGrad(dy, x, rstd, gamma)
        return [dx, total]


def _cast(x: Value, dtype: int) -> Value:
    return x if x.dtype == dtype else ge.Cast(x, dst_type=dtype)


NPU_PATTERNS: tuple[type[Pattern], ...] = (
    PromptAttentionByHeads,
    StepAttentionByHeads,
    FusedAttentionByHeads,
    TrainingAttentionByHeads,
    RmsNormGradSplit,
)
