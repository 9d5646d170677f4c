"""Products of the `npu` library whose GE operators have other arguments than torch's."""

from __future__ import annotations

from typing import Any

import torch

from torchair.ascend.ops.grouped import ffn
from torchair.ascend.ops.products import quant_matmul_reduce_sum
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.ge.graph import Fact
from torchair.operators.core import Op, TorchKernel, Trait, add_row

_RESULTS = {0: torch.float16, 1: torch.bfloat16}


def _ffn_type(op: Op) -> int:
    if op.dtype("x") != DataType.DT_INT8:
        return op.dtype("x")
    return torch_to_ge(_RESULTS.get(op.attr("output_dtype"), torch.float16))


def _ffn_rule(op: Op) -> Fact:
    return Fact(_ffn_type(op), (*op.shape("x")[:-1], op.shape("weight2")[-1]))


def _ffn(op: Op) -> TorchKernel:
    ports = list(op.node.inputs)
    ends, activation = op.attr("tokens_index_flag"), op.attr("activation")
    dtype = _RESULTS.get(op.attr("output_dtype"))

    def run(*tensors: Any) -> torch.Tensor:
        given = dict(zip(ports, tensors, strict=True))
        x, weight1, weight2 = (given.pop(name) for name in ("x", "weight1", "weight2"))
        tokens = given.pop("expert_tokens")
        counts = None if tokens is None else tokens.tolist()
        given["expert_tokens_index" if ends else "expert_tokens"] = counts
        return ffn(x, weight1, weight2, activation, output_dtype=dtype, **given)

    return run


def _sum(op: Op) -> TorchKernel:
    """The dims that are summed over are the batch, whatever they are called."""

    def run(x1: Any, x2: Any, dims: Any, bias: Any, s1: Any, s2: Any, *rest: Any) -> torch.Tensor:
        return quant_matmul_reduce_sum(x1, x2, x1_scale=s1, x2_scale=s2)

    return run


add_row("FFN", _ffn_rule, _ffn, Trait.CONTRACTION)
add_row(
    "QuantMatmulReduceSum",
    lambda op: Fact(op.attr("dtype"), (op.shape("x1")[1], op.shape("x2")[2])),
    _sum,
    Trait.CONTRACTION,
)
