"""Where in the user's program a node of an FX graph came from, and the comment lines that tie GE
nodes to that and to the FX graph.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchair.errors import without_marks
from torchair.ge.graph import Origin


def last_frame(node: fx.Node, ours: Sequence[str] = ()) -> str | None:
    """The innermost frame of a node's stack trace in one line, None when tracing left no trace.
    Frames of files that begin with one of `ours` count only if there are no others."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return None
    frames = trace.split(" File ")
    theirs = [f for f in frames[1:] if not f.startswith(tuple(ours))]
    return str((theirs or frames)[-1]).replace("\n", "")


def source_line(node: fx.Node) -> str:
    """File, line and text for messages, without the marks under the text; empty if unknown."""
    return without_marks(last_frame(node) or "")


_OURS = tuple(f'"{Path(__file__).parents[1] / package}' for package in ("ops", "scope"))


def origin_of(node: fx.Node) -> Origin | None:
    """Source position and FX text of a node; None when tracing left no stack trace. What the user
    called counts, not where we go on."""
    where = last_frame(node, _OURS)
    if where is None:
        return None
    return Origin(f"# File {where}", f"## FX Code: {fx_text(node)}", node.name, str(node.target))


def fx_text(node: fx.Node) -> str:
    """`name: type[dims]device = target(arguments)`."""
    target = node._pretty_print_target(node.target)
    args = [_argument(a) for a in node.args]
    args += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{_annotated(node)} = {target}({', '.join(args)})"


def _argument(x: Any) -> str:
    return _annotated(x) if isinstance(x, fx.Node) else str(x)


def _annotated(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        dims = ", ".join(str(d) for d in value.shape)
        return f"{node.name}: {value.dtype}[{dims}]{value.device}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f'{node.name}: "Sym({value})"'
    return node.name


def module_path(node: fx.Node) -> str:
    """Names of the modules that a node was traced in, as `layers.0.mlp`; "" outside of all."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.partition("].")[2] if path.startswith("L[") else path


def module_stack(node: fx.Node) -> str:
    """Modules that a node was traced in, from the outside in, as the original prints Dynamo's
    notes: names, paths and classes; "" outside of all."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    named = {re.sub(r"\W", "_", str(path)): (path, kind) for path, kind in stack}
    return str(named) if named else ""


_FRAME = re.compile(r'"([^"]+)", line (\d+), in (\w+)')
_AROUND = ("wrapper", "wrapped", "inner", "wrapped_func", "_fn")  # usual names in decorators


def model_name(nodes: Iterable[fx.Node]) -> str:
    """The class whose method a graph was traced from, or the function; "" if no node tells. That
    is the outermost frame which is none of a decorator."""
    for node in nodes:
        found = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
        frames = [(_class_at(file, int(line)), name) for file, line, name in found]
        for kind, name in frames:
            if kind or name not in _AROUND:
                return kind or name
    return ""


def _class_at(file: str, line: int) -> str:
    """The innermost class that a line is in; "" outside of all, and where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ""
    classes = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    around = [n for n in classes if n.lineno <= line <= (n.end_lineno or n.lineno)]
    return max(around, key=lambda n: n.lineno).name if around else ""
