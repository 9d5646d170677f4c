"""Attention of the `npu` library as FusedInferAttentionScore by heads, which generated code has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchair import ge
from torchair.engine.optimize.rules.attention import HEADS_LAST, check_widths
from torchair.ge import rewrite
from torchair.ge.dtypes import DataType
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet
from torchair.ops.attention import ALL, CAUSAL, CAUSAL_END, DEFAULT, NO_LIMIT

NPU_ATTENTION = RuleSet()

_BY_HEADS = ("BNSD", "BNSD_BSND")
_LAYOUTS = ("BSH", "BSND", "BNSD")
_ATTRS = {
    "heads": "num_heads",
    "key_heads": "num_key_value_heads",
    "scale": "scale_value",
    "layout": "input_layout",
}
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


@NPU_ATTENTION("PromptFlashAttention")
def PromptAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """PromptFlashAttention -> FusedInferAttentionScore by heads"""
    return _by_heads(node, inner, _ATTRS | _WINDOW, _PORTS)


@NPU_ATTENTION("IncreFlashAttention")
def StepAttentionByHeads(node: Node, inner: Inner) -> Build | None:
    """IncreFlashAttention -> FusedInferAttentionScore by heads"""
    return _by_heads(node, inner, _ATTRS, _PORTS | {"key_lengths": "actual_seq_lengths"})


@NPU_ATTENTION("FusedInferAttentionScore")
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


@NPU_ATTENTION("FlashAttentionScore")
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
        check_widths(self.query, self.width, self.value_width)
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
        """The results of the node; those beside the first may be anything if nothing reads them."""
        last = self.out_layout != "BNSD"
        query = self._by_heads(self.query, self.heads, self.length, self.width)
        key = self._by_heads(self.key, self.key_heads, self.span, self.width)
        value = self._by_heads(self.value, self.key_heads, self.span, self.value_width)
        out, _ = ge.FusedInferAttentionScore(
            query,
            [key],
            [value],
            self._shift(),
            num_heads=self.heads,
            scale=self.scale,
            input_layout="BNSD_BSND" if last else "BNSD",
            num_key_value_heads=self.key_heads,
            sparse_mode=CAUSAL if self.causal else DEFAULT,
            softmax_lse_flag=False,
        )
        if self.out_layout == "BSH":
            dims = (self.batch, self.length, self.heads * self.value_width)
            out = ge.Reshape(out, _one_open(dims, self.query))
        return [out] * len(self.node.outputs)

    def _by_heads(self, x: Value, heads: int, length: Any, width: int) -> Value:
        if self.layout == "BNSD":
            return x
        if self.layout == "BSH":
            x = ge.Reshape(x, _one_open((self.batch, length, heads, width), x))
        return ge.Transpose(x, list(HEADS_LAST))

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
