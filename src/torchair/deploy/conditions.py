"""Conditions on sizes, as text: `s0 >= 2 and s0 % 8 == 0`. They are data that may come from a file:
read into a list of steps over known operators, never executed as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_HIGHEST = 16  # power of an integer: a text may come from a file


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is int and type(exponent) is int and 0 <= exponent <= _HIGHEST:
        return base**exponent
    return math.pow(base, exponent)


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Div: operator.truediv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.Pow: _power,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_CALLS: dict[str, Callable[..., Any]] = {
    "max": max, "min": min, "abs": abs, "round": round, "torch.sym_float": float,
    "torch._sym_sqrt": math.sqrt, "math.floor": math.floor, "math.ceil": math.ceil,
    "math.trunc": math.trunc,
}  # fmt: skip
"""Functions by the names that tracing writes."""
_BOOL: dict[type, Callable[..., Any]] = {
    ast.And: lambda *values: all(values),
    ast.Or: lambda *values: any(values),
}


class Condition:
    """An expression over named sizes. ValueError for a text that holds anything else."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError as e:
            raise ValueError(f"not a condition on sizes: {text!r}") from e
        self._steps = self._flat(tree)
        self.names = {value for value, count in self._steps if count < 0}

    def _flat(self, tree: ast.expr) -> list[tuple[Any, int]]:
        """Constants (count 0), names (-1) and functions of `count` values, in postfix order."""
        steps: list[tuple[Any, int]] = []
        stack: list[ast.expr] = [tree]
        while stack:  # a node before its operands, from the right; reversed, that is postfix
            node = stack.pop()
            step, operands = self._read(node)
            steps.append(step)
            stack += operands
        return steps[::-1]

    def _read(self, node: ast.expr) -> tuple[tuple[Any, int], list[ast.expr]]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            return (node.value, 0), []
        if isinstance(node, ast.Name):
            return (node.id, -1), []
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return (_BINARY[type(node.op)], 2), [node.left, node.right]
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
            return (_BINARY[type(node.ops[0])], 2), [node.left, node.comparators[0]]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return (_UNARY[type(node.op)], 1), [node.operand]
        if isinstance(node, ast.BoolOp):
            return (_BOOL[type(node.op)], len(node.values)), list(node.values)
        if isinstance(node, ast.Call):
            called = _CALLS.get(ast.unparse(node.func))
            if called is not None and node.args and not node.keywords:
                return (called, len(node.args)), list(node.args)
        raise ValueError(f"not a condition on sizes: {self.text!r}")

    def value(self, sizes: Mapping[str, int]) -> Any:
        """What the expression comes to."""
        stack: list[Any] = []
        for what, count in self._steps:
            if count < 0:
                stack.append(sizes[what])
            elif count == 0:
                stack.append(what)
            else:
                operands = stack[-count:]
                del stack[-count:]
                stack.append(what(*operands))
        return stack[0]
