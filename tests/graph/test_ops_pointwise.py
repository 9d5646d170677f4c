"""Elementwise operators, activations, creation and losses, compared with eager.

Every kernel that takes a place for its result is run once more into fresh memory and, when it is
elementwise, onto each of its operands.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import op_harness
from op_harness import convert, run
from torchair.operators import Op, Trait, interpret, row_of
from torchair.operators.reference import tensor_args, tensor_fact

aten = torch.ops.aten
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.0, math.inf, -math.inf, math.nan])


def check(fn, *inputs, **options):
    """The harness, then every `out=` of the graph's kernels."""
    conversion = op_harness.check(fn, *inputs, **options)
    env = {}

    def watch(node, results):
        row = row_of(node.type)
        if row is not None and row.out and row.type != "Empty":
            op = Op(node, lambda v: tensor_fact(env[v], v) if v in env else v.fact)
            check_out(row, row.kernel(op), tensor_args(node, row, env.__getitem__), results[0])
        env.update(zip(node.outputs, results, strict=True))

    args = [inputs[s.args[0]] for s in conversion.signature.inputs]
    feeds = [x.clone() if isinstance(x, torch.Tensor) else torch.tensor(x) for x in args]
    interpret(conversion.graph, feeds, watch)
    return conversion


def check_out(row, kernel, args, expected):
    """The kernel writes where it is told to, also when that is an operand."""
    places = [(None, torch.full_like(expected, 1, memory_format=torch.contiguous_format))]
    if row.has(Trait.ELEMENTWISE):
        same = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and fits(a, expected)]
        places += [(i, args[i].clone(memory_format=torch.contiguous_format)) for i in same]
    for position, place in places:
        got = kernel(*[place if i == position else a for i, a in enumerate(args)], out=place)
        assert got.data_ptr() == place.data_ptr(), row.type
        torch.testing.assert_close(place, expected, rtol=0, atol=0, equal_nan=True)


def fits(x, expected):
    return x.shape == expected.shape and x.dtype == expected.dtype


