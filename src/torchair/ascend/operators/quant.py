"""Quantisation with scales for each row, and products of groups of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ascend.ops import images, quant
from torchair.ascend.ops.matmul import ALONE, ENDS, FEATURES, JOINED, Grouped
from torchair.codegen.loops import Expr, Index, cast
from torchair.codegen.sizes import FLOATS
from torchair.ge.dtypes import DataType, ge_to_torch, torch_to_ge
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.shapes import broadcast
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import Lowering, Op, TorchKernel, Trait, add_row, call, native, of_type
from torchair.operators.loops import TYPES, Lowered, LowerOp, elementwise
from torchair.operators.quant import matrix, narrowed, transposed
from torchair.ops.quantised import scale_values

_TEXTS = {
    "torch.qint8": torch.int8,
    "torch.quint8": torch.uint8,
    "torch.qint32": torch.int32,
    "torch.float8_e5m2": torch.float8_e5m2,
    "torch.float8_e4m3fn": torch.float8_e4m3fn,
}
"""Types by the text that Quantize has for them."""


# ---- given scales ----


def _quantize(op: Op) -> TorchKernel:
    dtype = _TEXTS[op.attr("dtype")]
    axis = quant.quantize_axis(len(op.shape("x")), op.attr("axis"))
    return lambda x, scales, zero: quant.quantize(x, scales, zero, dtype, axis, divides=True)


def _ascend_quant(op: Op) -> TorchKernel:
    if op.attr("sqrt_mode") or op.attr("round_mode") != "round":
        raise ValueError(f"{op.node}: only round_mode 'round' without sqrt_mode is supported")
    dtype = ge_to_torch(op.attr("dst_type"))
    axis = quant.quantize_axis(len(op.shape("x")), op.attr("axis"))
    return lambda x, scale, offset: quant.quantize(x, scale, offset, dtype, axis, divides=False)


def _along_last(*ports: str) -> Callable[[Op], str | None]:
    """Scales that are broadcast as they are: one, or a row of them."""

    def declines(o: Op) -> str | None:
        axis, rank = o.attr("axis"), len(o.shape("x"))
        if TYPES.get(o.node.outputs[0].dtype) not in ("i8", "u8"):
            return "only floats become bytes"
        facts = [o.get(p) for p in ports]
        whole = all(x is None or x.shape == (1,) or axis in (-1, rank - 1) for x in facts)
        return None if whole else "scales lie along another dim"

    return declines


def _scaled(combine: f.Formula, scale: str, zero: str) -> Lowering:
    """Values and scales combined, plus zero points, as the nearest ones of the result's type."""

    def rule(o: LowerOp) -> Lowered:
        values, dtype = elementwise(combine, o.tensor("x"), o.tensor(scale)), o.out_dtype()
        offset = o.maybe(zero)
        if offset is not None:
            values = elementwise(lambda v, z: f.add(v, cast(z, v.dtype)), values, offset)
        return elementwise(lambda v: narrowed(v, dtype), values, dtype=dtype)

    return Lowering(rule, declines=_along_last(scale, zero))


add_row(
    "Quantize",
    lambda op: Fact(torch_to_ge(_TEXTS[op.attr("dtype")]), op.shape("x")),
    _quantize,
    loops=_scaled(f.div, "scales", "zero_points"),
    types=FLOATS,
)


add_row(
    "AscendQuantV2",
    of_type("dst_type"),
    _ascend_quant,
    loops=_scaled(f.mul, "scale", "offset"),
    types=FLOATS,
)


def _dequant(x: Any, scale: Any, dtype: torch.dtype, twice: bool, positive: bool) -> torch.Tensor:
    """AscendDequant: whole sums times scales along the last dim, or one for all; with `sqrt_mode`
    the scale counts twice."""
    factor = scale_values(scale)
    values = x.to(torch.float32) * (factor * factor if twice else factor)
    return (values.relu() if positive else values).to(dtype)


def _patterned(o: Op) -> str | None:
    return None if TYPES.get(o.dtype("deq_scale")) in FLOATS else "scales are patterns"


@native(
    "AscendDequant",
    of_type("dtype"),
    call(_dequant, core.torch_type("dtype"), "sqrt_mode", "relu_flag"),
    declines=_patterned,
)
def dequant(o: LowerOp) -> Lowered:
    """Whole sums times scales."""

    def element(x: Expr, s: Expr) -> Expr:
        scale = cast(s, "f32")
        value = f.mul(cast(x, "f32"), f.mul(scale, scale) if o.attr("sqrt_mode") else scale)
        return f.most(value, 0.0) if o.attr("relu_flag") else value

    return elementwise(element, o.tensor("x"), o.tensor("deq_scale"), dtype=o.out_dtype())


