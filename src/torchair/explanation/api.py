"""`torchair.explain`: what became of a model, and where the time of a call goes."""

from __future__ import annotations

import linecache
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchair import markup
from torchair.backend import config_in, get_npu_backend
from torchair.concrete.acl import AclConcreteGraph, own_arguments
from torchair.configs.compiler_config import CompilerConfig
from torchair.devices.base import GraphCall, device_of, engine_graph
from torchair.explanation.units import MachineRates, UnitRow, rates, unit_rows
from torchair.fallbacks import Fallback, FallbackRecord, note, since, total
from torchair.runner import Compilation, GmRunner, observed
from torchair.torch_private import dynamo

_CALLS = 5  # that are timed; the quickest tells where time goes


def explain(
    model: Callable[..., Any],
    *,
    config: CompilerConfig | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """A function that compiles the model, calls it as it is called, and tells about it:
    `torchair.explain(model)(*inputs)`."""
    backend = get_npu_backend(compiler_config=config_in(mode, config))
    plain = getattr(model, "_orig_mod", model)

    def run(*args: Any, **keywords: Any) -> Explanation:
        compiled = torch.compile(plain, backend=backend, dynamic=dynamic)
        with torch.no_grad():
            collector = Collector()
            with observed(collector):
                for _ in range(2):  # the second call takes the fast path
                    compiled(*args, **keywords)
                collector.forget_times()
                calls = [_timed(compiled, args, keywords, collector) for _ in range(_CALLS)]
            return collector.explanation(*min(calls))

    return run


def _timed(
    model: Callable[..., Any], args: Any, keywords: Any, collector: Collector
) -> tuple[float, float]:
    """Seconds of a call, and of its graphs."""
    before, begun = collector.seconds, time.perf_counter()
    model(*args, **keywords)
    _wait(collector.device)
    return time.perf_counter() - begun, collector.seconds - before


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


@dataclass(frozen=True, repr=False)
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
    super_kernels: list[str] = field(default_factory=list)
    """Launches of a GPU that are one persistent kernel: how many, and its items and counters."""

    def __repr__(self) -> str:
        return f"<{self.name}, {self.phase}, {self.nodes} nodes, {len(self.units)} steps>"

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


@dataclass(repr=False)
class Explanation:
    """What became of a model. Prints as a text, and a notebook shows tables."""

    graphs: list[GraphRow] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    times: Times | None = None
    rates: MachineRates | None = None
    fallbacks: dict[FallbackRecord, int] = field(default_factory=dict)
    """What was done in a lesser way than it should have been, and how often."""

    @property
    def generic(self) -> dict[str, int]:
        """Operators without a converter, of all graphs."""
        return dict(sum((Counter(g.generic) for g in self.graphs), Counter[str]()))

    def __repr__(self) -> str:
        call = "" if self.times is None else f", a call takes {_micro(self.times.call)}"
        return f"<Explanation: {self._title}{call}>"

    def __str__(self) -> str:
        lines = [self._title, *self._notes]
        for graph in self.graphs:
            lines += _graph_lines(graph, self.rates)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows: notes, and a table of steps for each graph."""
        tables = [
            markup.folded(
                _graph_title(g), markup.table(_HEAD, _cells(g.units, self.rates), texts=2)
            )
            for g in self.graphs
        ]
        return markup.titled(self._title, markup.lines(self._notes), *tables)

    @property
    def _title(self) -> str:
        breaks = sum(b.count for b in self.breaks)
        return f"graphs {len(self.graphs)}, breaks {breaks}, recompiles {len(self.recompiles)}"

    @property
    def _notes(self) -> list[str]:
        """All that is not about one graph."""
        lines = [f"  break x{b.count} at {b.line}: {b.reason}" for b in self.breaks]
        lines += [f"  {r.function} compiled again: {r.reason}" for r in self.recompiles]
        lines += [f"  {n} x {name} without a converter" for name, n in sorted(self.generic.items())]
        lines += [
            f"  fallback x{n} {r.kind.name.lower()}: {r}"
            for r, n in self.fallbacks.items()
            if r.kind is not Fallback.GENERIC_NODE  # which has the lines above
        ]
        if self.times is not None:
            lines += _time_lines(self.times)
        if self.rates is not None and self.rates.loaded:
            lines.append(
                f"other programs kept {self.rates.others:.1f} cores busy when this machine was "
                "measured: it can do more"
            )
        return lines


def _time_lines(times: Times) -> list[str]:
    whole = times.call or 1.0
    shares = (("Dynamo", times.dynamo), ("our Python", times.ours), ("kernels", times.kernels))
    text = ", ".join(f"{name} {_micro(s)} ({s / whole:.0%})" for name, s in shares)
    return [f"a call takes {_micro(times.call)}: {text}"]


_HEAD = ("", "step", "time", "bytes", "operations", "of the machine", "ended by")


def _cells(units: Sequence[UnitRow], rates: MachineRates | None) -> Iterator[Sequence[object]]:
    """Rows of a table of steps."""
    for u in units:
        share = f"{u.share(rates):.0%}" if rates is not None and u.seconds else ""
        moved, operations = f"{_amount(u.moved)}B", _amount(u.operations)
        yield u.kind, u.name, _micro(u.seconds), moved, operations, share, u.why


def _graph_title(graph: GraphRow) -> str:
    sizes = "varying sizes" if graph.dynamic else "fixed sizes"
    steps = f"{len(graph.units)} steps" if graph.units else graph.note
    title = f"{graph.name}, {graph.phase}: {graph.nodes} nodes, {sizes}, {graph.calls} calls"
    if graph.calls:
        title += f", at best {_micro(graph.seconds)}"
    return "; ".join([f"{title}, {steps}", *graph.super_kernels])


def _graph_lines(graph: GraphRow, rates: MachineRates | None) -> list[str]:
    return [_graph_title(graph), *(f"  {_unit_line(u, rates)}" for u in graph.units)]


def _unit_line(unit: UnitRow, rates: MachineRates | None) -> str:
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


def _wait(device: str) -> None:
    """Until a GPU has done what it was asked for; not while it records."""
    if device.startswith("cuda") and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


class _TimedGraph:
    """A graph whose calls are timed."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.calls, self.seconds, self.best = 0, 0.0, float("inf")
        self.args: list[Any] = []  # of the last call

    def entry(self, args: Sequence[Any]) -> Any:
        """Run the graph."""
        self.args = list(args)
        device = device_of(args).name
        _wait(device)
        begun = time.perf_counter()
        results = self.compilation.runner.run(args)
        _wait(device)
        spent = time.perf_counter() - begun
        self.seconds, self.best = self.seconds + spent, min(self.best, spent)
        self.calls += 1
        return results


def engine_call(compilation: Compilation) -> GraphCall | None:
    """The graph in the engine; None where it is recorded call by call, or not compiled."""
    made: Any = compilation.made
    if isinstance(made, AclConcreteGraph):
        made = (made.storable() or (None,))[0]
    return engine_graph(made)


class Collector:
    """Everything about the graphs that are compiled meanwhile."""

    def __init__(self) -> None:
        utils = dynamo.utils
        self._dynamo, self._breaks = utils, dynamo.output_graph.graph_break_reasons
        self._first_break = len(self._breaks)
        self._metrics_before = utils.get_compilation_metrics()  # Dynamo keeps the last 64
        self._fallbacks_before = total()
        self.graphs: list[_TimedGraph] = []

    def __call__(self, compilation: Compilation) -> GmRunner:
        timed = _TimedGraph(compilation)
        self.graphs.append(timed)
        return GmRunner(timed, compilation.runner.trace)

    def forget_times(self) -> None:
        """Calls so far were for compiling."""
        for graph in self.graphs:
            graph.calls, graph.seconds, graph.best = 0, 0.0, float("inf")

    @property
    def seconds(self) -> float:
        """Time inside of graphs so far."""
        return sum(g.seconds for g in self.graphs)

    def explanation(self, call: float | None = None, inside: float = 0.0) -> Explanation:
        """What is known by now; `call` are the seconds of one call of the model, of which it was
        `inside` of graphs."""
        rows = [self._row(k, graph) for k, graph in enumerate(self.graphs)]
        found = dict(since(self._fallbacks_before))
        made = Explanation(rows, self._break_rows(), self._recompiles(), fallbacks=found)
        units = [u for r in rows for u in r.units]
        if any(u.seconds for u in units):
            made.rates = rates(self.device, units)
        if call is not None:
            calls = max((r.calls for r in rows), default=1) or 1
            kernels = sum(r.kernels * r.calls for r in rows) / calls
            made.times = Times(call, inside, min(kernels, inside))
        return made

    @property
    def device(self) -> str:
        """Where the graphs run."""
        return device_of(a for g in self.graphs for a in g.args).name

    def _row(self, number: int, timed: _TimedGraph) -> GraphRow:
        compilation, graph = timed.compilation, engine_call(timed.compilation)
        nodes = sum(n.op == "call_function" for n in compilation.gm.graph.nodes)
        dynamic = any(isinstance(x, torch.SymInt) for x in compilation.inputs)
        generic = dict(getattr(graph, "generic", {}))
        units, note = self._units(timed, graph)
        if graph is not None:
            dynamic = graph.graph.is_dynamic
        return GraphRow(
            f"graph {number + 1}",
            compilation.phase,
            nodes,
            dynamic,
            timed.calls,
            timed.best if timed.calls else 0.0,
            generic,
            units,
            note,
            self._super_kernels(timed, graph) if units else [],
        )

    def _super_kernels(self, timed: _TimedGraph, graph: GraphCall | None) -> list[str]:
        if graph is None:
            return []
        inputs = graph.collect(own_arguments(timed.compilation.gm, timed.args))
        return [str(k) for k in graph.session.variant_for(inputs).compiler.persistent]

    def _units(self, timed: _TimedGraph, graph: GraphCall | None) -> tuple[list[UnitRow], str]:
        if not timed.args:
            return [], "never called"
        if graph is None:
            return [], "recorded call by call"
        args = own_arguments(timed.compilation.gm, timed.args)
        try:
            with torch.no_grad():
                return unit_rows(graph, args, self.device), ""
        except Exception as e:  # an explanation must not end the program that it is about
            note(Fallback.INSPECTION, "steps of a graph could not be timed", e)
            return [], f"its steps could not be timed: {e}"

    def _break_rows(self) -> list[Break]:
        found = Counter(
            (_first_line(b.reason), _place(b.user_stack)) for b in self._breaks[self._first_break :]
        )
        return [Break(reason, line, count) for (reason, line), count in found.items()]

    def _recompiles(self) -> list[Recompile]:
        before = {id(m) for m in self._metrics_before}
        return [
            Recompile(f"{m.co_name} ({m.co_filename}:{m.co_firstlineno})", _first_line(text))
            for m in self._dynamo.get_compilation_metrics()
            if id(m) not in before and (text := m.recompile_reason)
        ]


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""


def _place(stack: Sequence[Any]) -> str:
    """File, line and text of the innermost frame of the user."""
    if not stack:
        return "unknown line"
    frame = stack[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} {text}".rstrip()
