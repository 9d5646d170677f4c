"""The attention operators for inference: their schemas, and their arguments as one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.ops.npu.attend import NO_LIMIT
from torchair.ops.npu.infer_attention import InferCall, Quantised
from torchair.ops.npu.infer_schemas import (
    FUSED,
    FUSED_V2,
    HEADS,
    LIMITS,
    PROMPT,
    STEP,
    Named,
    fake_fused,
    fake_fused_v2,
    fake_one,
    first_version,
    fused_arguments,
    fused_v2_arguments,
    optional,
)
from torchair.ops.npu.library import NpuOperator, refuse, refuse_given, wrong

Tensor = torch.Tensor

_SAME_MODES = 10  # sparse modes from 10 on are those from 0 on, with another inner precision
_PER_TOKEN = 1
_MODES = (0, _PER_TOKEN)
_PAGE_DIM = -2  # of (pages, positions, features) and of (pages, heads, positions, features)


# ---- arguments as a request; missing ones are None ----


def _request(operator: str, named: Named, scale: str, **others: Any) -> InferCall:
    """A request with what all operators have; `scale` is the name of its argument."""
    return InferCall(
        operator, named["query"], named["key"], named["value"], named.get("num_heads", 1),
        named.get("num_key_value_heads") or 0, named.get(scale, 1.0),
        named.get("input_layout", "BSH"), named.get("pse_shift"), named.get("atten_mask"),
        out_scale=named.get("quant_scale2"), out_offset=named.get("quant_offset2"), **others,
    )  # fmt: skip


def prompt_request(named: Named) -> InferCall:
    """The request of `npu_prompt_flash_attention`."""
    _refuse(PROMPT, named, "padding_mask", "deq_scale1", "quant_scale1", "deq_scale2")
    mode = named.get("sparse_mode") or 0
    return _request(
        PROMPT, named, "scale_value", lengths=named.get("actual_seq_lengths"),
        key_lengths=_ends(named), sparse_mode=mode % _SAME_MODES,
        before=named.get("pre_tokens", NO_LIMIT), after=named.get("next_tokens", 0),
    )  # fmt: skip


def _ends(named: Named) -> Any:
    """Lengths of keys; those of a prompt are the ones of its queries if nothing else is said."""
    given = named.get("actual_seq_lengths_kv")
    own, first = named.get("actual_seq_lengths"), named.get("input_layout", "BSH")
    ragged = first.startswith(("TND", "NTD"))
    return own if given is None and ragged else given


def step_request(named: Named) -> InferCall:
    """The request of `npu_incre_flash_attention`, whose lengths are those of the keys."""
    unknown = ("padding_mask", "dequant_scale1", "quant_scale1", "dequant_scale2")
    _refuse(STEP, named, *unknown)
    _check_page(STEP, named)
    key, value = _stacked(STEP, named, 0)
    return _request(
        STEP, named, "scale_value", key_lengths=named.get("actual_seq_lengths"),
        block_table=named.get("block_table"), key_form=key, value_form=value,
        key_padding=named.get("kv_padding_size"),
    )  # fmt: skip


def fused_request(named: Named) -> InferCall:
    """The request of `npu_fused_infer_attention_score`."""
    unknown = ("dequant_scale1", "quant_scale1", "dequant_scale2", "key_rope_antiquant_scale")
    _refuse(FUSED, named, *unknown, "dequant_scale_query", "q_start_idx", "kv_start_idx")
    _check_page(FUSED, named)
    forms = _stacked(FUSED, named, named.get("antiquant_mode") or 0)
    key, value = (
        _form(FUSED, named, side) or form
        for side, form in zip(("key_antiquant", "value_antiquant"), forms, strict=True)
    )
    prefix = named.get("actual_shared_prefix_len")
    return _request(
        FUSED, named, "scale", lengths=named.get("actual_seq_lengths"), key_lengths=_ends(named),
        sparse_mode=named.get("sparse_mode") or 0, before=named.get("pre_tokens", NO_LIMIT),
        after=named.get("next_tokens", NO_LIMIT), block_table=named.get("block_table"),
        key_form=key, value_form=value, query_padding=named.get("query_padding_size"),
        key_padding=named.get("kv_padding_size"), key_prefix=named.get("key_shared_prefix"),
        value_prefix=named.get("value_shared_prefix"),
        prefix_length=None if not prefix else int(prefix[0]),
        query_rope=named.get("query_rope"), key_rope=named.get("key_rope"),
        sink=named.get("learnable_sink"), with_sums=bool(named.get("softmax_lse_flag")),
    )  # fmt: skip


def _refuse(operator: str, named: Named, *names: str) -> None:
    refuse_given(operator, **{name: named.get(name) for name in names})


def _check_page(operator: str, named: Named) -> None:
    size, table = named.get("block_size") or 0, named.get("block_table")
    if table is not None and size and named["key"].shape[_PAGE_DIM] != size:
        have = named["key"].shape[_PAGE_DIM]
        raise wrong(operator, "block_size", f"is {size}, the pages of key have {have} positions")


def _stacked(operator: str, named: Named, mode: int) -> tuple[Quantised | None, Quantised | None]:
    """Keys and values quantised with scales that lie in one tensor, those of keys first."""
    scale, offset = named.get("antiquant_scale"), named.get("antiquant_offset")
    if scale is None:
        return None, None
    if mode not in _MODES:
        raise refuse(operator, "antiquant_mode", f"is {mode}, known are {_MODES}")
    forms = [
        Quantised(scale[k], None if offset is None else offset[k], mode == _PER_TOKEN)
        for k in range(2)
    ]
    return forms[0], forms[1]


def _form(operator: str, named: Named, side: str) -> Quantised | None:
    scale, mode = named.get(f"{side}_scale"), named.get(f"{side}_mode") or 0
    if scale is None:
        return None
    if mode not in _MODES:
        raise refuse(operator, f"{side}_mode", f"is {mode}, known are {_MODES}")
    return Quantised(scale, named.get(f"{side}_offset"), mode == _PER_TOKEN)


# ---- kernels ----


def _both(request: Callable[[Named], InferCall]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        return request(dict(named, query=query, key=key, value=value)).run()

    return run


def _first(request: Callable[[Named], InferCall]) -> Callable[..., Tensor]:
    return lambda *tensors, **named: _both(request)(*tensors, **named)[0]


def _into(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The form of an operator that writes into tensors it is given."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, *, workspace: Any = None,
        attention_out: Tensor, softmax_lse: Tensor, **named: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, sums = kernel(query, key, value, **named)
        attention_out.copy_(out)
        softmax_lse.copy_(sums)
        return attention_out, softmax_lse

    return run


def _fake_into(*args: Any, attention_out: Tensor, softmax_lse: Tensor, **named: Any) -> Any:
    return attention_out, softmax_lse


def _workspace(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """Memory that the kernel wants beside its results: none."""
    return query.new_empty(0, dtype=torch.uint8)


# ---- schemas ----

_TWO = "-> (Tensor, Tensor)"
_OUT = "Tensor? workspace=None, Tensor(a!) attention_out, Tensor(b!) softmax_lse"


def _family(name: str, arguments: str, kernel: Any, fake: Any) -> Sequence[NpuOperator]:
    """A fused operator with what captured graphs want of it: a form that writes into given
    tensors, and the workspace for any lengths."""
    return (
        NpuOperator(f"{name}({arguments}) {_TWO}", kernel, fake),
        NpuOperator(
            f"{name}.out({arguments}, {_OUT}) -> (Tensor(a!), Tensor(b!))",
            _into(kernel),
            _fake_into,
        ),
        NpuOperator(f"_{name}_get_max_workspace({arguments}) -> Tensor", _workspace, _workspace),
    )


OPERATORS = (
    NpuOperator(
        f"{PROMPT}(Tensor query, Tensor key, Tensor value, *, "
        f"{optional('padding_mask atten_mask pse_shift')}, "
        f"{optional('actual_seq_lengths', 'SymInt[]')}, "
        f"{optional('deq_scale1 quant_scale1 deq_scale2 quant_scale2 quant_offset2')}, "
        f"int num_heads=1, float scale_value=1.0, {LIMITS.format(0)}, {HEADS}, "
        f"{optional('actual_seq_lengths_kv', 'SymInt[]')}, int sparse_mode=0) -> Tensor",
        _first(prompt_request),
        fake_one,
    ),
    NpuOperator(
        f"{STEP}(Tensor query, Tensor key, Tensor value, *, "
        f"{optional('padding_mask atten_mask pse_shift')}, "
        f"{optional('actual_seq_lengths', 'SymInt[]')}, "
        + optional(
            "antiquant_scale antiquant_offset block_table dequant_scale1 quant_scale1 "
            "dequant_scale2 quant_scale2 quant_offset2 kv_padding_size"
        )
        + f", int num_heads=1, float scale_value=1.0, {HEADS}, int block_size=0, "
        "int inner_precise=1) -> Tensor",
        _first(step_request),
        fake_one,
    ),
    *_family(FUSED, fused_arguments("SymInt[]"), _both(fused_request), fake_fused),
    *_family(
        FUSED_V2,
        fused_v2_arguments("SymInt[]"),
        _both(lambda named: fused_request(first_version(named))),
        fake_fused_v2,
    ),
)
