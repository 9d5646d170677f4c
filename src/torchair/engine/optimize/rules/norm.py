"""Normalisations that a model spells out in simple operators, and the gradient of one without its
sum over rows."""

from __future__ import annotations

from torchair import ge
from torchair.engine.optimize.passes.ordering import needed_by
from torchair.ge.dtypes import FLOAT_TYPES, DataType
from torchair.ge.graph import Fact, Node, Value
from torchair.ge.rewrite import (
    Build,
    Inner,
    Mismatch,
    Rule,
    below,
    below_cast,
    both_orders,
    cast,
    made_by,
    mean_of,
    operands,
    shape_of,
    square_of,
    with_number,
)

_PRODUCTS = ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2", "WeightQuantBatchMatmulV2")


def _inverse_root(value: Value, inner: Inner) -> tuple[Value, float] | None:
    """(v, eps) of 1 / sqrt(v + eps)."""
    if not made_by(value, "Rsqrt"):
        return None
    shifted = operands(value)[0]
    found = with_number(shifted, "Add")
    if found is not None:
        inner.add(value, shifted)
    return found


def _over_root(value: Value, inner: Inner) -> tuple[Value, Value, float] | None:
    """(x, v, eps) of x / sqrt(v + eps), written as a product or as a quotient."""
    if made_by(value, "Mul"):
        for x, other in both_orders(value.node):
            found = _inverse_root(other, inner)
            if found is not None:
                inner.add(value)
                return x, *found
    if made_by(value, "RealDiv", "Div"):
        x, root = operands(value)
        found = with_number(operands(root)[0], "Add") if made_by(root, "Sqrt") else None
        if found is not None:
            inner.add(value, root, operands(root)[0])
            return x, *found
    return None


def _check_parameter(parameter: Value, x: Value) -> None:
    if parameter.shape != shape_of(x)[-1:]:
        raise Mismatch("a parameter does not have the size of the last dim", parameter)
    if parameter.dtype != x.dtype or x.dtype not in FLOAT_TYPES:
        raise Mismatch("types differ", parameter)


