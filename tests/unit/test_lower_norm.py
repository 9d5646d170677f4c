"""Lowering of reductions, softmax and norms, against the torch kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowering import OneNode, check, check_dynamic, check_node, layouts
from torchair.codegen.cpu.jit import host
from torchair.ge.dtypes import DataType

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST = float(2**31 - 1)  # an infinite order of a norm


def reals(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def integers(*shape, dtype=torch.int64, seed=0):
    source = torch.Generator().manual_seed(seed)
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=source).to(dtype)


def named(dtype):
    return str(dtype).removeprefix("torch.")


def odd(dtype=torch.float32):
    """Rows with infinities and NaN in them."""
    rows = [[-INF] * 4, [1, 2, -INF, 3], [1, INF, 2, INF], [NAN, 1, 2, NAN], [5, 5, 5, 5]]
    return torch.tensor(rows, dtype=dtype)


by_type = pytest.mark.parametrize("dtype", FLOATS, ids=named)


# ---- softmax ----


@by_type
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("op_type", ["SoftmaxV2", "LogSoftmaxV2"])
def test_softmax(op_type, axis, dtype):
    check(op_type, reals(3, 19, 37, dtype=dtype), axes=[axis])


@by_type
@pytest.mark.parametrize("op_type", ["SoftmaxV2", "LogSoftmaxV2"])
def test_softmax_of_rows_that_are_not_finite(op_type, dtype):
    check(op_type, odd(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (0, 3), (5, 1), (1, 300)])
def test_softmax_of_small_shapes(shape):
    check("SoftmaxV2", reals(*shape))


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("layout", ["transposed", "spread"])
def test_softmax_of_other_layouts(layout, axis):
    check("SoftmaxV2", layouts(reals(5, 40))[layout], axes=[axis])


def test_softmax_from_half_to_float():
    check("SoftmaxV2", reals(3, 40, dtype=torch.bfloat16), half_to_float=True)


def test_softmax_over_two_axes_is_declined():
    assert OneNode("SoftmaxV2", reals(3, 4), axes=[0, 1]).declined == "softmax over [0, 1]"


@by_type
@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax_gradients(axis, dtype):
    y, grad = torch.softmax(reals(5, 37), axis).to(dtype), reals(5, 37, dtype=dtype, seed=1)
    check("SoftmaxGrad", y, grad, axes=[axis])
    check("LogSoftmaxGrad", grad, y.log(), axis=[axis])


# ---- norms ----


@by_type
@pytest.mark.parametrize("dims", [[37], [5, 37]])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_layer_norm(count, dims, dtype):
    parameters = [reals(*dims, dtype=dtype, seed=k) for k in range(count)]
    check("LayerNormV4", reals(3, 5, 37, dtype=dtype) + 1, dims, *parameters)


def test_layer_norm_with_wide_parameters():
    parameters = [reals(37, seed=k) for k in range(2)]
    check("LayerNormV4", reals(3, 37, dtype=torch.bfloat16), [37], *parameters)


def test_layer_norm_far_from_zero():
    check("LayerNormV4", reals(3, 200) + 1000, [200])


@by_type
@pytest.mark.parametrize("dims", [(37,), (5, 37)])
def test_rms_norm(dims, dtype):
    check("RmsNorm", reals(3, 5, 37, dtype=dtype), reals(*dims, dtype=dtype, seed=1))


@by_type
@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 7), (2, 5, 3, 17), (3, 1, 4, 4)])
def test_batch_norm_inference(shape, dtype):
    parameters = [reals(shape[1], dtype=dtype, seed=k) for k in range(3)]
    variance = reals(shape[1], dtype=dtype, seed=4).abs() + 0.1
    check("BNInfer", reals(*shape, dtype=dtype), *parameters, variance, epsilon=1e-5)


def test_batch_norm_inference_with_channels_last():
    x = reals(2, 33, 3, 5).to(memory_format=torch.channels_last)
    parameters = [reals(33, seed=k) for k in range(3)]
    check("BNInfer", x, *parameters, reals(33).abs() + 0.1, epsilon=1e-5)


def batch_norm_inputs(shape, dtype):
    """Data, and a vector over channels for each parameter and running statistic. Torch sums up in
    double precision here: means are away from zero, so that no digits are lost in them."""
    vectors = [reals(shape[1], dtype=dtype, seed=k) for k in range(4)]
    running = [v.abs() + 0.1 for v in vectors[2:]]
    return reals(*shape, dtype=dtype) + 3, *vectors[:2], *running


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("shape", [(7, 5), (2, 5, 3, 17), (1, 33, 4, 4)])
def test_batch_norm_in_training(shape, dtype):
    check("BatchNormV3", *batch_norm_inputs(shape, dtype), momentum=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("shape", [(7, 5), (2, 5, 3, 17), (1, 33, 4, 4)])
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_gradient(train, shape, dtype):
    x, weight, bias, *running = batch_norm_inputs(shape, dtype)
    _, mean, rstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0, 1e-5)
    inputs = reals(*shape, dtype=dtype, seed=9), x, weight, *running, mean, rstd
    check("BatchNormGradV3", *inputs, is_training=train)


def test_batch_norms_that_are_declined():
    inputs = batch_norm_inputs((2, 5, 3), torch.float32)
    assert OneNode("BatchNormV3", *inputs, is_training=False).declined is not None
    half = [x.half() for x in inputs]
    assert OneNode("BatchNormV3", *half).declined is not None
    assert OneNode("BatchNormV3", half[0], *inputs[1:]).declined is None
    assert OneNode("BatchNormV3", inputs[0].double(), *inputs[1:]).declined is not None


# ---- batch norms in parts ----

PARTS = pytest.mark.parametrize(
    "shape", [(7, 5), (2, 5, 3, 17), (1, 33, 4, 4), (4, 3, 9, 9), (1, 1, 1, 2)]
)
SHORT = pytest.mark.parametrize("dtype", FLOATS[:3], ids=named)


def parts(shape, dtype, last=False):
    """Data, a gradient, and vectors over channels, which are positive."""
    made = [reals(*shape, dtype=dtype, seed=k) + 3 - 3 * k for k in range(2)]
    if last and len(shape) == 4:
        made = [x.to(memory_format=torch.channels_last) for x in made]
    return *made, [reals(shape[1], seed=k + 5).abs() + 0.1 for k in range(4)]


@SHORT
@PARTS
@pytest.mark.parametrize("last", [False, True])
def test_parts_of_a_batch_norm(shape, dtype, last):
    x, _, (weight, mean, scale, bias) = parts(shape, dtype, last)
    check("BatchNormStatistics", x, weight, epsilon=1e-5)
    check("BatchNormScale", x, mean, scale, bias)


@SHORT
@PARTS
@pytest.mark.parametrize("last", [False, True])
def test_parts_of_a_batch_norm_gradient(shape, dtype, last):
    x, dy, (weight, mean, rstd, slope) = parts(shape, dtype, last)
    check("BatchNormSums", dy, x, weight, mean, rstd)
    check("BatchNormInputGrad", dy, x, mean, weight, slope, rstd)


@pytest.mark.parametrize("far", [1e2, 1e4])
def test_statistics_far_from_zero(far):
    """Digits that are the same for all elements of a channel are not squared."""
    x = reals(4, 5, 16, 16) + far
    one = OneNode("BatchNormStatistics", x, torch.ones(5), epsilon=0.0)
    variance = one.run()[3].double()
    truth = x.double().var((0, 2, 3))
    assert ((variance - truth).abs() < 1e-5 * truth).all()


def test_statistics_of_equal_elements_are_exact():
    x = torch.full((2, 3, 4, 5), 0.1)
    mean, rstd, _, variance = OneNode("BatchNormStatistics", x, torch.ones(3), epsilon=1.0).run()
    assert mean.tolist() == x[0, :, 0, 0].tolist()
    assert rstd.tolist() == [1.0] * 3 and variance.tolist() == [0.0] * 3


def test_statistics_with_one_element_that_is_far_off():
    x = reals(8, 2, 32, 32)
    x[0, :, 0, 0] = 1e4
    variance = OneNode("BatchNormStatistics", x, torch.ones(2), epsilon=0.0).run()[3].double()
    truth = x.double().var((0, 2, 3))
    assert ((variance - truth).abs() < 1e-5 * truth).all()


def norm_gradient(dims, dtype=torch.float32):
    """Inputs of the gradient of a layer norm."""
    x, gamma = reals(3, 5, 37, dtype=dtype), reals(*dims, dtype=dtype, seed=1)
    _, mean, rstd = torch.native_layer_norm(x, dims, gamma, gamma, 1e-5)
    return reals(3, 5, 37, dtype=dtype, seed=2), x, rstd, mean, gamma


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize("dims", [[37], [5, 37]])
def test_layer_norm_gradient_of_the_input(dims, dtype):
    check("LayerNormGradV3", *norm_gradient(dims, dtype), only=[0])


def test_layer_norm_gradients_of_parameters_are_declined():
    one = OneNode("LayerNormGradV3", *norm_gradient([37]))
    assert one.declined is None
    one.node.outputs[1].uses[(one.node, "x", None)] = None
    assert one.declined is not None


# ---- reductions ----

PLAIN = [
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "EuclideanNorm",
    "ReduceLogSumExp",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=named)
@pytest.mark.parametrize("op_type", PLAIN)
@pytest.mark.parametrize("axes", [[-1], [1], [0, 2], []])
def test_reductions(axes, op_type, dtype):
    x = reals(3, 5, 21, dtype=dtype)
    check(op_type, x.abs() + 0.5 if op_type == "ReduceProd" else x, axes, keep_dims=len(axes) == 2)


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceLogSumExp"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_of_what_is_not_finite(axis, op_type):
    check(op_type, odd(), [axis])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=named)
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_extremes_of_integers(axis, op_type, dtype):
    check(op_type, integers(5, 37, dtype=dtype), [axis])


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceProd"])
def test_sums_of_integers(op_type):
    check(op_type, integers(5, 37), [1])
    check(op_type, integers(5, 37) * 2**40 + 1, [0])


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin", "ReduceAny", "ReduceAll"])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_reductions_of_truth_values(axes, op_type):
    check(op_type, integers(4, 21) > -7, axes)
    check(op_type, torch.ones(4, 21, dtype=torch.bool), axes)
    check(op_type, torch.zeros(4, 21, dtype=torch.bool), axes)


def test_truth_of_bytes():
    check("ReduceAny", integers(4, 21, dtype=torch.uint8), [1])


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceProd"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_of_nothing(axis, op_type):
    check(op_type, reals(0, 3), [axis])


@pytest.mark.parametrize("layout", ["transposed", "spread"])
@pytest.mark.parametrize("axes", [[0], [1], [0, 2]])
def test_reductions_of_other_layouts(axes, layout):
    check("ReduceSum", layouts(reals(4, 6, 19))[layout], axes)


def test_sum_of_a_broadcast_operand():
    check("ReduceSum", reals(4, 1).expand(4, 50), [1])


def test_reductions_of_a_scalar():
    for op_type in ("ReduceSum", "ReduceMean", "ReduceMax"):
        check(op_type, reals(), [0])
    check("ArgMaxV2", reals(), 0, dtype=DataType.DT_INT64)


def test_mean_of_integers_in_a_given_type():
    check("ReduceMeanWithCast", integers(5, 37), [1], dtype=DataType.DT_FLOAT)
    assert OneNode("ReduceMean", integers(5, 37), [1]).declined is not None


@by_type
@pytest.mark.parametrize("axes", [[], [1], [0, 2]])
def test_moments(axes, dtype):
    x, keep = reals(3, 5, 21, dtype=dtype), len(axes) == 1
    check("ReduceStdV2", x, dim=axes, keepdim=keep)
    check("ReduceStdV2", x, dim=axes, keepdim=keep, is_mean_out=False, correction=0, only=[0])
    check("ReduceMeanVariance", x, axes=axes, keep_dims=keep)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [1, 2])
def test_deviation_of_one_element(correction):
    check("ReduceStdV2", reals(1, 3), dim=[0], correction=correction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=named)
@pytest.mark.parametrize("p", [2.0, 1.0, 0.0, 3.0, MOST, -MOST])
def test_vector_norms(p, dtype):
    check("LpNormV2", reals(5, 37, dtype=dtype), p=p, axes=[1])
    large = torch.tensor([[3e38], [-2e38], [1e-30]]).to(dtype)
    check("LpNormV2", large, p=p, axes=[1])  # one element: no square that overflows
    check("LpNormV2", reals(5, 37, dtype=dtype), p=p)


# ---- positions of extremes ----


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8], ids=named)
def test_positions(dtype, axis):
    x = reals(9, 37, dtype=dtype) if dtype in FLOATS else integers(9, 37, dtype=dtype)
    check("ArgMaxV2", x, axis, dtype=DataType.DT_INT64)
    check("ArgMin", x, axis, dtype=DataType.DT_INT32)
    check("ArgMaxWithValue", x, dimension=axis, keep_dims=True)
    check("ArgMinWithValue", x, dimension=axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_positions_among_what_is_not_finite(axis):
    check("ArgMaxWithValue", odd(), dimension=axis)
    check("ArgMinWithValue", odd(), dimension=axis)


# ---- one kernel for many sizes, other processors ----


@pytest.mark.parametrize("op_type", ["SoftmaxV2", "LogSoftmaxV2"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_one_softmax_kernel_serves_all_sizes(axis, op_type):
    check_dynamic(op_type, [reals(3, 37)], [reals(9, 2)], [reals(2, 300)], axes=[axis])


def test_one_norm_kernel_serves_all_batches():
    gamma, beta = reals(37, seed=1), reals(37, seed=2)
    shapes = [(3, 5), (7, 2), (2, 60)]
    check_dynamic("LayerNormV4", *[(reals(*s, 37), [37], gamma, beta) for s in shapes])
    check_dynamic("RmsNorm", *[(reals(*s, 37), gamma) for s in shapes])


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp"])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_one_reduction_kernel_serves_all_sizes(axes, op_type):
    check_dynamic(op_type, [reals(3, 37), axes], [reals(9, 2), axes], [reals(2, 300), axes])


def test_one_deviation_kernel_serves_all_sizes():
    check_dynamic("ReduceStdV2", [reals(3, 37)], [reals(9, 2)], dim=[1])


@pytest.mark.parametrize("bits", [256, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=named)
def test_narrower_processors(dtype, bits):
    narrow = replace(host(), bits=bits, registers=16, dot_bf16=False)
    x, gamma = reals(3, 37, dtype=dtype), reals(37, dtype=dtype)
    for one in (
        OneNode("SoftmaxV2", x),
        OneNode("LayerNormV4", x, [37], gamma, gamma),
        OneNode("ReduceSum", x, [0]),
        OneNode("ArgMaxV2", x, 1, dtype=DataType.DT_INT64),
    ):
        check_node(one, machine=narrow)


# ---- losses ----

REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=named)
@REDUCTIONS
def test_losses_of_pairs(reduction, dtype):
    x, y = reals(5, 37, dtype=dtype), reals(5, 37, dtype=dtype, seed=1)
    grad = y * 2 if reduction == "none" else y[0, 0]
    check("MseLoss", x, y, reduction=reduction)
    check("MseLossGrad", x, y, grad, reduction=reduction)
    check("SmoothL1LossV2", x, y, reduction=reduction, sigma=0.5)
    check("SmoothL1LossGradV2", x, y, grad, reduction=reduction, sigma=0.5)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 2.0])
def test_smooth_loss_at_its_joints(sigma):
    x = torch.tensor([0.0, 0.5, -0.5, 2.0, -2.0, 1e-3, NAN, INF])
    check("SmoothL1LossV2", x, torch.zeros(8), reduction="none", sigma=sigma)
    grad = (x, torch.zeros(8), torch.ones(8))
    check("SmoothL1LossGradV2", *grad, reduction="none", sigma=sigma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(weighted, reduction, dtype):
    x, y = torch.rand(5, 37).to(dtype), torch.rand(5, 37).to(dtype)
    x[0, :4] = torch.tensor([0.0, 1.0, 1e-9, 0.5])
    grad = y * 2 if reduction == "none" else y[0, 0]
    weight = [reals(5, 37, dtype=dtype)] if weighted else []
    check("BinaryCrossEntropy", x, y, *weight, reduction=reduction)
    check("BinaryCrossEntropyGrad", x, y, grad, *weight, reduction=reduction)


def test_losses_of_broadcast_operands_are_declined():
    assert OneNode("MseLoss", reals(5, 37), reals(1, 37)).declined is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_negative_log_likelihood(weighted, reduction, dtype):
    x, target = reals(37, 5, dtype=dtype), integers(37) % 5
    target[3] = -100
    weight = reals(5, dtype=dtype, seed=1).abs() + 0.5 if weighted else None
    check("NLLLoss", x, target, weight, reduction=reduction)
    _, total = torch.ops.aten.nll_loss_forward(x, target, weight, 2, -100)
    grad = reals(37, dtype=dtype) if reduction == "none" else reals(dtype=dtype)
    weight = torch.ones(5, dtype=dtype) if weight is None else weight
    check("NLLLossGrad", x, grad, target, weight, total, reduction=reduction)


def test_negative_log_likelihood_of_one_row():
    check("NLLLoss", reals(5), torch.tensor(3), None)


def test_one_loss_kernel_serves_all_sizes():
    shapes = [(5, 37), (9, 2), (3, 70)]
    check_dynamic("MseLoss", *[(reals(*s), reals(*s, seed=1)) for s in shapes])
    grads = [(reals(*s), reals(*s, seed=1), reals()) for s in shapes]
    check_dynamic("MseLossGrad", *grads)
    check_dynamic("NLLLoss", *[(reals(n, m), integers(n) % m, None) for n, m in shapes])
