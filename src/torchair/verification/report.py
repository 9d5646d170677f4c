"""What `torchair.verify` found, for programs and for people, and programs that show it again."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchair import markup
from torchair.store import atomic_write
from torchair.torch_private.dispatch import OpOverload
from torchair.verification.forms import Wrong


class Author(Enum):
    """Who can make an error, in the order of the pipeline."""

    FX_PASS = "FX pass"
    CAPTURE_PASS = "FX pass of the mode that captures"
    CONVERTER = "converter"
    GE_PASS = "GE pass"
    RULE = "rewrite rule"
    KERNEL = "kernel"
    PROGRAM = "program"
    REPLAY = "captured replay"
    CALL = "later call"


@dataclass(frozen=True, repr=False)
class Finding:
    """An error that rounding does not explain, and who made it."""

    stage: Author
    culprit: str  # name of the pass, the rule, the torch operator, or the nodes of the kernel
    node: str  # FX node whose value is wrong first
    target: str  # its operator
    line: str  # of the model
    what: str  # "", or the result or argument of the call that is wrong
    reason: str  # by how much
    error: float
    allowed: float
    call: int  # of the graph, from 0
    script: Path | None = None  # that shows the error again

    def __repr__(self) -> str:
        return f"<{self.target} ({self.node}) is wrong, made by {self.stage.value} {self.culprit}>"

    def __str__(self) -> str:
        of = f"{self.what}, " if self.what else ""
        lines = [
            f"{self.target} ({of}{self.node}) is wrong in call {self.call}: {self.reason}",
            f"  made by   {self.stage.value} {self.culprit}",
            f"  source    {self.line or 'unknown'}",
        ]
        if self.script is not None:
            lines.append(f"  try       python {self.script}")
        return "\n".join(lines)


@dataclass(repr=False)
class GraphReport:
    """One compiled graph."""

    name: str
    nodes: int
    calls: int = 0
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    unchecked: int = 0  # calls that could not be checked

    def __repr__(self) -> str:
        return f"<{self.name}, {self.nodes} nodes, {self.calls} calls, {self.verdict}>"

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.finding is not None:
            return "wrong"
        if self.unchecked:
            return "not checked"
        return "right" if self.calls else "not called"


@dataclass(repr=False)
class Report:
    """All graphs of a model or a program. True if there are any, all of their calls were checked,
    and no error was found."""

    graphs: list[GraphReport] = field(default_factory=list)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.graphs) and not self.findings and not self.unchecked

    @property
    def unchecked(self) -> int:
        """Calls that could not be checked; the notes of their graphs say why."""
        return sum(g.unchecked for g in self.graphs)

    @property
    def findings(self) -> list[Finding]:
        """The errors, at most one for each graph."""
        return [g.finding for g in self.graphs if g.finding is not None]

    @property
    def _title(self) -> str:
        """The outcome in a line."""
        if not self.graphs:
            return "torchair verify: nothing was compiled"
        calls = sum(g.calls for g in self.graphs)
        wrong = f"{len(self.findings)} wrong, {self.unchecked} not checked"
        outcome = "every result is as good as eager's" if self else wrong
        return f"torchair verify: {len(self.graphs)} graphs, {calls} calls: {outcome}"

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: a table of graphs, findings and notes."""
        rows = [(g.name, g.nodes, g.calls, g.verdict) for g in self.graphs]
        found = [f"{g.name}: {g.finding}" for g in self.graphs if g.finding is not None]
        notes = [f"{g.name}: {note}" for g in self.graphs for note in g.notes]
        shown = markup.table(("graph", "nodes", "calls", "verdict"), rows) if rows else ""
        return markup.titled(self._title, shown, markup.lines([*found, *notes]))

    def __str__(self) -> str:
        lines = [self._title]
        for graph in self.graphs:
            lines.append(f"{graph.name}: {graph.nodes} nodes, {graph.calls} calls, {graph.verdict}")
            lines += [f"  {note}" for note in graph.notes]
            if graph.finding is not None:
                lines += [f"  {line}" for line in str(graph.finding).splitlines()]
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("graph", "nodes", "calls", "verdict", title="torchair verify")
        for g in self.graphs:
            style = "red" if g.finding is not None else "green"
            table.add_row(g.name, str(g.nodes), str(g.calls), Text(g.verdict, style=style))
        texts = [Text(f"{g.name}: {g.finding}") for g in self.graphs if g.finding is not None]
        notes = [Text(f"{g.name}: {note}") for g in self.graphs for note in g.notes]
        return Group(table, *texts, *notes)


# ---- a short program: the nodes around an error, and their inputs in a file ----


_PROGRAM = '''"""{title}"""

import torch
import torchair
from pathlib import Path

def model({names}):
{body}
    return {result}

inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
print(torchair.verify(model, *inputs, mode={mode!r}))
'''


def write_script(wrong: Wrong, mode: str, title: str, folder: Path, stem: str) -> Path | None:
    """Write program and inputs, and give the program's path; None if an argument of a node cannot
    be written down."""
    names = [name for name, _ in wrong.inputs]
    values = [value for _, value in wrong.inputs]
    if not all(isinstance(v, Tensor | int | float | bool) for v in values) or not wrong.region:
        return None
    try:
        body = [f"    {n.name} = {_call(n)}" for n in wrong.region]
    except ValueError:
        return None
    text = _PROGRAM.format(
        title=title.replace('"', "'").replace("\\", "/"),
        names=", ".join(names),
        body="\n".join(body),
        result=wrong.node.name,
        mode=mode,
    )
    name = re.sub(r"\W", "_", stem)
    file = io.BytesIO()
    torch.save([_plain(v) for v in values], file)
    atomic_write(folder / f"{name}.pt", file.getvalue())
    return atomic_write(folder / f"{name}.py", text.encode())


def _plain(value: Any) -> Any:
    """A tensor with the memory that it shows only, on the host if torch reads no other there."""
    if not isinstance(value, Tensor):
        return value
    kept = value.detach()
    return kept.clone() if kept.device.type in ("cpu", "cuda") else kept.cpu()


def _call(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        space, _, name = target._schema.name.partition("::")
        called = f"torch.ops.{space}.{name}.{target._overloadname}"
    elif getattr(target, "__module__", "") in ("_operator", "operator"):
        if target.__name__ == "getitem":
            return f"{_text(node.args[0])}[{_text(node.args[1])}]"
        called = f"__import__('operator').{target.__name__}"
    else:
        raise ValueError(f"{target} has no name")
    args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    return f"{called}({', '.join(args)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if abs(value) < float("inf") else f"float('{value}')"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    raise ValueError(f"{value!r} cannot be written down")