# ---- scales from the values ----


def _dynamic_rule(op: Op) -> list[Fact]:
    mode = op.attr("quant_mode", "pertoken")
    dims = tuple(quant.scale_dims(op.shape("x"), mode))
    scale = Fact(DataType.DT_FLOAT, dims)
    return [of_type("dst_type")(op), scale, scale][: len(op.node.outputs)]


def _dynamic(op: Op) -> TorchKernel:
    dtype = ge_to_torch(op.attr("dst_type"))
    mode, largest = op.attr("quant_mode", "pertoken"), op.attr("dst_type_max", 0.0)
    quant.check_mode(mode)
    same = op.attr("is_symmetrical", True)

    def run(x: Any, smooth: Any, groups: Any) -> Any:
        made = quant.dynamic_quant(x, smooth, groups, dtype, mode, largest, same)
        return made[: len(op.node.outputs)]

    return run


def _dynamic_declines(o: Op) -> str | None:
    if o.attr("dst_type") != DataType.DT_INT8:
        return "only floats become int8"
    return "rows have groups" if o.fed("group_index") else None


def _last(o: Op) -> tuple[int, ...]:
    return (len(o.shape("x")) - 1,)


def _smoothed(o: LowerOp) -> tuple[Lowered, Lowered]:
    """The operand, and what is quantised of it."""
    x, smooth = o.tensor("x"), o.maybe("smooth_scales")
    return x, x if smooth is None else elementwise(f.mul, x, smooth)


@native(
    "DynamicQuant",
    _dynamic_rule,
    _dynamic,
    kind="reduce",
    domain="x",
    reduces=_last,
    declines=_dynamic_declines,
    types=FLOATS,
)
def dynamic_quant(o: LowerOp) -> list[Lowered]:
    """Values over the scale that lets the largest of a row just fit."""
    x, values = _smoothed(o)
    top = o.reduce("max", elementwise(f.absolute, values), _last(o))
    scale = elementwise(lambda t: f.div(t, 127.0), top)

    def element(v: Expr, s: Expr) -> Expr:
        return narrowed(f.div(v, f.where(f.eq(s, 0.0), 1.0, s)), "i8")

    return [elementwise(element, values, scale, dtype="i8"), _of_rows(x, scale)]


def _of_rows(x: Lowered, kept: Lowered) -> Lowered:
    """What a row has one of, without the dim that was reduced."""
    return Lowered(x.shape[:-1], "f32", lambda place: kept.at((*place, Index())))


def _asymmetric_declines(o: Op) -> str | None:
    rows = o.attr("quant_mode") == "pertoken" and not o.attr("dst_type_max")
    if not rows or o.attr("is_symmetrical"):
        return "only rows without symmetry are known, up to the largest number of int8"
    return _dynamic_declines(o)


@native(
    "DynamicQuantV2",
    _dynamic_rule,
    _dynamic,
    kind="reduce",
    domain="x",
    reduces=_last,
    declines=_asymmetric_declines,
    types=FLOATS,
)
def asymmetric_quant(o: LowerOp) -> list[Lowered]:
    """Values over the scale, plus the offset, that let both ends of a row just fit."""
    x, values = _smoothed(o)
    top, bottom = (o.reduce(end, values, _last(o)) for end in ("max", "min"))
    scale = elementwise(lambda t, b: f.div(f.sub(t, b), 255.0), top, bottom)
    safe = elementwise(lambda s: f.where(f.eq(s, 0.0), 1.0, s), scale)
    offset = elementwise(lambda t, s: f.sub(127.0, f.div(t, s)), top, safe)
    y = elementwise(
        lambda v, s, z: narrowed(f.add(f.div(v, s), z), "i8"), values, safe, offset, dtype="i8"
    )
    return [y, _of_rows(x, scale), _of_rows(x, offset)]


# ---- scales as a device wants them ----


def _patterns_rule(op: Op) -> Fact:
    scale, offset = op.shape("scale"), op.get("offset")
    dims = scale if offset is None else broadcast(scale, offset.shape or ())
    return Fact(DataType.DT_INT64, dims)


def _patterns(op: Op) -> TorchKernel:
    if op.attr("round_mode"):
        raise ValueError(f"{op.node}: only round_mode 0 is supported")
    return quant.scale_patterns


