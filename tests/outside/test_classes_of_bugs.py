"""Bugs found by programs from outside, each as a table of everything that has the same property."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from compiling import compiled
from torchair.codegen.sizes import GuardSet
from torchair.ge.shapes import compile_dims, symbol

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def check(function, *args, dynamic=False):
    got, expected = compiled(function, dynamic=dynamic)(*args), function(*args)
    torch.testing.assert_close(got, expected, equal_nan=True)
    return got, expected


# ---- dims of a result follow from all operands: gradients under vmap broadcast

GRADIENTS = {
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "gelu": lambda g, x: aten.gelu_backward(g, x),
    "gelu tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "hardsigmoid": lambda g, x: aten.hardsigmoid_backward(g, x),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "mish": lambda g, x: aten.mish_backward(g, x),
    "mse_loss": lambda g, x: aten.mse_loss_backward(g, x, x + 1, 0),
    "sigmoid": lambda g, x: aten.sigmoid_backward(g, x),
    "silu": lambda g, x: aten.silu_backward(g, x),
    "smooth_l1_loss": lambda g, x: aten.smooth_l1_loss_backward(g, x, x * 0.3, 0, 1.0),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    "tanh": lambda g, x: aten.tanh_backward(g, x),
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.3),
    "prelu": lambda g, x: aten._prelu_kernel(x, g),
}
OPERANDS = {"gradient": ((3, 4), (4,)), "input": ((4,), (3, 4)), "both": ((3, 1), (4,))}


@pytest.mark.parametrize("dims", OPERANDS.values(), ids=OPERANDS)
def test_gradients_broadcast(dims):
    def every(g, x):
        return [f(g, x) for f in GRADIENTS.values()]

    operands = [torch.randn(d) for d in dims]
    whole = [t.contiguous() for t in torch.broadcast_tensors(*operands)]
    torch.testing.assert_close(compiled(every)(*operands), every(*whole))


def test_slopes_in_a_vector_run_along_the_last_dim():
    check(aten._prelu_kernel.default, torch.randn(2, 3, 3), torch.tensor([0.1, 0.2, 0.3]))


DERIVATIVES = {
    "jacrev": lambda y, w: torch.func.jacrev(lambda a: (w @ a).tanh())(y),
    "hessian": lambda y, w: torch.func.hessian(lambda a: (w @ a).sigmoid().sum())(y),
}


@pytest.mark.parametrize("function", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_functions(function):
    check(function, torch.randn(4), torch.randn(4, 4))


def test_masked_scatter_takes_any_source():
    run = compiled(torch.masked_scatter, dynamic=True)
    for source in (torch.randn(24), torch.randn(5, 6)):
        x, mask = torch.randn(4, 6), torch.rand(4, 6) > 0.5
        torch.testing.assert_close(run(x, mask, source), x.masked_scatter(mask, source))


# ---- floats in the code of plans


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1.5])
def test_floats_in_the_code_of_plans(value):
    guards = GuardSet()
    size = guards.variable(4)
    assert guards.recipe([size, value])([7]) == (7, value)
    assert compile_dims([symbol("n"), value], ["n"])(7) == (7, value)


MODES = ("bilinear", "bicubic", "nearest", "area")


@pytest.mark.parametrize("mode", MODES)
def test_interpolation_with_a_second_size(mode):
    def function(x):
        return F.interpolate(x, size=(3, 4), mode=mode)

    run = compiled(function, dynamic=True)
    for dims in ((2, 3, 5, 6), (2, 3, 7, 9)):
        x = torch.randn(dims)
        torch.testing.assert_close(run(x), function(x))


# ---- quantised tensors, which tracing takes for plain ones


def _quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)


def _both(q):
    return [q.dequantize(), q]


QUANTISED = {
    "dequantised": lambda x: _quantised(x).dequantize() * 2,
    "returned": _quantised,
    "both": lambda x: [_quantised(x).dequantize(), _quantised(x)],
    "one, twice": lambda x: _both(_quantised(x)),
    "codes": lambda x: [_quantised(x).dequantize(), _quantised(x).int_repr()],
}


@pytest.mark.parametrize("function", QUANTISED.values(), ids=QUANTISED)
def test_quantised_tensors(function):
    x = torch.randn(4, 6)
    got, expected = (
        r if isinstance(r, list) else [r]
        for r in (compiled(function, fullgraph=False)(x), function(x))
    )
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.dequantize().float(), b.dequantize().float())


# ---- strides that kernels give and tracing does not know

ELEMENTWISE = (
    torch.copysign, torch.floor_divide, torch.heaviside, torch.logaddexp, torch.logaddexp2,
    torch.logical_and, torch.logical_or, torch.logical_xor, torch.xlogy, torch.special.xlog1py,
    torch.complex, torch.polar, torch.atan2, torch.add, torch.eq, torch.maximum,
    lambda a, b: torch.pow(2.0, a), lambda a, b: F.logsigmoid(b), lambda a, b: 7 // a,
    lambda a, b: a.shape[0] // b,
)  # fmt: skip
LAYOUTS = {
    "column": lambda t: (t.t(), t.t()[:, :1].contiguous()),
    "swapped": lambda t: (t.t()[:, :1].contiguous(), t.t()),
    "row": lambda t: (t.t(), t.t()[:1].contiguous()),
    "two orders": lambda t: (t.t(), t.t().contiguous()),
    "expanded": lambda t: (t[:1].expand(7, 5), t.reshape(5, 7).t()),
    "steps": lambda t: (t.t()[::2], t.t().contiguous()[::2]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_as_in_eager_mode(layout):
    def every(a, b):
        return [f(a, b) for f in ELEMENTWISE]

    got, expected = check(every, *layout(torch.rand(7, 5) + 0.5))
    assert [t.stride() for t in got] == [t.stride() for t in expected]


# ---- memory that nobody has written to, under deterministic algorithms

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def _every_empty(x):
    made = [torch.empty(3, 4, dtype=d) for d in DTYPES]
    made += [torch.empty_like(x), x.new_empty(2, 3), torch.empty_strided((3, 4), (8, 2))]
    made += [torch.empty_permuted((2, 3, 4), (1, 0, 2)), x.new_empty_strided((3, 2), (2, 1))]
    return [*made, torch.empty(3, 4) + x, torch.empty(3, 4).zero_()]


def test_unwritten_memory_is_filled():
    torch.use_deterministic_algorithms(True)
    try:
        check(_every_empty, torch.ones(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- products with infinities: sums of both signs are NaN, whatever the algorithm

PRODUCTS = {
    "batch": ((8, 16, 9), (9, 9)), "batches": ((4, 16, 9), (4, 9, 9)),
    "matrix": ((64, 64), (64, 64)), "row": ((1, 64), (64, 64)),
    "vector": ((3, 64), (64,)), "vector first": ((64,), (64, 8)),
}  # fmt: skip


@pytest.mark.parametrize("dims", PRODUCTS.values(), ids=PRODUCTS)
def test_products_with_infinities(dims):
    a, b = (torch.randn(d) for d in dims)
    chosen = torch.rand_like(a) < 1.5 / dims[0][-1]
    a[chosen] = torch.randn_like(a)[chosen].sign() * math.inf

    def function(a, b):
        return torch.matmul(a, b), torch.matmul(a, b) * 0.5 + 1, torch.matmul(a, b).relu()

    for got, wide in zip(compiled(function)(a, b), function(a.double(), b.double()), strict=True):
        assert torch.equal(got.isnan(), wide.isnan())
        assert torch.equal(got.nan_to_num(0).isinf(), wide.nan_to_num(0).isinf())


# ---- small results of activations, relative to float64: torch's own gelu rounds them away


def _exact_gelu(x):
    return x * 0.5 * torch.erfc(x * -math.sqrt(0.5))


TAILS = {"gelu": (F.gelu, _exact_gelu), "silu": (F.silu, F.silu), "softplus": (F.softplus,) * 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", TAILS)
def test_tails_are_relatively_exact(name, dtype):
    function, exact = TAILS[name]
    x = torch.linspace(-12, -1, 500).to(dtype)
    wide = exact(x.double())
    error = ((compiled(function)(x).double() - wide) / wide).abs().max()
    assert error < 16 * torch.finfo(dtype).eps


def test_signs_of_zeros_in_activations():
    x = torch.tensor([0.0, -0.0, -60.0, -1000.0])
    for function in (F.gelu, F.silu, F.relu, F.hardswish):
        got, expected = compiled(function)(x), function(x)
        assert torch.equal(torch.signbit(got), torch.signbit(expected)), function


def test_a_mean_of_equal_numbers_has_no_deviation():
    x = (torch.randn(1, 33, 17) * 1e3).expand(5, 33, 17)
    run = compiled(lambda x: (x.std(0, unbiased=False), x.var(0)))
    assert all(torch.equal(r, torch.zeros(33, 17)) for r in run(x))


def test_strides_of_a_convolution_behind_a_linear():
    linear, convolution = torch.nn.Linear(8, 48), torch.nn.Conv2d(3, 5, 3)

    def function(x):
        return convolution(linear(x).reshape(2, 3, 4, 4)), linear(x).view(2, 3, 4, 4).relu()

    with torch.no_grad():
        got, expected = check(function, torch.randn(2, 8))
    assert [t.stride() for t in got] == [t.stride() for t in expected]


# ---- numbers that are equal and not the same: kernels are shared by their text

SIGNED = {
    "add": lambda x: (x + 0.0, x + (-0.0)),
    "mul": lambda x: (x * 0.0, x * -0.0),
    "rsub": lambda x: (0.0 - x, -0.0 - x),
    "pad": lambda x: (F.pad(x, (1, 1), value=-0.0), F.pad(x, (1, 1))),
    "where": lambda x: (torch.where(x > 0, x, -0.0), torch.where(x > 0, x, 0.0)),
    "fill": lambda x: (x.masked_fill(x > 0, 0.0), x.masked_fill(x > 0, -0.0)),
    "types": lambda x: (x + 1, x.int() + 1, x + True, x.bool() + 1, x.double() + 1),
}


@pytest.mark.parametrize("function", SIGNED.values(), ids=SIGNED)
def test_zeros_of_both_signs_in_one_graph(function):
    got, expected = check(function, torch.tensor([0.0, -0.0, 1.0, -1.0]))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(torch.signbit(a), torch.signbit(b))


# ---- constants that follow from sizes, read through views

LAST = {
    "scaled": lambda n: torch.scalar_tensor(n - 1, dtype=torch.float32) * 0.3,
    "plain": lambda n: torch.scalar_tensor(n, dtype=torch.float32),
}
VIEWED = {
    "expanded": lambda x, last: torch.where(x > 0, last.expand(x.shape[0], 1), x),
    "reshaped": lambda x, last: x[:, :1] + last.view(1, 1),
    "expanded and itself": lambda x, last: (x + last.expand(x.shape[0], 1), x * last),
    "quantile": lambda x, last: x.quantile(0.3, dim=1) + last,
}


@pytest.mark.parametrize("function", VIEWED.values(), ids=VIEWED)
@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_views_of_constants_that_follow_from_sizes(function, last):
    def whole(x):
        return function(x, last(x.shape[1]))

    call = compiled(whole, dynamic=True)
    for size in [(4, 3), (5, 7), (4, 3)]:
        x = torch.randn(size)
        torch.testing.assert_close(call(x), whole(x))


@pytest.mark.parametrize("norm", ["batch", "group", "layer"])
def test_norms_whose_squares_overflow_give_zeros(norm: str) -> None:
    """As eager's kernels do that do not give NaN: the deviation is infinite, not unknown."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if norm == "batch":
            return torch.nn.functional.batch_norm(x, None, None, training=True)
        if norm == "group":
            return torch.nn.functional.group_norm(x, 2)
        return torch.nn.functional.layer_norm(x, x.shape[2:])

    torch.manual_seed(0)
    x = torch.randn(4, 6, 5)
    x[0, :, 0] = 3e38
    got = compiled(fn)(x)
    assert torch.isfinite(got).all() and (got[0] == 0).all()
