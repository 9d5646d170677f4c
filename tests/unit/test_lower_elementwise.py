"""Lowering of elementwise operators, activations and made tensors, against the torch kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowering import Host, OneNode, check, check_dynamic, check_node, constant, layouts
from torchair.codegen.cpu.jit import host
from torchair.ge.dtypes import DataType, torch_to_ge
from torchair.operators import Trait, rows

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SPECIAL = (0.0, -0.0, INF, -INF, NAN, 1e-30, 100.0, -100.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5)


def reals(*shape, dtype=torch.float32, scale=3.0, seed=0, special=True):
    """Random reals, the first of which are those where formulas tend to differ."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=source, dtype=torch.float64) * scale
    if special and x.numel() >= len(SPECIAL):
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
    return x.to(dtype)


def integers(*shape, dtype=torch.int32, seed=0, low=-100, high=100):
    """Random integers."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randint(max(low, torch.iinfo(dtype).min), high, shape, generator=source)
    return x.to(dtype)


def booleans(*shape, seed=0):
    """Random truth values."""
    return integers(*shape, seed=seed) > 0


def named(dtype):
    return str(dtype).removeprefix("torch.")


# ---- one operand ----

REAL = [
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Erf", "Erfc",
    "Erfinv", "Exp", "Expm1", "Log1p", "Rsqrt", "Sigmoid", "Sin", "Sinh", "Sqrt", "Tan",
    "Tanh", "Reciprocal", "Log",
]  # fmt: skip
ANY_NUMBER = [
    "Abs",
    "Ceil",
    "Floor",
    "Neg",
    "Round",
    "Sign",
    "Square",
    "Trunc",
    "IsNan",
    "IsInf",
    "IsFinite",
]


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize("op_type", [*REAL, *ANY_NUMBER])
def test_one_real_operand(op_type, dtype):
    scale = 0.3 if op_type in ("Acos", "Asin", "Atanh", "Erfinv") else 3.0
    check(op_type, reals(5, 17, dtype=dtype, scale=scale))


@pytest.mark.parametrize("dtype", INTEGERS, ids=named)
@pytest.mark.parametrize("op_type", [*ANY_NUMBER, "Invert"])
def test_one_integer_operand(op_type, dtype):
    if op_type not in ("IsInf", "IsFinite"):
        check(op_type, integers(5, 17, dtype=dtype))


@pytest.mark.parametrize("op_type", ["Invert", "LogicalNot", "Sign"])
def test_one_truth_value(op_type):
    check(op_type, booleans(5, 17))


@pytest.mark.parametrize(
    "attrs",
    [{}, {"base": 2.0}, {"base": 10.0}, {"base": 3.0}, {"base": 2.0, "scale": 2.0, "shift": 1.0}],
)
def test_logarithm(attrs):
    check("Log", reals(3, 11).abs(), **attrs)


# ---- two operands ----

ARITHMETIC = [
    "Add",
    "Sub",
    "Mul",
    "Maximum",
    "Minimum",
]
DIVISION = [
    "Div",
    "RealDiv",
    "TruncateDiv",
    "FloorDiv",
    "FloorMod",
    "Mod",
]
COMPARISON = [
    "Equal",
    "NotEqual",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
]


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize("op_type", [*ARITHMETIC, *DIVISION, *COMPARISON, "Atan2", "Xlogy"])
def test_two_real_operands(op_type, dtype):
    x, y = reals(7, 17, dtype=dtype), reals(7, 17, dtype=dtype, seed=1, special=False)
    y.view(-1)[2:12] = torch.tensor([0.0, -0.0, INF, -INF, NAN, 0.5, -0.5, 1, 100, 0], dtype=dtype)
    check(op_type, x, y)


@pytest.mark.parametrize("dtype", INTEGERS, ids=named)
@pytest.mark.parametrize(
    "op_type", [*ARITHMETIC, *COMPARISON, "BitwiseAnd", "BitwiseOr", "BitwiseXor"]
)
def test_two_integer_operands(op_type, dtype):
    check(op_type, integers(7, 17, dtype=dtype), integers(7, 17, dtype=dtype, seed=1, high=3))


@pytest.mark.parametrize("dtype", INTEGERS, ids=named)
@pytest.mark.parametrize("op_type", DIVISION)
def test_integer_division_by_a_constant(op_type, dtype):
    for divisor in (1, 2, 7, 64) if dtype == torch.uint8 else (1, -1, 2, 7, -3, 64):
        check(op_type, integers(3, 17, dtype=dtype), constant(divisor, dtype), threads=(1,))


@pytest.mark.parametrize("op_type", [*COMPARISON, "Add", "Mul", "Maximum", "Minimum", "BitwiseXor"])
def test_two_truth_values(op_type):
    check(op_type, booleans(7, 17), booleans(7, 17, seed=1))


@pytest.mark.parametrize("dtype", INTEGERS, ids=named)
@pytest.mark.parametrize("op_type", ["LeftShift", "RightShift"])
def test_shifts_by_any_count(op_type, dtype):
    x = integers(6, 24, dtype=dtype)
    count = integers(6, 24, dtype=dtype, low=-10, high=80, seed=1)
    check(op_type, x, count)


@pytest.mark.parametrize(
    "shapes",
    [((4, 1, 17), (3, 1)), ((17,), (5, 17)), ((), (3, 5)), ((2, 3, 5), ()), ((1, 1), (4, 9))],
    ids=str,
)
def test_operands_are_broadcast(shapes):
    check("Sub", *(reals(*s, seed=k) for k, s in enumerate(shapes)))


# ---- powers ----


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 2.5, -1.7])
def test_power_with_a_known_exponent(exponent, dtype):
    special = dtype != torch.float16  # torch takes another way to the root of -inf there
    check("Pow", reals(3, 17, dtype=dtype, special=special), constant(exponent, dtype))


def test_power_of_tensors():
    check("Pow", reals(5, 17).abs(), reals(5, 17, seed=1, special=False))


@pytest.mark.parametrize("dtype", INTEGERS, ids=named)
@pytest.mark.parametrize("exponent", [0, 1, 2, 5, 12])
def test_integer_power(exponent, dtype):
    check("Pow", integers(3, 17, dtype=dtype), constant(exponent, dtype), threads=(1,))


# ---- casts and selections ----


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS, torch.bool], ids=named)
@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, torch.bool], ids=named)
def test_cast(source, target):
    if source in FLOATS:
        x = reals(3, 17, dtype=source, scale=1000.0)
        if target in INTEGERS:
            x = x.nan_to_num(3, 4, 5)  # what becomes of them is not defined
    else:
        x = booleans(3, 17) if source == torch.bool else integers(3, 17, dtype=source, high=1000)
    check("Cast", x, dst_type=torch_to_ge(target), threads=(2,))


def test_cast_of_constants():
    for value, target in ((1e10, torch.int32), (300.0, torch.uint8), (NAN, torch.bool)):
        x = constant(value, torch.float32)
        check("Cast", x, dst_type=torch_to_ge(target), threads=(1,))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64, torch.bool], ids=named)
def test_selection(dtype):
    a, b = (
        booleans(7, 17, seed=s) if dtype == torch.bool else reals(7, 17, seed=s, special=False)
        for s in (1, 2)
    )
    check("SelectV2", booleans(7, 17), a.to(dtype), b.to(dtype))
    check("SelectV2", booleans(7, 1), a.to(dtype), b.to(dtype)[:1])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=named)
def test_masked_fill(dtype):
    x = reals(4, 7, 17, special=False).to(dtype)
    check("MaskedFill", x, booleans(7, 17), constant(-9.0, torch.float32))
    check("MaskedFill", x, booleans(7, 1), torch.tensor(3, dtype=dtype))


@pytest.mark.parametrize("op_type", ["ClipByValue", "ClipByValueV2"])
def test_clip(op_type):
    for x in (reals(5, 17), reals(5, 17, dtype=torch.bfloat16), integers(5, 17)):
        check(op_type, x, constant(-1, x.dtype), constant(2, x.dtype))
    check(op_type, reals(5, 17), reals(17, special=False), torch.tensor(1.5))


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_nan_to_num(dtype):
    check("NanToNum", reals(3, 17, dtype=dtype), nan=1.0, posinf=7.0, neginf=-8.0)


# ---- several steps in one ----


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=named)
def test_scaled_sums(dtype):
    x, y = (reals(5, 17, seed=s, special=False).to(dtype) for s in (1, 2))
    for op_type in ("AxpyV2", "Sxpy"):
        check(op_type, x, y[:1], constant(3, dtype))
        check(op_type, x, y, torch.tensor(3, dtype=dtype))
    check("Sxpy", x, y, None)
    check("Addcmul", x, y, y[:, :1], constant(2, dtype))
    if dtype in FLOATS:
        check("Addcdiv", x, y, y[:, :1], constant(2, dtype))
        check("Muls", x, value=0.7)


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_lerp(dtype):
    x, y = (reals(5, 17, dtype=dtype, seed=s, special=False) for s in (1, 2))
    for weight in (0.0, 0.3, 0.8, -2.0):
        check("Lerp", x, y, constant(weight, dtype), threads=(1,))
    check("Lerp", x, y, reals(17, dtype=dtype, seed=3, special=False))


def test_dropout():
    for keep in (0.7, 0.0):
        x = reals(5, 17, special=False)
        check("DropOutDoMask", x, booleans(5, 17), constant(keep, torch.float32))


# ---- activations ----

ACTIVATIONS = [
    ("Relu", {}),
    ("Gelu", {}),
    ("GeluV2", {"approximate": "none"}),
    ("GeluV2", {"approximate": "tanh"}),
    ("Swish", {}),
    ("Swish", {"scale": 1.7}),
    ("Mish", {}),
    ("Elu", {"alpha": 1.3, "scale": 1.1, "input_scale": 0.7}),
    ("CeluV2", {"alpha": 1.3}),
    ("HardShrink", {"lambd": 0.5}),
    ("SoftShrink", {"lambd": 0.5}),
    ("HardSwish", {}),
    ("HardSigmoid", {}),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
    ("LeakyRelu", {"negative_slope": 0.1}),
    ("LogSigmoid", {}),
    ("SoftplusV2", {}),
    ("SoftplusV2", {"beta": 2.0, "threshold": 3.0}),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize(("op_type", "attrs"), ACTIVATIONS, ids=str)
def test_activation(op_type, attrs, dtype):
    check(op_type, reals(5, 17, dtype=dtype), **attrs)


GRADIENTS = [
    ("GeluGradV2", {"approximate": "none"}),
    ("GeluGradV2", {"approximate": "tanh"}),
    ("EluGradV2", {"alpha": 1.3, "scale": 1.1, "input_scale": 0.7, "is_result": False}),
    ("EluGradV2", {"alpha": 1.3, "scale": 1.1, "input_scale": 0.7, "is_result": True}),
    ("HardShrinkGrad", {"lambd": 0.5}),
    ("SoftShrinkGrad", {"lambd": 0.5}),
    ("HardSigmoidGrad", {}),
    ("HardSwishGrad", {}),
    ("LeakyReluGrad", {"negative_slope": 0.1}),
    ("LogSigmoidGrad", {}),
    ("ReluGrad", {}),
    ("SoftplusV2Grad", {"beta": 2.0, "threshold": 3.0}),
    ("ThresholdGradV2D", {"threshold": 0.5}),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize(("op_type", "attrs"), GRADIENTS, ids=str)
def test_gradient(op_type, attrs, dtype):
    grad = reals(5, 17, dtype=dtype, seed=1, special=False)
    check(op_type, grad, reals(5, 17, dtype=dtype), **attrs)


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize("op_type", ["GeluGrad", "SwishGrad", "MishGrad"])
def test_gradient_with_an_operand_that_is_not_read(op_type, dtype):
    grad = reals(5, 17, dtype=dtype, seed=1, special=False)
    x = reals(5, 17, dtype=dtype, special=False)
    check(op_type, grad, x, torch.zeros_like(x))


def test_gradient_of_a_scaled_swish():
    x = reals(5, 17, special=False)
    check("SwishGrad", reals(5, 17, seed=1, special=False), x, torch.zeros_like(x), scale=1.7)


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
@pytest.mark.parametrize("op_type", ["HardtanhGrad", "SigmoidGrad", "TanhGrad"])
def test_gradient_given_last(op_type, dtype):
    grad = reals(5, 17, dtype=dtype, seed=1, special=False)
    check(op_type, reals(5, 17, dtype=dtype), grad)


def test_threshold():
    for x in (reals(5, 17), reals(5, 17, dtype=torch.bfloat16), integers(5, 17)):
        check("ThresholdV2", x, constant(1, x.dtype), constant(7, x.dtype))
        check("ThresholdV2", x, torch.tensor(1, dtype=x.dtype), None)


@pytest.mark.parametrize(
    ("shape", "weight"),
    [((4, 5, 3), (5,)), ((4, 5), (5,)), ((4, 5, 3), (1,)), ((9,), (1,)), ((4, 5), (1, 5))],
    ids=str,
)
def test_prelu(shape, weight):
    check("PRelu", reals(*shape), reals(*weight, seed=1, special=False))


def test_gradients_of_prelu():
    x = reals(5, 17)
    weight = reals(1, 17, seed=2, special=False)
    check("PReluGrad", reals(5, 17, seed=1, special=False), x, weight)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gated_halves(dim):
    check("GLU", reals(4, 6, 34), dim=dim)


# ---- tensors made from sizes and numbers ----


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=named)
def test_copies_and_constants(dtype):
    x = (reals(5, 17, special=False) * 3).to(dtype)
    for op_type in ("ZerosLike", "OnesLike", "TensorMove"):
        check(op_type, x)
    check("Fill", [3, 5], x[0, 0].clone())
    check("Fill", [3, 5], constant(1, dtype))
    for diagonal in (-2, 0, 3):
        check("Tril", x, diagonal=diagonal, threads=(1,))
        check("Triu", x, diagonal=diagonal, threads=(1,))


def test_triangles_of_many_matrices():
    check("Triu", reals(3, 9, 4), diagonal=1)
    check("Tril", reals(3, 4, 9), diagonal=-1)


@pytest.mark.parametrize("bounds", [(0, 37, 1), (5, -30, -3), (-4, 50, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=named)
def test_range_of_integers(bounds, dtype):
    check("Range", *(constant(b, dtype) for b in bounds))


@pytest.mark.parametrize("dtype", FLOATS, ids=named)
def test_range_of_reals(dtype):
    check("Range", *(constant(b, dtype) for b in (0.5, 20.0, 0.75)))


def test_eye():
    for dtype in (torch.float32, torch.int64, torch.bool):
        check("Eye", num_rows=5, num_columns=19, dtype=torch_to_ge(dtype))
    check("Eye", num_rows=4, batch_shape=[2, 3], dtype=DataType.DT_BF16)


@pytest.mark.parametrize("count", [1, 2, 37, 100])
def test_linspace(count):
    check("LinSpace", torch.tensor(-1.0), torch.tensor(2.5), count)


# ---- layouts, sizes and processors ----


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize("permuted", [False, True])
def test_layouts_of_operands_and_results(layout, permuted):
    x, y = (layouts(reals(6, 5, 19, seed=s))[layout] for s in (0, 1))
    check_node(OneNode("Add", x, reals(6, 5, 19, seed=2)), permuted=permuted)
    check_node(OneNode("Mul", x, y.to(torch.bfloat16).float()), permuted=permuted)
    check_node(OneNode("Tril", x), permuted=permuted)


def test_operands_repeated_by_a_stride_of_zero():
    check("Add", reals(1, 19).expand(7, 19), reals(7, 1, seed=1).expand(7, 19))
    check("SelectV2", booleans(7, 1).expand(7, 19), reals(7, 19), torch.zeros(()).expand(7, 19))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 3)], ids=str)
def test_nothing_is_done_for_no_elements(shape):
    check("Exp", torch.empty(shape))
    check("Add", torch.empty(shape), torch.ones(shape[-1:]))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 33, 64, 100, 1000])
def test_every_length(count):
    check("Add", reals(count), reals(count, seed=1))
    check("Mul", reals(count, dtype=torch.bfloat16), reals(count, dtype=torch.bfloat16, seed=1))
    check("Cast", reals(count), dst_type=DataType.DT_BF16)


@pytest.mark.parametrize("bits", [256, 128])
def test_narrower_processors(bits):
    target = replace(host(), bits=bits, registers=16, dot_bf16=False)
    x = reals(5, 19)
    for dtype in (torch.float32, torch.bfloat16):
        check_node(OneNode("GeluV2", x.to(dtype), approximate="tanh"), machine=target)
        check_node(OneNode("Add", x.to(dtype), x[:1].to(dtype)), machine=target)
    check_node(OneNode("Cast", x.nan_to_num(), dst_type=DataType.DT_INT64), machine=target)
    check_node(OneNode("SelectV2", x > 0, x, -x), machine=target)


def test_one_kernel_serves_all_sizes():
    sizes = [(6, 5, 19), (3, 4, 33), (2, 7, 8)]
    check_dynamic("Mul", *((reals(*s), reals(*s, seed=1)) for s in sizes))
    check_dynamic("Add", *((reals(*s), reals(s[1], 1, seed=1)) for s in sizes))
    check_dynamic("Swish", *((reals(*s, dtype=torch.bfloat16),) for s in sizes))
    check_dynamic("Tril", *((reals(*s),) for s in sizes), diagonal=1)
    check_dynamic("ZerosLike", *((reals(*s),) for s in sizes))
    check_dynamic(
        "SelectV2", *((booleans(*s[1:]), reals(*s), constant(0.0, torch.float32)) for s in sizes)
    )


def test_one_kernel_makes_ranges_of_all_lengths():
    bounds = [(0, 9), (3, 40), (7, 12)]
    check_dynamic("Range", *((Host(a), Host(b), 1) for a, b in bounds))


# ---- what is left to the torch kernels ----


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        ("FloorDiv", (integers(3), integers(3))),
        ("RealDiv", (integers(3), 0)),
        ("Pow", (integers(3), integers(3))),
        ("Add", (integers(3), integers(3, dtype=torch.int64))),
        ("Exp", (integers(3),)),
        ("LeftShift", (booleans(3), booleans(3))),
    ],
)
def test_declined(op_type, inputs):
    assert OneNode(op_type, *inputs).declined


def test_every_elementwise_operator_is_lowered():
    elementwise = [row for row in rows().values() if row.has(Trait.ELEMENTWISE)]
    assert [row.type for row in elementwise if row.loops is None] == ["Complex"]
