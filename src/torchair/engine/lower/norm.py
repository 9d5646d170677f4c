"""Softmax and normalisation over features, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

from torchair.catalog import Op
from torchair.codegen.loops import Expr, op
from torchair.codegen.types import FLOATS
from torchair.engine.lower.core import (
    TYPES,
    LowerOp,
    Place,
    Tensor,
    apply,
    elementwise,
    lowering,
    number,
)
from torchair.engine.lower.reduce import axes_in, count, divided, dropped, mean, square, typed

_add, _sub, _mul = apply("add"), apply("sub"), apply("mul")


def inverse(x: Expr) -> Expr:
    """One divided by a value."""
    return op("div", number(1.0, x), x)


# ---- softmax ----


def _axis(port: str, attr: str = "axes") -> Callable[[Op], tuple[int, ...]]:
    return lambda o: axes_in(o.attr(attr), len(o.shape(port)))


def _one_axis(port: str, attr: str = "axes") -> Callable[[Op], str | None]:
    def declines(o: Op) -> str | None:
        if TYPES.get(o.dtype(port)) not in FLOATS:
            return "softmax of integers"
        return None if len(o.attr(attr)) == 1 else f"softmax over {o.attr(attr)}"

    return declines


def _powers(o: LowerOp, port: str) -> tuple[Tensor, Tensor, Tensor]:
    """Elements less their maximum, the exponentials, and the sum of those."""
    x, axes = o.tensor(port), _axis(port)(o)
    moved = elementwise(_sub, x, o.reduce("max", x, axes, keep=True))
    powers = elementwise(apply("exp"), moved)
    return moved, powers, o.reduce("sum", powers, axes, keep=True)


@lowering(
    "SoftmaxV2", kind="reduce", domain="x", reduces=_axis("x"), declines=_one_axis("x")
)  # fmt: skip
def softmax(o: LowerOp) -> Tensor:
    """Exponentials divided by their sum: one division for each sum. A row of -inf gives NaN."""
    _, powers, total = _powers(o, "x")
    return typed(elementwise(_mul, powers, elementwise(inverse, total)), o.out_dtype())


@lowering(
    "LogSoftmaxV2",
    kind="reduce", domain="logits", reduces=_axis("logits"), declines=_one_axis("logits"),
)  # fmt: skip
def log_softmax(o: LowerOp) -> Tensor:
    """The logarithm of softmax, without computing softmax itself."""
    moved, _, total = _powers(o, "logits")
    return elementwise(_sub, moved, elementwise(apply("log"), total))


@lowering(
    "SoftmaxGrad",
    kind="reduce", domain="softmax", reduces=_axis("softmax"), declines=_one_axis("softmax"),
)  # fmt: skip
def softmax_grad(o: LowerOp) -> Tensor:
    """y * (grad - sum(y * grad))."""
    y, grad, axes = o.tensor("softmax"), o.tensor("grad_softmax"), _axis("softmax")(o)
    weighted = elementwise(_mul, y, grad)
    total = o.reduce("sum", weighted, axes, keep=True)
    return elementwise(lambda a, g, s: op("mul", a, op("sub", g, s)), y, grad, total)


@lowering(
    "LogSoftmaxGrad",
    kind="reduce", domain="grad", reduces=_axis("grad", "axis"), declines=_one_axis("grad", "axis"),
)  # fmt: skip
def log_softmax_grad(o: LowerOp) -> Tensor:
    """grad - exp(y) * sum(grad)."""
    grad, y, axes = o.tensor("grad"), o.tensor("x"), _axis("grad", "axis")(o)
    total = o.reduce("sum", grad, axes, keep=True)
    return elementwise(lambda g, a, s: op("sub", g, op("mul", op("exp", a), s)), grad, y, total)


# ---- layer norm ----


def _trailing(rank: int, number_of: int) -> tuple[int, ...]:
    return tuple(range(rank - number_of, rank))


def _normalised(o: Op) -> tuple[int, ...]:
    return _trailing(len(o.shape("x")), len(o.ints("normalized_shape")))


def _like_gamma(o: Op) -> tuple[int, ...]:
    return _trailing(len(o.shape("x")), len(o.shape("gamma")))


def inverse_root(eps: float) -> Callable[[Expr], Expr]:
    """1 / sqrt(x + eps)."""
    return lambda v: inverse(op("sqrt", op("add", v, number(float(eps), v))))


@lowering("LayerNormV4", kind="reduce", domain="x", reduces=_normalised)
def layer_norm(o: LowerOp) -> list[Tensor]:
    """Elements less their mean over their deviation, in two passes."""
    x, axes = o.tensor("x"), _normalised(o)
    middle = mean(o, x, axes)
    centred = elementwise(_sub, x, middle)
    variance = mean(o, elementwise(square, centred), axes)
    rstd = elementwise(inverse_root(o.attr("epsilon")), variance)
    y = elementwise(_mul, centred, rstd)
    for port, combine in (("gamma", _mul), ("beta", _add)):
        parameter = o.maybe(port)
        y = y if parameter is None else elementwise(combine, y, parameter)
    return [typed(t, o.out_dtype(k)) for k, t in enumerate((y, middle, rstd))]


@lowering("RmsNorm", kind="reduce", domain="x", reduces=_like_gamma)
def rms_norm(o: LowerOp) -> list[Tensor]:
    """Elements over the root of the mean of their squares."""
    x, axes = o.tensor("x"), _like_gamma(o)
    squares = mean(o, elementwise(square, x), axes)
    rstd = elementwise(inverse_root(o.attr("epsilon")), squares)
    y = elementwise(_mul, elementwise(_mul, x, rstd), o.tensor("gamma"))
    return [typed(t, o.out_dtype(k)) for k, t in enumerate((y, rstd))]


def _parameters_wanted(o: Op) -> str | None:
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of parameters are sums over other dims" if read else None


@lowering(
    "LayerNormGradV3",
    kind="reduce", domain="x", reduces=_like_gamma, declines=_parameters_wanted,
)  # fmt: skip
def layer_norm_grad(o: LowerOp) -> list[Tensor | None]:
    """The gradient of the input: rstd * (g - mean(g) - hat * mean(g * hat)) where g = dy * gamma
    and hat is the normalised input."""
    axes, rstd = _like_gamma(o), o.tensor("rstd")
    grad = elementwise(_mul, o.tensor("dy"), o.tensor("gamma"))
    hat = elementwise(_mul, elementwise(_sub, o.tensor("x"), o.tensor("mean")), rstd)
    middle = mean(o, grad, axes)
    along = mean(o, elementwise(_mul, grad, hat), axes)

    def last(g: Expr, m: Expr, h: Expr, a: Expr, r: Expr) -> Expr:
        return op("mul", r, op("sub", op("sub", g, m), op("mul", h, a)))

    return [elementwise(last, grad, middle, hat, along, rstd), None, None]


# ---- batch norm; the channel is dim 1 ----


def by_channel(x: Tensor, rank: int) -> Tensor:
    """A vector over channels as a tensor that is broadcast against data of this rank."""
    shape = [1, x.shape[0], *[1] * (rank - 2)]

    def element(place: Place) -> Expr:
        return x.at((place[1],))

    return Tensor(shape, x.dtype, element)


@lowering("BNInfer")
def batch_norm_inference(o: LowerOp) -> Tensor:
    """Scale and shift each channel; both are computed from the statistics first."""
    x = o.tensor("x")
    ports = ("scale", "offset", "mean", "variance")
    scale, offset, middle, variance = (by_channel(o.tensor(p), x.rank) for p in ports)
    factor = elementwise(_mul, scale, elementwise(inverse_root(o.attr("epsilon")), variance))
    shift = elementwise(_sub, offset, elementwise(_mul, middle, factor))
    return typed(elementwise(_add, elementwise(_mul, x, factor), shift), o.out_dtype())


def _but_channels(o: Op) -> tuple[int, ...]:
    return tuple(d for d in range(len(o.shape("x"))) if d != 1)


def _not_plain(o: Op) -> str | None:
    types = {TYPES.get(o.dtype(p)) for p in ("x", "weight", "running_mean", "running_var")}
    return None if types in ({"f32"}, {"f64"}) else f"a batch norm of {types}"


def _not_training(o: Op) -> str | None:
    return _not_plain(o) if o.attr("is_training") else "statistics that are given"


def _blended(momentum: float) -> Callable[[Expr, Expr], Expr]:
    """A running statistic with a part of it replaced."""
    return lambda old, new: op(
        "add",
        op("mul", number(1 - momentum, old), old),
        op("mul", number(float(momentum), new), new),
    )


@lowering(
    "BatchNormV3", kind="reduce", domain="x", reduces=_but_channels, declines=_not_training
)  # fmt: skip
def batch_norm(o: LowerOp) -> list[Tensor]:
    """Each channel less its mean over its deviation, and the running statistics."""
    x, axes = o.tensor("x"), _but_channels(o)
    middle = mean(o, x, axes)
    centred = elementwise(_sub, x, middle)
    squares = o.reduce("sum", elementwise(square, centred), axes, keep=True)
    n = count(x, axes)
    rstd = elementwise(inverse_root(o.attr("epsilon")), divided(squares, n))
    weight, bias = (by_channel(o.tensor(p), x.rank) for p in ("weight", "bias"))
    y = elementwise(_add, elementwise(_mul, elementwise(_mul, centred, rstd), weight), bias)
    middle, rstd, variance = (dropped(t, axes) for t in (middle, rstd, divided(squares, n - 1)))
    blended = _blended(o.attr("momentum"))
    return [
        y,
        elementwise(blended, o.tensor("running_mean"), middle),
        elementwise(blended, o.tensor("running_var"), variance),
        middle,
        rstd,
    ]


@lowering(
    "BatchNormGradV3", kind="reduce", domain="x", reduces=_but_channels, declines=_not_plain
)  # fmt: skip
def batch_norm_grad(o: LowerOp) -> list[Tensor]:
    """Gradients of input, weight and bias: all of them sum over the same dims."""
    x, dy, axes = o.tensor("x"), o.tensor("dy"), _but_channels(o)
    train = o.attr("is_training")
    ports = ("weight", *(("save_mean", "save_rstd") if train else ("running_mean", "running_var")))
    weight, middle, rstd = (by_channel(o.tensor(p), x.rank) for p in ports)
    if not train:
        rstd = elementwise(inverse_root(o.attr("epsilon")), rstd)
    hat = elementwise(_mul, elementwise(_sub, x, middle), rstd)
    bias_grad = o.reduce("sum", dy, axes, keep=True)
    weight_grad = o.reduce("sum", elementwise(_mul, dy, hat), axes, keep=True)
    dx = dy
    if train:
        n = count(x, axes)
        along = elementwise(_mul, hat, divided(weight_grad, n))
        dx = elementwise(_sub, elementwise(_sub, dy, divided(bias_grad, n)), along)
    dx = elementwise(_mul, dx, elementwise(_mul, weight, rstd))
    return [dx, dropped(weight_grad, axes), dropped(bias_grad, axes)]
