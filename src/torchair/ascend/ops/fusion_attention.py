"""`npu_fusion_attention`: attention for training, with its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torchair.ascend.ops import attend
from torchair.ascend.ops.attend import Dropout, Scores, SequenceGroup, part
from torchair.ascend.ops.library import Gradient, NpuOperators, refuse, refuse_given, wide, wrong
from torchair.ops.attention import NO_LIMIT, PREFIX, PREFIX_SMALL

Tensor = torch.Tensor
OPERATORS = NpuOperators()
NAME = "npu_fusion_attention"
_COPIES = 8  # the device keeps each statistic of a query so often
_SEEDS = 1 << 62  # seeds of dropout are below
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_FLAT = ("BSH", "SBH")  # those that have the features of all heads in one dim


@dataclass(frozen=True)
class FusionCall:
    """A call of the operator, with the names, the order and the defaults of its arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    head_num: int
    input_layout: str
    pse: Tensor | None = None
    padding_mask: Tensor | None = None
    atten_mask: Tensor | None = None
    scale: float = 1.0
    keep_prob: float = 1.0
    pre_tockens: int = NO_LIMIT
    next_tockens: int = NO_LIMIT
    inner_precise: int = 0
    prefix: Sequence[int] | None = None
    actual_seq_qlen: Sequence[int] | None = None
    actual_seq_kvlen: Sequence[int] | None = None
    sparse_mode: int = 0
    gen_mask_parallel: bool = True
    sync: bool = False
    softmax_layout: str = ""
    sink: Tensor | None = None
    seed: int = 0  # of dropout; the operator draws it

    def __post_init__(self) -> None:
        unknown = {"padding_mask": self.padding_mask, "sink": self.sink}
        refuse_given(NAME, **unknown, softmax_layout=self.softmax_layout or None)
        if not 0 < self.keep_prob <= 1:
            reason = f"is {self.keep_prob}, a share between 0 and 1 is wanted"
            raise wrong(NAME, "keep_prob", reason)
        if self.input_layout not in _LAYOUTS:
            known = ", ".join(_LAYOUTS)
            raise refuse(NAME, "input_layout", f"{self.input_layout!r} is none of {known}")
        if self.sparse_mode in (PREFIX, PREFIX_SMALL) and self.prefix is None:
            raise wrong(NAME, "prefix", f"is needed for sparse_mode {self.sparse_mode}")
        ragged = self.input_layout == "TND"
        for name in ("actual_seq_qlen", "actual_seq_kvlen"):
            if ragged and getattr(self, name) is None:
                raise wrong(NAME, name, "is needed with the layout TND")
            if not ragged and getattr(self, name) is not None:
                raise wrong(NAME, name, "belongs to the layout TND")
        if ragged and self.pse is not None:
            raise refuse(NAME, "pse", "is not supported with the layout TND")

    def by_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as (batch, heads, positions, features)."""
        layout, operands = self.input_layout, (self.key, self.value)
        query = attend.by_heads(self.query, layout, self.head_num)
        key_heads = self.key.shape[-1] // query.shape[-1] if layout in _FLAT else 0
        key, value = (attend.by_heads(x, layout, key_heads) for x in operands)
        return query, key, value

    def pieces(self, dims: Sequence[int], keys: int) -> Iterator[tuple[SequenceGroup, Scores]]:
        """What is computed together, and how scores of each are made."""
        dropout = None
        if self.keep_prob != 1.0:
            generator = torch.Generator(self.query.device).manual_seed(self.seed)
            dropout = Dropout(self.keep_prob, generator)
        for number, piece in enumerate(self._pieces(dims, keys)):
            yield piece, self._scores(number, piece, dropout)

    def _pieces(self, dims: Sequence[int], keys: int) -> list[SequenceGroup]:
        batches, _, queries, _ = dims
        if self.input_layout != "TND":
            together = 1 if self.sparse_mode in (PREFIX, PREFIX_SMALL) else batches
            return [
                SequenceGroup(range(b, b + together), range(queries), range(keys))
                for b in range(0, batches, together)
            ]
        ends = self.actual_seq_qlen or (), self.actual_seq_kvlen or ()
        if len(ends[0]) != len(ends[1]):
            raise wrong(NAME, "actual_seq_kvlen", "has not as many ends as actual_seq_qlen")
        return [
            SequenceGroup(range(1), *both) for both in zip(*map(attend.ranges, ends), strict=True)
        ]

    def _scores(self, number: int, piece: SequenceGroup, dropout: Dropout | None) -> Scores:
        masked = self.atten_mask is not None
        prefix = self.prefix[number] if self.prefix is not None else 0
        limits = (self.sparse_mode, self.pre_tockens, self.next_tockens, masked, prefix)
        window = attend.window_of(NAME, *limits)
        hidden = attend.full_mask(NAME, self.atten_mask, self.sparse_mode, False)
        batches, queries, keys = piece  # a ragged layout counts from the begin of each sequence
        where = (batches, range(len(queries)), range(len(keys)))
        shift, hidden = attend.cut(self.pse, *where), attend.cut(hidden, *where)
        return Scores(self.scale, shift, True, hidden, window, dropout=dropout)


def fusion_attention(call: FusionCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, the largest score and the sum of exponentials of each query, and an empty
    tensor where the device could keep the softmax."""
    query, key, value = call.by_heads()
    kind = wide(query.dtype)
    dims = (*query.shape[:3], value.shape[-1])
    out = query.new_zeros(dims, dtype=kind)
    top = query.new_full((*dims[:3], 1), float("-inf"), dtype=kind)
    total = query.new_zeros((*dims[:3], 1), dtype=kind)
    for (batches, queries, keys), scores in call.pieces(query.shape, key.shape[2]):
        k, v = part(key, batches, keys), part(value, batches, keys)
        found = attend.forward(part(query, batches, queries), k, v, scores)
        for whole, made in zip((out, top, total), found, strict=True):
            part(whole, batches, queries).copy_(made)
    saved = [_as_saved(x, call.input_layout) for x in (top, total)]
    out = attend.from_heads(out.to(query.dtype), call.input_layout)
    return out, *saved, query.new_empty(0)  # type: ignore[return-value]


