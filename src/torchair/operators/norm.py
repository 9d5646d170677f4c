"""Normalisation over features, groups and batches, and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchair.codegen.loops import Expr
from torchair.codegen.sizes import FLOATS
from torchair.ge.dtypes import DataType, ge_to_torch
from torchair.ge.graph import Fact
from torchair.ge.shapes import numel
from torchair.operators import formulas as f
from torchair.operators.core import Op, TorchKernel, add_row, call, like, native, same_as
from torchair.operators.loops import TYPES, Lowered, LowerOp, as_stored, elementwise

aten = torch.ops.aten
_native_group_norm: Any = torch.native_group_norm
_FULL = (DataType.DT_FLOAT, DataType.DT_DOUBLE)


def _statistic(op: Op, index: int, port: str = "x") -> int:
    """Type of a mean or deviation. For half inputs it depends on the device: tracing knows it."""
    dtype = op.dtype(port)
    return dtype if dtype in _FULL else op.node.outputs[index].dtype


def _as_declared(op: Op, results: Any, first: int = 1) -> tuple[torch.Tensor, ...]:
    """Results with those from `first` on (the statistics) in the types that the node promises."""
    declared = [o.dtype for o in op.node.outputs]
    return tuple(
        r if i < first or declared[i] == DataType.DT_UNDEFINED else r.to(ge_to_torch(declared[i]))
        for i, r in enumerate(results)
    )


def _for_parameters(x: Any, weight: Any, *statistics: Any) -> list[Any]:
    """Statistics as torch wants them: with half inputs on the CPU, of the parameters' type."""
    cpu = x.device.type == "cpu" and x.dtype != weight.dtype
    return [s.to(weight.dtype) if cpu else s for s in statistics]


# ---- layer norm ----


def _layer_norm_rule(op: Op) -> list[Fact]:
    shape, count = op.shape("x"), len(op.ints("normalized_shape"))
    dims = (*shape[: len(shape) - count], *[1] * count)
    statistics = [Fact(_statistic(op, i), dims) for i in (1, 2)]
    return [Fact(op.dtype("x"), shape), *statistics]


def _layer_norm(op: Op) -> TorchKernel:
    dims, eps = op.ints("normalized_shape"), op.attr("epsilon")
    if op.dtype("x") in _FULL:
        return lambda x, gamma, beta: torch.native_layer_norm(x, dims, gamma, beta, eps)
    return lambda x, gamma, beta: _as_declared(
        op, torch.native_layer_norm(x, dims, gamma, beta, eps)
    )


def _layer_norm_grad(dy: Any, x: Any, rstd: Any, mean: Any, gamma: Any) -> Any:
    mean, rstd = _for_parameters(x, gamma, mean, rstd)
    return aten.native_layer_norm_backward(
        dy, x, gamma.shape, mean, rstd, gamma, gamma, [True, True, True]
    )


def _trailing(rank: int, number_of: int) -> tuple[int, ...]:
    return tuple(range(rank - number_of, rank))


def _normalised(o: Op) -> tuple[int, ...]:
    return _trailing(len(o.shape("x")), len(o.ints("normalized_shape")))


def like_gamma(port: str) -> Callable[[Op], tuple[int, ...]]:
    """The last dims of an input, as many as `gamma` has."""
    return lambda o: _trailing(len(o.shape(port)), len(o.shape("gamma")))


_LARGEST = {"f32": torch.finfo(torch.float32).max, "f64": torch.finfo(torch.float64).max}


def inverse_root(eps: float) -> Callable[[Expr], Expr]:
    """1 / sqrt(x + eps)."""
    return lambda v: f.div(1.0, f.sqrt(f.add(v, float(eps))))


def corrected_moments(o: LowerOp, x: Lowered, axes: tuple[int, ...]) -> tuple[Lowered, Lowered]:
    """The mean, and the sum of squared deviations from it, by the corrected two-pass algorithm: the
    second pass also sums up what rounding left in the mean of the first, so that equal elements
    deviate by nothing."""
    first = f.mean(o, x, axes)
    offsets = elementwise(f.sub, x, first)
    total = o.reduce("sum", offsets, axes)
    left = f.divided(total, f.count(x, axes))
    squares = o.reduce("sum", elementwise(f.square, offsets), axes)
    excess = elementwise(f.mul, total, left)
    return elementwise(f.add, first, left), corrected(squares, excess)


