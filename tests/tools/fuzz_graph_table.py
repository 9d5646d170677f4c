"""GE graphs for operators and forms of operators that no function of torch becomes: inputs in the
notation of `random_recipe_table.py`, where a `?` behind the dims keeps them from the graph, a
function that builds the graph, and options of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.ge.build import Const, builder
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import Value

F32, F16, I64, I32, U8 = map(
    torch_to_ge,
    (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8),
)
SWITCH = "ge.optimizationSwitch"
_QUANTISED = "WeightQuantBatchMatmulV2"


def _op(name: str, **attrs: Any) -> Callable[..., Any]:
    """A node of some type with these attributes."""
    return lambda *values: builder(name)(*values, **attrs)


def _turned(name: str, side: int, **attrs: Any) -> Callable[..., Any]:
    """A product of which one factor is transposed by a node of its own."""

    def build(*values: Value) -> Any:
        fed = list(values)
        fed[side] = builder("Transpose")(fed[side], [1, 0])
        return builder(name)(*fed, **attrs)

    return build


def _long(x: Value) -> Any:
    """More nodes than one unit takes."""
    y = x
    for _ in range(90):
        y = builder("Add")(builder("Sin")(y), x)
    return y


def _number(x: float, dtype: int = F32) -> Value:
    return Const(x, dtype=dtype)


def _only_at_run_time(numbers: list[int], zero: Value) -> Value:
    """Numbers that are known when the graph runs."""
    return builder("Add")(Const(torch.tensor(numbers)), builder("Sub")(zero, zero))


def _turned_twice(x: Value, zero: Value) -> Any:
    order = _only_at_run_time([1, 0], zero)
    return builder("Tanh")(builder("Transpose")(builder("Transpose")(x, [1, 0]), order))


def _rms_norm(x: Value, gamma: Value) -> Any:
    mean = builder("ReduceMean")(builder("Mul")(x, x), [-1], keep_dims=True)
    root = builder("Rsqrt")(builder("Add")(mean, _number(0.1, x.dtype)))
    return builder("Mul")(gamma, builder("Mul")(x, root))


def _rotary(x: Value, cos: Value, sin: Value) -> Any:
    first, second = (
        builder("StridedSliceV2")(x, [start], [end], [1], [1]) for start, end in ((0, 8), (8, 16))
    )
    turned = builder("ConcatV2")([builder("Neg")(second), first], -1, N=2)
    return builder("Add")(builder("Mul")(cos, x), builder("Mul")(sin, turned))


def _ordered_identity(x: Value) -> Any:
    """An Identity that waits for another node."""
    first, same = builder("Tanh")(x), builder("Identity")(x)
    same.node.after(first.node)
    return builder("Add")(builder("Neg")(same), first)


def _attention(q: Value, k: Value, mask: Value) -> Any:
    scores = builder("Mul")(builder("BatchMatMul")(q, k, adj_x2=True), _number(0.25, q.dtype))
    weights = builder("SoftmaxV2")(builder("Add")(scores, mask), axes=[-1])
    return builder("BatchMatMul")(weights, k)


def _swiglu(x: Value) -> Any:
    first, second = builder("SplitV")(x, [8, 8], 1, num_split=2)
    return builder("Mul")(builder("Mul")(first, builder("Sigmoid")(first)), second)


def _layer_norm(x: Value, gamma: Value, beta: Value) -> Any:
    centred = builder("Sub")(x, builder("ReduceMean")(x, [-1], keep_dims=True))
    variance = builder("ReduceMean")(builder("Square")(centred), [-1], keep_dims=True)
    root = builder("Sqrt")(builder("Add")(variance, _number(0.1, x.dtype)))
    return builder("Add")(builder("Mul")(builder("RealDiv")(centred, root), gamma), beta)


def _pattern(numbers: Value) -> Value:
    """Scales near two, as integers that have their bits."""
    steps = builder("Mul")(numbers, Const(1 << 20, dtype=I64))
    near: Value = builder("Add")(steps, Const(0x40000000, dtype=I64))
    return near


def _paged(cache: Value, tokens: Value, positions: torch.dtype = torch.int64) -> Any:
    """Tokens written to the first places of a cache."""
    assert tokens.shape is not None
    slots = Const(torch.arange(int(tokens.shape[0]), dtype=positions))
    return builder("PagedUpdate")(builder("Neg")(cache), tokens, slots, blocked=False)


GRAPHS: tuple[tuple[Any, ...], ...] = (
    ("m=b[A,8] x=s[A,8] y=H[A,8]", _op("SelectV2")),
    ("x=f[A,8] w=f[8,B]", _turned("MatMulV2", 1, transpose_x2=True)),
    ("x=f[8,A] w=f[8,B]", _turned("MatMulV2", 0)),
    ("x=f[A,8] w=f[8,B] b=f[B]", lambda x, w, b: builder("Add")(
        builder("MatMulV2")(x, w, None), b)),
    ("x=f[A,8] w=f[8,B] b=f[B]", lambda x, w, b: builder("Add")(
        b, builder("MatMul")(x, w, None))),
    ("a=i[A,B] b=i[A,B] c=i[A,B]", lambda a, b, c: builder("Addcmul")(
        a, b, c, Const(torch.tensor(2.0)))),
    ("x=s[A,8] w=s[B,8,8]", _op("BatchMatMulV2")),
    ("x=s[A,8] w=n[8,B] s=s[B]", _op(_QUANTISED)),
    ("x=h[A,8] w=n[B,8] s=h[B,1]", _op(_QUANTISED, transpose_weight=True)),
    ("x=s[4,8]", lambda x: builder("Add")(
        builder("Identity")(builder("Cast")(x, dst_type=F32)),
        builder("Reshape")(builder("Reshape")(x, [8, 4]), [4, 8]))),
    ("x=f[A,B]", lambda x: builder("Transpose")(builder("Transpose")(x, [1, 0]), [1, 0])),
    ("x=f[4,8] y=f[A]", lambda x, y: builder("ConcatV2")([builder("Reshape")(
        x, [32]), y], 0, N=2)),
    ("x=d[A,8] w=n[8,B] s=d[B]", _op(_QUANTISED)),
    ("x=u[A,32] w=n[32,16] s=s[1]", _op("QuantBatchMatmulV3", dtype=I32)),
    ("x=n[A,32] w=n[16,32] s=s[16]", _op("QuantBatchMatmulV3", dtype=F16, transpose_x2=True)),
    ("x=s[A,8] w=s[8,B] o=n[B]", lambda x, w, o: builder("MatMulV2")(x, w, None, o)),
    ("x=s[A,2,8] w=s[2,8,8]", _op(
        "TransposeBatchMatMul", perm_x1=[1, 0, 2], batch_split_factor=2)),
    ("x=f[A,B] y=f[0]", lambda x, y: builder("ConcatV2")([builder("Tanh")(x), y], 0, N=2)),
    ("x=f[4,8] y=f[1,8]", lambda x, y: builder("ViewCopy")(
        x, [4, 8], [8, 1], 0, y, [1, 8], [8, 1], 0)),
    ("x=f[A,8] y=f[8]", lambda x, y: builder("ScatterNdUpdate")(
        x, Const(torch.tensor([[0], [1]])), y)),
    ("x=f[A,8] y=f[A,8]", lambda x, y: builder("ScatterNdUpdate")(
        x, Const(torch.zeros((1, 0), dtype=torch.int64)), y)),
    ("x=s[A,8] s=s[A] o=j[A]", _op("Quantize", dtype="torch.qint8", axis=0)),
    ("x=s[A,8] s=s[1] o=j[1]", _op("Quantize", dtype="torch.qint32", axis=1)),
    ("x=s[2,3,8,8]", lambda x: builder("ResizeNearestNeighborV2")(
        x, [5, 11], half_pixel_centers=True)),
    ("x=s[A,8]", _long),
    # dims and numbers that only a run knows
    ("x=f[A,B] z=i[2]", _turned_twice),
    ("x=f[A,B]? y=f[A,B]", lambda x, y: builder("Add")(builder("Tanh")(x), y)),
    ("x=f[A,16] c=f[16]? s=f[16]", _rotary),
    ("x=f[A,B] z=i[1]", lambda x, z: builder("Tanh")(
        builder("ReverseV2")(x, _only_at_run_time([1], z)))),
    ("x=f[A,8]? w=f[8]", _rms_norm),
    # types that differ, and forms that only files hold
    ("x=h[A,16] c=s[16] s=s[16]", _rotary),
    ("x=h[A,8] w=s[8]", _rms_norm),
    ("x=f[A,B]", _ordered_identity),
    ("x=f[8] w=n[8,B] s=f[B]", _op(_QUANTISED)),
    ("x=f[A,8] w=n[8,B] s=f[B] q=s[B]", lambda x, w, s, q: builder(_QUANTISED)(
        x, w, s, None, q), {SWITCH: "QuantisedResults:off"}),
    ("x=f[A,0] w=n[0,B] s=f[B]", _op(_QUANTISED)),
    ("x=f[A,8] w=n[8,B] s=f[2,B] o=f[B]", _op(_QUANTISED, antiquant_group_size=4)),
    ("x=f[A,B,8] i=s[A,8]", lambda x, i: builder("NLLLoss")(
        builder("ReduceSum")(x, [1]), builder("ReduceMean")(builder("Sub")(i, i), [1]), None,
        reduction="mean", ignore_index=-100)),
    ("x=s[2,3,A,8] w=s[3] b=s[3] m=s[3] v=s[3]", lambda x, w, b, m, v: builder("BatchNormV3")(
        x, w, b, m, builder("Mul")(v, v), epsilon=0.1, momentum=0.1, is_training=False)),
    ("x=s[A,8]", _op("AscendQuant", scale=2.0, offset=1.0, dst_type=U8)),
    ("x=i[A,8]", lambda x: builder("ReduceMeanWithCast")(x, [], keep_dims=False, dtype=I64)),
    ("g=s[A,8] x=s[A,8] w=s[8]", lambda g, x, w: builder("RmsNormGrad")(
        g, x, builder("Rsqrt")(builder("Add")(builder("ReduceMean")(
            builder("Mul")(x, x), [-1], keep_dims=True), _number(0.1))), w),
        {SWITCH: "RmsNormGradSplit:off"}),
    ("q=f[A,2,8,16] k=f[A,2,B,16]", lambda q, k: builder("FusedInferAttentionScore")(
        q, [k], [k], num_heads=2, scale=0.25, input_layout="BNSD", num_key_value_heads=2,
        softmax_lse_flag=False)),
    ("q=f[A,2,8,16] k=f[A,2,B,16] p=f[8,B]", _attention),
    ("q=f[A,2,8,16]? k=f[A,2,B,16] p=f[8,B]", _attention),
    ("x=f[A,16]?", _swiglu),
    ("x=f[A,8] w=f[8] b=f[8]", _layer_norm),
    ("x=f[A,8]? w=f[8] b=f[8]", _layer_norm),
    # pages of a cache, and scales as patterns of bits
    ("c=s[4,4,2,8] t=s[A,16]", _paged),
    ("c=s[4,4,2,8] t=h[A,2,8]", _paged),
    ("c=f[4,4,2,8] t=f[A,2,8]", _paged),
    ("c=f[4,4,2,8] t=f[A,2,8]", lambda c, t: _paged(c, t, torch.int16)),
    ("x=s[A] i=i[1]", lambda x, i: builder("NLLLoss")(
        x, builder("Sub")(i, i), None, reduction="mean", ignore_index=-100)),
    ("x=j[A,8] s=i[8]", lambda x, s: builder("AscendDequant")(x, _pattern(s), dtype=F32)),
)  # fmt: skip
