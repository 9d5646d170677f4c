"""Symbolic dimensions: integers or expressions over named sizes, and shape arithmetic on them.

A shape rule written with these works unchanged on plain integers (planning a concrete call) and on
symbols (describing a dynamic graph). sympy is imported on first symbolic use only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

from torchair.torch_private import symbols

Dim = Union[int, "Sym"]
Shape = tuple[Dim, ...]


def _binary(compute: Callable[[Any, Any], Any]) -> Callable[[Sym, Dim], Dim]:
    """A method that computes with expressions."""
    return lambda self, other: _wrap(compute(self.expr, _expr(other)))


def _floor(a: Any, b: Any) -> Any:
    return symbols.FloorDiv(a, b)


class Sym:
    """An integer expression over named sizes. Equality is structural, order is never guessed."""

    __slots__ = ("expr",)

    def __init__(self, expr: Any) -> None:
        self.expr = expr

    __add__ = __radd__ = _binary(operator.add)
    __mul__ = __rmul__ = _binary(operator.mul)
    __sub__ = _binary(operator.sub)
    __rsub__ = _binary(lambda a, b: b - a)
    __floordiv__ = _binary(_floor)
    __rfloordiv__ = _binary(lambda a, b: _floor(b, a))
    __mod__ = _binary(lambda a, b: a - _floor(a, b) * b)

    def __neg__(self) -> Dim:
        return _wrap(-self.expr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sym) and self.expr == other.expr

    def __hash__(self) -> int:
        return hash(self.expr)

    def __repr__(self) -> str:
        return str(self.expr)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of the symbolic size {self} is not known at compile time")

    def __int__(self) -> int:
        raise TypeError(f"the symbolic size {self} has no value at compile time")

    __index__ = __int__


def _expr(dim: Dim) -> Any:
    if isinstance(dim, Sym):
        return dim.expr
    import sympy

    return sympy.Integer(dim)


def _wrap(expr: Any) -> Dim:
    return int(expr) if expr.is_Integer else Sym(expr)


def symbol(name: str) -> Sym:
    """A fresh named size: a positive integer."""
    import sympy

    return Sym(sympy.Symbol(name, integer=True, positive=True))


def from_torch(dim: Any) -> Dim:
    """A dimension from an int or a torch.SymInt."""
    if isinstance(dim, int):
        return dim
    expr = dim.node.expr
    return int(expr) if getattr(expr, "is_Integer", False) else Sym(expr)


def is_static(shape: Iterable[Dim] | None) -> bool:
    """Whether every dimension is a known integer."""
    return shape is not None and all(isinstance(d, int) for d in shape)


def on_wire(shape: Sequence[Dim] | None) -> list[int]:
    """Dims as dumps and files hold them: -1 for a symbol, a lone -2 for unknown rank."""
    if shape is None:
        return [-2]
    return [d if isinstance(d, int) else -1 for d in shape]


def numel(shape: Iterable[Dim]) -> Dim:
    """Product of the dimensions."""
    return math.prod(shape)


def dim_max(a: Dim, b: Dim) -> Dim:
    """Larger of two dims; symbolic when undecided."""
    return _extreme("Max", a, b)


def dim_min(a: Dim, b: Dim) -> Dim:
    """Smaller of two dims; symbolic when undecided."""
    return _extreme("Min", a, b)


def _extreme(kind: str, a: Dim, b: Dim) -> Dim:
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        return max(a, b) if kind == "Max" else min(a, b)
    if a == b:
        return a
    return _wrap(getattr(symbols.functions, kind)(_expr(a), _expr(b)))


def broadcast(*shapes: Sequence[Dim]) -> Shape:
    """Shape of an elementwise result. Symbolic dims that differ in text are assumed equal at run
    time (guards ensure it), a known size other than 1 wins over a symbol."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for i, d in enumerate(shape, rank - len(shape)):
            result[i] = _broadcast_dim(result[i], d)
    return tuple(result)


def _broadcast_dim(a: Dim, b: Dim) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        raise ValueError(f"sizes {a} and {b} do not broadcast")
    return a if isinstance(a, int) else b


def contiguous_strides(shape: Sequence[Dim]) -> Shape:
    """Row-major strides; a zero-size dim counts as one, as in torch."""
    strides: list[Dim] = []
    step: Dim = 1
    for d in reversed(shape):
        strides.append(step)
        step = step * (1 if d == 0 else d)
    return tuple(reversed(strides))


def equal_unless_empty(a: Dim, b: Dim) -> bool:
    """Whether two strides are equal where no dim is 0: tracing counts such a dim as one."""
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        return a == b

    def counts_as_one(e: Any) -> bool:
        return type(e).__name__ == "Max" and len(e.args) == 2 and 1 in e.args

    def without_one(e: Any) -> Any:
        return next(x for x in e.args if x != 1)

    left, right = (_expr(d).replace(counts_as_one, without_one) for d in (a, b))
    return left == right or bool((left - right).expand() == 0)


def free_symbols(dims: Iterable[Any]) -> set[str]:
    """Names of all symbols in the given dims."""
    return {s.name for d in dims if isinstance(d, Sym) for s in d.expr.free_symbols}


def compile_dims(dims: Sequence[Any], names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """A Python function of the named sizes returning the dims as concrete numbers."""
    if all(not isinstance(d, Sym) for d in dims):
        fixed = tuple(dims)
        return lambda *_: fixed
    import torch

    printer = symbols.PythonPrinter()
    aliases = {s: f"v{i}" for i, s in enumerate(names)}
    texts = []
    for d in dims:
        if not isinstance(d, Sym):
            texts.append(repr(d))
            continue
        import sympy

        renamed = {s: sympy.Symbol(aliases[s.name], **s.assumptions0) for s in d.expr.free_symbols}
        texts.append(printer.doprint(d.expr.xreplace(renamed)))
    source = f"lambda {', '.join(aliases.values())}: ({', '.join(texts)},)"
    known = {"max": max, "min": min, "abs": abs, "round": round, "int": int, "float": float}
    known |= {"inf": math.inf, "nan": math.nan}  # as floats print themselves
    return eval(source, {"math": math, "torch": torch, "__builtins__": known})


def evaluate(dims: Sequence[Any], env: Mapping[str, int]) -> tuple[Any, ...]:
    """The dims under an assignment of sizes to symbol names."""
    names = sorted(free_symbols(dims))
    return compile_dims(dims, names)(*(env[n] for n in names))