def corrected(squares: Lowered, excess: Lowered) -> Lowered:
    """Sums of squares less what they have too much. Where both have overflowed the deviation is
    infinite, and not unknown."""
    largest = _LARGEST["f64" if squares.dtype == "f64" else "f32"]
    return elementwise(lambda s, e: f.most(f.sub(s, f.least(e, largest)), 0.0), squares, excess)


@native(
    "LayerNormV4",
    _layer_norm_rule,
    _layer_norm,
    kind="reduce",
    domain="x",
    reduces=_normalised,
    host=("normalized_shape",),
)
def layer_norm(o: LowerOp) -> list[Lowered]:
    """Elements less their mean over their deviation."""
    x, axes = o.tensor("x"), _normalised(o)
    middle, squares = corrected_moments(o, x, axes)
    centred = elementwise(f.sub, x, middle)
    rstd = elementwise(inverse_root(o.attr("epsilon")), f.divided(squares, f.count(x, axes)))
    y = elementwise(f.mul, centred, rstd)
    for port, combine in (("gamma", f.mul), ("beta", f.add)):
        parameter = o.maybe(port)
        y = y if parameter is None else elementwise(combine, y, parameter)
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate((y, middle, rstd))]


def parameters_wanted(o: Op) -> str | None:
    """Why a gradient is not computed by rows alone."""
    read = any(v.uses for v in o.node.outputs[1:])
    return "gradients of parameters are sums over other dims" if read else None


@native(
    "LayerNormGradV3",
    like("x", "gamma", "gamma"),
    lambda op: _layer_norm_grad,
    kind="reduce",
    domain="x",
    reduces=like_gamma("x"),
    declines=parameters_wanted,
)
def layer_norm_grad(o: LowerOp) -> list[Lowered | None]:
    """The gradient of the input: rstd * (g - mean(g) - hat * mean(g * hat)) where g = dy * gamma
    and hat is the normalised input."""
    axes, rstd = like_gamma("x")(o), o.tensor("rstd")
    grad = elementwise(f.mul, o.tensor("dy"), o.tensor("gamma"))
    hat = elementwise(f.mul, elementwise(f.sub, o.tensor("x"), o.tensor("mean")), rstd)
    middle = f.mean(o, grad, axes)
    along = f.mean(o, elementwise(f.mul, grad, hat), axes)

    def last(g: Expr, m: Expr, h: Expr, a: Expr, r: Expr) -> Expr:
        return f.mul(r, f.sub(f.sub(g, m), f.mul(h, a)))

    return [elementwise(last, grad, middle, hat, along, rstd), None, None]


# ---- root mean square norm ----


def root_facts(op: Op, port: str) -> list[Fact]:
    """The norm of an input, and the inverse root."""
    shape, count = op.shape(port), len(op.shape("gamma"))
    dims = (*shape[: len(shape) - count], *[1] * count)
    wide = DataType.DT_DOUBLE if op.dtype(port) == DataType.DT_DOUBLE else DataType.DT_FLOAT
    return [Fact(op.dtype(port), shape), Fact(wide, dims)]


def _rms_norm(x: Any, gamma: Any, eps: float) -> tuple[torch.Tensor, ...]:
    return aten._fused_rms_norm(x, gamma.shape, gamma, eps)


def _add_rms_norm(x1: Any, x2: Any, gamma: Any, eps: float) -> tuple[torch.Tensor, ...]:
    x = x1 + x2
    return (*_rms_norm(x, gamma, eps), x)


def over_root(o: LowerOp, x: Lowered, port: str) -> list[Lowered]:
    """Elements over the root of the mean of their squares, and one over that root."""
    squares = f.mean(o, elementwise(f.square, x), like_gamma(port)(o))
    rstd = elementwise(inverse_root(o.attr("epsilon")), squares)
    return [elementwise(f.mul, elementwise(f.mul, x, rstd), o.tensor("gamma")), rstd]


@native(
    "RmsNorm",
    lambda op: root_facts(op, "x"),
    call(_rms_norm, "epsilon"),
    kind="reduce",
    domain="x",
    reduces=like_gamma("x"),
)
def rms_norm(o: LowerOp) -> list[Lowered]:
    """The norm and the inverse root."""
    results = over_root(o, o.tensor("x"), "x")
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(results)]


