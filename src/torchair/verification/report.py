"""What `torchair.verify` found, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Stage(Enum):
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


@dataclass(frozen=True)
class Finding:
    """An error that rounding does not explain, and who made it."""

    stage: Stage
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


@dataclass
class GraphReport:
    """One compiled graph."""

    name: str
    nodes: int
    calls: int = 0
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    unchecked: int = 0  # calls that could not be checked

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.finding is not None:
            return "wrong"
        if self.unchecked:
            return "not checked"
        return "right" if self.calls else "not called"


@dataclass
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

    def __str__(self) -> str:
        calls = sum(g.calls for g in self.graphs)
        count = f"{len(self.graphs)} graphs, {calls} calls"
        if not self.graphs:
            return "torchair verify: nothing was compiled"
        wrong = f"{len(self.findings)} wrong, {self.unchecked} not checked"
        head = "every result is as good as eager's" if self else wrong
        lines = [f"torchair verify: {count}: {head}"]
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
