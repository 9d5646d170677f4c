"""The `py` form: a graph as a Python program that rebuilds it.

`original_text` prints the builder calls as they were made, `canonical_text` prints any graph node
by node. `load` reads both: a dump is a program, but it may come from anywhere, so it is never
executed; the syntax tree is walked, and builders are called, and nothing else.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from torchair.errors import SerializationError
from torchair.ge import custom_op
from torchair.ge.attrs import KINDS, Attr
from torchair.ge.build import Clone, Data, builder, const_tensor
from torchair.ge.dtypes import torch_to_ge
from torchair.ge.graph import INPUTS, BuilderCall, Graph, Infer, Node, Origin, Value, topological
from torchair.ge.shapes import on_wire, symbol
from torchair.serde import literals
from torchair.serde.literals import quoted, refusal
from torchair.serde.proto import default_content
from torchair.store import FilePath
from torchair.torch_private.fake import unset_fake_temporarily

__all__ = ["canonical_text", "load", "original_text"]

_GRAPH = "get_default_ge_graph()"


@unset_fake_temporarily()
def original_text(graph: Graph) -> str:
    """The program of the builder calls that made this graph, in the order they were made.

    Ends with what calls do not show: control edges and attributes added to nodes later.
    """
    program = _DumpProgram(graph)
    for entry in graph.journal:
        if isinstance(entry, str):
            program.comment(entry)
        else:
            program.call(entry)
    program.left_over()
    program.tail()
    return program.text()


@unset_fake_temporarily()
def canonical_text(graph: Graph) -> str:
    """The program of any graph, one line a node; constants stand at their uses."""
    program = _DumpProgram(graph)
    order = topological(graph.nodes, graph.name)
    # producers first; the NetOutput, which nothing reads, last
    for node in sorted(order, key=lambda n: n.type == "NetOutput" and not n.control_users):
        if node.type != "Const":
            program.origin(node)
            program.node(node)
    program.tail()
    program.graph_attrs()
    return program.text()


class _DumpProgram:
    """Lines of one dump, with the variables defined so far and what the lines have shown."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.used: set[str] = set()
        self.seen: set[str] = set()  # comment texts
        self.attrs: dict[Node, dict[str, Any]] = {}  # printed nodes, and the attributes shown
        self.control: dict[Node, set[Node]] = {}
        self.taken: set[str] = set()  # node names after running the lines so far
        self.counts: dict[str, int] = {}

    def text(self) -> str:
        return HEADER + "\n" + "".join(f"{line}\n" for line in self.lines)

    # Arguments ------------------------------------------------------------------------------

    def variable(self, value: Value) -> str:
        """The variable of a value: its edge text as an identifier, once and for all."""
        if value not in self.names:
            name = re.sub(r"[^0-9A-Za-z_]", "_", value.edge)
            name = f"_{name}" if name[0].isdigit() else name
            while name in self.used:
                name += "_"
            self.used.add(name)
            self.names[value] = name
        return self.names[value]

    def keywords(self, arguments: dict[str, Any]) -> list[str]:
        return [_keyword(k, literals.literal(v, self.variable)) for k, v in arguments.items()]

    def results(self, result: Any) -> str:
        """Left side of a call: a name, `[a, b]`, `[a, b], c` or `_`."""
        if result is None:
            return "_"
        if isinstance(result, Value):
            return self.variable(result)
        members = [self.results(r) for r in result]
        mixed = isinstance(result, tuple) and any(isinstance(r, (list, tuple)) for r in result)
        return ", ".join(members) if mixed else "[" + ", ".join(members) + "]"

    def line(self, call: BuilderCall, node: Node | None, shown: dict[str, Any]) -> None:
        """A call, which makes that node and shows these attributes of it."""
        args = [literals.literal(a, self.variable) for a in call.args] + self.keywords(call.kwargs)
        self.lines.append(f"{self.results(call.result)} = ge.{call.builder}({', '.join(args)})")
        if node is not None:
            self.taken.add(node.name)
            self.attrs[node] = shown
            self.control[node] = {v.node for v in _values(call.kwargs.get("dependencies"))}

    # Journal --------------------------------------------------------------------------------

    def comment(self, text: str) -> None:
        for line in text.replace("\0", "").splitlines() or [""]:
            self.lines.append(line if not line or line.startswith("#") else f"# {line}")

    def call(self, call: BuilderCall) -> None:
        """One remembered builder call, as it was made."""
        node = self.called(call)
        if call.builder == "NetOutput":
            self.left_over()
        for value in _values([call.args, list(call.kwargs.values())]):
            self.define(value.node)
        # The node's name is said where the call said it, for single results, and where running the
        # line would not lead to the same name by itself.
        said = isinstance(call.result, Value) and "node_name" not in call.kwargs
        said = said or call.kwargs.get("node_name") is not None
        if node is not None and (said or not self.is_automatic(node)):
            call = replace(call, kwargs={**call.kwargs, "node_name": node.name})
        self.line(call, node, call.kwargs)

    def called(self, call: BuilderCall) -> Node | None:
        """The node a call made; one without results is found by its type."""
        made = next(_values(call.result), None)
        if made is not None:
            return made.node
        silent = (n for n in self.graph.nodes if n.type == call.builder and not n.outputs)
        return next((n for n in silent if n not in self.attrs), None)

    def is_automatic(self, node: Node) -> bool:
        """Whether the builder, not told a name, would choose this one; as Graph.unique_name."""
        count = self.counts.get(node.type, 0)
        while (name := f"{node.type}_{count}" if count else node.type) in self.taken:
            count += 1
        if name == node.name:
            self.counts[node.type] = count + 1
        return name == node.name

    def define(self, node: Node) -> None:
        """Print a node that no remembered call made (custom operators), with what it reads."""
        pending = [node]
        while pending:
            last = pending[-1]
            needed = [v.node for v in last.values() if not self.is_defined(v.node)]
            if needed:
                pending.append(needed[0])
                continue
            pending.pop()
            if not self.is_defined(last):
                self.node(last)

    def is_defined(self, node: Node) -> bool:
        return node.type == "Const" or node in self.attrs

    def left_over(self) -> None:
        """Nodes of the graph that no call made and no call read; they go before the NetOutput."""
        calls = [c for c in self.graph.journal if isinstance(c, BuilderCall)]
        made = {v.node for c in calls for v in _values(c.result)}
        missing = [n for n in self.graph.nodes if not self.is_defined(n) and n not in made]
        silent = {c.builder for c in calls if c.result is None}  # found by type when printed
        missing = [n for n in missing if n.outputs or n.type not in silent]
        gap = bool(missing) and self.lines[-1:] == [""]
        if gap:
            self.lines.pop()
        for node in missing:
            self.define(node)
        if gap:
            self.lines.append("")

    # Nodes ----------------------------------------------------------------------------------

    def origin(self, node: Node) -> None:
        """The source line once, and the FX line before the first node that came from it."""
        if node.origin is None:
            return
        file, fx = node.origin.file, node.origin.fx
        if file and file not in self.seen:
            self.comment("")
            self.comment(file)
        if fx and fx not in self.seen:
            self.comment(fx)
        self.seen |= {file, fx}

    def node(self, node: Node) -> None:
        """One line for a node, from what it is now."""
        call, shown = literals.form_of(node)
        if call.builder == "NetOutput" and self.lines:
            self.comment("")
        self.line(call, node, shown)
        if call.builder == "custom_op" and node.type in INPUTS:
            for value in node.outputs:
                self.facts(value)

    def facts(self, value: Value) -> None:
        """The description of a graph input that has no builder: nothing else says it."""
        name = self.variable(value)
        self.lines.append(f"{name}.dtype = {value.dtype}")
        if value.shape is not None:
            stem = f"{value.node.name}_{value.index}"
            named = [f"ge.shapes.symbol({quoted(f'{stem}_d{i}')})" for i in range(value.rank)]
            dims = [n if d < 0 else d for n, d in zip(named, on_wire(value.shape), strict=True)]
            self.lines.append(f"{name}.shape = ({''.join(f'{d}, ' for d in dims).rstrip()})")
        texts = {"layout": value.layout, "device_type": value.device_type}
        self.lines += [f"{name}.{key} = {quoted(text)}" for key, text in texts.items() if text]

    # Tail -----------------------------------------------------------------------------------

    def tail(self) -> None:
        """Control edges and attributes that the lines above do not show."""
        for node in self.attrs:
            if node.name not in self.graph or self.graph.node(node.name) is not node:
                continue  # removed since its call was remembered
            for before in node.control:
                if before in self.attrs and before not in self.control[node]:
                    names = f"{quoted(before.name)}, {quoted(node.name)}"
                    self.lines.append(f"{_GRAPH}.control({names})")
            hidden = {k: a for k, a in sorted(node.attrs.items()) if self.is_hidden(node, k, a)}
            if hidden:
                shown = ", ".join([quoted(node.name), *self.keywords(hidden)])
                self.lines.append(f"{_GRAPH}.set_attr({shown})")

    def is_hidden(self, node: Node, name: str, attr: Attr) -> bool:
        if name in literals.NOT_COMPARED:
            return False
        shown = self.attrs[node].get(name)
        if shown is None:
            return True
        if not isinstance(shown, Attr):
            try:
                code = isinstance(shown, torch.dtype)
                shown = Attr(attr.kind, torch_to_ge(shown) if code else shown)
            except (TypeError, ValueError, KeyError):
                return True
        return not literals.same_attr(shown, attr)

    def graph_attrs(self) -> None:
        attrs = {k: a for k, a in sorted(self.graph.attrs.items()) if k not in literals.INTERFACE}
        if attrs:
            self.lines.append(f"{_GRAPH}.attrs.update({', '.join(self.keywords(attrs))})")


def _keyword(name: str, text: str) -> str:
    if name.isidentifier() and name.isascii() and not keyword.iskeyword(name):
        return f"{name}={text}"
    return f"**{{{quoted(name)}: {text}}}"


def _values(arguments: Any) -> Iterator[Value]:
    """All values in nested lists and tuples."""
    if isinstance(arguments, Value):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for member in arguments:
            yield from _values(member)


# ---- reading ----


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
    text: str, infer: Infer | None = None, name: str = "", *, file: FilePath | None = None
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


@dataclass
class _Interpreter:
    """Variables of one dump and the statements a dump may hold."""

    graph: Graph
    lines: list[str]
    file: FilePath | None
    variables: dict[str, Any] = field(default_factory=dict)

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
        return literals.evaluate(tree)

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
