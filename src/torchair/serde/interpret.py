"""Reads the `py` form of a graph: walks the syntax tree and calls builders, and nothing else.

A dump is a program, but it may come from anywhere, so it is never executed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchair.errors import SerializationError
from torchair.ge import custom_op
from torchair.ge.attrs import KINDS, Attr
from torchair.ge.build import Cast, Clone, Data, builder, const_tensor
from torchair.ge.graph import Fact, Graph, Node, Origin, Value
from torchair.ge.shapes import symbol
from torchair.serde.literals import evaluate, refusal
from torchair.serde.reader import default_content

HEADER = """\
# -*- coding: utf-8 -*-
from torch import tensor
from torchair._ge_concrete_graph import ge_apis as ge
from torchair.ge._ge_graph import get_default_ge_graph
"""
_IMPORTS = {ast.unparse(s) for s in ast.parse(HEADER).body}
_FACTS: dict[str, type] = {"dtype": int, "shape": tuple, "layout": str, "device_type": str}


@unset_fake_temporarily()
def load(
    text: str,
    infer: Callable[[Node], Sequence[Fact]] | None = None,
    name: str = "",
    *,
    file: str | os.PathLike[str] | None = None,
) -> Graph:
    """The graph that a dump builds. SerializationError with the line number for anything that is
    not a dump, so that loading an unknown file is safe."""
    graph = Graph(name, infer=infer)
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise SerializationError(
            f"this is not a graph dump: {error}",
            file=file,
            position=None if line is None else f"line {line}",
        ) from error
    with graph:
        _Interpreter(graph, text.replace("\r", "").split("\n"), file).run(statements)
    graph.origin = None
    return graph


class _Interpreter:
    """Variables of one dump and the statements a dump may hold."""

    def __init__(self, graph: Graph, lines: list[str], file: str | os.PathLike[str] | None) -> None:
        self.graph = graph
        self.lines = lines
        self.file = file
        self.variables: dict[str, Any] = {}

    def run(self, statements: list[ast.stmt]) -> None:
        done = 0
        for statement in statements:
            self.comments(done, statement.lineno - 1)
            done = statement.end_lineno or statement.lineno
            try:
                self.statement(statement)
            except SerializationError as error:
                self.fail(error, error.position or f"line {statement.lineno}")
            except Exception as error:  # a builder refuses: wrong arguments, unknown operator
                self.fail(error, f"line {statement.lineno}")
        self.comments(done, len(self.lines))

    def fail(self, error: Exception, position: object) -> NoReturn:
        what = str(error).partition("\n")[0] or type(error).__name__
        raise SerializationError(what, file=self.file, position=position) from error

    def comments(self, start: int, end: int) -> None:
        """Keep what the comments say: source and FX node of what follows."""
        found = [line for line in self.lines[start:end] if line.startswith("#")]
        for line in found:
            if line == HEADER.splitlines()[0]:
                continue
            before = self.graph.origin or Origin()
            if line.startswith("# File "):
                self.graph.journal.append("")
                self.graph.origin = Origin(file=line)
            elif line.startswith("## FX Code: "):
                fx_name = line.removeprefix("## FX Code: ").split(" ")[0].rstrip(":")
                self.graph.origin = Origin(before.file, line, fx_name)
            elif before.fx:
                self.graph.origin = Origin(before.file, f"{before.fx}\n{line}", before.fx_name)
            self.graph.journal.append(line)

    def statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ImportFrom) and ast.unparse(statement) in _IMPORTS:
            return
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self.assign(statement.targets[0], self.value(statement.value))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self.graph_call(statement.value)
        else:
            raise refusal(statement)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, (ast.List, ast.Tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(target.elts):
                raise SerializationError(f"{ast.unparse(target)} does not fit the call's results")
            for one, member in zip(target.elts, value, strict=True):
                self.assign(one, member)
        elif isinstance(target, ast.Attribute) and target.attr in _FACTS:
            described = self.value(target.value)
            if not isinstance(described, Value) or not isinstance(value, _FACTS[target.attr]):
                raise refusal(target)
            setattr(described, target.attr, value)
        else:
            raise refusal(target)

    def graph_call(self, call: ast.Call) -> None:
        """`get_default_ge_graph().<method>(...)`, for the three methods that dumps use."""
        root, path = _path(call.func)
        allowed: dict[str, Callable[..., None]] = {
            "control": self.graph.control,
            "set_attr": self.graph.set_attr,
            "attrs.update": self.graph.attrs.update,
        }
        if ast.unparse(root) != "get_default_ge_graph()" or ".".join(path) not in allowed:
            raise refusal(call)
        args, kwargs = self.arguments(call)
        named = all(isinstance(a, str) for a in args)
        if not named or not all(isinstance(v, Attr) for v in kwargs.values()):
            raise refusal(call)
        allowed[".".join(path)](*args, **kwargs)

    def value(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Name):
            if tree.id not in self.variables:
                raise SerializationError(f"{tree.id} is not defined before this line")
            return self.variables[tree.id]
        if isinstance(tree, ast.List):
            return [self.value(item) for item in tree.elts]
        if isinstance(tree, ast.Tuple):
            return tuple(self.value(item) for item in tree.elts)
        if isinstance(tree, ast.Dict):
            return self.mapping(tree)
        if isinstance(tree, ast.Call):
            root, path = _path(tree.func)
            if isinstance(root, ast.Name) and root.id == "ge":
                args, kwargs = self.arguments(tree)
                return _function(path, tree)(*args, **kwargs)
        return evaluate(tree)

    def mapping(self, tree: ast.Dict) -> dict[str, Any]:
        found = {}
        for key, value in zip(tree.keys, tree.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise refusal(tree)
            found[key.value] = self.value(value)
        return found

    def arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        kwargs: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is not None:
                kwargs[word.arg] = self.value(word.value)
            elif isinstance(word.value, ast.Dict):  # names that are Python keywords
                kwargs.update(self.mapping(word.value))
            else:
                raise refusal(call)
        return [self.value(arg) for arg in call.args], kwargs


def _path(function: ast.expr) -> tuple[ast.expr, list[str]]:
    """What stands before the dots, and the words after it: `ge.attr.Int` is (ge, [attr, Int])."""
    words: list[str] = []
    while isinstance(function, ast.Attribute):
        words.insert(0, function.attr)
        function = function.value
    return function, words


def _function(path: list[str], call: ast.Call) -> Callable[..., Any]:
    """What a dotted name below `ge` stands for: a builder, an attribute, or one of two helpers."""
    if len(path) == 2 and path[0] == "attr" and path[1] in ("Attr", *KINDS):
        kind = path[1]
        return Attr if kind == "Attr" else lambda value: Attr(kind, value)
    named: dict[tuple[str, ...], Callable[..., Any]] = {
        ("custom_op",): custom_op,
        ("Data",): _data,
        ("Cast",): Cast,
        ("Clone",): Clone,
        ("build", "const_tensor"): const_tensor,
        ("shapes", "symbol"): symbol,
    }
    if tuple(path) in named:
        return named[tuple(path)]
    if len(path) != 1 or path[0].startswith("_"):
        raise refusal(call)
    return builder(path[0])


def _data(**description: Any) -> Value:
    value = Data(**description)
    value.content = default_content(value)
    return value
