"""Activations and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.catalog.core import Fact, Kernel, Op, Trait, add_row, fixed, like_first
from torchair.catalog.elementwise import EW, scalar

aten = torch.ops.aten
_nn: Any = torch._C._nn


def _relu(x: torch.Tensor, out: Any = None) -> torch.Tensor:
    return torch.clamp_min(x, 0, out=out)  # what torch.relu calls, with a place for the result


# ---- forward: a torch function, then the attributes it takes after the tensor ----

_FORWARD: dict[str, tuple[Any, ...]] = {
    "Elu": (_nn.elu, "alpha", "scale", "input_scale"),
    "Gelu": (_nn.gelu,),
    "HardShrink": (torch.hardshrink, "lambd"),
    "HardSwish": (_nn.hardswish,),
    "LeakyRelu": (_nn.leaky_relu, "negative_slope"),
    "LogSigmoid": (_nn.log_sigmoid,),
    "Mish": (_nn.mish,),
    "Relu": (_relu,),
    "SoftShrink": (_nn.softshrink, "lambd"),
    "SoftplusV2": (_nn.softplus, "beta", "threshold"),
}


def _forward(fn: Kernel, *attrs: str) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        values = [op.attr(a) for a in attrs]
        return lambda x, out=None: fn(x, *values, out=out)

    return make if attrs else fixed(fn)


for _type, _call in _FORWARD.items():
    add_row(_type, like_first, _forward(*_call), EW, out=True)


def _gelu(op: Op) -> Kernel:
    approximate = op.attr("approximate")
    return lambda x, out=None: _nn.gelu(x, approximate=approximate, out=out)


add_row("GeluV2", like_first, _gelu, EW, out=True)


def _swish(op: Op) -> Kernel:
    scale = op.attr("scale")
    if scale == 1:
        return _nn.silu
    return lambda x, out=None: torch.mul(x, torch.sigmoid(x * scale), out=out)


add_row("Swish", like_first, _swish, EW, out=True)


def _hard_sigmoid(op: Op) -> Kernel:
    alpha, beta = op.attr("alpha"), op.attr("beta")
    if (alpha, beta) == (0.16666666, 0.5):
        return _nn.hardsigmoid
    return lambda x, out=None: torch.clamp(x * alpha + beta, 0, 1, out=out)


add_row("HardSigmoid", like_first, _hard_sigmoid, EW, out=True)


def _threshold(op: Op) -> Kernel:
    limit, value = scalar(op, "threshold"), scalar(op, "value")

    def run(x: Any, threshold: Any, other: Any, out: Any = None) -> Any:
        replacement = 0 if other is None else value(other)
        return torch.threshold(x, limit(threshold), replacement, out=out)

    return run


add_row("ThresholdV2", like_first, _threshold, EW, out=True)
add_row("CeluV2", like_first, lambda op: lambda x: torch.celu(x, op.attr("alpha")), EW)


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() <= 1:
        return torch.prelu(x, weight)
    return aten._prelu_kernel.default(x, weight)


def _prelu_grad_rule(op: Op) -> list[Fact]:
    fact = Fact(op.dtype("features"), op.shape("features"))
    return [fact, fact]


add_row("PRelu", like_first, fixed(_prelu))
add_row("PReluGrad", _prelu_grad_rule, fixed(aten._prelu_kernel_backward.default))


# ---- halves of one axis ----


def _glu_rule(op: Op) -> Fact:
    dims = list(op.shape("x"))
    dims[op.attr("dim")] = dims[op.attr("dim")] // 2
    return Fact(op.dtype("x"), tuple(dims))


def _glu(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda x, out=None: _nn.glu(x, dim, out=out)


def _glu_grad(op: Op) -> Kernel:
    dim = op.attr("dim")
    return lambda grad, x: aten.glu_backward.default(grad, x, dim)


add_row("GLU", _glu_rule, _glu, out=True)
add_row("GLUGrad", lambda op: Fact(op.dtype("x"), op.shape("x")), _glu_grad)


# ---- gradients: a torch operator and what it takes after two tensors; a str is an attribute ----

_GRADIENT: dict[str, tuple[Any, ...]] = {
    "GeluGrad": (aten.gelu_backward,),  # its third input is not read
    "HardShrinkGrad": (aten.hardshrink_backward, "lambd"),
    "HardSigmoidGrad": (aten.hardsigmoid_backward,),
    "LeakyReluGrad": (aten.leaky_relu_backward, "negative_slope", False),
    "ReluGrad": (aten.threshold_backward, 0),
    "SoftShrinkGrad": (aten.softshrink_backward, "lambd"),
    "SoftplusV2Grad": (aten.softplus_backward, "beta", "threshold"),
    "ThresholdGradV2D": (aten.threshold_backward, "threshold"),
}
# The same for operators whose first input is the tensor and whose second is the gradient.
_GRADIENT_LAST: dict[str, tuple[Any, ...]] = {
    "HardtanhGrad": (aten.hardtanh_backward, "min_val", "max_val"),
    "SigmoidGrad": (aten.sigmoid_backward,),
    "TanhGrad": (aten.tanh_backward,),
}


def _gradient(packet: Any, *arguments: Any, last: bool = False) -> Callable[[Op], Kernel]:
    def make(op: Op) -> Kernel:
        values = [op.attr(a) if isinstance(a, str) else a for a in arguments]

        def run(first: Any, second: Any, _unread: Any = None, out: Any = None) -> Any:
            grad, x = (second, first) if last else (first, second)
            if out is None:
                return packet.default(grad, x, *values)
            return packet.grad_input(grad, x, *values, grad_input=out)

        return run

    return make


for _type, _call in _GRADIENT.items():
    add_row(_type, like_first, _gradient(*_call), EW, out=True)
for _type, _call in _GRADIENT_LAST.items():
    add_row(_type, like_first, _gradient(*_call, last=True), EW, out=True)


def _gelu_grad(op: Op) -> Kernel:
    approximate = op.attr("approximate")
    return lambda grad, x: aten.gelu_backward.default(grad, x, approximate=approximate)


def _swish_grad(op: Op) -> Kernel:
    scale = op.attr("scale")

    def run(grad: torch.Tensor, x: torch.Tensor, _unread: Any) -> torch.Tensor:
        if scale == 1:
            return aten.silu_backward.default(grad, x)
        gate = torch.sigmoid(x * scale)
        return grad * gate * (1 + x * scale * (1 - gate))

    return run


def _elu_grad(op: Op) -> Kernel:
    values = [op.attr(a) for a in ("alpha", "scale", "input_scale", "is_result")]
    return lambda grad, x: aten.elu_backward.default(grad, *values, x)


def _log_sigmoid_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return aten.log_sigmoid_backward.default(grad, x, torch.exp(-x.abs()))


def _mish_grad(grad: torch.Tensor, x: torch.Tensor, _unread: Any) -> torch.Tensor:
    return aten.mish_backward.default(grad, x)


for _type, _kernel in (
    ("GeluGradV2", _gelu_grad),
    ("SwishGrad", _swish_grad),
    ("EluGradV2", _elu_grad),
    ("LogSigmoidGrad", fixed(_log_sigmoid_grad)),
    ("HardSwishGrad", fixed(aten.hardswish_backward.default)),
    ("MishGrad", fixed(_mish_grad)),
):
    add_row(_type, like_first, _kernel, Trait.ELEMENTWISE)
