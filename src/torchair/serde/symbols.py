"""Symbolic dims as text, and back by a parser that only knows integer arithmetic.

The text comes from files, so nothing of it is ever handed to eval or sympify.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torchair.errors import SerializationError
from torchair.ge.shapes import Dim, Shape, Sym, symbol

_LONGEST = 4096
_HIGHEST_POWER = 64
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STAND_IN = re.compile(r"\b_q(\d+)_\b")
_UNBACKED = re.compile(r"u\d+")  # torch's names of sizes that may be zero


def dims_text(shape: Sequence[Dim], stem: str) -> str:
    """Dims joined by commas, e.g. `s0,64,s0*2`.

    An expression beyond the parser below becomes a plain symbol named after `stem` and its place.
    """
    return ",".join(_dim_text(d, f"{stem}_d{i}") for i, d in enumerate(shape))


def _dim_text(dim: Dim, fallback: str) -> str:
    if isinstance(dim, int):
        return str(dim)
    text = _expr_text(dim.expr)
    return text if _survives(text) else _name_text(fallback)


def _expr_text(expr: Any) -> str:
    strange = sorted(s.name for s in expr.free_symbols if _name_text(s.name) != s.name)
    if not strange:
        return str(expr)
    import sympy

    renamed = {
        s: sympy.Symbol(f"_q{strange.index(s.name)}_", **s.assumptions0)
        for s in expr.free_symbols
        if s.name in strange
    }
    return _STAND_IN.sub(lambda m: repr(strange[int(m[1])]), str(expr.xreplace(renamed)))


def _name_text(name: str) -> str:
    plain = _PLAIN_NAME.fullmatch(name) and not keyword.iskeyword(name)
    return name if plain and not _STAND_IN.fullmatch(name) else repr(name)


@lru_cache(1024)
def _survives(text: str) -> bool:
    try:
        (dim,) = parse_dims(text)
    except SerializationError:
        return False
    return isinstance(dim, Sym) and _expr_text(dim.expr) == text


@lru_cache(1024)
def parse_dims(text: str) -> Shape:
    """The dims of a text written by `dims_text`; SerializationError for anything else."""
    if len(text) > _LONGEST:
        raise SerializationError(f"a shape text of {len(text)} characters is too long")
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
        assert isinstance(tree, ast.List), "more than a list of dims"
        return tuple(_dim(_evaluate(item)) for item in tree.elts)
    except SerializationError:
        raise
    except Exception as error:  # whatever ast or sympy object to, the text is no shape
        raise SerializationError(f"{text!r} is not a shape: {error}") from error


def _dim(value: Any) -> Dim:
    if isinstance(value, int):
        return value
    return int(value) if value.is_Integer else Sym(value)


def _evaluate(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Constant) and type(tree.value) is int and abs(tree.value) < 2**63:
        return tree.value
    if isinstance(tree, ast.Name):
        return _symbol(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return _symbol(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_evaluate(tree.operand)
    if isinstance(tree, ast.BinOp):
        return _binary(type(tree.op), _evaluate(tree.left), _evaluate(tree.right))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        return _call(tree.func.id, [_evaluate(a) for a in tree.args])
    raise SerializationError(f"a shape holds {type(tree).__name__}, not integer arithmetic")


def _symbol(name: str) -> Any:
    if not _UNBACKED.fullmatch(name):
        return symbol(name).expr
    import sympy

    return sympy.Symbol(name, integer=True)


def _binary(operator: type[ast.operator], a: Any, b: Any) -> Any:
    if operator is ast.Pow:
        if not isinstance(b, int) or not 0 <= b <= _HIGHEST_POWER or isinstance(a, int):
            raise SerializationError(f"a shape holds the power {a}**{b}")
        return a**b
    arithmetic: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
        ast.Add: lambda x, y: x + y,
        ast.Sub: lambda x, y: x - y,
        ast.Mult: lambda x, y: x * y,
    }
    if operator in arithmetic:
        return arithmetic[operator](a, b)
    names = {ast.FloorDiv: "FloorDiv", ast.Mod: "PythonMod"}
    if operator not in names:
        raise SerializationError(f"a shape holds the operator {operator.__name__}")
    return _call(names[operator], [a, b])


def _call(name: str, args: list[Any]) -> Any:
    import sympy
    import torch.utils._sympy.functions as functions

    if name not in ("FloorDiv", "Mod", "PythonMod", "Max", "Min"):
        raise SerializationError(f"a shape calls {name}: only FloorDiv, Mod, Max and Min are read")
    return getattr(functions, name)(*(sympy.sympify(a, strict=True) for a in args))
