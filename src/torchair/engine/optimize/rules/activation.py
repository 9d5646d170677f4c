"""Activations that a model spells out: forms of gelu, gates by a sigmoid, gated halves; and rotary
embeddings, which exchange halves."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchair import ge
from torchair.ge import rewrite
from torchair.ge.graph import Node, Value
from torchair.ge.rewrite import Build, Inner, Mismatch, RuleSet, both_orders, made_by, operands
from torchair.ge.shapes import broadcast

ACTIVATION_PATTERNS = RuleSet()
Polynomial = dict[int, float]  # by power of x

_ROOT = math.sqrt(2 / math.pi)
_INNER: dict[str, tuple[str, Polynomial]] = {  # how `approximate` calls it, what it is taken of
    "Erf": ("none", {1: math.sqrt(0.5)}),
    "Tanh": ("tanh", {1: _ROOT, 3: _ROOT * 0.044715}),
}
_LARGEST = 16  # nodes of a product or a polynomial that is still looked at


def _factors(value: Value, inner: Inner) -> tuple[list[Value], float]:
    """The factors of a product, and of those of its factors that are products themselves; what is
    known of them as one number. A long product is none of ours, and not taken apart to its end."""
    found: list[Value] = []
    known, products = 1.0, [value]
    for product in products:
        scaled = rewrite.with_number(product, "Mul")
        known *= 1.0 if scaled is None else scaled[1]
        for v in [scaled[0]] if scaled is not None else operands(product):
            if made_by(v, "Mul", "Muls") and len(v.uses) == 1 and len(products) < _LARGEST:
                inner.add(v)
                products.append(v)
            else:
                found.append(v)
    return found, known


def _polynomial(value: Value, x: Value, inner: Inner) -> Polynomial | None:
    """A value as a polynomial in x, None if it is none."""
    parts: dict[Value, Polynomial] = {x: {1: 1.0}}
    todo = [value]
    while todo:
        v = todo[-1]
        if v in parts:
            todo.pop()
        elif (known := rewrite.number(v)) is not None:
            parts[v] = {0: known}
        elif v.node.type not in _COMBINE or v.index or len(todo) + len(parts) > _LARGEST:
            return None
        elif missing := [t for t in operands(v) if t not in parts]:
            todo += missing
        else:
            inner.add(v)
            terms = [parts[t] for t in operands(v)]
            if v.node.type == "Muls":
                terms.append({0: float(v.node.attr("value"))})
            made = _COMBINE[v.node.type](terms[0], terms[-1])
            if made is None:
                return None
            parts[v] = made
    return parts[value]


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    return {k: a.get(k, 0) + b.get(k, 0) for k in a.keys() | b.keys()}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    made: Polynomial = {}
    for i, p in a.items():
        for j, q in b.items():
            made[i + j] = made.get(i + j, 0) + p * q
    return made


def _over(a: Polynomial, b: Polynomial) -> Polynomial | None:
    return {k: p / b[0] for k, p in a.items()} if set(b) == {0} and b[0] else None


def _power(base: Polynomial, power: Polynomial) -> Polynomial | None:
    if power not in ({0: 2.0}, {0: 3.0}):
        return None
    square = _times(base, base)
    return square if power == {0: 2.0} else _times(square, base)


_COMBINE: dict[str, Callable[[Polynomial, Polynomial], Polynomial | None]] = {
    "Add": _plus, "Mul": _times, "Muls": _times, "Pow": _power, "Square": _times,
    "RealDiv": _over, "Div": _over,
}  # fmt: skip


def _same(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None:
        return False
    powers = {k for k, p in found.items() if p}
    return powers == set(wanted) and all(_close(found[k], p) for k, p in wanted.items())


def _close(a: float, b: float) -> bool:
    """Whether a constant is meant to be this number."""
    return abs(a - b) <= 1e-6 * abs(b)


@ACTIVATION_PATTERNS("Mul", "Muls")
def GeluFusion(node: Node, inner: Inner) -> Build | None:
    """x / 2 * (1 + erf(x / sqrt(2))), and the form with tanh -> GeluV2"""
    factors, known = _factors(node.outputs[0], inner)
    for gate in factors:
        found = rewrite.with_number(gate, "Add")
        if found is not None and found[1] == 1 and found[0].node.type in _INNER:
            break
    else:
        return None
    curve, kind = found[0], found[0].node.type
    if inner.state.native and kind == "Erf":
        raise Mismatch("generated code of the parts is faster", gate)
    inner.add(gate, curve)
    rest = [f for f in factors if f is not gate]
    if len(rest) != 1:
        raise Mismatch("the two factors are not computed from one value", gate)
    (x,) = rest
    if made_by(x, "RealDiv", "Div") and rewrite.number(operands(x)[1]) == 2:
        inner.add(x)
        x, known = operands(x)[0], known / 2
    if not _close(known, 0.5):
        raise Mismatch("the factor is not one half", gate)
    approximate, polynomial = _INNER[kind]
    if not _same(_polynomial(operands(curve)[0], x, inner), polynomial):
        raise Mismatch(f"the operands of {kind} differ", curve)
    return lambda: ge.GeluV2(x, approximate=approximate)


@ACTIVATION_PATTERNS("Mul")
def SwishFusion(node: Node, inner: Inner) -> Build | None:
    """x * sigmoid(s * x) -> Swish; with s = 1.702 this is the quick form of gelu"""
    for x, gate in both_orders(node):
        if not made_by(gate, "Sigmoid"):
            continue
        inside = operands(gate)[0]
        scaled = (inside, 1.0) if inside is x else rewrite.with_number(inside, "Mul")
        if scaled is None or scaled[0] is not x:
            raise Mismatch("the factor of the sigmoid is not its operand", gate)
        inner.add(gate, *([] if inside is x else [inside]))
        scale = scaled[1]
        return lambda: ge.Swish(x, scale=scale)
    return None


@ACTIVATION_PATTERNS("Mul")
def SwiGluFusion(node: Node, inner: Inner) -> Build | None:
    """silu(first half) * second half -> SwiGlu"""
    gated = [pair for pair in both_orders(node) if made_by(pair[0], "Swish")]
    if not gated:
        return None
    gate, value = gated[0]
    first, second = half_of(operands(gate)[0]), half_of(value)
    if first is None or second is None or first[0] is not second[0]:
        return None
    x, which, dim = first
    if (which, *second[1:]) != (0, 1, dim):
        raise Mismatch("the gate is not the first half", gate)
    if gate.node.attr("scale") != 1:
        raise Mismatch("the gate is scaled", gate)
    inner.add(gate, operands(gate)[0], value)
    return lambda: ge.SwiGlu(x, dim=dim)


def half_of(value: Value) -> tuple[Value, int, int] | None:
    """(x, which half, dim) where a value is one half of another along a dim."""
    node, begin = value.node, None
    if node.type == "SplitV" and len(node.outputs) == 2:
        x, _, dim = node.values()
        axis = dim.content
    elif node.type == "StridedSliceV2" and node.inputs.get("strides") is not None:
        x = node.values()[0]
        begin, end, axis, step = map(rewrite.only, node.values()[1:])
        if begin is None or end is None or step != 1:
            return None
    else:
        return None
    if not isinstance(axis, int) or x.shape is None or value.shape is None:
        return None
    whole, size = x.shape[axis], value.shape[axis]
    if not isinstance(whole, int) or whole != 2 * size:
        return None
    places = {0: 0, -whole: 0, size: 1, -size: 1}
    which = value.index if begin is None else places.get(begin)
    return None if which is None else (x, which, axis % x.rank)


# ---- rotary embeddings ----


@ACTIVATION_PATTERNS("Add")
def RotaryMulFusion(node: Node, inner: Inner) -> Build | None:
    """x * cos + (halves of x exchanged, the new first one negated) * sin -> RotaryMul"""
    for plain, turned in both_orders(node):
        if not (made_by(plain, "Mul") and made_by(turned, "Mul")):
            continue
        for joined, sin in both_orders(turned.node):
            x = _exchanged(joined, inner)
            if x is not None:
                inner.add(plain, turned)
                return _rotary(x, plain, sin)
    return None


def _rotary(x: Value, plain: Value, sin: Value) -> Build:
    cos = next((c for y, c in both_orders(plain.node) if y is x), None)
    if cos is None:
        raise Mismatch("the two terms are of different values", plain)
    for factor in (cos, sin):
        if factor.dtype != x.dtype:
            raise Mismatch("types differ", factor)
        if broadcast(rewrite.shape_of(x), rewrite.shape_of(factor)) != x.shape:
            raise Mismatch("the result is larger than the rotated operand", factor)
    return lambda: ge.RotaryMul(x, cos, sin)


def _exchanged(value: Value, inner: Inner) -> Value | None:
    """x of cat(-second half of x, first half of x) along the last dim."""
    if not made_by(value, "ConcatV2") or len(value.node.values()) != 3:
        return None
    minus, first, axis = value.node.values()
    if not made_by(minus, "Neg") or axis.content not in (-1, rewrite.rank_of(value) - 1):
        return None
    halves = half_of(operands(minus)[0]), half_of(first)
    if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0]:
        return None
    x, last = halves[0][0], rewrite.rank_of(value) - 1
    if (halves[0][1:], halves[1][1:]) != ((1, last), (0, last)):
        return None
    inner.add(value, minus, operands(minus)[0], first)
    return x
