"""Normalisations that a model spells out in simple operators, and the gradient of one without its
sum over rows."""

from __future__ import annotations

from torchair import ge
from torchair.ge import rewrite
from torchair.ge.dtypes import FLOAT_TYPES, DataType
from torchair.ge.graph import Fact, Node, Value, needed_by
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, both_orders, made_by, operands

NORM_PATTERNS = RuleSet()
_PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", "WeightQuantBatchMatmulV2")


def _square_of(value: Value) -> Value | None:
    """x of x * x, of x squared."""
    if made_by(value, "Square"):
        return operands(value)[0]
    if made_by(value, "Mul") and operands(value)[0] is operands(value)[1]:
        return operands(value)[0]
    if made_by(value, "Pow") and rewrite.number(operands(value)[1]) == 2:
        return operands(value)[0]
    return None


def _mean_of(value: Value) -> Value | None:
    """What a mean over the last dim, which stays as a dim of one, is taken of."""
    if not made_by(value, "ReduceMean") or not value.node.attr("keep_dims"):
        return None
    x, axes = operands(value)
    last = (rewrite.rank_of(x) - 1, -1)
    found = axes.content if isinstance(axes.content, tuple) else (axes.content,)
    return x if len(found) == 1 and found[0] in last else None


def _over_root(value: Value, inner: Inner) -> tuple[Value, Value, float] | None:
    """(x, v, eps) of x / sqrt(v + eps), written as a product or as a quotient."""
    if made_by(value, "Mul"):
        forms = [(x, root) for x, root in both_orders(value.node) if made_by(root, "Rsqrt")]
    else:
        quotient = made_by(value, "RealDiv", "Div") and made_by(operands(value)[1], "Sqrt")
        forms = [(operands(value)[0], operands(value)[1])] if quotient else []
    for x, root in forms:
        shifted = operands(root)[0]
        found = rewrite.with_number(shifted, "Add")
        if found is not None:
            inner.add(root, shifted, value)
            return x, *found
    return None


def _check_parameter(parameter: Value, x: Value) -> None:
    if parameter.shape != rewrite.shape_of(x)[-1:]:
        raise Mismatch("a parameter does not have the size of the last dim", parameter)
    if parameter.dtype != x.dtype or x.dtype not in FLOAT_TYPES:
        raise Mismatch("types differ", parameter)


@NORM_PATTERNS("Mul")
def RmsNormFusion(node: Node, inner: Inner) -> Build | None:
    """gamma * (x * rsqrt(mean(x * x) + eps)) -> RmsNorm; the inner product may be cast back."""
    for gamma, scaled in both_orders(node):
        found = _over_root(rewrite.below_cast(scaled), inner)
        if found is not None:
            return _rms_norm(gamma, scaled, *found, inner)
    return None


def _rms_norm(
    gamma: Value, scaled: Value, x: Value, mean: Value, eps: float, inner: Inner
) -> Build | None:
    squares = _mean_of(mean)
    if squares is None:
        return None
    if _square_of(squares) is not x:
        raise Mismatch("the mean is not that of the square of the scaled value", squares)
    centred = made_by(x, "Sub") and _mean_of(operands(x)[1]) is operands(x)[0]
    if centred and any(u.type == "Add" for u in inner.last.outputs[0].users()):
        raise Mismatch("it is part of a layer norm", x)
    inner.add(mean, squares)
    if made_by(scaled, "Cast"):
        inner.add(scaled)
        x = rewrite.below_cast(x)
        if x.dtype != scaled.dtype:
            raise Mismatch("it is cast to another type than it came in", scaled)
    _check_parameter(gamma, x)
    return lambda: ge.RmsNorm(x, gamma, epsilon=eps)[0]