@native(
    "AddRmsNorm",
    lambda op: [*root_facts(op, "x1"), *like("x1")(op)],
    call(_add_rms_norm, "epsilon"),
    kind="reduce",
    domain="x1",
    reduces=like_gamma("x1"),
    declines=f.mixed,
    types=FLOATS,
)
def add_rms_norm(o: LowerOp) -> list[Lowered]:
    """The same of a sum, which it reads as it is stored, and the sum itself."""
    x = as_stored(elementwise(f.add, *f.terms(o, "x1", "x2")))
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate([*over_root(o, x, "x1"), x])]


# ---- group norm, channels first ----


def _group_norm_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    dims = (shape[0], op.attr("num_groups"))
    return [Fact(op.dtype("x"), shape), *(Fact(_statistic(op, i), dims) for i in (1, 2))]


def _sizes(op: Op) -> tuple[Any, ...]:
    if op.attr("data_format") != "NCHW":
        raise ValueError(f"{op.node} has layout {op.attr('data_format')}, only NCHW is known")
    shape = op.shape("x")
    return shape[0], shape[1], numel(shape[2:]), op.attr("num_groups")


def _is_filled(op: Op, port: str, number: float) -> bool:
    """Whether an input is a constant that holds one number everywhere."""
    source = op.node.value_on(port).node
    if source.type == "Fill":
        source = source.value_on("value").node
    return source.type == "Const" and bool((source.attr("value") == number).all())


def _group_norm(op: Op) -> TorchKernel:
    """torch's kernel. Parameters that a model leaves out are constants in GE; torch gets none for
    them: with parameters it rounds otherwise, and equal elements do not give exactly 0."""
    sizes, eps = _sizes(op), op.attr("eps")
    plain = _is_filled(op, "gamma", 1) and _is_filled(op, "beta", 0)

    def run(x: Any, gamma: Any, beta: Any) -> Any:
        parameters = (None, None) if plain else (gamma, beta)
        return _as_declared(op, _native_group_norm(x.contiguous(), *parameters, *sizes, eps))

    return run


def _group_norm_grad_rule(op: Op) -> list[Fact]:
    """With parameters of another type tracing has its own idea of the type of the first."""
    mixed = op["x"].dtype != op["gamma"].dtype
    dx = Fact(op.node.outputs[0].dtype if mixed else op.dtype("x"), op.shape("x"))
    return [dx, *like("gamma", "gamma")(op)]


def _group_norm_grad(op: Op) -> TorchKernel:
    sizes = _sizes(op)

    def run(dy: Any, mean: Any, rstd: Any, x: Any, gamma: Any) -> Any:
        dy, x = dy.contiguous(), x.contiguous()
        statistics = _for_parameters(x, gamma, mean, rstd)
        grads = aten.native_group_norm_backward(dy, x, *statistics, gamma, *sizes, [True] * 3)
        return _as_declared(op, grads, first=0)

    return run


add_row("GroupNormV2", _group_norm_rule, _group_norm)
add_row("GroupNormGrad", _group_norm_grad_rule, _group_norm_grad)


# ---- batch norm; the channel is dim 1 ----


def _batch_norm_rule(op: Op) -> list[Fact]:
    shape = op.shape("x")
    saved = (shape[1],) if op.attr("is_training") else (0,)
    running = [Fact(_statistic(op, i, p), op.shape(p)) for i, p in _RUNNING]
    return [Fact(op.dtype("x"), shape), *running, *(Fact(_statistic(op, i), saved) for i in (3, 4))]


_RUNNING = ((1, "running_mean"), (2, "running_var"))


def _batch_norm(op: Op) -> TorchKernel:
    train, momentum, eps = op.attr("is_training"), op.attr("momentum"), op.attr("epsilon")

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd, running_mean, running_var = aten._native_batch_norm_legit_functional(
            *tensors, train, momentum, eps
        )
        return _as_declared(op, (y, running_mean, running_var, mean, rstd))

    return run


def _batch_norm_grad(dy: Any, x: Any, weight: Any, *rest: Any) -> Any:
    *statistics, train, eps = rest
    *running, mean, rstd = _for_parameters(x, weight, *statistics)
    if train and mean is not statistics[2]:  # narrowed on the way here: find them again
        _, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0, eps)
    arguments = (dy, x, weight, *running, mean, rstd, train, eps, [True, True, True])
    return aten.native_batch_norm_backward(*arguments)


def by_channel(x: Lowered, rank: int) -> Lowered:
    """A vector over channels as a tensor that is broadcast against data of this rank."""
    shape = [1, x.shape[0], *[1] * (rank - 2)]
    return Lowered(shape, x.dtype, lambda place: x.at((place[1],)))


