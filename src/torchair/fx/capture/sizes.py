"""Sizes as arguments of new calls: numbers, or nodes that compute them from the graph's inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from torchair.fx.capture.values import add_call, tensor_of
from torchair.ge.shapes import from_torch

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


class SizeNodes:
    """Makes nodes for symbolic sizes, each once, right behind the placeholders."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[Any, Any] = {}
        self._placeholders = graph.find_nodes(op="placeholder")
        self._last: Any = self._placeholders[-1] if self._placeholders else None
        for node in self._placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                self._nodes.setdefault(value.node.expr, node)

    def __repr__(self) -> str:
        return str({str(expr): str(node) for expr, node in self._nodes.items()})

    def of(self, size: Any) -> int | fx.Node | None:
        """A size as an argument, None where the inputs do not tell it."""
        known = from_torch(size)
        return known if isinstance(known, int) else self._argument(known.expr)

    def all_of(self, sizes: Any) -> list[int | fx.Node] | None:
        """Several sizes, None if one of them is not known."""
        found = [self.of(size) for size in sizes]
        return None if any(size is None for size in found) else found  # type: ignore[return-value]

    def _argument(self, expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr not in self._nodes:
            self._nodes[expr] = self._symbol(expr) if expr.is_Symbol else self._computed(expr)
        return self._nodes[expr]

    def _symbol(self, expr: Any) -> fx.Node | None:
        for node in self._placeholders:
            tensor = tensor_of(node)
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == expr:
                    return self._call(torch.ops.aten.sym_size.int, node, dim)
        return None

    def _computed(self, expr: Any) -> fx.Node | None:
        function = _OPERATORS.get(type(expr).__name__)
        parts = [self._argument(part) for part in expr.args]
        if function is None or any(part is None for part in parts):
            return None
        return reduce(lambda a, b: self._call(function, a, b), parts)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with self._graph.inserting_after(self._last):
            value = function(*values)
            self._last = add_call(self._graph, function, args, like=self._last, value=value)
        return self._last
