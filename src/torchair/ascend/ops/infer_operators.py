"""The attention operators for inference: their schemas, and their arguments as one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.ascend.ops import infer_schemas as schemas
from torchair.ascend.ops.infer_attention import InferCall
from torchair.ascend.ops.infer_schemas import PROMPT, STEP, Named
from torchair.ascend.ops.library import NpuOperator
from torchair.ops.attention import (
    FUSED,
    FUSED_V2,
    HEADS,
    LIMITS,
    fused_arguments,
    fused_v2_arguments,
    optional,
)

Tensor = torch.Tensor

_SAME_MODES = 10  # sparse modes from 10 on are those from 0 on, with another inner precision


# ---- arguments as those of the fused operator; missing ones are None ----


def prompt_request(named: Named) -> InferCall:
    """The request of `npu_prompt_flash_attention`."""
    given = {"next_tokens": 0, **_renamed(named, scale_value="scale")}
    return InferCall(PROMPT, given | {"sparse_mode": given.get("sparse_mode", 0) % _SAME_MODES})


def step_request(named: Named) -> InferCall:
    """The request of `npu_incre_flash_attention`, whose lengths are those of the keys."""
    lengths = "actual_seq_lengths_kv"
    return InferCall(STEP, _renamed(named, scale_value="scale", actual_seq_lengths=lengths))


def fused_request(named: Named) -> InferCall:
    """The request of `npu_fused_infer_attention_score`."""
    return InferCall(FUSED, named)


def _renamed(named: Named, **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in named.items() if value is not None}


# ---- kernels ----


def _both(request: Callable[[Named], InferCall]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        return request(dict(named, query=query, key=key, value=value)).run()

    return run


def _first(request: Callable[[Named], InferCall]) -> Callable[..., Tensor]:
    return lambda *tensors, **named: _both(request)(*tensors, **named)[0]


def _fake_one(*tensors: Tensor, **named: Any) -> Tensor:
    return schemas.fake_fused(*tensors, **named)[0]


def _into(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The form of an operator that writes into tensors it is given."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        workspace: Any = None,
        attention_out: Tensor,
        softmax_lse: Tensor,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:
        out, sums = kernel(query, key, value, **named)
        attention_out.copy_(out)
        softmax_lse.copy_(sums)
        return attention_out, softmax_lse

    return run


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
            lambda *args, **named: (named["attention_out"], named["softmax_lse"]),
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
        _fake_one,
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
        _fake_one,
    ),
    *_family(FUSED, fused_arguments("SymInt[]"), _both(fused_request), schemas.fake_fused),
    *_family(
        FUSED_V2,
        fused_v2_arguments("SymInt[]"),
        _both(lambda named: fused_request(schemas.first_version(named))),
        schemas.fake_fused_v2,
    ),
)