@NORM_PATTERNS("RmsNorm")
def AddRmsNormFusion(node: Node, inner: Inner) -> Build | None:
    """RmsNorm(a + b) -> AddRmsNorm, which gives the sum too."""
    total, gamma = node.values()
    if not made_by(total, "Add"):
        return None
    a, b = operands(total)
    if not (a.shape == b.shape == total.shape and a.dtype == b.dtype == total.dtype):
        raise Mismatch("the terms are broadcast or of different types", total)
    if inner.state.native and any(
        rewrite.below(v, "Reshape").node.type in _PRODUCTS for v in (a, b)
    ):
        raise Mismatch("the sum is computed by the product before it", total)
    if total.node.control or total.node.control_users:
        raise Mismatch("the sum carries control edges", total.node)
    if total.node in needed_by([gamma.node]):
        raise Mismatch("gamma is computed from the sum", gamma)

    def build() -> list[Value]:
        """Norm and inverse root; readers of the sum read that of the new node."""
        y, rstd, again = ge.AddRmsNorm(a, b, gamma, epsilon=node.attr("epsilon"))
        again.learn(total.fact)
        again.attrs, again.device_type = dict(total.attrs), total.device_type
        total.replace_with(again, keep=lambda user: user is node)
        return [y, rstd]

    return build


@NORM_PATTERNS("Add")
def LayerNormFusion(node: Node, inner: Inner) -> Build | None:
    """(x - mean(x)) / sqrt(variance(x) + eps) * gamma + beta -> LayerNormV4"""
    for scaled, beta in both_orders(node):
        if not made_by(scaled, "Mul"):
            continue
        for normal, gamma in both_orders(scaled.node):
            found = _over_root(normal, inner)
            if found is not None and made_by(found[0], "Sub"):
                inner.add(scaled)
                return _layer_norm(*found, gamma, beta, inner)
    return None


def _layer_norm(
    centred: Value, variance: Value, eps: float, gamma: Value, beta: Value, inner: Inner
) -> Build:
    x, mean = operands(centred)
    if _mean_of(mean) is not x:
        raise Mismatch("the subtrahend is not the mean over the last dim", centred)
    inner.add(centred, mean, variance)
    if variance.node.type == "ReduceMeanVariance":
        rank = rewrite.rank_of(x)
        axes = [a % max(rank, 1) for a in variance.node.attr("axes")]
        kept = variance.index == 1 and variance.node.attr("keep_dims")
        if not kept or operands(variance)[0] is not x or axes != [rank - 1]:
            raise Mismatch("the variance is not that over the last dim", variance)
    else:
        squares = _mean_of(variance)
        if squares is None or _square_of(squares) is not centred:
            raise Mismatch("it is not divided by the deviation over the last dim", variance)
        inner.add(squares)
    for parameter in (gamma, beta):
        _check_parameter(parameter, x)
    dims = rewrite.shape_of(gamma)
    if not all(isinstance(d, int) for d in dims):
        raise Mismatch("the size of the last dim is symbolic", gamma)

    def build() -> Value:
        y, *statistics = ge.LayerNormV4(x, list(dims), gamma, beta, epsilon=eps)
        for value in statistics:  # of half types nothing but tracing would know the type
            value.learn(Fact(x.dtype if x.dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT))
        return y

    return build


@NORM_PATTERNS("RmsNormGrad")
def RmsNormGradSplit(node: Node, inner: Inner) -> Build | None:
    """RmsNormGrad -> the gradient of the input alone, and a sum over rows for that of gamma"""
    if not inner.state.native or not node.outputs[1].uses:
        return None
    dy, x, rstd, gamma = node.values()

    def build() -> list[Value]:
        leading = list(range(len(rewrite.shape_of(x)) - len(rewrite.shape_of(gamma))))
        hat = ge.Mul(rewrite.cast(x, rstd.dtype), rstd)
        product = ge.Mul(rewrite.cast(dy, rstd.dtype), hat)
        total = ge.ReduceSum(product, leading) if leading else product
        dx, _ = ge.RmsNormGrad(dy, x, rstd, gamma)
        return [dx, total]

    return build