def make(dtype, *shape):
    """A tensor of small values of any type; integers have no zero, so that they can divide."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    if dtype is BOOL:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 2).to(dtype)
    low = torch.randint(1, 5, shape, generator=generator)
    sign = 1 if dtype is U8 else torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (low * sign).to(dtype)


def given(function, **arguments):
    """A function of tensors alone."""
    return lambda *tensors, **more: function(*tensors, **arguments, **more)


def types(conversion):
    return [n.type for n in conversion.graph.nodes if n.type not in ("Data", "NetOutput", "Const")]


# ---- arithmetic ----

ARITHMETIC = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor_divide": torch.floor_divide, "remainder": torch.remainder, "fmod": torch.fmod,
    "rsub": torch.rsub,
}  # fmt: skip


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize(
    "dtypes",
    [
        (F32, F32),
        (BF16, BF16),
        (I64, I64),
        (F32, I64),
        (BF16, F32),
        (U8, I32),
        (F64, F32),
        (F16, BF16),
    ],
)
def test_arithmetic_of_tensors(name, dtypes):
    fn = ARITHMETIC[name]
    check(fn, make(dtypes[0], 3, 4), make(dtypes[1], 4))
    check(fn, make(dtypes[0], 2, 1, 4), make(dtypes[1], 3, 1))
    check(fn, make(dtypes[0], 3, 4), make(dtypes[1]))
    check(fn, make(dtypes[0]), make(dtypes[1]))


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, I64, I32, F64])
@pytest.mark.parametrize("scalar", [2, 0.3, -3])
def test_arithmetic_with_a_number(name, dtype, scalar):
    fn = ARITHMETIC[name]
    x = make(dtype, 3, 5)
    conversion = check(lambda x: fn(x, scalar), x)
    assert torch.equal(run(conversion, [x])[0], fn(x, scalar))


@pytest.mark.parametrize("dtype", [F32, BF16, F16, I64, F64])
@pytest.mark.parametrize("alpha", [2, 0.1, -3])
def test_alpha(dtype, alpha):
    if dtype is I64 and isinstance(alpha, float):
        alpha = 5
    x, y = make(dtype, 3, 4), make(dtype, 4)
    for fn in (torch.add, torch.sub, torch.rsub):
        check(given(fn, alpha=alpha), x, y)
    check(lambda x: torch.rsub(x, 3, alpha=alpha), x)
    check(lambda x: torch.add(x, 3, alpha=alpha), x)
    if dtype.is_floating_point:
        check(lambda x, y: torch.addcmul(x, y, x, value=alpha), x, y)
        check(lambda x, y: torch.addcdiv(x, y, x, value=alpha), x, y)
        check(lambda x, y: torch.lerp(x, y, alpha), x, y)
        check(torch.lerp, x, y, make(dtype, 3, 4))


@pytest.mark.parametrize("scale", [0.1, 1 / math.sqrt(80), 3.3])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_numbers_beside_16_bit_tensors_are_not_rounded(scale, dtype):
    x, y = make(dtype, 500), make(dtype, 500)

    def fn(x, y):
        return (
            x * scale,
            x / scale,
            x + scale,
            x - scale,
            x // scale,
            torch.add(x, y, alpha=scale),
            torch.sub(x, y, alpha=scale),
            torch.addcmul(x, y, y, value=scale),
            x**scale,
            torch.div(x, scale, rounding_mode="trunc"),
            torch.lerp(x, y, scale),
            scale - x,
        )

    for got, expected in zip(run(convert(fn, x, y), [x, y]), fn(x, y), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_bool_arithmetic():
    x, y = make(BOOL, 3, 4), make(BOOL, 4)
    for fn in (torch.add, torch.mul, torch.maximum, torch.minimum, torch.div):
        check(fn, x, y)
    check(lambda x: (x * 3, x * 0.5, x + 1, x * True), x)


@pytest.mark.parametrize("dtype", [F32, BF16, I64, F64])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, 2.5])
def test_pow(dtype, exponent):
    x = make(dtype, 3, 4)
    check(lambda x: torch.pow(x, exponent), x)
    check(lambda x: torch.pow(2, x), x.abs())
    check(torch.pow, x.abs(), make(F32, 4))
    check(torch.pow, x, x.abs())
    if dtype.is_floating_point:
        check(lambda x: (x**-1, x**-2, x**-0.5, 1.5**x), x)


def test_pow_by_a_constant_is_one_node():
    assert types(check(lambda x: x**2, make(F32, 3))) == ["Pow"]


@pytest.mark.parametrize("dtype", [F32, BF16, I64, U8, torch.int16, I32])
def test_extrema_and_bounds(dtype):
    x, y = make(dtype, 3, 4), make(dtype, 4)
    check(torch.maximum, x, y)
    check(torch.minimum, x, y)
    check(torch.maximum, x, make(F32, 4))
    for low, high in ((1, 3), (None, 2), (2, None), (3, 1)):
        check(given(torch.clamp, min=low, max=high), x)
    check(lambda x: (torch.clamp_min(x, 2), torch.clamp_max(x, 2)), x)
    check(lambda x: torch.clamp(x, 0.5, 2.5), x)
    check(torch.clamp, x, y, y + 1)
    check(lambda y, x: torch.clamp(y, min=x), y, x)
    check(lambda y, x: (torch.clamp_min(y, x), torch.clamp_max(y, x)), y, x)


def test_bounds_keep_nan():
    check(lambda x: (x.clamp(-1, 1), x.clamp(min=0), F.hardtanh(x), F.relu6(x)), SPECIAL)
    check(lambda x, y: torch.clamp(x, y, y + 1), SPECIAL, SPECIAL.flip(0))


# ---- one operand ----

UNARY = [
    torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.cos,
    torch.cosh, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.expm1, torch.log, torch.log2,
    torch.log10, torch.log1p, torch.reciprocal, torch.rsqrt, torch.sin, torch.sinh, torch.sqrt,
    torch.tan, torch.sigmoid, torch.tanh, torch.isnan, torch.isinf, torch.isfinite, torch.sign,
    torch.sgn, torch.abs, torch.ceil, torch.floor, torch.round, torch.trunc, torch.logical_not,
    torch.square, torch.nan_to_num,
]  # fmt: skip
NOT_OF_BOOL = (torch.abs, torch.ceil, torch.floor, torch.round, torch.trunc)


@pytest.mark.parametrize("fn", UNARY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [F32, BF16, F64, I64, U8, BOOL])
def test_unary(fn, dtype):
    if dtype is BOOL and fn in NOT_OF_BOOL:
        dtype = I32
    check(fn, make(dtype, 3, 4))
    check(fn, make(dtype))
    if dtype.is_floating_point:
        check(fn, SPECIAL.to(dtype))


def test_neg_and_complex():
    for dtype in (F32, BF16, I64, U8):
        check(torch.neg, make(dtype, 3))
    z = torch.randn(3, dtype=torch.complex64)
    check(lambda z: (z * 2j, z + z, z * 0.5, -z, z.exp(), torch.sgn(z)), z)
    check(torch.abs, z, generic=True)


def test_nan_to_num_with_values():
    check(lambda x: torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0), SPECIAL)
    check(lambda x: torch.nan_to_num(x, nan=1.0), SPECIAL.to(BF16))


@pytest.mark.parametrize("fn", [torch.atan2, torch.xlogy], ids=["atan2", "xlogy"])
def test_float_binary(fn):
    check(fn, make(F32, 3, 4), make(F32, 4))
    check(fn, make(I64, 3, 4), make(F32, 4))
    check(fn, make(BF16, 3, 4), make(BF16, 4).abs())
    check(fn, SPECIAL, SPECIAL.flip(0))


# ---- comparison, logic, bits, selection ----


@pytest.mark.parametrize(
    "fn", [torch.eq, torch.ne, torch.gt, torch.ge, torch.lt, torch.le], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "dtypes",
    [(F32, F32), (BF16, F32), (I64, I32), (BOOL, BOOL), (BOOL, I64), (I64, F32), (U8, I64)],
)
def test_comparison(fn, dtypes):
    x, y = make(dtypes[0], 3, 4), make(dtypes[1], 4)
    check(fn, x, y)
    check(fn, x, make(dtypes[1]))
    check(lambda x: (fn(x, 1), fn(x, 0.5), fn(x, 0.1), fn(x, True)), x)
    check(fn, SPECIAL, SPECIAL.flip(0))


@pytest.mark.parametrize("dtypes", [(BOOL, BOOL), (I64, I64), (F32, I64), (BF16, BOOL)])
def test_logic(dtypes):
    x, y = make(dtypes[0], 3, 4), make(dtypes[1], 4)
    for fn in (torch.logical_and, torch.logical_or, torch.logical_xor):
        check(fn, x, y)


@pytest.mark.parametrize("dtype", [BOOL, I64, I32, U8])
def test_bits(dtype):
    x, y = make(dtype, 3, 4), make(dtype, 4)
    for fn in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor):
        check(fn, x, y)
        check(given(lambda x, fn: (fn(x, 5), fn(5, x)), fn=fn), x)
    check(lambda x, y: (~x, x & y, x | y, x ^ y), x, y)
    if dtype is not BOOL:
        check(lambda x, y: (x << y, x >> y, x << 2, x >> 1), x.abs(), y.abs())
        check(
            lambda x, y: (torch.bitwise_left_shift(x, y), torch.bitwise_right_shift(x, 1)),
            x.abs(),
            y.abs(),
        )


@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL])
def test_selection(dtype):
    mask, x, y = make(BOOL, 3, 1), make(dtype, 3, 4), make(dtype, 4)
    check(torch.where, mask, x, y)
    check(torch.where, mask, x, make(F32, 4))
    check(lambda m, x: torch.where(m, x, 1), mask, x)
    check(lambda m, x: torch.masked_fill(x, m, 1), mask, x)
    check(lambda m, x: torch.masked_fill(x, m, torch.tensor(1)), mask, x)
    check(lambda m, x: torch.masked_fill(x, m, 1), make(BOOL, 2, 3, 4), x)
    if dtype.is_floating_point:
        check(lambda m, x: torch.masked_fill(x, m, -math.inf), mask, x)
        check(lambda m, x: torch.masked_fill(x, m, torch.finfo(dtype).min), mask, x)


# ---- casts and copies ----


@pytest.mark.parametrize("source", [F32, BF16, I64, BOOL, U8])
@pytest.mark.parametrize("target", [F32, BF16, F16, F64, I64, I32, BOOL])
def test_casts(source, target):
    x = make(source, 3, 4)
    check(lambda x: x.to(target) + 0 if target is not BOOL else ~x.to(target), x)
    check(
        lambda x: torch.ops.prims.convert_element_type(x, target).abs(), x
    ) if target is not BOOL else None


def test_copies():
    x = make(F32, 3, 4)
    check(lambda x: (x.clone() + 1, x.detach() * 2, x.t().contiguous(), aten.alias(x) + 1), x)
    check(lambda x: x.to(torch.float32, copy=True), x)
    check(lambda x: x.to(device="cpu", dtype=BF16), x)
    check(lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x, x)
    check(lambda x: torch.empty(3, 4).copy_(x[0]) + 1, x)
    check(lambda x: torch.zeros(3, 4, dtype=I64).copy_(x) + 1, x)


def test_clone_survives_a_later_write():
    def fn(x):
        y = x.clone()
        x.add_(1)
        return y

    check(fn, make(F32, 3, 4))


# ---- activations ----

ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "leaky_relu": F.leaky_relu, "leaky_relu_0.3": lambda x: F.leaky_relu(x, 0.3),
    "elu": F.elu, "elu_2": lambda x: F.elu(x, 2.0), "selu": F.selu, "celu": F.celu,
    "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh,
    "relu6": F.relu6, "hardtanh_2": lambda x: F.hardtanh(x, -2.0, 0.5), "mish": F.mish,
    "softplus": F.softplus, "softplus_2": lambda x: F.softplus(x, 2.0, 1.0),
    "logsigmoid": F.logsigmoid, "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.3, 7.0), "softsign": F.softsign,
    "glu": F.glu, "glu_0": lambda x: F.glu(x, 0), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_activation(name, dtype):
    fn = given(ACTIVATIONS[name])
    check(fn, make(dtype, 4, 6))
    check(fn, make(dtype, 2, 3, 4)) if name != "glu_0" else None
    check(fn, make(dtype, 4, 6), dynamic=True, other_inputs=(make(dtype, 6, 8),))
    check(fn, SPECIAL.to(dtype))


def gradient(fn):
    """Value and input gradient of a function, as a training graph computes them."""

    def both(x, weight):
        y, pull = torch.func.vjp(fn, x)
        return y, pull(weight)[0]

    return both


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_activation_gradient(name, dtype):
    fn = ACTIVATIONS[name]
    x = make(dtype, 4, 6)
    check(gradient(fn), x, make(dtype, *fn(x).shape))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("weight", [1, 5])
def test_prelu(dtype, weight):
    w = make(dtype, weight)
    check(F.prelu, make(dtype, 3, 5, 2), w)
    check(F.prelu, make(dtype, 3, 5), w)

    check(
        lambda x, w, out: gradient(lambda w: F.prelu(x, w))(w, out),
        make(dtype, 3, 5),
        w,
        make(dtype, 3, 5),
    )


BACKWARD = {
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.7),
    "relu": lambda g, x: aten.threshold_backward(g, x, 0),
    "elu_result": lambda g, x: aten.elu_backward(g, 1.5, 2.0, 1.0, True, F.elu(x, 1.5) * 2.0),
    "leaky_result": lambda g, x: aten.leaky_relu_backward(g, x, 0.2, True),
    "softmax": lambda g, x: aten._softmax_backward_data(g, torch.softmax(x, 1), 1, x.dtype),
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x.log_softmax(-1), 1, x.dtype),
    "mse": lambda g, x: aten.mse_loss_backward(g, x, x * 2, 0),
    "tanh": lambda g, x: aten.tanh_backward(g, x.tanh()),
    "sigmoid": lambda g, x: aten.sigmoid_backward(g, x.sigmoid()),
    "log_sigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, torch.exp(-x.abs())),
    "mish": aten.mish_backward, "silu": aten.silu_backward,
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_backward_operator(name, dtype):
    check(BACKWARD[name], make(dtype, 3, 4), make(dtype, 3, 4) + 0.1)


def test_a_row_of_integers_is_rectified():
    check(torch.relu, make(I64, 3, 4))


# ---- creation ----


@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL, F64, I32])
def test_fills(dtype):
    x = make(F32, 3, 4)
    check(lambda x: (torch.full((2, 3), 3, dtype=dtype), torch.full((), 1, dtype=dtype)), x)
    check(lambda x: (torch.zeros(2, 3, dtype=dtype), torch.ones(2, dtype=dtype)), x)
    check(lambda x: (torch.zeros_like(x, dtype=dtype), torch.ones_like(x, dtype=dtype)), x)
    check(lambda x: (torch.full_like(x, 1, dtype=dtype), x.new_full((2,), 1, dtype=dtype)), x)
    check(lambda x: (x.new_zeros(2, dtype=dtype), x.new_ones((2, 2), dtype=dtype)), x)
    check(lambda x: (torch.scalar_tensor(1, dtype=dtype), torch.eye(3, dtype=dtype)), x)
    check(lambda x: torch.eye(2, 4, dtype=dtype), x)
    check(lambda x: torch.empty(2, 3, dtype=dtype).fill_(1), x)
    check(lambda x: torch.empty_like(x, dtype=dtype).zero_(), x)
    check(lambda x: torch.zeros(2, dtype=dtype).fill_(torch.tensor(1)), x)
    if dtype.is_floating_point:
        check(
            lambda x: (torch.full((2,), 0.1, dtype=dtype), torch.full_like(x, 0.1, dtype=dtype)), x
        )
        check(lambda x: torch.full((2,), -math.inf, dtype=dtype), x)


def test_a_scalar_fill_is_a_constant():
    assert types(convert(lambda x: torch.full((), 3.0) * x, make(F32, 3))) == ["Mul", "Cast"]


def test_uninitialised_tensors_have_the_right_shape():
    conversion = convert(
        lambda x: (
            torch.empty(2, 3),
            x.new_empty(4),
            torch.empty_like(x),
            x.new_empty((2, 0, 3)),
            x.new_empty_strided((2, 3), (3, 1)),
            torch.empty_strided((2, 3), (1, 2)),
        ),
        make(F32, 3, 4),
    )
    assert not conversion.generic
    shapes = [tuple(t.shape) for t in run(conversion, [make(F32, 3, 4)])]
    assert shapes == [(2, 3), (4,), (3, 4), (2, 0, 3), (2, 3), (2, 3)]


def test_fills_of_dynamic_size():
    def fn(x):
        n, m = x.shape
        return (
            torch.zeros(n, m),
            torch.ones(m, 2),
            torch.full((n,), 2.5),
            torch.full_like(x, 3),
            x.new_zeros(n + 1),
            x.new_ones(n, 1),
            x.new_full((m,), 4),
            torch.zeros_like(x),
            torch.full((2,), n),
            torch.scalar_tensor(m),
            torch.ones_like(x),
            x.new_empty(m).fill_(1),
        )

    check(fn, make(F32, 3, 4), dynamic=True, other_inputs=(make(F32, 6, 2),))


RANGES = [
    (5,), (5.0,), (2, 7), (7, 2, -2), (0, 10, 3), (-3, 4), (0, 1, 0.25), (2.5,), (0.5, 4.5),
    (5, 0, -1), (0, 2**31 + 3, 2**30), (0.0, 1.0, 0.5),
]  # fmt: skip


@pytest.mark.parametrize("bounds", RANGES, ids=str)
@pytest.mark.parametrize("dtype", [None, F32, BF16, F64, I64, I32])
def test_arange(bounds, dtype):
    if dtype is I32 and 2**31 + 3 in bounds:
        dtype = I64
    if dtype in (I64, I32) and int(bounds[-1]) == 0:
        dtype = None  # a step of zero
    inexact = (dtype in (I64, I32) and any(b != int(b) for b in bounds)) or (
        dtype in (F32, BF16) and 2**31 + 3 in bounds
    )
    check(lambda x: torch.arange(*bounds, dtype=dtype), make(F32, 2), generic=inexact)


@pytest.mark.parametrize("bounds", [(0, 0.3, 0.1), (0.1, 1.0, 0.1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_arange_with_rounded_bounds_is_exact(bounds, dtype):
    conversion = check(lambda x: torch.arange(*bounds, dtype=dtype), make(F32, 2), generic=True)
    assert torch.equal(run(conversion, [make(F32, 2)])[0], torch.arange(*bounds, dtype=dtype))


def test_arange_of_dynamic_size():
    def fn(x):
        n, m = x.shape
        return (
            torch.arange(n),
            torch.arange(1, m),
            torch.arange(0, n, 2),
            torch.arange(n, n + m),
            torch.arange(n, dtype=F32),
            torch.arange(m, -1, -1),
            torch.arange(0, m, 2, dtype=F32),
            torch.arange(n, 0, -2),
        )

    check(fn, make(F32, 3, 4), dynamic=True, other_inputs=(make(F32, 6, 9),))


@pytest.mark.parametrize("dtype", [F32, BF16, F64, I64, I32])
@pytest.mark.parametrize("bounds", [(0, 1, 5), (-0.3, 7.7, 9), (5, 0, 6), (0.1, 0.2, 1)])
def test_linspace(bounds, dtype):
    conversion = check(lambda x: torch.linspace(*bounds, dtype=dtype), make(F32, 2))
    assert torch.equal(run(conversion, [make(F32, 2)])[0], torch.linspace(*bounds, dtype=dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, I64, BOOL])
@pytest.mark.parametrize("diagonal", [0, 1, -2])
def test_triangles(dtype, diagonal):
    x = make(dtype, 2, 4, 5)
    check(lambda x: (torch.tril(x, diagonal), torch.triu(x, diagonal)), x)
    check(
        lambda x: torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=BOOL)),
        x,
        dynamic=True,
        other_inputs=(make(dtype, 2, 7, 5),),
    )


# ---- softmax and losses ----


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dtype, dim):
    x = make(dtype, 2, 3, 4)
    check(lambda x: (torch.softmax(x, dim), torch.log_softmax(x, dim)), x)
    check(lambda x: torch.softmax(x, dim, dtype=F32), x)
    check(lambda x: torch.log_softmax(x, dim, dtype=F32), x)
    check(lambda x: torch.softmax(x, 0), make(dtype))
    weight = make(dtype, 2, 3, 4)
    check(gradient(lambda x: torch.softmax(x, dim)), x, weight)
    check(gradient(lambda x: torch.log_softmax(x, dim)), x, weight)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [0, -1])
def test_safe_softmax_of_masked_rows(dtype, dim):
    x = make(dtype, 3, 4)
    x[1], x[:, 2], x[2, 1] = -math.inf, -math.inf, math.nan
    check(lambda x: aten._safe_softmax(x, dim), x)
    check(lambda x: aten._safe_softmax(x, dim, F32), x)


REDUCTIONS = ("none", "mean", "sum")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses(dtype, reduction):
    x, y = make(dtype, 3, 4), make(dtype, 3, 4).flip(0)
    p, q = torch.sigmoid(x), torch.sigmoid(y)
    weight = make(dtype, 3, 4) if reduction == "none" else make(dtype)
    for fn in (F.mse_loss, F.smooth_l1_loss, given(F.smooth_l1_loss, beta=0.3)):
        fn = given(fn, reduction=reduction)
        check(fn, x, y)
        check(given(lambda x, y, w, fn: gradient(lambda a: fn(a, y))(x, w), fn=fn), x, y, weight)
    check(lambda p, q: F.binary_cross_entropy(p, q, reduction=reduction), p, q)
    check(lambda p, q, w: F.binary_cross_entropy(p, q, w, reduction=reduction), p, q, q)
    check(
        lambda p, q, w: gradient(lambda a: F.binary_cross_entropy(a, q, reduction=reduction))(p, w),
        p,
        q,
        weight,
    )


def test_mse_loss_of_mixed_types():
    check(aten.mse_loss, make(F32, 3, 4), make(F64, 3, 4))


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(dtype, reduction, weighted):
    target = torch.tensor([1, 4, -100, 0, 2])
    classes = make(dtype, 5).abs() + 0.1
    out = make(dtype, 5) if reduction == "none" else make(dtype)

    def loss(x, target, w):
        w = w if weighted else None
        return F.nll_loss(torch.log_softmax(x, 1), target, w, reduction=reduction)

    def training(x, target, w, out):
        return gradient(lambda a: loss(a, target, w))(x, out)

    check(loss, make(dtype, 5, 5), target, classes)
    check(training, make(dtype, 5, 5), target, classes, out)


def test_nll_loss_of_one_sample_and_dynamic_batch():
    check(given(F.nll_loss), make(F32, 5), torch.tensor(3))
    x, t = make(F32, 4, 5), torch.tensor([0, 2, 1, 4])
    check(given(F.nll_loss, ignore_index=2), x, t)

    def training(x, t):
        return gradient(lambda x: F.cross_entropy(x, t))(x, torch.ones(()))

    check(training, x, t, dynamic=True, other_inputs=(make(F32, 2, 5), torch.tensor([0, 3])))


def test_label_smoothing_and_logits_losses():
    x, t = make(F32, 4, 5), torch.tensor([0, 2, 1, 4])
    check(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), x, t, generic=True)
    check(lambda x, y: F.binary_cross_entropy_with_logits(x, y), x, torch.sigmoid(x))


# ---- the documented nodes ----

NODES = [
    (F32, lambda x: x + 1, "Add"), (F32, lambda x: x * 2, "Mul Cast"),
    (BF16, lambda x: x * 2, "Muls Cast"), (F32, lambda x: 1 - x, "Sxpy"),
    (F32, lambda x: torch.add(x, x, alpha=2), "AxpyV2"), (F32, torch.ceil, "Ceil Cast"),
    (F32, lambda x: torch.sub(x, x, alpha=2), "Mul Sub"), (I64, torch.exp, "Cast Exp"),
    (F32, lambda x: torch.div(x, 2, rounding_mode="trunc"), "RealDiv Trunc"),
    (F32, lambda x: x // 2, "FloorDiv"), (F32, lambda x: x % 2, "FloorMod"),
    (F32, torch.logical_not, "Cast LogicalNot Cast"), (F32, torch.log2, "Log"),
    (F32, lambda x: torch.clamp(x, 0), "ClipByValueV2"), (F32, lambda x: x > 0, "Greater"),
    (F32, lambda x: torch.where(x > 0, x, -x), "Greater Neg SelectV2"),
    (F32, lambda x: x.to(BF16), "Cast"), (F32, lambda x: torch.full_like(x, 2), "Shape Cast Fill"),
    (F32, lambda x: torch.arange(3), "Range Cast"), (F32, torch.zeros_like, "ZerosLike"),
    (F32, F.gelu, "Gelu"), (F32, given(F.gelu, approximate="tanh"), "GeluV2"),
    (F32, given(F.silu), "Swish"), (F32, lambda x: torch.softmax(x, -1), "SoftmaxV2"),
    (F32, lambda x: torch.log_softmax(x, -1), "LogSoftmaxV2"),
]  # fmt: skip


@pytest.mark.parametrize("case", NODES, ids=lambda c: c[2].replace(" ", "-"))
def test_documented_nodes(case):
    dtype, fn, nodes = case
    assert types(convert(fn, make(dtype, 3, 4))) == nodes.split()


# ---- symbolic numbers as operands ----


def test_symbolic_operands():
    def fn(x):
        n = x.shape[0]
        return (
            x + n,
            x * n,
            x / n,
            n - x,
            x**n,
            x // n,
            x % n,
            x > n,
            x == n,
            torch.clamp(x, max=n),
            torch.where(x > 0, x, n),
            torch.masked_fill(x, x > 0, n),
            torch.add(x, x, alpha=n),
        )

    for dtype in (F32, BF16, I64):
        check(fn, make(dtype, 3, 4), dynamic=True, other_inputs=(make(dtype, 6, 4),))
