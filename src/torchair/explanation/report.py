"""What `torchair.explain` tells, for programs and for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchair.explanation.machine import Rates
from torchair.explanation.units import UnitRow


@dataclass(frozen=True)
class Break:
    """A place where Dynamo ended a graph."""

    reason: str
    line: str
    count: int = 1


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again."""

    function: str
    reason: str


@dataclass(frozen=True)
class GraphRow:
    """One compiled graph."""

    name: str
    phase: str
    nodes: int  # of the FX graph
    dynamic: bool
    calls: int
    seconds: float  # of its quickest call
    generic: dict[str, int]  # operators without a converter: how often
    units: list[UnitRow] = field(default_factory=list)
    note: str = ""

    @property
    def kernels(self) -> float:
        """Seconds of all its steps, each run by itself."""
        return sum(u.seconds for u in self.units)


@dataclass(frozen=True)
class Times:
    """Where the time of a call goes, in seconds."""

    call: float
    graphs: float  # inside of our graphs
    kernels: float

    @property
    def dynamo(self) -> float:
        """Guards, AOTAutograd's wrapper and what Python does between graphs."""
        return max(self.call - self.graphs, 0.0)

    @property
    def ours(self) -> float:
        """Python of ours around the kernels."""
        return max(self.graphs - self.kernels, 0.0)


@dataclass
class Explanation:
    """What became of a model."""

    graphs: list[GraphRow] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    times: Times | None = None
    rates: Rates | None = None

    @property
    def generic(self) -> dict[str, int]:
        """Operators without a converter, of all graphs."""
        found: dict[str, int] = {}
        for graph in self.graphs:
            for name, count in graph.generic.items():
                found[name] = found.get(name, 0) + count
        return found

    def __str__(self) -> str:
        lines = [f"graphs {len(self.graphs)}, breaks {sum(b.count for b in self.breaks)}, "
                 f"recompiles {len(self.recompiles)}"]  # fmt: skip
        lines += [f"  break x{b.count} at {b.line}: {b.reason}" for b in self.breaks]
        lines += [f"  {r.function} compiled again: {r.reason}" for r in self.recompiles]
        lines += [f"  {n} x {name} without a converter" for name, n in sorted(self.generic.items())]
        if self.times is not None:
            lines += _time_lines(self.times)
        for graph in self.graphs:
            lines += _graph_lines(graph, self.rates)
        return "\n".join(lines)


def _time_lines(times: Times) -> list[str]:
    whole = times.call or 1.0
    shares = (("Dynamo", times.dynamo), ("our Python", times.ours), ("kernels", times.kernels))
    text = ", ".join(f"{name} {_micro(s)} ({s / whole:.0%})" for name, s in shares)
    return [f"a call takes {_micro(times.call)}: {text}"]


def _graph_lines(graph: GraphRow, rates: Rates | None) -> list[str]:
    sizes = "varying sizes" if graph.dynamic else "fixed sizes"
    steps = f"{len(graph.units)} steps" if graph.units else graph.note
    head = f"{graph.name}, {graph.phase}: {graph.nodes} nodes, {sizes}, {graph.calls} calls"
    if graph.calls:
        head += f", at best {_micro(graph.seconds)}"
    return [f"{head}, {steps}", *(f"  {_unit_line(u, rates)}" for u in graph.units)]


def _unit_line(unit: UnitRow, rates: Rates | None) -> str:
    text = f"{unit.kind:6s} {unit.name:40s} {_micro(unit.seconds):>9s}"
    text += f" {_amount(unit.moved)}B {_amount(unit.operations)}op"
    if rates is not None and unit.seconds:
        text += f" {unit.share(rates):5.0%} of the machine"
    return f"{text}  ({unit.why})" if unit.why else text


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def _amount(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:5.3g} {unit}"
        number /= 1000
    return f"{number:5.3g} T"