class RmsNormFusion(Rule):
    """gamma * (x * rsqrt(mean(x * x) + eps)) -> RmsNorm; the inner product may be cast back."""

    last = ("Mul",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        for gamma, scaled in both_orders(node):
            found = _over_root(below_cast(scaled), inner)
            if found is not None:
                return self._norm(gamma, scaled, *found, inner)
        return None

    def _norm(
        self, gamma: Value, scaled: Value, x: Value, mean: Value, eps: float, inner: Inner
    ) -> Build | None:
        squares = mean_of(mean)
        if squares is None:
            return None
        if square_of(squares) is not x:
            raise Mismatch("what is averaged is not the square of what is scaled", squares)
        if _is_centred(x) and any(u.type == "Add" for u in inner.last.outputs[0].users()):
            raise Mismatch("it is part of a layer norm", x)
        inner.add(mean, squares)
        if made_by(scaled, "Cast"):
            inner.add(scaled)
            x = below_cast(x)
            if x.dtype != scaled.dtype:
                raise Mismatch("it is cast to another type than it came in", scaled)
        _check_parameter(gamma, x)
        return lambda: ge.RmsNorm(x, gamma, epsilon=eps)[0]


def _is_centred(value: Value) -> bool:
    """Whether a value is another one less its mean."""
    return made_by(value, "Sub") and mean_of(operands(value)[1]) is operands(value)[0]


class AddRmsNormFusion(Rule):
    """RmsNorm(a + b) -> AddRmsNorm, which gives the sum too."""

    last = ("RmsNorm",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        total, gamma = node.values()
        if not made_by(total, "Add"):
            return None
        a, b = operands(total)
        if not (a.shape == b.shape == total.shape and a.dtype == b.dtype == total.dtype):
            raise Mismatch("the terms are broadcast or of different types", total)
        if inner.state.native and any(below(v, "Reshape").node.type in _PRODUCTS for v in (a, b)):
            raise Mismatch("the sum is computed by the product before it", total)
        if total.node.control or total.node.control_users:
            raise Mismatch("the sum carries control edges", total.node)
        if total.node in needed_by([gamma.node]):
            raise Mismatch("gamma is computed from the sum", gamma)
        return lambda: _with_sum(node, total, (a, b, gamma))


def _with_sum(node: Node, total: Value, inputs: tuple[Value, Value, Value]) -> list[Value]:
    """Norm and inverse root; whoever reads the sum reads that of the new node."""
    y, rstd, again = ge.AddRmsNorm(*inputs, epsilon=node.attr("epsilon"))
    again.learn(total.fact)
    again.attrs, again.device_type = dict(total.attrs), total.device_type
    total.replace_with(again, keep=lambda user: user is node)
    return [y, rstd]


def _layer_norm(x: Value, dims: list[int], gamma: Value, beta: Value, eps: float) -> Value:
    y, *statistics = ge.LayerNormV4(x, dims, gamma, beta, epsilon=eps)
    for value in statistics:  # of half types nothing but tracing would know the type
        value.learn(Fact(x.dtype if x.dtype == DataType.DT_DOUBLE else DataType.DT_FLOAT))
    return y


class LayerNormFusion(Rule):
    """(x - mean(x)) / sqrt(variance(x) + eps) * gamma + beta -> LayerNormV4"""

    last = ("Add",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        for scaled, beta in both_orders(node):
            if not made_by(scaled, "Mul"):
                continue
            for normal, gamma in both_orders(scaled.node):
                found = _over_root(normal, inner)
                if found is not None and made_by(found[0], "Sub"):
                    inner.add(scaled)
                    return self._norm(*found, gamma, beta, inner)
        return None

    def _norm(
        self, centred: Value, variance: Value, eps: float, gamma: Value, beta: Value, inner: Inner
    ) -> Build:
        x, mean = operands(centred)
        if mean_of(mean) is not x:
            raise Mismatch("what is subtracted is not the mean over the last dim", centred)
        inner.add(centred, mean)
        if variance.node.type == "ReduceMeanVariance":
            self._check_variance(x, variance)
            inner.add(variance)
        else:
            squares = mean_of(variance)
            if squares is None or square_of(squares) is not centred:
                raise Mismatch("it is not divided by the deviation over the last dim", variance)
            inner.add(variance, squares)
        for parameter in (gamma, beta):
            _check_parameter(parameter, x)
        dims = shape_of(gamma)
        if not all(isinstance(d, int) for d in dims):
            raise Mismatch("the size of the last dim is symbolic", gamma)
        return lambda: _layer_norm(x, list(dims), gamma, beta, eps)

    def _check_variance(self, x: Value, variance: Value) -> None:
        node = variance.node
        axes = [a % max(x.rank, 1) for a in node.attr("axes")]
        whole = operands(variance)[0] is x and variance.index == 1 and node.attr("keep_dims")
        if not whole or axes != [x.rank - 1]:
            raise Mismatch("the variance is not that over the last dim", variance)


class RmsNormGradSplit(Rule):
    """RmsNormGrad -> the gradient of the input alone, and a sum over rows for that of gamma"""

    last = ("RmsNormGrad",)

    def find(self, node: Node, inner: Inner) -> Build | None:
        if not inner.state.native or not node.outputs[1].uses:
            return None
        return lambda: self._split(node)

    def _split(self, node: Node) -> list[Value]:
        dy, x, rstd, gamma = node.values()
        leading = list(range(len(shape_of(x)) - len(shape_of(gamma))))
        hat = ge.Mul(cast(x, rstd.dtype), rstd)
        product = ge.Mul(cast(dy, rstd.dtype), hat)
        total = ge.ReduceSum(product, leading) if leading else product
        dx, _ = ge.RmsNormGrad(dy, x, rstd, gamma)
        return [dx, total]


NORM_PATTERNS = (RmsNormFusion(), AddRmsNormFusion(), LayerNormFusion(), RmsNormGradSplit())