add_row("TransQuantParamV2", _patterns_rule, _patterns)


# ---- products of groups ----

_DTYPES = {0: torch.float16, 1: torch.bfloat16, 2: torch.int32}


def _grouped_type(op: Op) -> torch.dtype:
    """The type of the results: a number of its own, or with -1 the type of the operands."""
    code = op.attr("dtype")
    return _DTYPES[code] if code in _DTYPES else ge_to_torch(op.list("x")[0].dtype)


def _grouped_rule(op: Op) -> list[Fact]:
    xs, weights = ([f.shape or () for f in op.list(p)] for p in ("x", "weight"))
    dtype, turned = torch_to_ge(_grouped_type(op)), op.attr("transpose_weight")
    width = [matrix(w, turned)[-1] for w in weights]
    if op.attr("group_type") == FEATURES:
        count = op.shape("group_list")[0]
        return [Fact(dtype, (count, xs[0][0], width[0]))]
    if op.attr("split_item") in JOINED:
        rows = sum((x[0] for x in xs[1:]), start=xs[0][0])
        return [Fact(dtype, (rows, *xs[0][1:-1], width[0]))]
    if not _is_cut(op.node):
        wide = width * (len(xs) if len(width) == 1 else 1)
        return [Fact(dtype, (*x[:-1], w)) for x, w in zip(xs, wide, strict=True)]
    counts = op.ints("group_list")
    if op.attr("group_list_type") == ENDS:
        counts = tuple(b - a for a, b in zip((0, *counts), counts, strict=False))
    wide = width * (len(counts) if len(width) == 1 else 1)
    return [Fact(dtype, (n, w)) for n, w in zip(counts, wide, strict=True)]


def _is_cut(node: Node) -> bool:
    """Whether one `x` is cut into results of their own, whose rows the group list tells."""
    x = node.inputs["x"]
    alone = node.attr("group_type") == ALONE or (isinstance(x, list) and len(x) > 1)
    return not alone and node.attr("split_item") not in JOINED


def _cuts(node: Node) -> list[Value]:
    groups = node.inputs.get("group_list")
    return [groups] if isinstance(groups, Value) and _is_cut(node) else []


def _grouped(op: Op) -> TorchKernel:
    dtype, turned = _grouped_type(op), op.attr("transpose_weight")
    if op.attr("transpose_x"):
        raise ValueError(f"{op.node}: transpose_x is not supported")
    names = ("split_item", "group_type", "group_list_type", "act_type")
    options = {name: op.attr(name) for name in names}

    def run(
        x: Any,
        weight: Any,
        bias: Any,
        scale: Any,
        offset: Any,
        factors: Any,
        shifts: Any,
        groups: Any,
        tokens: Any,
    ) -> list[torch.Tensor]:
        if _given(offset):
            raise ValueError(f"{op.node}: input 'offset' is not supported")
        return Grouped(
            x,
            [transposed(w, turned) for w in weight],
            _given(bias),
            _given(scale),
            _given(factors),
            _given(shifts),
            () if tokens is None else [tokens],
            None if groups is None else groups.tolist(),
            dtype=dtype,
            **options,
        ).run()

    return run


def _given(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A list of operands, of which an empty tensor alone stands for none."""
    return [] if len(tensors) == 1 and not tensors[0].numel() else tensors


add_row("GroupedMatmul", _grouped_rule, _grouped, Trait.CONTRACTION, also_host=_cuts)


# ---- convolutions ----


def _conv_numbers(op: Op) -> tuple[Any, Any, Any]:
    """Strides, pads and dilations of height and width."""
    pads = op.attr("pads")
    return op.attr("strides")[2:], [pads[0], pads[2]], op.attr("dilations")[2:]


def _quant_conv_rule(op: Op) -> Fact:
    dims = images.conv_dims(op.shape("x"), op.shape("filter"), *_conv_numbers(op))
    return Fact(op.attr("dtype"), dims)


def _quant_conv(op: Op) -> TorchKernel:
    if op.attr("data_format") != "NCHW":
        raise ValueError(f"{op.node}: only the layout NCHW is supported")
    numbers, groups, shift = _conv_numbers(op), op.attr("groups"), op.attr("offset_x")
    dtype: Any = ge_to_torch(op.attr("dtype"))
    return lambda x, weight, scale, bias, offset: images.quant_conv2d(
        x, weight, scale, *numbers, groups, shift, output_dtype=dtype, bias=bias, offset=offset
    )


add_row("QuantConv2D", _quant_conv_rule, _quant_conv)
