"""Activations and their gradients, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchair.codegen.loops import Expr, cast, op
from torchair.codegen.sizes import FLOATS, Element
from torchair.operators import core
from torchair.operators import formulas as f
from torchair.operators.core import (
    NUMBERS,
    Lowering,
    Op,
    TorchKernel,
    call,
    like_first,
    native,
    scalar,
)
from torchair.operators.elementwise import EW
from torchair.operators.formulas import Formula
from torchair.operators.loops import Lowered, LowerOp, elementwise
from torchair.torch_private.functions import nn

aten = torch.ops.aten
_nn: Any = nn


def _attributes(formula: Formula, names: Sequence[str], last: bool) -> Callable[..., Formula]:
    """The formula of a node: of the first two operands at most, what follows is not read."""

    def make(node: LowerOp) -> Formula:
        values = [node.attr(a) for a in names]

        def of_two(*elements: Expr) -> Expr:
            used = elements[:2]
            return formula(*(reversed(used) if last else used), *values)

        return of_two

    return make


def _row(
    op_type: str,
    kernel: Callable[[Op], TorchKernel],
    formula: Formula,
    *attrs: str,
    last: bool = False,
    out: bool = True,
    types: frozenset[Element] = FLOATS,
) -> None:
    """A row whose formula takes elements, the gradient being the `last` or the first of them, and
    then attributes."""
    loops = Lowering(f.with_attributes(_attributes(formula, attrs, last)), declines=f.mixed)
    core.add_row(op_type, core.broadcast_rule, kernel, EW, out=out, loops=loops, types=types)


# ---- forward: formulas of an element and the attributes, as they are called in the graph ----


def _elu(x: Expr, alpha: float, scale: float, input_scale: float) -> Expr:
    below = f.mul(f.expm1(f.mul(x, input_scale)), alpha * scale)
    return f.where(f.lt(x, 0), below, f.mul(x, scale))


def _soft_shrink(x: Expr, lambd: float) -> Expr:
    inside = f.where(f.lt(x, -lambd), f.add(x, lambd), f.mul(x, 0))
    return f.where(f.gt(x, lambd), f.sub(x, lambd), inside)


def _ramp(x: Expr) -> Expr:
    """From 0 at -3 to 1 at 3, where the product is exact."""
    return f.mul(f.clamp(f.add(x, 3), 0, 6), 1 / 6)


def _leaky_relu(x: Expr, negative_slope: float) -> Expr:
    return f.where(f.gt(x, 0), x, f.mul(x, negative_slope))


def _log_of_one_plus(x: Expr) -> Expr:
    """log(1 + x) for x in 0..1: what rounding the sum loses is added to the logarithm, which is
    cheaper than a function that is exact everywhere."""
    rounded = f.add(x, 1)
    lost = f.sub(x, f.sub(rounded, 1))
    return f.add(f.log(rounded), f.div(lost, rounded))


def _tanh_of_softplus(x: Expr) -> Expr:
    """tanh(log(1 + exp(x))), which is a quotient in exp(x); it is one where exp would overflow."""
    power = f.exp(f.least(x, 20))
    top = f.mul(power, f.add(power, 2))
    return f.div(top, f.add(top, 2))


def _softplus(x: Expr, beta: float, threshold: float) -> Expr:
    scaled = f.mul(x, beta)
    curve = f.add(f.most(scaled, 0), _log_of_one_plus(f.exp(f.neg(f.absolute(scaled)))))
    return f.where(f.gt(scaled, threshold), x, curve if beta == 1 else f.div(curve, beta))


def _hard_sigmoid(x: Expr, alpha: float, beta: float) -> Expr:
    if (alpha, beta) == (0.16666666, 0.5):
        return _ramp(x)
    return f.clamp(f.add(f.mul(x, alpha), beta), 0, 1)


_LINEAR = 2 * math.sqrt(2 / math.pi)  # of the polynomial that approximates the normal
_CUBIC = 0.044715 * _LINEAR  # distribution inside of a sigmoid
_LARGE = 1e30


def gelu_formula(near: bool) -> Callable[[Expr], Expr]:
    """x times the normal distribution function at x, or what is near to that."""
    return (lambda x: f.mul(x, _near_normal(x))) if near else (lambda x: op("gelu", x))


def _near_normal(x: Expr) -> Expr:
    """(1 + tanh(y / 2)) / 2, which is the sigmoid of y."""
    return f.sigmoid(f.mul(x, f.add(f.mul(f.square(x), _CUBIC), _LINEAR)))


_FORWARD: dict[str, tuple[Any, ...]] = {
    "Elu": (_nn.elu, _elu, "alpha", "scale", "input_scale"),
    "Gelu": (_nn.gelu, f.operator("gelu")),
    "HardShrink": (
        torch.hardshrink, lambda x, to: f.where(f.both(f.ge(x, -to), f.le(x, to)), 0, x), "lambd",
    ),
    "HardSwish": (_nn.hardswish, lambda x: f.mul(x, _ramp(x))),
    "LeakyRelu": (_nn.leaky_relu, _leaky_relu, "negative_slope"),
    "LogSigmoid": (
        _nn.log_sigmoid,
        lambda x: f.sub(f.least(x, 0), _log_of_one_plus(f.exp(f.neg(f.absolute(x))))),
    ),
    "Mish": (_nn.mish, lambda x: f.mul(x, _tanh_of_softplus(x))),
    "SoftShrink": (_nn.softshrink, _soft_shrink, "lambd"),
    "SoftplusV2": (_nn.softplus, _softplus, "beta", "threshold"),
}  # fmt: skip
"""A torch function, the formula, then the attributes that both take after the tensor."""

for _type, (_function, _formula, *_names) in _FORWARD.items():
    _row(_type, call(_function, *_names), _formula, *_names)
# what torch.relu calls, with a place for the result
_relu = call(lambda x, **out: torch.clamp_min(x, 0, **out))
_row("Relu", _relu, lambda x: f.most(x, 0), types=NUMBERS)


def _swish_kernel(op: Op) -> TorchKernel:
    scale = op.attr("scale")
    if scale == 1:
        return _nn.silu
    return lambda x, out=None: torch.mul(x, torch.sigmoid(x * scale), out=out)


def _hard_sigmoid_kernel(op: Op) -> TorchKernel:
    alpha, beta = op.attr("alpha"), op.attr("beta")
    if (alpha, beta) == (0.16666666, 0.5):
        return _nn.hardsigmoid
    return lambda x, out=None: torch.clamp(x * alpha + beta, 0, 1, out=out)


_row(
    "GeluV2",
    call(lambda x, approximate, **out: _nn.gelu(x, approximate=approximate, **out), "approximate"),
    lambda x, approximate: gelu_formula(approximate == "tanh")(x),
    "approximate",
)
_row(
    "Swish",
    _swish_kernel,
    lambda x, scale: op("silu", x) if scale == 1 else f.mul(x, f.sigmoid(f.mul(x, scale))),
    "scale",
)
_row("HardSigmoid", _hard_sigmoid_kernel, _hard_sigmoid, "alpha", "beta")
_row(
    "CeluV2",
    call(torch.celu, "alpha"),
    lambda x, alpha: _elu(x, alpha, 1, 1 / alpha),
    "alpha",
    out=False,
)


# ---- operands beside the tensor ----


def _threshold_kernel(op: Op) -> TorchKernel:
    limit, value = scalar(op, "threshold"), scalar(op, "value")

    def run(x: Any, threshold: Any, other: Any, out: Any = None) -> Any:
        replacement = 0 if other is None else value(other)
        return torch.threshold(x, limit(threshold), replacement, out=out)

    return run


@native("ThresholdV2", like_first, _threshold_kernel, EW, declines=f.mixed, out=True, types=NUMBERS)
def _threshold(node: LowerOp) -> Lowered:
    limit, other = node.tensor("threshold"), node.maybe("value")

    def formula(x: Expr) -> Expr:
        bound = cast(f.single_element(limit), x.dtype)
        value = 0 if other is None else cast(f.single_element(other), x.dtype)
        return f.where(f.le(x, bound), value, x)

    return elementwise(formula, node.tensor("x"))


def _prelu_kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() <= 1:
        return torch.prelu(x, weight)
    return aten._prelu_kernel.default(x, weight)


def _slope_of_channel(weight: Lowered, rank: int) -> Lowered:
    """The weight of a PRelu in a form that broadcasts: a vector runs along dim 1."""
    if weight.rank != 1 or rank < 2:
        return weight
    dims = (weight.shape[0], *[1] * (rank - 2))
    return Lowered(dims, weight.dtype, lambda place: weight.at(place[:1]))


@native("PRelu", like_first, call(_prelu_kernel), declines=f.mixed, types=FLOATS)
def _prelu(node: LowerOp) -> Lowered:
    x = node.tensor("x")
    return elementwise(_leaky_relu, x, _slope_of_channel(node.tensor("weight"), x.rank))


@native(
    "PReluGrad",
    core.like("features", "features"),
    call(aten._prelu_kernel_backward.default),
    declines=f.mixed,
    types=FLOATS,
)
def _prelu_grad(node: LowerOp) -> list[Lowered]:
    given = [node.tensor(p) for p in ("grads", "features", "weights")]

    def of_weight(grad: Expr, x: Expr, _weight: Expr) -> Expr:
        return f.where(f.gt(x, 0), 0, f.mul(x, grad))

    return [elementwise(_leaky_relu_grad, *given), elementwise(of_weight, *given)]


# ---- gradients: formulas of the gradient, the tensor, then the attributes ----


def _gelu_grad(grad: Expr, x: Expr, approximate: str = "none") -> Expr:
    return f.mul(grad, (_gelu_tanh_slope if approximate == "tanh" else _gelu_slope)(x))


def _gelu_slope(x: Expr) -> Expr:
    below = f.mul(f.add(f.erf(f.mul(x, math.sqrt(0.5))), 1), 0.5)
    density = f.mul(f.exp(f.mul(f.square(x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return f.add(below, f.mul(x, density))


def _gelu_tanh_slope(x: Expr) -> Expr:
    gate = _near_normal(x)
    inner_slope = f.add(f.mul(f.least(f.square(x), _LARGE), 3 * _CUBIC), _LINEAR)  # times 0 it is 0
    return f.add(gate, f.mul(f.mul(f.mul(x, gate), f.sub(1, gate)), inner_slope))


def _hard_swish_grad(grad: Expr, x: Expr) -> Expr:
    inside = f.where(f.ge(x, 3), grad, f.mul(grad, f.add(f.div(x, 3), 0.5)))
    return f.where(f.le(x, -3), 0, inside)


def _leaky_relu_grad(grad: Expr, x: Expr, negative_slope: float) -> Expr:
    return f.where(f.gt(x, 0), grad, f.mul(grad, negative_slope))


def _threshold_grad(grad: Expr, x: Expr, threshold: float = 0) -> Expr:
    return f.where(f.le(x, threshold), 0, grad)


def _softplus_grad(grad: Expr, x: Expr, beta: float, threshold: float) -> Expr:
    scaled = f.mul(x, beta)
    return f.where(f.gt(scaled, threshold), grad, f.mul(grad, f.sigmoid(scaled)))


def _swish_grad(grad: Expr, x: Expr, scale: float) -> Expr:
    gate = f.sigmoid(f.mul(x, scale))
    return f.mul(f.mul(grad, gate), f.add(f.mul(f.mul(x, scale), f.sub(1, gate)), 1))


def _elu_grad(
    grad: Expr, x: Expr, alpha: float, scale: float, input_scale: float, is_result: bool
) -> Expr:
    factor = alpha * scale
    if is_result:
        below = f.mul(f.mul(grad, input_scale), f.add(x, factor))
    else:
        below = f.mul(f.mul(grad, input_scale * factor), f.exp(f.mul(x, input_scale)))
    return f.where(f.gt(x, 0), f.mul(grad, scale), below)


def _log_sigmoid_grad(grad: Expr, x: Expr) -> Expr:
    power = f.exp(f.neg(f.absolute(x)))
    far = f.div(power, f.add(power, 1))
    return f.mul(grad, f.where(f.lt(x, 0), f.sub(1, far), far))


def _mish_grad(grad: Expr, x: Expr) -> Expr:
    curve = _tanh_of_softplus(x)
    return f.mul(grad, f.add(curve, f.mul(f.mul(x, f.sigmoid(x)), f.sub(1, f.square(curve)))))


_SIXTH = 0.1666666716337204  # in float32, as torch has it for all types


def _outside(grad: Expr, x: Expr, lambd: float) -> Expr:
    return f.where(f.either(f.gt(x, lambd), f.lt(x, -lambd)), grad, 0)


_GRADIENT: dict[str, tuple[Any, ...]] = {
    "GeluGrad": (_gelu_grad, aten.gelu_backward),  # its third input is not read
    "HardShrinkGrad": (_outside, aten.hardshrink_backward, "lambd"),
    "HardSigmoidGrad": (
        lambda grad, x: f.where(f.both(f.gt(x, -3), f.lt(x, 3)), f.mul(grad, _SIXTH), 0),
        aten.hardsigmoid_backward,
    ),
    "LeakyReluGrad": (_leaky_relu_grad, aten.leaky_relu_backward, "negative_slope", False),
    "ReluGrad": (_threshold_grad, aten.threshold_backward, 0),
    "SoftShrinkGrad": (_outside, aten.softshrink_backward, "lambd"),
    "SoftplusV2Grad": (_softplus_grad, aten.softplus_backward, "beta", "threshold"),
    "ThresholdGradV2D": (_threshold_grad, aten.threshold_backward, "threshold"),
}
"""The formula, a torch operator, and what it takes after two tensors; a str is an attribute."""
_GRADIENT_LAST: dict[str, tuple[Any, ...]] = {
    "HardtanhGrad": (
        lambda grad, x, low, high: f.where(f.both(f.gt(x, low), f.lt(x, high)), grad, 0),
        aten.hardtanh_backward,
        "min_val",
        "max_val",
    ),
    "SigmoidGrad": (lambda grad, y: f.mul(f.mul(grad, f.sub(1, y)), y), aten.sigmoid_backward),
    "TanhGrad": (lambda grad, y: f.mul(grad, f.sub(1, f.square(y))), aten.tanh_backward),
}
"""The same for operators whose first input is the tensor and whose second is the gradient."""
_OF_ANY = ("ReluGrad", "ThresholdGradV2D")  # compare and select only

for _type, (_formula, *_call) in (_GRADIENT | _GRADIENT_LAST).items():
    _last = _type in _GRADIENT_LAST
    _row(
        _type,
        core.backward(*_call, order=(1, 0) if _last else (0, 1)),
        _formula,
        *(a for a in _call if isinstance(a, str)),
        last=_last,
        types=NUMBERS if _type in _OF_ANY else FLOATS,
    )


def _swish_grad_kernel(grad: Any, x: Any, _unread: Any, scale: float) -> torch.Tensor:
    if scale == 1:
        return aten.silu_backward.default(grad, x)
    gate = torch.sigmoid(x * scale)
    return grad * gate * (1 + x * scale * (1 - gate))


_row(
    "GeluGradV2",
    call(
        lambda grad, x, approximate: aten.gelu_backward(grad, x, approximate=approximate),
        "approximate",
    ),
    _gelu_grad,
    "approximate",
    out=False,
)
_ELU = ("alpha", "scale", "input_scale", "is_result")
_elu_backward = call(lambda grad, x, *how: aten.elu_backward.default(grad, *how, x), *_ELU)
_row("SwishGrad", call(_swish_grad_kernel, "scale"), _swish_grad, "scale", out=False)
_row("EluGradV2", _elu_backward, _elu_grad, *_ELU, out=False)
_row(
    "LogSigmoidGrad",
    call(lambda grad, x: aten.log_sigmoid_backward.default(grad, x, torch.exp(-x.abs()))),
    _log_sigmoid_grad,
    out=False,
)
_row("HardSwishGrad", call(aten.hardswish_backward.default), _hard_swish_grad, out=False)
_row(
    "MishGrad",
    call(lambda grad, x, _unread: aten.mish_backward.default(grad, x)),
    _mish_grad,
    out=False,
)
