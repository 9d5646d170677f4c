"""Quantisation with one scale, and products of quantised operands."""

from __future__ import annotations

from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, op
from torchair.codegen.sizes import FLOATS, Element
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import Shape, broadcast
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import Op, TorchKernel, Trait, add_row, call, native, of_type
from torchair.operators.loops import Lowered, LowerOp, elementwise
from torchair.ops import quantised

# ---- one scale ----


def narrowed(x: Expr, dtype: Element) -> Expr:
    """The nearest integer that a type holds."""
    low, high = {"i8": (-128.0, 127.0), "u8": (0.0, 255.0)}[dtype]
    return cast(f.most(f.least(op("round", x), high), low), dtype)


def narrowed_byte(x: Expr) -> Expr:
    """The nearest integer that int8 holds."""
    return narrowed(x, "i8")


def _quant_of_one_scale(op: Op) -> TorchKernel:
    """AscendQuant: scale and offset are attributes; with `sqrt_mode` the scale counts twice."""
    if str(op.attr("round_mode")).lower() != "round":
        raise ValueError(f"{op.node}: only round_mode 'Round' is supported")
    dtype = ge_to_torch(op.attr("dst_type"))
    scale = op.attr("scale") ** (2 if op.attr("sqrt_mode") else 1)
    return lambda x: quantised.rounded(
        x.to(quantised.wide(x.dtype)) * scale + op.attr("offset"), dtype
    )


def _quant_declines(o: Op) -> str | None:
    rounds = str(o.attr("round_mode")).lower() == "round"
    return None if o.attr("dst_type") == DataType.DT_INT8 and rounds else "only floats become int8"


@native(
    "AscendQuant", of_type("dst_type"), _quant_of_one_scale, declines=_quant_declines, types=FLOATS
)
def quant_of_one_scale(o: LowerOp) -> Lowered:
    """Values times a number, plus a number."""
    scale = o.attr("scale") ** (2 if o.attr("sqrt_mode") else 1)
    moved = elementwise(lambda v: f.add(f.mul(v, scale), o.attr("offset")), o.tensor("x"))
    return elementwise(lambda v: narrowed(v, "i8"), moved, dtype="i8")


# ---- products ----


def transposed(x: Any, flag: bool) -> Any:
    """A tensor with its last two dims exchanged, if the flag is set."""
    return x.transpose(-1, -2) if flag else x


def matrix(shape: Shape, turned: bool) -> Shape:
    """The dims of that."""
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def _product_rule(op: Op) -> Fact:
    x1 = matrix(op.shape("x1"), op.attr("transpose_x1"))
    x2 = matrix(op.shape("x2"), op.attr("transpose_x2"))
    batch = broadcast(x1[:-2], x2[:-2]) if len(x1) + len(x2) > 4 else ()
    return Fact(op.attr("dtype"), (*batch, x1[-2], x2[-1]))


def _product(x1: Any, x2: Any, *rest: Any) -> torch.Tensor:
    *others, turned1, turned2 = rest
    return quantised.quant_matmul(transposed(x1, turned1), transposed(x2, turned2), *others)


def _by_groups(part: Any, columns: Any) -> Any:
    """Scales of a transposed weight as [groups, columns], which [1, columns] is already."""
    turned = part is not None and part.dim() == 2 and part.shape[0] == columns
    return part.transpose(0, 1) if turned else part


def _weight_product_rule(op: Op) -> Fact:
    x = op.shape("x")
    weight = matrix(op.shape("weight"), op.attr("transpose_weight"))
    dtype = DataType.DT_INT8 if op.fed("quant_scale") else op.dtype("x")
    return Fact(dtype, (*x[:-1], weight[-1]))


def _weight_product(op: Op) -> TorchKernel:
    turned, group = op.attr("transpose_weight"), op.attr("antiquant_group_size")
    if op.attr("transpose_x"):
        raise ValueError(f"{op.node}: transpose_x is not supported")

    columns = matrix(op.shape("weight"), turned)[-1]

    def run(x: Any, weight: Any, scale: Any, offset: Any, *results: Any) -> torch.Tensor:
        if turned:  # a matrix of scales lies as the weight does
            scale, offset = (_by_groups(part, columns) for part in (scale, offset))
        factors = (scale, offset, *results, group)
        return quantised.weight_quant_matmul(x, transposed(weight, turned), *factors)

    return run


add_row(
    "QuantBatchMatmulV3",
    _product_rule,
    call(_product, core.torch_type("dtype"), "transpose_x1", "transpose_x2"),
    Trait.CONTRACTION,
    anchor="matmul",
    types=frozenset({"i8"}),
)
add_row(
    "WeightQuantBatchMatmulV2",
    _weight_product_rule,
    _weight_product,
    Trait.CONTRACTION,
    anchor="matmul",
    types=core.SHORT,
)