def fusion_attention_grad(
    call: FusionCall, dy: Tensor, softmax_max: Tensor, softmax_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and pse (empty if there is none), in their types."""
    query, key, value = call.by_heads()
    grad = attend.by_heads(dy, call.input_layout, call.head_num)
    top, total = (_from_saved(x, call.input_layout) for x in (softmax_max, softmax_sum))
    kind = wide(query.dtype)
    made = [torch.zeros_like(x, dtype=kind) for x in (query, key, value)]
    dpse = None if call.pse is None else torch.zeros_like(call.pse, dtype=kind)
    for (batches, queries, keys), scores in call.pieces(query.shape, key.shape[2]):
        g, q, largest, sums = (part(x, batches, queries) for x in (grad, query, top, total))
        k, v = part(key, batches, keys), part(value, batches, keys)
        *found, shift = attend.backward(g, q, k, v, scores, largest, sums)
        for whole, more, rows in zip(made, found, (queries, keys, keys), strict=True):
            part(whole, batches, rows).add_(more)
        if dpse is not None and shift is not None:
            mine = dpse if dpse.shape[0] == 1 else dpse[batches.start : batches.stop]
            mine += shift
    grads = [attend.from_heads(x.to(query.dtype), call.input_layout) for x in made]
    last = query.new_empty(0) if call.pse is None or dpse is None else dpse.to(call.pse.dtype)
    return *grads, last  # type: ignore[return-value]


def _as_saved(x: Tensor, layout: str) -> Tensor:
    x = x[0].transpose(0, 1) if layout == "TND" else x
    return x.expand(*x.shape[:-1], _COPIES).contiguous()


def _from_saved(x: Tensor, layout: str) -> Tensor:
    x = x[..., :1]
    return x.transpose(0, 1).unsqueeze(0) if layout == "TND" else x


def result_dims(
    query: Sequence[Any], key: Sequence[Any], value: Sequence[Any], heads: Any, layout: str
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Dims of the result and of the statistics, from those of the operands."""
    width = attend.head_dims(query, layout, heads)[-1]
    key_heads = key[-1] // width if layout in _FLAT else 0
    dims, sums = attend.request_dims(layout, query, value, heads, key_heads, False)
    return dims, (*sums[:-1], _COPIES)


# ---- operators ----


def _forward(*args: Any, **options: Any) -> Any:
    call = FusionCall(*args, **options)
    if call.keep_prob == 1.0:
        return *fusion_attention(call), 0, 0, 0
    seed = int(torch.randint(_SEEDS, ()))
    call = replace(call, seed=seed)
    query, key, _ = call.by_heads()
    return *fusion_attention(call), seed, 0, query.shape[:3].numel() * key.shape[2]


def _fake(*args: Any, **options: Any) -> Any:
    call = FusionCall(*args, **options)
    if call.keep_prob != 1.0:
        raise refuse(NAME, "keep_prob", "dropout draws a seed in each call: not in a graph")
    dims, saved = result_dims(
        call.query.shape, call.key.shape, call.value.shape, call.head_num, call.input_layout
    )
    statistics = [call.query.new_empty(saved, dtype=wide(call.query.dtype)) for _ in range(2)]
    return call.query.new_empty(dims), *statistics, call.query.new_empty(0), 0, 0, 0


def _backward_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    scale_value: float = 1.0,
    **options: Any,
) -> Any:
    if softmax_max is None or softmax_sum is None:
        raise wrong(f"{NAME}_grad", "softmax_max", "and softmax_sum of the forward are needed")
    for unread in ("softmax_in", "attention_in", "offset", "numels"):
        options.pop(unread, None)
    call = FusionCall(query, key, value, head_num, input_layout, scale=scale_value, **options)
    return fusion_attention_grad(call, dy, softmax_max, softmax_sum)