@native(
    "BNInfer",
    same_as("x"),
    call(lambda *args: aten.native_batch_norm(*args[:-1], False, 0.0, args[-1])[0], "epsilon"),
)
def batch_norm_inference(o: LowerOp) -> Lowered:
    """Scale and shift each channel; both are computed from the statistics first."""
    x = o.tensor("x")
    ports = ("scale", "offset", "mean", "variance")
    scale, offset, middle, variance = (by_channel(o.tensor(p), x.rank) for p in ports)
    factor = elementwise(f.mul, scale, elementwise(inverse_root(o.attr("epsilon")), variance))
    shift = elementwise(f.sub, offset, elementwise(f.mul, middle, factor))
    return f.typed(elementwise(f.add, elementwise(f.mul, x, factor), shift), o.out_dtype())


def but_channels(o: Op, port: str = "x") -> tuple[int, ...]:
    """All dims of data but that of the channels."""
    return tuple(d for d in range(len(o.shape(port))) if d != 1)


def _not_plain(o: Op) -> str | None:
    """Data of 16 bits have parameters and statistics of float32 where autocast made them."""
    data = TYPES.get(o.dtype("x"))
    types = {TYPES.get(o.dtype(p)) for p in ("weight", "running_mean", "running_var")}
    plain = types == {"f64" if data == "f64" else "f32"} and data in FLOATS
    return None if plain else f"a batch norm of {data} and {types}"


def _not_training(o: Op) -> str | None:
    return _not_plain(o) if o.attr("is_training") else "statistics that are given"


@native(
    "BatchNormV3",
    _batch_norm_rule,
    _batch_norm,
    kind="reduce",
    domain="x",
    reduces=but_channels,
    declines=_not_training,
)
def batch_norm(o: LowerOp) -> list[Lowered]:
    """Each channel less its mean over its deviation, and the running statistics."""
    x, axes = o.tensor("x"), but_channels(o)
    middle, squares = corrected_moments(o, x, axes)
    centred = elementwise(f.sub, x, middle)
    n = f.count(x, axes)
    rstd = elementwise(inverse_root(o.attr("epsilon")), f.divided(squares, n))
    weight, bias = (by_channel(o.tensor(p), x.rank) for p in ("weight", "bias"))
    y = elementwise(f.add, elementwise(f.mul, elementwise(f.mul, centred, rstd), weight), bias)
    middle, rstd, variance = (f.dropped(t, axes) for t in (middle, rstd, f.divided(squares, n - 1)))
    part = float(o.attr("momentum"))

    def blended(old: Expr, new: Expr) -> Expr:
        return f.add(f.mul(1 - part, old), f.mul(part, new))

    results = (
        y,
        elementwise(blended, o.tensor("running_mean"), middle),
        elementwise(blended, o.tensor("running_var"), variance),
        middle,
        rstd,
    )
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(results)]


@native(
    "BatchNormGradV3",
    like("x", "weight", "weight"),
    call(_batch_norm_grad, "is_training", "epsilon"),
    kind="reduce",
    domain="x",
    reduces=but_channels,
    declines=_not_plain,
)
def batch_norm_grad(o: LowerOp) -> list[Lowered]:
    """Gradients of input, weight and bias: all of them sum over the same dims."""
    x, dy, axes = o.tensor("x"), o.tensor("dy"), but_channels(o)
    train = o.attr("is_training")
    ports = ("weight", *(("save_mean", "save_rstd") if train else ("running_mean", "running_var")))
    weight, middle, rstd = (by_channel(o.tensor(p), x.rank) for p in ports)
    if not train:
        rstd = elementwise(inverse_root(o.attr("epsilon")), rstd)
    hat = elementwise(f.mul, elementwise(f.sub, x, middle), rstd)
    bias_grad = o.reduce("sum", dy, axes)
    weight_grad = o.reduce("sum", elementwise(f.mul, dy, hat), axes)
    dx = dy
    if train:
        n = f.count(x, axes)
        along = elementwise(f.mul, hat, f.divided(weight_grad, n))
        dx = elementwise(f.sub, elementwise(f.sub, dy, f.divided(bias_grad, n)), along)
    dx = elementwise(f.mul, dx, elementwise(f.mul, weight, rstd))
    results = (dx, f.dropped(weight_grad, axes), f.dropped(bias_grad, axes))
    return [f.typed(t, o.out_dtype(k)) for k, t in enumerate(results)]