def _fake_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    **options: Any,
) -> Any:
    grads = [x.new_empty(x.shape) for x in (query, key, value)]
    last = query.new_empty(0) if pse is None else pse.new_empty(pse.shape)
    return *grads, last


_NAMES = [field.name for field in fields(FusionCall) if field.name != "seed"]
_TENSORS = ("query", "key", "value", "pse", "atten_mask")
_FORWARD = ("padding_mask", "softmax_layout", "sink")  # that the backward does not have


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    named = dict(zip(_NAMES, inputs, strict=True))
    out, top, total, softmax, ctx.seed, ctx.offset, ctx.count = output
    ctx.save_for_backward(*[named.pop(name) for name in _TENSORS], out, top, total, softmax)
    ctx.options = {name: value for name, value in named.items() if name not in _FORWARD}
    ctx.mark_non_differentiable(top, total, softmax)


def _backward(ctx: Any, dy: Tensor, *others: Any) -> Any:
    query, key, value, pse, mask, out, top, total, softmax = ctx.saved_tensors
    options = dict(ctx.options)
    heads, layout = options.pop("head_num"), options.pop("input_layout")
    *grads, dpse = torch.ops.npu.npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        heads,
        layout,
        pse=pse,
        atten_mask=mask,
        softmax_max=top,
        softmax_sum=total,
        softmax_in=softmax,
        attention_in=out,
        scale_value=options.pop("scale"),
        seed=ctx.seed,
        offset=ctx.offset,
        numels=ctx.count,
        **options,
    )
    of_pse = None if pse is None else dpse
    return *grads, None, None, of_pse, *[None] * (len(_NAMES) - 6)


_LENGTHS = (
    "SymInt[]? prefix=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
    "int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False"
)

OPERATORS.add(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, "
    "str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "float scale=1., float keep_prob=1., int pre_tockens=2147483647, "
    f"int next_tockens=2147483647, int inner_precise=0, {_LENGTHS}, "
    'str softmax_layout="", Tensor? sink=None) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    _fake,
    Gradient(_keep, _backward),
)(_forward)
OPERATORS.add(
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, "
    "int head_num, str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
    "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    f"int inner_precise=0, int seed=0, int offset=0, int numels=0, {_LENGTHS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)(_backward_call)
